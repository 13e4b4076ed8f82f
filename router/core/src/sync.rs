//! Locks and atomics: the system's, or loom's, which try every order in which threads can take turns (`under-loom`).

#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, atomic};

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(loom)]
pub(crate) use std::sync::PoisonError;
