use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::given::Given;
use super::request::rest_of;
use super::seam::Seam;
use super::{Kind, event};
use crate::openai::members::Members;

fn data(event: &Value) -> String {
    format!("data: {event}\n\n")
}

fn chat_event(id: &str, delta: &Value, finish: &Value) -> String {
    data(&json!({"id": id, "object": "chat.completion.chunk", "created": 7, "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]}))
}

fn text_event(id: &str, text: &str, finish: &Value) -> String {
    data(
        &json!({"id": id, "choices": [{"index": 0, "text": text, "logprobs": null, "finish_reason": finish}]}),
    )
}

fn usage_event(id: &str, prompt: u32, completion: u32, cached: u32) -> String {
    data(&json!({"id": id, "choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt + completion, "prompt_tokens_details": {"cached_tokens": cached}}}))
}

fn opening(id: &str) -> String {
    chat_event(id, &json!({"role": "assistant", "content": ""}), &Value::Null)
}

fn content(id: &str, text: &str) -> String {
    chat_event(id, &json!({"content": text}), &Value::Null)
}

fn given(kind: Kind, events: &[String]) -> Given {
    let mut given = Given::new(kind);
    for event in events {
        assert_eq!(given.hear(event.as_bytes()), event.len());
    }
    given
}

fn members(body: &Value) -> Members {
    let body = Bytes::from(body.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(Members::of(&body.into())).unwrap()
}

fn asked(given: &Given, body: &Value) -> Option<Value> {
    let members = members(body);
    let body = rest_of(given, &members)?.joined();
    Some(serde_json::from_slice(&body).unwrap_or_else(|error| panic!("{error}: {body:?}")))
}

/// A piece of text that is hard on those who read it as it stands.
fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        ".{0,4}",
        Just("\\".to_owned()),
        Just("\"".to_owned()),
        Just("\\\"".to_owned()),
        "[ \n\t]{1,3}"
    ]
}

proptest! {
    #[test]
    fn what_was_given_is_at_the_end_of_what_is_asked(pieces in prop::collection::vec(piece(), 0..12), is_chat in any::<bool>()) {
        let kind = if is_chat { Kind::Chat } else { Kind::Completions };
        let events: Vec<String> = match kind {
            Kind::Chat => std::iter::once(opening("a")).chain(pieces.iter().map(|text| content("a", text))).collect(),
            Kind::Completions => pieces.iter().map(|text| text_event("a", text, &Value::Null)).collect(),
        };
        // However many events come at once.
        let given = given(kind, &[events[..events.len() / 2].concat(), events[events.len() / 2..].concat()]);
        let whole = pieces.concat();
        let text = |json: &str| serde_json::from_str::<String>(&format!("\"{json}\"")).unwrap();
        prop_assert_eq!(text(given.text()), whole.clone());
        prop_assert_eq!(given.pieces(), pieces.iter().filter(|piece| !piece.is_empty()).count());
        let sent = match kind {
            Kind::Chat => json!({"messages": [{"role": "user", "content": "x"}]}),
            Kind::Completions => json!({"prompt": "x", "max_tokens": 99}),
        };
        let body = asked(&given, &sent).unwrap();
        let put = match kind {
            Kind::Chat => body["messages"][1]["content"].as_str().unwrap_or_default().to_owned(),
            Kind::Completions => body["prompt"].as_str().unwrap().strip_prefix('x').unwrap().to_owned(),
        };
        prop_assert_eq!(put, whole);
    }
}

#[test]
fn the_rest_is_asked_for_in_the_words_of_the_endpoint() {
    let chat =
        given(Kind::Chat, &[opening("a"), content("a", "The"), content("a", " \"sky\""), content("a", "\n")]);
    let sent = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 10,
        "tools": [{"type": "function"}], "n": 1, "seed": null, "response_format": {"type": "text"}});
    let body = asked(&chat, &sent).unwrap();
    let mut expected = sent.clone();
    let messages = expected["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": "The \"sky\"\n"}));
    expected["max_tokens"] = 7.into();
    expected["add_generation_prompt"] = false.into();
    expected["continue_final_message"] = true.into();
    assert_eq!(body, expected);
    let nothing = given(Kind::Chat, &[opening("a")]);
    assert_eq!(asked(&nothing, &sent).unwrap(), sent, "the same once more");
    let text = given(Kind::Completions, &[text_event("a", "sky", &Value::Null)]);
    let body = asked(&text, &json!({"prompt": "The ", "max_tokens": 2})).unwrap();
    assert_eq!(body, json!({"prompt": "The sky", "max_tokens": 1}));
}

#[test]
fn what_would_be_another_answer_is_not_asked_for() {
    let chat = given(Kind::Chat, &[opening("a"), content("a", "The"), content("a", " sky")]);
    for (member, value) in [
        ("seed", json!(1)),
        ("n", json!(2)),
        ("logprobs", json!(true)),
        ("frequency_penalty", json!(0.5)),
        ("max_tokens", json!(2)),
        ("max_tokens", json!("2")),
        ("response_format", json!({"type": "json_object"})),
        ("tool_choice", json!("required")),
        ("messages", json!([])),
        ("messages", json!("x")),
        ("continue_final_message", json!(true)),
        ("what_nobody_knows", json!(0)),
    ] {
        let mut sent = json!({"messages": [{"role": "user", "content": "x"}]});
        assert!(asked(&chat, &sent).is_some());
        sent[member] = value.clone();
        assert!(asked(&chat, &sent).is_none(), "{member}: {value}");
    }
    let text = given(Kind::Completions, &[text_event("a", "sky", &Value::Null)]);
    for prompt in [json!(["a"]), json!([1, 2]), json!("")] {
        assert!(asked(&text, &json!({"prompt": prompt, "max_tokens": 9})).is_none(), "{prompt}");
    }
    assert!(asked(&text, &json!({"prompt": "x"})).is_none(), "who knows how long it may be");
    let thinks = given(Kind::Chat, &[content("a", "<think>"), content("a", "so")]);
    assert!(asked(&thinks, &json!({"messages": [{"role": "user", "content": "x"}]})).is_none());
}

#[test]
fn what_nobody_else_could_go_on_with_is_not_gone_on_with() {
    let first = opening("a");
    let other = |event: String| {
        let given = given(Kind::Chat, &[first.clone(), content("a", "x"), event, content("a", "y")]);
        (given.can_go_on(), given.text().to_owned())
    };
    let null = Value::Null;
    assert_eq!(other(": still there\n\n".into()), (true, "xy".into()));
    assert_eq!(other(content("a", "").replace("\"content\":\"\"", "\"content\":null")), (true, "xy".into()));
    let delta = |delta: Value| other(chat_event("a", &delta, &null));
    assert_eq!(
        delta(json!({"content": "z", "reasoning_content": null, "tool_calls": []})),
        (true, "xzy".into())
    );
    for event in [
        chat_event("a", &json!({"reasoning_content": "hm"}), &null),
        chat_event("a", &json!({"tool_calls": [{"index": 0}]}), &null),
        content("a", "x").replace("\"index\":0", "\"index\":1"),
        content("a", "x").replace("\"logprobs\":null", "\"logprobs\":{\"content\":[{}]}"),
        "data: {\"choices\":[{},{}]}\n\n".into(),
        "data: what is this?\n\n".into(),
        "event: other\n\n".into(),
        content("a", &"x".repeat(2 << 20)),
    ] {
        assert_eq!(other(event.clone()), (false, String::new()), "{event:.200}");
    }
    let (can_go_on, _) = other(chat_event("a", &json!({"content": "z"}), &json!("stop")));
    assert!(!can_go_on, "there is nothing left of it");
}

#[test]
fn an_error_is_heard_and_no_part_of_the_answer() {
    let mut given = given(Kind::Chat, &[opening("a"), content("a", "x")]);
    let error = data(&json!({"error": {"message": "EngineCore encountered an issue", "code": 500}}));
    let before = content("a", "y");
    assert_eq!(given.hear((before.clone() + &error + "data: [DONE]\n\n").as_bytes()), before.len());
    assert!(given.can_go_on() && given.text() == "xy");
    for clients in [json!({"code": 400}), json!({"type": "BadRequestError", "code": "x"})] {
        let mut given = self::given(Kind::Chat, &[opening("a")]);
        let event = data(&json!({"error": clients}));
        assert_eq!(given.hear(event.as_bytes()), event.len());
        assert!(!given.can_go_on(), "another engine would say the same");
    }
}

#[test]
fn the_rest_has_one_name_one_opening_and_one_usage_with_the_beginning() {
    let beginning = [opening("a"), content("a", "The"), content("a", " sky"), content("a", "\n")];
    let given = given(Kind::Chat, &beginning);
    let seam = Seam::after(&given);
    let stop = chat_event("b", &json!({"content": ""}), &json!("stop"));
    let rest = [opening("b"), content("b", " is"), content("b", " blue"), stop, usage_event("b", 23, 2, 22)];
    let events = rest.concat() + "data: [DONE]\n\n";
    let out = seam.pass(&Bytes::from(events));
    let expected = [
        content("a", " is"),
        content("a", " blue"),
        chat_event("a", &json!({"content": ""}), &json!("stop")),
        usage_event("a", 20, 5, 20),
    ];
    assert_eq!(std::str::from_utf8(&out).unwrap(), expected.concat() + "data: [DONE]\n\n");
    let strange = Bytes::from_static(b"data: {\"choices\":[{},{}]}\n\n: x\n\n");
    assert_eq!(seam.pass(&strange), strange, "as it is");
}

#[test]
fn places_are_those_of_the_line() {
    let line = content("a", "x");
    let Some(event::Said::Piece(piece)) = event::read(line.trim_end().as_bytes(), Kind::Chat) else {
        panic!()
    };
    assert_eq!(&line[piece.place(piece.text.unwrap())], "x");
    assert_eq!(&line[piece.place(piece.id.unwrap())], "\"a\"");
}
