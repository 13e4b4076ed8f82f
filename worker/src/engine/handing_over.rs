//! KV into the pool that has come from other workers, and out of it for those that go on from a prompt: between the scheduler's step and the backend's,
//! and after it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use worker_core::scheduler::Arrival;
use worker_core::step::{BackendError, Batch, SequenceId};

use super::run::Run;
use super::{Client, Event, FetchedKv, HandOver};

impl Client {
    /// Whether another worker is to go on from its prompt, and somebody still wants to know.
    pub(super) fn offers(&self) -> bool {
        matches!(self.hand_over, HandOver::Offer { .. }) && !self.has_left()
    }

    /// It has a token: what has come of its prompt and is still here was of no use.
    pub(super) fn needs_no_kv(&mut self) {
        if matches!(self.hand_over, HandOver::Fetched(_)) {
            self.hand_over = HandOver::None;
        }
    }
}

impl Run {
    /// Writes what has come into the blocks that it has now.
    pub(super) fn receive(&mut self) -> Result<(), BackendError> {
        for Arrival { id, blocks, first } in self.scheduler.arrivals() {
            let hand_over = self.clients.get_mut(id).map(|client| std::mem::take(&mut client.hand_over));
            let Some(HandOver::Fetched(FetchedKv { bytes, from_blocks, block_bytes })) = hand_over else {
                // Its blocks can be found already.
                return Err(BackendError::Device("KV that was to come has not".to_owned()));
            };
            // The cache may hold more of it by now.
            let known_bytes = bytes.len().min((first - from_blocks) * block_bytes);
            let count = bytes.len().checked_div(block_bytes).unwrap_or(0);
            let blocks = &blocks[..from_blocks + count];
            self.backend.write_kv(&blocks[blocks.len().min(*first)..], &bytes[known_bytes..])?;
        }
        Ok(())
    }

    /// Gives a client the KV of its prompt, if there is room for it, and then its last token. Its blocks are given back already, and nobody has written to
    /// them since.
    pub(super) fn hand_over(&mut self, batch: &Batch, id: SequenceId, last: Event) {
        let Some(client) = self.clients.remove(&id) else { return };
        let step = batch.sequences.iter().find(|step| step.id == id);
        if let (HandOver::Offer { blocks, block_bytes, room }, Some(step)) = (&client.hand_over, step)
            && let Some(place) = room.take(blocks * block_bytes)
        {
            match guarded(|| self.backend.read_kv(&step.block_table[..*blocks])) {
                // Whoever has left does not need it.
                Ok(bytes) => drop(client.events.send(Event::Kv(place.hold(bytes)))),
                Err(error) => tracing::error!(%error, "a prompt's KV cannot be handed over"),
            }
        }
        let _ = client.events.send(last);
    }
}

/// What a backend does, with its panics as failures of the device.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T, BackendError>) -> Result<T, BackendError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(BackendError::Device(format!("the backend panicked: {said}")))
    })
}
