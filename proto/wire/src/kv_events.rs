//! Cache events and what they mean.

use std::sync::Arc;

use roundhouse_types::{BlockHash, EndedRequest, KvEvent, KvEventBatch, RoutedPrompt, StoredBlocks};

use crate::v1;
use crate::v1::kv_event::Event;

/// Why a batch of events makes no sense. Whoever gets one asks for a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KvEventError {
    /// Blocks and tokens do not fit together.
    #[error("batch {sequence} stores {blocks} blocks of {block_tokens} tokens, but has {tokens} tokens")]
    Lengths {
        /// The batch.
        sequence: u64,
        /// Blocks it stores.
        blocks: usize,
        /// Positions of each.
        block_tokens: u32,
        /// Tokens it gives for them.
        tokens: usize,
    },
}

impl From<&KvEventBatch> for v1::KvEventBatch {
    fn from(batch: &KvEventBatch) -> Self {
        Self {
            sequence: batch.sequence,
            timestamp: batch.timestamp,
            events: batch.events.iter().map(v1::KvEvent::from).collect(),
            snapshot: None,
            instance: None,
        }
    }
}

impl From<&KvEvent> for v1::KvEvent {
    fn from(event: &KvEvent) -> Self {
        let hashes = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.0).collect();
        Self {
            event: Some(match event {
                KvEvent::Stored(blocks) => Event::Stored(v1::Stored {
                    hashes: hashes(&blocks.hashes),
                    parent: blocks.parent.map(|hash| hash.0),
                    tokens: blocks.tokens.clone(),
                    block_tokens: u32::try_from(blocks.block_tokens).unwrap_or(u32::MAX),
                    request_id: blocks.request_id.as_deref().unwrap_or_default().to_owned(),
                    first_position: blocks.first_position as u64,
                }),
                KvEvent::Removed { hashes: gone } => Event::Removed(v1::Removed { hashes: hashes(gone) }),
                KvEvent::Cleared => Event::Cleared(v1::Cleared {}),
                KvEvent::Routed(prompt) => Event::Routed(v1::Routed {
                    request_id: prompt.request_id.as_ref().to_owned(),
                    router: prompt.router,
                    seed_digest: prompt.seed_digest,
                    hashes: hashes(&prompt.hashes),
                    tools_blocks: u32::try_from(prompt.tools_blocks).unwrap_or(u32::MAX),
                    tools_bytes: prompt.tools_bytes as u64,
                    system_blocks: u32::try_from(prompt.system_blocks).unwrap_or(u32::MAX),
                    system_bytes: prompt.system_bytes as u64,
                    prompt_bytes: prompt.prompt_bytes as u64,
                    prompt_tokens: prompt.prompt_tokens as u64,
                }),
                KvEvent::Ended(ended) => Event::Ended(v1::Ended {
                    request_id: ended.request_id.as_ref().to_owned(),
                    router: ended.router,
                    prompt_tokens: ended.prompt_tokens as u64,
                    cached_tokens: ended.cached_tokens.map(|tokens| tokens as u64),
                }),
            }),
        }
    }
}

impl TryFrom<v1::KvEventBatch> for KvEventBatch {
    type Error = KvEventError;

    /// Events of kinds that are not known here, a newer worker's, are left out; their batch counts.
    fn try_from(batch: v1::KvEventBatch) -> Result<Self, KvEventError> {
        let sequence = batch.sequence;
        let known = batch.events.into_iter().filter_map(|event| event.event);
        let events = known.map(|event| read(event, sequence)).collect::<Result<_, _>>()?;
        Ok(Self { sequence, timestamp: batch.timestamp, events })
    }
}

/// What a router tells by `Tell`; `None` if it is not for a router to tell.
#[must_use]
pub fn told_event(event: v1::KvEvent) -> Option<KvEvent> {
    match event.event? {
        Event::Routed(prompt) => Some(KvEvent::Routed(routed(prompt))),
        Event::Ended(request) => Some(KvEvent::Ended(ended(request))),
        Event::Stored(_) | Event::Removed(_) | Event::Cleared(_) => None,
    }
}

fn routed(prompt: v1::Routed) -> RoutedPrompt {
    let size = |size: u64| usize::try_from(size).unwrap_or(usize::MAX);
    RoutedPrompt {
        request_id: prompt.request_id.into(),
        router: prompt.router,
        seed_digest: prompt.seed_digest,
        hashes: prompt.hashes.into_iter().map(BlockHash).collect(),
        tools_blocks: prompt.tools_blocks as usize,
        tools_bytes: size(prompt.tools_bytes),
        system_blocks: prompt.system_blocks as usize,
        system_bytes: size(prompt.system_bytes),
        prompt_bytes: size(prompt.prompt_bytes),
        prompt_tokens: size(prompt.prompt_tokens),
    }
}

fn ended(request: v1::Ended) -> EndedRequest {
    let size = |size: u64| usize::try_from(size).unwrap_or(usize::MAX);
    EndedRequest {
        request_id: request.request_id.into(),
        router: request.router,
        prompt_tokens: size(request.prompt_tokens),
        cached_tokens: request.cached_tokens.map(size),
    }
}

