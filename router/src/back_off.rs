//! How long to wait before what has failed is tried again.

use std::time::Duration;

/// Waits that double, each drawn from the upper half of its length, so that routers do not all come back at once to what was restarted.
#[derive(Clone, Copy, Debug)]
pub struct BackOff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl BackOff {
    /// Waits from `first` to `longest`.
    #[must_use]
    pub fn between(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The next wait.
    pub fn pause(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.longest);
        wait.mul_f64(0.5 + rand::random::<f64>() / 2.0)
    }

    /// It has worked: the next wait is the first one again.
    pub fn begin_anew(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_the_longest_and_begin_anew() {
        let (first, longest) = (Duration::from_millis(100), Duration::from_secs(5));
        let mut back_off = BackOff::between(first, longest);
        let waits: Vec<_> = (0..10).map(|_| back_off.pause()).collect();
        assert!(waits[0] <= first && waits[0] >= first / 2);
        assert!(waits[9] <= longest && waits[9] >= longest / 2);
        back_off.begin_anew();
        assert!(back_off.pause() <= first);
    }
}
