//! Locks and atomics: the system's, or loom's, which try every order in which threads can take turns (`under-loom`).

#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, atomic};

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(loom)]
pub(crate) use std::sync::PoisonError;

/// How often [`lock_soon`] tries before it sleeps, and the pauses in between: some 30 µs, about as long as it takes to fall asleep and be
/// woken.
#[cfg(not(loom))]
const TRIES: u32 = 64;
#[cfg(not(loom))]
const PAUSES: u32 = 16;

/// Locks what nobody holds for more than some microseconds: waits awake at first. The system's own lock gives that up after about 2 µs, and
/// from the first sleeper on each turn costs a call of the system. What a panic left is taken as it is.
#[cfg(not(loom))]
pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    use std::sync::TryLockError;
    for _ in 0..TRIES {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => (0..PAUSES).for_each(|_| std::hint::spin_loop()),
        }
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Under loom nobody sleeps.
#[cfg(loom)]
pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn one_has_it_at_a_time_whoever_waits_awake_or_asleep() {
        let count = Mutex::new(0_u64);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for turn in 0..2_000 {
                        let mut held = lock_soon(&count);
                        let before = *held;
                        // Now and then far longer than anybody waits awake.
                        (0..if turn % 500 == 0 { 100_000 } else { 10 }).for_each(|_| std::hint::spin_loop());
                        *held = before + 1;
                    }
                });
            }
        });
        assert_eq!(*lock_soon(&count), 8_000);
    }

    #[test]
    fn what_a_panic_left_is_taken_as_it_is() {
        let mutex = Mutex::new(7);
        let panicked = thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = mutex.lock();
                panic!("while it holds the lock");
            });
            holder.join()
        });
        assert!(panicked.is_err());
        assert_eq!(*lock_soon(&mutex), 7);
    }
}
