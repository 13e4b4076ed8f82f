//! What workers have to do, as they are told to those who decide how many there are to be.

use super::*;
use crate::decide::demand::Demand;
use crate::precedence::{Precedence, Priority};
use crate::worker::Role;

fn generators(decider: &Decider, fleet: &FleetSnapshot, seconds: u64) -> Demand {
    let all = decider.demand(fleet, NOW + Duration::from_secs(seconds));
    all.into_iter().find(|demand| demand.role == Role::Generate).unwrap()
}

#[test]
fn requests_are_work_for_as_long_as_ten_seconds_remember() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware").with_background_load(Some(0.6)));
    let prompt = hashed(&"a long story ".repeat(4_000));
    let picked = || decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
    let idle = generators(&decider, &fleet, 0);
    assert_eq!((idle.model, idle.usable, idle.workers), (None, 2, 0.0));
    let first = picked();
    let one = generators(&decider, &fleet, 0).workers;
    assert!(one > 0.0);
    // What is cached need not be computed again.
    let again = picked();
    let both = generators(&decider, &fleet, 0).workers;
    assert!(both > one && both < 1.5 * one, "{one} {both}");
    assert!(generators(&decider, &fleet, 10).workers < 0.4 * both);
    assert!(generators(&decider, &fleet, 200).workers < 1e-6 * both);
    drop((first, again));
    let precedence = Precedence { priority: Priority(-1), tenant: None };
    let flex = RequestView { precedence, ..view(&prompt) };
    let before = generators(&decider, &fleet, 0).workers;
    decider.decide_spare(&fleet, &flex, Among::Untried(&[]), NOW).unwrap();
    assert_eq!(generators(&decider, &fleet, 0).workers, before, "nobody waits for that");
}

#[test]
fn each_kind_of_workers_has_its_own() {
    let spec = |id: &str, role| {
        let id = WorkerId::new(id);
        WorkerSpec { role, ..WorkerSpec::new(id.clone(), format!("http://{}:1", id.as_str())) }
    };
    let mut fleet = Fleet::default();
    let specs = [("a", Role::Generate), ("b", Role::Generate), ("p", Role::Prefill)];
    fleet.reconcile(&specs.map(|(id, role)| spec(id, role)));
    let (fleet, decider) = (fleet.snapshot(), decider("prefix_aware"));
    for worker in &fleet.workers()[1..] {
        worker.mark_up();
        worker.set_models(vec!["m".to_owned(), "adapter".to_owned()]);
    }
    let kind = |demand: &Demand| (demand.model.as_deref().map(str::to_owned), demand.role, demand.usable);
    let told: Vec<_> = decider.demand(&fleet, NOW).iter().map(kind).collect();
    let m = Some("m".to_owned());
    assert_eq!(told, [(None, Role::Generate, 0), (m.clone(), Role::Generate, 1), (m, Role::Prefill, 1)]);
}
