//! Which conversation a request belongs to, where it does not say: by what its user said first.

use std::borrow::Cow;
use std::fmt::{self, Formatter};

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use crate::payload::Payload;

/// Of a body, what is looked at: with tools and instructions of an agent before the messages, some hundred kilobytes.
const MOST_BYTES: usize = 256 << 10;
/// Of its messages, so many.
const MOST_MESSAGES: usize = 256;
/// Of a message in parts, no more: building values takes ten times as long as passing over them.
const MOST_PARTS_BYTES: usize = 32 << 10;

/// A number that the turns of a conversation have in common: a hash of the text of the first message of its user, or, where none is found among the first
/// 256 messages and in the first 256 KiB, of these. The same in every process.
#[must_use]
pub fn of(body: &Payload) -> u64 {
    let mut begin = Vec::with_capacity(body.len().min(MOST_BYTES));
    for piece in body.pieces() {
        let left = MOST_BYTES - begin.len();
        begin.extend_from_slice(&piece[..piece.len().min(left)]);
    }
    let mut found = None;
    // Looking ends with an error when something is found, and where what is looked at ends.
    let _ = Look(&mut found).deserialize(&mut serde_json::Deserializer::from_slice(&begin));
    found.unwrap_or_else(|| xxh3_64(&begin))
}

/// A message, or an item of the input of a response.
#[derive(Deserialize)]
struct Said<'a> {
    #[serde(borrow, default)]
    role: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

/// What a message says, however it is written: clients write the same text in parts once they mark it for the cache. Of something without a text, and of
/// parts that are too long to be looked at, it is what stands there.
fn hash(content: &RawValue) -> u64 {
    let raw = content.get();
    let text = match serde_json::from_str::<Value>(if raw.len() <= MOST_PARTS_BYTES { raw } else { "null" }) {
        Ok(Value::Array(parts)) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => serde_json::from_str::<String>(raw).unwrap_or_default(),
    };
    xxh3_64(if text.is_empty() { raw } else { &text }.as_bytes())
}

/// Looks for what a user says first, in a body or in what it has of messages.
struct Look<'a>(&'a mut Option<u64>);

impl<'de> DeserializeSeed<'de> for Look<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Look<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("a request")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut body: A) -> Result<(), A::Error> {
        while let Some(name) = body.next_key::<Cow<'_, str>>()? {
            match &*name {
                "messages" | "input" => body.next_value_seed(Look(self.0))?,
                _ => drop(body.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut messages: A) -> Result<(), A::Error> {
        for _ in 0..MOST_MESSAGES {
            let Some(Said { role, content }) = messages.next_element()? else { return Ok(()) };
            if let (Some("user"), Some(content)) = (role.as_deref(), content) {
                *self.0 = Some(hash(content));
                return Err(A::Error::custom("found"));
            }
        }
        Err(A::Error::custom("nobody says so much before its user"))
    }

    /// The input of a response, which later turns have as a message.
    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        *self.0 = Some(xxh3_64(text.as_bytes()));
        Err(E::custom("found"))
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;

    fn of_value(body: &Value) -> u64 {
        of(&Bytes::from(body.to_string()).into())
    }

    fn said(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn later_turns_are_of_the_same_conversation() {
        let (system, question) = (said("system", "Be brief."), said("user", "Who is Mr. Darcy?"));
        let first = json!({"model": "m", "messages": [system, question]});
        let second = json!({"model": "m", "temperature": 1, "messages": [system, question, said("assistant", "A man."), said("user", "And?")]});
        let other = json!({"model": "m", "messages": [system, said("user", "Who is Mr. Bingley?")]});
        assert_eq!(of_value(&first), of_value(&second));
        assert_ne!(of_value(&first), of_value(&other));
        let same = [
            json!({"model": "m", "input": [question], "instructions": "Be brief."}),
            json!({"input": "Who is Mr. Darcy?"}),
            json!({"input": null, "messages": [{"role": "system"}, question]}),
            json!({"messages": [{"content": [{"type": "text", "text": "Who is Mr. Darcy?", "cache_control": {}}], "role": "user"}]}),
            json!({"tools": ["x".repeat(200_000)], "messages": [system, question]}),
        ];
        for body in same {
            assert_eq!(
                of_value(&body),
                of_value(&first),
                "{}",
                body.to_string().get(..200).unwrap_or_default()
            );
        }
    }

    #[test]
    fn what_has_no_messages_is_of_its_own() {
        let prompt = |text: &str| json!({"model": "m", "prompt": text});
        let input = |text: &str| json!({"model": "m", "input": text});
        assert_eq!(of_value(&prompt("a")), of_value(&prompt("a")));
        assert_ne!(of_value(&prompt("a")), of_value(&prompt("b")));
        assert_ne!(of_value(&input("a")), of_value(&input("b")));
        let picture = |data: &str| json!({"messages": [{"role": "user", "content": [{"type": "image", "data": data}]}]});
        let odd = [
            json!({"messages": 7}),
            json!({"messages": [1]}),
            json!([]),
            json!({"messages": [{}]}),
            picture("a"),
            picture("b"),
        ];
        let mut odd: Vec<u64> = odd.iter().map(of_value).collect();
        odd.sort_unstable();
        odd.dedup();
        assert_eq!(odd.len(), 6);
    }

    #[test]
    fn what_is_too_much_to_look_at_is_what_stands_there() {
        let after = |messages: usize, end: &str| {
            let mut all = vec![json!({}); messages];
            all.push(said("user", "a"));
            json!({"messages": all, "end": end})
        };
        assert_eq!(of_value(&after(255, "a")), of_value(&after(255, "b")));
        assert_ne!(of_value(&after(256, "a")), of_value(&after(256, "b")));
        let parts = |bytes: usize, mark: &str| {
            let text = "x".repeat(bytes);
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": text, "mark": mark}]}]})
        };
        assert_eq!(of_value(&parts(30_000, "a")), of_value(&parts(30_000, "b")));
        assert_ne!(of_value(&parts(40_000, "a")), of_value(&parts(40_000, "b")));
        let long = said("user", &"x".repeat(100_000));
        let turn = |end: &str| json!({"messages": [long], "end": end});
        assert_eq!(of_value(&turn("a")), of_value(&turn("b")), "one that is a text may be longer");
    }

    #[test]
    fn no_more_than_the_beginning_is_looked_at() {
        let long = |end: &str| {
            let content = format!("{}{end}", "x".repeat(MOST_BYTES));
            json!({"messages": [{"role": "user", "content": content}]})
        };
        assert_eq!(of_value(&long("a")), of_value(&long("b")));
        let cut = long("a").to_string();
        let pieces: Vec<Bytes> = cut.as_bytes().chunks(1_000).map(Bytes::copy_from_slice).collect();
        let mut builder = crate::payload::PayloadBuilder::default();
        pieces.into_iter().for_each(|piece| builder.push(piece));
        assert_eq!(of(&builder.finish()), of_value(&long("a")), "wherever it is cut");
    }
}
