//! The real engine: the worker's own scheduler and block pool, stepped by the timing model in place of a model.
//!
//! Every token is drawn by a real step; nothing is skipped or approximated. What makes that fast is that a block has 512 tokens, so
//! that a prompt of 12,000 tokens is 24 hashes and 24 entries of a block table, and that decode steps in which nothing happens
//! ([`DecodeRun`]) are taken together, up to the next arrival.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use roundhouse_types::{BlockHash, ChainHasher, FinishReason, TokenId, WorkerLoad};
use worker_core::scheduler::DecodeRun;
use worker_core::step::{Batch, KvCapacity, NextToken, SequenceId};
use worker_core::timing::StepLoad;
use worker_core::{EnginePreset, EngineTiming, SamplingParams, Scheduler, SchedulerLimits, Submission};

use super::{Engine, Foreseen, Notice, Part};
use crate::simulate::workload::{BLOCK_TOKENS, Partial, Workload, nanoseconds};

/// All engines of a simulation hash alike, so that a prompt is hashed once to be looked up in all of them.
const HASH_SEED: u64 = 0x0072_6f75_6e64;

/// How fast an engine runs, as a function of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Times everything takes, 1 for what was measured.
    pub slowness: f64,
    /// `(from, until, times)` in nanoseconds: a while of being slower still.
    pub slow_while: Option<(u64, u64, f64)>,
}

impl Pace {
    /// As measured.
    pub const EVEN: Self = Self { slowness: 1.0, slow_while: None };

    fn at(self, now_ns: u64) -> f64 {
        let more = match self.slow_while {
            Some((from, until, times)) if (from..until).contains(&now_ns) => times,
            _ => 1.0,
        };
        self.slowness * more
    }
}

/// What is the same for all requests, made once.
#[derive(Clone, Debug)]
struct Shared {
    params: Arc<SamplingParams>,
    end_tokens: Arc<[TokenId]>,
}

/// What an engine computes without being asked anything in between.
#[derive(Clone, Debug)]
enum Work {
    Step(Batch),
    /// Decode steps that are alike; `run_ends_ns` has them.
    Run,
}

/// What the exchange between two engines takes beside the KV's bytes, with the router in between. Assumed, not measured.
const FETCH_S: f64 = 0.005;
/// Steps of a run that are reckoned with at a time.
const LONGEST_RUN: usize = 256;

/// A worker without a model.
#[derive(Clone, Debug)]
pub struct ScheduledEngine {
    scheduler: Scheduler,
    /// What the scheduler was made from.
    capacity: KvCapacity,
    limits: SchedulerLimits,
    timing: EngineTiming,
    pace: Pace,
    shared: Shared,
    /// What is being computed, and when it ends.
    work: Option<(Work, u64)>,
    /// When each step of a run ends.
    run_ends_ns: Vec<u64>,
    /// Taken in, and when to be scheduled; in that order.
    due: VecDeque<(u64, Asked)>,
    /// Requests that came since the step began, and those whose tokens are not made yet; behind the scheduler's own queue.
    backlog: VecDeque<Asked>,
    /// Tokens that the scheduler's queue may hold before the backlog grows.
    queued_tokens_limit: usize,
    /// Tokens of prompts that the scheduler has and that have no first token.
    queued_tokens: usize,
    sequences: Vec<Known>,
    /// How long a token's KV takes to come from another engine.
    fetch_token_s: f64,
    /// When what comes from other engines has come.
    fetched_ns: u64,
    /// Tokens that it had to compute, and prompts.
    asked_of: (usize, usize),
    drawn: Vec<NextToken>,
}

/// A request that the scheduler does not know yet.
#[derive(Debug, Clone, Copy)]
struct Asked {
    number: u32,
    part: Part,
    /// Tokens of its prompt that it will have to compute, as far as is known when it comes.
    uncached_tokens: usize,
}

/// What is known of a sequence of the scheduler, by its number.
#[derive(Debug, Clone, Copy)]
struct Known {
    request: u32,
    /// Whether its first token has come.
    has_begun: bool,
}

/// What an engine is made from.
#[derive(Debug, Clone, Copy)]
pub struct Build<'a> {
    /// Times and limits.
    pub preset: &'a EnginePreset,
    /// Tokens in a block.
    pub block_tokens: usize,
    /// Blocks in its pool.
    pub blocks: usize,
    /// How fast it is.
    pub pace: Pace,
    /// Bytes of KV a second that come from other engines.
    pub kv_bytes_per_s: f64,
    /// Tokens of waiting prompts that are kept in memory at most.
    pub queued_tokens_limit: usize,
    /// Adapters that it computes side by side.
    pub max_adapters: usize,
}

