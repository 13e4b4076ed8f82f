//! Who is woken when something happens on an HTTP/1 connection.
//!
//! A connection has no task of its own: whoever waits for its answer polls it. hyper's two halves of a connection wake each
//! other all the time, though, and a task that is woken while it runs is run once more for nothing. So wakes that come
//! while our own call into the other half is running are kept as a note.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use futures_util::task::AtomicWaker;

/// The waker of one connection.
#[derive(Default)]
pub(super) struct Signal {
    waiting: AtomicWaker,
    quiet: AtomicBool,
    nudged: AtomicBool,
    heard: AtomicBool,
}

impl Signal {
    /// From now on wakes `task`.
    pub(super) fn follow(&self, task: &Waker) {
        self.waiting.register(task);
    }

    /// Wakes nobody any more: the connection is idle.
    pub(super) fn unfollow(&self) {
        self.waiting.take();
    }

    /// Runs `call`; a wake meanwhile is kept for [`Self::take_nudge`].
    pub(super) fn quietly<T>(&self, call: impl FnOnce() -> T) -> T {
        // Sequentially consistent, with `wake_by_ref`: a wake from another thread either sees that it is loud again, or
        // is seen by the `take_nudge` that follows.
        self.quiet.store(true, Ordering::SeqCst);
        let returned = call();
        self.quiet.store(false, Ordering::SeqCst);
        returned
    }

    /// Whether there was a wake that woke nobody, since last asked.
    pub(super) fn take_nudge(&self) -> bool {
        self.nudged.swap(false, Ordering::SeqCst)
    }

    /// A byte has come from the worker.
    pub(super) fn hear(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// Forgets what was heard: a new exchange begins.
    pub(super) fn listen(&self) {
        self.heard.store(false, Ordering::Relaxed);
    }

    /// Whether a byte has come in this exchange.
    pub(super) fn has_heard(&self) -> bool {
        self.heard.load(Ordering::Relaxed)
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.nudged.store(true, Ordering::SeqCst);
        if !self.quiet.load(Ordering::SeqCst) {
            self.waiting.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_wake_is_passed_on_or_kept_but_never_lost() {
        let (signal, count) = (Arc::new(Signal::default()), Arc::new(Count::default()));
        let waker = Waker::from(Arc::clone(&signal));
        signal.follow(&Waker::from(Arc::clone(&count)));
        signal.quietly(|| waker.wake_by_ref());
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        assert!(signal.take_nudge());
        assert!(!signal.take_nudge());
        waker.wake_by_ref();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        signal.unfollow();
        waker.wake();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(signal.take_nudge());
    }
}
