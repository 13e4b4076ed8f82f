//! Chat templates against the renderings of Hugging Face transformers.
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::Path;

use roundhouse_text::{ChatInput, ChatTemplate, Ending, SpecialTokens, TemplateError};
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn golden() -> Value {
    let path = root().join("worker/tests/golden/templates.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn render(entry: &Value) -> Result<String, TemplateError> {
    let source = std::fs::read_to_string(root().join(entry["template"].as_str().unwrap())).unwrap();
    let token = |name: &str| entry[name].as_str().map(str::to_owned);
    let special_tokens = SpecialTokens { bos: token("bos_token"), eos: token("eos_token") };
    ChatTemplate::from_source(&source, special_tokens)?.render(&ChatInput {
        messages: entry["messages"].as_array().unwrap(),
        tools: entry["tools"].as_array().map(Vec::as_slice),
        ending: if entry["add_generation_prompt"].as_bool().unwrap() {
            Ending::Opening
        } else {
            Ending::Closed
        },
        extra: entry["extra"].as_object(),
        unix_seconds: 0,
    })
}

#[test]
fn renders_what_transformers_renders() {
    let golden = golden();
    let entries = golden["entries"].as_array().unwrap();
    assert!(entries.len() >= 40, "{} entries", entries.len());
    let mut wrong = Vec::new();
    for entry in entries {
        let expected = entry["expected"].as_str().unwrap();
        match render(entry) {
            Ok(rendered) if rendered == expected => {}
            other => wrong.push(format!("{}\n  got {other:?}\n want {expected:?}", entry["name"])),
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), entries.len(), wrong.join("\n"));
}

#[test]
fn refuses_what_transformers_refuses() {
    for entry in golden()["errors"].as_array().unwrap() {
        let error = render(entry).unwrap_err();
        assert!(matches!(error, TemplateError::Refused(_)), "{}: {error:?}", entry["name"]);
        assert_eq!(error.to_string(), entry["error"].as_str().unwrap());
    }
}
