//! From a request body to what is to be generated. Every parameter that would change the result is obeyed or refused, none
//! is quietly ignored.

use serde_json::{Map, Value};
use worker_core::SamplingParams;

use crate::error::RequestError;

/// Stop strings that a request may give.
const MAX_STOPS: usize = 16;

/// Which of the two endpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// The prompt as the client gave it.
#[derive(Clone, PartialEq, Debug)]
pub enum Prompt {
    /// A conversation.
    Chat {
        /// Its messages.
        messages: Vec<Value>,
        /// Tools it may call.
        tools: Option<Value>,
        /// Variables for the template.
        template_variables: Map<String, Value>,
    },
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
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
    pub prompt: Prompt,
    /// How tokens are drawn.
    pub params: SamplingParams,
    /// Tokens to generate at most; `None` leaves it to the endpoint.
    pub max_tokens: Option<usize>,
    /// Texts that end the generation.
    pub stop: Vec<String>,
    /// Go on past the model's end of turn.
    pub ignore_eos: bool,
    /// How to reply.
    pub streaming: Streaming,
}

/// Parameters that would change the result and that this worker does not have: name, and values that change nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("logprobs", &["false", "null"]),
    ("top_logprobs", &["0", "null"]),
    ("logit_bias", &["{}", "null"]),
    ("frequency_penalty", &["0", "0.0", "null"]),
    ("presence_penalty", &["0", "0.0", "null"]),
    ("repetition_penalty", &["1", "1.0", "null"]),
    ("min_p", &["0", "0.0", "null"]),
    ("min_tokens", &["0", "null"]),
    ("stop_token_ids", &["[]", "null"]),
    ("n", &["1", "null"]),
    ("best_of", &["1", "null"]),
    ("echo", &["false", "null"]),
    ("suffix", &["\"\"", "null"]),
    ("response_format", &["{\"type\":\"text\"}", "null"]),
    ("tool_choice", &["\"none\"", "\"auto\"", "null"]),
    ("guided_json", &["null"]),
    ("guided_regex", &["null"]),
];

impl GenerationRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// When it is no JSON, or a parameter is wrong; the message says which, and what would be right.
    pub fn parse(kind: Kind, body: &[u8]) -> Result<Self, RequestError> {
        let body: Map<String, Value> = serde_json::from_slice(body).map_err(RequestError::Json)?;
        let fields = Fields(&body);
        for (name, harmless) in UNSUPPORTED {
            if let Some(value) =
                body.get(*name).filter(|value| !harmless.contains(&value.to_string().as_str()))
            {
                let wanted = harmless.join(" or ");
                return Err(wrong(
                    name,
                    format!(
                        "{name} = {value} is not supported by this worker; leave it out, or set {wanted}"
                    ),
                ));
            }
        }
        let max_tokens = match fields.whole("max_completion_tokens", 1)? {
            Some(tokens) => Some(tokens),
            None => fields.whole("max_tokens", 1)?,
        };
        Ok(Self {
            kind,
            model: fields.text("model")?,
            prompt: match kind {
                Kind::Chat => fields.chat()?,
                Kind::Completion => fields.prompt()?,
            },
            params: fields.params()?,
            max_tokens,
            stop: fields.stop()?,
            ignore_eos: fields.switch("ignore_eos")?,
            streaming: fields.streaming()?,
        })
    }
}

fn wrong(parameter: &'static str, message: String) -> RequestError {
    RequestError::Parameter { parameter, message }
}

