//! Chat templates: messages in, the prompt's text out, as Hugging Face transformers renders it.
//!
//! Templates are Jinja written for Python, so this sets up `minijinja` to behave like it: Python's string methods,
//! `tojson` as `json.dumps`, `None` and `True` printed as Python prints them. Reads no clock: the caller says what time
//! it is. Next: [`Tokenizer::encode`](crate::Tokenizer::encode) without special tokens.

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, ErrorKind, State, Value as JinjaValue};
use minijinja_contrib::pycompat;
use serde_json::{Map, Value};

use crate::json_dumps::{DumpOptions, dumps, python_repr};
use crate::messages::normalize;
use crate::strftime::strftime;

/// The special tokens that templates name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<String>,
    /// Ends a turn.
    pub eos: Option<String>,
}

/// How a prompt ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Ending {
    /// With the opening of an assistant's turn (`add_generation_prompt`).
    #[default]
    Opening,
    /// After the last message.
    Closed,
    /// In the last message, at the end of its content, so that it is gone on with (`continue_final_message`).
    Within,
}

/// What a prompt is rendered from.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'input> {
    /// OpenAI messages; contents are strings or lists of text parts.
    pub messages: &'input [Value],
    /// OpenAI tools.
    pub tools: Option<&'input [Value]>,
    /// How the prompt ends.
    pub ending: Ending,
    /// Variables of the template's own (`enable_thinking`, `date_string`).
    pub extra: Option<&'input Map<String, Value>>,
    /// The time that `strftime_now` shows, in seconds since 1970, UTC.
    pub unix_seconds: i64,
}

/// Why there is no template, or no prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// tokenizer_config.json is not JSON.
    #[error("tokenizer_config.json is not valid JSON")]
    Config(#[source] serde_json::Error),
    /// Neither file has a template.
    #[error("no chat template: neither chat_template.jinja nor `chat_template` in tokenizer_config.json")]
    Missing,
    /// The template cannot be parsed.
    #[error("chat template `{name}` is invalid: {problem}")]
    Syntax {
        /// Which of the model's templates.
        name: String,
        /// What the parser says.
        problem: String,
    },
    /// A message has the wrong shape.
    #[error("messages[{index}] {problem}")]
    Message {
        /// Its place in the list, from 0.
        index: usize,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// The template itself refused the messages (`raise_exception`).
    #[error("{0}")]
    Refused(String),
    /// The template failed on these messages.
    #[error("chat template failed: {0}")]
    Render(String),
}

/// A model's chat templates, parsed.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: SpecialTokens,
}

/// Steps that one rendering may take: a template that never ends is stopped.
const FUEL: u64 = 5_000_000;

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Reads the template and the special tokens of a model.
    ///
    /// `config` is the content of tokenizer_config.json, `jinja` that of chat_template.jinja, which wins where both have a
    /// template. A list of named templates must have `default`; `tool_use` serves requests with tools.
    ///
    /// # Errors
    /// [`TemplateError::Config`], [`TemplateError::Missing`] or [`TemplateError::Syntax`].
    pub fn from_files(config: Option<&[u8]>, jinja: Option<&str>) -> Result<Self, TemplateError> {
        let config: Value = match config {
            Some(bytes) => serde_json::from_slice(bytes).map_err(TemplateError::Config)?,
            None => Value::Null,
        };
        let mut templates = named_templates(&config["chat_template"]);
        if let Some(source) = jinja {
            templates.insert(DEFAULT.to_owned(), source.to_owned());
        }
        let special_tokens =
            SpecialTokens { bos: token_text(&config["bos_token"]), eos: token_text(&config["eos_token"]) };
        Self::new(templates, special_tokens)
    }

    /// Parses one template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn from_source(source: &str, special_tokens: SpecialTokens) -> Result<Self, TemplateError> {
        Self::new(BTreeMap::from([(DEFAULT.to_owned(), source.to_owned())]), special_tokens)
    }

    fn new(
        templates: BTreeMap<String, String>,
        special_tokens: SpecialTokens,
    ) -> Result<Self, TemplateError> {
        if !templates.contains_key(DEFAULT) {
            return Err(TemplateError::Missing);
        }
        let mut environment = python_like_environment();
        for (name, source) in templates {
            environment
                .add_template_owned(name.clone(), without_generation_tags(&source))
                .map_err(|error| TemplateError::Syntax { name, problem: error_text(&error) })?;
        }
        Ok(Self { environment, special_tokens })
    }

    /// The tokens that [`ChatTemplate::from_files`] found.
    #[must_use]
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special_tokens
    }

    /// Renders the prompt.
    ///
    /// # Errors
    /// [`TemplateError::Message`], [`TemplateError::Refused`] or [`TemplateError::Render`]: the messages do not suit the
    /// template.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let mut messages = normalize(input.messages)?;
        if input.ending == Ending::Within {
            mark_end_of_content(&mut messages)?;
        }
        let name = match input.tools {
            Some(_) if self.environment.get_template(TOOL_USE).is_ok() => TOOL_USE,
            _ => DEFAULT,
        };
        let template = self.environment.get_template(name).map_err(|error| render_error(&error))?;
        let now = input.unix_seconds;
        let mut variables = vec![
            ("messages", JinjaValue::from(Serde(&messages))),
            ("tools", JinjaValue::from(Serde(input.tools))),
            ("documents", JinjaValue::from(())),
            ("add_generation_prompt", JinjaValue::from(input.ending == Ending::Opening)),
            ("strftime_now", JinjaValue::from_function(move |format: &str| strftime(format, now))),
        ];
        let tokens = [("bos_token", &self.special_tokens.bos), ("eos_token", &self.special_tokens.eos)];
        for (name, token) in tokens {
            variables.extend(token.as_deref().map(|token| (name, JinjaValue::from(token))));
        }
        let extra = input.extra.into_iter().flatten();
        variables.extend(extra.map(|(key, value)| (key.as_str(), JinjaValue::from(Serde(value)))));
        let mut prompt =
            template.render(JinjaValue::from_pairs(variables)).map_err(|error| render_error(&error))?;
        if input.ending == Ending::Within {
            let problem = || "is not written by the chat template as it is".to_owned();
            let lacks = || TemplateError::Message { index: messages.len() - 1, problem: problem() };
            prompt.truncate(prompt.rfind(END_OF_CONTENT).ok_or_else(lacks)?);
        }
        Ok(prompt)
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ChatTemplate")
            .field("special_tokens", &self.special_tokens)
            .finish_non_exhaustive()
    }
}

