//! How many bytes of a prompt make a token, learned for each model from the usage that workers report.

use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;

/// English text under the tokenizers of today's large models.
const START_BYTES_PER_TOKEN: f64 = 4.0;
/// Weight of one observation of 1,000 tokens; smaller prompts count less.
const WEIGHT: f64 = 0.05;
/// Models remembered at most; names come from clients.
const MAX_MODELS: usize = 1_024;

/// Bytes a token, by model. Written on every reply with a usage, read on every request.
#[derive(Debug, Default)]
pub struct TokenRatios {
    by_model: DashMap<String, AtomicU64>,
}

impl TokenRatios {
    /// Estimated tokens of a prompt.
    #[must_use]
    pub fn tokens(&self, model: Option<&str>, prompt_bytes: usize) -> usize {
        let known = self.by_model.get(model.unwrap_or_default());
        let ratio = known.map_or(START_BYTES_PER_TOKEN, |bits| f64::from_bits(bits.load(Ordering::Relaxed)));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a length over a positive ratio"
        )]
        let tokens = (prompt_bytes as f64 / ratio).ceil() as usize;
        tokens
    }

    /// Learns from a reply: its prompt was `prompt_bytes` long and counted as `prompt_tokens`.
    pub fn observe(&self, model: Option<&str>, prompt_bytes: usize, prompt_tokens: usize) {
        if prompt_bytes == 0 || prompt_tokens == 0 {
            return;
        }
        let seen = (prompt_bytes as f64 / prompt_tokens as f64).clamp(0.25, 64.0);
        let weight = WEIGHT * (prompt_tokens as f64 / 1_000.0).clamp(0.1, 2.0);
        let model = model.unwrap_or_default();
        if let Some(bits) = self.by_model.get(model) {
            let old = f64::from_bits(bits.load(Ordering::Relaxed));
            // Two replies at once may lose one observation, which does no harm to an average.
            bits.store((old + (seen - old) * weight).to_bits(), Ordering::Relaxed);
        } else if self.by_model.len() < MAX_MODELS {
            self.by_model.insert(model.to_owned(), AtomicU64::new(seen.to_bits()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learns_the_ratio_of_each_model_apart() {
        let ratios = TokenRatios::default();
        assert_eq!(ratios.tokens(Some("a"), 400), 100);
        ratios.observe(Some("a"), 2_000, 1_000);
        assert_eq!(ratios.tokens(Some("a"), 400), 200);
        assert_eq!(ratios.tokens(Some("b"), 400), 100);
        for _ in 0..500 {
            ratios.observe(Some("a"), 5_000, 1_000);
        }
        assert_eq!(ratios.tokens(Some("a"), 500), 101, "close to five bytes a token");
    }

    #[test]
    fn replies_without_counts_teach_nothing() {
        let ratios = TokenRatios::default();
        ratios.observe(None, 0, 10);
        ratios.observe(None, 10, 0);
        assert_eq!(ratios.tokens(None, 8), 2);
    }
}
