//! Mean, median, standard deviation and percentiles of one latency, in milliseconds.

use std::time::Duration;

/// A sorted sample. An empty one has zeros everywhere, as numpy's `mean(x or 0)` gives the originals.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Distribution {
    sorted_ms: Vec<f64>,
    mean_ms: f64,
    std_ms: f64,
}

impl Distribution {
    /// Of these durations.
    pub fn of(durations: impl IntoIterator<Item = Duration>) -> Self {
        Self::of_ms(durations.into_iter().map(|duration| duration.as_secs_f64() * 1e3).collect())
    }

    /// Of these milliseconds.
    pub fn of_ms(mut values_ms: Vec<f64>) -> Self {
        if values_ms.is_empty() {
            return Self::default();
        }
        values_ms.sort_by(f64::total_cmp);
        let count = values_ms.len() as f64;
        let mean_ms = values_ms.iter().sum::<f64>() / count;
        let variance = values_ms.iter().map(|value| (value - mean_ms).powi(2)).sum::<f64>() / count; // ddof 0
        Self { sorted_ms: values_ms, mean_ms, std_ms: variance.sqrt() }
    }

    /// How many values there are.
    pub fn count(&self) -> usize {
        self.sorted_ms.len()
    }

    /// Arithmetic mean.
    pub fn mean_ms(&self) -> f64 {
        self.mean_ms
    }

    /// Standard deviation of the population (ddof 0).
    pub fn std_ms(&self) -> f64 {
        self.std_ms
    }

    /// The 50th percentile.
    pub fn median_ms(&self) -> f64 {
        self.percentile_ms(50.0)
    }

    /// The largest value.
    pub fn max_ms(&self) -> f64 {
        self.sorted_ms.last().copied().unwrap_or(0.0)
    }

    /// The `percent`th percentile (0 to 100) by linear interpolation between the closest ranks, as numpy's default.
    pub fn percentile_ms(&self, percent: f64) -> f64 {
        let Some(last) = self.sorted_ms.len().checked_sub(1) else {
            return 0.0;
        };
        let rank = percent.clamp(0.0, 100.0) / 100.0 * last as f64;
        let below = rank.floor() as usize;
        let above = (below + 1).min(last);
        let (low, high) = (self.sorted_ms[below], self.sorted_ms[above]);
        low + (high - low) * (rank - below as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_numpy_on_a_small_sample() {
        // np.array([4, 1, 3, 2]): mean 2.5, std 1.118033988749895, percentile 90 → 3.7, 25 → 1.75
        let sample = Distribution::of([4, 1, 3, 2].map(Duration::from_millis));
        assert_eq!(sample.count(), 4);
        assert_eq!(sample.mean_ms(), 2.5);
        assert_eq!(sample.median_ms(), 2.5);
        assert!((sample.std_ms() - 1.118_033_988_749_895).abs() < 1e-12);
        assert!((sample.percentile_ms(90.0) - 3.7).abs() < 1e-12);
        assert!((sample.percentile_ms(25.0) - 1.75).abs() < 1e-12);
        assert_eq!(
            (sample.percentile_ms(0.0), sample.percentile_ms(100.0), sample.max_ms()),
            (1.0, 4.0, 4.0)
        );
    }

    #[test]
    fn one_value_is_every_percentile_and_none_is_zero() {
        let one = Distribution::of([Duration::from_millis(7)]);
        assert_eq!((one.median_ms(), one.percentile_ms(99.0), one.std_ms()), (7.0, 7.0, 0.0));
        let none = Distribution::of([]);
        assert_eq!(
            (none.mean_ms(), none.percentile_ms(99.0), none.max_ms(), none.count()),
            (0.0, 0.0, 0.0, 0)
        );
    }
}
