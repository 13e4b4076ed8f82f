//! What a request wants to be gone on from: a conversation, or prompts.

use roundhouse_text::{Ending, SpecialTokenPolicy};
use serde_json::{Map, Value};

use super::fields::{Fields, must, shown, token_ids, wrong};
use crate::error::RequestError;

/// What the client gave.
#[derive(Clone, PartialEq, Debug)]
pub enum Input {
    /// A conversation.
    Chat(Conversation),
    /// Prompts, each with choices of its own; at least one.
    Prompts(Vec<Prompt>),
}

/// Messages, and what their template takes beside them.
#[derive(Clone, PartialEq, Debug)]
pub struct Conversation {
    /// The messages.
    pub messages: Vec<Value>,
    /// Tools that the model may call.
    pub tools: Option<Value>,
    /// Variables for the template.
    pub template_variables: Map<String, Value>,
    /// How the prompt ends.
    pub ending: Ending,
}

/// One prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl Fields {
    pub(super) fn conversation(&self) -> Result<Conversation, RequestError> {
        let wanted = "messages must be a list of at least one message, each with a role and a content";
        let messages = self.get("messages").and_then(Value::as_array).filter(|messages| !messages.is_empty());
        let messages = messages.ok_or_else(|| wrong("messages", wanted.to_owned()))?;
        for (at, message) in messages.iter().enumerate() {
            check_message(at, message)?;
        }
        let template_variables = match self.get("chat_template_kwargs") {
            None => Map::new(),
            Some(Value::Object(variables)) => variables.clone(),
            Some(value) => return Err(must("chat_template_kwargs", "an object", value)),
        };
        let tools = match self.get("tools") {
            None => None,
            Some(Value::Array(tools)) if tools.is_empty() => None,
            Some(tools @ Value::Array(_)) => Some(tools.clone()),
            Some(value) => return Err(must("tools", "a list", value)),
        };
        Ok(Conversation {
            messages: messages.clone(),
            tools,
            template_variables,
            ending: self.ending(messages)?,
        })
    }

    fn ending(&self, messages: &[Value]) -> Result<Ending, RequestError> {
        let opens = self.switch("add_generation_prompt", true)?;
        if !self.switch("continue_final_message", false)? {
            return Ok(if opens { Ending::Opening } else { Ending::Closed });
        }
        let problem = if opens {
            "wants add_generation_prompt = false beside it: a message is gone on with, or another one opened"
        } else if messages.last().is_none_or(|message| message["role"] != "assistant") {
            "wants the last message to be the assistant's"
        } else {
            return Ok(Ending::Within);
        };
        Err(wrong("continue_final_message", format!("continue_final_message {problem}")))
    }

    /// One prompt, or a list of them.
    pub(super) fn prompts(&self) -> Result<Vec<Prompt>, RequestError> {
        let wanted = || {
            let given = self.get("prompt").map_or_else(|| "missing".to_owned(), shown);
            let message = "prompt must be a string, a list of token ids, or a list of at least one of either";
            wrong("prompt", format!("{message}; it is {given}"))
        };
        let value = self.get("prompt").ok_or_else(wanted)?;
        if let Some(prompt) = one_prompt(value) {
            return Ok(vec![prompt]);
        }
        let several = value.as_array().filter(|list| !list.is_empty()).ok_or_else(wanted)?;
        several.iter().map(one_prompt).collect::<Option<_>>().ok_or_else(wanted)
    }

    pub(super) fn one_text(&self) -> Result<String, RequestError> {
        let prompt = self.get("prompt").and_then(Value::as_str);
        let given = || self.get("prompt").map_or_else(|| "missing".to_owned(), shown);
        let prompt =
            prompt.ok_or_else(|| wrong("prompt", format!("prompt must be a string; it is {}", given())))?;
        Ok(prompt.to_owned())
    }

    pub(super) fn special_tokens(
        &self,
        default: SpecialTokenPolicy,
    ) -> Result<SpecialTokenPolicy, RequestError> {
        let add = self.switch("add_special_tokens", default == SpecialTokenPolicy::Add)?;
        Ok(if add { SpecialTokenPolicy::Add } else { SpecialTokenPolicy::Omit })
    }
}

fn one_prompt(value: &Value) -> Option<Prompt> {
    match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        // A list of nothing is no prompt, nor several.
        Value::Array(list) if list.is_empty() => None,
        other => token_ids(other).map(Prompt::Tokens),
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
