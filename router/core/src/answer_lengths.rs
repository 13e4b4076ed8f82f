//! How long answers are: what a request will add to its worker's KV cache before it leaves.
//!
//! Knows no clock: lengths come in. Fed with each answer that has ended; policies get the mean as a value.

/// Weight of an answer in the mean: some hundred decide.
const WEIGHT: f64 = 0.01;

/// The mean length of the last answers.
#[derive(Debug, Default)]
pub(crate) struct AnswerLengths {
    mean_tokens: f64,
    /// Sum of the weights of all that have been seen: 1 once there were many.
    seen: f64,
}

impl AnswerLengths {
    /// An answer has ended that had so many tokens.
    pub(crate) fn see(&mut self, tokens: usize) {
        self.seen += WEIGHT * (1.0 - self.seen);
        self.mean_tokens += WEIGHT / self.seen * (tokens as f64 - self.mean_tokens);
    }

    /// Tokens of an answer on average; 0 if there was none.
    pub(crate) fn mean_tokens(&self) -> f64 {
        self.mean_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_right_from_the_first_answer_on_and_follows() {
        let mut answers = AnswerLengths::default();
        assert_eq!(answers.mean_tokens(), 0.0);
        answers.see(300);
        assert_eq!(answers.mean_tokens(), 300.0);
        answers.see(100);
        assert!((answers.mean_tokens() - 199.0).abs() < 1.0, "{answers:?}");
        (0..1_000).for_each(|_| answers.see(2_000));
        assert!((answers.mean_tokens() - 2_000.0).abs() < 1.0, "{answers:?}");
    }
}
