//! Figures of all policies, cell by cell: a trace on a fleet, a number of workers, a cache size and a load.
//!
//! Filled from the lines of `--json`, whether they were just written or read from a file. Seeds of a cell are averaged before anything
//! is compared. Next: [`summary`](super::summary) and [`goals`](super::goals).

use std::collections::BTreeMap;

use super::contender::Family;
use super::outcome::Figures;
use super::report::Line;
use super::workload::generated::Kind;

/// A cell in which no contender finds this share of its prompts cached has no reuse to speak of.
const REUSE_HIT_RATE: f64 = 0.05;

/// Something that is compared: its name, and where it stands.
pub type Reading = (&'static str, fn(&Figures) -> f64);

/// What is compared.
pub const READINGS: [Reading; 3] = [
    ("mean TTFT", |figures| figures.mean_ttft_ms),
    ("P99 TTFT", |figures| figures.p99_ttft_ms),
    ("mean E2E", |figures| figures.mean_e2e_ms),
];

/// One cell: who took part, with figures for each seed.
#[derive(Debug)]
pub struct CellFigures {
    /// The workload and its fleet.
    pub trace: String,
    /// As a person would name it.
    pub name: String,
    /// Blocks of each worker's cache.
    pub blocks: usize,
    /// Offered over R*.
    pub load: f64,
    policies: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    policy: String,
    family: Family,
    seeds: Vec<Figures>,
}

/// All cells.
#[derive(Debug, Default)]
pub struct Comparison {
    cells: BTreeMap<String, CellFigures>,
}

impl Comparison {
    /// Takes a line in.
    pub fn add(&mut self, line: &Line) {
        let Line { policy, family, workers, blocks, load, trace, figures, .. } = line;
        let name = format!("{trace} {workers}x{blocks} at {load}");
        let cell = self.cells.entry(format!("{trace} {workers:6} {blocks:8} {load:8.3}"));
        let cell = cell.or_insert_with(|| CellFigures {
            trace: trace.clone(),
            name,
            blocks: *blocks,
            load: *load,
            policies: Vec::new(),
        });
        match cell.policies.iter_mut().find(|entry| entry.policy == *policy) {
            Some(entry) => entry.seeds.push(*figures),
            None => {
                let (policy, family) = (policy.clone(), *family);
                cell.policies.push(Entry { policy, family, seeds: vec![*figures] });
            }
        }
    }

    /// All cells, ordered by name, workers, blocks and load.
    pub fn cells(&self) -> impl Iterator<Item = &CellFigures> {
        self.cells.values()
    }

    /// Everybody's name, ours first.
    #[must_use]
    pub fn policies(&self) -> Vec<&str> {
        let mut names: Vec<(bool, &str)> = Vec::new();
        for entry in self.cells.values().flat_map(|cell| &cell.policies) {
            if !names.iter().any(|(_, name)| *name == entry.policy) {
                names.push((entry.family != Family::Ours, &entry.policy));
            }
        }
        names.sort_by_key(|(is_other, _)| *is_other);
        names.into_iter().map(|(_, name)| name).collect()
    }
}

impl CellFigures {
    /// Ours, over all seeds.
    #[must_use]
    pub fn ours(&self, read: fn(&Figures) -> f64) -> Option<f64> {
        self.entries(&[Family::Ours]).next().map(|entry| entry.mean(read))
    }

    /// Another's, over all seeds.
    #[must_use]
    pub fn of(&self, policy: &str, read: fn(&Figures) -> f64) -> Option<f64> {
        self.policies.iter().find(|entry| entry.policy == policy).map(|entry| entry.mean(read))
    }

    /// The least of those that are of `families`, and whose it is.
    #[must_use]
    pub fn best(&self, families: &[Family], read: fn(&Figures) -> f64) -> Option<(f64, &str)> {
        let all = self.entries(families).map(|entry| (entry.mean(read), entry.policy.as_str()));
        all.min_by(|one, two| one.0.total_cmp(&two.0))
    }

    /// Whether caches matter in it.
    #[must_use]
    pub fn has_reuse(&self) -> bool {
        let found = |entry: &Entry| entry.mean(|figures| figures.hit_rate.max(1e-3)) >= REUSE_HIT_RATE;
        self.policies.iter().any(found)
    }

    /// Whether the workload is drawn from a seed, so that its figures vary by chance.
    #[must_use]
    pub fn is_generated(&self) -> bool {
        let base = self.trace.split('+').next().unwrap_or_default();
        let is_kind = <Kind as clap::ValueEnum>::value_variants().iter().any(|kind| kind.name() == base);
        is_kind || self.policies.iter().any(|entry| entry.seeds.len() > 1)
    }

    fn entries(&self, families: &[Family]) -> impl Iterator<Item = &Entry> {
        self.policies.iter().filter(move |entry| families.contains(&entry.family))
    }
}

impl Entry {
    fn mean(&self, read: fn(&Figures) -> f64) -> f64 {
        geometric_mean(self.seeds.iter().map(read))
    }
}

/// The geometric mean; of nothing, 1.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0usize);
    for value in values {
        // Less than a microsecond is as good as nothing, and nothing has no logarithm.
        sum += value.max(1e-3).ln();
        count += 1;
    }
    (sum / count.max(1) as f64).exp()
}
