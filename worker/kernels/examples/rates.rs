//! How fast the CUDA kernels are on this machine's GPU: one line of JSON for each, on standard output.
//!
//! `rates [small]`: each kernel runs for about half a second after a warm-up, timed by events on the GPU: from a graph, which is the kernel's
//! own time, and launched one by one, where the host may be slower. `small` are shapes for trying this out. FLOPs and bytes are counted as
//! the kernels' own files say. Inputs are random, since a GPU computes faster on zeros. Called by `bench/gpu/run.sh`.

#![expect(clippy::unwrap_used, reason = "a measurement that cannot go on should stop")]

use std::sync::Arc;
use std::time::Duration;

use worker_kernels::Span;
use worker_kernels::cuda::launch::{self, Launch};
use worker_kernels::cuda::moe::{self, MoeGemmParams, MoeGroupParams, MoeTile};
use worker_kernels::cuda::params::{
    CombineParams, DecodeParams, DeviceValue, Draw, Paging, PrefillParams, RmsNormParams, RopeStoreParams,
    SampleParams, SiluMulParams, Visibility,
};
use worker_kernels::cuda::plan::AttentionPlan;
use worker_kernels::cuda::{CudaError, Gpu, Graph, Memory};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const BLOCK_TOKENS: usize = 16;
const ALL: Visibility = Visibility { window: 0, sink_tokens: 0 };

/// What a launch does, for the rate.
#[derive(Clone, Copy)]
enum Work {
    Flops(f64),
    Bytes(f64),
}

/// So many that starting a graph does not show.
const STEPS_OF_A_GRAPH: u32 = 10;

struct Rates {
    gpu: Arc<Gpu>,
    patience: Duration,
    seed: u64,
}

impl Rates {
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

    fn pool(&mut self, head_dim: usize, positions: usize) -> Memory {
        self.random_bf16(positions.next_multiple_of(BLOCK_TOKENS) * KV_HEADS * head_dim)
    }

    /// Runs `step` over and over, and prints how long one takes and at what rate.
    fn measure(&self, what: &str, work: Work, step: impl Fn() -> Result<(), CudaError>) {
        let eager = |times: u32| self.gpu.time(|| (0..times).try_for_each(|_| step())).unwrap();
        eager(2);
        let once = eager(3) / 3;
        let graphs = self.patience.as_secs_f64() / once.as_secs_f64().max(1e-6) / f64::from(STEPS_OF_A_GRAPH);
        let graphs = graphs.clamp(1.0, 1e4) as u32;
        let times = graphs * STEPS_OF_A_GRAPH;
        let graph = Graph::record(&self.gpu, || (0..STEPS_OF_A_GRAPH).try_for_each(|_| step())).unwrap();
        // SAFETY: all that `step` launches on is still there.
        let from_graphs =
            || self.gpu.time(|| (0..graphs).try_for_each(|_| unsafe { graph.launch() })).unwrap();
        from_graphs();
        let seconds = from_graphs().as_secs_f64() / f64::from(times);
        let (unit, rate) = match work {
            Work::Flops(flops) => ("tflops", flops / seconds / 1e12),
            Work::Bytes(bytes) => ("gbytes_per_second", bytes / seconds / 1e9),
        };
        let microseconds = seconds * 1e6;
        let eager = eager(times).as_secs_f64() / f64::from(times) * 1e6;
        println!(
            r#"{{"what":"{what}","microseconds":{microseconds:.2},"{unit}":{rate:.3},"eager_microseconds":{eager:.2},"launches":{times}}}"#
        );
    }

    fn launch<P: DeviceValue>(&self, launch: Launch, params: &P) -> Result<(), CudaError> {
        // SAFETY: each caller gives the kernel its own parameters, over memory of the shapes it launches with.
        unsafe { self.gpu.launch(launch, params) }
    }

    /// Causal attention of one whole prompt.
    fn prefill(&mut self, head_dim: usize, rows: usize) {
        let (width, blocks) = (HEADS * head_dim, table(1, rows));
        let (q, out) = (self.random_bf16(rows * width), self.empty(rows * width * 2));
        let (keys, values) = (self.pool(head_dim, rows), self.pool(head_dim, rows));
        let span = Span { first_row: 0, rows, context_tokens: 0, blocks: &blocks[0] };
        let plan = AttentionPlan::new(&[span], head_dim, ALL).unwrap();
        let (tiles, sequences, tables) =
            (self.upload(&plan.tiles), self.upload(&plan.sequences), self.upload(&plan.block_tables));
        let params = PrefillParams {
            q: q.address(),
            keys: keys.address(),
            values: values.address(),
            out: out.address(),
            tiles: tiles.address(),
            sequences: sequences.address(),
            paging: paging(&tables),
            heads: HEADS as u32,
            q_stride: width as u32,
            out_stride: width as u32,
            score_scale: 1.0 / (head_dim as f32).sqrt(),
            ..Default::default()
        };
        let launch = launch::prefill(head_dim, plan.tiles.len(), HEADS).unwrap();
        let flops = 4.0 * width as f64 * (rows as f64).powi(2) / 2.0;
        self.measure(&format!("prefill head_dim {head_dim}, {rows} rows"), Work::Flops(flops), || {
            self.launch(launch, &params)
        });
    }

