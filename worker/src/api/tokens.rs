//! Text to tokens and back: for generations, and for `/tokenize` and `/detokenize`.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use http::Response;
use roundhouse_text::{ChatInput, SpecialTokenPolicy};
use serde_json::{Value, json};

use super::{Api, json_response, seconds};
use crate::body::WorkerBody;
use crate::error::RequestError;
use crate::openai::prompt::{Conversation, Prompt};
use crate::openai::tokenize::{DetokenizeRequest, TokenizeInput, TokenizeRequest};

/// Bodies longer than this are read, rendered and tokenized on a thread of their own: at 1 to 2 MB/s a longer one would
/// hold up the other connections of its thread.
const INLINE_BYTES: usize = 512;

impl Api {
    /// Does `work` on a body of `length` bytes; off this thread unless it is short.
    pub(super) async fn away<T: Send + 'static>(
        self: &Arc<Self>,
        length: usize,
        work: impl FnOnce(&Self) -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        if length <= INLINE_BYTES {
            return work(self);
        }
        let api = Arc::clone(self);
        self.tokenizing.run(length, move || work(&api)).await
    }

    pub(super) fn check_model(&self, asked: Option<&str>) -> Result<(), RequestError> {
        match asked.filter(|asked| *asked != self.model) {
            None => Ok(()),
            Some(asked) => {
                Err(RequestError::UnknownModel { asked: asked.to_owned(), served: self.model.clone() })
            }
        }
    }

    pub(super) async fn tokenize(
        self: &Arc<Self>,
        body: Bytes,
    ) -> Result<Response<WorkerBody>, RequestError> {
        let answer =
            self.away(body.len(), move |api| api.tokenize_now(&TokenizeRequest::parse(&body)?)).await?;
        Ok(json_response(&answer))
    }

    fn tokenize_now(&self, request: &TokenizeRequest) -> Result<Value, RequestError> {
        self.check_model(request.model.as_deref())?;
        let (parameter, text) = match &request.input {
            TokenizeInput::Chat(conversation) => ("messages", self.conversation_text(conversation)?),
            TokenizeInput::Text(text) => ("prompt", text.clone()),
        };
        self.check_tokenize(parameter, text.len(), "bytes")?;
        let tokens = self.tokenizer.encode(&text, request.special_tokens).map_err(failed)?;
        let spelled = |token: &u32| {
            String::from_utf8_lossy(&self.tokenizer.token_bytes(*token).unwrap_or_default()).into_owned()
        };
        let strings: Option<Vec<String>> =
            request.token_strings.then(|| tokens.iter().map(spelled).collect());
        Ok(json!({
            "count": tokens.len(),
            "max_model_len": self.context_tokens,
            "tokens": tokens,
            "token_strs": strings,
        }))
    }

    pub(super) async fn detokenize(
        self: &Arc<Self>,
        body: Bytes,
    ) -> Result<Response<WorkerBody>, RequestError> {
        let length = body.len();
        let work = move |api: &Self| {
            let request = DetokenizeRequest::parse(&body)?;
            api.check_model(request.model.as_deref())?;
            api.check_tokenize("tokens", request.tokens.len(), "ids")?;
            api.check_vocabulary("tokens", &request.tokens)?;
            api.text_of(&request.tokens)
        };
        let prompt = self.away(length, work).await?;
        Ok(json_response(&json!({ "prompt": prompt })))
    }

    /// The text of `tokens`, special ones spelled out.
    pub(super) fn text_of(&self, tokens: &[u32]) -> Result<String, RequestError> {
        self.tokenizer.decode_verbatim(tokens).map_err(failed)
    }

    fn check_vocabulary(&self, parameter: &'static str, tokens: &[u32]) -> Result<(), RequestError> {
        match tokens.iter().find(|token| **token as usize >= self.vocab_tokens) {
            None => Ok(()),
            Some(unknown) => {
                let vocab = self.vocab_tokens;
                let message =
                    format!("{parameter} has token {unknown}; it must be below the vocabulary's {vocab}");
                Err(RequestError::Parameter { parameter, message })
            }
        }
    }

    /// Checks how much `/tokenize` or `/detokenize` is asked for.
    fn check_tokenize(&self, parameter: &'static str, count: usize, unit: &str) -> Result<(), RequestError> {
        let most = self.text_limit.tokenize_bytes();
        if count <= most {
            return Ok(());
        }
        let message = format!("{parameter} has {count} {unit}; it must have at most {most}");
        Err(RequestError::Parameter { parameter, message })
    }

    /// Checks what the tokenizer gave: one that does not fit the model has tokens that the model has not.
    fn known(&self, parameter: &'static str, tokens: Vec<u32>) -> Result<Vec<u32>, RequestError> {
        let Some(unknown) = tokens.iter().find(|token| **token as usize >= self.vocab_tokens) else {
            return Ok(tokens);
        };
        let spelling =
            String::from_utf8_lossy(&self.tokenizer.token_bytes(*unknown).unwrap_or_default()).into_owned();
        let vocab = self.vocab_tokens;
        let message = format!(
            "{parameter} has {spelling:?}, which the tokenizer makes token {unknown}, but the model's vocabulary has only \
             {vocab}; leave it out"
        );
        Err(RequestError::Parameter { parameter, message })
    }

    pub(super) fn prompt_tokens(
        &self,
        prompt: &Prompt,
        special: SpecialTokenPolicy,
    ) -> Result<Vec<u32>, RequestError> {
        match prompt {
            Prompt::Text(text) => {
                let tokens = self.text_limit.encode(&self.tokenizer, ("prompt", text), special)?;
                self.known("prompt", tokens)
            }
            Prompt::Tokens(tokens) => {
                self.check_vocabulary("prompt", tokens)?;
                Ok(tokens.clone())
            }
        }
    }

    pub(super) fn conversation_tokens(
        &self,
        conversation: &Conversation,
        special: SpecialTokenPolicy,
    ) -> Result<Vec<u32>, RequestError> {
        let text = self.conversation_text(conversation)?;
        let tokens = self.text_limit.encode(&self.tokenizer, ("messages", &text), special)?;
        self.known("messages", tokens)
    }

    fn conversation_text(&self, conversation: &Conversation) -> Result<String, RequestError> {
        let Some(template) = &self.template else {
            let message = "this model has no chat template: messages cannot be rendered; use /v1/completions";
            return Err(RequestError::Parameter { parameter: "messages", message: message.to_owned() });
        };
        let input = ChatInput {
            messages: &conversation.messages,
            tools: conversation.tools.as_ref().and_then(Value::as_array).map(Vec::as_slice),
            ending: conversation.ending,
            extra: Some(&conversation.template_variables),
            unix_seconds: i64::try_from(seconds(SystemTime::now())).unwrap_or(0),
        };
        template.render(&input).map_err(RequestError::Template)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn failed(error: roundhouse_text::TokenizerError) -> RequestError {
    RequestError::Engine(format!("{error}: {error:?}"))
}
