//! What is taken for JSON, what is read of it, and that cuts make no difference.

mod instructions;
mod tools;

use proptest::prelude::*;
use roundhouse_types::ChainHasher;
use router_core::prefix::PromptHasher;
use router_core::prefix::blocks::{Opening, Stretch};
use serde::de::IgnoredAny;
use serde_json::json;

use super::*;

const SEED: u64 = 1;

fn scan_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Scanned, BodyError> {
    let mut scanner = BodyScanner::new(ScanConfig { seed: SEED, prompt_use: PromptUse::Whole });
    for piece in pieces {
        scanner.push(piece)?;
    }
    scanner.finish()
}

fn scan(body: &str) -> Result<Scanned, BodyError> {
    scan_pieces([body.as_bytes()])
}

fn prompt(body: &serde_json::Value) -> PromptBlocks {
    scan(&body.to_string()).unwrap().prompt
}

/// The blocks of a prompt that is known.
fn hashed(tools: Option<&str>, text: &str, salt: ChainHasher) -> PromptBlocks {
    let mut hasher = PromptHasher::new(ChainHasher::new(SEED), PromptUse::Whole);
    if let Some(tools) = tools {
        hasher.push_tools(tools.as_bytes());
    }
    hasher.push(text.as_bytes());
    hasher.finish(salt)
}

fn salt_of(model: &str) -> ChainHasher {
    ChainHasher::new(SEED).salted(model.as_bytes())
}

/// Whether `serde_json` takes it. It leaves strings that it skips unchecked, as far as UTF-8 goes.
fn is_json(body: &[u8]) -> bool {
    std::str::from_utf8(body).is_ok() && serde_json::from_slice::<IgnoredAny>(body).is_ok()
}

/// Scans `body` whole, cut at every place, and byte by byte; the same must come of all.
fn scan_every_way(body: &[u8]) -> Result<Scanned, BodyError> {
    let whole = scan_pieces([body]);
    for cut in 0..=body.len() {
        let (head, tail) = body.split_at(cut);
        assert_eq!(scan_pieces([head, tail]), whole, "cut at {cut}: {:?}", String::from_utf8_lossy(body));
    }
    assert_eq!(scan_pieces(body.chunks(1)), whole, "byte by byte: {:?}", String::from_utf8_lossy(body));
    whole
}

fn check_verdict(body: &[u8]) {
    match scan_every_way(body) {
        Ok(_) => {
            assert!(is_json(body));
            assert!(
                serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(body).is_ok()
                    || odd(body)
            );
        }
        Err(BodyError::NotAnObject { .. } | BodyError::TooManyMembers { .. }) => assert!(is_json(body)),
        Err(BodyError::Syntax(SyntaxError { problem: Problem::TooDeep(_), .. })) => {}
        Err(BodyError::Syntax(error)) => {
            assert!(!is_json(body), "{error}: {:?}", String::from_utf8_lossy(body));
        }
    }
}

#[test]
fn an_object_of_thousands_of_members_is_no_request() {
    let body = |members: usize| format!("{{{}\"model\":\"m\"}}", "\"\":0,".repeat(members - 1));
    assert_eq!(scan(&body(4_096)).unwrap().model, Some(Name::from("m")));
    assert_eq!(scan(&body(4_097)), Err(BodyError::TooManyMembers { most: 4_096 }));
    let within = format!("{{\"metadata\":{}}}", body(9_999));
    assert!(scan(&within).is_ok(), "what is in a member may be anything");
}

