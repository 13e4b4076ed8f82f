//! From the command line to the list of simulations: what arrives, where, how much of it, and who decides.
//!
//! Next: [`grid`](super::grid) runs them.

use std::collections::HashSet;
use std::sync::OnceLock;

use anyhow::{Context, bail};
use clap::ValueEnum;

use super::args::{Apart, FleetKind, Routers, SimulateArgs};
use super::contender::{Contender, Family};
use super::grid::{Cell, EngineKind, Job};
use super::report::Key;
use super::workload::generated::Kind;
use super::workload::{Workload, azure, trace};
use worker_core::timing::EnginePreset;

/// Requests of a generated workload, unless `--requests` says otherwise.
const GENERATED_REQUESTS: usize = 6_000;
/// Seeds of `--grid`: figures of generated workloads vary by some 10 % from one to the next.
const GRID_SEEDS: u64 = 5;

/// A workload, and on which fleets.
#[derive(Debug)]
pub struct Scene {
    /// What it was drawn from, and what all that is drawn beside it comes from.
    pub seed: u64,
    /// What arrives.
    pub workload: Workload,
    /// How fast workers are, one after the other.
    pub fleets: Vec<FleetKind>,
}

/// What `--workers`, `--blocks` and `--load` mean when they are not given.
fn or_default<T: Clone>(given: &[T], grid: bool, usual: &[T], of_grid: &[T]) -> Vec<T> {
    let default = if grid { of_grid } else { usual };
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

/// Each workload with its seed; what is generated, once for each.
///
/// # Errors
/// Traces that cannot be read.
pub fn scenes(args: &SimulateArgs) -> anyhow::Result<Vec<Scene>> {
    let fleets = or_default(&args.fleet, false, &[FleetKind::Even], &[]);
    let kinds = if args.grid && args.workload.is_empty() { Kind::value_variants() } else { &args.workload };
    let mut scenes = Vec::new();
    for path in &args.trace {
        let fleets = or_default(&args.fleet, args.grid, &[FleetKind::Even], FleetKind::OF_GRID);
        scenes.push(Scene { seed: args.seed, workload: trace::read(path)?, fleets });
    }
    let seeds = args.seeds.unwrap_or(if args.grid { GRID_SEEDS } else { 1 });
    for seed in args.seed..args.seed.saturating_add(seeds) {
        for path in &args.azure {
            scenes.push(Scene { seed, workload: azure::read(path, seed)?, fleets: fleets.clone() });
        }
        let requests = args.requests.unwrap_or(GENERATED_REQUESTS);
        let of =
            |kind: &Kind| Scene { seed, workload: kind.generate(requests, seed), fleets: fleets.clone() };
        scenes.extend(kinds.iter().map(of));
    }
    let mut names = HashSet::new();
    let mut twice = scenes.iter().filter(|scene| !names.insert((scene.workload.name.clone(), scene.seed)));
    if let Some(Scene { workload: Workload { name, .. }, .. }) = twice.next() {
        bail!(
            "two traces are called {name:?}, and their figures would be taken for each other's; rename one"
        );
    }
    for scene in &mut scenes {
        scene.workload.truncate(args.requests.unwrap_or(usize::MAX));
        scene.workload.begin_at_once();
        if let Some(path) = &args.background {
            scene.workload.put_behind(&trace::read(path)?)?;
        }
        scene.workload.is_all_alike = args.all_alike;
        if args.adapters > 0 {
            scene.workload.give_adapters(args.adapters, scene.seed)?;
        }
    }
    Ok(scenes)
}

/// Every scene with every number of workers and size of cache.
///
/// # Errors
/// An engine that there is not, and requests that fit into no cache.
pub fn cells<'a>(args: &SimulateArgs, scenes: &'a [Scene]) -> anyhow::Result<Vec<Cell<'a>>> {
    let engine = match args.engine.as_str() {
        "plain" => EngineKind::Plain,
        name => {
            let preset = worker_core::timing::preset(name).context("--engine, besides plain")?;
            EngineKind::Preset(EnginePreset {
                prefill: args.prefill.map_or(preset.prefill, Into::into),
                shares_within_steps: args.share_within_steps.unwrap_or(preset.shares_within_steps),
                ..*preset
            })
        }
    };
    let sizes = or_default(&args.workers, args.grid, &[8], &[4, 8, 16]);
    let capacities = or_default(&args.blocks, args.grid, &[2_000], &[500, 2_000, 8_000]);
    let prefill_workers = or_default(&args.prefill_workers, false, &[0], &[]);
    let (count, front) = (args.replicas, args.front);
    let (told_after_ms, reports_every_ms) = (args.told_after, args.reports_every);
    let (adapters, adapter_places) = match args.adapters {
        0 => (String::new(), None),
        count => (format!("+{count}-adapters-in-{}-places", args.adapter_places), Some(args.adapter_places)),
    };
    let (strangers, know_capacity) = (args.strangers, !args.unknown_capacity);
    let routers = Routers { count, told_after_ms, front, reports_every_ms, strangers, know_capacity };
    let of_args = args.suffix();
    let mut cells = Vec::new();
    for Scene { seed, workload, fleets } in scenes {
        for (fleet, workers, blocks) in combinations(fleets, &sizes, &capacities) {
            for prefill_workers in &prefill_workers {
                let (prefill_workers, splits) = (*prefill_workers, args.split);
                let (decode_weight, gb_per_s) = (args.split_decode_weight, args.kv_bandwidth);
                let apart = Apart { prefill_workers, splits, decode_weight, gb_per_s };
                let background = args.background();
                let suffixes = [
                    fleet.suffix(),
                    &adapters,
                    &apart.suffix(),
                    &routers.suffix(),
                    &background.suffix(),
                    &of_args,
                ]
                .concat();
                let (saturated, floor) = (OnceLock::new(), OnceLock::new());
                let cell = Cell {
                    workload,
                    name: format!("{}{suffixes}", workload.name),
                    seed: *seed,
                    fleet,
                    workers,
                    blocks,
                    adapter_places,
                    apart,
                    routers,
                    background,
                    engine,
                    saturated,
                    floor,
                };
                cell.check()?;
                cells.push(cell);
            }
        }
    }
    Ok(cells)
}

