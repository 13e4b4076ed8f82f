//! Several models in one fleet: what is learned of one says nothing of another.

use super::*;

/// Workers with these models each.
fn serving(models: &[&[&str]]) -> Arc<FleetSnapshot> {
    let fleet = fleet(models.len());
    for (worker, models) in fleet.workers().iter().zip(models) {
        worker.set_models(models.iter().map(|&model| model.to_owned()).collect());
    }
    fleet
}

fn of<'a>(model: &'a str, prompt: &'a PromptBlocks) -> RequestView<'a> {
    RequestView { model: Some(model), ..view(prompt) }
}

/// So many requests for `model`, which take a second each.
fn flood(decider: &Decider, fleet: &FleetSnapshot, model: &str, count: u64) {
    let mut running = Vec::new();
    for number in 0..count {
        let prompt = hashed(&format!("everybody wants this {number} times ").repeat(100));
        let mut decided = decider.decide(fleet, &of(model, &prompt), Among::Untried(&[]), NOW).unwrap();
        decider.first_token(&mut decided.lease, NOW + Duration::from_secs(number));
        running.push(decided);
    }
}

fn costs(decider: &Decider, fleet: &FleetSnapshot, request: &RequestView<'_>) -> Vec<(f64, f64)> {
    let explanation = decider.explain(fleet, request, NOW).unwrap();
    explanation.candidates.iter().map(|one| (one.cost, one.candidate.own_s)).collect()
}

#[test]
fn a_flood_for_one_model_changes_no_costs_of_another() {
    let fleet = serving(&[&["a"], &["a"], &["b"], &["b", "b-adapter"]]);
    let decider = decider("prefix_aware");
    let prompt = hashed(&"a question of b's ".repeat(200));
    let _before = decider.decide(&fleet, &of("b", &prompt), Among::Untried(&[]), NOW).unwrap();
    let other = hashed(&"another question ".repeat(200));
    let quiet = costs(&decider, &fleet, &of("b", &other));
    flood(&decider, &fleet, "a", 300);
    for number in 0..300 {
        let name = format!("unheard-of-{number}");
        assert!(decider.decide(&fleet, &of(&name, &prompt), Among::Untried(&[]), NOW).is_err());
    }
    assert_eq!(costs(&decider, &fleet, &of("b", &other)), quiet);
    flood(&decider, &fleet, "b", 300);
    assert_ne!(costs(&decider, &fleet, &of("b", &other)), quiet);
}

#[test]
fn a_flood_for_one_model_takes_nothing_from_what_many_ask_of_another() {
    let fleet = serving(&[&["a"], &["b"], &["b"]]);
    let decider = decider("prefix_aware");
    let prompt = hashed(&"what everybody asks ".repeat(100));
    for number in 0..20 {
        let now = NOW + Duration::from_millis(300) * number;
        drop(decider.decide(&fleet, &of("b", &prompt), Among::Untried(&[]), now).unwrap());
    }
    let now = NOW + Duration::from_secs(6);
    let expected = || decider.explain(&fleet, &of("b", &prompt), now).unwrap().followers;
    let quiet = expected();
    assert!(quiet.requests > 10.0 && quiet.share > 0.9, "{quiet:?}");
    flood(&decider, &fleet, "a", 300);
    assert_eq!(expected(), quiet);
}

#[test]
fn answers_of_one_model_say_nothing_of_another() {
    let fleet = serving(&[&["a"], &["b"]]);
    let decider = decider("prefix_aware");
    let [a, b] = fleet.workers() else { panic!("there are two") };
    let prompt = hashed(&"a question ".repeat(100));
    let expected = |model| decider.explain(&fleet, &of(model, &prompt), NOW).unwrap().answer_tokens;
    assert_eq!(expected("a"), 0.0, "nothing is known yet");
    decider.answered(a, 700);
    decider.answered(b, 30);
    assert_eq!((expected("a"), expected("b")), (700.0, 30.0));
}

#[test]
fn an_engine_is_known_by_what_all_of_its_adapters_were_asked() {
    let fleet = serving(&[&["base"], &["base", "adapter"]]);
    let decider = decider("prefix_aware");
    let prompt = hashed(&"a question ".repeat(300));
    let quiet = costs(&decider, &fleet, &of("base", &prompt));
    flood(&decider, &fleet, "adapter", 100);
    let [never_asked, _] = costs(&decider, &fleet, &of("base", &prompt))[..] else { panic!("two serve it") };
    assert!(never_asked.1 > 5.0 * quiet[0].1, "the model is the same: {never_asked:?} of {quiet:?}");
    let (one, other) = (&fleet.workers()[0], &fleet.workers()[1]);
    assert_eq!(decider.prefill_speed(one), decider.prefill_speed(other));
    let parts = |model: &str| {
        let mut candidates = Candidates::default();
        let (request, hits) = (of(model, &prompt), PrefixHits::default());
        let eligible = Eligible::new(&fleet, &request, Among::Untried(&[]));
        let sought = Sought {
            request: &request,
            eligible: &eligible,
            moment: Moment::new(NOW, (&request, None), None),
            hits: &hits,
        };
        candidates.gather(&fleet, &sought, u32::MAX, &mut || 0.0);
        candidates.parts().map(|part| (part.of_candidates, part.of_pool)).collect::<Vec<_>>()
    };
    assert_eq!((parts("base"), parts("adapter")), (vec![(1.0, 1.0)], vec![(1.0, 0.5)]));
}

#[test]
fn who_names_no_model_is_told_what_each_would_take() {
    let fleet = serving(&[&["slow"], &["fast"], &["slow"]]);
    let decider = decider("prefix_aware");
    flood(&decider, &fleet, "slow", 100);
    let prompt = hashed(&"a question ".repeat(300));
    let own_s: Vec<f64> = costs(&decider, &fleet, &view(&prompt)).iter().map(|(_, own_s)| *own_s).collect();
    let by_name = |model| costs(&decider, &fleet, &of(model, &prompt));
    let (slow, fast) = (by_name("slow"), by_name("fast"));
    for (own_s, (_, expected_s)) in own_s.iter().zip([slow[0], fast[0], slow[1]]) {
        assert!((own_s / expected_s - 1.0).abs() < 1e-4, "{own_s} instead of {expected_s}");
    }
    assert!(own_s[0] > 5.0 * own_s[1]);
}
