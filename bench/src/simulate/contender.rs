//! Who takes part: the router's own policies with what each of them knows, and some that exist in simulation only.
//!
//! Next: [`run`](super::run) gives each what it knows.

use std::time::Duration;

use rand::Rng;
use router_core::adapters::AdapterOutlook;
use router_core::policy::{
    Choice, ColdChoice, IndexBound, IndexSource, IndexUse, LlmD, PrefixAware, SglangCacheAware, by_name,
};
use router_core::{Policy, PromptUse, RequestView};
use serde::{Deserialize, Serialize};

/// What a policy is in the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Roundhouse's default.
    Ours,
    /// Another router's.
    Peer,
    /// Something simple.
    Baseline,
    /// It knows what no router can know.
    Oracle,
}

impl Family {
    /// As in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Peer => "peer",
            Self::Baseline => "baseline",
            Self::Oracle => "oracle",
        }
    }
}

/// Which prompts another worker computes than the one that generates, where some do nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Splits {
    /// All.
    Always,
    /// Dynamo's rule: those of 2,048 new tokens and more, and those of which 70 % and more are new.
    LongNew,
    /// Where the router's own rule says that it pays.
    WherePays,
}

/// One of those who are compared.
#[derive(Clone, Copy)]
pub struct Contender {
    /// The policy's name.
    pub name: &'static str,
    /// What it is.
    pub family: Family,
    /// Which prompts it has computed by workers that do nothing else, where there are some.
    pub splits: Splits,
    make: fn() -> Option<Box<dyn Policy>>,
}

impl std::fmt::Debug for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contender").field("name", &self.name).finish_non_exhaustive()
    }
}

macro_rules! of_the_router {
    ($($name:literal $family:ident $splits:ident),* $(,)?) => {
        &[$(Contender {
            name: $name,
            family: Family::$family,
            splits: Splits::$splits,
            make: || by_name($name),
        }),*]
    };
}

/// Those that `--policies all` means.
const OF_THE_ROUTER: &[Contender] = of_the_router![
    "prefix_aware" Ours WherePays,
    "sglang_cache_aware" Peer Always,
    "sglang_cache_aware_old" Peer Always,
    "kv_aware" Peer Always,
    "dynamo" Peer LongNew,
    "llm_d" Peer Always,
    "llm_d_valve" Peer Always,
    "aibrix" Peer Always,
    "pstack_prefix" Peer Always,
    "pstack_session" Peer Always,
    "prefix_hash" Peer Always,
    "consistent_hash" Baseline Always,
    "least_load" Baseline Always,
    "power_of_two" Baseline Always,
    "round_robin" Baseline Always,
    "random" Baseline Always,
];

/// Those that must be asked for.
const SIMULATED_ONLY: &[Contender] = &[
    Contender {
        name: "oracle",
        family: Family::Oracle,
        splits: Splits::Always,
        make: || Some(Box::new(Oracle)),
    },
    Contender {
        name: "prefix_aware_reported",
        family: Family::Ours,
        splits: Splits::WherePays,
        make: || {
            // As Roundhouse's own workers do: their load every 100 ms, and what their caches hold at once.
            let (source, every) = (IndexSource::ReportedAndInFlight, Duration::from_millis(100));
            Some(Box::new(Reported { name: "prefix_aware_reported", source, every }))
        },
    },
    Contender {
        name: ASKING,
        family: Family::Ours,
        splits: Splits::WherePays,
        make: || {
            Some(Box::new(Reported {
                name: ASKING,
                source: IndexSource::Learned,
                every: Duration::from_secs(1),
            }))
        },
    },
    Contender {
        name: "min_ttft",
        family: Family::Oracle,
        splits: Splits::Always,
        make: || Some(Box::new(MinTtft)),
    },
    Contender {
        name: "llm_d_adapters",
        family: Family::Peer,
        splits: Splits::Always,
        make: || Some(Box::new(LlmDAdapters)),
    },
    Contender {
        name: "hash_two_blocks",
        family: Family::Baseline,
        splits: Splits::Always,
        make: || Some(Box::new(HashTwoBlocks)),
    },
    Contender {
        name: "cache_aware_smallest_tree",
        family: Family::Peer,
        splits: Splits::Always,
        make: || {
            Some(Box::new(SglangCacheAware {
                name: "cache_aware_smallest_tree",
                cold: ColdChoice::SmallestTree,
                ..SglangCacheAware::NEWER
            }))
        },
    },
];

impl Contender {
    /// The policy.
    #[must_use]
    pub fn policy(&self) -> Box<dyn Policy> {
        (self.make)().expect("the tables name policies that there are")
    }
}

/// All that can be named.
pub fn known() -> impl Iterator<Item = Contender> {
    OF_THE_ROUTER.iter().chain(SIMULATED_ONLY).copied()
}