impl ScheduledEngine {
    /// An idle engine with an empty cache.
    #[must_use]
    pub fn new(build: &Build<'_>) -> Self {
        let Build { preset, block_tokens, blocks, pace, kv_bytes_per_s, queued_tokens_limit, max_adapters } =
            *build;
        let limits = SchedulerLimits { max_adapters, ..preset.limits() };
        let capacity = KvCapacity { block_tokens, blocks };
        Self {
            scheduler: Scheduler::new(capacity, limits, HASH_SEED),
            capacity,
            limits,
            timing: preset.timing,
            pace,
            shared: Shared { params: Arc::new(SamplingParams::greedy()), end_tokens: Arc::new([]) },
            work: None,
            run_ends_ns: Vec::new(),
            due: VecDeque::new(),
            backlog: VecDeque::new(),
            queued_tokens_limit,
            queued_tokens: 0,
            sequences: Vec::new(),
            fetch_token_s: preset.kv_token_bytes as f64 / kv_bytes_per_s,
            fetched_ns: 0,
            asked_of: (0, 0),
            drawn: Vec::new(),
        }
    }

    /// What of a prompt's prefill depends on the prompt, as measured, in seconds.
    fn variable_s(&self, prompt_tokens: u32, cached_tokens: u32) -> f64 {
        let cached = f64::from(cached_tokens);
        let new = f64::from(prompt_tokens) - cached;
        let EngineTiming { prefill_token_s, prefill_pair_s, .. } = self.timing;
        prefill_token_s * new + prefill_pair_s * new * (cached + new / 2.0)
    }

    /// Hands waiting requests to the scheduler, as far as memory allows.
    fn feed(&mut self, workload: &Workload) {
        while let Some(Asked { number, part, .. }) = self.backlog.front().copied() {
            let prompt = workload.tokens(number);
            if self.queued_tokens > 0 && self.queued_tokens + prompt.len() > self.queued_tokens_limit {
                return;
            }
            self.backlog.pop_front();
            self.queued_tokens += prompt.len();
            let submission = Submission {
                prompt,
                params: Arc::clone(&self.shared.params),
                max_tokens: match part {
                    Part::Whole | Part::Answer => workload.requests[number as usize].output_tokens as usize,
                    Part::Prompt => 1,
                },
                end_tokens: Arc::clone(&self.shared.end_tokens),
                priority: 0,
                adapter: workload.requests[number as usize].adapter,
            };
            let submitted = match part {
                Part::Whole | Part::Prompt => self.scheduler.submit(submission),
                Part::Answer => self.scheduler.submit_fetched(submission, None, 0),
            };
            submitted.expect("a cell's requests fit into its pools");
            self.sequences.push(Known { request: number, has_begun: false });
        }
    }

    fn begin_step(&mut self, workload: &Workload, now_ns: u64) {
        self.feed(workload);
        if self.scheduler.is_idle() {
            return;
        }
        if let Some(run) = self.scheduler.decode_run() {
            self.begin_run(run, now_ns);
            return;
        }
        let batch = self.scheduler.schedule();
        let ends_ns = self.step_end_ns(&StepLoad::of(&batch), now_ns);
        self.work = Some((Work::Step(batch), ends_ns));
    }

    fn begin_run(&mut self, run: DecodeRun, now_ns: u64) {
        let mut load =
            StepLoad { decoding: run.sequences, context_tokens: run.context_tokens, ..StepLoad::default() };
        let mut ends_ns = now_ns;
        self.run_ends_ns.clear();
        for _ in 0..run.steps.min(LONGEST_RUN) {
            ends_ns = self.step_end_ns(&load, ends_ns);
            self.run_ends_ns.push(ends_ns);
            load.context_tokens += load.decoding;
        }
        self.work = Some((Work::Run, ends_ns));
        if let Some((due_ns, _)) = self.due.front() {
            self.interrupt(*due_ns);
        }
    }

    fn step_end_ns(&self, load: &StepLoad, now_ns: u64) -> u64 {
        now_ns + nanoseconds(self.timing.load_seconds(load) * self.pace.at(now_ns))
    }

