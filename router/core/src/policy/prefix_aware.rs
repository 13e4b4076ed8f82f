//! The least expected waiting, for this request and for those whom it makes wait: ours, and the default.
//!
//! `cost = W + x + M + P + ⅔·{x·[Q + β·(λ/N)·(W + x/2)·(1 + q̄) + ω·A] + D·ω/5·A + p·[R·(a + c·prompt) + a·R + c·K]} − V`, in seconds:
//!
//! | term | meaning | where it comes from |
//! |---|---|---|
//! | `W` | service that the worker owes to requests without a first token, which come first; and if the first of them should have had its token by now, as long again as it has been late | ledger: learned service times, less what the first has had |
//! | `x` | this request's own prefill there | the tree's hits; [`speed`](crate::speed): learned p, q and the worker's ratio |
//! | `Q` | requests without a first token there: engines compute what waits in common steps, and the first tokens of a step come at its end | ledger |
//! | `β·(λ/N)·(W + x/2)·(1 + q̄)` | who comes while all that is computed, and waits for `x` too, unless there is a worker that nobody waits at | arrivals of late; q̄: mean requests without a first token; β: share of workers that somebody waits at |
//! | `ω·A` | sequences that decode there: `x` delays each, a second of decode being worth ω of a second of TTFT | ledger |
//! | `D·ω/5·A` | the fixed part of a step, which they wait for too: d, or nothing if another already waits for the next step and this one joins it; a fifth, since others that come may join it | ledger; `speed` |
//! | `R·(a + c·prompt)` | what one more sequence of this length slows the R others down that it meets, in tokens of prefill; p is learned. R: half of those that run there now, since they are half done on average; then half of those that usually run there, half of these once more for who will come because of this request, and if it begins a session, all of them for each turn that is expected to follow | ledger; [`follow_ups`](crate::prefix::follow_ups) |
//! | `a·R + c·K` | what they, with K tokens of context, slow this one down | ledger |
//! | `P` | for a request with an adapter: the mean time a request stays, times the requests of other adapters that have to end until it has a place; or a quarter of it, times the square of the share of places that are taken, where it takes a free one | ledger; the engine says for how many adapters it has places |
//! | `M` | wait for memory, where the worker's KV capacity is known: the share of it that is missing, of the mean time a request stays. What requests in flight share is in memory once, and each will have an answer of the usual length | ledger; answers of late; Little's law |
//! | `V` | what a copy of the prefix that somebody holds is worth to those who come next for it | [`popularity`](crate::prefix::popularity); see `copies_worth` |
//!
//! Where workers report their load, others' requests count in all of these as well. A worker that others use too owes what it said last, and
//! what this router has sent since; and routers that decide in the same moment, with the same view, must not all choose the same worker. So the
//! workers are divided among the routers that follow them, to which they tell their places, and each router first places, in thought, what the others
//! may have decided since the last reports: each of those among its own workers. This router's own are the cheapest then, if the difference is small.
//! Where there are no more workers than routers, a random number of requests is placed wherever they cost least.
//!
//! What routers tell each other is in the ledger already, and the same is done for what is on its way alone. Where most of that is the same prompts,
//! nothing is placed in thought, and ties go by the prompt: siblings meet at one worker.
//!
//! `W + x + M + P` is what the request itself waits for. The rest is what it costs others, and keeps a hot prefix from burying the worker that
//! has it; a second of it counts two thirds, since it is less certain, and some of those others would have waited anyway. The form began with the study in `design/policy.md`. A worker of which nothing is known is taken to be as fast as the fleet.

use rand::{Rng, RngExt};
use roundhouse_types::RouterPlace;
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Candidate, Choice, Policy, precedence};
use crate::adapters::AdapterOutlook;
use crate::ledger::Sent;
use crate::prefix::popularity::Followers;
use crate::reports::{LoadReport, QueueSource};
use crate::request::{PromptUse, RequestView};
use crate::speed::Prefill;

