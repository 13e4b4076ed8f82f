//! A batch of cache events in msgpack, as engines publish it: `[time, [events], rank]`, each event a map with its type in it (vLLM from 0.26 on), or an
//! array that begins with its type and ends where all that follows is a default (older releases, SGLang). What is not known here is passed over.

use std::fmt;
use std::sync::Arc;

use roundhouse_types::BlockHash;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A step fills, and evicts, fewer blocks.
const MOST_EVENTS: usize = 1 << 18;

/// What happened in one step of an engine.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) timestamp: f64,
    pub(super) events: Vec<Event>,
}

/// One thing that happened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Event {
    pub(super) kind: Kind,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) parent: Option<BlockHash>,
    pub(super) block_tokens: usize,
    /// Where the blocks are; engines mean the GPU where they say nothing.
    pub(super) medium: Option<String>,
    /// Of an engine that has several kinds of caches, which of them.
    pub(super) group: Option<u64>,
    /// What kind of cache that is.
    pub(super) attention: Option<String>,
    /// What the request that filled the blocks was called.
    pub(super) session: Option<Arc<str>>,
}

/// What kind of thing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Kind {
    Stored,
    Removed,
    Cleared,
    /// Something else.
    #[default]
    Other,
}

impl Kind {
    fn of(name: &str) -> Self {
        match name {
            "BlockStored" => Self::Stored,
            "BlockRemoved" => Self::Removed,
            "AllBlocksCleared" => Self::Cleared,
            _ => Self::Other,
        }
    }
}

/// Reads the third frame of a message.
pub(super) fn read(payload: &[u8]) -> Result<Batch, rmp_serde::decode::Error> {
    rmp_serde::from_slice(payload)
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Batches;
        impl<'de> Visitor<'de> for Batches {
            type Value = Batch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[time, [events], rank]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Batch, A::Error> {
                let timestamp = parts.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let Few(events) = parts.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                while parts.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Batch { timestamp, events })
            }
        }
        deserializer.deserialize_seq(Batches)
    }
}

/// Events of one step, of which there are not millions: in memory each is a hundred times as large as the least on the wire.
struct Few(Vec<Event>);

impl<'de> Deserialize<'de> for Few {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Events;
        impl<'de> Visitor<'de> for Events {
            type Value = Few;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "up to {MOST_EVENTS} events")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Few, A::Error> {
                let mut events = Vec::new();
                while let Some(event) = list.next_element()? {
                    if events.len() == MOST_EVENTS {
                        return Err(A::Error::invalid_length(MOST_EVENTS + 1, &self));
                    }
                    events.push(event);
                }
                Ok(Few(events))
            }
        }
        deserializer.deserialize_seq(Events)
    }
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Events;
        impl<'de> Visitor<'de> for Events {
            type Value = Event;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an event: a map with a type, or an array that begins with one")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Event, A::Error> {
                let mut event = Event::default();
                while let Some(key) = members.next_key::<String>()? {
                    match key.as_str() {
                        "type" => event.kind = Kind::of(&members.next_value::<String>()?),
                        "block_hashes" => event.hashes = members.next_value::<Hashes>()?.0,
                        "parent_block_hash" => {
                            event.parent = members.next_value::<Option<Hash>>()?.map(|hash| hash.0);
                        }
                        "block_size" => event.block_tokens = members.next_value()?,
                        "medium" => event.medium = members.next_value()?,
                        "group_idx" => event.group = members.next_value()?,
                        "kv_cache_spec_kind" => event.attention = members.next_value()?,
                        "session_id" => event.session = members.next_value()?,
                        _ => drop(members.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(event)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut members: A) -> Result<Event, A::Error> {
                let kind = members.next_element::<String>()?.map_or(Kind::Other, |name| Kind::of(&name));
                let mut event = Event { kind, ..Event::default() };
                let mut rest = Rest(&mut members);
                match kind {
                    Kind::Stored => rest.stored(&mut event)?,
                    Kind::Removed => {
                        event.hashes = rest.next::<Hashes>()?.map(|hashes| hashes.0).unwrap_or_default();
                        event.medium = rest.next()?.flatten();
                        event.group = rest.next()?.flatten();
                    }
                    Kind::Cleared | Kind::Other => {}
                }
                while members.next_element::<IgnoredAny>()?.is_some() {}
                Ok(event)
            }
        }
        deserializer.deserialize_any(Events)
    }
}

/// What is left of an array.
struct Rest<'a, A>(&'a mut A);

impl<'de, A: SeqAccess<'de>> Rest<'_, A> {
    fn next<T: Deserialize<'de>>(&mut self) -> Result<Option<T>, A::Error> {
        self.0.next_element()
    }

    /// Hashes, parent, tokens, block size, LoRA's number, medium; then LoRA's name or SGLang's map of what else there is, extra keys, group, kind.
    fn stored(&mut self, event: &mut Event) -> Result<(), A::Error> {
        event.hashes = self.next::<Hashes>()?.map(|hashes| hashes.0).unwrap_or_default();
        event.parent = self.next::<Option<Hash>>()?.flatten().map(|hash| hash.0);
        self.next::<IgnoredAny>()?;
        event.block_tokens = self.next()?.unwrap_or_default();
        self.next::<IgnoredAny>()?;
        event.medium = self.next()?.flatten();
        if let Some(NameOrMore::More { session_id }) = self.next()? {
            event.session = session_id;
        }
        self.next::<IgnoredAny>()?;
        event.group = self.next()?.flatten();
        event.attention = self.next()?.flatten();
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NameOrMore {
    More { session_id: Option<Arc<str>> },
    Name(IgnoredAny),
}

struct Hashes(Vec<BlockHash>);

impl<'de> Deserialize<'de> for Hashes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let hashes = Vec::<Hash>::deserialize(deserializer)?;
        Ok(Self(hashes.into_iter().map(|hash| hash.0).collect()))
    }
}

