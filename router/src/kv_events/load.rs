//! One worker's load, as it streams it, for the next picks.

use std::time::Instant;

use roundhouse_types::WorkerLoad;
use roundhouse_wire::{LOAD_PATH, v1};
use router_core::Worker;

use super::{BackOff, UNOFFERED_PAUSE, is_not_offered};
use crate::transport::{GrpcTransport, TransportError};

/// Follows the load for ever.
pub(super) async fn run(worker: &Worker, grpc: &GrpcTransport, started: Instant) {
    let mut back_off = BackOff::new();
    loop {
        let ended = follow(worker, grpc, started, &mut back_off).await;
        // What it said is no longer what it would say.
        worker.reports.forget_load();
        let wait = match &ended {
            Err(error) if is_not_offered(error) => UNOFFERED_PAUSE,
            _ => back_off.next(),
        };
        tokio::time::sleep(wait).await;
    }
}

async fn follow(
    worker: &Worker,
    grpc: &GrpcTransport,
    started: Instant,
    back_off: &mut BackOff,
) -> Result<(), TransportError> {
    let mut reports = grpc.call::<v1::LoadReport>(LOAD_PATH, &v1::LoadRequest { interval_ms: None }).await?;
    while let Some(report) = reports.next().await? {
        *back_off = BackOff::new();
        worker.hear_load(&WorkerLoad::from(report), started.elapsed());
    }
    Ok(())
}
