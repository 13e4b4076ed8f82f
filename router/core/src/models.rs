//! Models that workers have named, as bits, so that a pick can tell from a word whether a worker may serve a request.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

/// Models beyond these share one bit.
const OWN_BITS: usize = 31;
const OTHERS: u32 = 1 << OWN_BITS;
/// Pools, together with that of workers which have not said what they serve; those beyond share the last.
pub(crate) const MOST_POOLS: usize = 64;

/// The names, in the order in which they were first told.
#[derive(Debug, Default)]
pub(crate) struct ModelNames {
    bits: RwLock<HashMap<Box<str>, u32>>,
    /// Those that workers name first.
    pools: RwLock<HashMap<Box<str>, PoolNumber>>,
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
    /// Of those whose bits have one of these, each that says so when asked for the name.
    Asked(u32, &'a str),
}

impl ModelNames {
    /// The bits of a worker that has not said what it serves: it may be anything.
    pub(crate) const ANY: u32 = u32::MAX;

    /// The bits of a worker that serves these models.
    pub(crate) fn bits(&self, models: &[String]) -> u32 {
        let mut known = self.bits.write().unwrap_or_else(PoisonError::into_inner);
        let mut bits = 0;
        for model in models {
            let next = if known.len() < OWN_BITS { 1 << known.len() } else { OTHERS };
            bits |= match known.get(model.as_str()) {
                Some(bit) => *bit,
                // Names that share a bit need not be remembered.
                None if next == OTHERS => OTHERS,
                None => *known.entry(model.as_str().into()).or_insert(next),
            };
        }
        bits
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
        let known = self.bits.read().unwrap_or_else(PoisonError::into_inner);
        match known.get(model) {
            Some(bit) => Serving::Bit(*bit),
            // Nobody has told it, or it shares a bit; those who have told nothing have that bit too.
            None => Serving::Asked(OTHERS, model),
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
        let one = names.bits(&all[3..4]);
        let bits = names.bits(&all);
        assert_eq!((one.count_ones(), bits & one, bits), (1, one, ModelNames::ANY));
        assert_eq!(names.serving(Some("model-3")), Serving::Bit(one));
        assert_eq!(names.serving(Some("model-35")), Serving::Asked(OTHERS, "model-35"));
        assert_eq!(names.serving(Some("unheard-of")), Serving::Asked(OTHERS, "unheard-of"));
        assert_eq!(names.serving(None), Serving::Anyone);
        assert_eq!(names.bits(&all[35..]), OTHERS);
        assert_eq!(names.bits(&[]), 0);
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
