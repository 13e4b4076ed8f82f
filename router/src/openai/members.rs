//! The members of the object that a request body is, by where they stand: so that some can be left out and others added without reading
//! the rest, or copying it.
//!
//! Of a body that [`scan`](super::scan) has found to be JSON; of anything else it finds nothing, or members that are none. Knows no endpoint.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use bytes::Bytes;
use memchr::memchr2;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::payload::{Payload, PayloadBuilder};
use crate::turns::turn_bytes;

/// Of a name, what is kept: more than any has that somebody looks for, were every letter of it escaped.
const MOST_NAME_BYTES: usize = 160;
/// A value in which something is looked for is no longer.
const MOST_SEARCHED_BYTES: usize = 16 << 10;
/// Nor is one that is parsed for that.
const MOST_PARSED_BYTES: usize = 1 << 20;
/// Of a value, what is kept: enough for a number, and to see what a longer one begins with.
const VALUE_BYTES: usize = 24;

/// One member of the object.
#[derive(Debug)]
struct Member {
    /// Between its quotes, as it stands; the beginning of a long one.
    name: Vec<u8>,
    /// The beginning of its value.
    value: Vec<u8>,
    /// From the first quote of its name to the end of its value.
    span: Range<usize>,
}

/// Which members of a body are kept.
#[derive(Clone, Copy)]
pub enum Others<'a> {
    /// All but those of these names.
    Except(&'a [&'a str]),
    /// Those of these names.
    Only(&'a [&'a str]),
}

impl Others<'_> {
    fn has(self, member: &Member) -> bool {
        match self {
            Self::Except(names) => !names.iter().any(|name| member.is_named(name)),
            Self::Only(names) => names.iter().any(|name| member.is_named(name)),
        }
    }
}

/// A body that is an object, and where its members are.
#[derive(Debug)]
pub struct Members {
    body: Payload,
    /// Where each piece of it ends.
    ends: Vec<usize>,
    list: Vec<Member>,
}

impl Members {
    /// Finds the members of an object; `None` if the body is none, or not whole. Lets others of its thread run after each
    /// [turn](turn_bytes).
    pub async fn of(body: &Payload) -> Option<Self> {
        let mut walk = Walk::default();
        let most_bytes = turn_bytes(body.len());
        let (mut turn, mut ends, mut end) = (0, Vec::with_capacity(body.pieces().len()), 0);
        for piece in body.pieces() {
            for part in piece.chunks(most_bytes) {
                walk.part(part)?;
                turn += part.len();
                if turn >= most_bytes {
                    turn = 0;
                    tokio::task::yield_now().await;
                }
            }
            end += piece.len();
            ends.push(end);
        }
        (walk.place == Place::After).then(|| Self { body: body.clone(), ends, list: walk.list })
    }

    /// The first bytes of a member's value, the last one's if it is there more than once.
    fn value(&self, name: &str) -> Option<&[u8]> {
        let found = self.list.iter().rfind(|member| member.is_named(name));
        found.map(|member| member.value.trim_ascii())
    }

