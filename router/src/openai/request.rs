//! Reads of a request body what routing needs, borrowing from it, in one pass.
//!
//! Lenient on purpose: whether `messages` makes sense is for the engine to say. Only a body that is no JSON object is an
//! error. Strings are hashed raw, as they stand between their quotes, in the order in which chat templates put
//! them: tools, then role and content of each message.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use router_core::prefix::PromptHasher;

/// The fields of a request that routing reads. Absent, `null` and fields of an unexpected type are all `None`.
#[derive(Debug, Default)]
pub struct RequestBody<'a> {
    /// `model`.
    pub model: Option<Cow<'a, str>>,
    /// `user`, OpenAI's name for an end user.
    pub user: Option<Cow<'a, str>>,
    /// `cache_salt`: prompts with different salts share no cache.
    pub cache_salt: Option<Cow<'a, str>>,
    tools: Option<&'a RawValue>,
    messages: Vec<Message<'a>>,
    /// `prompt`, `input`, `text` or `input_ids`: whatever else carries a prompt, in the order in which they came.
    prompts: Vec<&'a RawValue>,
}

#[derive(Debug, Default)]
struct Message<'a> {
    role: Option<&'a RawValue>,
    content: Option<&'a RawValue>,
    tool_calls: Option<&'a RawValue>,
}

impl<'a> RequestBody<'a> {
    /// Reads `body`.
    ///
    /// # Errors
    /// When it is not JSON, with line and column, or not an object.
    pub fn parse(body: &'a [u8]) -> Result<Self, BodyError> {
        let mut reader = serde_json::Deserializer::from_slice(body);
        let found = BodySeed.deserialize(&mut reader).map_err(BodyError::Syntax)?;
        reader.end().map_err(BodyError::Syntax)?;
        found.map_err(|found| BodyError::NotAnObject { found })
    }

    /// Feeds the prompt to `hasher` in template order.
    pub fn hash_prompt(&self, hasher: &mut PromptHasher) {
        if let Some(tools) = self.tools {
            hasher.push(tools.get().as_bytes());
        }
        for message in &self.messages {
            push_text(hasher, message.role);
            push_content(hasher, message.content);
            push_text(hasher, message.tool_calls);
        }
        for prompt in &self.prompts {
            push_text(hasher, Some(prompt));
        }
    }
}

/// Why a body could not be read.
#[derive(Debug)]
pub enum BodyError {
    /// Not JSON; the error says where.
    Syntax(serde_json::Error),
    /// JSON, but not an object.
    NotAnObject {
        /// What it is.
        found: &'static str,
    },
}

fn push_text(hasher: &mut PromptHasher, value: Option<&RawValue>) {
    if let Some(value) = value {
        hasher.push(without_quotes(value.get()).as_bytes());
    }
}

/// A string as it is; content parts one by one, texts as they are and anything else (images, audio) by digest, so that
/// a picture's megabytes are one block and not thousands.
fn push_content(hasher: &mut PromptHasher, content: Option<&RawValue>) {
    let Some(content) = content else { return };
    if !content.get().starts_with('[') {
        return push_text(hasher, Some(content));
    }
    let Ok(parts) = serde_json::from_str::<Vec<&RawValue>>(content.get()) else { return };
    for part in parts {
        match serde_json::from_str::<TextPart<'_>>(part.get()) {
            Ok(TextPart { text: Some(text) }) => push_text(hasher, Some(text)),
            _ => hasher.push(&xxh3_64(part.get().as_bytes()).to_le_bytes()),
        }
    }
}

#[derive(serde::Deserialize)]
struct TextPart<'a> {
    #[serde(borrow)]
    text: Option<&'a RawValue>,
}

fn without_quotes(raw: &str) -> &str {
    raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(raw)
}

fn text_of(raw: &RawValue) -> Option<Cow<'_, str>> {
    if raw.get().contains('\\') {
        return serde_json::from_str::<String>(raw.get()).ok().map(Cow::Owned);
    }
    serde_json::from_str::<&str>(raw.get()).ok().map(Cow::Borrowed)
}

/// Reads the top level: `Err` names what stands there instead of an object.
struct BodySeed;

impl<'de> DeserializeSeed<'de> for BodySeed {
    type Value = Result<RequestBody<'de>, &'static str>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_any(BodyVisitor)
    }
}

struct BodyVisitor;

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Result<RequestBody<'de>, &'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut body = RequestBody::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "model" => body.model = text_of(map.next_value()?),
                "user" => body.user = text_of(map.next_value()?),
                "cache_salt" => body.cache_salt = text_of(map.next_value()?),
                "tools" => body.tools = Some(map.next_value()?),
                "messages" => body.messages = map.next_value_seed(MessagesSeed)?,
                "prompt" | "input" | "text" | "input_ids" => body.prompts.push(map.next_value()?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Ok(body))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Err("an array"))
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(Err("a string"))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Err("a boolean"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Err("a number"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Err("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Err("a number"))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Err("null"))
    }
}

/// Reads `messages` if it is an array, the objects in it, and skips whatever else there is.
struct MessagesSeed;

impl<'de> DeserializeSeed<'de> for MessagesSeed {
    type Value = Vec<Message<'de>>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_any(MessagesVisitor)
    }
}

