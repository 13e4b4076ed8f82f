//! Data-parallel ranks: engines behind one address, each with a scheduler and a KV cache of its own, and so each a worker of its own.
//!
//! Only transports and dispatch read how a rank is told. Next: [`worker`](crate::worker).

use crate::worker::{WorkerId, WorkerSpec};

/// Which of the ranks behind an address a worker is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DpRank {
    /// Its number, from 0.
    pub number: u16,
    /// How a request says that it is meant.
    pub told_by: ToldBy,
}

/// How a request says which rank it is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub enum ToldBy {
    /// By a header alone, which leaves its body as it came.
    #[default]
    Header,
    /// By the header, and by a member of that name in its body.
    Field(&'static str),
}

/// The ranks behind an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DpRanks {
    /// How many there are.
    pub count: u16,
    /// How requests say which they are for.
    pub told_by: ToldBy,
}

impl DpRanks {
    /// The workers that one with these ranks is, in their order: `a-dp0`, `a-dp1` and so on.
    pub fn of(self, endpoint: &WorkerSpec) -> impl Iterator<Item = WorkerSpec> {
        let DpRanks { count, told_by } = self;
        let rank = move |number| WorkerSpec {
            id: WorkerId::new(&format!("{}{}", endpoint.id, suffix(number))),
            dp_rank: Some(DpRank { number, told_by }),
            ..endpoint.clone()
        };
        (0..count).map(rank)
    }
}

impl WorkerSpec {
    /// What its address is named: its own name, or what all ranks there begin with.
    #[must_use]
    pub fn endpoint_name(&self) -> &str {
        let id = self.id.as_str();
        self.dp_rank.and_then(|rank| id.strip_suffix(&suffix(rank.number))).unwrap_or(id)
    }

    /// Whether both are ranks of one endpoint: what ends the one ends the other.
    #[must_use]
    pub fn shares_endpoint(&self, other: &Self) -> bool {
        self.dp_rank.is_some() && other.dp_rank.is_some() && self.address == other.address
    }
}

fn suffix(number: u16) -> String {
    format!("-dp{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_workers_that_share_an_address_and_the_beginning_of_their_names() {
        let endpoint = WorkerSpec::new(WorkerId::new("a-dp1"), "http://a:8000".into());
        assert_eq!(endpoint.endpoint_name(), "a-dp1", "a name is nothing else without ranks");
        let ranks: Vec<_> = DpRanks { count: 12, told_by: ToldBy::Header }.of(&endpoint).collect();
        assert_eq!((ranks.len(), ranks[11].id.as_str()), (12, "a-dp1-dp11"));
        assert!(ranks.iter().all(|rank| rank.address == endpoint.address && rank.endpoint_name() == "a-dp1"));
        assert!(ranks.is_sorted_by_key(|rank| rank.dp_rank));
        assert!(ranks[0].shares_endpoint(&ranks[1]) && !ranks[0].shares_endpoint(&endpoint));
        let elsewhere = WorkerSpec { address: "http://b:8000".into(), ..ranks[1].clone() };
        assert!(!ranks[0].shares_endpoint(&elsewhere));
    }
}
