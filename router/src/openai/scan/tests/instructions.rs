//! Instructions that stand apart from the messages: Anthropic's `system`, `instructions` of OpenAI's responses.

use super::*;

/// A body of `/v1/messages` as a coding agent sends it: messages first.
fn agent(system: &serde_json::Value, said: &str) -> serde_json::Value {
    json!({
        "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": said}]}], "system": system,
        "tools": [{"name": "Bash", "description": "d".repeat(300)}], "max_tokens": 32_000,
    })
}

fn shared(one: &PromptBlocks, two: &PromptBlocks) -> usize {
    one.hashes.iter().zip(&two.hashes).take_while(|(one, two)| one == two).count()
}

fn text(said: &str) -> serde_json::Value {
    json!({"type": "text", "text": said, "cache_control": {"type": "ephemeral"}})
}

#[test]
fn sessions_share_tools_and_instructions() {
    let system = "s".repeat(1_000);
    let one = prompt(&agent(&json!(system), &"a".repeat(500)));
    let two = prompt(&agent(&json!(system), &"b".repeat(500)));
    let Opening { tools, system } = one.opening;
    assert_eq!((tools.blocks, system), (5, Stretch { blocks: 15, bytes: 1_000 }));
    assert_eq!((shared(&one, &two), one.hashes.len()), (20, 20 + 7));
    let other = prompt(&agent(&json!("t".repeat(1_000)), &"a".repeat(500)));
    assert_eq!(shared(&one, &other), 5, "the tools alone");
}

#[test]
fn keys_may_come_in_any_order() {
    let fields = [
        format!(r#""messages": [{{"role": "user", "content": "{}"}}]"#, "m".repeat(100)),
        format!(r#""system": [{{"text": "{}"}}]"#, "s".repeat(100)),
        format!(r#""tools": ["{}"]"#, "t".repeat(100)),
    ];
    let body = |order: [usize; 3]| format!("{{{}}}", order.map(|at| fields[at].as_str()).join(", "));
    let first = scan_every_way(body([2, 1, 0]).as_bytes()).unwrap();
    assert_eq!(first.prompt.hashes.len(), 3, "a block of each");
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1]] {
        assert_eq!(scan_every_way(body(order).as_bytes()).unwrap(), first, "{order:?}");
    }
}

#[test]
fn a_list_of_texts_is_their_text() {
    let (whole, halves) = (json!("s".repeat(200)), ["s".repeat(90), "s".repeat(110)]);
    let list = json!([text(&halves[0]), 7, {"type": "image", "source": [{"text": "no"}]}, text(&halves[1])]);
    assert_eq!(prompt(&agent(&list, "a")), prompt(&agent(&whole, "a")));
}

#[test]
fn responses_have_instructions_too() {
    let body = |instructions: &str, input: &str| {
        prompt(&json!({"model": "m", "input": input, "instructions": instructions.repeat(200)}))
    };
    let one = body("i", &"a".repeat(200));
    assert_eq!(one.opening.system, Stretch { blocks: 3, bytes: 200 });
    assert_eq!(shared(&one, &body("i", &"b".repeat(200))), 3);
    assert_eq!(shared(&one, &body("j", &"a".repeat(200))), 0);
    let anthropic = prompt(&json!({"model": "m", "input": "a".repeat(200), "system": "i".repeat(200)}));
    assert_eq!(anthropic, one);
}

#[test]
fn absent_empty_and_odd_instructions_are_none_and_the_last_ones_count() {
    let read = |fields: &str| {
        scan_every_way(format!(r#"{{"prompt": "{}"{fields}}}"#, "p".repeat(70)).as_bytes()).unwrap().prompt
    };
    for none in [
        "null",
        "\"\"",
        "[]",
        "7",
        "{\"text\": \"a\"}",
        "[null, \"a\", {}, [{\"text\": \"a\"}], {\"text\": 7}]",
    ] {
        assert_eq!(read(&format!(r#", "system": {none}"#)), read(""), "{none}");
    }
    assert_eq!(read(r#", "system": "a", "system": "b""#), read(r#", "system": [{"text": "b"}]"#));
    assert_eq!(scan(r#"{"prompt": [1, 2], "instructions": null}"#).unwrap().token_ids, Some(2));
    assert_eq!(scan(r#"{"prompt": [1, 2], "instructions": "a"}"#).unwrap().token_ids, None);
}

#[test]
fn a_line_for_billing_is_no_instruction() {
    let body = |texts: &[&str]| {
        let list: Vec<_> = texts.iter().map(|said| text(said)).collect();
        let said = scan_every_way(json!({"system": list, "prompt": "p"}).to_string().as_bytes()).unwrap();
        said.prompt
    };
    let plain = body(&["You are"]);
    assert_eq!(body(&["x-anthropic-billing-header: cc_version=2.1; cch=0aaa9;", "You are"]), plain);
    assert_eq!(body(&["You are", "x-anthropic-billing-header"]), plain);
    for said in
        ["x-anthropic-billing-heade", "x-anthropic-beta", "x", "x\u{e9}", " x-anthropic-billing-header"]
    {
        assert_eq!(body(&[said, "You are"]).opening.system.bytes, said.len() + 7, "{said}");
        assert_eq!(body(&[said, "You are"]), body(&[&format!("{said}You are")]), "{said}");
    }
}