/// The fields of a body, by type.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn text(&self, name: &'static str) -> Result<Option<String>, RequestError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let text =
            value.as_str().ok_or_else(|| wrong(name, format!("{name} must be a string, not {value}")))?;
        Ok(Some(text.to_owned()))
    }

    fn switch(&self, name: &'static str) -> Result<bool, RequestError> {
        let Some(value) = self.get(name) else { return Ok(false) };
        value.as_bool().ok_or_else(|| wrong(name, format!("{name} must be true or false, not {value}")))
    }

    fn whole(&self, name: &'static str, least: u64) -> Result<Option<usize>, RequestError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number =
            value.as_u64().filter(|number| *number >= least).and_then(|number| usize::try_from(number).ok());
        match number {
            Some(number) => Ok(Some(number)),
            None => {
                Err(wrong(name, format!("{name} must be a whole number of at least {least}, not {value}")))
            }
        }
    }

    fn number(&self, name: &'static str, range: (f64, f64), default: f64) -> Result<f64, RequestError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        let (least, most) = range;
        let number = value.as_f64().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| {
            wrong(name, format!("{name} must be a number from {least} to {most}, not {value}"))
        })
    }

    fn params(&self) -> Result<SamplingParams, RequestError> {
        // -1 and 0 are how vLLM and SGLang write "all".
        let top_k = match self.get("top_k") {
            Some(value) if value.as_i64().is_some_and(|k| k == -1 || k == 0) => None,
            _ => self.whole("top_k", 1)?.map(|k| u32::try_from(k).unwrap_or(u32::MAX)),
        };
        let top_p = self.number("top_p", (0.0, 1.0), 1.0)?;
        if top_p == 0.0 {
            return Err(wrong(
                "top_p",
                "top_p must be greater than 0; for greedy decoding set temperature to 0".to_owned(),
            ));
        }
        let seed = match self.get("seed") {
            None => rand::random(),
            Some(value) => {
                let signed = value.as_i64().map(i64::cast_unsigned);
                let seed = value.as_u64().or(signed);
                seed.ok_or_else(|| wrong("seed", format!("seed must be a whole number, not {value}")))?
            }
        };
        #[expect(clippy::cast_possible_truncation, reason = "a temperature's 24 bits are enough")]
        let (temperature, top_p) = (self.number("temperature", (0.0, 2.0), 1.0)? as f32, top_p as f32);
        Ok(SamplingParams { temperature, top_k, top_p, seed })
    }

    fn stop(&self) -> Result<Vec<String>, RequestError> {
        let wanted =
            || wrong("stop", format!("stop must be a string, or a list of up to {MAX_STOPS} strings"));
        let stop = match self.get("stop") {
            None => Vec::new(),
            Some(Value::String(text)) => vec![text.clone()],
            Some(value) => serde_json::from_value::<Vec<String>>(value.clone()).map_err(|_| wanted())?,
        };
        if stop.len() > MAX_STOPS { Err(wanted()) } else { Ok(stop) }
    }

    fn streaming(&self) -> Result<Streaming, RequestError> {
        if !self.switch("stream")? {
            return Ok(Streaming::No);
        }
        let include = self.get("stream_options").and_then(|options| options.get("include_usage"));
        Ok(if include == Some(&Value::Bool(true)) { Streaming::WithUsage } else { Streaming::Yes })
    }

    fn chat(&self) -> Result<Prompt, RequestError> {
        let wanted = "messages must be a list of at least one message, each with a role and a content";
        let messages = self.get("messages").and_then(Value::as_array).filter(|messages| !messages.is_empty());
        let messages = messages.ok_or_else(|| wrong("messages", wanted.to_owned()))?;
        for (at, message) in messages.iter().enumerate() {
            check_message(at, message)?;
        }
        let template_variables = match self.get("chat_template_kwargs") {
            None => Map::new(),
            Some(Value::Object(variables)) => variables.clone(),
            Some(_) => {
                return Err(wrong(
                    "chat_template_kwargs",
                    "chat_template_kwargs must be an object".to_owned(),
                ));
            }
        };
        Ok(Prompt::Chat { messages: messages.clone(), tools: self.get("tools").cloned(), template_variables })
    }

    fn prompt(&self) -> Result<Prompt, RequestError> {
        let wanted = || {
            let message =
                "prompt must be a string or a list of token ids; of several prompts send each by itself";
            wrong("prompt", message.to_owned())
        };
        let value = self.get("prompt").ok_or_else(wanted)?;
        // A list with one prompt is that prompt.
        let one = value
            .as_array()
            .filter(|list| list.len() == 1 && !list[0].is_number())
            .map_or(value, |list| &list[0]);
        match one {
            Value::String(text) => Ok(Prompt::Text(text.clone())),
            other => serde_json::from_value(other.clone()).map(Prompt::Tokens).map_err(|_| wanted()),
        }
    }
}

