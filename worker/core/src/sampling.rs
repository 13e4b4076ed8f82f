//! What a request asks of the sampler.

/// How the next token is drawn from the logits.
///
/// Order of application: temperature, then top-k, then top-p. A temperature of zero is greedy: the highest logit,
/// the lowest token id among equals.
#[derive(Clone, PartialEq, Debug)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the k most probable tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of most probable tokens whose probabilities reach p; 1 keeps all.
    pub top_p: f32,
    /// Seeds the draw; with the same seed, prompt and parameters a request repeats itself.
    pub seed: u64,
}

impl SamplingParams {
    /// Always the most probable token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: 1.0, seed: 0 }
    }
}
