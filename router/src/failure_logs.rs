//! Keeps a failing worker from filling the log.

use std::hash::Hash;
use std::time::Duration;

use pingora_limits::rate::Rate;

/// Lines a second that one subject may write.
const MAX_LINES: isize = 5;

/// Lets the first few lines of each second through.
pub struct FailureLogs {
    lines: Rate,
}

impl Default for FailureLogs {
    fn default() -> Self {
        Self { lines: Rate::new(Duration::from_secs(1)) }
    }
}

impl FailureLogs {
    /// Whether one more line about `subject` may be written now.
    #[must_use]
    pub fn allow<T: Hash>(&self, subject: &T) -> bool {
        self.lines.observe(subject, 1) <= MAX_LINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_the_lines_of_each_subject_apart() {
        let logs = FailureLogs::default();
        let allowed = (0..1_000).filter(|_| logs.allow(&"a")).count();
        // The second may turn while the loop runs.
        assert!((5..=20).contains(&allowed), "{allowed}");
        assert!(logs.allow(&"b"));
    }
}
