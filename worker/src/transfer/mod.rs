//! KV from one worker to another: the prompt is computed here and gone on from there, or the other way round.
//!
//! Who computes the prompt copies its KV into this host's memory when the prompt is done and offers it under a ticket, which goes with the
//! reply to whoever generates: that worker fetches what its own cache does not hold, over HTTP from the port where the first one serves, and
//! computes the last token itself. Whatever fails on the way, it computes the prompt instead. Knows no scheduling. Next: [`fetch`] for the way,
//! [`offers`] for the tickets, [`room`] for memory; the words are [`openai::kv_transfer`](crate::openai::kv_transfer)'s.

pub(crate) mod fetch;
mod offers;
pub(crate) mod room;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use roundhouse_types::{ChainHasher, TokenId};
use serde_json::Value;
use worker_core::step::KvFormat;

use self::offers::{Offers, Outgoing};
use self::room::Room;
use crate::engine::{Engine, FetchedKv, HandOver};
use crate::metrics::Metrics;
use crate::openai::kv_transfer::Remote;

/// Where this worker is reached, if that is not where the request came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reach {
    /// Its host, by name or address.
    pub host: String,
    /// Its port; `None` is that of the request.
    pub port: Option<u16>,
}

/// What a worker needs to hand KV over.
pub struct Transfer {
    /// The backend's, and of which model.
    format: KvFormat,
    block_tokens: usize,
    /// Tells this process from others.
    engine_id: String,
    reach: Option<Reach>,
    room: Arc<Room>,
    offers: Arc<Offers>,
    metrics: Arc<Metrics>,
    /// What fetching a token's KV takes where that is simulated.
    simulated_token: Duration,
}

/// What one is made from.
pub struct TransferParts {
    /// The backend's KV.
    pub format: KvFormat,
    /// Tells models apart.
    pub model_digest: u64,
    /// Positions of a block.
    pub block_tokens: usize,
    /// This process's number.
    pub instance: u64,
    /// Where it is reached.
    pub reach: Option<Reach>,
    /// Bytes that KV may take on its way.
    pub room_bytes: usize,
    /// Where it is counted.
    pub metrics: Arc<Metrics>,
    /// What fetching a token's KV takes, where it is simulated; zero elsewhere.
    pub simulated_token: Duration,
}

impl Transfer {
    /// With nothing on its way.
    #[must_use]
    pub fn new(parts: TransferParts) -> Self {
        let TransferParts {
            format,
            model_digest,
            block_tokens,
            instance,
            reach,
            room_bytes,
            metrics,
            simulated_token,
        } = parts;
        Self {
            format: KvFormat { name: format!("{}/{model_digest:016x}", format.name), ..format },
            block_tokens,
            engine_id: format!("roundhouse-{instance:016x}"),
            reach,
            room: Room::new(room_bytes),
            offers: Arc::default(),
            metrics,
            simulated_token,
        }
    }

