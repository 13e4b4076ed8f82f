//! How fast the CUDA kernels are on this machine's GPU: lines of JSON on standard output.
//!
//! `rates NAME [small]` measures one thing, `rates list` names all, `rates gpu` says on what. Each is run in a process of its own (`bench/gpu/run.sh`), since a kernel that
//! faults leaves a process without a GPU. A kernel runs for about half a second after a warm-up, timed by events on the GPU: from a graph,
//! and launched one by one, where the host may be slower; in turns, of which the medians are told, since a GPU at its limit of power changes
//! its clock. The rate is that of the faster of the two: a graph copies by another engine than a call does. `small` are shapes for trying this out. FLOPs and
//! bytes are counted as the kernels' own files say; `copy` and `product` are the ceilings to hold them against. Inputs are random, since a
//! GPU computes faster on zeros.

#![expect(clippy::unwrap_used, reason = "a measurement that cannot go on should stop")]

mod attention;
mod ceilings;
mod rows;

use std::sync::Arc;
use std::time::Duration;

use worker_kernels::cuda::launch::Launch;
use worker_kernels::cuda::params::DeviceValue;
use worker_kernels::cuda::{CudaError, Gpu, Graph, Memory};

/// A name, and what measures it.
type Rate = (&'static str, fn(&mut Rates));

/// Everything there is to measure.
const ALL: &[Rate] = &[
    ("copy", ceilings::copy),
    ("product", ceilings::product),
    ("prefill_64", |rates| attention::prefill(rates, 64, 8192)),
    ("prefill_128", |rates| attention::prefill(rates, 128, 8192)),
    ("prefill_256", |rates| attention::prefill(rates, 256, 8192)),
    ("prefill_128_long", |rates| attention::prefill(rates, 128, 16_384)),
    ("prefill_64_wgmma", |rates| attention::prefill_by_wgmma(rates, 64, 8192)),
    ("prefill_128_wgmma", |rates| attention::prefill_by_wgmma(rates, 128, 8192)),
    ("prefill_128_wgmma_long", |rates| attention::prefill_by_wgmma(rates, 128, 16_384)),
    ("prefill_256_wgmma", |rates| attention::prefill_by_wgmma(rates, 256, 8192)),
    ("decode_64", |rates| attention::decode(rates, 64)),
    ("decode_128", |rates| attention::decode(rates, 128)),
    ("decode_256", |rates| attention::decode(rates, 256)),
    ("decode_128_alone", attention::decode_alone),
    ("decode_128_wide", attention::decode_wide),
    ("mixed_128", attention::mixed),
    ("rms_norm", rows::rms_norm),
    ("rope_store", rows::rope_store),
    ("silu_mul", rows::silu_mul),
    ("linear_few_rows", rows::linear_few_rows),
    ("embed", rows::embed),
    ("moe_gemm_few_rows", |rates| rows::moe_gemm(rates, 64)),
    ("moe_gemm_many_rows", |rates| rows::moe_gemm(rates, 16_384)),
    ("sample", rows::sample),
];

/// What a launch does, for the rate.
#[derive(Clone, Copy)]
enum Work {
    Flops(f64),
    Bytes(f64),
}

/// Of the shapes.
#[derive(Clone, Copy, PartialEq)]
enum Size {
    Full,
    Small,
}

/// How often each way of launching is timed.
const ROUNDS: usize = 5;

struct Rates {
    name: &'static str,
    gpu: Arc<Gpu>,
    size: Size,
    seed: u64,
}

impl Rates {
    /// A length, or one of 40 in its place to try things out.
    fn length(&self, full: usize) -> usize {
        match self.size {
            Size::Full => full,
            Size::Small => full.min(40),
        }
    }

    /// How long a turn is, and of how many steps a graph is: so many that starting it does not show.
    fn patience(&self) -> (Duration, u32) {
        match self.size {
            Size::Full => (Duration::from_millis(100), 10),
            Size::Small => (Duration::from_millis(1), 1),
        }
    }

    /// Numbers in [-1, 1).
    fn random_bf16(&mut self, count: usize) -> Memory {
        let numbers: Vec<u16> = (0..count).map(|_| (self.next_float().to_bits() >> 16) as u16).collect();
        self.upload(&numbers)
    }

    fn random_f32(&mut self, count: usize) -> Memory {
        let numbers: Vec<f32> = (0..count).map(|_| self.next_float()).collect();
        self.upload(&numbers)
    }

    /// xorshift64 (Marsaglia 2003).
    fn next_float(&mut self) -> f32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn upload<T: DeviceValue>(&self, values: &[T]) -> Memory {
        let memory = self.empty(size_of_val(values));
        memory.write(values).unwrap();
        memory
    }

    fn empty(&self, bytes: usize) -> Memory {
        Memory::kept(&self.gpu, bytes).unwrap()
    }

    /// Runs `step` over and over, and prints how long one takes and at what rate.
    fn measure(&self, what: &str, work: Work, step: impl Fn() -> Result<(), CudaError>) {
        let eager = |times: u32| self.gpu.time(|| (0..times).try_for_each(|_| step())).unwrap();
        eager(2);
        let once = eager(3) / 3;
        let (patience, steps) = self.patience();
        let graphs = patience.as_secs_f64() / once.as_secs_f64().max(1e-6) / f64::from(steps);
        let graphs = graphs.clamp(1.0, 1e4) as u32;
        let times = graphs * steps;
        let graph = Graph::record(&self.gpu, || (0..steps).try_for_each(|_| step())).unwrap();
        // SAFETY: all that `step` launches on is still there.
        let from_graphs =
            || self.gpu.time(|| (0..graphs).try_for_each(|_| unsafe { graph.launch() })).unwrap();
        from_graphs();
        let each = |seconds: Duration| seconds.as_secs_f64() / f64::from(times) * 1e6;
        let mut rounds: [(f64, f64); ROUNDS] =
            std::array::from_fn(|_| (each(from_graphs()), each(eager(times))));
        let mut median = |of: fn(&(f64, f64)) -> f64| {
            rounds.sort_by(|a, b| of(a).total_cmp(&of(b)));
            of(&rounds[ROUNDS / 2])
        };
        let (from_graph, eager) = (median(|round| round.0), median(|round| round.1));
        let seconds = from_graph.min(eager) / 1e6;
        let (unit, rate) = match work {
            Work::Flops(flops) => ("tflops", flops / seconds / 1e12),
            Work::Bytes(bytes) => ("gbytes_per_second", bytes / seconds / 1e9),
        };
        let name = self.name;
        println!(
            r#"{{"name":"{name}","what":"{what}","microseconds":{from_graph:.2},"{unit}":{rate:.3},"eager_microseconds":{eager:.2},"launches":{}}}"#,
            times * ROUNDS as u32
        );
    }

    /// Says that there is nothing to measure on this GPU.
    fn not_here(&self, reason: &str) {
        println!(r#"{{"name":"{}","verdict":"not here","reason":"{reason}"}}"#, self.name);
    }

    fn launch<P: DeviceValue>(&self, launch: Launch, params: &P) -> Result<(), CudaError> {
        // SAFETY: each caller gives the kernel its own parameters, over memory of the shapes it launches with.
        unsafe { self.gpu.launch(launch, params) }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (asked, size) = match arguments[..] {
        ["gpu"] => return describe(),
        ["list"] => return ALL.iter().for_each(|(name, _)| println!("{name}")),
        [name] => (name, Size::Full),
        [name, "small"] => (name, Size::Small),
        _ => refuse("usage: rates NAME [small], rates list, or rates gpu"),
    };
    let Some(&(name, measure)) = ALL.iter().find(|(name, _)| *name == asked) else {
        refuse(&format!("nothing is called {asked}; rates list names all there is"));
    };
    let gpu = Gpu::open(0).unwrap_or_else(|error| refuse(&error.to_string()));
    measure(&mut Rates { name, gpu, size, seed: 0x2545_f491_4f6c_dd1d });
}

fn describe() {
    let gpu = Gpu::open(0).unwrap_or_else(|error| refuse(&error.to_string()));
    let (major, minor) = gpu.capability();
    println!("{}, compute capability {major}.{minor}", gpu.name());
}

fn refuse(reason: &str) -> ! {
    eprintln!("rates: {reason}");
    std::process::exit(2);
}