/// Stands at the end of a content that is gone on with, so that its end is found whatever a template does to the white space around it, and
/// whatever it writes after it; transformers does so too.
const END_OF_CONTENT: &str = "\u{f8ff}end of content\u{f8ff}";

/// Puts the mark at the end of the last message's content.
fn mark_end_of_content(messages: &mut [Value]) -> Result<(), TemplateError> {
    let index = messages.len().saturating_sub(1);
    match messages.last_mut().and_then(|message| message.get_mut("content")) {
        Some(Value::String(content)) => content.push_str(END_OF_CONTENT),
        _ => {
            let problem = "has no `content` to go on with".to_owned();
            return Err(TemplateError::Message { index, problem });
        }
    }
    Ok(())
}

/// A string, or a list of `{"name", "template"}`.
fn named_templates(value: &Value) -> BTreeMap<String, String> {
    match value {
        Value::String(source) => BTreeMap::from([(DEFAULT.to_owned(), source.clone())]),
        Value::Array(entries) => entries
            .iter()
            .filter_map(|entry| {
                Some((entry["name"].as_str()?.to_owned(), entry["template"].as_str()?.to_owned()))
            })
            .collect(),
        _ => BTreeMap::new(),
    }
}

/// A token is written as a string or as `{"content": …}`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn python_like_environment() -> Environment<'static> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let syntax = syntax.expect("the delimiters are the default ones");
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    environment
        .set_formatter(|output, _, value| output.write_str(&printed(value)).map_err(minijinja::Error::from));
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<JinjaValue, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, "refused").with_source(Raised(message)))
    });
    environment
}

/// `{{ value }}`, as Python prints it.
fn printed(value: &JinjaValue) -> String {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            serde_json::to_value(value).map_or_else(|_| value.to_string(), |json| python_repr(&json))
        }
        _ => value.to_string(),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "minijinja hands filters their keyword arguments by value")]
fn to_json(_state: &State, value: &JinjaValue, arguments: Kwargs) -> Result<JinjaValue, minijinja::Error> {
    if value.is_undefined() {
        return Err(minijinja::Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let options = DumpOptions {
        indent: arguments.get("indent")?,
        ascii: arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    arguments.assert_all_used()?;
    let json = serde_json::to_value(value).map_err(|error| {
        minijinja::Error::new(ErrorKind::BadSerialization, "value has no JSON").with_source(error)
    })?;
    Ok(JinjaValue::from_safe_string(dumps(&json, options)))
}

/// `{% generation %}` marks an assistant's own tokens for training and prints nothing; minijinja does not know the tag, and
/// an `if` in its place keeps the white space around it.
fn without_generation_tags(source: &str) -> String {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}") else { break };
        let (before, from_tag) = rest.split_at(start);
        let (tag, after) = from_tag.split_at(end + 2);
        output.push_str(before);
        let replaced = match tag[2..tag.len() - 2].trim_matches(['-', '+']).trim() {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        };
        output.push_str(&replaced);
        rest = after;
    }
    output + rest
}

/// What `raise_exception` was called with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn render_error(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(raised) = current.downcast_ref::<Raised>() {
            return TemplateError::Refused(raised.0.clone());
        }
        cause = current.source();
    }
    TemplateError::Render(error_text(error))
}

fn error_text(error: &minijinja::Error) -> String {
    // `Display` alone leaves out the causes, and the alternate form prints the whole template.
    std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

#[cfg(test)]
#[path = "chat_template_tests.rs"]
mod tests;
