//! Why no worker can be picked: what the client is told.
//!
//! Caller: [`Decider`](super::Decider), when there is no candidate.

use std::sync::Arc;

use crate::fleet::FleetSnapshot;
use crate::policy::PickError;
use crate::request::RequestView;
use crate::worker::Worker;

/// The reason, of a fleet in which nobody may serve the request.
pub(super) fn why_nobody(fleet: &FleetSnapshot, request: &RequestView<'_>) -> PickError {
    let role = request.leg.role();
    let workers = || fleet.workers().iter().filter(|worker| worker.spec.role == role);
    let usable = || workers().filter(|worker| worker.is_usable());
    let listed = request.model.filter(|model| workers().any(|worker| worker.lists(model)));
    let may_serve = |worker: &&Arc<Worker>| match listed {
        Some(model) => worker.lists(model),
        None => worker.may_serve(request.model),
    };
    let serving = usable().filter(may_serve).count();
    if usable().next().is_none() {
        let draining = workers().filter(|worker| worker.is_up() && worker.is_draining()).count();
        let down = workers().filter(|worker| !worker.is_up()).count();
        let (prefill, total) = (role == crate::Role::Prefill, workers().count());
        return PickError::NoneUsable { prefill, down, draining, total };
    }
    match request.model {
        Some(model) if serving == 0 => {
            let (model, known) = (model.to_owned(), fleet.known_models());
            // One that has not told its models yet may have this one.
            let untold = workers().filter(|worker| worker.models().is_none()).count();
            match (known.contains(&model), untold) {
                (true, _) => PickError::ModelDown { model },
                (false, 0) => PickError::UnknownModel { model, known },
                (false, untold) => PickError::ModelUntold { model, known, untold },
            }
        }
        _ => PickError::AllTried { tried: serving },
    }
}
