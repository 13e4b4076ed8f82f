//! From a request body to what is to be generated. Every parameter that would change the result is obeyed or refused, none
//! is quietly ignored.
//!
//! Next: [`api`](crate::api) turns the input into tokens.

use std::sync::Arc;

use roundhouse_text::SpecialTokenPolicy;
use worker_core::SamplingParams;

use super::fields::{Fields, wrong};
use super::kv_transfer::KvTransferParams;
use super::prompt::Input;
use super::sampling::MAX_STOP_TOKENS;
use crate::error::RequestError;

/// Which of the two endpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// Whether and how the reply is streamed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Streaming {
    /// One JSON object.
    No,
    /// Events.
    Yes,
    /// Events, and the usage in a last one.
    WithUsage,
}

/// A request, read and checked.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerationRequest {
    /// Which endpoint.
    pub kind: Kind,
    /// The model asked for, if any was.
    pub model: Option<String>,
    /// What to go on from.
    pub input: Input,
    /// Whether a tokenizer's own tokens are put around the input.
    pub special_tokens: SpecialTokenPolicy,
    /// How tokens are drawn; of several choices, the first.
    pub params: SamplingParams,
    /// Choices for each prompt.
    pub choices: usize,
    /// Tokens to generate at most; `None` leaves it to the endpoint.
    pub max_tokens: Option<usize>,
    /// Texts that end the generation.
    pub stop: Vec<String>,
    /// Tokens that end the generation, beside the model's own.
    pub stop_tokens: Vec<u32>,
    /// Go on past the model's end of turn.
    pub ignore_eos: bool,
    /// Begin the answer with the prompt.
    pub echo: bool,
    /// Of requests that wait, the lowest goes first, as in vLLM.
    pub priority: i32,
    /// What keeps the request's part of the prefix cache apart from that of others.
    pub cache_salt: Option<Arc<str>>,
    /// What its prompt's KV has to do with another worker.
    pub kv_transfer: KvTransferParams,
    /// How to reply.
    pub streaming: Streaming,
}

/// Parameters that would change the result and that this worker does not have: name, and values that change nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("suffix", &["\"\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("functions", &["[]"]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
    ("structured_outputs", &["{}"]),
    ("regex", &[]),
    ("json_schema", &[]),
    ("ebnf", &[]),
    ("structural_tag", &[]),
    ("return_tokens_as_token_ids", &["false"]),
    ("allowed_token_ids", &[]),
    ("bad_words", &["[]"]),
    ("prompt_logprobs", &[]),
    ("truncate_prompt_tokens", &[]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1", "1.0"]),
    ("include_stop_str_in_output", &["false"]),
    ("skip_special_tokens", &["true"]),
    ("chat_template", &[]),
    ("documents", &["[]"]),
];

impl GenerationRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// When it is no JSON, or a parameter is wrong; the message says which, and what would be right.
    pub fn parse(kind: Kind, body: &[u8]) -> Result<Self, RequestError> {
        let fields = Fields::parse(body)?;
        fields.refuse(UNSUPPORTED)?;
        fields.refuse(match kind {
            Kind::Chat => &[("echo", &["false"])],
            Kind::Completion => &[("continue_final_message", &["false"])],
        })?;
        let (input, prompts) = match kind {
            Kind::Chat => (Input::Chat(fields.conversation()?), 1),
            Kind::Completion => {
                let prompts = fields.prompts()?;
                let count = prompts.len();
                (Input::Prompts(prompts), count)
            }
        };
        let special_tokens = match kind {
            // A chat template writes its own.
            Kind::Chat => SpecialTokenPolicy::Omit,
            Kind::Completion => SpecialTokenPolicy::Add,
        };
        let request = Self {
            kind,
            model: fields.text("model")?,
            input,
            special_tokens: fields.special_tokens(special_tokens)?,
            params: fields.params(kind)?,
            choices: fields.choices(prompts)?,
            max_tokens: fields.max_tokens()?,
            stop: fields.stop()?,
            stop_tokens: fields.tokens("stop_token_ids", MAX_STOP_TOKENS)?,
            ignore_eos: fields.switch("ignore_eos", false)?,
            echo: fields.switch("echo", false)?,
            priority: fields.priority()?,
            cache_salt: fields.cache_salt()?,
            kv_transfer: fields.kv_transfer_params()?,
            streaming: fields.streaming()?,
        };
        if let Some(max_tokens) = request.max_tokens {
            request.check_min_tokens(max_tokens)?;
        }
        Ok(request)
    }

    /// Checks that the answer can be as long as it must.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check_min_tokens(&self, max_tokens: usize) -> Result<(), RequestError> {
        let min_tokens = self.params.min_tokens;
        if min_tokens <= max_tokens as u64 {
            return Ok(());
        }
        let message = format!("min_tokens = {min_tokens} must be at most max_tokens, which is {max_tokens}");
        Err(wrong("min_tokens", message))
    }

    /// Checks that all tokens that the parameters name are among the `vocab_tokens` of the model.
    ///
    /// # Errors
    /// Names the parameter and the token that is not.
    pub fn check_vocabulary(&self, vocab_tokens: usize) -> Result<(), RequestError> {
        let biased = self.params.logit_bias.iter().map(|(token, _)| ("logit_bias", *token));
        let mut named = biased.chain(self.stop_tokens.iter().map(|token| ("stop_token_ids", *token)));
        match named.find(|(_, token)| *token as usize >= vocab_tokens) {
            None => Ok(()),
            Some((parameter, token)) => Err(wrong(
                parameter,
                format!("{parameter} has token {token}; it must be below the vocabulary's {vocab_tokens}"),
            )),
        }
    }
}

impl Fields {
    fn max_tokens(&self) -> Result<Option<usize>, RequestError> {
        match self.whole("max_completion_tokens", 1)? {
            Some(tokens) => Ok(Some(tokens)),
            None => self.whole("max_tokens", 1),
        }
    }

    fn cache_salt(&self) -> Result<Option<Arc<str>>, RequestError> {
        let salt = self.text("cache_salt")?;
        if salt.as_ref().is_some_and(String::is_empty) {
            let message = "cache_salt is empty; it must have at least one character, or be left out";
            return Err(wrong("cache_salt", message.to_owned()));
        }
        Ok(salt.map(Arc::from))
    }

    fn streaming(&self) -> Result<Streaming, RequestError> {
        if !self.switch("stream", false)? {
            return Ok(Streaming::No);
        }
        let include = self.get("stream_options").and_then(|options| options.get("include_usage"));
        Ok(if include == Some(&true.into()) { Streaming::WithUsage } else { Streaming::Yes })
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
