//! All the simulations that were asked for: cells, their saturated throughput, and one run for each load and contender.
//!
//! Next: [`report`](super::report) prints each row as its turn comes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use worker_core::EnginePreset;

use super::args::{Apart, Background, FleetKind, Routers};
use super::contender::{Contender, named};
use super::engine::plain::PlainEngine;
use super::engine::scheduled::{Build, Pace, ScheduledEngine};
use super::floor;
use super::in_flight::InFlightOverTime;
use super::outcome::{Figures, Objective, Outcome, Part};
use super::run::{Fault, Setup, run};
use super::workload::{BLOCK_TOKENS, Workload, nanoseconds};

/// Tokens of waiting prompts in memory, over all workers of a simulation: at most some 800 MB.
const QUEUED_TOKENS: usize = 200_000_000;

/// What workers are made of.
#[derive(Debug, Clone, Copy)]
pub enum EngineKind {
    /// The plain one; load is utilisation.
    Plain,
    /// A recorded one, or what was asked for in place of it; load is relative to round robin's saturated throughput.
    Preset(EnginePreset),
}

/// A workload on a fleet.
#[derive(Debug, Clone)]
pub struct Cell<'a> {
    /// What arrives.
    pub workload: &'a Workload,
    /// What it and the fleet go by together.
    pub name: String,
    /// The seed of the workload, and of all that is drawn.
    pub seed: u64,
    /// How fast workers are.
    pub fleet: FleetKind,
    /// How many there are.
    pub workers: usize,
    /// Blocks of each one's cache.
    pub blocks: usize,
    /// How many adapters it computes side by side, if requests are for any.
    pub adapter_places: Option<u32>,
    /// Who computes prompts and nothing else.
    pub apart: Apart,
    /// Who decides, in how many places.
    pub routers: Routers,
    /// What becomes of requests in the background.
    pub background: Background,
    /// What workers are.
    pub engine: EngineKind,
    /// R*; found when it is asked for.
    pub saturated: OnceLock<f64>,
    /// See [`Cell::floor_ms`].
    pub floor: OnceLock<f64>,
}

/// One simulation.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    /// Where.
    pub cell: &'a Cell<'a>,
    /// How much of it.
    pub load: f64,
    /// By whom.
    pub contender: &'a Contender,
}

/// What it gave.
#[derive(Debug, Clone)]
pub struct Row<'a> {
    /// What it was.
    pub job: Job<'a>,
    /// Its figures.
    pub figures: Figures,
    /// The same by tenant and priority, where there are several.
    pub parts: Vec<Part>,
    /// What workers had to do.
    pub in_flight: InFlightOverTime,
}

impl Cell<'_> {
    /// Refuses what could never run.
    ///
    /// # Errors
    /// When a request is longer than a worker's cache, or nobody is left.
    pub fn check(&self) -> anyhow::Result<()> {
        let (longest, room) = (self.workload.longest_tokens(), self.blocks * BLOCK_TOKENS);
        anyhow::ensure!(
            longest <= room || matches!(self.engine, EngineKind::Plain),
            "{}: a request of {longest} tokens does not fit into {} blocks of {BLOCK_TOKENS}; --blocks must be at least {}",
            self.name,
            self.blocks,
            longest.div_ceil(BLOCK_TOKENS)
        );
        anyhow::ensure!(
            self.apart.prefill_workers < self.workers,
            "{}: of {} workers none is left to generate; --prefill-workers must be less than --workers",
            self.name,
            self.workers
        );
        anyhow::ensure!(
            self.workers >= self.fleet.least_workers(),
            "{}: when the only worker dies there is nobody; --workers must be at least 2",
            self.name
        );
        Ok(())
    }

    /// R*: completions a second of round robin when everything is offered at once. `None` for the plain engine, whose load is not
    /// relative to it.
    pub fn saturated_rps(&self, tick: &mut dyn FnMut()) -> Option<f64> {
        let EngineKind::Preset(..) = self.engine else { return None };
        let measure = || {
            let round_robin = &named(&["round_robin".to_owned()]).expect("it is in the table")[0];
            let setup = Setup {
                routers: Routers::ONE,
                apart: Apart::NOBODY,
                background: Background::LeftOut,
                ..self.setup(round_robin, 0.0)
            };
            // One that is slow for a while is not slow for ever: R* is that of the fleet in health.
            run(setup, self.engines(None), tick).rate()
        };
        Some(*self.saturated.get_or_init(measure))
    }

    /// What no policy's mean time to the first token can be below: nobody waits, and all that was ever asked for before is cached, here
    /// and on the fastest worker. `None` for the plain engine, whose speed is set by the load.
    pub fn floor_ms(&self) -> Option<f64> {
        let EngineKind::Preset(..) = self.engine else { return None };
        let floor =
            || self.engines(None).first().map_or(0.0, |engine| floor::mean_s(self.workload, engine) * 1e3);
        Some(*self.floor.get_or_init(floor))
    }

    /// The same with `workers` of them.
    #[must_use]
    pub fn with_workers(&self, workers: usize) -> Self {
        Self { workers, saturated: OnceLock::new(), floor: OnceLock::new(), ..self.clone() }
    }

    /// What becomes of its requests where time passes `time_scale` times as slowly between them as in the workload. Not for the plain
    /// engine, whose speed is set by the load.
    #[must_use]
    pub fn outcome(&self, contender: &Contender, time_scale: f64, tick: &mut dyn FnMut()) -> Outcome {
        let engines = self.engines(Some(self.workload.duration_s() * time_scale));
        run(self.setup(contender, time_scale), engines, tick)
    }

    fn setup<'b>(&'b self, contender: &'b Contender, time_scale: f64) -> Setup<'b> {
        let Cell { workload, blocks, adapter_places, apart, routers, background, seed, .. } = *self;
        let at_ns = |share: f64| nanoseconds(workload.duration_s() * time_scale * share);
        let fault = (self.fleet == FleetKind::Restarting && time_scale > 0.0).then(|| Fault {
            worker: 0,
            dies_ns: at_ns(1.0 / 3.0),
            back_ns: at_ns(0.5),
        });
        Setup {
            workload,
            contender,
            time_scale,
            blocks,
            adapter_places,
            apart,
            routers,
            background,
            fault,
            seed,
        }
    }

    fn engines(&self, duration_s: Option<f64>) -> Vec<ScheduledEngine> {
        let EngineKind::Preset(preset) = &self.engine else { return Vec::new() };
        let third = nanoseconds(duration_s.unwrap_or(0.0) / 3.0);
        let pace = |number: usize| match self.fleet {
            FleetKind::HalfSpeed if number % 2 == 1 => Pace { slowness: 2.0, ..Pace::EVEN },
            FleetKind::Slowing if number == 0 => {
                Pace { slow_while: Some((third, 2 * third, 4.0)), ..Pace::EVEN }
            }
            _ => Pace::EVEN,
        };
        let queued_tokens_limit = QUEUED_TOKENS / self.workers;
        let build = |number| Build {
            preset,
            block_tokens: BLOCK_TOKENS,
            blocks: self.blocks,
            pace: pace(number),
            kv_bytes_per_s: self.apart.gb_per_s * 1e9,
            queued_tokens_limit,
            max_adapters: self.adapter_places.map_or(usize::MAX, |places| places as usize),
        };
        (0..self.workers).map(|number| ScheduledEngine::new(&build(number))).collect()
    }
}

