//! Cache events of our own workers, over gRPC: a snapshot, and what happens after it; a gap is asked for by number.

use std::sync::Arc;

use roundhouse_types::KvEventBatch;
use roundhouse_wire::{INFO_PATH, KV_EVENTS_PATH, v1};
use router_core::Worker;
use router_core::prefix::feed::{FeedBatch, SnapshotPart};

use super::events::{EventStream, Said, StreamEnd};
use crate::transport::{Answers, GrpcTransport};

/// The stream of one worker.
pub(super) struct GrpcEvents {
    worker: Arc<Worker>,
    grpc: Arc<GrpcTransport>,
    batches: Option<Answers<v1::KvEventBatch>>,
}

impl GrpcEvents {
    pub(super) fn new(worker: Arc<Worker>, grpc: Arc<GrpcTransport>) -> Self {
        Self { worker, grpc, batches: None }
    }
}

impl EventStream for GrpcEvents {
    async fn open(&mut self, resume: Option<(u64, u64)>) -> Result<(), StreamEnd> {
        let info = self.grpc.call::<v1::InfoReply>(INFO_PATH, &v1::InfoRequest {}).await?.next().await?;
        let info = info.ok_or(StreamEnd::Over)?;
        let capacity = info.kv_blocks.saturating_mul(info.block_tokens.into());
        let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
        self.worker.reports.set_kv_capacity(Some(capacity).filter(|tokens| *tokens > 0));
        let (from_sequence, instance) = resume.unzip();
        let request = v1::KvEventsRequest { from_sequence, instance };
        self.batches = Some(self.grpc.call::<v1::KvEventBatch>(KV_EVENTS_PATH, &request).await?);
        Ok(())
    }

    async fn next(&mut self) -> Result<Said, StreamEnd> {
        let batches = self.batches.as_mut().ok_or(StreamEnd::Over)?;
        let batch = batches.next().await?.ok_or(StreamEnd::Over)?;
        let part = |snapshot: v1::Snapshot| SnapshotPart { first: snapshot.first, last: snapshot.last };
        let (snapshot, instance) = (batch.snapshot.map(part), batch.instance);
        Ok(Said::Batch(FeedBatch { batch: KvEventBatch::try_from(batch)?, snapshot, instance }))
    }
}
