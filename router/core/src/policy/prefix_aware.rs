//! The least expected waiting, for this request and for those whom it makes wait: ours, and the default.
//!
//! `cost = W + x·[1 + Q + β·(λ/N)·(W + x/2)·(1 + q̄) + ω·A] + D·ω·A + p·[R·(a + c·prompt) + a·R + c·K] + M`, in seconds:
//!
//! | term | meaning | where it comes from |
//! |---|---|---|
//! | `W` | service that the worker owes to requests without a first token, which come first; and if the first of them should have had its token by now, as long again as it has been late | ledger: learned service times, less what the first has had |
//! | `x` | this request's own prefill there | the tree's hits; [`speed`](crate::speed): learned p, q and the worker's ratio |
//! | `Q` | requests without a first token there: engines compute what waits in common steps, and the first tokens of a step come at its end | ledger |
//! | `β·(λ/N)·(W + x/2)·(1 + q̄)` | who comes while all that is computed, and waits for `x` too, unless there is a worker that nobody waits at | arrivals of late; q̄: mean requests without a first token; β: share of workers that somebody waits at |
//! | `ω·A` | sequences that decode there: `x` delays each, a second of decode being worth ω of a second of TTFT | ledger |
//! | `D·ω·A` | the fixed part of a step, which they wait for too: d, or nothing if another already waits for the next step and this one joins it | ledger; `speed` |
//! | `R·(a + c·prompt)` | what one more sequence of this length slows the R others down that it meets, in tokens of prefill; p is learned. R: half of those that run there now, since they are half done on average, then half of those that usually run there, and all of these once more for who will come because of this request: next turns, equal prefixes | ledger |
//! | `a·R + c·K` | what they, with K tokens of context, slow this one down | ledger |
//! | `M` | wait for memory, where the worker's KV capacity is known: the share of it that is missing, of the mean time a request stays. What requests in flight share is in memory once | ledger; Little's law |
//!
//! Where workers report their load, others' requests count in all of these as well. A worker that others use too owes what it said last, and
//! what this router has sent since; and routers that decide in the same moment, with the same view, must not all choose the same worker. So each
//! first places, in thought, as many requests of others as it may be behind: a random number, by how many share the fleet and how many of its own
//! picks come between two reports.
//!
//! `W + x` is what the request itself waits for. The rest is what it costs others, and keeps a hot prefix from burying the worker that
//! has it. The form began with the study in `design/policy.md`. A worker of which nothing is known is taken to be as fast as the fleet.

use rand::{Rng, RngExt};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Candidate, Choice, Policy, cheapest};
use crate::ledger::LoadReading;
use crate::reports::LoadReport;
use crate::request::{PromptUse, RequestView};
use crate::unseen::Unseen;

/// ω: a second of decode delay against a second of first-token delay.
const DECODE_WORTH: f64 = 0.1;
/// a: prefill tokens that one more running request is worth to another, whatever its length. From a decode step's slope of 0.03 ms a
/// sequence over some 300 steps, half as much again since prefills come between them, ×ω, at 0.06 ms a prefilled token.
const RUNNING_TOKENS: f64 = 22.0;
/// c: the same for each token of its context, with a slope of 0.088 µs.
const CONTEXT_SHARE: f64 = 0.06;
/// How often those that usually run at a worker count: half for the rest of a request's time, when those that run now have gone, and once
/// for the requests that it will draw there.
const USUAL_MET: f64 = 1.5;
/// Share of the KV cache beyond which requests begin to wait for memory: outputs want some of it too.
const FULL_SHARE: f64 = 0.9;

/// Differences in cost that nobody feels, besides half of a step's fixed part: when a prompt comes in the course of a step is chance, and
/// moves its first token by as much.
const UNFELT_S: f64 = 0.005;

/// Routers of which one may decide in the same moment as this one; of more, some see what the others did.
const OTHERS_AT_ONCE: f64 = 8.0;
/// Requests of others that are placed in thought at most.
const MOST_UNSEEN: f64 = 32.0;

/// Picks the worker where the request causes the least waiting. Where several hold most of the prompt and the choice makes no difference that
/// anyone feels, always the same one, which may be called the prompt's home.
///
/// For what an engine holds is a guess, unless it says so. A prompt that keeps to its home is used there all the time, and leaves the other
/// caches to other prompts.
#[derive(Clone, Copy, Debug)]
pub struct PrefixAware;

