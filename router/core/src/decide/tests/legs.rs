//! Workers that compute prompts for those that generate.

use super::*;
use crate::worker::Role;

/// Two that generate, and two that compute prompts.
pub(super) fn divided() -> Arc<FleetSnapshot> {
    let spec = |name: &str, role| WorkerSpec {
        role,
        ..WorkerSpec::new(WorkerId::new(name), format!("http://{name}:8000"))
    };
    let mut fleet = Fleet::default();
    let roles =
        [("d0", Role::Generate), ("p0", Role::Prefill), ("d1", Role::Generate), ("p1", Role::Prefill)];
    fleet.reconcile(&roles.map(|(name, role)| spec(name, role)));
    let snapshot = fleet.snapshot();
    snapshot.workers().iter().for_each(|worker| assert!(worker.mark_up().is_some()));
    snapshot
}

fn on(leg: Leg, prompt: &PromptBlocks) -> RequestView<'_> {
    RequestView { leg, ..view(prompt) }
}

const ALL: Among<'static> = Among::Untried(&[]);

fn long(name: &str) -> PromptBlocks {
    hashed(&format!("{name}: {}", "a long story ".repeat(3_000)))
}

/// Sequences that decode at each of those that generate, for as long as their leases live.
fn decoding(decider: &Decider, fleet: &FleetSnapshot, count: usize) -> Vec<Decided> {
    let decode = |number| {
        let prompt = hashed(&format!("{number}"));
        let mut decided = decider.decide(fleet, &view(&prompt), ALL, NOW).unwrap();
        decided.lease.first_token();
        decided
    };
    (0..count).map(decode).collect()
}

#[test]
fn each_leg_has_its_own_workers() {
    for policy in ["prefix_aware", "round_robin", "consistent_hash", "sglang_cache_aware", "dynamo"] {
        let (fleet, decider) = (divided(), decider(policy));
        for number in 0..20 {
            let prompt = long(&number.to_string());
            for (leg, letter) in [(Leg::Whole, "d"), (Leg::Prefill, "p"), (Leg::Decode, "d")] {
                let decided = decider.decide(&fleet, &on(leg, &prompt), ALL, NOW).unwrap();
                assert!(decided.worker.id().as_str().starts_with(letter), "{policy}, {leg:?}");
            }
        }
    }
}

#[test]
fn who_is_down_is_told_of_the_role_that_was_asked() {
    let (fleet, decider) = (divided(), decider("prefix_aware"));
    let prompt = long("one");
    for worker in fleet.workers().iter().filter(|worker| worker.spec.role == Role::Prefill) {
        worker.mark_down();
    }
    let down = PickError::NoneUsable { prefill: true, down: 2, draining: 0, total: 2 };
    assert_eq!(decider.decide(&fleet, &on(Leg::Prefill, &prompt), ALL, NOW).unwrap_err(), down);
    assert!(decider.decide(&fleet, &on(Leg::Whole, &prompt), ALL, NOW).is_ok());
    assert!(!decider.splits(&fleet, &view(&prompt), ALL, NOW), "there is nobody for it");
}

#[test]
fn who_computes_prompts_keeps_no_answers() {
    let (fleet, decider) = (divided(), decider("prefix_aware"));
    let prompt = long("one");
    decider.answered(&fleet.workers()[0], 700);
    let expected = |leg| decider.explain(&fleet, &on(leg, &prompt), NOW).unwrap().answer_tokens;
    assert_eq!([Leg::Whole, Leg::Prefill, Leg::Decode].map(expected), [700.0, 0.0, 700.0]);
}

