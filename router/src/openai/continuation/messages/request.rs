//! The chat that an engine makes of a request in Anthropic's words, written as its client would have asked for it.
//!
//! As vLLM does it (`entrypoints/anthropic/serving.py` of 0.32) and SGLang (the same path of 0.5.23); where they differ it is told whose is wanted. What is not here, such
//! as pictures, makes no chat.

use serde_json::{Map, Value, json};

use super::super::tokens::Teller;

/// Whose chat, and how it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Form {
    /// Whose.
    pub teller: Teller,
    /// Instructions among the messages stand before all of them: so engines do it whose template has no place for them elsewhere.
    pub merges_instructions: bool,
}

/// Members that a chat has under the same name.
const SAME: [&str; 6] = ["model", "max_tokens", "temperature", "top_p", "top_k", "cache_salt"];
/// Members that engines pass over.
const PASSED_OVER: [&str; 5] = ["metadata", "service_tier", "context_management", "betas", "inference_geo"];
/// Members that are looked at.
const LOOKED_AT: [&str; 9] = [
    "messages",
    "system",
    "stream",
    "stop_sequences",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "chat_template_kwargs",
];
/// With this Claude Code begins a text that is another one in each request; vLLM leaves it out.
const BILLING: &str = "x-anthropic-billing-header";

/// Members on which a prompt's tokens depend, as engines count them when asked.
pub const IN_COUNT: [&str; 8] = [
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "chat_template_kwargs",
];

/// Whether there are instructions among the messages, so that there are two ways of writing the chat.
#[must_use]
pub fn has_instructions_within(body: &Value) -> bool {
    body["messages"].as_array().is_some_and(|all| all.iter().any(|message| message["role"] == "system"))
}

