//! Which workers there should be: those that operators have named, and those that sources have found.
//!
//! Each source owns what it has found, and says all of it anew whenever it changes; operators edit what they have named. Knows no way to
//! a worker. Next: [`fleet`](crate::fleet), which makes it so.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use router_core::{WorkerId, WorkerSpec};

/// Whether a worker that was found is to get new requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NewRequests {
    /// As any other.
    Taken,
    /// Whoever runs it is taking it away, or has not put it to work: what it has goes on.
    Withheld,
}

/// A worker that a source has found.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Found {
    /// What an operator could have written for it.
    pub spec: WorkerSpec,
    /// Whether it is to get new requests.
    pub new_requests: NewRequests,
}

/// A worker that there should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// What it is.
    pub worker: Found,
    /// Which source has found it; none has, if an operator named it.
    pub source: Option<Arc<str>>,
}

/// What is desired, by who desires it.
#[derive(Clone, Default, Debug)]
pub struct Desired {
    /// What operators have named.
    pub named: Vec<WorkerSpec>,
    /// What each source has found. In the order of their names, so that it makes no difference which was first.
    found: BTreeMap<Arc<str>, Vec<Found>>,
}

impl Desired {
    /// All that `source` has found now, in place of what it had found before. Returns whether that changes anything.
    pub fn publish(&mut self, source: &Arc<str>, found: Vec<Found>) -> bool {
        let before = self.found.insert(Arc::clone(source), found);
        before.as_ref() != self.found.get(source)
    }

    /// Every worker once: of those of one name, or one address and rank there, the one that an operator has named, or else the first source's.
    #[must_use]
    pub fn whole(&self) -> Vec<Wanted> {
        let named = self.named.iter().map(|spec| Wanted {
            worker: Found { spec: spec.clone(), new_requests: NewRequests::Taken },
            source: None,
        });
        let mut whole: Vec<_> = named.collect();
        let mut taken = Taken::default();
        self.named.iter().for_each(|spec| taken.add(spec));
        for (source, found) in &self.found {
            for worker in found {
                if !taken.has(&worker.spec) {
                    taken.add(&worker.spec);
                    whole.push(Wanted { worker: worker.clone(), source: Some(Arc::clone(source)) });
                }
            }
        }
        whole
    }

    /// What `source` has found and [`Desired::whole`] leaves out because another worker has its name: not what is the same worker.
    #[must_use]
    pub fn left_out(&self, source: &str) -> Vec<WorkerSpec> {
        let mut by_name: HashMap<_, _> = self.named.iter().map(|spec| (&spec.id, &spec.address)).collect();
        for Found { spec, .. } in self.found.values().flatten() {
            by_name.entry(&spec.id).or_insert(&spec.address);
        }
        let specs = self.found.get(source).into_iter().flatten().map(|found| &found.spec);
        specs.filter(|spec| by_name.get(&spec.id) != Some(&&spec.address)).cloned().collect()
    }
}

/// The names and places that have a worker.
#[derive(Default)]
struct Taken<'a> {
    ids: HashSet<&'a WorkerId>,
    /// By address, the ranks there; `None` where all of it is one worker.
    ranks: HashMap<&'a str, HashSet<Option<u16>>>,
}

impl<'a> Taken<'a> {
    fn add(&mut self, spec: &'a WorkerSpec) {
        self.ids.insert(&spec.id);
        self.ranks.entry(&spec.address).or_default().insert(rank_of(spec));
    }

    fn has(&self, spec: &WorkerSpec) -> bool {
        let rank = rank_of(spec);
        let overlaps = |ranks: &HashSet<_>| rank.is_none() || ranks.contains(&None) || ranks.contains(&rank);
        self.ids.contains(&spec.id) || self.ranks.get(&*spec.address).is_some_and(overlaps)
    }
}

/// Whether two workers that are named would be one engine twice: it would get twice its share. In each role it may be there once.
#[must_use]
pub fn is_same_engine(one: &WorkerSpec, other: &WorkerSpec) -> bool {
    let (ranks, is_embedded) = ([one, other].map(rank_of), one.address.starts_with("embedded:"));
    !is_embedded
        && (one.role, &one.address) == (other.role, &other.address)
        && (ranks[0] == ranks[1] || ranks.contains(&None))
}

fn rank_of(spec: &WorkerSpec) -> Option<u16> {
    spec.dp_rank.map(|rank| rank.number)
}

#[cfg(test)]
mod tests {
    use router_core::{DpRanks, ToldBy};

    use super::*;

