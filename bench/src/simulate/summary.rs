//! All cells in a few lines: ours over each other contender, and how often ours is about the best.
//!
//! Geometric means of ratios, cell by cell (a trace, a fleet, a cache size and a load; seeds are averaged first). The best is the best of
//! peers and baselines in that cell, whoever it is.

use std::collections::BTreeMap;

use super::contender::Family;
use super::grid::Row;
use super::outcome::Figures;

/// Loads beyond this are overload, where figures say how long it lasted, and stay out of the summary.
const HIGHEST_LOAD: f64 = 1.0;

type Reading = (&'static str, fn(&Figures) -> f64);

const READINGS: [Reading; 3] = [
    ("mean TTFT", |figures| figures.mean_ttft_ms),
    ("P99 TTFT", |figures| figures.p99_ttft_ms),
    ("mean E2E", |figures| figures.mean_e2e_ms),
];

/// A policy's figures in a cell, one for each seed.
type OfPolicy = (&'static str, Family, Vec<Figures>);

/// Figures by cell, then by policy.
#[derive(Debug, Default)]
pub struct Summary {
    cells: BTreeMap<String, Vec<OfPolicy>>,
}

impl Summary {
    /// Takes a row in.
    pub fn add(&mut self, row: &Row<'_>) {
        let (cell, load, contender) = (row.job.cell, row.job.load, row.job.contender);
        if load > HIGHEST_LOAD {
            return;
        }
        let key = format!("{} {}x{} at {load}", cell.name, cell.workers, cell.blocks);
        let policies = self.cells.entry(key).or_default();
        match policies.iter_mut().find(|(name, ..)| *name == contender.name) {
            Some((.., figures)) => figures.push(row.figures),
            None => policies.push((contender.name, contender.family, vec![row.figures])),
        }
    }

    /// The lines; nothing unless ours and others took part.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let Some(policies) = self.cells.values().next() else { return Vec::new() };
        let Some((ours, ..)) = policies.iter().find(|(_, family, _)| *family == Family::Ours) else {
            return Vec::new();
        };
        if policies.len() < 2 {
            return Vec::new();
        }
        let count = self.cells.len();
        let mut lines = vec![format!(
            "\n{ours} over others, geometric means over {count} cells up to load {HIGHEST_LOAD}"
        )];
        lines.push(format!(
            "{:<25} {:>10} {:>10} {:>10}",
            "policy", READINGS[0].0, READINGS[1].0, READINGS[2].0
        ));
        for (name, ..) in policies.iter().filter(|(name, ..)| name != ours) {
            let ratios = READINGS.map(|(_, read)| geometric_mean(&self.ratios(ours, name, read)));
            lines.push(format!("{name:<25} {:>10.3} {:>10.3} {:>10.3}", ratios[0], ratios[1], ratios[2]));
        }
        for (what, read) in READINGS {
            lines.extend(self.beside_the_best(ours, what, read));
        }
        lines
    }

    fn ratios(&self, ours: &str, other: &str, read: fn(&Figures) -> f64) -> Vec<f64> {
        let of = |cell: &[OfPolicy], name: &str| {
            cell.iter().find(|(known, ..)| *known == name).map(|(.., figures)| mean_of(figures, read))
        };
        self.cells.values().filter_map(|cell| Some(of(cell, ours)? / of(cell, other)?)).collect()
    }

    fn beside_the_best(&self, ours: &str, what: &str, read: fn(&Figures) -> f64) -> Option<String> {
        let mut ratios = Vec::new();
        for (key, cell) in &self.cells {
            let own =
                cell.iter().find(|(name, ..)| *name == ours).map(|(.., figures)| mean_of(figures, read))?;
            let others =
                cell.iter().filter(|(_, family, _)| matches!(family, Family::Peer | Family::Baseline));
            let others = others.map(|(name, _, figures)| (mean_of(figures, read), *name));
            let (best, name) = others.min_by(|one, two| one.0.total_cmp(&two.0))?;
            ratios.push((own / best, key, name));
        }
        let within = |limit: f64| {
            let count = ratios.iter().filter(|(ratio, ..)| *ratio <= limit).count();
            100.0 * count as f64 / ratios.len() as f64
        };
        let (worst, key, name) = ratios.iter().max_by(|one, two| one.0.total_cmp(&two.0))?;
        Some(format!(
            "{what}: within 3 % of the best in {:.0} % of cells, within 5 % in {:.0} %; at worst {worst:.2} times {name} in {key}",
            within(1.03),
            within(1.05)
        ))
    }
}

fn mean_of(figures: &[Figures], read: fn(&Figures) -> f64) -> f64 {
    geometric_mean(&figures.iter().map(read).collect::<Vec<_>>())
}

fn geometric_mean(values: &[f64]) -> f64 {
    // Less than a microsecond is as good as nothing, and nothing has no logarithm.
    let logarithms = values.iter().map(|value| value.max(1e-3).ln());
    (logarithms.sum::<f64>() / values.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_cell_by_cell() {
        let with = |ttft: f64| Figures {
            mean_ttft_ms: ttft,
            p99_ttft_ms: 10.0,
            mean_e2e_ms: 10.0,
            ..Figures::default()
        };
        let mut summary = Summary::default();
        for (cell, ours, peer, oracle) in
            [("a", 10.0, 20.0, 5.0), ("b", 20.0, 10.0, 5.0), ("c", 2.0, 8.0, 1.0)]
        {
            let row = |name, family, ttft| (name, family, vec![with(ttft)]);
            let rows = [
                row("ours", Family::Ours, ours),
                row("theirs", Family::Peer, peer),
                row("oracle", Family::Oracle, oracle),
            ];
            summary.cells.insert(cell.to_owned(), rows.into());
        }
        let lines = summary.lines();
        assert!(lines[2].starts_with("theirs") && lines[2].contains("0.630"), "{lines:?}");
        assert!(
            lines[4].contains("in 67 % of cells") && lines[4].contains("2.00 times theirs in b"),
            "{lines:?}"
        );
    }
}
