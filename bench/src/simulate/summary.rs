//! All cells in a few lines: ours over each other contender, and over the best of each cell, workload by workload.
//!
//! Ratios are taken cell by cell and averaged geometrically. Loads beyond R* stay out: what happens there depends on how long it lasts.

use std::collections::BTreeMap;

use super::comparison::{CellFigures, Comparison, READINGS, geometric_mean};
use super::contender::Family;

/// Loads beyond this are overload.
pub const HIGHEST_LOAD: f64 = 1.0;
/// Those among whom the best of a cell is looked for.
pub const OTHERS: &[Family] = &[Family::Peer, Family::Baseline];

/// The lines; nothing unless ours and others took part.
#[must_use]
pub fn lines(comparison: &Comparison) -> Vec<String> {
    let policies = comparison.policies();
    let cells: Vec<&CellFigures> = comparison.cells().filter(|cell| cell.load <= HIGHEST_LOAD).collect();
    let has_ours = cells.iter().any(|cell| cell.ours(READINGS[0].1).is_some());
    let (Some((ours, others)), true) = (policies.split_first(), has_ours && policies.len() > 1) else {
        return Vec::new();
    };
    let titles = || READINGS.map(|(title, _)| format!("{title:>10}")).join(" ");
    let count = cells.len();
    let mut lines = vec![
        format!("\n{ours} over others, geometric means over {count} cells up to load {HIGHEST_LOAD}"),
        format!("{:<32} {}", "policy", titles()),
    ];
    for name in others {
        let ratios = READINGS.map(|(_, read)| {
            let of = |cell: &&CellFigures| Some(cell.ours(read)? / cell.of(name, read)?);
            format!("{:>10.3}", geometric_mean(cells.iter().filter_map(of)))
        });
        lines.push(format!("{name:<32} {}", ratios.join(" ")));
    }
    lines.push(format!("\n{:<32} {}", "over the best of each cell", titles()));
    for (trace, cells) in by_trace(&cells) {
        let ratios = READINGS.map(|(_, read)| {
            let of = |cell: &&&CellFigures| Some(cell.ours(read)? / cell.best(OTHERS, read)?.0);
            format!("{:>10.3}", geometric_mean(cells.iter().filter_map(of)))
        });
        lines.push(format!("{trace:<32} {}", ratios.join(" ")));
    }
    lines
}

fn by_trace<'c, 'a>(cells: &'c [&'a CellFigures]) -> BTreeMap<&'a str, Vec<&'c &'a CellFigures>> {
    let mut traces: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for cell in cells {
        traces.entry(&cell.trace).or_default().push(cell);
    }
    traces
}