    fn spec(id: &str, host: &str) -> WorkerSpec {
        WorkerSpec::new(WorkerId::new(id), format!("http://{host}:8000"))
    }

    fn found(id: &str, host: &str) -> Found {
        Found { spec: spec(id, host), new_requests: NewRequests::Taken }
    }

    fn told(desired: &Desired) -> Vec<(String, String, Option<String>)> {
        let tell = |wanted: Wanted| {
            let WorkerSpec { id, address, .. } = wanted.worker.spec;
            (id.to_string(), address, wanted.source.map(|source| source.to_string()))
        };
        desired.whole().into_iter().map(tell).collect()
    }

    fn expected(list: &[(&str, &str, Option<&str>)]) -> Vec<(String, String, Option<String>)> {
        let own = |(id, host, source): &(&str, &str, Option<&str>)| {
            ((*id).to_owned(), format!("http://{host}:8000"), source.map(str::to_owned))
        };
        list.iter().map(own).collect()
    }

    #[test]
    fn each_source_replaces_what_it_found_and_nothing_else() {
        let mut desired = Desired { named: vec![spec("w0", "a")], ..Desired::default() };
        let (one, two): (Arc<str>, Arc<str>) = ("k8s://one".into(), "k8s://two".into());
        assert!(desired.publish(&two, vec![found("x", "x")]));
        assert!(desired.publish(&one, vec![found("p", "p"), found("q", "q")]));
        assert!(!desired.publish(&one, vec![found("p", "p"), found("q", "q")]), "no news");
        let all = [
            ("w0", "a", None),
            ("p", "p", Some("k8s://one")),
            ("q", "q", Some("k8s://one")),
            ("x", "x", Some("k8s://two")),
        ];
        assert_eq!(told(&desired), expected(&all));
        assert!(desired.publish(&one, vec![found("q", "q")]));
        assert_eq!(told(&desired), expected(&[all[0], all[2], all[3]]));
        assert!(desired.publish(&two, Vec::new()));
        assert_eq!(told(&desired), expected(&[all[0], all[2]]));
    }

    #[test]
    fn whether_new_requests_are_withheld_is_news() {
        let (mut desired, source) = (Desired::default(), Arc::from("k8s://one"));
        desired.publish(&source, vec![found("p", "p")]);
        let leaving = Found { new_requests: NewRequests::Withheld, ..found("p", "p") };
        assert!(desired.publish(&source, vec![leaving.clone()]));
        assert_eq!(desired.whole()[0].worker, leaving);
    }

    #[test]
    fn ranks_of_one_address_stand_side_by_side_and_not_beside_all_of_it() {
        let ranks = |id: &str, host: &str, count| -> Vec<_> {
            let ranks = DpRanks { count, told_by: ToldBy::Header };
            let found = |spec| Found { spec, new_requests: NewRequests::Taken };
            ranks.of(&spec(id, host)).map(found).collect()
        };
        let mut desired = Desired { named: vec![spec("w0", "a")], ..Desired::default() };
        desired.named.push(ranks("w1", "b", 1).remove(0).spec);
        let source = Arc::from("k8s://one");
        let all = [ranks("p", "a", 2), ranks("q", "b", 2), ranks("r", "c", 2), vec![found("s", "c")]];
        desired.publish(&source, all.concat());
        let ids: Vec<_> = told(&desired).into_iter().map(|(id, ..)| id).collect();
        assert_eq!(ids, ["w0", "w1-dp0", "q-dp1", "r-dp0", "r-dp1"]);
        assert!(desired.left_out("k8s://one").is_empty(), "they are the same workers");
    }

    #[test]
    fn of_one_name_or_address_there_is_one_worker() {
        let mut desired = Desired { named: vec![spec("w0", "a")], ..Desired::default() };
        let (one, two): (Arc<str>, Arc<str>) = ("k8s://one".into(), "k8s://two".into());
        desired.publish(&two, vec![found("p", "elsewhere"), found("r", "r"), found("q", "q")]);
        desired.publish(&one, vec![found("w0", "b"), found("p", "p"), found("same", "a"), found("q", "q")]);
        let all = [
            ("w0", "a", None),
            ("p", "p", Some("k8s://one")),
            ("q", "q", Some("k8s://one")),
            ("r", "r", Some("k8s://two")),
        ];
        assert_eq!(told(&desired), expected(&all));
        let left_out = |source| {
            let ids = desired.left_out(source).into_iter().map(|spec| spec.id.to_string());
            ids.collect::<Vec<_>>()
        };
        assert_eq!((left_out("k8s://one"), left_out("k8s://two")), (vec!["w0".into()], vec!["p".into()]));
    }
}