fn read(event: Event, sequence: u64) -> Result<KvEvent, KvEventError> {
    let hashes = |hashes: Vec<u64>| hashes.into_iter().map(BlockHash).collect();
    match event {
        Event::Routed(prompt) => Ok(KvEvent::Routed(routed(prompt))),
        Event::Ended(request) => Ok(KvEvent::Ended(ended(request))),
        Event::Stored(stored) => {
            let (blocks, tokens) = (stored.hashes.len(), stored.tokens.len());
            let wanted = blocks as u64 * u64::from(stored.block_tokens);
            if wanted == 0 || tokens as u64 != wanted {
                let block_tokens = stored.block_tokens;
                return Err(KvEventError::Lengths { sequence, blocks, block_tokens, tokens });
            }
            Ok(KvEvent::Stored(StoredBlocks {
                hashes: hashes(stored.hashes),
                parent: stored.parent.map(BlockHash),
                tokens: stored.tokens,
                block_tokens: stored.block_tokens as usize,
                request_id: (!stored.request_id.is_empty()).then(|| Arc::from(stored.request_id)),
                first_position: usize::try_from(stored.first_position).unwrap_or(usize::MAX),
            }))
        }
        Event::Removed(removed) => Ok(KvEvent::Removed { hashes: hashes(removed.hashes) }),
        Event::Cleared(_) => Ok(KvEvent::Cleared),
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    fn stored() -> StoredBlocks {
        StoredBlocks {
            hashes: vec![BlockHash(1), BlockHash(u64::MAX)],
            parent: Some(BlockHash(9)),
            tokens: vec![1, 2, 3, 4],
            block_tokens: 2,
            request_id: Some("r".into()),
            first_position: 2,
        }
    }

    #[test]
    fn batches_come_back_as_they_were() {
        let root = StoredBlocks { parent: None, request_id: None, ..stored() };
        let removed = KvEvent::Removed { hashes: vec![BlockHash(2), BlockHash(1)] };
        let routed = RoutedPrompt {
            request_id: "r".into(),
            router: 7,
            seed_digest: u64::MAX,
            hashes: vec![BlockHash(3)],
            tools_blocks: 1,
            tools_bytes: 70,
            system_blocks: 2,
            system_bytes: 150,
            prompt_bytes: 400,
            prompt_tokens: 80,
        };
        let ended =
            EndedRequest { request_id: "r".into(), router: 7, prompt_tokens: 81, cached_tokens: Some(0) };
        let told = [KvEvent::Routed(routed), KvEvent::Ended(ended)];
        for event in &told {
            assert_eq!(told_event(v1::KvEvent::from(event)).as_ref(), Some(event));
        }
        assert_eq!(told_event(v1::KvEvent::from(&KvEvent::Cleared)), None, "the cache's own to say");
        let mut events = vec![KvEvent::Stored(stored()), KvEvent::Stored(root), removed, KvEvent::Cleared];
        events.extend(told);
        let batch = KvEventBatch { sequence: 5, timestamp: 1.5, events };
        assert_eq!(KvEventBatch::try_from(v1::KvEventBatch::from(&batch)).unwrap(), batch);
    }

    #[test]
    fn blocks_without_their_tokens_are_refused() {
        let whole = v1::KvEvent::from(&KvEvent::Stored(stored()));
        let Some(Event::Stored(whole)) = whole.event else { panic!("{whole:?}") };
        let batch = |stored| v1::KvEventBatch {
            sequence: 7,
            events: vec![v1::KvEvent { event: Some(Event::Stored(stored)) }],
            ..Default::default()
        };
        for wrong in [
            v1::Stored { tokens: vec![1; 3], ..whole.clone() },
            v1::Stored { block_tokens: 0, tokens: vec![], ..whole.clone() },
            v1::Stored { hashes: vec![], tokens: vec![], ..whole.clone() },
            v1::Stored { block_tokens: u32::MAX, ..whole },
        ] {
            let error = KvEventBatch::try_from(batch(wrong)).unwrap_err();
            assert!(matches!(error, KvEventError::Lengths { sequence: 7, .. }), "{error}");
        }
    }

    #[test]
    fn events_of_unknown_kinds_are_left_out_and_their_batch_counts() {
        /// What a newer worker may send: a field that `KvEvent` does not have, with an empty message.
        const NEWER: [u8; 2] = [15 << 3 | 2, 0];
        let unknown = v1::KvEvent::decode(&NEWER[..]).unwrap();
        let known = v1::KvEvent::from(&KvEvent::Cleared);
        let read = |events| {
            let batch = v1::KvEventBatch { sequence: 7, events, ..Default::default() };
            KvEventBatch::try_from(batch).unwrap()
        };
        let batch = |events| KvEventBatch { sequence: 7, timestamp: 0.0, events };
        assert_eq!(read(vec![unknown.clone(), known, unknown.clone()]), batch(vec![KvEvent::Cleared]));
        assert_eq!(read(vec![unknown]), batch(vec![]));
    }
}