    /// Whether there is such a member, and not `null`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some_and(|value| value != b"null")
    }

    /// Whether the value of a member is this short one.
    #[must_use]
    pub fn is(&self, name: &str, value: &[u8]) -> bool {
        self.value(name) == Some(value)
    }

    /// Whether the value of a member may say this somewhere: it stands there, or something is escaped, or there is too much to look at.
    #[must_use]
    pub fn may_say(&self, name: &str, what: &str) -> bool {
        self.list.iter().filter(|member| member.is_named(name)).any(|member| {
            if member.span.len() > MOST_SEARCHED_BYTES {
                return true;
            }
            let mut out = PayloadBuilder::default();
            self.copy(member.span.clone(), &mut out);
            let text = out.finish().joined();
            text.contains(&b'\\') || memchr::memmem::find(&text, what.as_bytes()).is_some()
        })
    }

    /// Whether there is a member `key` anywhere within the value of a member; also where that is more than is looked at.
    #[must_use]
    pub fn has_within(&self, name: &str, key: &str) -> bool {
        let mut named = self.list.iter().filter(|member| member.is_named(name));
        named.any(|member| self.parsed_member(member).is_none_or(|value| is_within(&value, key)))
    }

    /// The value of a member, the last one's if it is there more than once; `None` if there is none, it is something else, or it is longer than is looked at.
    #[must_use]
    pub fn parsed<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        self.parsed_member(self.list.iter().rfind(|member| member.is_named(name))?)
    }

    fn parsed_member<T: DeserializeOwned>(&self, member: &Member) -> Option<T> {
        if member.span.len() > MOST_PARSED_BYTES {
            return None;
        }
        let mut out = PayloadBuilder::default();
        out.push(Bytes::from_static(b"{"));
        self.copy(member.span.clone(), &mut out);
        out.push(Bytes::from_static(b"}"));
        let object: HashMap<String, T> = serde_json::from_slice(&out.finish().joined()).ok()?;
        object.into_values().next()
    }

    /// The value of a member that is a whole number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        std::str::from_utf8(self.value(name)?).ok()?.parse().ok()
    }

    /// Whether a member is a list that begins with something else than a number.
    #[must_use]
    pub fn is_list_of_texts(&self, name: &str) -> bool {
        let list = self.value(name).and_then(|value| value.strip_prefix(b"["));
        let first = list.and_then(|list| list.trim_ascii_start().first());
        first.is_some_and(|first| !first.is_ascii_digit() && !b"-]".contains(first))
    }

    /// Whether it asks of several prompts at once, in OpenAI's words or SGLang's.
    #[must_use]
    pub fn is_list_of_prompts(&self) -> bool {
        ["prompt", "text", "input_ids"].iter().any(|name| self.is_list_of_texts(name))
    }

    /// Whether each member is one that `may` be there: told its name as it is written, and the first bytes of its value.
    #[must_use]
    pub fn all(&self, may: impl Fn(&str, &[u8]) -> bool) -> bool {
        let is_fine = |member: &Member| {
            std::str::from_utf8(&member.name).is_ok_and(|name| may(name, member.value.trim_ascii()))
        };
        self.list.iter().all(is_fine)
    }

    /// An object of `added` (members as JSON text, separated by commas) and those of the body that are among `others`; with `tail` before the end of
    /// one's text or list of objects, whichever `opening` begins. `None` if that is something else, or empty, or not there once.
    #[must_use]
    pub fn with_tail(
        &self,
        (name, opening, tail): (&str, u8, &str),
        added: &str,
        others: Others<'_>,
    ) -> Option<Payload> {
        let mut found = self.list.iter().filter(|member| member.is_named(name));
        let (member, None) = (found.next()?, found.next()) else { return None };
        let rest = member.value.trim_ascii().strip_prefix(&[opening])?;
        match opening {
            b'[' => rest.trim_ascii_start().strip_prefix(b"{").map(drop)?,
            _ => rest.first().filter(|first| **first != opening).map(drop)?,
        }
        let mut out = PayloadBuilder::default();
        out.push(Bytes::from(format!("{{{added}{}", if added.is_empty() { "" } else { "," })));
        self.copy(member.span.start..member.span.end - 1, &mut out);
        out.push(Bytes::copy_from_slice(tail.as_bytes()));
        self.copy(member.span.end - 1..member.span.end, &mut out);
        let kept = |other: &&Member| !other.is_named(name) && others.has(other);
        for other in self.list.iter().filter(kept) {
            out.push(Bytes::from_static(b","));
            self.copy(other.span.clone(), &mut out);
        }
        out.push(Bytes::from_static(b"}"));
        Some(out.finish())
    }

    /// The body with this text as a member, whatever it had of that name.
    #[must_use]
    pub fn with_text(&self, name: &str, text: &str) -> Payload {
        self.with(&format!("{}:{}", Value::from(name), Value::from(text)), &[name])
    }

    /// The body with `added` (members as JSON text, separated by commas), and without those named in `without`.
    #[must_use]
    pub fn with(&self, added: &str, without: &[&str]) -> Payload {
        self.with_others(added, Others::Except(without))
    }

    /// The same, with those `others` alone.
    #[must_use]
    pub fn with_others(&self, added: &str, others: Others<'_>) -> Payload {
        let mut out = PayloadBuilder::default();
        let mut separator = if added.is_empty() { "{" } else { "," };
        if !added.is_empty() {
            out.push(Bytes::from(format!("{{{added}")));
        }
        for run in self.list.chunk_by(|one, next| others.has(one) && others.has(next)) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            if others.has(first) {
                out.push(Bytes::from_static(separator.as_bytes()));
                self.copy(first.span.start..last.span.end, &mut out);
                separator = ",";
            }
        }
        if separator == "{" {
            out.push(Bytes::from_static(b"{"));
        }
        out.push(Bytes::from_static(b"}"));
        out.finish()
    }

    /// Adds what stands there in the body, without copying what is long.
    fn copy(&self, span: Range<usize>, out: &mut PayloadBuilder) {
        let first = self.ends.partition_point(|end| *end <= span.start);
        for (piece, end) in self.body.pieces().iter().zip(&self.ends).skip(first) {
            let begin = end - piece.len();
            if begin >= span.end {
                break;
            }
            out.push(piece.slice(span.start.max(begin) - begin..span.end.min(*end) - begin));
        }
    }
}