    /// One new row for each of many sequences, and the sum of their parts.
    fn decode(&mut self, head_dim: usize, sequences: usize, context: usize) {
        let (width, blocks) = (HEADS * head_dim, table(sequences, context));
        let (q, out) = (self.random_bf16(sequences * width), self.empty(sequences * width * 2));
        let positions = sequences * context.next_multiple_of(BLOCK_TOKENS);
        let (keys, values) = (self.pool(head_dim, positions), self.pool(head_dim, positions));
        let spans: Vec<Span<'_>> = (0..)
            .zip(&blocks)
            .map(|(first_row, blocks)| Span { first_row, rows: 1, context_tokens: context - 1, blocks })
            .collect();
        let plan = AttentionPlan::new(&spans, head_dim, ALL).unwrap();
        let parts = plan.slots as usize * HEADS;
        let (partial_sums, partial_logs) = (self.empty(parts * head_dim * 4), self.empty(parts * 4));
        let (chunks, merges) = (self.upload(&plan.chunks), self.upload(&plan.merges));
        let (list, tables) = (self.upload(&plan.sequences), self.upload(&plan.block_tables));
        let params = DecodeParams {
            q: q.address(),
            keys: keys.address(),
            values: values.address(),
            out: out.address(),
            partial_sums: partial_sums.address(),
            partial_logs: partial_logs.address(),
            chunks: chunks.address(),
            sequences: list.address(),
            paging: paging(&tables),
            heads: HEADS as u32,
            q_stride: width as u32,
            out_stride: width as u32,
            score_scale: 1.0 / (head_dim as f32).sqrt(),
            ..Default::default()
        };
        let sum = CombineParams {
            partial_sums: partial_sums.address(),
            partial_logs: partial_logs.address(),
            merges: merges.address(),
            out: out.address(),
            heads: HEADS as u32,
            out_stride: width as u32,
            ..Default::default()
        };
        let decode = launch::decode(head_dim, plan.chunks.len(), HEADS, KV_HEADS).unwrap();
        let combine = launch::combine(head_dim, plan.merges.len(), HEADS).unwrap();
        let bytes = 4.0 * (KV_HEADS * head_dim * sequences * context) as f64;
        let what = format!("decode head_dim {head_dim}, {sequences} sequences of {context}");
        self.measure(&what, Work::Bytes(bytes), || {
            self.launch(decode, &params)?;
            self.launch(combine, &sum)
        });
    }

    fn rms_norm(&mut self, rows: usize, width: usize) {
        let (x, weight) = (self.random_f32(rows * width), self.random_f32(width));
        let out = self.empty(rows * width * 2);
        let params = RmsNormParams {
            x: x.address(),
            addend: 0,
            weight: weight.address(),
            out: out.address(),
            width: width as u32,
            eps: 1e-5,
        };
        let launch = launch::rms_norm(rows, width).unwrap();
        let what = format!("rms_norm {rows} x {width}");
        self.measure(&what, Work::Bytes(6.0 * (rows * width) as f64), || self.launch(launch, &params));
    }

    fn rope_store(&mut self, rows: usize, head_dim: usize) {
        let width = (HEADS + 2 * KV_HEADS) * head_dim;
        let (qkv, angles) = (self.random_bf16(rows * width), self.random_f32(rows * head_dim));
        let (keys, values) = (self.pool(head_dim, rows), self.pool(head_dim, rows));
        let norm = self.random_f32(head_dim);
        let slots = self.upload(&(0..rows as u32).collect::<Vec<u32>>());
        let params = RopeStoreParams {
            qkv: qkv.address(),
            keys: keys.address(),
            values: values.address(),
            query_norm: norm.address(),
            key_norm: norm.address(),
            angles: angles.address(),
            slots: slots.address(),
            // The block tables are not read.
            paging: paging(&slots),
            rows: rows as u32,
            heads: HEADS as u32,
            qkv_stride: width as u32,
            eps: 1e-5,
            ..Default::default()
        };
        let launch = launch::rope_store(head_dim, rows, HEADS + 2 * KV_HEADS).unwrap();
        let bytes = (4 * rows * width + 4 * rows * head_dim) as f64;
        self.measure(&format!("rope_store {rows} rows"), Work::Bytes(bytes), || self.launch(launch, &params));
    }

    fn silu_mul(&mut self, rows: usize, width: usize) {
        let (gate_up, out) = (self.random_bf16(2 * rows * width), self.empty(rows * width * 2));
        let params = SiluMulParams {
            gate_up: gate_up.address(),
            out: out.address(),
            rows: rows as u32,
            width: width as u32,
        };
        let launch = launch::silu_mul(rows, width).unwrap();
        let what = format!("silu_mul {rows} x {width}");
        self.measure(&what, Work::Bytes(6.0 * (rows * width) as f64), || self.launch(launch, &params));
    }

