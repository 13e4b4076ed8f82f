//! What a pick reads of every worker, side by side: a row of two cache lines each, so that a pick among thousands walks through memory once, in
//! order.
//!
//! Each part of a row is written by whoever it belongs to: leases, health, reports, the worker's state. Picks read them without a lock; each
//! number is exact, the set of them may straddle a change. Knows nothing of what the numbers mean. Next: [`decide`](crate::decide) makes
//! candidates of rows.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex as StdMutex, PoisonError, atomic};

use crate::models::PoolNumber;
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Rows that are made together; few for loom, which keeps the history of each number.
const CHUNK_ROWS: u32 = if cfg!(loom) { 2 } else { 64 };
const CHUNK: usize = CHUNK_ROWS as usize;

type Chunk = [Row; CHUNK];

/// One worker's row. Times are counted from the start of the clock of picks.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Row {
    /// [`worker`](crate::worker)'s bits.
    pub(crate) state: atomic::AtomicU8,
    /// 0 or 1: whether it reports its load.
    pub(crate) tells_load: atomic::AtomicU8,
    /// 0 or 1: whether a late first token says that something holds the worker up.
    pub(crate) tells_delay: AtomicU8,
    /// 0 or 1: whether another request would be computed in one step with some that wait.
    pub(crate) joins_step: AtomicU8,
    /// Which pool it belongs to, by [`ModelNames`](crate::models::ModelNames)' numbers.
    pub(crate) pool: atomic::AtomicU8,
    /// Models it may serve, by [`ModelNames`](crate::models::ModelNames)' bits.
    pub(crate) models: atomic::AtomicU32,
    /// From when on there is nothing special about its health, in ms.
    pub(crate) ordinary_from_ms: atomic::AtomicU64,
    /// Requests in flight.
    pub(crate) requests: AtomicU32,
    /// Those of them without a first token.
    pub(crate) prefilling: AtomicU32,
    /// Uncached prompt tokens of those.
    pub(crate) prefill_tokens: AtomicU32,
    /// Prompt tokens of all requests in flight.
    pub(crate) context_tokens: AtomicU32,
    /// The same, where what several of them share counts once.
    pub(crate) held_tokens: AtomicU32,
    /// Requests in flight on average, when the last one was sent there, as an `f32`.
    pub(crate) usual_bits: AtomicU32,
    /// When that was: seconds, as an `f64`.
    pub(crate) usual_at_bits: AtomicU64,
    /// Number of the last pick that chose it.
    pub(crate) last_pick: AtomicU64,
    /// When the first of those without a first token began to be computed: seconds, as an `f64`.
    pub(crate) since_bits: AtomicU64,
    /// Seconds that all of those take, as an `f32`.
    pub(crate) owed_bits: AtomicU32,
    /// Of these, seconds of those that wait in line to be sent, as an `f32`.
    pub(crate) line_bits: AtomicU32,
    /// Seconds that the first of them takes, as an `f32`.
    pub(crate) head_bits: AtomicU32,
    /// From when on the first of them counts as computed, if nobody will see it: seconds, as an `f64`; 0 for never.
    pub(crate) lapses_bits: AtomicU64,
    /// Times the fleet's, as an `f32`, less one: an empty row is that of a worker as fast as the fleet.
    pub(crate) ratio_less_one_bits: AtomicU32,
    /// What its KV cache has room for; 0 while it has not said.
    pub(crate) kv_capacity_tokens: atomic::AtomicU32,
    /// Adapters that it computes side by side; 0 while it has not said.
    pub(crate) adapter_places: AtomicU32,
}

impl Row {
    /// Which pool it belongs to.
    #[inline]
    pub(crate) fn pool(&self) -> PoolNumber {
        PoolNumber(self.pool.load(Ordering::Relaxed))
    }

