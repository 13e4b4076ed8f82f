//! The timing backend: plays a recorded engine. Steps take as long as the timing model says, and compute nothing.
//!
//! Everything around it is real: HTTP, tokenizer, scheduler, block pool and prefix cache. Steps end at absolute
//! deadlines: a step begins when the one before it was due, not when somebody got round to it, so that what the worker
//! itself spends between steps and the system's late wake-ups do not add up. How late each step really was is counted
//! ([`Lateness`]). Tokens are drawn from a list of plain words, the same ones for the same request. Knows no requests,
//! channels or text.

mod clock;
mod lateness;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use worker_core::step::{
    Backend, BackendError, Batch, BlockId, KvCapacity, KvFormat, NextToken, SequenceStep,
};
use worker_core::timing::EngineTiming;

pub use self::clock::{Clock, SystemClock};
pub use self::lateness::{Lateness, LatenessSummary};

/// A machine that is behind by more has stood still; the steps it missed are not made up for.
const MAX_LAG: Duration = Duration::from_secs(1);

/// What is played, and how fast.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The engine's times.
    pub timing: EngineTiming,
    /// Each step takes so many times as long: 0.1 is an engine ten times as fast.
    pub time_scale: f64,
}

impl Pace {
    fn step(&self, batch: &Batch) -> Duration {
        self.timing.step(batch).mul_f64(self.time_scale)
    }

    /// Whether a step is slept through but for a twentieth at most, so that its thread may have precedence over others.
    #[must_use]
    pub fn is_slept_through(&self) -> bool {
        let shortest_s = self.timing.decode_s.min(self.timing.prefill_s) * self.time_scale;
        shortest_s >= 20.0 * clock::LEAST_SPIN.as_secs_f64()
    }

    /// What a request waits outside of steps.
    #[must_use]
    pub fn request(&self) -> Duration {
        self.timing.request().mul_f64(self.time_scale)
    }
}

/// Plays an engine.
pub struct TimingBackend<C> {
    pace: Pace,
    capacity: KvCapacity,
    /// What is drawn from; not empty.
    words: Arc<[u32]>,
    lateness: Arc<Lateness>,
    clock: C,
    /// When the step before this one was due, unless the engine had nothing to do since.
    due: Option<Duration>,
}

impl<C: Clock> TimingBackend<C> {
    /// An engine of that pace and capacity, which draws from `words` and counts in `lateness`.
    ///
    /// # Panics
    /// When there are no words.
    pub fn new(
        pace: Pace,
        capacity: KvCapacity,
        words: Arc<[u32]>,
        lateness: Arc<Lateness>,
        clock: C,
    ) -> Self {
        assert!(!words.is_empty(), "something can be drawn");
        Self { pace, capacity, words, lateness, clock, due: None }
    }

    /// When the step that begins now is due.
    fn deadline(&self, step: Duration) -> Duration {
        let now = self.clock.now();
        let begins = self.due.filter(|due| now.saturating_sub(*due) <= MAX_LAG).unwrap_or(now);
        begins + step
    }

    /// A word for the sequence: a function of its last token, of its position and, unless it is greedy, of its seed.
    fn draw(&self, step: &SequenceStep) -> Option<NextToken> {
        let sample = step.sample.as_ref()?;
        let seed = if sample.params.temperature == 0.0 { 0 } else { sample.params.seed };
        let position = (step.context_tokens + step.tokens.len()) as u64;
        let last = u64::from(step.tokens.last().copied().unwrap_or_default());
        let number = mixed(mixed(seed ^ last) ^ position);
        let params = &sample.params;
        let withheld: &[u32] =
            if sample.generated_tokens < params.min_tokens { &params.withheld_tokens } else { &[] };
        let first = (number % self.words.len() as u64) as usize;
        // The next one that may be drawn. A request that withholds every word gets one all the same: there is nothing else.
        let (before, after) = self.words.split_at(first);
        let token =
            *after.iter().chain(before).find(|word| !withheld.contains(word)).unwrap_or(&self.words[first]);
        Some(NextToken { id: step.id, token, logprobs: None })
    }
}

/// The finalizer of SplitMix64: every bit of the result depends on every bit of `number`.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

impl<C: Clock> Backend for TimingBackend<C> {
    fn kv_capacity(&self) -> KvCapacity {
        self.capacity
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        let step = self.pace.step(batch);
        let deadline = self.deadline(step);
        self.due = Some(deadline);
        // Drawn before the wait: it belongs to the step.
        let drawn = batch.sequences.iter().filter_map(|step| self.draw(step)).collect();
        self.clock.wait_until(deadline);
        self.lateness.note(self.clock.now().saturating_sub(deadline), step);
        Ok(drawn)
    }

    /// There is no KV; what fetching it would take, whoever fetches waits.
    fn kv_format(&self) -> Option<KvFormat> {
        Some(KvFormat { name: "simulated".to_owned(), block_bytes: 0 })
    }

    fn read_kv(&mut self, _blocks: &[BlockId]) -> Result<Vec<u8>, BackendError> {
        Ok(Vec::new())
    }

    fn write_kv(&mut self, _blocks: &[BlockId], _bytes: &[u8]) -> Result<(), BackendError> {
        Ok(())
    }

    fn idle(&mut self) {
        self.due = None;
    }
}