/// What a worker has to do: by the router's own ledger, and what it reported beyond that, since others may send requests there as well.
struct Work {
    queued_s: f64,
    waiting: f64,
    running: f64,
    /// Of late, on average.
    usual: f64,
    context_tokens: f64,
    /// Of these, what is in memory: a prefix that several share is there once.
    held_tokens: f64,
}

impl Work {
    fn of(candidate: &Candidate, token_s: f64) -> Self {
        let load = candidate.load;
        let own = Self {
            queued_s: candidate.queued_s,
            waiting: load.prefilling as f64,
            running: load.requests as f64,
            usual: candidate.usual_requests,
            context_tokens: load.context_tokens as f64,
            held_tokens: load.held_tokens as f64,
        };
        let Some(report) = candidate.report else { return own };
        Self {
            queued_s: if report.others.requests > 0 {
                queued_by_report_s(&load, &report, token_s)
            } else {
                own.queued_s
            },
            waiting: own.waiting + f64::from(report.others.waiting),
            running: own.running + f64::from(report.others.requests),
            usual: own.usual + f64::from(report.others.requests),
            context_tokens: own.context_tokens.max(f64::from(report.kv_used_tokens)),
            held_tokens: own.held_tokens.max(f64::from(report.kv_used_tokens)),
        }
    }
}

/// What a worker that others use too owes: what it said, less what it has computed since, and what was sent there since. The ledger cannot tell,
/// as the worker computes for others before it comes to this router's requests.
fn queued_by_report_s(load: &LoadReading, report: &LoadReport, token_s: f64) -> f64 {
    let usual_token_s =
        if load.sent_tokens > 0 { load.sent_us as f64 / 1e6 / load.sent_tokens as f64 } else { token_s };
    // Each sequence that decodes has one token to compute, which nobody waits for.
    let tokens = report.waiting_uncached_tokens.saturating_sub(report.running);
    let left_s = f64::from(tokens) * usual_token_s - f64::from(report.age_ms) / 1e3;
    let sent_since_us = load.sent_us.saturating_sub(report.others.sent_us);
    left_s.max(0.0) + sent_since_us as f64 / 1e6
}

/// What is the same for all candidates.
struct Fleet {
    /// Requests a second that come to a worker and find none that is idle, times those that each of them makes wait in turn.
    waiting_per_s: f64,
    /// Mean time that a request stays, in seconds.
    stay_s: f64,
    /// How many routers there would be, if each had as much in flight as this one.
    routers: f64,
    token_s: f64,
    fixed_s: f64,
    prompt: f64,
    /// Tokens of a request that runs, on average.
    usual_context: f64,
}

impl Fleet {
    fn of(request: &RequestView<'_>, choice: &Choice<'_>, works: &[Work]) -> Self {
        let sum = |part: fn(&Work) -> f64| works.iter().map(part).sum::<f64>();
        let (waiting, running) = (sum(|work| work.waiting), sum(|work| work.running));
        let own: f64 = choice.candidates.iter().map(|candidate| candidate.load.requests as f64).sum();
        // What other routers send is seen in what runs.
        let routers = if own > 0.0 { running / own } else { 1.0 };
        let arrivals_per_s = choice.arrivals_per_s * routers;
        let count = works.len() as f64;
        let busy_share = works.iter().filter(|work| work.waiting > 0.0).count() as f64 / count;
        Self {
            waiting_per_s: busy_share * arrivals_per_s / count * (1.0 + waiting / count),
            stay_s: if arrivals_per_s > 0.0 { running / arrivals_per_s } else { 0.0 },
            routers,
            token_s: choice.speed.token_s,
            fixed_s: choice.speed.fixed_s,
            prompt: request.prompt_tokens as f64,
            usual_context: sum(|work| work.context_tokens) / running.max(1.0),
        }
    }

    fn costs(&self, candidates: &[Candidate], works: &[Work]) -> Vec<f64> {
        candidates.iter().zip(works).map(|(candidate, work)| self.cost(candidate, work)).collect()
    }

