//! Requests whose answers come whole: nobody sees when they have been computed.

use super::*;
use crate::speed::Prefill;

fn whole(prompt: &PromptBlocks) -> RequestView<'_> {
    RequestView { answer: Answer::Whole, ..view(prompt) }
}

fn at(now_s: f64) -> Duration {
    NOW + Duration::from_secs_f64(now_s)
}

/// Of each worker: requests without a first token, those that decode, and what it owes at that time.
fn loads(decider: &Decider, fleet: &FleetSnapshot, now: Duration) -> Vec<(u32, u32, f64)> {
    let prompt = hashed("short");
    let explanation = decider.explain(fleet, &view(&prompt), now).unwrap();
    let of = |Explained { candidate: one, .. }: &Explained| {
        (one.load.prefilling, one.load.decoding(), one.queued_s)
    };
    explanation.candidates.iter().map(of).collect()
}

#[test]
fn answers_that_come_whole_release_their_prefill_at_its_predicted_end() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompts: Vec<_> = (0..6).map(|number| hashed(&format!("{number} goes on ").repeat(600))).collect();
    let mut decided: Vec<_> = prompts
        .iter()
        .map(|prompt| decider.decide(&fleet, &whole(prompt), Among::Untried(&[]), NOW).unwrap())
        .collect();
    let new_tokens = whole(&prompts[0]).prompt_tokens;
    let own_s = decider.prefill_speed(&fleet.workers()[0]).seconds(Prefill { new_tokens, cached_tokens: 0 });
    let fixed_s = decider.prefill_speed(&fleet.workers()[0]).fixed_s;
    let owed = loads(&decider, &fleet, NOW);
    assert!(owed.iter().all(|(prefilling, decoding, _)| (*prefilling, *decoding) == (3, 0)), "{owed:?}");
    let two_left = loads(&decider, &fleet, at(1.01 * own_s + fixed_s));
    for (prefilling, decoding, queued_s) in two_left {
        assert_eq!((prefilling, decoding), (2, 1));
        assert!((queued_s - 1.99 * own_s).abs() < 0.02 * own_s, "{queued_s} of {own_s} each");
    }
    assert_eq!(loads(&decider, &fleet, at(9.0)), [(0, 3, 0.0), (0, 3, 0.0)]);
    assert_eq!(fleet.workers()[0].load.read().prefill_tokens, 0);
    decided.iter_mut().for_each(|one| decider.whole_answer(&mut one.lease, at(10.0)));
    assert_eq!(loads(&decider, &fleet, at(10.0)), [(0, 3, 0.0), (0, 3, 0.0)]);
    drop(decided);
    assert_eq!(loads(&decider, &fleet, at(10.0)), [(0, 0, 0.0), (0, 0, 0.0)]);
}

#[test]
fn what_was_predicted_too_short_is_given_back_once() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    let prompts: Vec<_> = (0..4).map(|number| hashed(&format!("{number} goes on ").repeat(600))).collect();
    let decide =
        |prompt, now_s: f64| decider.decide(&fleet, &whole(prompt), Among::Untried(&[]), at(now_s)).unwrap();
    let (mut answered, mut streams_after_all, failed) =
        (decide(&prompts[0], 0.0), decide(&prompts[1], 0.0), decide(&prompts[2], 0.0));
    let mut last = decide(&prompts[3], 60.0);
    assert_eq!(fleet.workers()[0].load.own(), 4);
    assert_eq!(
        loads(&decider, &fleet, at(60.0))[0].0,
        1,
        "those before it should have been computed long ago"
    );
    decider.whole_answer(&mut answered.lease, at(70.0));
    decider.first_token(&mut streams_after_all.lease, at(70.0));
    decider.whole_answer(&mut last.lease, at(70.0));
    drop((answered, streams_after_all, failed, last));
    let load = fleet.workers()[0].load.read();
    assert_eq!((load.requests, load.prefilling, load.prefill_tokens), (0, 0, 0));
    assert_eq!(fleet.workers()[0].load.own(), 0);
}