#[test]
fn a_prompt_is_one_of_the_model_that_is_meant() {
    let scan_for = |body: &str, meant: &str| {
        let mut scanner = BodyScanner::new(ScanConfig { seed: SEED, prompt_use: PromptUse::Whole });
        scanner.push(body.as_bytes()).unwrap();
        let told = |name: &str, user: Option<u64>| {
            assert_eq!((name, user), ("chat", Some(xxhash_rust::xxh3::xxh3_64(b"u"))));
            Some(Name::from(meant))
        };
        scanner.finish_for(told).unwrap()
    };
    let text = "a question ".repeat(100);
    let body = |model: &str| format!(r#"{{"prompt":"{text}","model":"{model}","user":"u"}}"#);
    let meant = scan_for(&body("chat"), "m");
    assert_eq!(meant, Scanned { is_meant: true, ..scan(&body("m")).unwrap() });
    assert_ne!(meant.prompt, scan(&body("chat")).unwrap().prompt);
}

/// What a full parse rejects although it is JSON: lone surrogates and numbers past the range of f64.
fn odd(body: &[u8]) -> bool {
    body.windows(2).any(|two| two == b"\\u" || matches!(two, [b'e' | b'E', _]))
}

fn json_value() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|value| json!(value)),
        any::<i64>().prop_map(|value| json!(value)),
        any::<f32>().prop_map(|value| json!(value)),
        "[ -~é世🎉\n\\\\\"\u{1}]{0,12}".prop_map(|value| json!(value)),
    ];
    let key = prop_oneof![
        prop::sample::select(
            &[
                "messages",
                "role",
                "content",
                "text",
                "tools",
                "system",
                "instructions",
                "model",
                "user",
                "service_tier",
                "cache_salt",
                "lora_path",
                "extra_key",
                "prompt",
                "tool_calls"
            ][..]
        )
        .prop_map(str::to_owned),
        "[a-zé\"]{0,3}",
    ];
    leaf.prop_recursive(5, 40, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
            prop::collection::vec((key.clone(), inner), 0..4)
                .prop_map(|entries| entries.into_iter().collect::<serde_json::Map<_, _>>().into()),
        ]
    })
}

