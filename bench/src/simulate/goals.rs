//! The goals that the default policy is held to, each with what was reached.
//!
//! From issue 5, "What it must show". Fixed before anything was measured: whoever changes the policy does not change these.

use super::comparison::{CellFigures, Comparison, READINGS, Reading, geometric_mean};
use super::contender::Family;
use super::summary::{HIGHEST_LOAD, OTHERS};

/// `(peer, ours over it at most: mean TTFT, P99 TTFT)`, over the cells with reuse up to load 1.
const PEERS: [(&str, f64, f64); 4] = [
    ("sglang_cache_aware", 0.72, 0.65),
    ("kv_aware", 0.82, 0.80),
    ("dynamo", 0.52, 0.60),
    ("llm_d_valve", 0.95, 0.97),
];
/// The same for mean TTFT against `sglang_cache_aware` on the trace of that name alone.
const CONVERSATION: (&str, f64) = ("conversation_trace", 0.55);
/// How close to the best peer counts as equal, on recorded and on generated workloads, and in what share of cells it must be so.
const NEAR: [(Reading, f64, f64, f64); 3] =
    [(READINGS[0], 1.03, 1.05, 0.90), (READINGS[1], 1.03, 1.05, 0.80), (READINGS[2], 1.05, 1.05, 0.80)];
/// Times the best of a cell, in any cell.
const WORST: f64 = 1.25;
/// Times `round_robin`'s, in any cell.
const WORST_OF_ROUND_ROBIN: f64 = 1.0;
/// How many cells are named where not all are as they should be.
const NAMED_CELLS: usize = 5;

/// One goal and what was reached.
struct Judged {
    what: String,
    limit: f64,
    /// `None` when nobody took part to whom it could be compared.
    reached: Option<f64>,
    is_met: bool,
    notes: Vec<String>,
}

/// A line for each goal, and how many are met.
#[must_use]
pub fn lines(comparison: &Comparison) -> Vec<String> {
    let cells: Vec<&CellFigures> = comparison.cells().collect();
    let judged: Vec<Judged> = peers(&cells)
        .chain(NEAR.iter().map(|goal| near(&cells, goal)))
        .chain(READINGS.iter().map(|reading| worst(&cells, *reading)))
        .chain(READINGS.iter().map(|reading| never_worse_than_round_robin(&cells, *reading)))
        .collect();
    let met = judged.iter().filter(|goal| goal.is_met).count();
    let mut lines = vec![format!("\n{:<84} {:>7} {:>8}", "goal", "limit", "reached")];
    for Judged { what, limit, reached, is_met, notes } in &judged {
        let reached_text = reached.map_or("-".to_owned(), |value| format!("{value:.3}"));
        let verdict = match (reached, is_met) {
            (None, _) => "not judged",
            (_, true) => "pass",
            (_, false) => "FAIL",
        };
        lines.push(format!("{what:<84} {limit:>7.2} {reached_text:>8}  {verdict}"));
        lines.extend(notes.iter().map(|note| format!("    {note}")));
    }
    lines.push(format!("{met} of {} goals met", judged.len()));
    lines
}

fn peers<'a>(cells: &'a [&'a CellFigures]) -> impl Iterator<Item = Judged> + 'a {
    let judge = move |what: String, limit: f64, ratios: Vec<f64>| {
        let reached = (!ratios.is_empty()).then(|| geometric_mean(ratios));
        Judged {
            what,
            limit,
            reached,
            is_met: reached.is_some_and(|value| value <= limit),
            notes: Vec::new(),
        }
    };
    let over = move |peer: &'static str, reading: Reading, limit: f64| {
        let cells = cells.iter().filter(|cell| cell.load <= HIGHEST_LOAD && cell.has_reuse());
        let ratios: Vec<f64> = cells.filter_map(|cell| ratio(cell, peer, reading)).collect();
        let count = ratios.len();
        judge(format!("{} over {peer}'s, {count} cells with reuse up to load 1", reading.0), limit, ratios)
    };
    let of_peer = move |(peer, mean, p99): (&'static str, f64, f64)| {
        [over(peer, READINGS[0], mean), over(peer, READINGS[1], p99)]
    };
    let (trace, limit) = CONVERSATION;
    let alone = cells.iter().filter(move |cell| cell.load <= HIGHEST_LOAD && cell.trace == trace);
    let ratios: Vec<f64> = alone.filter_map(|cell| ratio(cell, PEERS[0].0, READINGS[0])).collect();
    let what = format!("{} over {}'s, {} cells of {trace} alone", READINGS[0].0, PEERS[0].0, ratios.len());
    PEERS.into_iter().flat_map(of_peer).chain([judge(what, limit, ratios)])
}

fn ratio(cell: &CellFigures, other: &str, (_, read): Reading) -> Option<f64> {
    Some(cell.ours(read)? / cell.of(other, read)?)
}

/// In what share of cells ours is near the best peer.
fn near(cells: &[&CellFigures], goal: &(Reading, f64, f64, f64)) -> Judged {
    let ((title, read), recorded, generated, share) = *goal;
    let of = |cell: &&&CellFigures| {
        let (best, _) = cell.best(&[Family::Peer], read)?;
        let limit = if cell.is_generated() { generated } else { recorded };
        Some(cell.ours(read)? / best <= limit)
    };
    let near: Vec<bool> =
        cells.iter().filter(|cell| cell.load <= HIGHEST_LOAD).filter_map(|cell| of(&cell)).collect();
    let count = near.iter().filter(|is_near| **is_near).count();
    let reached = (!near.is_empty()).then(|| count as f64 / near.len() as f64);
    let percent = |limit: f64| (limit - 1.0) * 100.0;
    let within = match recorded == generated {
        true => format!("{:.0} %", percent(recorded)),
        false => format!("{:.0} % ({:.0} % on generated workloads)", percent(recorded), percent(generated)),
    };
    let what =
        format!("{title} within {within} of the best peer: share of {} cells up to load 1", near.len());
    Judged {
        what,
        limit: share,
        reached,
        is_met: reached.is_some_and(|value| value >= share),
        notes: Vec::new(),
    }
}

