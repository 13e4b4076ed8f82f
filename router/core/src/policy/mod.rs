//! Policies: which of the candidates gets a request. One file each.
//!
//! A policy is a pure function of what it is given. It keeps no counts, sees no clock and never touches the tree: the
//! hits come to it as values. Next on the path: the decider reserves what was picked, under the same lock.

mod consistent_hash;
mod least_load;
mod power_of_two;
mod prefix_aware;
mod random;
mod round_robin;

use rand::Rng;

use crate::fleet::Ring;
use crate::ledger::LoadReading;
use crate::request::{PromptUse, RequestView};
use crate::worker::WorkerSlot;

pub use consistent_hash::ConsistentHash;
pub use least_load::LeastLoad;
pub use power_of_two::PowerOfTwo;
pub use prefix_aware::PrefixAware;
pub use random::Random;
pub use round_robin::RoundRobin;

/// A worker that may get the request, as it stands at this moment.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Which worker.
    pub slot: WorkerSlot,
    /// What the router has in flight there.
    pub load: LoadReading,
    /// Prompt tokens that its prefix cache is expected to hold; 0 for policies that do not read prefixes.
    pub hit_tokens: usize,
}

/// What a policy chooses from; never empty.
pub struct Choice<'a> {
    /// The candidates, in fleet order.
    pub candidates: &'a [Candidate],
    /// The ring over the whole fleet, made on first use.
    pub ring: &'a dyn Fn() -> &'a Ring,
}

/// Picks a worker for a request.
pub trait Policy: Send + Sync {
    /// The name in `--policy`.
    fn name(&self) -> &'static str;

    /// What it reads of prompts. If that is all, hits are looked up for it, and its routes entered in the prefix tree.
    fn prompt_use(&self) -> PromptUse {
        PromptUse::None
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

/// The lowest cost; among equals the fewest requests, then the one that was picked longest ago, so that an idle fleet
/// is filled in turn.
fn cheapest(costs: &[f64], candidates: &[Candidate]) -> usize {
    let better = |one: usize, two: usize| {
        let order = |at: usize| (candidates[at].load.requests, candidates[at].load.last_pick);
        costs[one].total_cmp(&costs[two]).then_with(|| order(one).cmp(&order(two))).is_lt()
    };
    (1..candidates.len()).fold(0, |best, at| if better(at, best) { at } else { best })
}

/// Why no worker was picked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PickError {
    /// No worker is usable.
    #[error("no worker is usable: of {total}, {down} are down and {draining} draining")]
    NoneUsable {
        /// Workers that are down.
        down: usize,
        /// Workers that are up, and being drained by an operator.
        draining: usize,
        /// Workers in the fleet.
        total: usize,
    },
    /// There are workers that serve the model, but none of them is usable.
    #[error("no worker that serves model {model:?} is usable")]
    ModelDown {
        /// What was asked for.
        model: String,
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
