//! Policies: which of the candidates gets a request. One file each.
//!
//! A policy is a pure function of what it is given. It keeps no counts, sees no clock and never touches the tree: the
//! hits come to it as values. Next on the path: the decider reserves what was picked, under the same lock.

mod aibrix;
mod consistent_hash;
mod dynamo;
mod index_use;
mod kv_aware;
mod least_load;
mod llm_d;
mod power_of_two;
mod prefix_aware;
mod prefix_hash;
mod pstack;
mod random;
mod round_robin;
mod sglang_cache_aware;

use rand::Rng;
use roundhouse_types::RouterPlace;

use crate::adapters::AdapterOutlook;
use crate::fleet::Ring;
use crate::ledger::LoadReading;
use crate::models::PoolNumber;
use crate::prefix::popularity::Followers;
use crate::reports::{LoadReport, QueueSource};
use crate::request::{Leg, PromptUse, RequestView};
use crate::speed::{Prefill, PrefillSpeed};
use crate::unseen::Unseen;
use crate::worker::WorkerSlot;

pub use aibrix::Aibrix;
pub use consistent_hash::ConsistentHash;
pub use dynamo::Dynamo;
pub use index_use::{IndexBound, IndexSource, IndexUse};
pub use kv_aware::KvAware;
pub use least_load::LeastLoad;
pub use llm_d::{LlmD, LlmDValve};
pub use power_of_two::PowerOfTwo;
pub use prefix_aware::PrefixAware;
pub use prefix_hash::PrefixHash;
pub use pstack::{PstackPrefix, PstackSession};
pub use random::Random;
pub use round_robin::RoundRobin;
pub use sglang_cache_aware::{ColdChoice, SglangCacheAware};

/// A worker that may get the request, as it stands at this moment. Small, since a pick among thousands makes thousands.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Which worker.
    pub slot: WorkerSlot,
    /// Its place in the fleet.
    pub(crate) place: u32,
    /// Which workers it is alike.
    pub(crate) pool: PoolNumber,
    /// Its place in the order of addresses.
    pub(crate) by_address: u32,
    /// What the router has in flight there.
    pub load: LoadReading,
    /// Prompt tokens that its prefix cache is expected to hold; 0 for policies that do not read prefixes.
    pub hit_tokens: u32,
    /// The same in blocks of the prompt.
    pub hit_blocks: u32,
    /// Blocks that the tree knows it to hold in all; 0 for policies that do not ask for it.
    pub tree_blocks: u32,
    /// Tokens that its KV cache has room for; 0 where that is not known.
    pub kv_capacity_tokens: u32,
    /// Service that it still owes to requests without a first token, in seconds.
    pub queued_s: f64,
    /// Of these, that of requests in line which go before this one.
    pub line_s: f64,
    /// What the request's own prefill would take there, in seconds.
    pub own_s: f64,
    /// How many times longer than [`Choice::speed`] says it takes.
    pub ratio: f32,
    /// Requests in flight there on average of late.
    pub usual_requests: f32,
    /// Whether the request would be computed in one step with some that wait.
    pub joins_step: bool,
}

impl Candidate {
    /// A worker of which nothing is known yet.
    #[must_use]
    pub fn new(slot: WorkerSlot) -> Self {
        Self {
            slot,
            place: 0,
            by_address: 0,
            pool: PoolNumber::default(),
            load: LoadReading::default(),
            hit_tokens: 0,
            hit_blocks: 0,
            tree_blocks: 0,
            kv_capacity_tokens: 0,
            queued_s: 0.0,
            line_s: 0.0,
            own_s: 0.0,
            ratio: 1.0,
            usual_requests: 0.0,
            joins_step: false,
        }
    }

    /// Prompt tokens that it would have to compute; at least one, from which the first token is drawn.
    #[must_use]
    pub fn new_tokens(&self, request: &RequestView<'_>) -> usize {
        request.prompt_tokens.saturating_sub(self.hit_tokens as usize).max(1)
    }

    /// What the request would make it compute: of a prompt that comes from another worker the last token, from which the next is drawn.
    #[must_use]
    pub fn prefill(&self, request: &RequestView<'_>) -> Prefill {
        if request.leg == Leg::Decode {
            return Prefill { new_tokens: 1, cached_tokens: request.prompt_tokens.saturating_sub(1) };
        }
        Prefill { new_tokens: self.new_tokens(request), cached_tokens: self.hit_tokens as usize }
    }

    /// It holds the first `blocks` of the prompt.
    pub fn hit(&mut self, request: &RequestView<'_>, blocks: usize, speed: &PrefillSpeed) {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        self.hit_blocks = count(blocks);
        self.hit_tokens = count(request.covered_tokens(blocks));
        self.own_s = f64::from(self.ratio) * speed.seconds(self.prefill(request));
    }
}