    /// Something comes in at `at_ns`: a run goes no further than the step that is being computed then.
    fn interrupt(&mut self, at_ns: u64) {
        let Some((Work::Run, ends_ns)) = &mut self.work else { return };
        let over = self.run_ends_ns.partition_point(|end_ns| *end_ns < at_ns);
        self.run_ends_ns.truncate(over + 1);
        *ends_ns = self.run_ends_ns.last().copied().unwrap_or(*ends_ns);
    }

    fn end_run(&mut self, workload: &Workload, notices: &mut Vec<Notice>) {
        let sequences = &self.sequences;
        let mut draw = |id: SequenceId, positions: Range<usize>, tokens: &mut Vec<TokenId>| {
            let Known { request, .. } = sequences[index(id.0)];
            tokens.extend(positions.map(|position| workload.token(request, position)));
        };
        for progress in self.scheduler.commit_run(self.run_ends_ns.len(), &mut draw) {
            notices.push(Notice::Done { request: sequences[index(progress.id.0)].request });
        }
    }

    fn end_step(&mut self, workload: &Workload, batch: &Batch, notices: &mut Vec<Notice>) {
        self.drawn.clear();
        for step in batch.sequences.iter().filter(|step| step.sample.is_some()) {
            let Known { request, .. } = self.sequences[index(step.id.0)];
            let token = workload.token(request, step.context_tokens + step.tokens.len());
            self.drawn.push(NextToken { id: step.id, token, logprobs: None });
        }
        for progress in self.scheduler.commit(batch, &self.drawn) {
            let Known { request, has_begun, .. } = &mut self.sequences[index(progress.id.0)];
            let request = *request;
            if !std::mem::replace(has_begun, true) {
                self.queued_tokens -= workload.requests[request as usize].input_tokens as usize;
                let cached_tokens = u32::try_from(progress.cached_tokens).unwrap_or(u32::MAX);
                notices.push(Notice::FirstToken { request, cached_tokens });
            }
            if progress.finished == Some(FinishReason::Length) {
                notices.push(Notice::Done { request });
            }
        }
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("sequences are counted from 0")
}

impl Engine for ScheduledEngine {
    const PARTIAL: Partial = Partial::LeftOut;

    fn submit(&mut self, workload: &Workload, number: u32, part: Part, now_ns: u64) {
        let mut path = Vec::new();
        Self::cache_path(workload, number, &mut path);
        let cached_tokens = self.cached_blocks(&path) * BLOCK_TOKENS;
        let prompt_tokens = workload.requests[number as usize].input_tokens as usize;
        let mut uncached_tokens = prompt_tokens - cached_tokens;
        let mut wait = nanoseconds(self.timing.request_s);
        if part == Part::Answer {
            // One after the other; what waits outside of steps does so at the first engine.
            let fetch_ns = nanoseconds(self.fetch_token_s * uncached_tokens as f64);
            self.fetched_ns = self.fetched_ns.max(now_ns) + fetch_ns;
            (uncached_tokens, wait) = (1, self.fetched_ns - now_ns + nanoseconds(FETCH_S));
        }
        let asked = Asked { number, part, uncached_tokens };
        self.asked_of = (self.asked_of.0 + uncached_tokens, self.asked_of.1 + 1);
        self.interrupt(now_ns + wait);
        if wait > 0 {
            let due_ns = now_ns + wait;
            let at = self.due.partition_point(|(earlier_ns, _)| *earlier_ns <= due_ns);
            self.due.insert(at, (due_ns, asked));
            return;
        }
        self.backlog.push_back(asked);
        if self.work.is_none() {
            self.begin_step(workload, now_ns);
        }
    }

    fn next_ns(&self) -> Option<u64> {
        let work = self.work.as_ref().map(|(_, ends_ns)| *ends_ns);
        work.into_iter().chain(self.due.front().map(|(due_ns, _)| *due_ns)).min()
    }

    fn advance(&mut self, workload: &Workload, notices: &mut Vec<Notice>) {
        let Some(now_ns) = self.next_ns() else { return };
        while self.due.front().is_some_and(|(due_ns, _)| *due_ns == now_ns) {
            self.backlog.extend(self.due.pop_front().map(|(_, asked)| asked));
        }
        match self.work.take_if(|(_, ends_ns)| *ends_ns == now_ns) {
            Some((Work::Step(batch), _)) => self.end_step(workload, &batch, notices),
            Some((Work::Run, _)) => self.end_run(workload, notices),
            None => {}
        }
        if self.work.is_none() {
            self.begin_step(workload, now_ns);
        }
    }

    fn cached_blocks(&self, path: &[BlockHash]) -> usize {
        self.scheduler.cached_blocks(path)
    }

