//! A batch in msgpack, in vLLM's newer form: an array of time, events and rank, each event a map with its type in it.
//!
//! Written by hand: there are three shapes, and they are all that is ever written.

use roundhouse_types::{BlockHash, KvEvent, KvEventBatch, StoredBlocks};

/// The tier that KV is computed in. vLLM calls it so on every kind of device, and its followers look for that.
const MEDIUM: &str = "GPU";

/// The third frame of a batch.
pub(super) fn payload(batch: &KvEventBatch) -> Vec<u8> {
    let mut out = Msgpack(Vec::with_capacity(256));
    out.array(3);
    out.float(batch.timestamp);
    // What routers tell each other is none of vLLM's.
    let events = batch.events.iter().filter(|event| !matches!(event, KvEvent::Routed(_) | KvEvent::Ended(_)));
    out.array(events.clone().count());
    events.for_each(|event| out.event(event));
    // The data-parallel rank: each of our workers is a process of its own.
    out.nil();
    out.0
}

struct Msgpack(Vec<u8>);

impl Msgpack {
    fn event(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored(stored) => self.stored(stored),
            KvEvent::Removed { hashes } => {
                self.map(3);
                self.pair("type", |out| out.text("BlockRemoved"));
                self.pair("block_hashes", |out| out.hashes(hashes));
                self.pair("medium", |out| out.text(MEDIUM));
            }
            KvEvent::Cleared => {
                self.map(1);
                self.pair("type", |out| out.text("AllBlocksCleared"));
            }
            KvEvent::Routed(_) | KvEvent::Ended(_) => self.nil(),
        }
    }

    fn stored(&mut self, stored: &StoredBlocks) {
        self.map(8 + u8::from(stored.request_id.is_some()));
        self.pair("type", |out| out.text("BlockStored"));
        self.pair("block_hashes", |out| out.hashes(&stored.hashes));
        self.pair("parent_block_hash", |out| match stored.parent {
            Some(parent) => out.whole(parent.0),
            None => out.nil(),
        });
        self.pair("token_ids", |out| {
            out.array(stored.tokens.len());
            stored.tokens.iter().for_each(|token| out.whole((*token).into()));
        });
        self.pair("block_size", |out| out.whole(stored.block_tokens as u64));
        self.pair("lora_id", Self::nil);
        self.pair("medium", |out| out.text(MEDIUM));
        // vLLM's has no default for it, so it is always there, and vllm-router reads no event without.
        self.pair("lora_name", Self::nil);
        if let Some(id) = &stored.request_id {
            // What vLLM has got in `X-Session-ID`, by which routers find their requests.
            self.pair("session_id", |out| out.long_text(id));
        }
    }

    fn pair(&mut self, key: &str, value: impl FnOnce(&mut Self)) {
        self.text(key);
        value(self);
    }

    fn hashes(&mut self, hashes: &[BlockHash]) {
        self.array(hashes.len());
        hashes.iter().for_each(|hash| self.whole(hash.0));
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn float(&mut self, number: f64) {
        self.0.push(0xcb);
        self.0.extend_from_slice(&number.to_be_bytes());
    }

    /// In as few bytes as it takes.
    fn whole(&mut self, number: u64) {
        match number {
            0..=0x7f => self.0.push(number as u8),
            0x80..=0xff => self.0.extend_from_slice(&[0xcc, number as u8]),
            0x100..=0xffff => self.sized(0xcd, &(number as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.sized(0xce, &(number as u32).to_be_bytes()),
            _ => self.sized(0xcf, &number.to_be_bytes()),
        }
    }

    fn array(&mut self, len: usize) {
        match len {
            0..=15 => self.0.push(0x90 | len as u8),
            16..=0xffff => self.sized(0xdc, &(len as u16).to_be_bytes()),
            _ => self.sized(0xdd, &u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes()),
        }
    }

    /// A text of any length.
    fn long_text(&mut self, text: &str) {
        match text.len() {
            0..=31 => self.text(text),
            len @ 32..=0xff => {
                self.sized(0xd9, &[len as u8]);
                self.0.extend_from_slice(text.as_bytes());
            }
            len => {
                self.sized(0xdb, &u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
                self.0.extend_from_slice(text.as_bytes());
            }
        }
    }

    /// Our maps have up to 8 entries, and our own texts up to 31 bytes.
    fn map(&mut self, len: u8) {
        debug_assert!(len < 16);
        self.0.push(0x80 | len);
    }

    fn text(&mut self, text: &str) {
        debug_assert!(text.len() < 32);
        self.0.push(0xa0 | text.len() as u8);
        self.0.extend_from_slice(text.as_bytes());
    }

    fn sized(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use roundhouse_types::EndedRequest;

    use super::*;

    /// Read by somebody else's reader.
    fn read(batch: &KvEventBatch) -> Value {
        rmp_serde::from_slice(&payload(batch)).unwrap()
    }

    #[test]
    fn events_are_maps_as_vllm_writes_them() {
        let hashes = vec![BlockHash(u64::MAX), BlockHash(0x8000)];
        let stored = StoredBlocks {
            hashes: hashes.clone(),
            parent: Some(BlockHash(7)),
            tokens: vec![0, 127, 128, 300, 65_536, u32::MAX],
            block_tokens: 3,
            request_id: None,
            first_position: 3,
        };
        let root = StoredBlocks { parent: None, ..stored.clone() };
        let events = vec![
            KvEvent::Stored(stored),
            KvEvent::Stored(root),
            KvEvent::Removed { hashes },
            KvEvent::Ended(EndedRequest {
                request_id: "not for vLLM".into(),
                router: 1,
                prompt_tokens: 9,
                cached_tokens: None,
            }),
            KvEvent::Cleared,
        ];
        let block = |parent: Value| {
            json!({
                "type": "BlockStored", "block_hashes": [u64::MAX, 0x8000], "parent_block_hash": parent,
                "token_ids": [0, 127, 128, 300, 65_536, u32::MAX], "block_size": 3, "lora_id": null, "medium": "GPU",
                "lora_name": null,
            })
        };
        let removed = json!({"type": "BlockRemoved", "block_hashes": [u64::MAX, 0x8000], "medium": "GPU"});
        let cleared = json!({"type": "AllBlocksCleared"});
        let batch = KvEventBatch { sequence: 1, timestamp: 1.5, events };
        assert_eq!(read(&batch), json!([1.5, [block(json!(7)), block(Value::Null), removed, cleared], null]));
    }

    #[test]
    fn requests_are_named_where_vllm_names_sessions() {
        for id in ["r".to_owned(), "x".repeat(31), "x".repeat(32), "x".repeat(255), "x".repeat(300)] {
            let stored = StoredBlocks {
                hashes: vec![BlockHash(1)],
                parent: None,
                tokens: vec![1],
                block_tokens: 1,
                request_id: Some(id.as_str().into()),
                first_position: 0,
            };
            let batch = KvEventBatch { sequence: 0, timestamp: 0.0, events: vec![KvEvent::Stored(stored)] };
            assert_eq!(read(&batch)[1][0]["session_id"], id);
        }
    }

    #[test]
    fn lists_of_every_length_are_read_back() {
        for len in [0, 15, 16, 0xffff, 0x1_0000] {
            let hashes: Vec<_> = (0..len).map(BlockHash).collect();
            let batch =
                KvEventBatch { sequence: 0, timestamp: 0.0, events: vec![KvEvent::Removed { hashes }] };
            let read = read(&batch);
            assert_eq!(read[1][0]["block_hashes"], json!((0..len).collect::<Vec<_>>()));
        }
    }
}