/// A second that others wait against a second of its own.
const OTHERS_WORTH: f64 = 2.0 / 3.0;
/// ω: a second of decode delay against a second of first-token delay.
const DECODE_WORTH: f64 = 0.2;
/// Share of a step's fixed part that is this request's doing, where nobody else waits for that step yet.
const STEP_SHARE: f64 = 1.0 / 5.0;
/// a: prefill tokens that one more running request is worth to another, whatever its length. From a decode step's slope of 0.03 ms a
/// sequence over some 300 steps, half as much again since prefills come between them, ×ω, at 0.06 ms a prefilled token.
const RUNNING_TOKENS: f64 = 22.0;
/// c: the same for each token of its context, with a slope of 0.088 µs.
const CONTEXT_SHARE: f64 = 0.06;
/// How often those that usually run at a worker count: half for the rest of a request's time, when those that run now have gone, and half
/// for the requests that it will draw there. Each turn that follows in its session meets all of them.
const USUAL_MET: f64 = 1.0;
/// Share of the KV cache beyond which requests begin to wait for memory: some answers are longer than usual.
const FULL_SHARE: f64 = 0.9;

/// What a free place for an adapter is worth where all others are taken, in times a request stays.
const PLACE_WORTH: f64 = 0.25;

/// Differences in cost that nobody feels, besides a share of a step's fixed part: when a prompt comes in the course of a step is chance, and
/// moves its first token by as much.
const UNFELT_S: f64 = 0.003;
const UNFELT_STEP: f64 = 2.0 / 3.0;
/// Of that, what workers may differ by to be taken in turn by prompts without a home: what is learned of their speeds is not known better, and
/// in a fleet with little to do one of them would get all that is new.
const EVEN_SHARE: f64 = 0.5;

/// How many requests each router is taken to place among its own workers in a moment, for each that this one has picked since the oldest report on
/// average: twice that is what comes in a moment, since on average half of it has come already, and one more keeps them apart better.
const OTHERS_PICKS: f64 = 3.0;
/// What each of those owes, in times the mean of all requests: some find much of their prompt cached.
const OTHERS_SERVICE: f64 = 0.5;
/// Where no router has workers of its own: those of which one may decide in the same moment as this one; of more, some see what the others did.
const OTHERS_AT_ONCE: f64 = 8.0;
/// The best of so many is as good as the best of thousands; each costs some 20 ns, or twice that where workers report their load, in which nobody else can pick.
const MOST_WORKERS: u32 = 256;

/// Requests of others that are placed in thought at most.
const MOST_UNSEEN: f64 = 32.0;

/// Picks the worker where the request causes the least waiting. Where several hold most of the prompt and the choice makes no difference that
/// anyone feels, always the same one, which may be called the prompt's home.
///
/// For what an engine holds is a guess, unless it says so. A prompt that keeps to its home is used there all the time, and leaves the other
/// caches to other prompts. One without a home goes, of the workers where it makes next to no difference, to the one whose turn it is.
#[derive(Clone, Copy, Debug)]
pub struct PrefixAware;

impl PrefixAware {
    /// The seconds that the request would cost itself and everybody else at each candidate, each counted once, whoever waits for it, or
    /// `decode_weight` times if it is somebody who decodes: to compare what makes first tokens late with what makes answers slow. `cost` is as
    /// above, but ω is that, and 1 stands for ⅔ and (1 + q̄).
    pub(crate) fn seconds(request: &RequestView<'_>, choice: &Choice<'_>, decode_weight: f64) -> Vec<f64> {
        Fleet::costs(request, choice, Worth::alike(decode_weight))
    }
}

/// What a worker has to do: by the router's own ledger, and what it reported beyond that, since others may send requests there as well.
#[derive(Clone, Copy)]
struct Work {
    queued_s: f64,
    waiting: f64,
    running: f64,
    /// Of late, on average.
    usual: f64,
    context_tokens: f64,
    /// Of these, what is in memory: a prefix that several share is there once.
    held_tokens: f64,
    /// What is in memory as far as the worker says, answers among it.
    used_tokens: f64,
}

