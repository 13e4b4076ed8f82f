//! Why a request goes where it goes, in a sentence: for `POST /explain`, and for the spans of requests.

use router_core::{Explained, Explanation};

/// Who was picked, and what spoke for it, of a prompt of about `prompt_tokens`.
#[must_use]
pub fn why(explanation: &Explanation, prompt_tokens: usize) -> String {
    let candidates = &explanation.candidates;
    let Explained { worker, candidate, cost, .. } = &candidates[explanation.picked];
    let least = candidates.iter().min_by(|one, other| one.cost.total_cmp(&other.cost));
    let count = candidates.len();
    let beside = match least.filter(|least| least.cost < *cost) {
        None => format!("the least of {count} candidates"),
        // Who is nearly as cheap as that may have the prompt's beginning, or its turn.
        Some(least) => {
            format!("of {count} candidates at least {}, at {}", three_digits(least.cost), least.worker.id())
        }
    };
    format!(
        "{}: {} costs {}, {beside}, with {} of about {prompt_tokens} prompt tokens expected in its cache, {} \
         prefill tokens queued and {} requests in flight",
        explanation.policy,
        worker.id(),
        three_digits(*cost),
        candidate.hit_tokens,
        candidate.load.prefill_tokens,
        candidate.load.requests,
    )
}

/// What the `most` cheapest would cost, the cheapest first.
#[must_use]
pub fn cheapest(explanation: &Explanation, most: usize) -> Vec<String> {
    let mut candidates: Vec<_> = explanation.candidates.iter().collect();
    candidates.sort_by(|one, other| one.cost.total_cmp(&other.cost));
    candidates.truncate(most);
    let told = |of: &&Explained| format!("{} {}", of.worker.id(), three_digits(of.cost));
    candidates.iter().map(told).collect()
}

/// With the first three digits that tell something: costs are milliseconds to minutes in one unit, or counts.
fn three_digits(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let decimals = (0..=6).find(|&decimals| value.abs() * 10_f64.powi(decimals) >= 100.0).unwrap_or(6);
    format!("{value:.*}", decimals.unsigned_abs() as usize)
}

#[cfg(test)]
mod tests {
    use super::three_digits;

    #[test]
    fn costs_are_told_with_three_digits_whatever_their_size() {
        let told = [0.003_456_7, 0.45, 1.0, 12.34, 1_234.6, 0.0].map(three_digits);
        assert_eq!(told, ["0.00346", "0.450", "1.00", "12.3", "1235", "0"]);
    }
}