    fn cache_path(workload: &Workload, number: u32, path: &mut Vec<BlockHash>) {
        let mut chain = ChainHasher::new(HASH_SEED);
        let request = &workload.requests[number as usize];
        let full = (request.input_tokens as usize - 1) / BLOCK_TOKENS;
        path.clear();
        path.extend(
            workload.ids(request).iter().take(full).map(|id| chain.push_tokens(&[*id; BLOCK_TOKENS])),
        );
    }

    /// By doing it, in a copy of the engine.
    fn foresee(&self, workload: &Workload, number: u32, now_ns: u64) -> Foreseen {
        let mut copy = self.clone();
        copy.submit(workload, number, Part::Whole, now_ns);
        let mut notices = Vec::new();
        let (mut at_ns, mut cached_tokens) = (now_ns, None);
        while let (None, Some(next_ns)) = (cached_tokens, copy.next_ns()) {
            at_ns = next_ns;
            copy.advance(workload, &mut notices);
            cached_tokens = notices.drain(..).find_map(|notice| match notice {
                Notice::FirstToken { request, cached_tokens } => (request == number).then_some(cached_tokens),
                Notice::Done { .. } => None,
            });
        }
        let prompt_tokens = workload.requests[number as usize].input_tokens;
        let own_s = self.variable_s(prompt_tokens, cached_tokens.unwrap_or(0)) * self.pace.at(now_ns);
        Foreseen { wait_s: ((at_ns - now_ns) as f64 / 1e9 - own_s).max(0.0), own_s }
    }

    fn alone_s(&self, prompt_tokens: u32, cached_tokens: u32, now_ns: u64) -> f64 {
        let new_tokens = prompt_tokens.saturating_sub(cached_tokens) as usize;
        let steps = new_tokens.div_ceil(self.limits.max_tokens_per_step);
        let fixed_s = self.timing.prefill_s * steps as f64;
        (fixed_s + self.variable_s(prompt_tokens, cached_tokens)) * self.pace.at(now_ns)
    }

    fn reported(&self) -> WorkerLoad {
        let stats = self.scheduler.stats();
        let unknown = || self.backlog.iter().chain(self.due.iter().map(|(_, asked)| asked));
        let unknown_tokens: usize = unknown().map(|asked| asked.uncached_tokens).sum();
        let block_tokens = self.capacity.block_tokens;
        WorkerLoad {
            running_requests: stats.running,
            waiting_requests: stats.waiting + unknown().count(),
            waiting_uncached_tokens: stats.uncomputed_tokens + unknown_tokens,
            kv_used_tokens: stats.held_blocks * block_tokens,
            kv_free_tokens: (stats.total_blocks - stats.held_blocks) * block_tokens,
            ..WorkerLoad::default()
        }
    }

    fn mean_uncached_tokens(&self) -> f64 {
        let (tokens, prompts) = self.asked_of;
        tokens as f64 / prompts.max(1) as f64
    }

    fn restart(&mut self) {
        self.asked_of = (0, 0);
        self.scheduler = Scheduler::new(self.capacity, self.limits, HASH_SEED);
        self.work = None;
        self.run_ends_ns.clear();
        self.due.clear();
        self.backlog.clear();
        self.queued_tokens = 0;
        self.fetched_ns = 0;
        self.sequences.clear();
    }

    fn retractions(&self) -> u64 {
        self.scheduler.stats().retractions
    }
}

#[cfg(test)]
mod tests {
    use worker_core::timing::preset;

    use super::*;
    use crate::simulate::workload::Draft;

    fn run(workload: &Workload, engine: &mut ScheduledEngine) -> Vec<(u64, Notice)> {
        let mut told = Vec::new();
        while let Some(at_ns) = engine.next_ns() {
            let mut notices = Vec::new();
            engine.advance(workload, &mut notices);
            told.extend(notices.into_iter().map(|notice| (at_ns, notice)));
        }
        told
    }

    fn engine(queued_tokens_limit: usize, pace: Pace) -> ScheduledEngine {
        let preset = preset("qwen3-8b").unwrap();
        let (block_tokens, blocks, kv_bytes_per_s) = (BLOCK_TOKENS, 100, 25e9);
        let build = Build {
            preset,
            block_tokens,
            blocks,
            pace,
            kv_bytes_per_s,
            queued_tokens_limit,
            max_adapters: usize::MAX,
        };
        ScheduledEngine::new(&build)
    }