impl Work {
    /// By the ledger.
    #[inline]
    fn own(candidate: &Candidate) -> Self {
        let load = candidate.load;
        Self {
            queued_s: candidate.queued_s,
            waiting: f64::from(load.prefilling),
            running: f64::from(load.requests),
            usual: f64::from(candidate.usual_requests),
            context_tokens: f64::from(load.context_tokens),
            held_tokens: f64::from(load.held_tokens),
            used_tokens: 0.0,
        }
    }

    fn at(at: usize, candidate: &Candidate, choice: &Choice<'_>) -> Self {
        let own = Self::own(candidate);
        let Some(report) = choice.report(at) else { return own };
        // What an engine was asked seconds ago is mostly this router's own, which the ledger knows better.
        let is_own = report.queue == QueueSource::Counted && report.others.requests == 0;
        let kv_used_tokens = if is_own { 0.0 } else { f64::from(report.kv_used_tokens) };
        Self {
            queued_s: match report.queue {
                _ if report.others.requests == 0 => own.queued_s,
                QueueSource::Told => queued_by_report_s(report, choice.speed.token_s) + candidate.line_s,
                QueueSource::Counted => {
                    own.queued_s + f64::from(report.others.uncached_tokens) * choice.speed.token_s
                }
            },
            waiting: own.waiting + f64::from(report.others.waiting),
            running: own.running + f64::from(report.others.requests),
            usual: own.usual + f64::from(report.usual_others),
            context_tokens: own.context_tokens.max(kv_used_tokens),
            held_tokens: own.held_tokens,
            used_tokens: kv_used_tokens,
        }
    }
}

/// What a worker that others use too owes to those it has been sent: what it said, less what it has computed since, and what was sent there since.
/// The ledger cannot tell, as the worker computes for others before it comes to this router's requests.
fn queued_by_report_s(report: &LoadReport, token_s: f64) -> f64 {
    let Sent { tokens, us } = report.sent;
    let usual_token_s = if tokens > 0 { us as f64 / 1e6 / tokens as f64 } else { token_s };
    // Each sequence that decodes has one token to compute, which nobody waits for.
    let tokens = report.waiting_uncached_tokens.saturating_sub(report.running);
    let left_s = f64::from(tokens) * usual_token_s - f64::from(report.age_ms) / 1e3;
    let sent_since_us = us.saturating_sub(report.others.sent_us);
    left_s.max(0.0) + sent_since_us as f64 / 1e6
}

/// Over all candidates.
#[derive(Clone, Copy)]
struct Sums {
    running: f64,
    waiting: f64,
    /// Workers that somebody waits at.
    busy: f64,
    context_tokens: f64,
    /// This router's requests, now and of late.
    own: f64,
    /// Those of others.
    others: f64,
    /// Of these, those at workers that tell their load all the time: other routers' like this one.
    other_routers: f64,
}

impl Sums {
    /// Where nobody reports anything.
    fn own(choice: &Choice<'_>) -> Self {
        Self {
            running: choice.requests as f64,
            waiting: choice.prefilling as f64,
            busy: choice.busy as f64,
            context_tokens: choice.context_tokens as f64,
            own: 0.0,
            others: 0.0,
            other_routers: 0.0,
        }
    }