    /// Bytes of KV on their way.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.room.used_bytes()
    }

    /// What the engine is told of a prompt that another worker goes on from, of a request that has called `came_to`.
    pub(crate) fn hand_over(&self, prompt_tokens: usize, came_to: Option<SocketAddr>) -> HandOver {
        if self.blocks(prompt_tokens) == 0 || self.reached_at(came_to).is_none() {
            return HandOver::None;
        }
        HandOver::Offer {
            blocks: self.blocks(prompt_tokens),
            block_bytes: self.format.block_bytes,
            room: Arc::clone(&self.room),
        }
    }

    /// The format, for people and for comparing workers.
    #[must_use]
    pub fn format(&self) -> &str {
        &self.format.name
    }

    /// Blocks that hold the KV of a prompt that is handed over: all tokens but the last, which whoever goes on computes.
    fn blocks(&self, prompt_tokens: usize) -> usize {
        prompt_tokens.saturating_sub(1).div_ceil(self.block_tokens)
    }

    /// Host and port by which other workers reach this one, of which a request has called `came_to`; `None` if it came through no network and nobody has
    /// said.
    fn reached_at(&self, came_to: Option<SocketAddr>) -> Option<(String, u16)> {
        let host = self.reach.as_ref().map(|reach| reach.host.clone());
        let port = self.reach.as_ref().and_then(|reach| reach.port);
        // Of a listener on all addresses, one of version 4 looks like one of version 6.
        let called = came_to.map(|to| to.ip().to_canonical().to_string());
        Some((host.or(called)?, port.or(came_to.map(|to| to.port()))?))
    }

    /// Offers a prompt's KV, of a request that has called `came_to`. Returns what the reply says of it.
    pub(crate) fn offer(&self, prompt: &[TokenId], kv: Bytes, came_to: Option<SocketAddr>) -> Option<Value> {
        let (host, port) = self.reached_at(came_to)?;
        let count = |outcome| self.metrics.kv_transfers.with_label_values(&[outcome]);
        count("offered").inc();
        let lapsed = count("lapsed");
        let remote = Remote {
            host,
            port,
            ticket: self.offers.offer(kv, move || lapsed.inc()),
            tokens: prompt.len() - 1,
            format: self.format.name.clone(),
            prompt: digest(prompt),
        };
        Some(remote.params(&self.engine_id))
    }

    /// What is offered under a ticket, from a block on; it is offered no more.
    pub(crate) fn take(&self, ticket: &str, from_block: usize) -> Option<Outgoing> {
        let kv = self.offers.take(ticket)?;
        let kv = kv.slice(kv.len().min(from_block.saturating_mul(self.format.block_bytes))..);
        self.metrics.kv_transfers.with_label_values(&["sent"]).inc();
        self.metrics.kv_transfer_bytes.with_label_values(&["sent"]).inc_by(kv.len() as u64);
        Some(Outgoing::new(kv))
    }

    /// A prompt that was to be handed over is not: there is no room, or it could not be read.
    pub(crate) fn keeps(&self) {
        self.metrics.kv_transfers.with_label_values(&["not_offered"]).inc();
        tracing::warn!(
            held_bytes = self.held_bytes(),
            "a prompt's KV is not offered; see --kv-transfer-memory"
        );
    }

    /// Fetches what `engine` does not hold of a prompt; `None`, and a line in the log, when it cannot be had.
    pub(crate) async fn fetch(
        &self,
        remote: Option<&Remote>,
        (prompt, salt): (&[TokenId], Option<&Arc<str>>),
        engine: &Engine,
    ) -> Option<FetchedKv> {
        let begun = Instant::now();
        let outcome = self.fetched(remote, (prompt, salt), engine).await;
        let outcome = match outcome {
            Ok(kv) => {
                self.metrics.kv_fetch_seconds.observe(begun.elapsed().as_secs_f64());
                self.metrics.kv_transfer_bytes.with_label_values(&["fetched"]).inc_by(kv.bytes.len() as u64);
                self.metrics.kv_transfers.with_label_values(&["fetched"]).inc();
                return Some(kv);
            }
            Err(reason) => reason,
        };
        self.metrics.kv_transfers.with_label_values(&["failed"]).inc();
        let from = remote.map(|remote| format!("{}:{}", remote.host, remote.port));
        tracing::warn!(reason = outcome, from, "no KV from the other worker; the prompt is computed here");
        None
    }

    async fn fetched(
        &self,
        remote: Option<&Remote>,
        (prompt, salt): (&[TokenId], Option<&Arc<str>>),
        engine: &Engine,
    ) -> Result<FetchedKv, String> {
        let remote = remote.ok_or("kv_transfer_params are not of a worker like this one")?;
        if !offers::is_ticket(&remote.ticket) {
            return Err("its ticket is none".to_owned());
        }
        if remote.format != self.format.name {
            return Err(format!("its KV is {}, not {}", remote.format, self.format.name));
        }
        if remote.tokens != prompt.len() - 1 || remote.prompt != digest(prompt) {
            return Err("it has computed another prompt".to_owned());
        }
        let from_blocks = engine.cached_prefix_blocks(prompt, salt).await.ok_or("the engine has stopped")?;
        let blocks = self.blocks(prompt.len()).saturating_sub(from_blocks);
        let expected = blocks * self.format.block_bytes;
        if blocks == 0 {
            return Ok(FetchedKv { bytes: Bytes::new(), from_blocks, block_bytes: self.format.block_bytes });
        }
        let place = self.room.take(expected).ok_or("no room for it; see --kv-transfer-memory")?;
        let fetching = fetch::fetch(remote, from_blocks, (expected, place));
        let bytes = fetching.await.map_err(|error| error.to_string())?;
        let new_tokens = prompt.len() - 1 - (from_blocks * self.block_tokens).min(prompt.len() - 1);
        let simulated = self.simulated_token.mul_f64(new_tokens as f64);
        if !simulated.is_zero() {
            tokio::time::sleep(simulated).await;
        }
        Ok(FetchedKv { bytes, from_blocks, block_bytes: self.format.block_bytes })
    }
}

/// Tells prompts apart.
fn digest(prompt: &[TokenId]) -> String {
    format!("{:016x}", ChainHasher::new(0).push_tokens(prompt).0)
}
