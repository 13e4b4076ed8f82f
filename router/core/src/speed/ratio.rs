//! A worker's ratio to the fleet's speed. Used by [`PrefillQueue`](super::PrefillQueue) alone.

use std::collections::VecDeque;

use super::{Observation, PrefillSpeed, USUAL_SHARE};

/// How many times longer than the fleet a worker takes, as far as that is certain. What is seen is noisy, and a cost that differs
/// by noise takes prompts away from where their prefixes are.
///
/// Waiting for memory or for a decode step to end makes intervals longer, never shorter, and says nothing of the worker's speed. So it is
/// judged by its shortest intervals: who is slow is slow nearly always. One that is well again is forgiven as soon as two show it.
#[derive(Debug, Default)]
pub(super) struct Ratio {
    /// Logarithms of seen over expected, the last ones.
    recent: VecDeque<f64>,
    /// The logarithm of the ratio, less the fleet's; 0 unless it is certain.
    logarithm: f64,
}

impl Ratio {
    /// Intervals that count.
    const REMEMBERED: usize = 11;
    /// So many before anything is certain.
    const LEAST: usize = 8;
    /// Workers that are less apart than this, as a logarithm, are taken to be alike.
    const ALIKE: f64 = 0.2;
    /// Of a slow worker's intervals nine tenths are slow; of a fast one's, six tenths fast, since some of them are waits.
    const FASTEST: f64 = 0.1;
    const MOST: f64 = 0.6;

    pub(super) fn see(&mut self, observation: &Observation, speed: &PrefillSpeed) {
        let Some(surprise) = speed.surprise_of(observation) else { return };
        if self.recent.len() == Self::REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(surprise);
        let mut sorted: Vec<f64> = self.recent.iter().map(|seen| seen - speed.surprise).collect();
        sorted.sort_by(f64::total_cmp);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index of a short list"
        )]
        let at = |share: f64| sorted[(share * (sorted.len() - 1) as f64).round() as usize];
        let is_certain = at(Self::FASTEST) > Self::ALIKE || at(Self::MOST) < -Self::ALIKE;
        self.logarithm = if is_certain && sorted.len() >= Self::LEAST { at(USUAL_SHARE) } else { 0.0 };
    }

    pub(super) fn value(&self) -> f64 {
        self.logarithm.exp()
    }
}
