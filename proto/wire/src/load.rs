//! Load reports and what they mean.

use roundhouse_types::{RouterPlace, WorkerLoad};

use crate::v1;

impl From<WorkerLoad> for v1::LoadReport {
    fn from(load: WorkerLoad) -> Self {
        Self {
            running_requests: load.running_requests as u64,
            waiting_requests: load.waiting_requests as u64,
            waiting_uncached_tokens: load.waiting_uncached_tokens as u64,
            kv_used_tokens: load.kv_used_tokens as u64,
            kv_free_tokens: load.kv_free_tokens as u64,
            prefill_tokens_per_second: load.prefill_tokens_per_second,
            decode_tokens_per_second: load.decode_tokens_per_second,
            retractions: load.retractions,
            place: None,
        }
    }
}

impl From<RouterPlace> for v1::RouterPlace {
    fn from(RouterPlace { rank, count }: RouterPlace) -> Self {
        Self { rank, count }
    }
}

/// What cannot be is a router that is alone.
impl From<v1::RouterPlace> for RouterPlace {
    fn from(v1::RouterPlace { rank, count }: v1::RouterPlace) -> Self {
        if rank < count { Self { rank, count } } else { Self::ALONE }
    }
}

/// Counts saturate, and speeds that are none are absent: whatever a worker says, there is a load to go by.
impl From<v1::LoadReport> for WorkerLoad {
    fn from(report: v1::LoadReport) -> Self {
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let speed = |speed: Option<f64>| speed.filter(|speed| speed.is_finite() && *speed > 0.0);
        Self {
            running_requests: count(report.running_requests),
            waiting_requests: count(report.waiting_requests),
            waiting_uncached_tokens: count(report.waiting_uncached_tokens),
            kv_used_tokens: count(report.kv_used_tokens),
            kv_free_tokens: count(report.kv_free_tokens),
            prefill_tokens_per_second: speed(report.prefill_tokens_per_second),
            decode_tokens_per_second: speed(report.decode_tokens_per_second),
            retractions: report.retractions,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_come_back_as_they_were() {
        let load = WorkerLoad {
            running_requests: 1,
            waiting_requests: 2,
            waiting_uncached_tokens: 3,
            kv_used_tokens: 4,
            kv_free_tokens: 5,
            prefill_tokens_per_second: Some(6.5),
            decode_tokens_per_second: None,
            retractions: 7,
        };
        assert_eq!(WorkerLoad::from(v1::LoadReport::from(load)), load);
    }

    #[test]
    fn a_place_beyond_the_last_is_none() {
        for (rank, count, expected) in [(2, 3, (2, 3)), (3, 3, (0, 1)), (0, 0, (0, 1))] {
            let RouterPlace { rank, count } = v1::RouterPlace { rank, count }.into();
            assert_eq!((rank, count), expected);
        }
    }

    #[test]
    fn a_speed_that_is_none_is_absent() {
        for speed in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            let report = v1::LoadReport { decode_tokens_per_second: Some(speed), ..Default::default() };
            assert_eq!(WorkerLoad::from(report).decode_tokens_per_second, None);
        }
    }
}