    fn of(choice: &Choice<'_>, works: &[Work]) -> Self {
        let none = Self {
            running: 0.0,
            waiting: 0.0,
            busy: 0.0,
            context_tokens: 0.0,
            own: 0.0,
            others: 0.0,
            other_routers: 0.0,
        };
        choice.candidates.iter().enumerate().zip(works).fold(none, |sums, ((at, candidate), work)| {
            let own = f64::from(candidate.load.requests) + f64::from(candidate.usual_requests);
            let others = work.running + work.usual - own;
            let tells = choice.report(at).is_some_and(|report| report.queue == QueueSource::Told);
            Self {
                running: sums.running + work.running,
                waiting: sums.waiting + work.waiting,
                busy: sums.busy + f64::from(u8::from(work.waiting > 0.0)),
                context_tokens: sums.context_tokens + work.context_tokens,
                own: sums.own + own,
                others: sums.others + others,
                other_routers: sums.other_routers + if tells { others } else { 0.0 },
            }
        })
    }
}

/// What a second counts, whoever waits for it.
#[derive(Clone, Copy)]
struct Worth {
    /// Others', against the request's own.
    others: f64,
    /// ω: of those who decode, against one before a first token.
    decode: f64,
    /// Whether those who come meanwhile make each other wait as well.
    crowd: bool,
}

impl Worth {
    /// First tokens first: what the policy goes by.
    const FIRST_TOKENS: Self = Self { others: OTHERS_WORTH, decode: DECODE_WORTH, crowd: true };
    /// A second is a second, but for those who decode.
    const fn alike(decode: f64) -> Self {
        Self { others: 1.0, decode, crowd: false }
    }
}

/// What is the same for all candidates.
struct Fleet {
    worth: Worth,
    /// Requests a second that come to a worker and find none that is idle, times those that each of them makes wait in turn.
    waiting_per_s: f64,
    /// Mean time that a request stays, in seconds.
    stay_s: f64,
    /// How many routers there would be, if each had as much in flight as this one.
    routers: f64,
    share: f64,
    token_s: f64,
    fixed_s: f64,
    prompt: f64,
    /// Tokens of an answer, on average.
    answer: f64,
    followers: Followers,
    /// How often those that usually run at a worker count.
    usual_met: f64,
    /// Tokens of a request that runs, on average.
    usual_context: f64,
    /// What a request that runs is worth, for being slowed down by this one and for slowing it down, in tokens of prefill.
    running_tokens: f64,
    /// Share of workers' places for adapters that are taken.
    places_taken: f64,
}

impl Fleet {
    fn of(request: &RequestView<'_>, choice: &Choice<'_>, sums: Sums, worth: Worth) -> Self {
        let Sums { running, waiting, busy, context_tokens, own, others, other_routers } = sums;
        // What others send is seen in what runs. This request is one of this router's, if it has no other.
        let own = own.max(1.0);
        let arrivals_per_s = choice.arrivals_per_s * choice.share * (1.0 + others / own);
        let count = choice.candidates.len() as f64;
        let crowd = if worth.crowd { 1.0 + waiting / count } else { 1.0 };
        Self {
            worth,
            waiting_per_s: busy / count * arrivals_per_s / count * crowd,
            stay_s: if arrivals_per_s > 0.0 { running / arrivals_per_s } else { 0.0 },
            routers: 1.0 + other_routers / own,
            share: choice.share,
            token_s: choice.speed.token_s,
            fixed_s: choice.speed.fixed_s,
            prompt: request.prompt_tokens as f64,
            answer: choice.answer_tokens,
            followers: choice.followers,
            usual_met: USUAL_MET + choice.later_turns,
            usual_context: context_tokens / running.max(1.0),
            running_tokens: 2.0 * RUNNING_TOKENS + CONTEXT_SHARE * request.prompt_tokens as f64,
            places_taken: choice.outlooks.iter().map(|one| f64::from(one.taken_share)).sum::<f64>() / count,
        }
    }

