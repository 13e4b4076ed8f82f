//! Which conversation a request belongs to, where it does not say: by what its user said first.

use std::borrow::Cow;
use std::fmt::{self, Formatter};

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use crate::payload::Payload;

/// Of a body, what is looked at.
const MOST_BYTES: usize = 64 << 10;

/// A number that the turns of a conversation have in common: a hash of the first message of its user, or, where none is found in the first 64 KiB, of
/// these. The same in every process.
#[must_use]
pub fn of(body: &Payload) -> u64 {
    let mut begin = Vec::with_capacity(body.len().min(MOST_BYTES));
    for piece in body.pieces() {
        let left = MOST_BYTES - begin.len();
        begin.extend_from_slice(&piece[..piece.len().min(left)]);
    }
    let mut found = None;
    // Looking ends with an error when something is found, and where the 64 KiB end.
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

/// Looks for what a user says first, in a body or in its list of messages.
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
        while let Some(Said { role, content }) = messages.next_element()? {
            if role.as_deref() == Some("user")
                && let Some(content) = content
            {
                *self.0 = Some(xxh3_64(content.get().as_bytes()));
                return Err(A::Error::custom("found"));
            }
        }
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
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
        let response = json!({"model": "m", "input": [question], "instructions": "Be brief."});
        assert_eq!(of_value(&response), of_value(&first), "as a response");
    }

    #[test]
    fn what_has_no_messages_is_of_its_own() {
        let prompt = |text: &str| json!({"model": "m", "prompt": text});
        let input = |text: &str| json!({"model": "m", "input": text});
        assert_eq!(of_value(&prompt("a")), of_value(&prompt("a")));
        assert_ne!(of_value(&prompt("a")), of_value(&prompt("b")));
        assert_ne!(of_value(&input("a")), of_value(&input("b")));
        let mut odd: Vec<u64> =
            [json!({"messages": 7}), json!({"messages": [1]}), json!([]), json!({"messages": [{}]})]
                .iter()
                .map(of_value)
                .collect();
        odd.dedup();
        assert_eq!(odd.len(), 4);
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