fn is_within(value: &Value, key: &str) -> bool {
    match value {
        Value::Object(members) => members.iter().any(|(name, value)| name == key || is_within(value, key)),
        Value::Array(values) => values.iter().any(|value| is_within(value, key)),
        _ => false,
    }
}

impl Member {
    fn is_named(&self, name: &str) -> bool {
        let plain = || -> Option<Cow<'_, [u8]>> {
            if !self.name.contains(&b'\\') {
                return Some(Cow::Borrowed(&self.name));
            }
            // Nobody writes names so, but whoever does means the same.
            let quoted = [b"\"", &self.name[..], b"\""].concat();
            Some(Cow::Owned(serde_json::from_slice::<String>(&quoted).ok()?.into_bytes()))
        };
        !self.name.is_empty() && plain().is_some_and(|plain| *plain == *name.as_bytes())
    }
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Place {
    /// The object.
    #[default]
    Before,
    /// The name of a member, or the end of the object.
    Name,
    /// More of the name.
    InName,
    /// The colon, and then the value.
    Colon,
    /// More of the value.
    Value,
    /// Nothing.
    After,
}

/// A walk over the bytes of a body.
#[derive(Default)]
struct Walk {
    at: usize,
    place: Place,
    /// Brackets and braces that are open within the value.
    depth: usize,
    in_text: bool,
    escaped: bool,
    list: Vec<Member>,
}

impl Walk {
    /// Takes the next bytes; `None` if this is no object.
    fn part(&mut self, part: &[u8]) -> Option<()> {
        let mut left = part;
        while let Some(&byte) = left.first() {
            if self.in_text && !self.escaped {
                // Most of a body is texts.
                let plain = memchr2(b'"', b'\\', left).unwrap_or(left.len());
                self.keep(&left[..plain]);
                self.at += plain;
                left = &left[plain..];
                let Some(&end) = left.first() else { break };
                self.byte(end)?;
            } else {
                self.byte(byte)?;
            }
            self.at += 1;
            left = &left[1..];
        }
        Some(())
    }