/// What a policy chooses from; never empty.
pub struct Choice<'a> {
    /// The candidates.
    pub candidates: &'a [Candidate],
    /// What each of them said of its load last; empty where none says anything.
    pub reports: &'a [Option<LoadReport>],
    /// What the request's adapter meets at each of them; empty where it is for none.
    pub outlooks: &'a [AdapterOutlook],
    /// Of the prompt, tokens that requests in flight at each of them have too; empty unless the policy [asks](Policy::counts_shared).
    pub shared_tokens: &'a [u32],
    /// Requests in flight at all of them.
    pub requests: u64,
    /// Those without a first token.
    pub prefilling: u64,
    /// How many of them have some of those.
    pub busy: u64,
    /// Prompt tokens of all requests in flight.
    pub context_tokens: u64,
    /// What share of the fleet was looked at for candidates.
    pub share: f64,
    /// Workers of the fleet.
    pub workers: u32,
    /// This router's place among those that follow the workers' load, or tell each other what they do.
    pub router_place: RouterPlace,
    /// Others that tell this one what they do; all that is in flight is also theirs.
    pub told_by: u32,
    /// The ring over the whole fleet, made on first use.
    pub ring: &'a dyn Fn() -> &'a Ring,
    /// Requests a second of late that come to the candidates, and to those of the fleet like them that were not looked at.
    pub arrivals_per_s: f64,
    /// Turns that are expected to follow this request in its session, if that begins with it; they will come to the same worker.
    pub later_turns: f64,
    /// Tokens of an answer, on average of late; 0 where nothing is known of that.
    pub answer_tokens: f64,
    /// Who is expected to come soon for what somebody holds of this prompt.
    pub followers: Followers,
    /// What other routers may have decided, of which nothing is known yet.
    pub unseen: Unseen,
    /// How fast workers like the candidates compute prompts, as learned.
    pub speed: PrefillSpeed,
}

impl Choice<'_> {
    /// What the candidate at that index said of its load last.
    #[must_use]
    pub fn report(&self, at: usize) -> Option<&LoadReport> {
        self.reports.get(at)?.as_ref()
    }

    /// What the request's adapter meets at the candidate at that index; nothing where it is for none, or the worker does not say for how many it
    /// has places.
    #[must_use]
    pub fn adapter(&self, at: usize) -> AdapterOutlook {
        self.outlooks.get(at).copied().unwrap_or_default()
    }

    /// Requests waiting there: as reported, or those without a first token.
    #[must_use]
    pub fn waiting_requests(&self, at: usize) -> u32 {
        let own = self.candidates[at].load.prefilling;
        match self.report(at) {
            Some(report) if report.queue == QueueSource::Told => report.waiting,
            // What it counted is old: the ledger knows its own part better.
            Some(report) => own.saturating_add(report.others.waiting),
            None => own,
        }
    }

    /// Share of its KV cache that sequences hold, from 0 to 1: as reported, or by the prompts in flight; 0 if neither is known.
    #[must_use]
    pub fn kv_usage(&self, at: usize) -> f64 {
        let Candidate { load, kv_capacity_tokens, .. } = &self.candidates[at];
        let by_ledger = || match kv_capacity_tokens {
            0 => 0.0,
            capacity => (f64::from(load.context_tokens) / f64::from(*capacity)).min(1.0),
        };
        match self.report(at) {
            Some(report) if report.queue == QueueSource::Told => report.kv_usage(),
            Some(report) if report.others.requests > 0 => report.kv_usage().max(by_ledger()),
            Some(_) | None => by_ledger(),
        }
    }
}

/// Picks a worker for a request.
pub trait Policy: Send + Sync {
    /// The name in `--policy`.
    fn name(&self) -> &'static str;

    /// What it reads of prompts. If that is all, hits are looked up for it, and its routes entered in the prefix tree.
    fn prompt_use(&self) -> PromptUse {
        PromptUse::None
    }

    /// Whether requests wait in the router while their worker has enough to compute.
    fn binds_late(&self) -> bool {
        false
    }

    /// How many workers it wants to look at. In a larger fleet it gets so many, other ones each time, and as many of those that hold most of the prompt.
    fn most_workers(&self) -> u32 {
        u32::MAX
    }

    /// Whether it goes by how much the tree knows each worker to hold.
    fn wants_tree_sizes(&self) -> bool {
        false
    }

    /// Whether it goes by how much of a prompt requests in flight hold already.
    fn counts_shared(&self) -> bool {
        false
    }

    /// What it knows of caches and loads beside the ledger. The router gives every policy the same tree; simulation gives a peer's
    /// what the peer has.
    fn index_use(&self) -> IndexUse {
        IndexUse::default()
    }

    /// What each candidate would cost, in the policy's own unit, lower is better; `costs[i]` is that of
    /// `choice.candidates[i]`. For policies that draw lots: what the draw goes by.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64>;