struct MessagesVisitor;

/// The kinds of JSON value that carry nothing for us: accepted and skipped.
macro_rules! skip_scalars {
    () => {
        fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Self::Value::default())
        }
    };
}

impl<'de> Visitor<'de> for MessagesVisitor {
    type Value = Vec<Message<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut messages = Vec::new();
        while let Some(message) = seq.next_element_seed(MessageSeed)? {
            messages.push(message);
        }
        Ok(messages)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Vec::new())
    }

    skip_scalars!();
}

struct MessageSeed;

impl<'de> DeserializeSeed<'de> for MessageSeed {
    type Value = Message<'de>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_any(MessageVisitor)
    }
}

struct MessageVisitor;

impl<'de> Visitor<'de> for MessageVisitor {
    type Value = Message<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut message = Message::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "role" => message.role = Some(map.next_value()?),
                "content" => message.content = Some(map.next_value()?),
                "tool_calls" => message.tool_calls = Some(map.next_value()?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(message)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Message::default())
    }

    skip_scalars!();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use roundhouse_types::ChainHasher;
    use serde_json::json;

    use super::*;

    fn prompt(body: &serde_json::Value) -> (Vec<roundhouse_types::BlockHash>, usize) {
        let text = body.to_string();
        let mut hasher = PromptHasher::new(ChainHasher::new(1));
        RequestBody::parse(text.as_bytes()).unwrap().hash_prompt(&mut hasher);
        hasher.finish()
    }

    #[test]
    fn reads_what_routing_needs() {
        let body = br#"{"model": "m\u0041", "stream": true, "user": "u", "cache_salt": null,
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}"#;
        let body = RequestBody::parse(body).unwrap();
        assert_eq!(body.model.as_deref(), Some("mA"));
        assert_eq!(body.user.as_deref(), Some("u"));
        assert_eq!(body.cache_salt, None);
        assert_eq!(body.messages.len(), 2);
    }

    #[test]
    fn says_where_the_json_ends_to_make_sense() {
        let Err(BodyError::Syntax(error)) = RequestBody::parse(b"{\"model\": \"m\",\n \"messages\": [}")
        else {
            panic!("accepted")
        };
        assert_eq!((error.line(), error.column()), (2, 15));
        assert!(matches!(RequestBody::parse(b"{} x"), Err(BodyError::Syntax(_))));
        assert!(matches!(RequestBody::parse(b""), Err(BodyError::Syntax(_))));
        assert!(matches!(RequestBody::parse(b"{\"model\": \"\xff\"}"), Err(BodyError::Syntax(_))));
        assert!(matches!(RequestBody::parse(b"[1]"), Err(BodyError::NotAnObject { found: "an array" })));
    }

    #[test]
    fn odd_types_are_left_for_the_engine() {
        for messages in [json!(5), json!("x"), json!({"a": [1]}), json!([1, "x", [2], null, {"role": 7}])] {
            let text = json!({"messages": messages, "model": 5}).to_string();
            let body = RequestBody::parse(text.as_bytes()).unwrap();
            assert_eq!(body.model, None);
        }
    }

    #[test]
    fn deep_nesting_does_not_exhaust_the_stack() {
        for field in ["x", "tools", "messages", "prompt"] {
            let (open, close) = ("[{\"content\":".repeat(100_000), "}]".repeat(100_000));
            let body = format!("{{\"{field}\": {open}1{close}}}");
            let read = RequestBody::parse(body.as_bytes()).unwrap();
            let mut hasher = PromptHasher::new(ChainHasher::new(1));
            read.hash_prompt(&mut hasher);
        }
    }

    #[test]
    fn order_and_unrelated_fields_do_not_change_the_prompt() {
        let one = json!({"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": "a".repeat(300)}]});
        let two =
            json!({"messages": [{"role": "user", "name": "n", "content": "a".repeat(300)}], "model": "m"});
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
                {"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": "c".repeat(300)}]}]})
        };
        let long = "d".repeat(100_000);
        assert_ne!(prompt(&image(&long)).0, prompt(&image("e")).0);
        assert_eq!(prompt(&image(&long)).1, 4 + 8 + 300);
    }

    #[test]
    fn every_kind_of_prompt_is_read() {
        for field in ["prompt", "input", "text", "input_ids"] {
            assert_eq!(prompt(&json!({field: "f".repeat(200)})).1, 200, "{field}");
        }
        assert!(prompt(&json!({"prompt": [1, 2, 3]})).1 > 0);
    }

    proptest! {
        #[test]
        fn never_panics(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = RequestBody::parse(&body);
        }

        #[test]
        fn agrees_with_a_full_parser_on_what_is_json(body in "[\\[\\]{}\",:a0 \\\\-]{0,40}") {
            let full = serde_json::from_str::<serde_json::Value>(&body);
            match RequestBody::parse(body.as_bytes()) {
                Ok(_) => prop_assert!(full.is_ok_and(|value| value.is_object())),
                Err(BodyError::NotAnObject { .. }) => prop_assert!(full.is_ok_and(|value| !value.is_object())),
                Err(BodyError::Syntax(_)) => prop_assert!(full.is_err()),
            }
        }
    }
}
