//! Models that workers have named, as bits, so that a pick can tell from a word whether a worker may serve a request.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use crate::adapters::Adapter;

/// Models beyond these share one bit.
const OWN_BITS: usize = 31;
const OTHERS: u32 = 1 << OWN_BITS;
/// Pools, together with that of workers which have not said what they serve; those beyond share the last.
pub(crate) const MOST_POOLS: usize = 64;

/// The names that have been told, and by how many of the present workers.
#[derive(Debug, Default)]
pub(crate) struct ModelNames {
    names: RwLock<Names>,
    /// Those that workers name first.
    pools: RwLock<HashMap<Box<str>, PoolNumber>>,
    /// Whether any of the names is an adapter's.
    has_adapters: AtomicBool,
}

#[derive(Debug, Default)]
struct Names {
    known: HashMap<Box<str>, Known>,
    /// How many of them have a bit of their own, in the order in which they were first told. They keep it.
    own: usize,
    /// Models that workers name first, which is what they take a request for that names none; and how many do.
    first: HashMap<Box<str>, u32>,
}

#[derive(Debug)]
struct Known {
    bit: u32,
    workers: u32,
    /// Whether it is an adapter's, for whoever listed it last.
    is_adapter: bool,
}

/// Workers that name the same model first, by number; 0 is for those that have named none. See [`pools`](crate::pools).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct PoolNumber(pub(crate) u8);

impl PoolNumber {
    pub(crate) fn index(self) -> usize {
        self.0.into()
    }
}

/// How a pick finds out who may serve a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Serving<'a> {
    /// Everyone: the request names no model.
    Anyone,
    /// Those whose bits have this one.
    Bit(u32),
    /// Of those whose bits have one of these, each that lists the name.
    Listed(u32, &'a str),
    /// Of those whose bits have one of these, each that has listed nothing: nobody lists the name.
    Untold(u32),
}

impl ModelNames {
    /// The bits of a worker that has not said what it serves: it may be anything, but only what nobody lists is looked for there.
    pub(crate) const UNTOLD: u32 = OTHERS;

    /// A worker serves the models of `now` instead of those of `before`. Returns its bits.
    pub(crate) fn change(&self, before: &[String], now: &[String]) -> u32 {
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        let bits = now.iter().fold(0, |bits, model| bits | names.enter(model));
        before.iter().for_each(|model| names.leave(model));
        if let Some(first) = now.first() {
            *names.first.entry(first.as_str().into()).or_default() += 1;
        }
        if let Some(first) = before.first()
            && let Some(workers) = names.first.get_mut(first.as_str())
        {
            *workers -= 1;
            if *workers == 0 {
                names.first.remove(first.as_str());
            }
        }
        bits
    }

    /// Of the names in `all`, those in `adapters` are adapters'.
    pub(crate) fn tell_apart(&self, all: &[String], adapters: &[String]) {
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        for name in all {
            if let Some(known) = names.known.get_mut(name.as_str()) {
                known.is_adapter = adapters.contains(name);
            }
        }
        if !adapters.is_empty() {
            self.has_adapters.store(true, Ordering::Relaxed);
        }
    }

    /// The adapter that `model` is, if it is one.
    pub(crate) fn adapter(&self, model: Option<&str>) -> Option<Adapter> {
        let model = model.filter(|_| self.has_adapters.load(Ordering::Relaxed))?;
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        names.known.get(model).filter(|known| known.is_adapter).map(|_| Adapter::named(model))
    }

    /// The pool of a worker that serves these models.
    pub(crate) fn pool(&self, models: &[String]) -> PoolNumber {
        let Some(first) = models.first() else { return PoolNumber::default() };
        let mut known = self.pools.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = known.get(first.as_str()) {
            return *pool;
        }
        let last = PoolNumber(u8::try_from(MOST_POOLS - 1).unwrap_or(u8::MAX));
        match u8::try_from(known.len() + 1) {
            // Names that share a number need not be remembered.
            Ok(next) if next < last.0 => *known.entry(first.as_str().into()).or_insert(PoolNumber(next)),
            _ => last,
        }
    }