    /// Index of the candidate that gets the request.
    fn pick(&self, request: &RequestView<'_>, choice: &Choice<'_>, rng: &mut dyn Rng) -> usize {
        let _ = rng;
        cheapest(&self.costs(request, choice), choice.candidates)
    }
}

/// The lowest cost; among equals whoever comes first.
fn cheapest(costs: &[f64], candidates: &[Candidate]) -> usize {
    let better = |one: usize, two: usize| {
        let order = || precedence(&candidates[one]).cmp(&precedence(&candidates[two]));
        costs[one].total_cmp(&costs[two]).then_with(order).is_lt()
    };
    (1..candidates.len()).fold(0, |best, at| if better(at, best) { at } else { best })
}

/// What is lower comes first among equals: the fewest requests, then the one that was picked longest ago, so that an idle fleet is filled in
/// turn.
fn precedence(candidate: &Candidate) -> (u32, u64) {
    (candidate.load.requests, candidate.load.last_pick)
}

/// Why no worker was picked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PickError {
    /// No worker is usable.
    #[error("no {}worker is usable: of {total}, {down} are down and {draining} draining", if *prefill { "prefill " } else { "" })]
    NoneUsable {
        /// Of those that do nothing but compute prompts.
        prefill: bool,
        /// Workers that are down.
        down: usize,
        /// Workers that are up, and being drained by an operator.
        draining: usize,
        /// All of them.
        total: usize,
    },
    /// There are workers that serve the model, but none of them is usable.
    #[error("no worker that serves model {model:?} is usable")]
    ModelDown {
        /// What was asked for.
        model: String,
    },
    /// None of the workers that have said what they serve has this model, and those that have not are not usable.
    #[error(
        "model {model:?} is not served by the workers that have said what they serve (known models: {}); \
         workers that have not said so yet: {untold}, none of them usable",
        known.join(", ")
    )]
    ModelUntold {
        /// What was asked for.
        model: String,
        /// What there is, sorted.
        known: Vec<String>,
        /// Workers that have not said what they serve.
        untold: usize,
    },
    /// All workers have said what they serve, and this is not among it.
    #[error("model {model:?} is not served here; known models: {}", known.join(", "))]
    UnknownModel {
        /// What was asked for.
        model: String,
        /// What there is, sorted.
        known: Vec<String>,
    },
    /// Every worker that could serve the request has been tried.
    #[error("all {tried} workers that could serve the request have been tried")]
    AllTried {
        /// How many were.
        tried: usize,
    },
    /// Nobody has time to spare for a background request at present.
    #[error("no worker has time to spare for a background request")]
    NoneSpare,
}

/// A policy and the line that describes it, by name.
type Entry = (&'static str, &'static str, fn() -> Box<dyn Policy>);

const POLICIES: &[Entry] = &[
    ("prefix_aware", "least expected work: what is queued, what is not cached, who would be delayed", || {
        Box::new(PrefixAware)
    }),
    ("least_load", "fewest requests in flight", || Box::new(LeastLoad)),
    ("power_of_two", "the less loaded of two drawn at random", || Box::new(PowerOfTwo)),
    ("round_robin", "each worker in turn", || Box::new(RoundRobin)),
    ("random", "any worker", || Box::new(Random)),
    ("consistent_hash", "by session or user on a hash ring, with bounded load", || Box::new(ConsistentHash)),
    ("sglang_cache_aware", "SGLang's and smg's: the longest match above 30 %, unless imbalanced", || {
        Box::new(SglangCacheAware::NEWER)
    }),
    ("sglang_cache_aware_old", "the same of older versions: above 50 %, else the smallest tree", || {
        Box::new(SglangCacheAware::OLDER)
    }),
    ("kv_aware", "vllm-router's and LMetric: prefill tokens times requests", || Box::new(KvAware)),
    ("dynamo", "Dynamo's: blocks to compute plus blocks held", || Box::new(Dynamo)),
    ("llm_d", "llm-d's default scorers: queue, KV usage and prefix", || Box::new(LlmD)),
    ("llm_d_valve", "llm-d's affinity valve: the warm worker until it is a second behind", || {
        Box::new(LlmDValve)
    }),
    ("aibrix", "AIBrix's: the best match that is not overloaded", || Box::new(Aibrix)),
    ("pstack_prefix", "production-stack's: the longest match, whatever the load", || Box::new(PstackPrefix)),
    ("pstack_session", "production-stack's: by session on a hash ring", || Box::new(PstackSession)),
    ("prefix_hash", "the first 256 tokens on a hash ring, with bounded load", || Box::new(PrefixHash)),
];

/// Names and descriptions of all policies, the default first.
pub fn policies() -> impl Iterator<Item = (&'static str, &'static str)> {
    POLICIES.iter().map(|(name, about, _)| (*name, *about))
}

/// The policy of that name.
#[must_use]
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    POLICIES.iter().find(|(known, ..)| *known == name).map(|(.., make)| make())
}

#[cfg(test)]
mod tests;