    fn cost(&self, candidate: &Candidate, work: &Work) -> f64 {
        let Work { queued_s, waiting, running, usual, context_tokens, held_tokens } = *work;
        let (own_s, decoding) = (candidate.own_s, (running - waiting).max(0.0));
        let delayed = waiting + self.waiting_per_s * (queued_s + own_s / 2.0) + DECODE_WORTH * decoding;
        let met = running / 2.0 + USUAL_MET * usual;
        let met_context = context_tokens / 2.0 + USUAL_MET * usual * self.usual_context;
        let slowed_tokens = met * (RUNNING_TOKENS + CONTEXT_SHARE * self.prompt);
        let slow_tokens = met * RUNNING_TOKENS + CONTEXT_SHARE * met_context;
        let queue = candidate.load.queue;
        let step_s = if queue.behind > 0 { 0.0 } else { self.fixed_s * queue.ratio };
        let decode_s = self.token_s * queue.ratio * (slowed_tokens + slow_tokens);
        queued_s
            + own_s * (1.0 + delayed)
            + step_s * DECODE_WORTH * decoding
            + decode_s
            + self.memory_wait_s(candidate, held_tokens)
    }

    /// Adds requests that other routers may have placed since the workers' reports, each where one of the usual size, with
    /// nothing cached, would cost least.
    fn place_unseen(&self, candidates: &[Candidate], works: &mut [Work], unseen: Unseen, rng: &mut dyn Rng) {
        let others = self.routers - 1.0;
        let mut at_most = |mean: f64| 2.0 * mean * rng.random::<f64>();
        let drawn = at_most(others.min(OTHERS_AT_ONCE)) + at_most(others * unseen.picks);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
        let count = drawn.round().clamp(0.0, MOST_UNSEEN) as usize;
        if count == 0 {
            return;
        }
        // Each makes its worker dearer, so all of them go to those that are the cheapest at first.
        let cost = |at: usize, work: &Work| {
            self.cost(&Candidate { own_s: unseen.service_s, ..candidates[at] }, work)
        };
        let mut cheapest: Vec<(f64, usize)> = (0..works.len()).map(|at| (cost(at, &works[at]), at)).collect();
        if count + 1 < cheapest.len() {
            cheapest.select_nth_unstable_by(count, |one, other| one.0.total_cmp(&other.0));
            cheapest.truncate(count + 1);
        }
        for _ in 0..count {
            let least = cheapest.iter_mut().min_by(|one, other| one.0.total_cmp(&other.0));
            let Some((known, at)) = least else { return };
            works[*at].waiting += 1.0;
            works[*at].running += 1.0;
            *known = cost(*at, &works[*at]);
        }
    }

    fn memory_wait_s(&self, candidate: &Candidate, held_tokens: f64) -> f64 {
        let Some(capacity) = candidate.kv_capacity_tokens.filter(|tokens| *tokens > 0) else { return 0.0 };
        let wanted = (held_tokens + self.prompt) / capacity as f64;
        (wanted - FULL_SHARE).max(0.0) * self.stay_s
    }
}

impl Policy for PrefixAware {
    fn name(&self) -> &'static str {
        "prefix_aware"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    /// Seconds.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let works = works(choice);
        Fleet::of(request, choice, &works).costs(choice.candidates, &works)
    }

    fn pick(&self, request: &RequestView<'_>, choice: &Choice<'_>, rng: &mut dyn Rng) -> usize {
        let mut works = works(choice);
        let fleet = Fleet::of(request, choice, &works);
        if fleet.routers > 1.0 {
            fleet.place_unseen(choice.candidates, &mut works, choice.unseen, rng);
        }
        let costs = fleet.costs(choice.candidates, &works);
        let cheapest = cheapest(&costs, choice.candidates);
        let limit = costs[cheapest] + UNFELT_S + choice.speed.fixed_s / 2.0;
        let may_be_home = |at: &usize| {
            costs[*at] <= limit && 2 * choice.candidates[*at].hit_tokens >= request.prompt_tokens
        };
        let rank = |at: &usize| {
            let Candidate { slot, hit_blocks, .. } = choice.candidates[*at];
            let block = request.blocks.get(hit_blocks.wrapping_sub(1)).map_or(0, |block| block.0);
            (hit_blocks, xxh3_64_with_seed(&slot.0.to_le_bytes(), block))
        };
        (0..costs.len()).filter(may_be_home).max_by_key(rank).unwrap_or(cheapest)
    }
}

fn works(choice: &Choice<'_>) -> Vec<Work> {
    choice.candidates.iter().map(|candidate| Work::of(candidate, choice.speed.token_s)).collect()
}