/// Ours over the best of a cell, where that is most.
fn worst(cells: &[&CellFigures], (title, read): Reading) -> Judged {
    let of = |cell: &&CellFigures| {
        let (best, name) = cell.best(OTHERS, read)?;
        Some((cell.ours(read)? / best, format!("{name}'s in {}", cell.name)))
    };
    let what = format!("{title} over the best of a cell, in the worst of all cells");
    most(what, WORST, cells.iter().filter_map(of).collect())
}

fn never_worse_than_round_robin(cells: &[&CellFigures], reading: Reading) -> Judged {
    let of = |cell: &&CellFigures| Some((ratio(cell, "round_robin", reading)?, cell.name.clone()));
    let what = format!("{} over round_robin's, in the worst of all cells", reading.0);
    most(what, WORST_OF_ROUND_ROBIN, cells.iter().filter_map(of).collect())
}

/// The largest of `ratios`, which must not exceed `limit`, with the cells where it does.
fn most(what: String, limit: f64, mut ratios: Vec<(f64, String)>) -> Judged {
    ratios.sort_by(|one, two| two.0.total_cmp(&one.0));
    let reached = ratios.first().map(|(ratio, _)| *ratio);
    let beyond = ratios.iter().take_while(|(ratio, _)| *ratio > limit).count();
    let mut notes: Vec<String> = ratios
        .iter()
        .take(beyond.min(NAMED_CELLS))
        .map(|(ratio, place)| format!("{ratio:.3} times {place}"))
        .collect();
    if beyond > NAMED_CELLS {
        notes.push(format!("and {} more of {} cells", beyond - NAMED_CELLS, ratios.len()));
    }
    Judged { what, limit, reached, is_met: reached.is_some() && beyond == 0, notes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::outcome::Figures;
    use crate::simulate::report::Line;

    fn comparison(rows: &[(&str, Family, &str, f64, f64)]) -> Comparison {
        let mut comparison = Comparison::default();
        for (policy, family, trace, load, ttft) in rows {
            let (mean_ttft_ms, p99_ttft_ms, mean_e2e_ms) = (*ttft, *ttft, *ttft);
            let figures =
                Figures { mean_ttft_ms, p99_ttft_ms, mean_e2e_ms, hit_rate: 0.5, ..Figures::default() };
            comparison.add(&Line {
                policy: (*policy).to_owned(),
                family: *family,
                workers: 4,
                blocks: 500,
                load: *load,
                trace: (*trace).to_owned(),
                seed: 1,
                figures,
            });
        }
        comparison
    }

    fn verdict<'l>(lines: &'l [String], beginning: &str) -> &'l str {
        let line = lines.iter().find(|line| line.starts_with(beginning));
        line.unwrap_or_else(|| panic!("{beginning} is not in {lines:?}"))
            .split_whitespace()
            .next_back()
            .unwrap()
    }

    #[test]
    fn says_of_each_goal_whether_it_is_met_and_where_not() {
        let (ours, peer, baseline) = (Family::Ours, Family::Peer, Family::Baseline);
        let lines = lines(&comparison(&[
            ("prefix_aware", ours, "t", 0.9, 50.0),
            ("sglang_cache_aware", peer, "t", 0.9, 100.0),
            ("kv_aware", peer, "t", 0.9, 40.0),
            ("round_robin", baseline, "t", 0.9, 200.0),
            ("prefix_aware", ours, "u", 0.9, 50.0),
            ("sglang_cache_aware", peer, "u", 0.9, 100.0),
            ("kv_aware", peer, "u", 0.9, 60.0),
            ("round_robin", baseline, "u", 0.9, 45.0),
        ]));
        assert_eq!(verdict(&lines, "mean TTFT over sglang_cache_aware's, 2 cells with"), "pass");
        assert_eq!(verdict(&lines, "P99 TTFT over kv_aware's"), "FAIL");
        assert_eq!(verdict(&lines, "mean TTFT over dynamo's"), "judged");
        assert_eq!(verdict(&lines, "mean E2E within"), "FAIL", "one of two cells is near the best");
        assert_eq!(verdict(&lines, "mean TTFT over the best of a cell"), "pass", "1.25 is not beyond it");
        assert_eq!(verdict(&lines, "mean TTFT over round_robin's"), "FAIL");
        assert!(lines.iter().any(|line| line.contains("1.111 times u 4x500 at 0.9")), "{lines:?}");
    }

    #[test]
    fn overload_counts_for_the_worst_cell_only() {
        let lines = lines(&comparison(&[
            ("prefix_aware", Family::Ours, "t", 1.2, 50.0),
            ("kv_aware", Family::Peer, "t", 1.2, 10.0),
        ]));
        assert_eq!(verdict(&lines, "mean TTFT over kv_aware's, 0 cells"), "judged");
        assert!(
            lines.iter().any(|line| line.contains("5.000 times kv_aware's in t 4x500 at 1.2")),
            "{lines:?}"
        );
    }
}
