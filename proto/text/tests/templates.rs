//! Chat templates against what transformers renders. The golden file was written by `worker/models/golden_hf.py`.
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::Path;

use roundhouse_text::template::{ChatTemplate, Conversation, TemplateError};
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn render(entry: &Value) -> Result<String, TemplateError> {
    let text = std::fs::read_to_string(root().join(entry["template"].as_str().unwrap())).unwrap();
    let token = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    let template = ChatTemplate::new(&text, &token("bos_token"), &token("eos_token")).unwrap();
    template.render(&Conversation {
        messages: entry["messages"].as_array().unwrap(),
        tools: Some(&entry["tools"]).filter(|tools| !tools.is_null()),
        add_generation_prompt: entry["add_generation_prompt"].as_bool().unwrap(),
        extra: entry["extra"].as_object(),
    })
}

fn golden() -> Value {
    let text = std::fs::read(root().join("worker/tests/golden/templates.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

#[test]
fn renders_as_transformers_does() {
    let golden = golden();
    let entries = golden["entries"].as_array().unwrap();
    assert!(entries.len() >= 40);
    for entry in entries {
        let rendered = render(entry).unwrap_or_else(|error| panic!("{}: {error}", entry["name"]));
        assert_eq!(rendered, entry["expected"].as_str().unwrap(), "{}", entry["name"]);
    }
}

#[test]
fn refuses_in_the_templates_own_words() {
    for entry in golden()["errors"].as_array().unwrap() {
        let error = render(entry).unwrap_err();
        assert!(matches!(error, TemplateError::Refused(_)), "{}: {error:?}", entry["name"]);
        assert_eq!(error.to_string(), entry["error"].as_str().unwrap());
    }
}

#[test]
fn text_parts_are_joined() {
    let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}|{% endfor %}", "", "").unwrap();
    let parts = json!([{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]);
    let messages = [json!({"role": "user", "content": parts}), json!({"role": "user", "content": "c"})];
    let conversation = Conversation { messages: &messages, ..Conversation::default() };
    assert_eq!(template.render(&conversation).unwrap(), "ab|c|");
}

#[test]
fn templates_are_found_where_models_keep_them() {
    let found = |config: &Value, file| {
        let template = ChatTemplate::from_files(Some(&config.to_string()), file).unwrap()?;
        Some(template.render(&Conversation::default()).unwrap())
    };
    assert_eq!(
        found(&json!({"chat_template": "one{{ eos_token }}", "eos_token": "E"}), None).unwrap(),
        "oneE"
    );
    let named =
        json!({"chat_template": [{"name": "x", "template": "no"}, {"name": "default", "template": "yes"}]});
    assert_eq!(found(&named, None).unwrap(), "yes");
    assert_eq!(found(&named, Some("file")).unwrap(), "file");
    let object = json!({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}});
    assert_eq!(found(&object, None).unwrap(), "<s>");
    assert_eq!(found(&json!({}), None), None);
    assert!(ChatTemplate::from_files(Some("{"), None).is_err());
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(endless, "", "").unwrap();
    assert!(matches!(template.render(&Conversation::default()), Err(TemplateError::Render(_))));
    assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(TemplateError::Syntax(_))));
}