fn check_message(at: usize, message: &Value) -> Result<(), RequestError> {
    let problem = if !message.is_object() {
        "must be an object"
    } else if !message["role"].is_string() {
        "must have a role, one of system, user, assistant and tool"
    } else {
        match &message["content"] {
            Value::String(_) | Value::Null => return Ok(()),
            Value::Array(parts)
                if parts.iter().all(|part| part["type"] == "text" && part["text"].is_string()) =>
            {
                return Ok(());
            }
            Value::Array(_) => "has a part that is no text, which this model cannot read",
            _ => "must have a content that is a string or a list of text parts",
        }
    };
    Err(wrong("messages", format!("messages[{at}] {problem}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parse(kind: Kind, body: &Value) -> Result<GenerationRequest, RequestError> {
        GenerationRequest::parse(kind, body.to_string().as_bytes())
    }

    fn chat(extra: &Value) -> Result<GenerationRequest, RequestError> {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        parse(Kind::Chat, &body)
    }

    #[test]
    fn reads_every_parameter() {
        let request = chat(&json!({"model": "m", "temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": -1, "stop": ["a"],
            "max_tokens": 7, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "n": 1,
            "logprobs": false, "response_format": {"type": "text"}, "user": "u"}))
        .unwrap();
        assert_eq!(
            request.params,
            SamplingParams { temperature: 0.5, top_k: Some(5), top_p: 0.9, seed: u64::MAX }
        );
        assert_eq!((request.max_tokens, request.ignore_eos), (Some(7), true));
        assert_eq!((request.streaming, request.stop), (Streaming::WithUsage, vec!["a".to_owned()]));
    }

    #[test]
    fn max_completion_tokens_wins() {
        let request = chat(&json!({"max_tokens": 7, "max_completion_tokens": 9})).unwrap();
        assert_eq!(request.max_tokens, Some(9));
    }

    #[test]
    fn prompts_in_all_their_forms() {
        let prompt =
            |prompt: Value| parse(Kind::Completion, &json!({"prompt": prompt})).map(|request| request.prompt);
        assert_eq!(prompt(json!("a")).unwrap(), Prompt::Text("a".into()));
        assert_eq!(prompt(json!(["a"])).unwrap(), Prompt::Text("a".into()));
        assert_eq!(prompt(json!([1, 2])).unwrap(), Prompt::Tokens(vec![1, 2]));
        assert_eq!(prompt(json!([1])).unwrap(), Prompt::Tokens(vec![1]));
        assert_eq!(prompt(json!([[1, 2]])).unwrap(), Prompt::Tokens(vec![1, 2]));
        for bad in [json!(["a", "b"]), json!(5), json!([-1]), json!({}), Value::Null] {
            assert!(prompt(bad).is_err());
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (extra, parameter) in [
            (json!({"temperature": 3}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": 1.5}), "max_tokens"),
            (json!({"n": 2}), "n"),
            (json!({"logprobs": true}), "logprobs"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"stop": [1]}), "stop"),
            (json!({"stop": vec!["x"; 17]}), "stop"),
            (json!({"seed": "s"}), "seed"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"content": "x"}]}), "messages"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages"),
            (json!({"messages": ["x"]}), "messages"),
            (json!({"model": 5}), "model"),
        ] {
            let error = chat(&extra).unwrap_err();
            let RequestError::Parameter { parameter: named, message } = &error else {
                panic!("{extra}: {error:?}")
            };
            assert_eq!(*named, parameter, "{message}");
            assert!(message.contains(parameter), "{message}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(body in prop::collection::vec(any::<u8>(), 0..200), chat in any::<bool>()) {
            let kind = if chat { Kind::Chat } else { Kind::Completion };
            let _ = GenerationRequest::parse(kind, &body);
        }
    }
}
