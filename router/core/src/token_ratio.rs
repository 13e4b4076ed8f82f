//! How many bytes of a prompt make a token, learned for each model from the usage that workers report.
//!
//! All bytes over all tokens, of late. The few bytes of a "ping", most of whose tokens are its template's, say little, and caches are measured by what
//! is estimated: eight of them before a run of shared prefixes made its mean TTFT a quarter longer while each counted like a prompt.

use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;

/// English text under the tokenizers of today's large models.
const START_BYTES_PER_TOKEN: f32 = 4.0;
/// For how many tokens that stands until others have been seen.
const START_TOKENS: f32 = 1_000.0;
/// How many tokens count, of late.
const WINDOW_TOKENS: f32 = 20_000.0;
/// One prompt counts for no more.
const MOST_TOKENS: f32 = 2_000.0;
/// Models remembered at most; names come from clients.
const MAX_MODELS: usize = 1_024;

/// Bytes a token, by model. Written on every reply with a usage, read on every request.
#[derive(Debug, Default)]
pub struct TokenRatios {
    by_model: DashMap<String, Sums>,
}

/// Bytes and tokens, two `f32` in one word.
#[derive(Debug)]
struct Sums(AtomicU64);

impl Sums {
    fn of(bytes: f32, tokens: f32) -> Self {
        Self(AtomicU64::new(Self::word(bytes, tokens)))
    }

    fn word(bytes: f32, tokens: f32) -> u64 {
        u64::from(bytes.to_bits()) << 32 | u64::from(tokens.to_bits())
    }

    #[expect(clippy::cast_possible_truncation, reason = "each half is meant")]
    fn get(&self) -> (f32, f32) {
        let word = self.0.load(Ordering::Relaxed);
        (f32::from_bits((word >> 32) as u32), f32::from_bits(word as u32))
    }

    /// Two replies at once may lose one of them, which does no harm to an average.
    fn add(&self, bytes: f32, tokens: f32) {
        let (all_bytes, all_tokens) = self.get();
        let (all_bytes, all_tokens) = (all_bytes + bytes, all_tokens + tokens);
        let kept = (WINDOW_TOKENS / all_tokens).min(1.0);
        self.0.store(Self::word(all_bytes * kept, all_tokens * kept), Ordering::Relaxed);
    }
}

impl TokenRatios {
    /// Estimated tokens of a prompt.
    #[must_use]
    pub fn tokens(&self, model: Option<&str>, prompt_bytes: usize) -> usize {
        let known = self.by_model.get(model.unwrap_or_default()).map(|sums| sums.get());
        let ratio = known.map_or(START_BYTES_PER_TOKEN, |(bytes, tokens)| bytes / tokens);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a length over a positive ratio"
        )]
        let tokens = (prompt_bytes as f64 / f64::from(ratio)).ceil() as usize;
        tokens
    }

    /// Learns from a reply: its prompt was `prompt_bytes` long and counted as `prompt_tokens`.
    pub fn observe(&self, model: Option<&str>, prompt_bytes: usize, prompt_tokens: usize) {
        if prompt_bytes == 0 || prompt_tokens == 0 {
            return;
        }
        #[expect(clippy::cast_possible_truncation, reason = "a ratio between 0.25 and 64")]
        let seen = (prompt_bytes as f64 / prompt_tokens as f64).clamp(0.25, 64.0) as f32;
        let tokens = (prompt_tokens as f32).min(MOST_TOKENS);
        let model = model.unwrap_or_default();
        if let Some(sums) = self.by_model.get(model) {
            sums.add(seen * tokens, tokens);
        } else if self.by_model.len() < MAX_MODELS {
            let sums = Sums::of(START_BYTES_PER_TOKEN * START_TOKENS, START_TOKENS);
            sums.add(seen * tokens, tokens);
            self.by_model.insert(model.to_owned(), sums);
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
        assert_eq!(ratios.tokens(Some("a"), 300), 100, "halfway to two bytes a token");
        assert_eq!(ratios.tokens(Some("b"), 400), 100);
        for _ in 0..500 {
            ratios.observe(Some("a"), 5_000, 1_000);
        }
        assert_eq!(ratios.tokens(Some("a"), 500), 101, "close to five bytes a token");
    }

    #[test]
    fn short_prompts_say_little() {
        let ratios = TokenRatios::default();
        for _ in 0..20 {
            ratios.observe(Some("a"), 7, 9);
        }
        let tokens = ratios.tokens(Some("a"), 4_000);
        assert!((1_000..1_200).contains(&tokens), "{tokens}");
        for _ in 0..10 {
            ratios.observe(Some("a"), 1_500_000, 1_000_000);
        }
        let tokens = ratios.tokens(Some("a"), 1_500);
        assert!((920..1_000).contains(&tokens), "ten long ones say nearly all: {tokens}");
        ratios.observe(Some("a"), 10_000_000, 2_500_000);
        let tokens = ratios.tokens(Some("a"), 1_500);
        assert!((800..920).contains(&tokens), "one more does not: {tokens}");
    }

    #[test]
    fn replies_without_counts_teach_nothing() {
        let ratios = TokenRatios::default();
        ratios.observe(None, 0, 10);
        ratios.observe(None, 10, 0);
        assert_eq!(ratios.tokens(None, 8), 2);
    }
}
