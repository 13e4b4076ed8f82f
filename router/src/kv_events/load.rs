//! One worker's load, as it streams it, for the next picks.

use std::time::Instant;

use roundhouse_types::{RouterPlace, WorkerLoad};
use roundhouse_wire::{LOAD_PATH, v1};
use router_core::Worker;

use super::{UNOFFERED_PAUSE, back_off, is_not_offered};
use crate::back_off::BackOff;
use crate::transport::{GrpcTransport, TransportError};

/// Follows the load for ever, as the router of that number.
pub(super) async fn run(worker: &Worker, grpc: &GrpcTransport, started: Instant, router: u64) {
    let mut back_off = back_off();
    loop {
        let ended = follow(worker, (grpc, router), started, &mut back_off).await;
        // What it said is no longer what it would say.
        worker.reports.forget_load();
        let wait = match &ended {
            Err(error) if is_not_offered(error) => UNOFFERED_PAUSE,
            _ => back_off.pause(),
        };
        tokio::time::sleep(wait).await;
    }
}

async fn follow(
    worker: &Worker,
    (grpc, router): (&GrpcTransport, u64),
    started: Instant,
    back_off: &mut BackOff,
) -> Result<(), TransportError> {
    let request = v1::LoadRequest { interval_ms: None, router: Some(router) };
    let mut reports = grpc.call::<v1::LoadReport>(LOAD_PATH, &request).await?;
    while let Some(report) = reports.next().await? {
        back_off.begin_anew();
        worker.reports.set_place(report.place.map(RouterPlace::from).unwrap_or_default());
        worker.hear_load(&WorkerLoad::from(report), started.elapsed());
    }
    Ok(())
}
