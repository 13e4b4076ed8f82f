use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::given::Given;
use super::request::{Rest, rest_of};
use super::seam::Seam;
use super::tokens::{InTokens, Marks, Next, Teller, Tokens, chat_question, rest_behind_the_opening, written};
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
    let Rest::Body(body) = rest_of(given, &members)? else { panic!("in tokens") };
    let body = body.joined();
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
            _ => pieces.iter().map(|text| text_event("a", text, &Value::Null)).collect(),
        };
        // However many events come at once.
        let given = given(kind, &[events[..events.len() / 2].concat(), events[events.len() / 2..].concat()]);
        let whole = pieces.concat();
        let text = |json: &str| serde_json::from_str::<String>(&format!("\"{json}\"")).unwrap();
        prop_assert_eq!(text(given.text()), whole.clone());
        prop_assert_eq!(given.pieces(), pieces.iter().filter(|piece| !piece.is_empty()).count());
        let sent = match kind {
            Kind::Chat => json!({"messages": [{"role": "user", "content": "x"}]}),
            _ => json!({"prompt": "x", "max_tokens": 99}),
        };
        let body = asked(&given, &sent).unwrap();
        let put = match kind {
            Kind::Chat => body["messages"][1]["content"].as_str().unwrap_or_default().to_owned(),
            _ => body["prompt"].as_str().unwrap().strip_prefix('x').unwrap().to_owned(),
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
        chat_event("a", &json!({"reasoning": "hm", "reasoning_content": "so"}), &null),
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
    let mut seam = Seam::after(&given);
    let stop = chat_event("b", &json!({"content": ""}), &json!("stop"));
    let rest = [opening("b"), content("b", " is"), content("b", " blue"), stop, usage_event("b", 23, 2, 22)];
    let events = rest.concat() + "data: [DONE]\n\n";
    let out = seam.pass(&Bytes::from(events)).events;
    let expected = [
        content("a", " is"),
        content("a", " blue"),
        chat_event("a", &json!({"content": ""}), &json!("stop")),
        usage_event("a", 20, 5, 20),
    ];
    assert_eq!(std::str::from_utf8(&out).unwrap(), expected.concat() + "data: [DONE]\n\n");
    let strange = Bytes::from_static(b"data: {\"choices\":[{},{}]}\n\n: x\n\n");
    assert_eq!(seam.pass(&strange).events, strange, "as it is");
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

fn thought(id: &str, text: &str) -> String {
    chat_event(id, &json!({"reasoning": text}), &Value::Null)
}

#[test]
fn a_thought_is_heard_apart_from_the_answer() {
    let both = |delta: Value| chat_event("a", &delta, &Value::Null);
    let mut events = vec![opening("a"), thought("a", "\nHm"), thought("a", ", so")];
    let within = given(Kind::Chat, &events);
    assert_eq!((within.thought(), within.text(), within.pieces()), (Some("\\nHm, so"), "", 2));
    assert!(!within.thought_is_over());
    events.push(both(json!({"reasoning": ".", "content": "\n\nThe"})));
    events.push(content("a", " sky"));
    let behind = given(Kind::Chat, &[events.concat()]);
    assert_eq!((behind.thought(), behind.text()), (Some("\\nHm, so."), "\\n\\nThe sky"));
    // Its end is a token as well.
    assert_eq!((behind.thought_is_over(), behind.thought_pieces(), behind.pieces()), (true, 3, 6));
    let twice = both(json!({"reasoning": "Hm", "reasoning_content": "Hm", "content": null}));
    let named_twice = given(Kind::Chat, &[twice.clone(), twice]);
    assert_eq!(named_twice.thought(), Some("HmHm"));
    events.push(thought("a", "again"));
    assert!(!given(Kind::Chat, &events).can_go_on(), "one thought, and then the answer");
}

#[test]
fn what_a_chat_says_of_its_template_is_told() {
    let question = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}], "model": "m", "stream": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let question = chat_question(Teller::Vllm, &members(&body), None)?.joined();
        Some(serde_json::from_slice::<Value>(&question).unwrap())
    };
    let plain =
        json!({"messages": [{"role": "user", "content": "x"}], "model": "m", "add_generation_prompt": true});
    assert_eq!(question(json!({})).unwrap(), plain);
    let told = |more: Value| question(more).unwrap()["chat_template_kwargs"].take();
    assert_eq!(told(json!({"chat_template_kwargs": {"a": 1}})), json!({"a": 1}));
    let effort = json!({"reasoning_effort": "low", "enable_thinking": true});
    assert_eq!(told(json!({"reasoning_effort": "low"})), effort);
    assert_eq!(told(json!({"reasoning_effort": "none"}))["enable_thinking"], false);
    let own = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(told(own)["enable_thinking"], true);
    assert!(question(json!({"chat_template_kwargs": 5})).is_none());
}

