//! The parameters of a request that say how tokens are drawn, and when to stop.

use serde_json::{Value, json};
use worker_core::SamplingParams;

use super::fields::{Fields, must, shown, wrong};
use super::request::Kind;
use crate::error::RequestError;

/// Stop strings that a request may give.
const MAX_STOPS: usize = 16;
/// Token ids that a request may stop at.
pub(super) const MAX_STOP_TOKENS: usize = 128;
/// Most probable tokens whose log-probabilities a request may ask for; vLLM's bound.
pub(crate) const MAX_LOGPROBS: u32 = 20;
/// Choices of one request, over all of its prompts.
pub(crate) const MAX_CHOICES: u32 = 128;

impl Fields {
    pub(super) fn params(&self, kind: Kind) -> Result<SamplingParams, RequestError> {
        let top_p = self.number("top_p", (0.0, 1.0), 1.0)?;
        if top_p == 0.0 {
            let message =
                "top_p = 0 keeps nothing; it must be above 0 and at most 1 (greedy is temperature 0)";
            return Err(wrong("top_p", message.to_owned()));
        }
        let repetition = (f64::from(SamplingParams::LEAST_REPETITION_PENALTY), 100.0);
        Ok(SamplingParams {
            temperature: self.number("temperature", (0.0, 2.0), 1.0)?,
            top_k: self.top_k()?,
            top_p,
            min_p: self.number("min_p", (0.0, 1.0), 0.0)?,
            repetition_penalty: self
                .number("repetition_penalty", repetition, 1.0)?
                .max(SamplingParams::LEAST_REPETITION_PENALTY),
            frequency_penalty: self.number("frequency_penalty", (-2.0, 2.0), 0.0)?,
            presence_penalty: self.number("presence_penalty", (-2.0, 2.0), 0.0)?,
            logit_bias: self.logit_bias()?,
            min_tokens: self.whole("min_tokens", 0)?.unwrap_or(0) as u64,
            // Which tokens end a generation is the model's knowledge.
            withheld_tokens: Vec::new(),
            logprobs: match kind {
                Kind::Chat => self.chat_logprobs()?,
                Kind::Completion => self.completion_logprobs()?,
            },
            seed: self.seed()?,
        })
    }

    /// -1 and 0 are how vLLM and SGLang write "all".
    fn top_k(&self) -> Result<Option<u32>, RequestError> {
        match self.get("top_k") {
            None => Ok(None),
            Some(value) => match value.as_i64().map(|k| (k, u32::try_from(k))) {
                Some((-1 | 0, _)) => Ok(None),
                Some((_, Ok(k))) => Ok(Some(k)),
                _ => Err(must("top_k", "a whole number of at least 1, or -1 for all", value)),
            },
        }
    }

    fn seed(&self) -> Result<u64, RequestError> {
        let Some(value) = self.get("seed") else { return Ok(rand::random()) };
        let seed = value.as_u64().or(value.as_i64().map(i64::cast_unsigned));
        seed.ok_or_else(|| must("seed", "a whole number of 64 bits", value))
    }

    fn logit_bias(&self) -> Result<Vec<(u32, f32)>, RequestError> {
        let Some(value) = self.get("logit_bias") else { return Ok(Vec::new()) };
        let wanted = "an object of token ids, each with a number from -100 to 100";
        let object = value.as_object().ok_or_else(|| must("logit_bias", wanted, value))?;
        let entry = |(id, bias): (&String, &Value)| {
            let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            #[expect(clippy::cast_possible_truncation, reason = "a bias's 24 bits are enough")]
            Some((id.parse().ok()?, bias? as f32))
        };
        object
            .iter()
            .map(|(id, bias)| {
                let given = || json!({ id.as_str(): bias });
                entry((id, bias)).ok_or_else(|| must("logit_bias", wanted, &given()))
            })
            .collect()
    }

    fn chat_logprobs(&self) -> Result<Option<u32>, RequestError> {
        let top = self.whole_within("top_logprobs", (0, MAX_LOGPROBS.into()))?;
        match (self.switch("logprobs", false)?, top) {
            (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
            (false, None | Some(0)) => Ok(None),
            (false, Some(top)) => {
                let message = format!("top_logprobs = {top} needs logprobs, which must be true");
                Err(wrong("top_logprobs", message))
            }
        }
    }

    fn completion_logprobs(&self) -> Result<Option<u32>, RequestError> {
        self.refuse(&[("top_logprobs", &["0"])])?;
        if self.get("logprobs") == Some(&Value::Bool(false)) {
            return Ok(None);
        }
        let top = self.whole_within("logprobs", (0, MAX_LOGPROBS.into()))?;
        if top.is_some() && self.switch("echo", false)? {
            let message = "logprobs with echo would need those of the prompt, which this worker does not compute; \
                           leave one of the two out";
            return Err(wrong("logprobs", message.to_owned()));
        }
        Ok(top.map(|top| top as u32))
    }

    /// How many choices for each of `prompts`.
    pub(super) fn choices(&self, prompts: usize) -> Result<usize, RequestError> {
        let n = self.whole_within("n", (1, MAX_CHOICES.into()))?.unwrap_or(1) as usize;
        if n * prompts > MAX_CHOICES as usize {
            let message = format!(
                "n = {n} for {prompts} prompts is {} choices; the most is {MAX_CHOICES}",
                n * prompts
            );
            return Err(wrong("n", message));
        }
        if let Some(best_of) = self.get("best_of").filter(|best_of| best_of.as_u64() != Some(n as u64)) {
            let message = format!(
                "best_of = {} is not supported by this worker; leave it out, or set n",
                shown(best_of)
            );
            return Err(wrong("best_of", message));
        }
        Ok(n)
    }

    pub(super) fn stop(&self) -> Result<Vec<String>, RequestError> {
        let stop = match self.get("stop") {
            None => Some(Vec::new()),
            Some(Value::String(text)) => Some(vec![text.clone()]),
            Some(value) => serde_json::from_value(value.clone()).ok(),
        };
        let stop = stop.filter(|stop: &Vec<String>| stop.len() <= MAX_STOPS);
        let wanted = format!("a string, or a list of at most {MAX_STOPS} strings");
        stop.ok_or_else(|| must("stop", &wanted, self.get("stop").unwrap_or(&Value::Null)))
    }

    pub(super) fn priority(&self) -> Result<i32, RequestError> {
        let Some(value) = self.get("priority") else { return Ok(0) };
        let priority = value.as_i64().and_then(|priority| i32::try_from(priority).ok());
        priority.ok_or_else(|| must("priority", "a whole number of 32 bits", value))
    }
}
