//! What one worker owes: requests without a first token, in the order they were sent there.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Observation, Prefill, PrefillSpeed};

/// First tokens that come closer together than this were drawn in one step.
const SAME_STEP: Duration = Duration::from_millis(3);
/// Requests remembered; whoever has more waiting knows what one more means.
const MOST_REQUESTS: usize = 4_096;

/// One request in the queue.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    ticket: u64,
    sent: Duration,
    prefill: Prefill,
    service_s: f64,
}

/// What ended with first tokens of one step.
#[derive(Clone, Copy, Debug)]
struct Step {
    at: Duration,
    seconds: f64,
    new_tokens: f64,
    pairs: f64,
}

/// A worker's queue as the router knows it, and the worker's ratio to the fleet's speed.
#[derive(Debug, Default)]
pub struct PrefillQueue {
    waiting: VecDeque<Waiting>,
    owed_s: f64,
    /// What the step takes that is being computed, whatever is in it.
    fixed_s: f64,
    /// When the head began, as far as can be told.
    since: Duration,
    step: Option<Step>,
    ratio: Ratio,
}

/// What a pick reads of a queue.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct QueueReading {
    /// Service of all that wait, in seconds, and the fixed part of a step.
    pub owed_s: f64,
    /// The same of the first of them.
    pub head_s: f64,
    /// When the first of them began.
    pub since: Duration,
    /// Times the fleet's.
    pub ratio: f64,
}

impl Default for QueueReading {
    fn default() -> Self {
        Self { owed_s: 0.0, head_s: 0.0, since: Duration::ZERO, ratio: 1.0 }
    }
}

impl QueueReading {
    /// Service that is still owed at `now`, in seconds: what the first request has had of its own does not count.
    #[must_use]
    pub fn left_s(&self, now: Duration) -> f64 {
        let progress_s = now.saturating_sub(self.since).as_secs_f64().min(self.head_s);
        (self.owed_s - progress_s).max(0.0)
    }
}

impl PrefillQueue {
    /// As a pick reads it.
    #[must_use]
    pub fn reading(&self) -> QueueReading {
        let ratio = self.ratio.value();
        match self.waiting.front() {
            Some(head) => QueueReading {
                owed_s: self.owed_s + self.fixed_s,
                head_s: head.service_s + self.fixed_s,
                since: self.since,
                ratio,
            },
            None => QueueReading { owed_s: 0.0, head_s: 0.0, since: self.since, ratio },
        }
    }

    /// A request is sent to the worker; `speed` is the fleet's.
    pub fn push(&mut self, ticket: u64, prefill: Prefill, speed: &PrefillSpeed, now: Duration) {
        if self.waiting.is_empty() {
            self.since = now;
        }
        if self.waiting.len() < MOST_REQUESTS {
            let ratio = self.ratio.value();
            let service_s = speed.seconds(prefill) * ratio;
            self.fixed_s = speed.fixed_s * ratio;
            self.owed_s += service_s;
            self.waiting.push_back(Waiting { ticket, sent: now, prefill, service_s });
        }
    }

    /// A request waits no more, for whatever reason.
    pub fn remove(&mut self, ticket: u64) -> Option<Prefill> {
        self.take(ticket).map(|waiting| waiting.prefill)
    }

    fn take(&mut self, ticket: u64) -> Option<Waiting> {
        let at = self.waiting.iter().position(|waiting| waiting.ticket == ticket)?;
        let waiting = self.waiting.remove(at)?;
        self.owed_s = if self.waiting.is_empty() { 0.0 } else { (self.owed_s - waiting.service_s).max(0.0) };
        Some(waiting)
    }

    /// A request's whole answer comes `now`, its first token with its last. Returns how long it took, from being sent on, which its prefill
    /// did not exceed.
    pub fn whole_answer(&mut self, ticket: u64, now: Duration) -> Option<Observation> {
        let Waiting { sent, prefill, .. } = self.take(ticket)?;
        Some(Observation {
            seconds: now.saturating_sub(sent).as_secs_f64(),
            new_tokens: prefill.new_tokens as f64,
            pairs: prefill.pairs(),
            ratio: self.ratio.value(),
        })
    }

    /// A request's first token comes `now`; `cached_tokens` of its prompt were cached, if the worker said so. Returns what the step
    /// before that one's teaches, which is over once this begins.
    pub fn first_token(
        &mut self,
        ticket: u64,
        now: Duration,
        cached_tokens: Option<usize>,
        speed: &PrefillSpeed,
    ) -> Option<Observation> {
        let expected = self.remove(ticket)?;
        let prefill = cached_tokens.map_or(expected, |cached_tokens| expected.with_cached(cached_tokens));
        if let Some(step) = self.step.as_mut().filter(|step| now.saturating_sub(step.at) < SAME_STEP) {
            step.new_tokens += prefill.new_tokens as f64;
            step.pairs += prefill.pairs();
            return None;
        }
        let seconds = now.saturating_sub(self.since).as_secs_f64();
        self.since = now;
        let new_tokens = prefill.new_tokens as f64;
        let over = self.step.replace(Step { at: now, seconds, new_tokens, pairs: prefill.pairs() })?;
        let Step { seconds, new_tokens, pairs, .. } = over;
        let observation = Observation { seconds, new_tokens, pairs, ratio: self.ratio.value() };
        self.ratio.see(&observation, speed);
        Some(observation)
    }
}

/// How many times longer than the fleet a worker takes, as far as that is certain. What is seen is noisy, and a cost that differs
/// by noise takes prompts away from where their prefixes are.
#[derive(Debug, Default)]
struct Ratio {
    /// Decayed count, mean and variance of the logarithms of seen over expected, less the fleet's mean.
    weight: f64,
    mean: f64,
    variance: f64,
}

impl Ratio {
    /// Weight of what is known, against each new observation: some ten count.
    const FORGETTING: f64 = 0.9;
    /// So many before anything is certain; it is some sixteen observations until the decayed count is there.
    const LEAST_WEIGHT: f64 = 8.0;
    /// Workers that are less apart than this, as a logarithm, are taken to be alike, besides the standard errors of the mean.
    const ALIKE: f64 = 0.25;
    /// Many workers are asked about all the time, and what is seen one after the other is alike: with two standard errors one of sixteen
    /// equal workers was now and then taken for another kind, and buried or left idle.
    const STANDARD_ERRORS: f64 = 3.0;
    /// How far off one observation may be.
    const LARGEST_STEP: f64 = 1.5;

    fn see(&mut self, observation: &Observation, speed: &PrefillSpeed) {
        let Some(surprise) = speed.surprise_of(observation) else { return };
        let seen = surprise - speed.surprise;
        self.weight = self.weight * Self::FORGETTING + 1.0;
        let step = 1.0 / self.weight;
        // What was not in the cache although it should have been, or the other way round, looks like another speed.
        let off = (seen - self.mean).clamp(-Self::LARGEST_STEP, Self::LARGEST_STEP);
        self.mean += step * off;
        self.variance = (1.0 - step) * (self.variance + step * off * off);
    }

    fn value(&self) -> f64 {
        let error = (self.variance / self.weight.max(1.0)).sqrt();
        let is_certain =
            self.weight > Self::LEAST_WEIGHT && self.mean.abs() > Self::ALIKE + Self::STANDARD_ERRORS * error;
        if is_certain { self.mean.exp() } else { 1.0 }
    }
}