    #[test]
    fn a_lone_request_takes_what_the_timing_model_says() {
        let mut workload = Workload::named("w");
        workload.push(Draft { input_tokens: 2_000, output_tokens: 2, ..Draft::default() }, [1, 2, 3]);
        for slowness in [1.0, 2.0] {
            let mut engine = engine(1_000_000, Pace { slowness, ..Pace::EVEN });
            engine.submit(&workload, 0, Part::Whole, 0);
            let told = run(&workload, &mut engine);
            // d + p·T + q·T²/2, then a + b + g·K.
            let prefill_s = 0.030 + 0.061e-3 * 2_000.0 + 0.91e-9 * 2_000.0 * 1_000.0;
            let decode_s = 0.0113 + 0.030e-3 + 0.088e-6 * 2_001.0;
            let expected = [prefill_s, prefill_s + decode_s].map(|seconds| seconds * slowness);
            assert_eq!(told[0].1, Notice::FirstToken { request: 0, cached_tokens: 0 });
            assert_eq!(told[1].1, Notice::Done { request: 0 });
            for ((at_ns, _), expected) in told.iter().zip(expected) {
                assert!((*at_ns as f64 / 1e9 - expected).abs() < 1e-6, "{at_ns} is not {expected}");
            }
        }
    }

    #[test]
    fn what_was_computed_elsewhere_takes_its_bytes_and_a_step_of_those_that_decode() {
        let mut workload = Workload::named("w");
        for number in [1, 2] {
            workload
                .push(Draft { input_tokens: 2_000, output_tokens: 2, ..Draft::default() }, [number, 3, 4, 5]);
        }
        let mut engine = engine(1_000_000, Pace::EVEN);
        engine.submit(&workload, 0, Part::Answer, 0);
        engine.submit(&workload, 1, Part::Answer, 0);
        assert_eq!(engine.reported().waiting_uncached_tokens, 2);
        let told = run(&workload, &mut engine);
        let fetch_s = 2_000.0 * 147_456.0 / 25e9;
        let step_s = |sequences: f64, tokens: f64| 0.0113 + sequences * 0.030e-3 + tokens * 0.088e-6;
        // The second comes behind the first, in the course of its second step.
        let first_s = 0.005 + fetch_s + step_s(1.0, 2_000.0);
        let second_s = first_s + step_s(1.0, 2_001.0) + step_s(1.0, 2_000.0);
        let first_tokens =
            told.iter().filter(|(_, notice)| matches!(notice, Notice::FirstToken { cached_tokens: 0, .. }));
        for ((at_ns, _), expected_s) in first_tokens.zip([first_s, second_s]) {
            assert!((*at_ns as f64 / 1e9 - expected_s).abs() < 1e-6, "{at_ns} is not {expected_s}");
        }
        assert_eq!(told.len(), 4);
        let mut path = Vec::new();
        ScheduledEngine::cache_path(&workload, 0, &mut path);
        assert_eq!(engine.cached_blocks(&path), 3, "what came is cached");
    }

    #[test]
    fn a_later_turn_finds_the_reply_in_the_cache() {
        let mut workload = Workload::named("w");
        workload.push(Draft { input_tokens: 600, output_tokens: 500, ..Draft::default() }, [1, 2, 3]);
        workload.push(Draft { input_tokens: 1_200, output_tokens: 1, ..Draft::default() }, [1, 2, 3]);
        let mut engine = engine(1_000_000, Pace::EVEN);
        engine.submit(&workload, 0, Part::Whole, 0);
        run(&workload, &mut engine);
        engine.submit(&workload, 1, Part::Whole, 1_000_000_000_000);
        let told = run(&workload, &mut engine);
        assert_eq!(told[0].1, Notice::FirstToken { request: 1, cached_tokens: 1_024 });
        let mut path = Vec::new();
        ScheduledEngine::cache_path(&workload, 1, &mut path);
        assert_eq!(engine.cached_blocks(&path), 2);
    }

    #[test]
    fn what_waits_in_the_backlog_is_served_as_if_it_had_not() {
        let mut workload = Workload::named("w");
        for number in 0..20 {
            workload.push(Draft { input_tokens: 3_000, output_tokens: 5, ..Draft::default() }, [number]);
        }
        let of = |limit| {
            let mut engine = engine(limit, Pace::EVEN);
            (0..20).for_each(|number| engine.submit(&workload, number, Part::Whole, 0));
            run(&workload, &mut engine)
        };
        assert_eq!(of(30_000), of(1_000_000));
    }
}
