//! One worker: what was configured, and the state that the rest of the router shares.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

use crate::ledger::WorkerLoad;

/// The name of a worker, as operators and clients see it. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WorkerId(Arc<str>);

impl WorkerId {
    /// A worker's name, as given.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A worker's place in tables; free to be used again once the worker has left the fleet and the tree has forgotten it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WorkerSlot(pub u32);

impl WorkerSlot {
    /// The slot as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What an operator says of a worker. Two specs that are equal mean the same worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerSpec {
    /// Its name.
    pub id: WorkerId,
    /// Where it is: `http://host:port` or `embedded:MODEL`; only transports read it.
    pub address: String,
}

/// A worker of the fleet.
#[derive(Debug)]
pub struct Worker {
    /// What was configured.
    pub spec: WorkerSpec,
    /// Its place in tables.
    pub slot: WorkerSlot,
    /// What the router itself has in flight there.
    pub load: Arc<WorkerLoad>,
    usable: AtomicBool,
    models: RwLock<Option<Arc<[String]>>>,
}

impl Worker {
    /// A worker that no probe has seen yet, and that is therefore not usable.
    #[must_use]
    pub fn new(spec: WorkerSpec, slot: WorkerSlot) -> Self {
        Self { spec, slot, load: Arc::default(), usable: AtomicBool::new(false), models: RwLock::new(None) }
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> &WorkerId {
        &self.spec.id
    }

    /// Whether requests may go there: the last probe passed, and no attempt since then failed to connect.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.usable.load(Ordering::Relaxed)
    }

    /// Says that it is up. Returns whether that is news.
    pub fn mark_up(&self) -> bool {
        !self.usable.swap(true, Ordering::Relaxed)
    }

    /// Says that it is down. Returns whether that is news.
    pub fn mark_down(&self) -> bool {
        self.usable.swap(false, Ordering::Relaxed)
    }

    /// The models it said it serves; `None` while it has not said.
    #[must_use]
    pub fn models(&self) -> Option<Arc<[String]>> {
        self.models.read().ok()?.clone()
    }

    /// Remembers what models it says it serves.
    pub fn set_models(&self, models: Vec<String>) {
        if let Ok(mut known) = self.models.write()
            && known.as_deref() != Some(&models)
        {
            *known = Some(models.into());
        }
    }

    /// Whether it may serve `model`: yes if it lists the model, or has not listed any yet.
    #[must_use]
    pub fn may_serve(&self, model: Option<&str>) -> bool {
        let Some(model) = model else { return true };
        self.models().is_none_or(|known| known.iter().any(|name| name == model))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serves_anything_until_it_lists_its_models() {
        let spec = WorkerSpec { id: WorkerId::new("a"), address: "http://a:8000".into() };
        let worker = Worker::new(spec, WorkerSlot(0));
        assert!(worker.may_serve(Some("m")));
        worker.set_models(vec!["n".into()]);
        assert!(!worker.may_serve(Some("m")));
        assert!(worker.may_serve(Some("n")));
        assert!(worker.may_serve(None));
    }

    #[test]
    fn reports_changes_of_state_once() {
        let spec = WorkerSpec { id: WorkerId::new("a"), address: "http://a:8000".into() };
        let worker = Worker::new(spec, WorkerSlot(0));
        assert!(!worker.is_usable());
        assert!(worker.mark_up());
        assert!(!worker.mark_up());
        assert!(worker.mark_down());
        assert!(!worker.mark_down());
    }
}
