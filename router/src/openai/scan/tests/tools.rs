//! What tools are given and give, as parts of Anthropic's messages.

use super::*;

/// A message with a call of a tool and what that gave.
fn worked(input: &serde_json::Value, content: &serde_json::Value) -> serde_json::Value {
    json!({"messages": [{"content": [
        {"type": "tool_use", "id": "a", "name": "Bash", "input": input},
        {"type": "tool_result", "tool_use_id": "a", "content": content, "cache_control": {"type": "ephemeral"}},
    ]}]})
}

#[test]
fn what_tools_are_given_and_give_is_text() {
    let said = prompt(&worked(&json!({"command": "ls"}), &json!("r".repeat(300))));
    assert_eq!(said, hashed(None, &format!("{{\"command\":\"ls\"}}{}", "r".repeat(300)), salt_of("")));
    let list = json!([{"type": "text", "text": "r".repeat(100)}, {"type": "text", "text": "r".repeat(200)}]);
    assert_eq!(prompt(&worked(&json!({"command": "ls"}), &list)), said);
    let mut bare = worked(&json!({"command": "ls"}), &list);
    bare["messages"][0]["content"][1].as_object_mut().unwrap().remove("cache_control");
    assert_eq!(prompt(&bare), said, "where the client ends what it wants cached");
    scan_every_way(worked(&json!({}), &json!([{"text": "a"}])).to_string().as_bytes()).unwrap();
}

#[test]
fn pictures_that_tools_give_go_by_digest() {
    let picture = |data: &str| {
        let source = json!({"type": "base64", "text": "no text", "content": ["none"], "data": data});
        worked(
            &json!(1),
            &json!([{"type": "image", "source": source}, 7, {"type": "text", "text": "s".repeat(300)}]),
        )
    };
    let long = picture(&"d".repeat(100_000));
    assert_eq!(prompt(&long).prompt_bytes, 1 + 8 + 8 + 300);
    assert_ne!(prompt(&long).hashes, prompt(&picture("e")).hashes);
    assert_eq!(scan_pieces(long.to_string().as_bytes().chunks(777)), scan(&long.to_string()));
    scan_every_way(picture("short").to_string().as_bytes()).unwrap();
    for empty in [json!([]), json!(null), json!({"text": "a"})] {
        let body = worked(&json!(""), &empty).to_string();
        assert_eq!(scan_every_way(body.as_bytes()).unwrap().prompt.prompt_bytes, 8, "{empty}");
    }
}
