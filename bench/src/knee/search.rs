//! Looks for the highest rate that is still met: doubles until one is not, then halves the gap.
//!
//! Pure: told what came out at one rate, it names the next. [`super`] runs them.

/// A search under way.
#[derive(Debug, Clone)]
pub struct Search {
    next_rate: f64,
    met: Option<f64>,
    missed: Option<f64>,
    bounds: Bounds,
}

/// Where a search begins and when it ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// The first rate.
    pub start_rate: f64,
    /// No rate above this is tried.
    pub max_rate: f64,
    /// No rate below this is tried.
    pub min_rate: f64,
    /// The search ends when the lowest rate that was missed is at most this factor above the highest that was met.
    pub precision: f64,
}

/// Whether the objectives were met at a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// They were.
    Met,
    /// They were not.
    Missed,
}

impl Search {
    /// A search that has tried nothing.
    pub fn new(bounds: Bounds) -> Self {
        Self { next_rate: bounds.start_rate, met: None, missed: None, bounds }
    }

    /// The next rate to try; `None` at the end.
    pub fn next(&self) -> Option<f64> {
        match (self.met, self.missed) {
            (Some(met), Some(missed)) if missed <= met * self.bounds.precision => None,
            (Some(met), _) if met >= self.bounds.max_rate => None,
            (_, Some(missed)) if missed <= self.bounds.min_rate => None,
            _ => Some(self.next_rate),
        }
    }

    /// Takes what came out at [`Self::next`].
    pub fn hear(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Met => self.met = Some(self.next_rate),
            Verdict::Missed => self.missed = Some(self.next_rate),
        }
        self.next_rate = match (self.met, self.missed) {
            (Some(met), Some(missed)) => (met * missed).sqrt(),
            (Some(met), None) => (met * 2.0).min(self.bounds.max_rate),
            (None, Some(missed)) => (missed / 2.0).max(self.bounds.min_rate),
            (None, None) => self.next_rate,
        };
    }

    /// The highest rate that was met.
    pub fn knee(&self) -> Option<f64> {
        self.met
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches a server that meets every rate up to `capacity`; the rates that were tried, and the knee.
    fn search(capacity: f64, start_rate: f64) -> (Vec<f64>, Option<f64>) {
        let mut search = Search::new(Bounds { start_rate, max_rate: 1000.0, min_rate: 0.1, precision: 1.05 });
        let mut tried = Vec::new();
        while let Some(rate) = search.next() {
            tried.push(rate);
            search.hear(if rate <= capacity { Verdict::Met } else { Verdict::Missed });
            assert!(tried.len() < 50, "{tried:?}");
        }
        (tried, search.knee())
    }

    #[test]
    fn finds_the_capacity_to_the_precision_from_below_and_from_above() {
        for (capacity, start) in [(37.0, 1.0), (37.0, 500.0), (0.3, 1.0), (1.0, 1.0)] {
            let (tried, knee) = search(capacity, start);
            let knee = knee.unwrap();
            assert!(
                knee <= capacity && capacity < knee * 1.05,
                "{capacity} from {start}: {knee} after {tried:?}"
            );
        }
    }

    #[test]
    fn ends_at_the_bounds() {
        assert_eq!(search(1e9, 1.0).1, Some(1000.0));
        let (tried, knee) = search(0.0, 1.0);
        assert_eq!((tried.last().copied(), knee), (Some(0.1), None));
    }
}