impl<'a> Job<'a> {
    /// Runs it.
    #[must_use]
    pub fn run(self, objective: Objective, tick: &mut dyn FnMut()) -> Row<'a> {
        let outcome = self.outcome(tick);
        let figures = outcome.figures(self.cell.workload, objective);
        let in_flight = InFlightOverTime::of(&outcome.records, outcome.workers);
        Row { job: self, figures, parts: outcome.parts(self.cell.workload), in_flight }
    }

    /// Runs it, for all that became of its requests.
    #[must_use]
    pub fn outcome(self, tick: &mut dyn FnMut()) -> Outcome {
        let Job { cell, load, contender } = self;
        let workload = cell.workload;
        match cell.engine {
            EngineKind::Plain => {
                let total = workload.input_tokens() as f64;
                let tokens_per_s = total / workload.duration_s() / cell.workers as f64 / load;
                let engines = (0..cell.workers).map(|_| PlainEngine::new(tokens_per_s, cell.blocks));
                run(cell.setup(contender, 1.0), engines.collect(), tick)
            }
            EngineKind::Preset(..) => {
                let saturated = cell.saturated_rps(&mut || {}).unwrap_or(1.0);
                cell.outcome(contender, workload.rate() / (load * saturated), tick)
            }
        }
    }
}

/// Runs `jobs` on `threads` threads and hands rows to `emit` in the order of the jobs, each as soon as its turn has come.
pub fn run_all<'a>(
    jobs: &[Job<'a>],
    threads: usize,
    objective: Objective,
    tick: &(dyn Fn(u64) + Sync),
    emit: &mut (dyn FnMut(Row<'a>) + Send),
) {
    let work = |number: usize| {
        let job = jobs[number];
        let mut count = Ticks::new(tick);
        job.cell.saturated_rps(&mut || count.tick());
        job.run(objective, &mut || count.tick())
    };
    in_turn(jobs.len(), threads, &work, emit);
}

/// Does `work` for each number below `count` on `threads` threads, and hands what it gives to `emit` in the order of the numbers, each as soon as
/// its turn has come.
pub fn in_turn<T: Send>(
    count: usize,
    threads: usize,
    work: &(dyn Fn(usize) -> T + Sync),
    emit: &mut (dyn FnMut(T) + Send),
) {
    struct Pending<'r, T> {
        done: Vec<Option<T>>,
        emitted: usize,
        emit: &'r mut (dyn FnMut(T) + Send),
    }
    let pending = Mutex::new(Pending { done: (0..count).map(|_| None).collect(), emitted: 0, emit });
    let next = AtomicUsize::new(0);
    let take = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let done = work(number);
            let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
            let Pending { done: waiting, emitted, emit } = &mut *pending;
            waiting[number] = Some(done);
            while let Some(done) = waiting.get_mut(*emitted).and_then(Option::take) {
                *emitted += 1;
                emit(done);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.max(1) {
            scope.spawn(take);
        }
        take();
    });
}

/// Tells of requests by the thousand, since telling costs more than counting.
pub struct Ticks<'a> {
    told: &'a (dyn Fn(u64) + Sync),
    count: u64,
}

impl<'a> Ticks<'a> {
    const AT_ONCE: u64 = 1_000;

    /// None so far.
    #[must_use]
    pub fn new(told: &'a (dyn Fn(u64) + Sync)) -> Self {
        Self { told, count: 0 }
    }

    /// One more.
    pub fn tick(&mut self) {
        self.count += 1;
        if self.count == Self::AT_ONCE {
            (self.told)(std::mem::take(&mut self.count));
        }
    }
}

impl Drop for Ticks<'_> {
    fn drop(&mut self) {
        (self.told)(self.count);
    }
}