/// An engine's hash: a number, signed or not, or bytes, whose first eight do.
struct Hash(BlockHash);

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyHash;
        impl Visitor<'_> for AnyHash {
            type Value = Hash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a hash: a whole number, or bytes")
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Hash, E> {
                Ok(Hash(BlockHash(number)))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Hash, E> {
                Ok(Hash(BlockHash(number.cast_unsigned())))
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Hash, E> {
                let first = bytes.first_chunk().ok_or_else(|| E::invalid_length(bytes.len(), &self))?;
                Ok(Hash(BlockHash(u64::from_be_bytes(*first))))
            }
        }
        deserializer.deserialize_any(AnyHash)
    }
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde_json::json;

    use super::*;

    fn packed(value: &impl Serialize) -> Vec<u8> {
        rmp_serde::to_vec(value).unwrap()
    }

    fn events(value: &serde_json::Value) -> Vec<Event> {
        let batch = read(&packed(&json!([1.5, value, 0]))).unwrap();
        assert!((batch.timestamp - 1.5).abs() < f64::EPSILON);
        batch.events
    }

    #[test]
    fn both_ways_to_write_events_are_read() {
        let stored = Event {
            kind: Kind::Stored,
            hashes: vec![BlockHash(u64::MAX), BlockHash(7)],
            parent: Some(BlockHash(5)),
            block_tokens: 2,
            medium: Some("GPU".to_owned()),
            group: Some(1),
            attention: Some("full_attention".to_owned()),
            session: Some("r".into()),
        };
        let maps = json!([
            {"type": "BlockStored", "block_hashes": [u64::MAX, 7], "parent_block_hash": 5, "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": null,
             "medium": "GPU", "lora_name": null, "extra_keys": [null, ["salt", 3]], "group_idx": 1, "kv_cache_spec_kind": "full_attention", "session_id": "r"},
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 1, "locality": "LOCAL"},
            {"type": "AllBlocksCleared"},
            {"type": "BlockInactive", "block_hashes": [1]},
        ]);
        let removed = Event {
            kind: Kind::Removed,
            hashes: vec![BlockHash(7)],
            medium: Some("CPU".to_owned()),
            group: Some(1),
            ..Event::default()
        };
        let cleared = Event { kind: Kind::Cleared, ..Event::default() };
        let other = Event { hashes: vec![BlockHash(1)], ..Event::default() };
        assert_eq!(events(&maps), [stored.clone(), removed.clone(), cleared.clone(), other]);
        let arrays = json!([
            ["BlockStored", [-1, 7], 5, [1, 2, 3, 4], 2, null, "GPU", "lora", [null, null], 1, "full_attention", null],
            ["BlockRemoved", [7], "CPU", 1],
            ["AllBlocksCleared"],
            ["Else", {"a": 1}],
        ]);
        let unnamed = Event { session: None, ..stored.clone() };
        assert_eq!(events(&arrays), [unnamed, removed, cleared, Event::default()]);
        let short = json!([["BlockStored", [-1, 7], 5, [1, 2, 3, 4], 2, null], ["BlockRemoved", [7]]]);
        let bare = Event { medium: None, group: None, attention: None, session: None, ..stored.clone() };
        let gone = Event { kind: Kind::Removed, hashes: vec![BlockHash(7)], ..Event::default() };
        assert_eq!(events(&short), [bare, gone]);
        let more =
            json!([["BlockStored", [-1, 7], 5, [1], 2, null, "GPU", {"cache_salt": "s", "session_id": "r"}]]);
        assert_eq!(events(&more), [Event { group: None, attention: None, ..stored }]);
    }

    #[test]
    fn hashes_may_be_bytes() {
        #[derive(Serialize)]
        struct Bytes(#[serde(serialize_with = "bytes")] [u8; 32]);
        fn bytes<S: serde::Serializer>(bytes: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_bytes(bytes)
        }
        let (first, second) = (Bytes([1; 32]), Bytes([2; 32]));
        let payload = packed(&(0.0, [("BlockStored", [first], second, [0; 0], 16, None::<u8>)]));
        let event = &read(&payload).unwrap().events[0];
        assert_eq!(event.hashes, [BlockHash(0x0101_0101_0101_0101)]);
        assert_eq!(event.parent, Some(BlockHash(0x0202_0202_0202_0202)));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = read(&bytes);
        }
    }

    #[test]
    fn what_is_no_batch_is_refused() {
        for value in
            [json!(5), json!([]), json!([1.0]), json!([1.0, [5]]), json!([1.0, [["BlockStored", ["x"]]]])]
        {
            assert!(read(&packed(&value)).is_err(), "{value}");
        }
    }
}