#[test]
fn what_another_computes_is_not_owed_where_it_goes_on() {
    let (fleet, decider) = (divided(), decider("prefix_aware"));
    let prompt = long("one");
    let prefill = decider.decide(&fleet, &on(Leg::Prefill, &prompt), ALL, NOW).unwrap();
    let decode = decider.decide(&fleet, &on(Leg::Decode, &prompt), ALL, NOW).unwrap();
    let (first, second) = (prefill.worker.load.read(), decode.worker.load.read());
    assert_eq!((first.prefill_tokens as usize, second.prefill_tokens), (view(&prompt).prompt_tokens, 1));
    assert_eq!(first.context_tokens, second.context_tokens);
    drop(decode);
    drop(prefill);
    let again = decider.decide(&fleet, &on(Leg::Whole, &prompt), ALL, NOW).unwrap();
    assert!(again.hit_tokens > 9_000, "what came from another is cached as well");
}

#[test]
fn a_long_cold_prompt_pays_where_many_would_wait_for_it() {
    let (fleet, decider) = (divided(), decider("prefix_aware"));
    assert!(!decider.splits(&fleet, &view(&long("idle")), ALL, NOW), "nobody waits");
    let streams = decoding(&decider, &fleet, 60);
    assert!(decider.splits(&fleet, &view(&long("busy")), ALL, NOW));
    drop(streams);
    assert!(!decider.splits(&fleet, &view(&long("idle again")), ALL, NOW));
}

#[test]
fn a_short_prompt_pays_where_many_would_wait_for_its_step() {
    let (fleet, decider) = (divided(), decider("prefix_aware"));
    let short = hashed("a short one");
    assert!(!decider.splits(&fleet, &view(&short), ALL, NOW), "nobody waits");
    let few = decoding(&decider, &fleet, 4);
    assert!(!decider.splits(&fleet, &view(&short), ALL, NOW), "asking two takes as long");
    let many = decoding(&decider, &fleet, 60);
    assert!(decider.splits(&fleet, &view(&short), ALL, NOW));
    drop((few, many));
}

#[test]
fn what_a_second_of_those_who_decode_counts_is_the_operators_to_say() {
    let splits = |weight, streams| {
        let (fleet, decider) = (divided(), decider("prefix_aware").with_decode_weight(weight));
        let _streams = decoding(&decider, &fleet, streams);
        decider.splits(&fleet, &view(&long("one")), ALL, NOW)
    };
    assert!(!splits(0.0, 60), "they may wait");
    assert!(splits(1.0, 60));
}

#[test]
fn who_goes_on_where_its_history_is_stays_there() {
    let (fleet, decider) = (divided(), decider("prefix_aware"));
    let first = long("a conversation");
    drop(decider.decide(&fleet, &on(Leg::Decode, &first), ALL, NOW).unwrap());
    let _streams = decoding(&decider, &fleet, 60);
    let next = hashed(&format!("a conversation: {}and what then?", "a long story ".repeat(3_000)));
    assert!(!decider.splits(&fleet, &view(&next), ALL, NOW));
}

#[test]
fn prefill_workers_that_have_enough_to_do_get_no_more() {
    let (fleet, decider) = (divided(), decider("prefix_aware"));
    let _streams = decoding(&decider, &fleet, 60);
    let mut queued = Vec::new();
    while decider.splits(&fleet, &view(&long("next")), ALL, NOW) {
        let prompt = long(&format!("{}", queued.len()));
        queued.push(decider.decide(&fleet, &on(Leg::Prefill, &prompt), ALL, NOW).unwrap());
        assert!(queued.len() < 1_000);
    }
    assert!(!queued.is_empty());
}

#[test]
fn without_a_policy_that_reads_prompts_all_are_split_while_somebody_is_there_for_it() {
    let (fleet, decider) = (divided(), decider("least_load"));
    assert!(decider.splits(&fleet, &view(&hashed("short")), ALL, NOW));
    let tried: Vec<_> = fleet.workers().iter().map(|worker| worker.slot).collect();
    assert!(!decider.splits(&fleet, &view(&hashed("short")), Among::Untried(&tried), NOW));
    let aggregated = super::fleet(2);
    assert!(!decider.splits(&aggregated, &view(&long("one")), ALL, NOW));
}
