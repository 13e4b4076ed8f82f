//! Requests in flight at workers over time: the most at any one of them, the mean, and the fewest.
//!
//! From what became of all requests. Next: [`html`](super::html) draws it.

use super::run::Record;

/// So many moments, evenly spaced from the first arrival to the last token.
const MOMENTS: usize = 80;

/// What workers had in flight, at one moment after the other.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InFlightOverTime {
    /// Seconds from the first arrival.
    pub seconds: Vec<f64>,
    /// Of the worker that had the most.
    pub most: Vec<f64>,
    /// Over all workers.
    pub mean: Vec<f64>,
    /// Of the worker that had the fewest.
    pub fewest: Vec<f64>,
}

impl InFlightOverTime {
    /// Counts `records` at `workers` workers.
    #[must_use]
    pub fn of(records: &[Record], workers: usize) -> Self {
        let begin_ns = records.iter().map(|record| record.arrived_ns).min().unwrap_or(0);
        let end_ns = records.iter().map(|record| record.done_ns).max().unwrap_or(0);
        let step_ns = ((end_ns - begin_ns) / MOMENTS as u64).max(1);
        let moments: Vec<u64> = (0..MOMENTS as u64).map(|number| begin_ns + number * step_ns).collect();
        let mut counts = vec![vec![0u32; workers.max(1)]; MOMENTS];
        for record in records {
            let from = moments.partition_point(|moment| *moment < record.arrived_ns);
            let until = moments.partition_point(|moment| *moment < record.done_ns);
            for at_moment in &mut counts[from..until] {
                at_moment[record.worker as usize] += 1;
            }
        }
        let of = |read: fn(&[u32]) -> f64| counts.iter().map(|at_moment| read(at_moment)).collect();
        Self {
            seconds: moments.iter().map(|moment| (moment - begin_ns) as f64 / 1e9).collect(),
            most: of(|counts| counts.iter().max().copied().unwrap_or(0).into()),
            mean: of(|counts| f64::from(counts.iter().sum::<u32>()) / counts.len() as f64),
            fewest: of(|counts| counts.iter().min().copied().unwrap_or(0).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_requests_from_their_arrival_to_their_last_token() {
        let record = |arrived_s: u64, done_s: u64, worker| Record {
            arrived_ns: arrived_s * 1_000_000_000,
            done_ns: done_s * 1_000_000_000,
            worker,
            ..Record::default()
        };
        let records = [record(10, 50, 0), record(10, 30, 0), record(20, 90, 1)];
        let seen = InFlightOverTime::of(&records, 2);
        let at = |second: usize| (seen.most[second], seen.mean[second], seen.fewest[second]);
        assert_eq!((seen.seconds[0], seen.seconds[79]), (0.0, 79.0));
        assert_eq!(at(0), (2.0, 1.0, 0.0), "one worker has all");
        assert_eq!(at(15), (2.0, 1.5, 1.0));
        assert_eq!(at(60), (1.0, 0.5, 0.0));
    }
}