    fn cost(&self, candidate: &Candidate, own_s: f64, work: &Work) -> f64 {
        let Work { queued_s, waiting, running, usual, context_tokens, .. } = *work;
        let decoding = self.worth.decode * (running - waiting).max(0.0);
        let delayed = waiting + self.waiting_per_s * (queued_s + own_s / 2.0) + decoding;
        let met = running / 2.0 + self.usual_met * usual;
        let met_context = context_tokens / 2.0 + self.usual_met * usual * self.usual_context;
        // Those it slows down, and those who slow it down.
        let slow_tokens = met * self.running_tokens + CONTEXT_SHARE * met_context;
        let ratio = f64::from(candidate.ratio);
        let step_s = if candidate.joins_step { 0.0 } else { self.fixed_s * ratio };
        let decode_s = self.token_s * ratio * slow_tokens;
        let others_s = own_s * delayed + step_s * STEP_SHARE * decoding + decode_s;
        queued_s + own_s + self.memory_wait_s(candidate, work) + self.worth.others * others_s
    }

    fn costs(request: &RequestView<'_>, choice: &Choice<'_>, worth: Worth) -> Vec<f64> {
        let works = works(choice);
        let fleet = Self::of(request, choice, Sums::of(choice, &works), worth);
        let copies = fleet.copies_worth(request, choice, works.iter().copied());
        let cost = |((at, candidate), work): ((usize, &Candidate), _)| {
            fleet.cost(candidate, candidate.own_s, work) + fleet.adapter_wait_s(choice, at)
                - copies.get(at).copied().unwrap_or(0.0)
        };
        choice.candidates.iter().enumerate().zip(&works).map(cost).collect()
    }