/// Each fleet with each number of workers and size of cache.
fn combinations<'a>(
    fleets: &'a [FleetKind],
    sizes: &'a [usize],
    capacities: &'a [usize],
) -> impl Iterator<Item = (FleetKind, usize, usize)> + 'a {
    let with = |fleet| sizes.iter().map(move |workers| (fleet, *workers));
    let all = fleets.iter().flat_map(move |fleet| with(*fleet));
    all.flat_map(|(fleet, workers)| capacities.iter().map(move |blocks| (fleet, workers, *blocks)))
}

/// Every cell with every load and contender, without those that are `done`.
#[must_use]
pub fn jobs<'a>(
    args: &SimulateArgs,
    cells: &'a [Cell<'a>],
    contenders: &'a [Contender],
    done: &HashSet<Key>,
) -> Vec<Job<'a>> {
    let loads = or_default(&args.load, args.grid, &[0.7, 0.9], &[0.7, 0.9, 1.0, 1.2]);
    // What a worker that generates would find of a prompt that another one computes, the simulator does not foresee.
    let takes_part = |cell: &Cell<'_>, contender: &Contender| {
        cell.apart.prefill_workers == 0 || contender.family != Family::Oracle
    };
    let mut jobs = Vec::new();
    for cell in cells {
        for load in &loads {
            let contenders = contenders.iter().filter(|contender| takes_part(cell, contender));
            jobs.extend(contenders.map(|contender| Job { cell, load: *load, contender }));
        }
    }
    jobs.retain(|job| !done.contains(&Key::of(job)));
    jobs
}

/// Requests of all simulations, those for R* included.
#[must_use]
pub fn requests(jobs: &[Job<'_>]) -> u64 {
    let mut seen: HashSet<*const Cell<'_>> = HashSet::new();
    let count = |job: &Job<'_>| job.cell.workload.foreground().len() as u64;
    let saturates = |job: &Job<'_>| matches!(job.cell.engine, EngineKind::Preset(..));
    let saturating = jobs.iter().filter(|job| saturates(job) && seen.insert(std::ptr::from_ref(job.cell)));
    saturating.map(count).sum::<u64>() + jobs.iter().map(count).sum::<u64>()
}
