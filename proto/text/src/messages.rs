//! Puts OpenAI messages into the shape that chat templates expect.

use serde_json::{Map, Value};

use crate::chat_template::TemplateError;

/// Checks each message and simplifies it: text parts joined by newlines into one string, tool arguments parsed.
pub(crate) fn normalize(messages: &[Value]) -> Result<Vec<Value>, TemplateError> {
    messages.iter().enumerate().map(|(index, message)| normalize_one(index, message)).collect()
}

fn normalize_one(index: usize, message: &Value) -> Result<Value, TemplateError> {
    let invalid = |problem: String| TemplateError::Message { index, problem };
    let Value::Object(fields) = message else {
        return Err(invalid("must be an object with `role` and `content`".to_owned()));
    };
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(invalid("must have a `role`, a string".to_owned()));
    }
    let mut fields = fields.clone();
    match fields.get("content") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let text = join_parts(parts).map_err(invalid)?;
            fields.insert("content".to_owned(), Value::String(text));
        }
        Some(_) => return Err(invalid("`content` must be a string or a list of parts".to_owned())),
    }
    if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
        calls.iter_mut().for_each(parse_arguments);
    }
    Ok(Value::Object(fields))
}

fn join_parts(parts: &[Value]) -> Result<String, String> {
    let texts: Result<Vec<&str>, String> = parts.iter().map(part_text).collect();
    texts.map(|texts| texts.join("\n"))
}

fn part_text(part: &Value) -> Result<&str, String> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
    if kind != "text" {
        return Err(format!("content part of type `{kind}` is not supported; this model takes `text` only"));
    }
    let text = part.as_str().or_else(|| part.get("text").and_then(Value::as_str));
    text.ok_or_else(|| "a content part of type `text` must have `text`, a string".to_owned())
}

/// OpenAI sends a call's arguments as a string of JSON; templates want the object.
fn parse_arguments(call: &mut Value) {
    let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else { return };
    let Some(Value::String(text)) = function.get("arguments") else { return };
    // Anything but an object stays the string it was: a template can still print it.
    if let Ok(arguments) = serde_json::from_str::<Map<String, Value>>(text) {
        function.insert("arguments".to_owned(), Value::Object(arguments));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn joins_text_parts() {
        let message = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(normalize(&[message]).unwrap(), [json!({"role": "user", "content": "a\nb"})]);
    }

    #[test]
    fn names_the_message_and_the_problem() {
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]});
        let error = normalize(&[json!({"role": "user", "content": "x"}), image]).unwrap_err().to_string();
        assert!(error.contains("messages[1]") && error.contains("image_url"), "{error}");
        assert!(normalize(&[json!("x")]).is_err());
        assert!(normalize(&[json!({"content": "x"})]).is_err());
        assert!(normalize(&[json!({"role": "user", "content": 3})]).is_err());
    }

    #[test]
    fn parses_tool_arguments() {
        let call = |arguments: Value| {
            json!({"role": "assistant", "content": null,
                   "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
        };
        assert_eq!(normalize(&[call(json!("{\"a\": 1}"))]).unwrap(), [call(json!({"a": 1}))]);
        assert_eq!(normalize(&[call(json!("not json"))]).unwrap(), [call(json!("not json"))]);
    }
}