    fn clear(&self) {
        self.state.store(0, Ordering::Relaxed);
        self.tells_load.store(0, Ordering::Relaxed);
        self.tells_delay.store(0, Ordering::Relaxed);
        self.joins_step.store(0, Ordering::Relaxed);
        self.models.store(0, Ordering::Relaxed);
        self.pool.store(0, Ordering::Relaxed);
        self.ordinary_from_ms.store(0, Ordering::Relaxed);
        self.kv_capacity_tokens.store(0, Ordering::Relaxed);
        for number in [&self.requests, &self.prefilling, &self.prefill_tokens] {
            number.store(0, Ordering::Relaxed);
        }
        for number in [&self.context_tokens, &self.held_tokens, &self.usual_bits] {
            number.store(0, Ordering::Relaxed);
        }
        self.usual_at_bits.store(0, Ordering::Relaxed);
        for seconds in [&self.owed_bits, &self.line_bits, &self.head_bits, &self.ratio_less_one_bits] {
            seconds.store(0, Ordering::Relaxed);
        }
        self.adapter_places.store(0, Ordering::Relaxed);
        self.last_pick.store(0, Ordering::Relaxed);
        self.since_bits.store(0, Ordering::Relaxed);
        self.lapses_bits.store(0, Ordering::Relaxed);
    }
}

/// A worker's row, for those who write it: the worker and what is in flight there. Free again once all of them are gone, so that what a
/// worker that has left still streams is not booked to another.
#[derive(Clone)]
pub(crate) struct RowHandle(Arc<Seat>);

struct Seat {
    chunk: Arc<Chunk>,
    number: u32,
    free: Arc<StdMutex<Vec<u32>>>,
}

impl RowHandle {
    /// Where in the table it is.
    pub(crate) fn number(&self) -> u32 {
        self.0.number
    }
}

impl Default for RowHandle {
    /// The only row of a table of its own.
    fn default() -> Self {
        LoadTable::default().take()
    }
}

impl fmt::Debug for RowHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RowHandle").field(&self.0.number).finish()
    }
}

impl Deref for RowHandle {
    type Target = Row;

    fn deref(&self) -> &Row {
        &self.0.chunk[self.0.number as usize % CHUNK]
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.chunk[self.number as usize % CHUNK].clear();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // The lowest number is taken first: from the end.
        let at = free.partition_point(|other| *other > self.number);
        free.insert(at, self.number);
    }
}

/// All rows; hands them out. A clone reads the rows that there were when it was made.
#[derive(Clone, Default)]
pub(crate) struct LoadTable {
    chunks: Vec<Arc<Chunk>>,
    /// Numbers, the lowest last.
    free: Arc<StdMutex<Vec<u32>>>,
}

impl LoadTable {
    /// A row that nobody has.
    pub(crate) fn take(&mut self) -> RowHandle {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.is_empty() {
            let first = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX).saturating_mul(CHUNK_ROWS);
            self.chunks.push(Arc::new(std::array::from_fn(|_| Row::default())));
            free.extend((first..first.saturating_add(CHUNK_ROWS)).rev());
        }
        let number = free.pop().unwrap_or_default();
        drop(free);
        let chunk = Arc::clone(&self.chunks[number as usize / CHUNK]);
        RowHandle(Arc::new(Seat { chunk, number, free: Arc::clone(&self.free) }))
    }

    /// The row of that number.
    pub(crate) fn row(&self, number: u32) -> &Row {
        &self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_two_cache_lines() {
        assert_eq!((size_of::<Row>(), align_of::<Row>()), (128, 128));
    }

    #[test]
    fn a_row_is_free_once_nobody_writes_it_and_empty_then() {
        let mut table = LoadTable::default();
        let rows: Vec<_> = (0..CHUNK + 3).map(|_| table.take()).collect();
        assert!(rows.iter().enumerate().all(|(at, row)| row.number() as usize == at));
        let still_streams = rows[5].clone();
        still_streams.requests.store(7, Ordering::Relaxed);
        rows[9].models.store(7, atomic::Ordering::Relaxed);
        let numbers: Vec<_> = rows.into_iter().skip(5).map(|row| row.number()).collect();
        assert_eq!(numbers[0], 5);
        let next: Vec<_> = (0..3).map(|_| table.take()).collect();
        assert_eq!(next.iter().map(RowHandle::number).collect::<Vec<_>>(), [0, 1, 2]);
        let (six, nine) = (table.take(), table.row(9).models.load(atomic::Ordering::Relaxed));
        assert_eq!((six.number(), nine), (3, 0));
        assert_eq!(table.row(5).requests.load(Ordering::Relaxed), 7, "it streams on");
    }
}
