//! When a first token is due.

use super::*;

#[test]
fn a_first_token_is_due_when_what_waits_before_it_is_computed_and_its_own_prompt() {
    let (fleet, ours, blind) = (fleet(1), decider("prefix_aware"), decider("least_load"));
    let speed = ours.prefill_speed(&fleet.workers()[0]);
    let decided = |text: &str| {
        let prompt = hashed(&text.repeat(100));
        let own_s = speed
            .seconds(crate::speed::Prefill { new_tokens: view(&prompt).prompt_tokens, cached_tokens: 0 });
        (ours.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap().lease, own_s)
    };
    let ((first, first_s), (second, second_s)) =
        (decided("a prompt of some length "), decided("another one "));
    let late = |lease, after_s| ours.late_s(lease, NOW + Duration::from_secs_f64(after_s)).unwrap();
    assert!(late(&first, first_s).abs() < 1e-6, "{}", late(&first, first_s));
    assert!((late(&first, first_s + 2.0) - 2.0).abs() < 1e-6);
    // A step more or less: they may be computed in one.
    let off_s = late(&second, first_s + second_s);
    assert!(off_s.abs() <= speed.fixed_s + 1e-6, "{off_s}");
    assert!(late(&second, first_s) < 0.0);
    let lease = blind.decide(&fleet, &view(&hashed("short")), Among::Untried(&[]), NOW).unwrap().lease;
    assert_eq!(blind.late_s(&lease, NOW), None);
}
