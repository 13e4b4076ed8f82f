// What must hold of any bytes from outside. Included by the property test beside it and by the fuzz targets `request` and
// `chat_template`, so that both check the same.
#![allow(dead_code, reason = "each fuzz target uses one of the two, the property test both")]

use std::sync::LazyLock;

use roundhouse_text::{ChatInput, ChatTemplate, SpecialTokens};
use serde_json::{Value, json};
use worker::error::RequestError;
use worker::openai::prompt::Input;
use worker::openai::request::{GenerationRequest, Kind};
use worker::openai::tokenize::{DetokenizeRequest, TokenizeInput, TokenizeRequest};

/// A body is read as something that can be computed, or refused with a 400.
pub(crate) fn request(body: &[u8]) {
    for kind in [Kind::Chat, Kind::Completion] {
        match GenerationRequest::parse(kind, body) {
            Ok(request) => {
                assert_eq!(request.params.problem(), None);
                assert!((1..=128).contains(&request.choices));
                if let Input::Prompts(prompts) = &request.input {
                    assert!((1..=128).contains(&(prompts.len() * request.choices)));
                }
                assert!(
                    request
                        .max_tokens
                        .is_none_or(|most| most > 0 && request.params.min_tokens <= most as u64)
                );
                if let Err(error) = request.check_vocabulary(100) {
                    refused(&error);
                }
            }
            Err(error) => refused(&error),
        }
    }
    let others = [TokenizeRequest::parse(body).map(drop), DetokenizeRequest::parse(body).map(drop)];
    others.into_iter().filter_map(Result::err).for_each(|error| refused(&error));
}

/// The client is told what is wrong, in OpenAI's shape; not all that it sent comes back.
fn refused(error: &RequestError) {
    assert_eq!(error.status().as_u16(), 400, "{error}");
    let body: Value = serde_json::from_str(&error.body()).expect("an error is JSON");
    assert_eq!(body["error"]["type"], "invalid_request_error");
    let message = body["error"]["message"].as_str().expect("an error has a message");
    // What a template says of the messages is the model's business.
    let may_be_long = matches!(error, RequestError::Template(_));
    assert!(!message.is_empty() && (may_be_long || message.len() < 2_000), "{} bytes", message.len());
}

static TEMPLATES: LazyLock<[ChatTemplate; 4]> = LazyLock::new(|| {
    let sources = [
        include_str!("../fixtures/templates/builtin.jinja"),
        include_str!("../fixtures/templates/smollm2.jinja"),
        include_str!("../fixtures/templates/qwen3.jinja"),
        include_str!("../fixtures/templates/features.jinja"),
    ];
    sources.map(|source| {
        ChatTemplate::from_source(source, SpecialTokens::default()).expect("a fixture is valid")
    })
});

/// A conversation is rendered or refused by every template. What is no request is taken for the messages of one.
pub(crate) fn chat_template(body: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(body) else { return };
    let body = if value.is_object() { value } else { json!({ "messages": value }) };
    if let Ok(request) = TokenizeRequest::parse(body.to_string().as_bytes())
        && let TokenizeInput::Chat(conversation) = request.input
    {
        let input = ChatInput {
            messages: &conversation.messages,
            tools: conversation.tools.as_ref().and_then(Value::as_array).map(Vec::as_slice),
            ending: conversation.ending,
            extra: Some(&conversation.template_variables),
            unix_seconds: 1_700_000_000,
        };
        for template in &*TEMPLATES {
            if let Err(error) = template.render(&input) {
                refused(&RequestError::Template(error));
            }
        }
    }
}
