//! Adapters (LoRA): which of a model's a worker computes side by side.
//!
//! An engine has places for few of them at a time (vLLM's `--max-loras`, 1 unless it is told otherwise). A request for another one waits in it until all
//! requests of one of those that have a place are over, and is passed by whatever comes for these. So who is sent where others' adapters have all
//! places may wait for minutes beside an idle worker.

use std::num::NonZeroU64;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

/// An adapter, by a hash of its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Adapter(NonZeroU64);

impl Adapter {
    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self(NonZeroU64::new(xxh3_64(name.as_bytes())).unwrap_or(NonZeroU64::MIN))
    }
}

/// What a request for an adapter would meet at a worker.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct AdapterOutlook {
    /// How many requests of another adapter have to end until this one has a place; 0 where it has one, or takes a free one.
    pub waits_for: u32,
    /// Whether it would take a place that is free.
    pub takes_place: bool,
    /// Share of the worker's places that are taken.
    pub taken_share: f32,
}

/// Adapters of the requests that a worker has been sent. A request for the model itself needs no place.
#[derive(Debug, Default)]
pub(crate) struct AdapterPlaces {
    /// How many there are; 0 while the worker has not said.
    count: usize,
    /// Who has a place or waits for one, in the order in which they came, and how many requests of each.
    present: SmallVec<[(Adapter, u32); 4]>,
}

impl AdapterPlaces {
    /// The worker says how many there are; 0 for as many as anybody wants.
    pub(crate) fn set_count(&mut self, count: usize) {
        self.count = count;
    }

    fn is_full(&self) -> bool {
        self.count > 0 && self.present.len() >= self.count
    }

    fn is_present(&self, adapter: Adapter) -> bool {
        self.present.iter().any(|(present, _)| *present == adapter)
    }

    /// Whether a request would be computed beside those that are there.
    pub(crate) fn has_place(&self, adapter: Adapter) -> bool {
        !self.is_full() || self.is_present(adapter)
    }

    /// Where all places are taken, whose would be free first if nothing more came for it.
    pub(crate) fn first_to_end(&self) -> Option<Adapter> {
        let fewest = self.present.iter().filter(|_| self.is_full()).min_by_key(|(_, requests)| *requests);
        fewest.map(|(adapter, _)| *adapter)
    }

    /// What a request meets; `before` it so many other adapters wait for a place, if it has to wait.
    pub(crate) fn outlook(&self, adapter: Adapter, before: Option<usize>) -> AdapterOutlook {
        #[expect(clippy::cast_precision_loss, reason = "few adapters")]
        let taken_share = self.present.len() as f32 / self.count.max(1) as f32;
        AdapterOutlook {
            waits_for: before.map_or(0, |before| self.ends_until_place(before)),
            takes_place: before.is_none() && !self.is_present(adapter),
            taken_share: taken_share.min(1.0),
        }
    }

    /// The worker is sent a request.
    pub(crate) fn enter(&mut self, adapter: Option<Adapter>) {
        let Some(adapter) = adapter else { return };
        match self.present.iter_mut().find(|(present, _)| *present == adapter) {
            Some((_, requests)) => *requests += 1,
            None => self.present.push((adapter, 1)),
        }
    }

    /// A request that was sent there is over.
    pub(crate) fn leave(&mut self, adapter: Option<Adapter>) {
        let at = adapter.and_then(|adapter| self.present.iter().position(|(present, _)| *present == adapter));
        let Some(at) = at else { return };
        self.present[at].1 -= 1;
        if self.present[at].1 == 0 {
            self.present.remove(at);
        }
    }

    /// Of an adapter without a place: how many requests of another one are to end until it has one, if so many adapters go `before` it.
    fn ends_until_place(&self, before: usize) -> u32 {
        let mut requests: SmallVec<[u32; 16]> = self.present.iter().map(|(_, requests)| *requests).collect();
        requests.sort_unstable();
        requests.get(before).or(requests.last()).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_finds_no_place_waits_for_those_who_have_the_fewest_requests() {
        let mut places = AdapterPlaces::default();
        let [one, two, three] = ["one", "two", "three"].map(|name| Some(Adapter::named(name)));
        for adapter in [one, one, two, two, two, None] {
            places.enter(adapter);
        }
        let [first, last] = [one, three].map(Option::unwrap);
        assert!(places.has_place(last), "nobody has said how many there are");
        assert_eq!(places.first_to_end(), None);
        places.set_count(2);
        assert!(places.has_place(first) && !places.has_place(last));
        assert_eq!(places.first_to_end(), one);
        assert_eq!([0, 1, 2].map(|before| places.outlook(last, Some(before)).waits_for), [2, 3, 3]);
        places.leave(one);
        assert!(!places.has_place(last));
        places.leave(one);
        places.leave(three);
        assert!(places.has_place(last) && places.first_to_end().is_none());
        let outlook = AdapterOutlook { waits_for: 0, takes_place: true, taken_share: 0.5 };
        assert_eq!(places.outlook(last, None), outlook);
        places.enter(three);
        assert!(!places.outlook(last, None).takes_place);
    }
}
