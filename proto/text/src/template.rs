//! Chat templates: Hugging Face's Jinja, rendered by minijinja.
//!
//! Next: the tokenizer cuts what comes out, as it stands; the template has put the special tokens where they belong.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::clock_format;

/// Steps that one rendering may take: a template that loops for ever ends.
const FUEL: u64 = 5_000_000;

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template is no Jinja that this program understands.
    #[error("chat template does not parse: {0}")]
    Syntax(#[source] minijinja::Error),
    /// `tokenizer_config.json` is no JSON.
    #[error("tokenizer_config.json is not valid JSON: {0}")]
    Config(#[source] serde_json::Error),
    /// The template itself refused the conversation, in its own words.
    #[error("{0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("chat template failed: {0}")]
    Render(#[source] minijinja::Error),
}

/// A model's chat template with its special tokens.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

/// What a template is given.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conversation<'a> {
    /// OpenAI's messages. Contents given as parts are joined where they are text.
    pub messages: &'a [Value],
    /// OpenAI's tools.
    pub tools: Option<&'a Value>,
    /// Whether the assistant's turn is opened at the end.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`).
    pub extra: Option<&'a Map<String, Value>>,
}

const NAME: &str = "chat";
/// Marks an error as the template's own, so that its words reach the client without ours around them.
const REFUSED: &str = "refused by the template: ";

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(template: &str, bos_token: &str, eos_token: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(TemplateError::Syntax)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: String| clock_format::now(&format));
        environment.add_template_owned(NAME, template.to_owned()).map_err(TemplateError::Syntax)?;
        Ok(Self { environment, bos_token: bos_token.to_owned(), eos_token: eos_token.to_owned() })
    }

    /// Finds the template of a model: `chat_template.jinja` if there is one, else what `tokenizer_config.json` has, of
    /// several named ones the `default`. `None` if the model has none.
    ///
    /// # Errors
    /// When the configuration is no JSON or the template no Jinja.
    pub fn from_files(config: Option<&str>, file: Option<&str>) -> Result<Option<Self>, TemplateError> {
        let config: Value = serde_json::from_str(config.unwrap_or("{}")).map_err(TemplateError::Config)?;
        let inline = match &config["chat_template"] {
            Value::String(template) => Some(template.as_str()),
            Value::Array(named) => {
                let default = named.iter().find(|entry| entry["name"] == "default").or(named.first());
                default.and_then(|entry| entry["template"].as_str())
            }
            _ => None,
        };
        let Some(template) = file.or(inline) else { return Ok(None) };
        // A special token is a string, or an object that has it as its content.
        let token = |key: &str| config[key].as_str().or(config[key]["content"].as_str()).unwrap_or_default();
        Self::new(template, token("bos_token"), token("eos_token")).map(Some)
    }

    /// Renders a conversation into the prompt's text.
    ///
    /// # Errors
    /// [`TemplateError::Refused`] when the template says that the conversation is wrong, [`TemplateError::Render`] when it
    /// fails on it.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, TemplateError> {
        let messages: Vec<Value> = conversation.messages.iter().map(with_plain_content).collect();
        let mut context = conversation.extra.cloned().unwrap_or_default();
        context.insert("messages".to_owned(), Value::Array(messages));
        if let Some(tools) = conversation.tools {
            context.insert("tools".to_owned(), tools.clone());
        } else {
            context.insert("tools".to_owned(), Value::Null);
        }
        context.insert("add_generation_prompt".to_owned(), json!(conversation.add_generation_prompt));
        context.insert("bos_token".to_owned(), json!(self.bos_token));
        context.insert("eos_token".to_owned(), json!(self.eos_token));
        let template = self.environment.get_template(NAME).map_err(TemplateError::Render)?;
        template.render(Jinja::from(Serde(&context))).map_err(|error| match refusal(&error) {
            Some(words) => TemplateError::Refused(words),
            None => TemplateError::Render(error),
        })
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

/// Joins the text parts of a message's content; templates of text models want a string.
fn with_plain_content(message: &Value) -> Value {
    let mut message = message.clone();
    if let Some(Value::Array(parts)) = message.get("content") {
        let text: Vec<_> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
        message["content"] = Value::String(text.concat());
    }
    message
}

fn raise_exception(message: String) -> Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, REFUSED.to_owned() + &message))
}

fn refusal(error: &minijinja::Error) -> Option<String> {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        let own = error.downcast_ref::<minijinja::Error>().and_then(minijinja::Error::detail);
        if let Some(words) = own.and_then(|detail| detail.strip_prefix(REFUSED)) {
            return Some(words.to_owned());
        }
        cause = error.source();
    }
    None
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=…)`, as transformers gives it to templates: no HTML escapes,
/// a space after commas and colons.
fn to_json(value: Jinja, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Neither changes what templates in use get.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let failed = |error: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut text = Vec::new();
    if let Some(width) = indent {
        let spaces = " ".repeat(width.min(16));
        let format = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
        value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, format)).map_err(failed)?;
    } else {
        value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Spaced)).map_err(failed)?;
    }
    String::from_utf8(text).map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// One line, with a space after commas and colons.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