    fn byte(&mut self, byte: u8) -> Option<()> {
        match self.place {
            Place::Before | Place::After if byte.is_ascii_whitespace() => {}
            Place::Before if byte == b'{' => self.place = Place::Name,
            Place::Before | Place::After => return None,
            Place::Name => match byte {
                b'"' => {
                    self.place = Place::InName;
                    self.in_text = true;
                    self.list.push(Member { name: Vec::new(), value: Vec::new(), span: self.at..self.at });
                }
                b'}' => self.place = Place::After,
                b',' => {}
                _ if byte.is_ascii_whitespace() => {}
                _ => return None,
            },
            Place::InName => {
                self.text(byte);
                if self.in_text {
                    self.keep(&[byte]);
                } else {
                    self.place = Place::Colon;
                }
            }
            Place::Colon if byte == b':' => self.place = Place::Value,
            Place::Colon if byte.is_ascii_whitespace() => {}
            Place::Colon => return None,
            Place::Value => self.value(byte),
        }
        Some(())
    }

    fn value(&mut self, byte: u8) {
        if self.in_text {
            self.text(byte);
        } else {
            match byte {
                b'"' => self.in_text = true,
                b'[' | b'{' => self.depth += 1,
                b',' if self.depth == 0 => return self.place = Place::Name,
                b'}' if self.depth == 0 => return self.place = Place::After,
                b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.keep(&[byte]);
        let after = self.at + 1;
        if let Some(member) = self.list.last_mut()
            && (self.in_text || !byte.is_ascii_whitespace())
        {
            member.span.end = after;
        }
    }

    fn text(&mut self, byte: u8) {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => self.in_text = false,
            _ => {}
        }
    }

    /// Some more of the name or the value.
    fn keep(&mut self, bytes: &[u8]) {
        let Some(member) = self.list.last_mut() else { return };
        if self.place == Place::InName {
            keep_first(bytes, MOST_NAME_BYTES, &mut member.name);
        } else {
            keep_first(bytes, VALUE_BYTES, &mut member.value);
        }
    }
}

fn keep_first(bytes: &[u8], most: usize, kept: &mut Vec<u8>) {
    let room = most.saturating_sub(kept.len());
    kept.extend_from_slice(&bytes[..room.min(bytes.len())]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    fn cut(text: &str, every: usize) -> Payload {
        let mut out = PayloadBuilder::default();
        text.as_bytes().chunks(every.max(1)).for_each(|piece| out.push(Bytes::copy_from_slice(piece)));
        out.finish()
    }

    fn find(text: &str, every: usize) -> Option<Members> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Members::of(&cut(text, every)))
    }

    fn with(text: &str, added: &str, without: &[&str]) -> Value {
        let body = find(text, text.len()).unwrap().with(added, without).joined();
        serde_json::from_slice(&body).unwrap_or_else(|error| panic!("{error}: {body:?}"))
    }

