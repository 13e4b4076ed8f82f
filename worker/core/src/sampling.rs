//! What a request asks of the sampler, and what the sampler needs to know of the sequence for it.
//!
//! Plain values: the backend's sampler computes with them. Next: [`step`](crate::step) carries them there.

use roundhouse_types::TokenId;

/// How the next token is drawn from the logits.
///
/// Order of application, as in vLLM: `logit_bias` and `min_tokens`, then the penalties (repetition, frequency, presence), then
/// temperature, `min_p`, `top_k`, `top_p`. Log-probabilities are those of the logits as the model gave them. A temperature of
/// zero is greedy: the highest logit, the lowest token id among equals.
#[derive(Clone, PartialEq, Debug)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the k most probable tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of most probable tokens whose probabilities reach p; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens that are at least this fraction as probable as the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Logits of tokens in the prompt or the answer are divided by it where positive, multiplied where not; 1 is none.
    pub repetition_penalty: f32,
    /// Taken off the logit of a token for each time it is in the answer; 0 is none.
    pub frequency_penalty: f32,
    /// Taken off the logit of a token that is in the answer; 0 is none.
    pub presence_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Tokens to generate before one of `withheld_tokens` can be drawn.
    pub min_tokens: u64,
    /// Tokens that would end the generation, which `min_tokens` keeps from being drawn.
    pub withheld_tokens: Vec<TokenId>,
    /// Report the drawn token's log-probability, and those of so many most probable tokens.
    pub logprobs: Option<u32>,
    /// Seeds the draw; with the same seed, prompt and parameters a request repeats itself.
    pub seed: u64,
}

impl SamplingParams {
    /// Always the most probable token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether the tokens before the one to draw have a say in it.
    #[must_use]
    pub fn reads_history(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// What makes these parameters impossible, if anything does.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let wrong = |name: &str, value: f32, wanted: &str| Some(format!("{name} {value} is not {wanted}"));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong("temperature", self.temperature, "a number from 0 up");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top_p", self.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return wrong("min_p", self.min_p, "from 0 to 1");
        }
        if self.top_k == Some(0) {
            return Some("top_k 0 keeps nothing; leave it out to keep all".into());
        }
        if !(self.repetition_penalty >= Self::LEAST_REPETITION_PENALTY && self.repetition_penalty.is_finite())
        {
            return wrong("repetition_penalty", self.repetition_penalty, "a number from 0.01 up");
        }
        let additive = [self.frequency_penalty, self.presence_penalty];
        let mut added = additive.into_iter().chain(self.logit_bias.iter().map(|(_, bias)| *bias));
        let infinite = added.find(|number| !number.is_finite())?;
        wrong("a penalty or bias of", infinite, "finite")
    }

    /// Below it a repetition penalty could carry logits beyond what f32 holds.
    pub const LEAST_REPETITION_PENALTY: f32 = 0.01;
}

impl Default for SamplingParams {
    /// The model's own distribution.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            min_tokens: 0,
            withheld_tokens: Vec::new(),
            logprobs: None,
            seed: 0,
        }
    }
}

/// The tokens before the one to draw.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct History {
    /// Prompt, then what was generated.
    pub tokens: Vec<TokenId>,
    /// How many of them are the prompt.
    pub prompt_tokens: usize,
}

/// Log-probabilities at one position.
#[derive(Clone, PartialEq, Debug)]
pub struct Logprobs {
    /// Of the token that was drawn.
    pub drawn: f32,
    /// Of the most probable tokens, most probable first, the lower token among equals.
    pub top: Vec<(TokenId, f32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_parameters_are_named() {
        let plain = SamplingParams::default;
        for (params, name) in [
            (SamplingParams { temperature: -1.0, ..plain() }, "temperature"),
            (SamplingParams { temperature: f32::NAN, ..plain() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..plain() }, "top_p"),
            (SamplingParams { min_p: 1.5, ..plain() }, "min_p"),
            (SamplingParams { top_k: Some(0), ..plain() }, "top_k"),
            (SamplingParams { repetition_penalty: 0.0, ..plain() }, "repetition_penalty"),
            (SamplingParams { presence_penalty: f32::INFINITY, ..plain() }, "penalty"),
            (SamplingParams { logit_bias: vec![(0, f32::NAN)], ..plain() }, "bias"),
        ] {
            let problem = params.problem().unwrap();
            assert!(problem.contains(name), "{problem}");
        }
        assert_eq!(plain().problem(), None);
        assert_eq!(SamplingParams::greedy().problem(), None);
    }
}