    /// The first product of a mixture of experts, rows spread evenly over them.
    fn moe_gemm(&mut self, rows: usize, (experts, top_k): (usize, usize), inputs: usize, outputs: usize) {
        let pairs = rows * top_k;
        let (x, w) = (self.random_bf16(rows * inputs), self.random_bf16(experts * outputs * inputs));
        let out = self.empty(pairs * outputs * 2);
        let chosen: Vec<u32> = (0..pairs).map(|pair| (pair % experts) as u32).collect();
        let (chosen, order, places) = (self.upload(&chosen), self.empty(pairs * 4), self.empty(pairs * 4));
        let tiles = self.empty(moe::most_tiles(pairs, experts) * size_of::<MoeTile>());
        let tile_count = self.empty(4);
        let group = MoeGroupParams {
            chosen: chosen.address(),
            order: order.address(),
            places: places.address(),
            tiles: tiles.address(),
            tile_count: tile_count.address(),
            pairs: pairs as u32,
            experts: experts as u32,
        };
        self.launch(moe::group(pairs, experts).unwrap(), &group).unwrap();
        let params = MoeGemmParams {
            x: x.address(),
            w: w.address(),
            out: out.address(),
            order: order.address(),
            tiles: tiles.address(),
            tile_count: tile_count.address(),
            inputs: inputs as u32,
            outputs: outputs as u32,
            top_k: top_k as u32,
            reserved: 0,
        };
        let launch = moe::multiply(pairs, experts, inputs, outputs).unwrap();
        let work = if pairs / experts < 200 {
            Work::Bytes(2.0 * (experts.min(pairs) * outputs * inputs + pairs * (inputs + outputs)) as f64)
        } else {
            Work::Flops(2.0 * (pairs * inputs * outputs) as f64)
        };
        let what = format!("moe_gemm {rows} rows, {top_k} of {experts} experts, {inputs} to {outputs}");
        self.measure(&what, work, || self.launch(launch, &params));
    }

    fn sample(&mut self, rows: usize, vocab: usize) {
        let (logits, tokens) = (self.random_f32(rows * vocab), self.empty(rows * 4));
        for (name, top_k, top_p) in [("plain", 0, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)] {
            let draw = Draw { seed: 1, position: 0, temperature: 0.1, top_p, min_p: 0.0, top_k };
            let draws = self.upload(&vec![draw; rows]);
            let params = SampleParams {
                logits: logits.address(),
                draws: draws.address(),
                tokens: tokens.address(),
                vocab: vocab as u32,
                reserved: 0,
            };
            let launch = launch::sample(rows, vocab).unwrap();
            let what = format!("sample {rows} x {vocab}, {name}");
            self.measure(&what, Work::Bytes(4.0 * (rows * vocab) as f64), || self.launch(launch, &params));
        }
    }
}

/// Blocks of some sequences, in disorder.
fn table(sequences: usize, positions: usize) -> Vec<Vec<u32>> {
    let each = positions.div_ceil(BLOCK_TOKENS);
    let total = sequences * each;
    // A step without a divisor in common with the total visits every block once.
    let step = (total / 3 + 1..).find(|&step| gcd(step, total) == 1).unwrap();
    let blocks: Vec<u32> = (0..total).map(|index| (index * step % total) as u32).collect();
    blocks.chunks(each).map(<[u32]>::to_vec).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn paging(tables: &Memory) -> Paging {
    Paging { block_tables: tables.address(), kv_heads: KV_HEADS as u32, block_shift: BLOCK_TOKENS.ilog2() }
}

fn main() {
    let small = std::env::args().nth(1).is_some_and(|argument| argument == "small");
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("rates: {error}");
            std::process::exit(1);
        }
    };
    let (major, minor) = gpu.capability();
    println!(r#"{{"gpu":"{}","compute_capability":"{major}.{minor}"}}"#, gpu.name());
    let patience = Duration::from_millis(if small { 1 } else { 500 });
    let mut rates = Rates { gpu, patience, seed: 0x2545_f491_4f6c_dd1d };
    let (rows, sequences, context) = if small { (140, 2, 600) } else { (16_384, 64, 4096) };
    for head_dim in [64, 128, 256] {
        rates.prefill(head_dim, rows / 2);
        rates.decode(head_dim, sequences, context);
    }
    rates.prefill(128, rows);
    rates.rms_norm(rows, 4096);
    rates.rope_store(rows, 128);
    rates.silu_mul(rows, if small { 64 } else { 12_288 });
    let (experts, hidden, inner) = if small { ((4, 2), 64, 48) } else { ((128, 8), 2048, 768) };
    for rows in [sequences, rows] {
        rates.moe_gemm(rows, experts, hidden, 2 * inner);
    }
    rates.sample(sequences, if small { 1000 } else { 151_936 });
}