    /// V: what it is worth to those who come next for a prefix that somebody holds that one more worker does; empty where next to nobody is expected.
    /// Until the difference is evened out, each of them is better off there by half of it on average. Others help to even it out, so a share of those who
    /// do are theirs.
    fn copies_worth(
        &self,
        request: &RequestView<'_>,
        choice: &Choice<'_>,
        works: impl Iterator<Item = Work> + Clone,
    ) -> Vec<f64> {
        let Followers { blocks, requests, share } = self.followers;
        if !self.worth.crowd || requests < 1.0 {
            return Vec::new();
        }
        let holds = |one: &Candidate| one.hit_blocks as usize >= blocks;
        let cached_tokens = request.covered_tokens(blocks);
        let new_tokens = request.prompt_tokens.saturating_sub(cached_tokens).max(1);
        let known_s = choice.speed.seconds(Prefill { new_tokens, cached_tokens });
        let with = |(candidate, work): (&Candidate, Work)| {
            self.cost(candidate, known_s * f64::from(candidate.ratio), &work)
        };
        let known: Vec<f64> = choice.candidates.iter().zip(works.clone()).map(with).collect();
        let holders = choice.candidates.iter().zip(&known).filter(|(one, _)| holds(one));
        let best_s = holders.map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min);
        let worth = |((candidate, known), work): ((&Candidate, &f64), Work)| {
            let better_s = best_s - known;
            if holds(candidate) || better_s <= 0.0 || better_s.is_infinite() {
                return 0.0;
            }
            let each_s = self.worth.others * self.token_s * f64::from(candidate.ratio) * self.running_tokens;
            let followers = requests.min(share * better_s / (2.0 * each_s));
            let more_s = self.cost(candidate, candidate.own_s, &work) - known;
            (followers * better_s / 2.0).min(more_s).max(0.0)
        };
        choice.candidates.iter().zip(&known).zip(works).map(worth).collect()
    }

    /// Other routers of whose last decisions nothing is known: by what they have in flight, or those that tell of it a moment later.
    fn others_unseen(&self, choice: &Choice<'_>) -> f64 {
        if choice.told_by > 0 {
            // Who has the same prompt has the same view, and chooses the same worker for it.
            f64::from(choice.told_by) * (1.0 - choice.unseen.siblings)
        } else {
            self.routers - 1.0
        }
    }

    /// Adds requests that other routers may have placed since the workers' reports, each where one of the usual size, with nothing cached,
    /// would cost least.
    fn place_unseen(&self, choice: &Choice<'_>, works: &mut [Work], rng: &mut dyn Rng) {
        let RouterPlace { rank, count: routers } = choice.router_place;
        let others = self.others_unseen(choice);
        if routers < 2 || routers >= choice.workers && choice.told_by == 0 {
            // Nobody has a worker of his own: a random number, so that not all stop at the same one.
            let mut at_most = |mean: f64| 2.0 * mean * rng.random::<f64>();
            let at_once = if choice.told_by > 0 { 0.0 } else { others.min(OTHERS_AT_ONCE) };
            let drawn = at_most(at_once) + at_most(others * choice.unseen.picks);
            self.place(choice, works, (whole(self.share * drawn + 0.5), 0.0), |_| true);
            return;
        }
        let mean = self.share * others * choice.unseen.picks * OTHERS_PICKS;
        let first = rng.random_range(1..routers);
        let turn = |number: u32| (rank + 1 + (first + number) % (routers - 1)) % routers;
        let mut turns: SmallVec<[u32; 32]> = (0..whole(mean + rng.random::<f64>())).map(turn).collect();
        turns.sort_unstable();
        let owes_s = OTHERS_SERVICE * choice.unseen.service_s;
        for router in turns.chunk_by(u32::eq) {
            let count = u32::try_from(router.len()).unwrap_or(0);
            let is_own = |candidate: &Candidate| candidate.by_address % routers == router[0];
            self.place(choice, works, (count, owes_s), is_own);
        }
    }

    /// Adds `count` of the usual size, of which each owes `owes_s`, to the cheapest of those that they may go to.
    fn place(
        &self,
        choice: &Choice<'_>,
        works: &mut [Work],
        (count, owes_s): (u32, f64),
        may: impl Fn(&Candidate) -> bool,
    ) {
        let cost = |at: usize, work: &Work| self.cost(&choice.candidates[at], choice.unseen.service_s, work);
        let those = choice.candidates.iter().enumerate().filter(|(_, candidate)| count > 0 && may(candidate));
        let mut cheapest: Vec<(f64, usize)> = those.map(|(at, _)| (cost(at, &works[at]), at)).collect();
        // Each makes its worker dearer, so all of them go to those that are the cheapest at first.
        let most = count as usize + 1;
        if most < cheapest.len() {
            cheapest.select_nth_unstable_by(most - 1, |one, other| one.0.total_cmp(&other.0));
            cheapest.truncate(most);
        }
        for _ in 0..count {
            let least = cheapest.iter_mut().min_by(|one, other| one.0.total_cmp(&other.0));
            let Some((known, at)) = least else { return };
            works[*at].waiting += 1.0;
            works[*at].running += 1.0;
            works[*at].queued_s += owes_s;
            *known = cost(*at, &works[*at]);
        }
    }

    /// Until the request's adapter has a place: others' requests have to end one after the other, and more of them come meanwhile. And what it costs
    /// others to take a free one, of which the next adapter finds one less.
    fn adapter_wait_s(&self, choice: &Choice<'_>, at: usize) -> f64 {
        let Some(AdapterOutlook { waits_for, takes_place, .. }) = choice.outlooks.get(at).copied() else {
            return 0.0;
        };
        let taken = if takes_place { PLACE_WORTH * self.places_taken.powi(2) } else { 0.0 };
        self.stay_s * (f64::from(waits_for) + taken)
    }

    fn memory_wait_s(&self, candidate: &Candidate, work: &Work) -> f64 {
        if candidate.kv_capacity_tokens == 0 {
            return 0.0;
        }
        let Work { running, held_tokens, used_tokens, .. } = *work;
        let answers = running * self.answer;
        let others = (held_tokens + answers).max(used_tokens);
        let wanted = (others + self.prompt + self.answer) / f64::from(candidate.kv_capacity_tokens);
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

    fn most_workers(&self) -> u32 {
        MOST_WORKERS
    }

    fn binds_late(&self) -> bool {
        true
    }

    /// Seconds.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        Fleet::costs(request, choice, Worth::FIRST_TOKENS)
    }

    fn pick(&self, request: &RequestView<'_>, choice: &Choice<'_>, rng: &mut dyn Rng) -> usize {
        if choice.reports.is_empty() && choice.told_by == 0 {
            // The usual case has a walk of its own, which keeps all of a worker in registers.
            let fleet = Fleet::of(request, choice, Sums::own(choice), Worth::FIRST_TOKENS);
            return fleet.cheapest(request, choice, choice.candidates.iter().map(Work::own));
        }
        let mut works = works(choice);
        let fleet = Fleet::of(request, choice, Sums::of(choice, &works), Worth::FIRST_TOKENS);
        if fleet.others_unseen(choice) > 0.0 {
            fleet.place_unseen(choice, &mut works, rng);
        }
        fleet.cheapest(request, choice, works.into_iter())
    }
}

