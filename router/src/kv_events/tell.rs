//! What this router sends a worker, told to the others that follow it, by way of the worker.
//!
//! A worker's events name requests, and only the router that sent one knows the bytes it is of. So each router says what it sends, where
//! others listen; whoever shares its seed follows these requests like its own
//! ([`CacheFeed`](router_core::prefix::feed::CacheFeed)). Late or lost, an event costs a prediction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use roundhouse_types::{EndedRequest, KvEvent, RoutedPrompt};
use roundhouse_wire::{TELL_PATH, v1};
use router_core::Worker;
use router_core::prefix::Cut;
use router_core::prefix::blocks::Opening;
use router_core::prefix::feed::{FollowedPath, Listener};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::{Told, UNOFFERED_PAUSE, back_off, is_not_offered};
use crate::transport::GrpcTransport;

/// Events that wait to be told; beyond, they are not.
const MOST_WAITING: usize = 4_096;
/// Told in one call, at most; the worker takes no more.
const MOST_AT_ONCE: usize = 256;
/// Blocks of a prompt that are told of: some 8 MB of it.
const MOST_HASHES: usize = 4_096;

/// Where what is to be told goes.
pub(super) struct Teller {
    worker: Arc<Worker>,
    listener: Listener,
    sender: Sender<KvEvent>,
    has_warned: AtomicBool,
}

impl Teller {
    /// A teller for `worker`, and what it will tell.
    pub(super) fn new(worker: Arc<Worker>, listener: Listener) -> (Self, Receiver<KvEvent>) {
        let (sender, receiver) = channel(MOST_WAITING);
        (Self { worker, listener, sender, has_warned: AtomicBool::new(false) }, receiver)
    }

    /// Tells others, if there are any.
    pub(super) fn tell(&self, told: &Told) {
        if self.worker.reports.place().count < 2 {
            return;
        }
        let Some(seed_digest) = self.listener.seed_digest else { return self.warn() };
        let router = self.listener.router;
        // A queue that is full means that the worker does not listen.
        let _ = self.sender.try_send(match told {
            Told::Dispatched(id, path) => KvEvent::Routed(routed(Arc::clone(id), path, router, seed_digest)),
            Told::Ended(id, usage) => KvEvent::Ended(EndedRequest {
                request_id: Arc::clone(id),
                router,
                prompt_tokens: usage.map_or(0, |usage| usage.prompt_tokens),
                cached_tokens: usage.and_then(|usage| usage.cached_tokens),
            }),
        });
    }

    fn warn(&self) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                worker = %self.worker.id(),
                "other routers follow this worker too; give all of them the same --prefix-seed-file, so that each sees what the others' prompts have left in its cache"
            );
        }
    }
}

fn routed(request_id: Arc<str>, path: &FollowedPath, router: u64, seed_digest: u64) -> RoutedPrompt {
    let Opening { tools, system } = match path.cut {
        Cut::Bytes(opening) => opening,
        Cut::Tokens(_) => Opening::default(),
    };
    RoutedPrompt {
        request_id,
        router,
        seed_digest,
        hashes: path.hashes.iter().take(MOST_HASHES).copied().collect(),
        tools_blocks: tools.blocks,
        tools_bytes: tools.bytes,
        system_blocks: system.blocks,
        system_bytes: system.bytes,
        prompt_bytes: path.size,
        prompt_tokens: path.tokens,
    }
}

/// Tells for ever: one call at a time, and with the next what has come meanwhile.
pub(super) async fn run(worker: &Worker, grpc: &GrpcTransport, mut events: Receiver<KvEvent>) {
    let mut back_off = back_off();
    let mut batch = Vec::new();
    while events.recv_many(&mut batch, MOST_AT_ONCE).await > 0 {
        let request = v1::TellRequest { events: batch.iter().map(v1::KvEvent::from).collect() };
        batch.clear();
        let answer = async { grpc.call::<v1::TellReply>(TELL_PATH, &request).await?.next().await };
        let wait = match answer.await {
            Ok(_) => {
                back_off.begin_anew();
                continue;
            }
            Err(error) if is_not_offered(&error) => UNOFFERED_PAUSE,
            Err(error) => {
                tracing::debug!(worker = %worker.id(), %error, "others were not told of requests");
                back_off.pause()
            }
        };
        tokio::time::sleep(wait).await;
        // What waited is of the past.
        while events.try_recv().is_ok() {}
    }
}