    /// Who may serve `model`.
    pub(crate) fn serving<'a>(&self, model: Option<&'a str>) -> Serving<'a> {
        let Some(model) = model else { return Serving::Anyone };
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        match names.known.get(model).filter(|known| known.workers > 0) {
            Some(Known { bit: OTHERS, .. }) => Serving::Listed(OTHERS, model),
            Some(Known { bit, .. }) => Serving::Bit(*bit),
            None => Serving::Untold(Self::UNTOLD),
        }
    }

    /// Whether workers would take a request that names no model for different ones.
    pub(crate) fn is_ambiguous(&self) -> bool {
        self.names.read().unwrap_or_else(PoisonError::into_inner).first.len() > 1
    }
}

impl Names {
    /// One more worker lists `model`. Returns its bit.
    fn enter(&mut self, model: &str) -> u32 {
        if let Some(known) = self.known.get_mut(model) {
            known.workers += 1;
            return known.bit;
        }
        let bit = if self.own < OWN_BITS { 1 << self.own } else { OTHERS };
        self.own += usize::from(bit != OTHERS);
        self.known.insert(model.into(), Known { bit, workers: 1, is_adapter: false });
        bit
    }

    fn leave(&mut self, model: &str) {
        let Some(known) = self.known.get_mut(model) else { return };
        known.workers -= 1;
        // Adapters may come and go for ever.
        if known.workers == 0 && known.bit == OTHERS {
            self.known.remove(model);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_has_a_bit_until_there_are_too_many() {
        let names = ModelNames::default();
        let all: Vec<_> = (0..40).map(|number| format!("model-{number}")).collect();
        let one = names.change(&[], &all[3..4]);
        let bits = names.change(&[], &all);
        assert_eq!((one.count_ones(), bits & one, bits), (1, one, u32::MAX));
        assert_eq!(names.serving(Some("model-3")), Serving::Bit(one));
        assert_eq!(names.serving(Some("model-35")), Serving::Listed(OTHERS, "model-35"));
        assert_eq!(names.serving(Some("unheard-of")), Serving::Untold(OTHERS));
        assert_eq!(names.serving(None), Serving::Anyone);
        assert_eq!(names.change(&[], &all[35..]), OTHERS);
        assert_eq!(names.change(&[], &[]), 0);
    }

    #[test]
    fn what_nobody_lists_any_more_may_be_anywhere() {
        let names = ModelNames::default();
        let all: Vec<_> = (0..40).map(|number| format!("model-{number}")).collect();
        names.change(&[], &all);
        names.change(&[], &all[1..]);
        assert!(names.is_ambiguous(), "one begins with 0, the other with 1");
        names.change(&all, &all[1..]);
        assert!(!names.is_ambiguous());
        assert_eq!(names.serving(Some("model-0")), Serving::Untold(OTHERS));
        assert!(matches!(names.serving(Some("model-1")), Serving::Bit(_)));
        names.change(&all[1..], &[]);
        names.change(&all[1..], &[]);
        assert_eq!(names.serving(Some("model-39")), Serving::Untold(OTHERS));
        let names = names.names.into_inner().unwrap();
        assert_eq!((names.known.len(), names.first.len()), (OWN_BITS, 0), "shared ones are forgotten");
    }

    #[test]
    fn workers_that_name_the_same_model_first_are_one_pool_until_there_are_too_many() {
        let names = ModelNames::default();
        let pool =
            |models: &[&str]| names.pool(&models.iter().map(|&model| model.to_owned()).collect::<Vec<_>>());
        assert_eq!(pool(&[]), PoolNumber::default());
        let base = pool(&["base"]);
        assert!(pool(&["base", "adapter"]) == base && pool(&["adapter", "base"]) != base);
        let all: Vec<_> = (0..300).map(|number| pool(&[&format!("model-{number}")])).collect();
        assert!(all.iter().all(|one| *one != base && (1..MOST_POOLS).contains(&one.index())));
        assert_eq!((all[298], all[299]), (PoolNumber(63), PoolNumber(63)));
        assert_eq!(pool(&["base", "another"]), base);
    }
}
