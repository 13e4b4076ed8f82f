//! Request bodies from a JSONL file, one a line, sent in the file's order.

use anyhow::{Context, bail};
use serde_json::Value;

use super::{Content, Conversation, Dataset, Turn, read_file};
use crate::args::{DatasetArgs, JsonObject};
use crate::body;
use crate::tokens::TokenCounter;

/// The first `wanted` bodies, or all.
///
/// # Errors
/// A file that cannot be read, or a line that is no request body; the message names the line.
pub fn read(args: &DatasetArgs, wanted: Option<usize>, counter: &TokenCounter) -> anyhow::Result<Dataset> {
    let file = read_file(args.dataset_path.as_deref())?;
    let lines = file.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let conversations = lines
        .take(wanted.unwrap_or(usize::MAX))
        .map(|(index, line)| {
            conversation(line, counter).with_context(|| format!("line {} of the openai dataset", index + 1))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let found = conversations.len();
    let short = wanted.filter(|wanted| found < *wanted);
    let notes = short.map(|wanted| format!("the file has {found} bodies, {wanted} were asked for"));
    Ok(Dataset { notes: notes.into_iter().collect(), ..Dataset::of(conversations) })
}

fn conversation(line: &str, counter: &TokenCounter) -> anyhow::Result<Conversation> {
    let body: JsonObject = serde_json::from_str(line).context("not a JSON object")?;
    if body::api_of(&body).is_none() {
        bail!("a body needs messages (chat) or prompt (completions)");
    }
    let tokens = texts(&body).into_iter().map(|text| counter.count(text)).sum::<Result<_, _>>()?;
    let content = Content::Body(body, tokens);
    Ok(Conversation { system: None, turns: vec![Turn { content, output_tokens: None }] })
}

/// All texts of a body: its prompt, or the contents of its messages.
fn texts(body: &JsonObject) -> Vec<&str> {
    let messages = body.get("messages").and_then(Value::as_array).into_iter().flatten();
    let contents = messages.filter_map(|message| message.get("content"));
    contents.chain(body.get("prompt")).flat_map(texts_of).collect()
}

/// A string, or the text parts of an array.
fn texts_of(content: &Value) -> Vec<&str> {
    match content {
        Value::String(text) => vec![text.as_str()],
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part.as_str().or_else(|| part.get("text")?.as_str())).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_the_texts_of_every_shape_of_body() {
        let tokens = |line: &str| conversation(line, &TokenCounter::Approximate).unwrap().input_tokens();
        let chat = r#"{"messages":[{"role":"system","content":"12345678"},
                      {"role":"user","content":[{"type":"text","text":"1234"},{"type":"image_url"}]}]}"#;
        assert_eq!(tokens(chat), 3);
        assert_eq!(tokens(r#"{"prompt":"1234"}"#), 1);
        assert_eq!(tokens(r#"{"prompt":["1234","12345"]}"#), 3);
    }

    #[test]
    fn refuses_what_is_no_body() {
        let error = |line: &str| format!("{:#}", conversation(line, &TokenCounter::Approximate).unwrap_err());
        assert!(error("[1]").contains("not a JSON object"));
        assert!(error(r#"{"model":"x"}"#).contains("messages (chat) or prompt"));
    }
}