proptest! {
    #[test]
    fn agrees_with_serde_json_on_anything(body in prop::collection::vec(any::<u8>(), 0..60)) {
        check_verdict(&body);
    }

    #[test]
    fn agrees_with_serde_json_on_what_looks_like_json(
        body in r#"([\[\]{}",: \n]|"[a-c\\"]{0,3}"|\\u[0-9a-fA-F]{0,5}|[é世\\]|-?[0-9.]{1,4}|1e[+-]?[0-9]{0,3}|true|fals|null){0,12}"#
    ) {
        check_verdict(body.as_bytes());
    }

    #[test]
    fn agrees_with_serde_json_on_what_is_almost_json(
        value in json_value(),
        at in any::<prop::sample::Index>(),
        byte in prop_oneof![prop::sample::select(&b"[]{}\",:\\ntu0-.e\n\x01\x80\xe4"[..]), any::<u8>()],
        pretty in any::<bool>(),
    ) {
        let mut body = if pretty { serde_json::to_vec_pretty(&value) } else { serde_json::to_vec(&value) }.unwrap();
        check_verdict(&body);
        let at = at.index(body.len());
        body[at] = byte;
        check_verdict(&body);
    }

    #[test]
    fn reads_a_prompt_as_it_stands(
        model in "[a-z]{1,9}",
        messages in prop::collection::vec(("[a-z]{4,9}", "([ -!#-\\[\\]-~é世]|\\\\n|\\\\u00e9){0,200}"), 0..5),
        tools in prop::option::of("[a-z]{0,90}"),
        model_first in any::<bool>(),
    ) {
        let model_field = format!("\"model\": \"{model}\"");
        let listed: Vec<_> =
            messages.iter().map(|(role, said)| format!(r#"{{"role": "{role}", "content": "{said}"}}"#)).collect();
        let mut fields = vec![format!("\"messages\": [{}]", listed.join(", "))];
        let tools = tools.map(|tools| format!(r#"[{{"name": "{tools}", "n": [1, 2]}} ]"#));
        fields.extend(tools.iter().map(|tools| format!("\"tools\" : {tools}")));
        fields.insert(if model_first { 0 } else { fields.len() }, model_field);
        let scanned = scan_every_way(format!("{{{}}}", fields.join(",")).as_bytes()).unwrap();
        let text: String = messages.iter().map(|(role, said)| format!("{role}{said}")).collect();
        prop_assert_eq!(scanned.model.as_deref(), Some(&*model));
        prop_assert_eq!(scanned.prompt, hashed(tools.as_deref(), &text, salt_of(&model)));
    }
}

#[test]
fn reads_what_routing_needs() {
    let body = r#"{"model": "m\u0041", "stream": true, "us\u0065r": "u", "cache_salt": null,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}"#;
    let scanned = scan_every_way(body.as_bytes()).unwrap();
    assert_eq!(scanned.model.as_deref(), Some("mA"));
    assert_eq!(scanned.user, Some(xxhash_rust::xxh3::xxh3_64(b"u")));
    assert_eq!(scanned.prompt, hashed(None, "systembe briefuserhi", salt_of("mA")));
}

#[test]
fn fields_of_an_odd_kind_are_absent_and_the_last_one_counts() {
    let model = |body: &str| scan_every_way(body.as_bytes()).unwrap().model.map(|name| name.to_string());
    assert_eq!(model(r#"{"model": "a", "model": "b"}"#).as_deref(), Some("b"));
    for odd in ["5", "null", "\"\"", "[\"a\"]", "{\"model\": \"a\"}", "\"\\ud800\"", "true"] {
        assert_eq!(model(&format!(r#"{{"model": "a", "model": {odd}}}"#)), None, "{odd}");
    }
    let longest = "x".repeat(MAX_FIELD_BYTES);
    assert_eq!(scan(&format!(r#"{{"model": "{longest}"}}"#)).unwrap().model.as_deref(), Some(&*longest));
    let body = format!(r#"{{"model": "{longest}x"}}"#);
    for cut in [1, 1_000, 100_000] {
        assert_eq!(scan_pieces(body.as_bytes().chunks(cut)).unwrap().model, None);
    }
}

#[test]
fn models_and_salts_share_no_blocks() {
    let blocks = |extra: &str| {
        let body = format!(r#"{{"prompt": "{}"{extra}}}"#, "p".repeat(500));
        scan(&body).unwrap().prompt.hashes
    };
    let plain = blocks("");
    assert_eq!(plain.len(), 7);
    assert_ne!(plain[0], blocks(r#", "model": "m""#)[0]);
    assert_ne!(plain[0], blocks(r#", "cache_salt": "s""#)[0]);
    assert_ne!(blocks(r#", "model": "s""#)[0], blocks(r#", "cache_salt": "s""#)[0]);
    assert_eq!(plain, blocks(r#", "temperature": 1"#));
    let apart = ["cache_salt", "lora_path", "extra_key"];
    let mut firsts: Vec<_> = apart.iter().map(|key| blocks(&format!(r#", "{key}": "s""#))[0].0).collect();
    firsts.push(blocks(r#", "lora_path": "t""#)[0].0);
    firsts.push(blocks(r#", "lora_path": "t", "cache_salt": "s""#)[0].0);
    firsts.sort_unstable();
    firsts.dedup();
    assert!(firsts.len() == 5 && !firsts.contains(&plain[0].0));
    assert_eq!(plain, blocks(r#", "lora_path": null, "extra_key": """#));
}

#[test]
fn says_where_and_what_was_expected() {
    let spaced = "{\"a\": 1,\n \"messages\": [}";
    let deep = "[".repeat(MAX_DEPTH + 1);
    for (body, expected) in [
        ("", "expected a value, but the body ends at line 1 column 0"),
        (spaced, "expected a value or `]` at line 2 column 15"),
        ("{\"model\":\n \"m\",}", "expected a key in quotes at line 2 column 6"),
        ("{\"a\" 1}", "expected `:` at line 1 column 6"),
        ("{\"a\": 1 \"b\"", "expected `,` or `}` at line 1 column 9"),
        ("[1 2]", "expected `,` or `]` at line 1 column 4"),
        ("[1", "expected `,` or `]`, but the body ends at line 1 column 2"),
        ("{\n", "expected a key in quotes or `}`, but the body ends at line 2 column 0"),
        ("{} x", "expected nothing after the body's value at line 1 column 4"),
        ("{\"a\": trux}", "expected `true`, `false` or `null` at line 1 column 10"),
        ("[01]", "numbers have no leading zeros at line 1 column 3"),
        ("[1.5.2]", "this does not belong in a number at line 1 column 5"),
        ("[1.]", "expected a digit at line 1 column 4"),
        ("-", "expected a digit, but the body ends at line 1 column 1"),
        ("{\"a", "expected the closing quote of a string, but the body ends at line 1 column 3"),
        ("[\"\\u12x4\"]", "expected a hexadecimal digit at line 1 column 7"),
        ("[\"\\x\"]", "expected one of \" \\ / b f n r t u after the backslash at line 1 column 4"),
        (
            "[\"a\nb\"]",
            "control characters in strings must be escaped, as in \\n or \\u001f at line 1 column 4",
        ),
        (&deep, "nested deeper than 256 levels at line 1 column 257"),
        ("[1]", "expected a JSON object, not an array"),
        ("null", "expected a JSON object, not null"),
    ] {
        assert_eq!(scan_every_way(body.as_bytes()).unwrap_err().to_string(), expected, "{body:?}");
    }
    let utf8 = scan_every_way(b"{\"model\": \"a\xe4\xb8\"}").unwrap_err();
    assert_eq!(utf8.to_string(), "invalid UTF-8 at line 1 column 13");
}

#[test]
fn finds_errors_where_serde_json_finds_them() {
    for body in [
        "{\"model\": \"m\",\n \"messages\": [}",
        "",
        "[1,\n\n  ",
        "{\"a\" 1}",
        "[1 2]",
        "{} x",
        "[tru]",
        "[1.]",
    ] {
        let theirs = serde_json::from_str::<serde_json::Value>(body).unwrap_err();
        let Err(BodyError::Syntax(ours)) = scan(body) else { panic!("{body:?}") };
        assert_eq!((ours.line, ours.column), (theirs.line(), theirs.column()), "{body:?}");
    }
}

#[test]
fn an_error_is_final() {
    let mut scanner = BodyScanner::new(ScanConfig { seed: SEED, prompt_use: PromptUse::Whole });
    let error = scanner.push(b"{\"model\": x").unwrap_err();
    assert_eq!(scanner.push(b"\"m\"}"), Err(error));
    assert_eq!(scanner.finish(), Err(error));
}

#[test]
fn odd_types_are_left_for_the_engine() {
    for messages in [
        json!(5),
        json!("x"),
        json!({"a": [1], "content": "c", "messages": [{"role": "r"}]}),
        json!([1, "x", [2, {"role": "r"}], null, {"x": {"role": "r"}}]),
    ] {
        let scanned =
            scan_every_way(json!({"messages": messages, "model": 5}).to_string().as_bytes()).unwrap();
        assert_eq!((scanned.model, scanned.prompt.prompt_bytes), (None, 0), "{messages}");
    }
    let raw = prompt(&json!({"messages": [{"role": 7, "content": null}, {"content": {"a": "b"}}]}));
    assert_eq!(raw, hashed(None, "7null{\"a\":\"b\"}", salt_of("")));
}

#[test]
fn what_is_nested_within_the_bound_passes() {
    for field in ["x", "tools", "system", "messages", "prompt"] {
        let levels = (MAX_DEPTH - 1) / 2;
        let body = format!("{{\"{field}\": {}1{}}}", "[{\"content\":".repeat(levels), "}]".repeat(levels));
        assert!(scan(&body).is_ok());
        let deeper = format!("{{\"{field}\": {}", "[{\"content\":".repeat(100_000));
        let error = scan(&deeper).unwrap_err().to_string();
        assert!(error.contains("nested deeper than 256 levels"), "{error}");
    }
}

#[test]
fn order_and_unrelated_fields_do_not_change_the_prompt() {
    let said = "a".repeat(300);
    let one = json!({"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": said}]});
    let two = json!({"messages": [{"role": "user", "name": "n", "content": said}], "model": "m"});
    assert_eq!(prompt(&one), prompt(&two));
}

#[test]
fn text_parts_count_as_text_and_images_by_digest() {
    let text = json!({"messages": [{"role": "user", "content": "b".repeat(300)}]});
    let parts =
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "b".repeat(300)}]}]});
    assert_eq!(prompt(&text), prompt(&parts));
    let image = |data: &str| {
        json!({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data, "text": "no text"}}, {"type": "text", "text": "c".repeat(300)}]}]})
    };
    let long = "d".repeat(100_000);
    assert_ne!(prompt(&image(&long)).hashes, prompt(&image("e")).hashes);
    assert_eq!(prompt(&image(&long)).prompt_bytes, 4 + 8 + 300);
    let body = image(&long).to_string();
    assert_eq!(scan_pieces(body.as_bytes().chunks(777)), scan(&body));
    scan_every_way(image("short").to_string().as_bytes()).unwrap();
}

#[test]
fn parts_without_a_text_go_by_digest_whatever_they_are() {
    for part in [json!("a string"), json!(7), json!([{"text": "a"}]), json!({"text": null}), json!({})] {
        let body = json!({"messages": [{"content": [part, {"text": "x"}]}]});
        assert_eq!(prompt(&body).prompt_bytes, 8 + 1, "{body}");
    }
}

#[test]
fn every_kind_of_prompt_is_read() {
    for field in ["prompt", "input", "text", "input_ids"] {
        assert_eq!(prompt(&json!({field: "f".repeat(200)})).prompt_bytes, 200, "{field}");
    }
    assert_eq!(prompt(&json!({"prompt": [1, 2, 3]})), hashed(None, "[1,2,3]", salt_of("")));
    let calls = json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]});
    assert_eq!(prompt(&calls), hashed(None, "assistant[{\"id\":\"a\"}]", salt_of("")));
}

#[test]
fn policies_that_read_no_prompts_are_told_their_length() {
    let body =
        json!({"tools": [{"a": 1}], "messages": [{"content": [{"image": "x".repeat(999)}, {"text": "y"}]}]});
    for prompt_use in [PromptUse::None, PromptUse::FirstKib] {
        let mut scanner = BodyScanner::new(ScanConfig { seed: SEED, prompt_use });
        scanner.push(body.to_string().as_bytes()).unwrap();
        let read = scanner.finish().unwrap().prompt;
        assert_eq!(read.prompt_bytes, prompt(&body).prompt_bytes);
        assert!(read.hashes.len() <= prompt_use.max_blocks());
    }
}

#[test]
fn only_who_asks_for_a_stream_will_be_seen_to_begin() {
    for (body, answer) in [
        (r#"{"stream": true}"#, Answer::Streamed),
        (r#"{"stream":true,"prompt":"a"}"#, Answer::Streamed),
        (r#"{"stream": false}"#, Answer::Whole),
        (r#"{"stream": null}"#, Answer::Whole),
        (r#"{"stream": true, "stream": false}"#, Answer::Whole),
        (
            r#"{"stream_options": true, "metadata": {"stream": true}, "messages": [{"stream": true}]}"#,
            Answer::Whole,
        ),
        ("{}", Answer::Whole),
    ] {
        assert_eq!(scan_every_way(body.as_bytes()).unwrap().answer, answer, "{body}");
    }
}

#[test]
fn token_ids_are_counted_and_the_same_however_they_are_written() {
    let ids: Vec<String> = (0..395).map(|id| (id * 317 % 128_000).to_string()).collect();
    let body = |key: &str, between: &str| format!(r#"{{"{key}": [{}]}}"#, ids.join(between));
    let dense = scan(&body("prompt", ",")).unwrap();
    assert_eq!(dense.token_ids, Some(395));
    for between in [", ", " ,\n\t", ",\r\n    "] {
        assert_eq!(scan(&body("input_ids", between)).unwrap(), dense);
    }
    for (list, tokens) in [
        ("[1, 23, [4], [ 5,6 ]]", Some(5)),
        ("[-1]", Some(1)),
        ("[]", None),
        (r#"["1, 2"]"#, None),
        (r#"[1, "two  words", 3]"#, None),
        ("[1.5]", None),
        ("[{}]", None),
    ] {
        let body = format!(r#"{{"prompt": {list}, "model": "m"}}"#);
        assert_eq!(scan_every_way(body.as_bytes()).unwrap().token_ids, tokens, "{list}");
    }
    assert_eq!(scan(r#"{"prompt": [1, 2], "tools": []}"#).unwrap().token_ids, None);
    assert_eq!(scan(r#"{"prompt": [1, 2], "text": "a"}"#).unwrap().token_ids, None);
    let words =
        |between: &str| scan(&format!(r#"{{"prompt": ["a{between}b"]}}"#)).unwrap().prompt.prompt_bytes;
    assert_eq!(words("   "), words(" ") + 2, "spaces of texts are theirs");
}