impl Fleet {
    /// A prompt's home if it is as good as the cheapest candidate, else the one among the cheapest whose turn it is; in one walk, since there
    /// may be thousands.
    fn cheapest(
        &self,
        request: &RequestView<'_>,
        choice: &Choice<'_>,
        works: impl Iterator<Item = Work> + Clone,
    ) -> usize {
        let copies = self.copies_worth(request, choice, works.clone());
        let felt_s = UNFELT_S + choice.speed.fixed_s * UNFELT_STEP;
        let even_s = EVEN_SHARE * felt_s;
        let mut cheapest_s = f64::INFINITY;
        let mut even: SmallVec<[(f64, usize); 16]> = SmallVec::new();
        let mut homes: SmallVec<[(f64, usize); 16]> = SmallVec::new();
        for ((at, candidate), work) in choice.candidates.iter().enumerate().zip(works) {
            // No term is negative: what it waits for itself is enough to see that it is out.
            let copy_s = copies.get(at).copied().unwrap_or(0.0);
            if work.queued_s + candidate.own_s - copy_s > cheapest_s + felt_s {
                continue;
            }
            let cost =
                self.cost(candidate, candidate.own_s, &work) + self.adapter_wait_s(choice, at) - copy_s;
            cheapest_s = cheapest_s.min(cost);
            if cost <= cheapest_s + even_s {
                even.push((cost, at));
            }
            let holds_most =
                candidate.hit_blocks > 0 && 2 * candidate.hit_tokens as usize >= request.prompt_tokens;
            if holds_most {
                homes.push((cost, at));
            }
        }
        let rank = |(_, at): &(f64, usize)| {
            let Candidate { slot, hit_blocks, .. } = choice.candidates[*at];
            let block = request.blocks.get((hit_blocks as usize).wrapping_sub(1)).map_or(0, |block| block.0);
            (hit_blocks, xxh3_64_with_seed(&slot.0.to_le_bytes(), block))
        };
        let homes = homes.iter().filter(|(cost, _)| *cost <= cheapest_s + felt_s);
        let in_turn = || {
            let even = even.iter().filter(|(cost, _)| *cost <= cheapest_s + even_s);
            if choice.told_by > 0 && choice.unseen.siblings > 0.5 {
                let end = request.blocks.last().map_or(0, |block| block.0);
                let rank =
                    |at: usize| xxh3_64_with_seed(&choice.candidates[at].by_address.to_le_bytes(), end);
                return even.min_by_key(|(_, at)| rank(*at)).map_or(0, |(_, at)| *at);
            }
            even.min_by_key(|(_, at)| precedence(&choice.candidates[*at])).map_or(0, |(_, at)| *at)
        };
        homes.max_by_key(|home| rank(home)).map_or_else(in_turn, |(_, at)| *at)
    }
}

/// So many requests of others, and no more than are placed in thought.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
fn whole(count: f64) -> u32 {
    count.clamp(0.0, MOST_UNSEEN) as u32
}

fn works(choice: &Choice<'_>) -> Vec<Work> {
    choice.candidates.iter().enumerate().map(|(at, candidate)| Work::at(at, candidate, choice)).collect()
}