#[test]
fn sglang_is_told_of_a_chat_what_it_would_be_asked() {
    let told = json!({"messages": [{"role": "user", "content": "x"}], "model": "m", "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1}});
    let mut body = told.clone();
    body["stream"] = true.into();
    let question = chat_question(Teller::Sglang, &members(&body), None).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&question.joined()).unwrap(), told);
    let begun = given(Kind::Chat, &[opening("a"), content("a", "The")]);
    assert!(chat_question(Teller::Sglang, &members(&body), Some(&begun)).is_none());
}

/// What SGLang is asked after `given` in a chat of these tokens, and how that follows.
fn asked_of_sglang(given: &Given, chat: &[u32], body: &Value) -> (Value, Seam) {
    let marks = given.thought().and(Marks::of(&[BEGIN, END, BEGIN, END, 60, 61]));
    let around = (marks, ("<t>", "</t>"));
    let (rest, seam) = rest_behind_the_opening(&tokens(chat), given, around, &members(body)).unwrap();
    (serde_json::from_slice(&rest.joined()).unwrap(), seam)
}

#[test]
fn sglang_goes_on_behind_a_thought_with_all_that_was_written() {
    let behind = given(Kind::Chat, &[opening("a"), thought("a", "\nHm."), content("a", "\n\nThe \"sky\"")]);
    let sent = json!({"messages": [{"role": "user", "content": "x"}], "tools": [{}], "max_tokens": 9});
    let written = "<t>\nHm.</t>\n\nThe \"sky\"";
    let expected = json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": written}],
        "tools": [{}], "max_tokens": 9 - behind.pieces(), "continue_final_message": true, "separate_reasoning": false});
    assert_eq!(asked_of_sglang(&behind, &[1, 2], &sent).0, expected);
    let open = asked_of_sglang(&behind, &[1, BEGIN, 2], &sent).0;
    assert_eq!(open["messages"][1]["content"], &written[3..], "the template has begun the thought");
    let plain = given(Kind::Chat, &[content("a", "<think>so")]);
    assert_eq!(asked_of_sglang(&plain, &[1], &sent).0["messages"][1]["content"], "<think>so");
}

#[test]
fn what_sglang_says_of_a_thought_is_told_as_one_up_to_its_end() {
    let beginning = [opening("a"), chat_event("a", &json!({"reasoning_content": "Hm"}), &Value::Null)];
    let within = given(Kind::Chat, &beginning);
    let sent = json!({"messages": [{"role": "user", "content": "x"}]});
    let seam = || {
        let (asked, seam) = asked_of_sglang(&within, &[1, 2], &sent);
        assert_eq!(asked["messages"][1]["content"], "<t>Hm");
        seam
    };
    let told = |seam: &mut Seam, events: &str| {
        let passed = seam.pass(&Bytes::from(events.to_owned()));
        assert!(!passed.thought_is_over, "nothing else is asked for");
        let text = String::from_utf8(passed.events.to_vec()).unwrap();
        let read =
            |event: &str| serde_json::from_str::<Value>(event.strip_prefix("data: ").unwrap()).unwrap();
        let events = text.split_terminator("\n\n").filter(|event| !event.ends_with("[DONE]")).map(read);
        let delta = |event: Value| {
            assert_eq!(event["id"], "a");
            (event["choices"][0]["delta"].clone(), event["choices"][0]["finish_reason"].clone())
        };
        events.map(delta).collect::<Vec<_>>()
    };
    let null = Value::Null;
    let mut in_turn = seam();
    assert_eq!(told(&mut in_turn, &opening("b")), [], "the client knows who speaks");
    let pieces = content("b", ", so") + &content("b", ".</t>\n") + &content("b", "The </t>");
    let expected = [
        (json!({"reasoning_content": ", so"}), null.clone()),
        (json!({"reasoning_content": "."}), null.clone()),
        (json!({"content": "\n"}), null.clone()),
        (json!({"content": "The </t>"}), null.clone()),
    ];
    assert_eq!(told(&mut in_turn, &pieces), expected, "one thought, and then the answer");
    let ends = content("b", "</t>") + &content("b", "Sky.");
    assert_eq!(told(&mut seam(), &ends), [(json!({"content": "Sky."}), null)]);
    let last = chat_event("b", &json!({"content": "</t>"}), &json!("stop"));
    assert_eq!(told(&mut seam(), &last), [(json!({}), json!("stop"))]);
}

#[test]
fn marks_are_those_that_are_one_token_each() {
    assert!(Marks::of(&[BEGIN, END, BEGIN, END, 60, 61]).is_some());
    // In several tokens, one for both, and with what stands before answers as one.
    for none in [&[5, 6, 7, 8, 9, 10, 11, 12][..], &[5, 5, 5, 5, 60, 61], &[BEGIN, END, BEGIN, END, 60]] {
        assert!(Marks::of(none).is_none(), "{none:?}");
    }
}

