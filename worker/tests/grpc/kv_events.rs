//! Cache events over gRPC.

use std::collections::BTreeSet;

use roundhouse_types::{BlockHash, KvEvent, KvEventBatch, StoredBlocks};
use roundhouse_wire::v1;
use serde_json::json;
use tonic::{Code, Streaming};
use worker::WorkerConfig;
use worker::model::ModelSource;

use crate::harness::*;

async fn follow(
    client: &mut Client,
    from: Option<u64>,
    instance: Option<u64>,
) -> Streaming<v1::KvEventBatch> {
    let request = v1::KvEventsRequest { from_sequence: from, instance };
    client.kv_events(request).await.unwrap().into_inner()
}

async fn next(stream: &mut Streaming<v1::KvEventBatch>) -> v1::KvEventBatch {
    in_time(stream.message()).await.unwrap().unwrap()
}

/// The blocks of a whole snapshot.
async fn snapshot(stream: &mut Streaming<v1::KvEventBatch>) -> (u64, BTreeSet<BlockHash>) {
    let mut known = BTreeSet::new();
    let mut first = true;
    loop {
        let part = next(stream).await;
        let flags = part.snapshot.expect("it is part of a snapshot");
        assert_eq!(flags.first, first);
        assert!(part.instance.is_some());
        first = false;
        let sequence = part.sequence;
        for event in KvEventBatch::try_from(part).unwrap().events {
            let KvEvent::Stored(blocks) = event else { panic!("{event:?} in a snapshot") };
            assert!(blocks.parent.is_none_or(|parent| known.contains(&parent)), "a child before its parent");
            known.extend(blocks.hashes);
        }
        if flags.last {
            return (sequence, known);
        }
    }
}

/// What is stored from here on, until `blocks` have been.
async fn stored(stream: &mut Streaming<v1::KvEventBatch>, blocks: usize) -> Vec<StoredBlocks> {
    let mut all: Vec<StoredBlocks> = Vec::new();
    while all.iter().map(|stored| stored.hashes.len()).sum::<usize>() < blocks {
        let batch = next(stream).await;
        assert!(batch.snapshot.is_none());
        for event in KvEventBatch::try_from(batch).unwrap().events {
            match event {
                KvEvent::Stored(stored) => all.push(stored),
                other => panic!("{other:?}"),
            }
        }
    }
    all
}

#[tokio::test]
async fn events_tell_what_whose_and_where() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let mut events = follow(&mut client, None, None).await;
    assert_eq!(snapshot(&mut events).await, (0, BTreeSet::new()), "an empty cache is said to be empty");
    // 40 tokens of prompt and 9 drawn, of which the last is never computed: three blocks of 16.
    let prompt: Vec<u32> = (10..50).collect();
    generate(&mut client, tokens("req-1", prompt.clone(), 9)).await;
    let told = stored(&mut events, 3).await;
    assert!(told.iter().all(|stored| stored.request_id.as_deref() == Some("req-1")), "{told:?}");
    assert_eq!((told[0].parent, told[0].first_position, told[0].block_tokens), (None, 0, 16));
    for pair in told.windows(2) {
        assert_eq!(pair[1].parent, pair[0].hashes.last().copied());
        assert_eq!(pair[1].first_position, pair[0].first_position + pair[0].tokens.len());
    }
    let tokens_told: Vec<u32> = told.iter().flat_map(|stored| stored.tokens.clone()).collect();
    assert_eq!(tokens_told[..40], prompt);
    // By HTTP, the id is a header's; what is in the cache already is not told again.
    let body = json!({"prompt": prompt, "max_tokens": 1});
    let (_, answer) = served.http1("POST", "/v1/completions", &body).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 32, "{answer}");
    generate(&mut client, tokens("req-2", (100..116).collect(), 2)).await;
    let other = stored(&mut events, 1).await;
    assert_eq!((other[0].request_id.as_deref(), other[0].parent), (Some("req-2"), None));
    // A new follower learns the same from a snapshot.
    let expected: BTreeSet<_> = told.iter().chain(&other).flat_map(|stored| stored.hashes.clone()).collect();
    let mut late = follow(&mut client, None, None).await;
    let (sequence, known) = snapshot(&mut late).await;
    assert_eq!(known, expected);
    served.http1("POST", "/flush_cache", &json!({})).await;
    for stream in [&mut events, &mut late] {
        let batch = next(stream).await;
        assert_eq!(batch.sequence, sequence);
        assert_eq!(KvEventBatch::try_from(batch).unwrap().events, [KvEvent::Cleared]);
    }
}

#[tokio::test]
async fn who_was_away_goes_on_where_they_were() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let mut events = follow(&mut client, None, None).await;
    snapshot(&mut events).await;
    generate(&mut client, tokens("a", (10..26).collect(), 2)).await;
    let first = next(&mut events).await;
    assert_eq!(first.sequence, 0);
    drop(events);
    generate(&mut client, tokens("b", (30..46).collect(), 2)).await;
    let instance = client.info(v1::InfoRequest {}).await.unwrap().into_inner().instance;
    let mut events = follow(&mut client, Some(1), Some(instance)).await;
    let missed = next(&mut events).await;
    assert_eq!((missed.sequence, missed.instance), (1, Some(instance)));
    // From the beginning again.
    let mut events = follow(&mut client, Some(0), Some(instance)).await;
    assert_eq!(KvEventBatch::try_from(next(&mut events).await), KvEventBatch::try_from(first));
    assert_eq!(next(&mut events).await.sequence, 1);
    // A number that another process gave, or that has not been given: a snapshot.
    for (from, instance) in [(Some(1), Some(!instance)), (Some(1), None), (Some(99), Some(instance))] {
        let mut events = follow(&mut client, from, instance).await;
        let (sequence, known) = snapshot(&mut events).await;
        assert_eq!((sequence, known.len()), (2, 2));
    }
}

#[tokio::test]
async fn a_worker_that_records_none_says_so() {
    let served = serve_with(WorkerConfig::new(ModelSource::Builtin)).await;
    let status = served.client().await.kv_events(v1::KvEventsRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("--kv-events"), "{status}");
}