/// The contenders of `--policies`: names, or `all`, which is the router's own policies and the oracle.
///
/// # Errors
/// A name that is nobody's, with those there are.
pub fn named(names: &[String]) -> anyhow::Result<Vec<Contender>> {
    let mut found: Vec<Contender> = Vec::new();
    for name in names {
        if name == "all" {
            found.extend(OF_THE_ROUTER.iter().chain(&SIMULATED_ONLY[..1]));
            continue;
        }
        let contender = known().find(|contender| contender.name == name);
        let Some(contender) = contender else {
            let all: Vec<_> = known().map(|contender| contender.name).collect();
            anyhow::bail!("--policies: there is no policy {name:?}; there are all, {}", all.join(", "));
        };
        found.push(contender);
    }
    let mut seen = Vec::new();
    found.retain(|contender| {
        !seen.contains(&contender.name) && {
            seen.push(contender.name);
            true
        }
    });
    Ok(found)
}

/// llm-d's default scorers with its scorer of adapters beside them, which operators may configure: 1 where some request for the adapter is, 0.8 where
/// there is a free place, else 0. It sees what this router has sent, at once; llm-d's own sees what engines said of it up to 50 ms ago.
#[derive(Debug)]
struct LlmDAdapters;

/// As much as a prefix that is cached whole.
const ADAPTER_WEIGHT: f64 = 3.0;

impl Policy for LlmDAdapters {
    fn name(&self) -> &'static str {
        "llm_d_adapters"
    }

    fn prompt_use(&self) -> PromptUse {
        LlmD.prompt_use()
    }

    fn index_use(&self) -> IndexUse {
        LlmD.index_use()
    }

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let score = |outlook: AdapterOutlook| match outlook {
            AdapterOutlook { waits_for: 0, takes_place: false, .. } => 1.0,
            AdapterOutlook { takes_place: true, .. } => 0.8,
            _ => 0.0,
        };
        let costs = LlmD.costs(request, choice).into_iter().enumerate();
        costs.map(|(at, cost)| cost + ADAPTER_WEIGHT * (1.0 - score(choice.adapter(at)))).collect()
    }
}

/// Ours, with what the workers' caches really hold and are about to hold, and with the time that the request would really wait at each of
/// them if nothing came after it: queues, memory, lengths of answers and speeds are known.
#[derive(Debug)]
struct Oracle;

impl Policy for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { source: IndexSource::ReportedAndInFlight, ..IndexUse::default() }
    }

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        PrefixAware.costs(request, choice)
    }
}

/// Ours, beside engines that nobody here wrote, which are asked for counts of their requests.
pub const ASKING: &str = "prefix_aware_asking";

/// Ours, beside workers that say how they are.
#[derive(Debug)]
struct Reported {
    name: &'static str,
    source: IndexSource,
    every: Duration,
}

impl Policy for Reported {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { source: self.source, reports_every: Some(self.every), ..IndexUse::default() }
    }

    fn most_workers(&self) -> u32 {
        PrefixAware.most_workers()
    }

    fn binds_late(&self) -> bool {
        PrefixAware.binds_late()
    }

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        PrefixAware.costs(request, choice)
    }

    fn pick(&self, request: &RequestView<'_>, choice: &Choice<'_>, rng: &mut dyn Rng) -> usize {
        PrefixAware.pick(request, choice, rng)
    }
}

/// The least time to the first token as predicted from exact caches and queues: the last row of what is known of the trace.
#[derive(Debug)]
struct MinTtft;

impl Policy for MinTtft {
    fn name(&self) -> &'static str {
        "min_ttft"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { source: IndexSource::Reported, ..IndexUse::default() }
    }

    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        choice.candidates.iter().map(|one| one.queued_s + one.own_s).collect()
    }
}

/// The first two blocks on the hash ring, without a bound.
#[derive(Debug)]
struct HashTwoBlocks;

impl Policy for HashTwoBlocks {
    fn name(&self) -> &'static str {
        "hash_two_blocks"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { bound: IndexBound::Tokens(1_024), ..IndexUse::default() }
    }

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let key = request.blocks.iter().take(2).next_back().map_or(0, |block| block.0);
        let first = (choice.ring)().walk(key).next();
        choice.candidates.iter().map(|one| if Some(one.slot) == first { 0.0 } else { 1.0 }).collect()
    }

    fn pick(&self, request: &RequestView<'_>, choice: &Choice<'_>, _: &mut dyn Rng) -> usize {
        self.costs(request, choice).iter().position(|cost| *cost == 0.0).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_of_the_router_takes_part_under_its_own_name() {
        let all = named(&["all".into()]).unwrap();
        for (name, _) in router_core::policy::policies() {
            assert!(all.iter().any(|contender| contender.name == name), "{name}");
        }
        for contender in known() {
            assert_eq!(contender.policy().name(), contender.name);
        }
        assert_eq!(named(&["random".into(), "random".into()]).unwrap().len(), 1);
        assert!(named(&["fast".into()]).unwrap_err().to_string().contains("prefix_aware"));
    }
}
