//! Why nobody can be picked.

use super::*;

#[test]
fn says_why_nobody_can_be_picked() {
    let (fleet, decider) = (fleet(2), decider("random"));
    let request = RequestView { model: Some("m"), ..RequestView::default() };
    let everyone: Vec<_> = fleet.workers().iter().map(|worker| worker.slot).collect();
    let error = |excluded: &[WorkerSlot]| {
        decider.decide(&fleet, &request, Among::Untried(excluded), NOW).unwrap_err()
    };
    assert_eq!(error(&everyone), PickError::AllTried { tried: 2 });
    fleet.workers().iter().for_each(|worker| worker.set_models(vec!["n".into(), "l".into()]));
    let known = vec!["l".to_owned(), "n".to_owned()];
    assert_eq!(error(&[]), PickError::UnknownModel { model: "m".into(), known });
    for worker in fleet.workers() {
        worker.mark_down();
    }
    assert_eq!(error(&[]), PickError::NoneUsable { prefill: false, down: 2, draining: 0, total: 2 });
}
