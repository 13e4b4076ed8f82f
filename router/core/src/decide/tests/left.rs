//! Workers that have left: what is still told of them does nothing to whoever has their slot next.

use super::*;

fn spec(name: &str) -> WorkerSpec {
    WorkerSpec::new(WorkerId::new(name), format!("http://{name}:8000"))
}

fn come_up(fleet: &Fleet) -> Arc<FleetSnapshot> {
    let snapshot = fleet.snapshot();
    for worker in snapshot.workers() {
        worker.mark_up();
    }
    snapshot
}

/// Prompt tokens that each is known to hold, by name.
fn hits(decider: &Decider, fleet: &FleetSnapshot, prompt: &PromptBlocks) -> Vec<(String, u32)> {
    let explanation = decider.explain(fleet, &view(prompt), NOW).unwrap();
    let hit = |one: &Explained| (one.worker.id().to_string(), one.candidate.hit_tokens);
    explanation.candidates.iter().map(hit).collect()
}

#[test]
fn who_has_left_does_nothing_to_the_next_worker_with_its_slot() {
    let (mut fleet, decider) = (Fleet::default(), decider("prefix_aware"));
    fleet.reconcile(&[spec("old")]);
    let before = come_up(&fleet);
    let (in_line, failed) = (hashed(&"what old waits for ".repeat(100)), hashed(&"what fails ".repeat(100)));
    let decide = |fleet: &FleetSnapshot, prompt: &PromptBlocks| {
        decider.decide(fleet, &view(prompt), Among::Untried(&[]), NOW).unwrap()
    };
    let (mut in_line_there, mut failed_there) = (decide(&before, &in_line), decide(&before, &failed));
    let old = fleet.reconcile(&[]).removed.remove(0);
    decider.retire(&old);
    assert_eq!(decider.tree_blocks(), 0);
    fleet.reconcile(&[spec("new")]);
    let after = come_up(&fleet);
    assert_eq!(after.workers()[0].slot, old.slot);
    let held = decide(&after, &failed);
    let known = hits(&decider, &after, &failed);
    assert!(known[0].1 > 0);

    let error = decider.decide(&before, &view(&in_line), Among::Untried(&[]), NOW).unwrap_err();
    assert!(matches!(error, PickError::NoneUsable { .. }), "by an older snapshot: {error}");
    assert!(!Decider::can_decide(&before, &view(&in_line), Among::Anyone));
    decider.goes(&mut in_line_there, &view(&in_line), NOW);
    assert_eq!(hits(&decider, &after, &in_line), [("new".to_owned(), 0)]);
    decider.take_back(&mut failed_there.lease, &old, &failed.hashes, failed_there.basis);
    let comparison = Comparison { predicted_tokens: 300, cached_tokens: 0 };
    assert_eq!(decider.compare(&old, held.basis, comparison), 0);
    decider.apply(&old, &CacheChange::Cleared);
    decider.forget(&old);
    drop((in_line_there, failed_there));
    assert_eq!(old.mark_up(), None);
    assert_eq!(hits(&decider, &after, &failed), known);
}
