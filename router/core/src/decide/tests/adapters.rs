//! Requests for adapters of a model.

use super::*;
use crate::precedence::{Precedence, Priority};

const ADAPTERS: [&str; 3] = ["one", "two", "three"];

/// Two workers that have all adapters and places for so many.
fn with_places(count: usize) -> Arc<FleetSnapshot> {
    let fleet = fleet(2);
    let adapters = ADAPTERS.map(str::to_owned);
    for worker in fleet.workers() {
        worker.set_models([&["base".to_owned()], &adapters[..]].concat());
        worker.set_adapters(&adapters);
        worker.load.set_adapter_places(count);
    }
    fleet
}

/// A decider, and whom it gives a request for a model that comes in the nth second.
struct Trial {
    fleet: Arc<FleetSnapshot>,
    decider: Decider,
    prompts: u64,
}

impl Trial {
    fn with_places(count: usize) -> Self {
        Self { fleet: with_places(count), decider: decider("prefix_aware"), prompts: 0 }
    }

    fn ask(&mut self, model: &str) -> Decided {
        self.prompts += 1;
        let prompt = hashed(&format!("prompt {} ", self.prompts).repeat(20));
        let now = NOW + Duration::from_secs(self.prompts);
        let request = RequestView { model: Some(model), may_wait_since: Some(now), ..view(&prompt) };
        let mut decided = self.decider.decide(&self.fleet, &request, Among::Untried(&[]), now).unwrap();
        if !decided.lease.waits() {
            decided.lease.first_token();
        }
        decided
    }
}

#[test]
fn the_background_waits_where_its_adapter_has_no_place() {
    let trial =
        Trial { decider: decider("prefix_aware").with_background_load(Some(1.0)), ..Trial::with_places(1) };
    let (mut places, prompt) = (Vec::new(), hashed("hello"));
    let precedence = Precedence { priority: Priority(-1), tenant: None };
    let mut ask = |model, at: u64| {
        let now = NOW + Duration::from_secs(1_000 * at);
        let request = RequestView { model: Some(model), precedence, ..view(&prompt) };
        let mut decided = trial.decider.decide_spare(&trial.fleet, &request, Among::Untried(&[]), now)?;
        decided.lease.first_token();
        let slot = decided.worker.slot;
        places.push(decided);
        Ok(slot)
    };
    let (one, two) = (ask("one", 1).unwrap(), ask("two", 2).unwrap());
    assert_ne!(one, two, "each takes a place");
    assert_eq!(ask("three", 3), Err(PickError::NoneSpare));
    assert_eq!((ask("one", 4), ask("base", 5).is_ok()), (Ok(one), true));
}

fn slots(decided: &[Decided]) -> Vec<u32> {
    decided.iter().map(|one| one.worker.slot.0).collect()
}

#[test]
fn go_where_their_adapter_has_a_place_and_wait_in_the_router_where_none_has() {
    let mut trial = Trial::with_places(1);
    let (first, second) = (trial.ask("one"), trial.ask("two"));
    assert_ne!(first.worker.slot, second.worker.slot);
    let more: Vec<_> = (0..4).map(|_| trial.ask("two")).collect();
    assert_eq!(slots(&more), [second.worker.slot.0; 4], "the other one has less to do, and no place");
    assert!(more.iter().all(|one| !one.lease.waits()));
    let base = trial.ask("base");
    assert!(base.worker.slot == first.worker.slot && !base.lease.waits(), "it needs no place");
    let third = trial.ask("three");
    assert!(third.worker.slot == first.worker.slot && third.lease.waits(), "one ends sooner than five");
    drop(base);
    assert_eq!(first.worker.load.in_line(), 1, "that was no adapter's");
    drop(first);
    assert_eq!(third.worker.load.in_line(), 0);
}

#[test]
fn go_anywhere_while_nobody_has_said_how_many_places_there_are() {
    let mut trial = Trial::with_places(0);
    let all: Vec<_> = ADAPTERS.iter().cycle().take(8).map(|model| trial.ask(model)).collect();
    assert!(all.iter().all(|one| !one.lease.waits()));
    assert_eq!(slots(&all).iter().filter(|slot| **slot == 0).count(), 4);
}

#[test]
fn take_a_free_place_where_that_leaves_one() {
    let mut trial = Trial::with_places(3);
    let one = trial.ask("one");
    let there = one.worker.slot;
    let outlook = |model: &str, slot: WorkerSlot| {
        let prompt = hashed("a prompt of one block or so, which nobody has asked for before");
        let request = RequestView { model: Some(model), ..view(&prompt) };
        let explained = trial.decider.explain(&trial.fleet, &request, NOW).unwrap();
        let found = explained.candidates.iter().find(|one| one.worker.slot == slot);
        found.map(|one| one.adapter).unwrap()
    };
    assert!(!outlook("one", there).takes_place && outlook("two", there).takes_place);
    assert!((outlook("two", there).taken_share - 1.0 / 3.0).abs() < 1e-6);
    assert_eq!(outlook("base", there), crate::adapters::AdapterOutlook::default());
}