const BEGIN: u32 = 900;
const END: u32 = 901;

fn tokens(tokens: &[u32]) -> Tokens {
    Tokens { tokens: tokens.to_vec(), max_model_len: Some(20) }
}

/// What a completion is asked for after `given`, whose tokens are `written`, in a chat of the tokens `chat`.
fn asked_in_tokens(given: &Given, (chat, written): (&[u32], &[u32]), body: &Value) -> Option<Value> {
    let members = members(body);
    let Rest::Tokens = rest_of(given, &members)? else { panic!("not in tokens") };
    let next = Next::after(given, &members)?;
    let marks = given.thought().and(Marks::of(&[BEGIN, END, BEGIN, END, 60, 61]));
    let (rest, _) = InTokens { chat: &tokens(chat), given: written, marks }.rest((given, next), &members)?;
    Some(serde_json::from_slice(&rest.joined()).unwrap())
}

#[test]
fn a_thought_is_asked_for_in_tokens_up_to_its_end() {
    let within = given(Kind::Chat, &[opening("a"), thought("a", "Hm"), thought("a", " \"so\"")]);
    assert_eq!(written(&within, ("<t>", "</t>")).unwrap(), "Hm \"so\"");
    let sent = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 10,
        "temperature": 0.5, "logprobs": false, "user": "u", "metadata": {}});
    let asked = asked_in_tokens(&within, (&[1, 2], &[3, 4]), &sent).unwrap();
    let mut expected = json!({"model": "m", "stream": true, "temperature": 0.5, "prompt": [1, 2, BEGIN, 3, 4],
        "add_special_tokens": false, "max_tokens": 8, "stop_token_ids": [END]});
    assert_eq!(asked, expected);
    let mut unbounded = sent.clone();
    unbounded.as_object_mut().unwrap().remove("max_tokens");
    let opened = asked_in_tokens(&within, (&[END, 1, BEGIN, 2], &[3, 4]), &unbounded).unwrap();
    expected["prompt"] = json!([END, 1, BEGIN, 2, 3, 4]);
    expected["max_tokens"] = json!(14);
    assert_eq!(opened, expected, "the template has begun the thought; as much as there is room for");
    let talks = asked_in_tokens(&within, (&[BEGIN, 1, 2, 3], &[4]), &unbounded).unwrap();
    assert_eq!(talks["prompt"], json!([BEGIN, 1, 2, 3, BEGIN, 4]), "somebody talks of the mark");
    assert!(asked_in_tokens(&within, (&[1; 20], &[3]), &sent).is_none(), "there is no room");
    for (member, value) in [
        ("stop_token_ids", json!([5])),
        ("tools", json!([{"type": "function"}])),
        ("add_special_tokens", json!(true)),
        ("messages", json!([{"role": "assistant", "content": "x", "reasoning_content": "y"}])),
        ("messages", json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])),
    ] {
        let mut other = sent.clone();
        other[member] = value.clone();
        assert!(asked_in_tokens(&within, (&[1], &[2]), &other).is_none(), "{member}: {value}");
    }
}

#[test]
fn the_answer_behind_a_thought_is_asked_for_in_tokens_or_in_messages() {
    let given = given(Kind::Chat, &[opening("a"), thought("a", "Hm"), content("a", "\nThe")]);
    assert_eq!(written(&given, ("<t>", "</t>")).unwrap(), "Hm\n</t>\nThe");
    let mut sent =
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 9});
    let asked = asked_in_tokens(&given, (&[1], &[3, END, 4]), &sent).unwrap();
    let expected = json!({"prompt": [1, BEGIN, 3, END, 4], "add_special_tokens": false, "max_tokens": 6});
    assert_eq!(asked, expected);
    sent["tools"] = json!([{"type": "function"}]);
    let members = members(&sent);
    assert_eq!(Next::after(&given, &members), Some(Next::AnswerOrCalls));
    let in_tokens = |told: &[u32], given: &Given| {
        let (chat, marks) = (tokens(&[1]), Marks::of(&[BEGIN, END, BEGIN, END, 60, 61]));
        let written: &[u32] = if given.text().is_empty() { &[3, END] } else { &[3, END, 4] };
        let in_tokens = InTokens { chat: &chat, given: written, marks };
        let (rest, _) = in_tokens.rest_in_messages(&tokens(told), given, &members)?;
        Some(serde_json::from_slice::<Value>(&rest.joined()).unwrap())
    };
    let rest = in_tokens(&[1, BEGIN, 7, 3, 7, END, 7, 4], &given).unwrap();
    let message =
        json!({"role": "assistant", "reasoning": "Hm", "reasoning_content": "Hm", "content": "\nThe"});
    assert_eq!(rest["messages"][1], message);
    assert_eq!((&rest["continue_final_message"], &rest["max_tokens"]), (&json!(true), &json!(6)));
    for told in [
        &[1, 4][..],
        &[1, BEGIN, END, 3, 4, BEGIN],
        &[1, BEGIN, 3, END, 4, 8],
        &[1, BEGIN, 3, 3, 3, 3, 3, 3, END, 4],
    ] {
        assert!(in_tokens(told, &given).is_none(), "the template writes something else: {told:?}");
    }
    let mut silent = self::given(Kind::Chat, &[opening("a"), thought("a", "Hm")]);
    silent.end_thought();
    assert_eq!(Next::after(&silent, &members), None, "it might be the end of a turn");
}

