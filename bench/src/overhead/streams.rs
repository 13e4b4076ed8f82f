//! CPU for each chunk of a stream: paced, as engines send tokens, and flooding, as fast as the sockets take them.
//!
//! The cost of a paced chunk has a read and a write in it, and its share of a wake-up; of a flood a router may read many
//! chunks at once. Both contain the share of what the router does besides, such as asking for health, and a flood also its 1-KB
//! requests. Next on the path: [`super::connection`].

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::Xoshiro256PlusPlus;
use serde::Serialize;

use super::connection::{Connection, ExchangeError};
use super::load::{LAST_ANSWER, Lane, Load};
use super::mocks::{Pace, Plan};
use super::rig::{Rig, Usage};
use super::tally::Tally;
use super::workload::Delivery;

/// What chunks cost.
#[derive(Debug, Clone, Serialize)]
pub struct Streams {
    /// Streams open together.
    pub streams: usize,
    /// Chunks of each.
    pub chunks_per_stream: u32,
    /// Chunks that arrived in a second.
    pub chunks_per_s: f64,
    /// Router CPU for each, in microseconds.
    pub cpu_us_per_chunk: Option<f64>,
    /// Counts of the window.
    #[serde(flatten)]
    pub usage: Usage,
}

/// Measures one long stream on each of `pace.streams` connections.
///
/// # Errors
/// The router is gone.
pub async fn paced(rig: &Rig, pace: Pace) -> anyhow::Result<Streams> {
    let timing = rig.timing;
    // Half a second more than is watched, so that no stream ends within the window.
    let time = timing.warmup + timing.duration + Duration::from_millis(500);
    let chunks = (time.as_secs_f64() / pace.interval.as_secs_f64()).ceil() as u32;
    measure(rig, pace.streams as usize, Plan::Paced { chunks, pace }, chunks, 1).await
}

/// Measures streams of `chunks` chunks, one after the other on each connection of the closed loop.
///
/// # Errors
/// The router is gone.
pub async fn flood(rig: &Rig, chunks: u32) -> anyhow::Result<Streams> {
    measure(rig, rig.connections, Plan::Flood { chunks }, chunks, u64::MAX).await
}

async fn measure(
    rig: &Rig,
    streams: usize,
    plan: Plan,
    chunks: u32,
    streams_each: u64,
) -> anyhow::Result<Streams> {
    let tally = Arc::<Tally>::default();
    let workload = Arc::new(rig.workload(1, Delivery::Stream { chunks })?);
    rig.mocks.answer_with(plan);
    let mut load = Load::new(&tally);
    load.spawn(streams, &rig.addresses, &workload, |lane, rng| lane.read_streams(streams_each, chunks, rng));
    let usage = rig.watch(&tally, |usage| usage.chunks).await?;
    match streams_each {
        1 => load.finish(LAST_ANSWER).await,
        _ => load.stop().await,
    }
    rig.mocks.answer_with(Plan::Whole);
    let usage = Usage { errors: tally.errors(), ..usage };
    Ok(Streams {
        streams,
        chunks_per_stream: chunks,
        chunks_per_s: usage.chunks as f64 / usage.seconds,
        cpu_us_per_chunk: usage.cpu_us_each(usage.chunks),
        usage,
    })
}

impl Lane {
    /// Reads one stream after the other; each must have as many chunks as the mock wrote.
    pub async fn read_streams(self, streams: u64, chunks: u32, mut rng: Xoshiro256PlusPlus) {
        let mut kept = None;
        for _ in 0..streams {
            if self.is_stopped() {
                return;
            }
            match self.read_stream(&mut kept, chunks, &mut rng).await {
                Ok(()) => {
                    self.tally.add_request();
                }
                Err(error) => self.fail(&error).await,
            }
        }
    }

    async fn read_stream(
        &self,
        kept: &mut Option<Connection>,
        chunks: u32,
        rng: &mut Xoshiro256PlusPlus,
    ) -> Result<(), ExchangeError> {
        let draft = self.workload.draft(rng);
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => Connection::open(self.address).await?,
        };
        let mut seen = 0;
        let on_chunk = || {
            seen += 1;
            self.tally.add_chunk();
        };
        connection.stream(self.workload.pieces(&draft), on_chunk).await?;
        *kept = (!connection.closes()).then_some(connection);
        let written = chunks.into();
        if seen == written { Ok(()) } else { Err(ExchangeError::Chunks { seen, written }) }
    }
}