/// What sequences an answer ends with.
#[must_use]
pub fn stop_sequences(body: &Value) -> Vec<String> {
    let all = body["stop_sequences"].as_array().into_iter().flatten();
    all.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Whether tokens of a thought are counted by the engine that has begun it, which no other one can go on with.
#[must_use]
pub fn counts_thoughts(body: &Value, teller: Teller) -> bool {
    teller == Teller::Vllm && body["thinking"]["type"] == "enabled"
}

/// The chat; `None` if there is something in `body` that has none here.
#[must_use]
pub fn as_chat(body: &Value, form: Form) -> Option<Value> {
    let members = body.as_object()?;
    let is_known = |name: &String| {
        [&SAME[..], &PASSED_OVER, &LOOKED_AT].iter().any(|names| names.contains(&name.as_str()))
    };
    if !members.iter().all(|(name, value)| value.is_null() || is_known(name)) {
        return None;
    }
    let mut chat = Map::new();
    for name in SAME {
        if let Some(value) = members.get(name).filter(|value| !value.is_null()) {
            chat.insert(name.into(), value.clone());
        }
    }
    chat.insert("messages".into(), messages(body, form)?.into());
    chat.insert("stream".into(), true.into());
    chat.insert("stream_options".into(), json!({"include_usage": true}));
    let stops = stop_sequences(body);
    if !stops.is_empty() {
        chat.insert("stop".into(), stops.into());
    }
    tools(body, form, &mut chat)?;
    effort(body, form, &mut chat)?;
    Some(chat.into())
}

fn messages(body: &Value, form: Form) -> Option<Vec<Value>> {
    let all = body["messages"].as_array()?;
    let mut written = Vec::new();
    let mut instructions: Vec<String> = match &body["system"] {
        Value::Null => Vec::new(),
        Value::String(text) if form.teller == Teller::Sglang && text.trim().is_empty() => Vec::new(),
        Value::String(text) => vec![text.clone()],
        Value::Array(blocks) => texts(blocks, form)?,
        _ => return None,
    };
    if form.merges_instructions {
        for message in all.iter().filter(|message| message["role"] == "system") {
            instructions.extend(instruction(&message["content"], form)?);
        }
    }
    instructions.retain(|text| !text.is_empty());
    if !instructions.is_empty() {
        let between = if form.teller == Teller::Vllm { "" } else { "\n" };
        written.push(json!({"role": "system", "content": instructions.join(between)}));
    }
    for message in all {
        match message["role"].as_str()? {
            "system" if form.merges_instructions => {}
            "system" => {
                let text = instruction(&message["content"], form)?;
                written.extend(text.map(|text| json!({"role": "system", "content": text})));
            }
            role @ ("user" | "assistant") => said(role, &message["content"], form, &mut written)?,
            _ => return None,
        }
    }
    Some(written)
}

/// The texts of blocks that are nothing else.
fn texts(blocks: &[Value], form: Form) -> Option<Vec<String>> {
    let texts: Option<Vec<&str>> = blocks.iter().map(text_of).collect();
    let is_left =
        |text: &&str| !(text.is_empty() || form.teller == Teller::Vllm && text.starts_with(BILLING));
    Some(texts?.into_iter().filter(is_left).map(str::to_owned).collect())
}

/// Of a block that is a text.
fn text_of(block: &Value) -> Option<&str> {
    (block["type"] == "text").then(|| block["text"].as_str()).flatten()
}

/// An instruction among the messages; the inner `None` if it says nothing.
fn instruction(content: &Value, form: Form) -> Option<Option<String>> {
    let text = match (content, form.teller) {
        (Value::String(text), Teller::Vllm) if text.starts_with(BILLING) => String::new(),
        (Value::String(text), _) => text.clone(),
        (Value::Array(blocks), Teller::Vllm) => texts(blocks, form)?.concat(),
        (Value::Array(blocks), Teller::Sglang) => texts(blocks, form)?.join("\n"),
        _ => return None,
    };
    Some(Some(text).filter(|text| !text.is_empty()))
}

/// One message, which results of tools in it make several.
fn said(role: &str, content: &Value, form: Form, written: &mut Vec<Value>) -> Option<()> {
    let blocks = match content {
        Value::String(_) => {
            written.push(json!({"role": role, "content": content}));
            return Some(());
        }
        Value::Array(blocks) => blocks,
        _ => return None,
    };
    let (mut texts, mut calls, mut thoughts) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match (block["type"].as_str()?, role) {
            ("text", _) => {
                let text = block["text"].as_str()?;
                if !text.is_empty() || form.teller == Teller::Sglang {
                    texts.push(json!({"type": "text", "text": text}));
                }
            }
            ("thinking", "assistant") => thoughts.push(block["thinking"].as_str()?),
            ("tool_use", "assistant") => calls.push(call(block)?),
            ("tool_result", "user") => {
                // SGLang writes what was said before where it was said.
                if form.teller == Teller::Sglang && !texts.is_empty() {
                    written.push(json!({"role": "user", "content": content_of(std::mem::take(&mut texts))}));
                }
                written.push(json!({
                    "role": "tool",
                    "tool_call_id": block["tool_use_id"].as_str()?,
                    "content": result(&block["content"])?,
                }));
            }
            _ => return None,
        }
    }
    let mut message = Map::from_iter([("role".to_owned(), role.into())]);
    if !thoughts.is_empty() {
        let (name, between) = match form.teller {
            Teller::Vllm => ("reasoning", ""),
            Teller::Sglang => ("reasoning_content", "\n"),
        };
        message.insert(name.into(), thoughts.join(between).into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    let says_nothing = texts.is_empty() && role == "user";
    if !texts.is_empty() {
        message.insert("content".into(), content_of(texts));
    } else if message.len() == 1 && form.teller == Teller::Sglang {
        message.insert("content".into(), "".into());
    }
    if !says_nothing {
        written.push(message.into());
    }
    Some(())
}

/// One text stands for itself.
fn content_of(mut texts: Vec<Value>) -> Value {
    if texts.len() == 1 { texts[0]["text"].take() } else { texts.into() }
}

fn call(block: &Value) -> Option<Value> {
    let input = match &block["input"] {
        Value::Null => "{}".to_owned(),
        input @ Value::Object(_) => input.to_string(),
        _ => return None,
    };
    Some(json!({
        "id": block["id"].as_str()?,
        "type": "function",
        "function": {"name": block["name"].as_str()?, "arguments": input},
    }))
}

fn result(content: &Value) -> Option<String> {
    match content {
        Value::Null => Some(String::new()),
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => Some(blocks.iter().map(text_of).collect::<Option<Vec<_>>>()?.join("\n")),
        _ => None,
    }
}

fn tools(body: &Value, form: Form, chat: &mut Map<String, Value>) -> Option<()> {
    let declared = match &body["tools"] {
        Value::Null => return Some(()),
        tools => tools.as_array()?,
    };
    if declared.is_empty() {
        return Some(());
    }
    let tool = |tool: &Value| {
        let is_plain = matches!(&tool["type"], Value::Null) || tool["type"] == "custom";
        let is_there = tool["defer_loading"] != true && tool["strict"] != true;
        // Engines add what is missing of a schema.
        let has_schema = tool["input_schema"]["type"].is_string();
        (is_plain && is_there && has_schema).then_some(())?;
        let mut function = Map::from_iter([("name".to_owned(), tool["name"].as_str()?.into())]);
        match tool["description"].as_str() {
            Some(text) => function.insert("description".into(), text.into()),
            None if form.teller == Teller::Sglang => function.insert("description".into(), "".into()),
            None => None,
        };
        function.insert("parameters".into(), tool["input_schema"].clone());
        // SGLang says so of each, and templates write it.
        if form.teller == Teller::Sglang || tool["strict"] == false {
            function.insert("strict".into(), false.into());
        }
        Some(json!({"type": "function", "function": function}))
    };
    chat.insert("tools".into(), declared.iter().map(tool).collect::<Option<Vec<_>>>()?.into());
    let choice = match &body["tool_choice"] {
        Value::Null => "auto",
        choice => {
            let one_at_a_time = choice["disable_parallel_tool_use"] == true;
            chat.insert("parallel_tool_calls".into(), (!one_at_a_time).into());
            // What has to be called is not gone on with.
            choice["type"].as_str().filter(|kind| ["auto", "none"].contains(kind))?
        }
    };
    chat.insert("tool_choice".into(), choice.into());
    Some(())
}

/// How much is thought.
fn effort(body: &Value, form: Form, chat: &mut Map<String, Value>) -> Option<()> {
    let mut arguments = match (&body["chat_template_kwargs"], form.teller) {
        (Value::Null, _) => Map::new(),
        (Value::Object(arguments), Teller::Vllm) => arguments.clone(),
        _ => return None,
    };
    match &body["output_config"] {
        Value::Null => {}
        Value::Object(config) => {
            // A format has to be kept to from the first token.
            config.iter().all(|(name, value)| name == "effort" || value.is_null()).then_some(())?;
            if let Some(effort) = config.get("effort").and_then(Value::as_str) {
                // SGLang takes an effort in a chat for a wish to think, and in a message not: templates may open a thought in as many tokens as they close one.
                (form.teller == Teller::Vllm || !body["thinking"].is_null()).then_some(())?;
                let most = form.teller == Teller::Sglang && effort == "xhigh";
                chat.insert("reasoning_effort".into(), if most { "max" } else { effort }.into());
            }
        }
        _ => return None,
    }
    match (body["thinking"]["type"].as_str(), form.teller) {
        (None, _) if body["thinking"].is_null() => {}
        (Some("disabled"), Teller::Vllm) => {
            chat.insert("reasoning_effort".into(), "none".into());
        }
        (Some("enabled" | "adaptive"), Teller::Vllm) => {}
        (Some(kind @ ("enabled" | "adaptive" | "disabled")), Teller::Sglang) => {
            // Under which of the names depends on the template; it passes the other one over.
            for name in ["thinking", "enable_thinking"] {
                arguments.insert(name.into(), (kind != "disabled").into());
            }
        }
        _ => return None,
    }
    if !arguments.is_empty() {
        chat.insert("chat_template_kwargs".into(), arguments.into());
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(teller: Teller) -> Form {
        Form { teller, merges_instructions: false }
    }

    /// What Claude Code sends, shortened.
    fn agent() -> Value {
        json!({
            "model": "m", "max_tokens": 9, "stream": true, "metadata": {"user_id": "u"}, "temperature": 1, "stop_sequences": ["END"],
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 7"},
                {"type": "text", "text": "You code. ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Briefly."}],
            "tools": [{"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "I read."},
                    {"type": "tool_use", "id": "t1", "name": "Read", "input": {"b": 1, "a": "é"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
                    {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}]},
            ],
        })
    }

    #[test]
    fn a_request_becomes_the_chat_that_the_engine_makes_of_it() {
        let chat = as_chat(&agent(), form(Teller::Vllm)).unwrap();
        let function = json!({"name": "Read", "description": "Reads.", "parameters": agent()["tools"][0]["input_schema"]});
        let call = json!({"id": "t1", "type": "function", "function": {"name": "Read", "arguments": "{\"b\":1,\"a\":\"é\"}"}});
        let expected = json!({
            "model": "m", "max_tokens": 9, "temperature": 1, "stream": true, "stream_options": {"include_usage": true}, "stop": ["END"],
            "tools": [{"type": "function", "function": function}], "tool_choice": "auto",
            "messages": [
                {"role": "system", "content": "You code. Briefly."},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call], "content": "I read."},
                {"role": "tool", "tool_call_id": "t1", "content": "1\n2"},
                {"role": "user", "content": "and?"},
            ],
        });
        assert_eq!(chat, expected);
        // The order of what templates write is the client's.
        assert_eq!(chat["tools"][0].to_string(), expected["tools"][0].to_string());
        let chat = as_chat(&agent(), form(Teller::Sglang)).unwrap();
        let system = "x-anthropic-billing-header: 7\nYou code. \nBriefly.";
        assert_eq!(chat["messages"][0]["content"], system);
        assert_eq!(chat["messages"][2]["reasoning_content"], "Hm.");
        assert_eq!(chat["tools"][0]["function"]["strict"], false);
    }

    #[test]
    fn instructions_stand_where_the_engine_puts_them() {
        let mut body = agent();
        let told = json!({"role": "system", "content": [{"type": "text", "text": "Now."}]});
        body["messages"].as_array_mut().unwrap().push(told);
        assert!(has_instructions_within(&body) && !has_instructions_within(&agent()));
        let merged = |teller| as_chat(&body, Form { teller, merges_instructions: true }).unwrap();
        assert_eq!(merged(Teller::Vllm)["messages"][0]["content"], "You code. Briefly.Now.");
        assert_eq!(merged(Teller::Vllm)["messages"].as_array().unwrap().len(), 5);
        assert!(
            merged(Teller::Sglang)["messages"][0]["content"].as_str().unwrap().ends_with("Briefly.\nNow.")
        );
        let apart = as_chat(&body, form(Teller::Vllm)).unwrap();
        assert_eq!(apart["messages"][5], json!({"role": "system", "content": "Now."}));
    }

    #[test]
    fn how_much_is_thought_is_told_as_the_engine_tells_it() {
        let with = |thinking: Value, teller| {
            let mut body = agent();
            body["thinking"] = thinking;
            body["output_config"] = json!({"effort": "xhigh"});
            let chat = as_chat(&body, form(teller)).unwrap();
            (
                chat["reasoning_effort"].clone(),
                chat["chat_template_kwargs"].clone(),
                counts_thoughts(&body, teller),
            )
        };
        let enabled = json!({"type": "enabled", "budget_tokens": 2048});
        let disabled = json!({"type": "disabled"});
        assert_eq!(with(enabled.clone(), Teller::Vllm), ("xhigh".into(), Value::Null, true));
        assert_eq!(with(json!({"type": "adaptive"}), Teller::Vllm), ("xhigh".into(), Value::Null, false));
        assert_eq!(with(disabled.clone(), Teller::Vllm), ("none".into(), Value::Null, false));
        let arguments = |is_on: bool| json!({"thinking": is_on, "enable_thinking": is_on});
        assert_eq!(with(enabled, Teller::Sglang), ("max".into(), arguments(true), false));
        assert_eq!(with(disabled, Teller::Sglang), ("max".into(), arguments(false), false));
    }

    #[test]
    fn what_is_not_known_here_makes_no_chat() {
        for (pointer, value) in [
            ("/what_nobody_knows", json!(1)),
            ("/tool_choice", json!({"type": "any"})),
            ("/output_config", json!({"format": {"type": "json_schema"}})),
            ("/thinking", json!({"type": "otherwise"})),
            ("/system", json!([{"type": "image"}])),
            ("/tools/0/type", json!("web_search_20250305")),
            ("/tools/0/defer_loading", json!(true)),
            ("/tools/0/input_schema", json!({})),
            ("/messages/0/content/0/type", json!("image")),
            ("/messages/1/content/0/type", json!("redacted_thinking")),
            ("/messages/1/content/0/type", json!("tool_result")),
            ("/messages/1/content/2/input", json!([])),
            ("/messages/2/content/0/content", json!([{"type": "image"}])),
            ("/messages/0/role", json!("tool")),
            ("/messages", json!("x")),
        ] {
            let mut body = agent();
            let (parent, name) = pointer.rsplit_once('/').unwrap();
            body.pointer_mut(parent).unwrap()[name] = value;
            for teller in [Teller::Vllm, Teller::Sglang] {
                assert_eq!(as_chat(&body, form(teller)), None, "{pointer}");
            }
        }
    }
}