#[test]
fn strange_usage_is_no_end_of_everything() {
    let given = given(Kind::Chat, &[opening("a"), thought("a", "Hm"), content("a", "x")]);
    let usage = json!({"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": 5, "completion_tokens_details": 5});
    let event = data(&json!({"id": "b", "choices": [], "usage": usage}));
    let passed = Seam::after(&given).pass(&Bytes::from(event));
    assert!(std::str::from_utf8(&passed.events).unwrap().contains(r#""reasoning_tokens":1"#));
    let sglangs = json!({"prompt_tokens": 5, "completion_tokens": 1, "reasoning_tokens": 0});
    let passed =
        Seam::after(&given).pass(&Bytes::from(data(&json!({"id": "b", "choices": [], "usage": sglangs}))));
    assert!(std::str::from_utf8(&passed.events).unwrap().contains(r#""reasoning_tokens":1,"#));
}

#[test]
fn thinking_in_the_open_is_gone_on_with_in_tokens() {
    let thinks = given(Kind::Chat, &[content("a", "<think>"), content("a", "so")]);
    let sent = json!({"messages": [{"role": "user", "content": "x"}]});
    let asked = asked_in_tokens(&thinks, (&[1], &[BEGIN, 2]), &sent).unwrap();
    assert_eq!(asked["prompt"], json!([1, BEGIN, 2]));
    let with_tools = json!({"messages": [{"role": "user", "content": "x"}], "tools": [{}]});
    assert!(asked_in_tokens(&thinks, (&[1], &[2]), &with_tools).is_none());
}

#[test]
fn a_completion_is_told_as_the_chat_that_it_goes_on_with() {
    let beginning = [opening("a"), chat_event("a", &json!({"reasoning_content": "Hm"}), &Value::Null)];
    let given = given(Kind::Chat, &beginning);
    let body = members(&json!({"messages": [{"role": "user", "content": "x"}]}));
    let (chat, marks) = (tokens(&[1, 2]), Marks::of(&[BEGIN, END, BEGIN, END, 60, 61]));
    let in_tokens = InTokens { chat: &chat, given: &[3], marks };
    let seam = |next: Next| in_tokens.rest((&given, next), &body).unwrap().1;
    let mut thought = seam(Next::Thought);
    let stop = data(&json!({"id": "b", "object": "text_completion", "choices": [
        {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": END}]}));
    let pieces = [" so", "", "\n"].map(|text| text_event("b", text, &Value::Null));
    let passed = thought.pass(&Bytes::from(pieces.concat() + &stop + "data: [DONE]\n\n"));
    assert!(passed.thought_is_over);
    let told: Vec<Value> = std::str::from_utf8(&passed.events)
        .unwrap()
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect();
    let deltas: Vec<_> = told.iter().map(|event| &event["choices"][0]["delta"]).collect();
    assert_eq!(deltas, [&json!({"reasoning_content": " so"}), &json!({"reasoning_content": "\n"})]);
    for event in &told {
        assert_eq!((&event["id"], &event["object"]), (&json!("a"), &json!("chat.completion.chunk")));
        assert!(event["choices"][0]["finish_reason"].is_null());
    }
    // Where the model ends within its thought, that is the end.
    let last = text_event("b", "!", &json!("stop")) + &usage_event("b", 4, 2, 9);
    let passed = seam(Next::Thought).pass(&Bytes::from(last + "data: [DONE]\n\n"));
    let text = std::str::from_utf8(&passed.events).unwrap();
    let [last, usage, "data: [DONE]"] = text.trim_end().split("\n\n").collect::<Vec<_>>()[..] else {
        panic!("{text}")
    };
    assert!(!passed.thought_is_over && last.contains(r#""finish_reason":"stop""#), "{text}");
    let usage: Value = serde_json::from_str(usage.strip_prefix("data: ").unwrap()).unwrap();
    let expected = json!({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 2}});
    assert_eq!((&usage["usage"], &usage["choices"]), (&expected, &json!([])));
}