    #[test]
    fn members_are_left_out_and_added() {
        let text = r#" { "a" : 1 , "stream": true,"b":{"stream":[1,"}"]}, "c":"x\"y,}" , "stream":false } "#;
        assert_eq!(
            with(text, r#""z":0"#, &["stream"]),
            json!({"z": 0, "a": 1, "b": {"stream": [1, "}"]}, "c": "x\"y,}"})
        );
        assert_eq!(with(text, "", &["a", "b", "c", "stream"]), json!({}));
        assert_eq!(with("{}", r#""z":0"#, &[]), json!({"z": 0}));
        assert_eq!(with("{}", "", &[]), json!({}));
        assert_eq!(with(r#"{"stre\u0061m":1}"#, "", &["stream"]), json!({}));
        assert_eq!(with(r#"{"a":1,"b":2}"#, r#""b":3"#, &["b"]), json!({"b": 3, "a": 1}));
    }

    #[test]
    fn of_some_members_an_object_is_made() {
        let members = find(r#"{"a":1,"b":[{"x":2}],"c":"d","e":null}"#, 3).unwrap();
        let only = |added: &str, names: &[&str]| -> Value {
            serde_json::from_slice(&members.with_others(added, Others::Only(names)).joined()).unwrap()
        };
        assert_eq!(only(r#""z":0"#, &["a", "c", "y"]), json!({"z": 0, "a": 1, "c": "d"}));
        assert_eq!(only("", &[]), json!({}));
        let tailed = members.with_tail(("b", b'[', ",{}"), "", Others::Only(&["e"])).unwrap().joined();
        assert_eq!(
            serde_json::from_slice::<Value>(&tailed).unwrap(),
            json!({"b": [{"x": 2}, {}], "e": null})
        );
        assert_eq!(members.parsed("b"), Some(json!([{"x": 2}])));
        assert_eq!((members.parsed("e"), members.parsed::<Value>("f")), (Some(Value::Null), None));
    }

    #[test]
    fn a_text_or_a_list_gets_a_tail() {
        let tailed = |text: &str, opening: u8, tail: &str| {
            let body = find(text, 3)
                .unwrap()
                .with_tail(("p", opening, tail), "\"z\":0", Others::Except(&["a"]))?
                .joined();
            Some(serde_json::from_slice::<Value>(&body).unwrap_or_else(|error| panic!("{error}: {body:?}")))
        };
        let text = r#"{ "a":1, "p" : "he\"llo" , "b":[2] }"#;
        assert_eq!(tailed(text, b'"', " w\\n").unwrap(), json!({"p": "he\"llo w\n", "b": [2], "z": 0}));
        let list = r#"{"p":[ {"x":[1]} ] }"#;
        assert_eq!(tailed(list, b'[', ",{}").unwrap(), json!({"p": [{"x": [1]}, {}], "z": 0}));
        let others = [
            r#"{"p":[1]}"#,
            r#"{"p":["x"]}"#,
            r#"{"p":[]}"#,
            r#"{"p":""}"#,
            "{}",
            r#"{"p":"a","p":"b"}"#,
            r#"{"p":5}"#,
        ];
        for other in others {
            assert!(tailed(other, b'[', "").is_none() && tailed(other, b'"', "").is_none(), "{other}");
        }
        assert!(tailed(text, b'[', "").is_none() && tailed(list, b'"', "").is_none());
    }

    #[test]
    fn values_are_seen_as_far_as_they_matter() {
        let text = r#"{"n":1,"n":2,"prompt":[ "a","b"],"ids":[1,2],"nothing":null,"long":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","none":[]}"#;
        let members = find(text, 3).unwrap();
        assert_eq!((members.number("n"), members.number("long"), members.number("m")), (Some(2), None, None));
        assert!(members.is_list_of_texts("prompt"));
        assert!(
            !members.is_list_of_texts("ids")
                && !members.is_list_of_texts("n")
                && !members.is_list_of_texts("none")
        );
        assert!(members.has("n") && !members.has("nothing") && !members.has("m"));
    }

    #[test]
    fn what_is_no_object_has_no_members() {
        for text in ["", "[1]", "null", "{", r#"{"a":1"#, r#"{"a" 1}"#, "{a:1}", "{} x"] {
            assert!(find(text, 2).is_none(), "{text}");
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((".{0,4}", inner), 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn is_what_serde_makes_of_it(
            members in prop::collection::vec(("[a-d\"\\\\é]{0,3}", value()), 0..6),
            without in prop::collection::vec("[a-d]{0,3}", 0..3),
            every in 1_usize..40,
            pretty in any::<bool>(),
        ) {
            let object: Map<String, Value> = members.into_iter().collect();
            let mut expected = object.clone();
            let object = Value::Object(object);
            let text = if pretty { serde_json::to_string_pretty(&object) } else { serde_json::to_string(&object) };
            let without: Vec<_> = without.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
            without.iter().for_each(|name| { expected.remove(*name); });
            let body = find(&text.unwrap(), every).unwrap().with("\"new\":[7]", &without).joined();
            expected.insert("new".into(), json!([7]));
            let got: Value = serde_json::from_slice(&body).unwrap();
            prop_assert_eq!(got, Value::Object(expected));
        }
    }
}
