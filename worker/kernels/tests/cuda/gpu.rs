//! The host's side of a GPU, on a fake one: `fake_cuda.cpp` runs what is asked of it on this machine, later than it was asked.
//!
//! What the same operations give is compared with the CPU's. And machines on which something is missing say so. Each test that needs a
//! machine runs itself once more, in a process that is on one.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::culib;
use half::bf16;
use rand::RngExt;
use worker_kernels::cuda::params::SiluMulParams;
use worker_kernels::cuda::{CudaError, CudaKernels, Gpu, Graph, Memory, blas, driver, launch};
use worker_kernels::{
    AttentionShape, CpuKernels, Device, Dtype, HeadSpan, KernelError, Kernels, KvLayout, Span, WeightView,
};

use crate::fake::FakeMachine;
use crate::machine::{crate_directory, rng, runs_on_gpu};

/// Set in a process on a fake machine.
const INSIDE: &str = "ROUNDHOUSE_FAKE_MACHINE";

fn inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs the test of this module once more, on `machine`; returns what it printed.
fn run_on(machine: &FakeMachine, test: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("gpu::{test}"), "--nocapture"]).env(INSIDE, "1");
    machine.enter(&mut command);
    let output = command.output().unwrap();
    let (printed, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && printed.contains("1 passed"), "{test}:\n{printed}{errors}");
    printed.into_owned()
}

fn machine() -> FakeMachine {
    FakeMachine::new(crate_directory())
}

fn machine_with_kernels() -> FakeMachine {
    machine().with_kernels(crate_directory())
}

/// Which GPU is asked for, by a test inside.
const ORDINAL: &str = "ROUNDHOUSE_ORDINAL";

#[test]
fn machines_that_lack_something_say_what() {
    if inside() {
        let ordinal = std::env::var(ORDINAL).map_or(0, |number| number.parse().unwrap());
        let error = CudaKernels::open(ordinal).err().expect("something is missing");
        return println!("refused: {error}");
    }
    let needed = "one of the 580 series (CUDA 13.0) or later is needed";
    let cases = [
        (FakeMachine::without_driver(), "no NVIDIA driver: libcuda.so.1 cannot be loaded".to_owned()),
        (machine().set("FAKE_VERSION", "12090"), format!("the NVIDIA driver is for CUDA 12.9; {needed}")),
        (
            FakeMachine::with_an_ancient_driver(crate_directory()),
            format!("the NVIDIA driver has no cuMemAllocAsync; {needed}"),
        ),
        (machine().set("FAKE_DEVICES", "0"), "the NVIDIA driver finds no GPU".to_owned()),
        (machine().set("FAKE_INIT_STATUS", "100"), "the NVIDIA driver finds no GPU".to_owned()),
        (machine().set("FAKE_INIT_STATUS", "999"), "cuInit failed with 999: unknown error".to_owned()),
        (
            machine().set("FAKE_CAPABILITY_MAJOR", "7"),
            "Fake GPU has compute capability 7.0; 8.0 or later is needed".to_owned(),
        ),
        (machine().set(ORDINAL, "3"), "there is no GPU 3: the driver finds 1, counted from 0".to_owned()),
        (
            machine_with_kernels().without_blas(),
            "no cuBLASLt: libcublasLt.so.13 cannot be loaded; it is part of CUDA 13".to_owned(),
        ),
    ];
    for (machine, reason) in cases {
        let printed = run_on(&machine, "machines_that_lack_something_say_what");
        assert!(printed.contains(&format!("refused: {reason}\n")), "not {reason:?}:\n{printed}");
    }
}

/// So that the lists of what is looked for before it is called are whole: what the fake has not, no test could have called.
#[test]
fn the_fake_has_what_is_looked_for_and_nothing_else() {
    let source = std::fs::read_to_string(crate_directory().join("tests/cuda/fake_cuda.cpp")).unwrap();
    let defined: BTreeSet<&str> = source
        .lines()
        .filter_map(|line| line.strip_prefix("Status cu")?.split_once('(').map(|(name, _)| name))
        .collect();
    let looked_for: BTreeSet<&str> = driver::FUNCTIONS
        .iter()
        .chain(blas::FUNCTIONS)
        .map(|name| name.strip_prefix("cu").unwrap())
        .collect();
    assert_eq!(defined, looked_for);
}

#[test]
fn every_generation_of_gpu_is_opened() {
    if inside() {
        let gpu = Gpu::open(0).unwrap();
        let (major, minor) = gpu.capability();
        return println!("{} {major}.{minor}, {} bytes free", gpu.name(), gpu.free_bytes().unwrap());
    }
    for major in [8, 9, 10, 11, 12] {
        let machine = machine_with_kernels().set("FAKE_CAPABILITY_MAJOR", major.to_string());
        let printed = run_on(&machine, "every_generation_of_gpu_is_opened");
        assert!(printed.contains(&format!("Fake GPU {major}.0, {} bytes free\n", 1 << 30)), "{printed}");
    }
}

/// A layer's weights, and the rows of two steps.
struct Layer {
    head_dim: usize,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    mlp: usize,
    vocab: usize,
    numbers: Vec<u8>,
}

/// Numbers that bf16 holds, so that both devices have the same weights.
fn weight_bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut rng = rng(seed);
    (0..count).flat_map(|_| bf16::from_f32(rng.random_range(-0.25f32..0.25)).to_le_bytes()).collect()
}

impl Layer {
    fn new(head_dim: usize) -> Self {
        let (heads, kv_heads, hidden, mlp, vocab) = (4, 2, 72, 104, 50);
        let numbers = weight_bytes(200 * 8 * head_dim * 4, 5);
        Self { head_dim, heads, kv_heads, hidden, mlp, vocab, numbers }
    }

    /// Different weights at different offsets.
    fn weight(&self, offset: usize, rows: usize, columns: usize) -> WeightView<'_> {
        WeightView::new(Dtype::Bf16, rows, columns, &self.numbers[2 * offset..][..2 * rows * columns])
            .unwrap()
    }

    /// One layer of a decoder over some steps, every operation in it; returns the logits of each, and tells `after` when it has them.
    fn run<K: Kernels>(
        &self,
        kernels: &K,
        steps: &[Rows],
        mut after: impl FnMut(),
    ) -> Result<Vec<Vec<f32>>, KernelError> {
        let Self { head_dim, heads, kv_heads, hidden, mlp, vocab, .. } = *self;
        let qkv_width = (heads + 2 * kv_heads) * head_dim;
        let table = kernels.linear(&[self.weight(3, vocab, hidden)], &[])?;
        let qkv_parts =
            [self.weight(0, heads * head_dim, hidden), self.weight(40, 2 * kv_heads * head_dim, hidden)];
        let qkv = kernels.linear(&qkv_parts, &[self.weight(7, 1, qkv_width)])?;
        let output =
            kernels.linear(&[self.weight(11, hidden, heads * head_dim)], &[self.weight(9, 1, hidden)])?;
        let gate_up = kernels.linear(&[self.weight(13, 2 * mlp, hidden)], &[])?;
        let down = kernels.linear(&[self.weight(17, hidden, mlp)], &[])?;
        let head = kernels.linear(&[self.weight(19, vocab, hidden)], &[])?;
        let (norm, head_norm) =
            (kernels.vector(self.weight(23, 1, hidden))?, kernels.vector(self.weight(29, 1, head_dim))?);
        let layout = KvLayout { layers: 2, kv_heads, head_dim, block_tokens: 4, blocks: 200 };
        let mut pool = kernels.kv_pool(layout)?;
        let (mut x, mut normed, mut wide, mut attended) =
            (kernels.buffer(), kernels.buffer(), kernels.buffer(), kernels.buffer());
        let (mut angles, mut logits) = (kernels.buffer(), kernels.buffer());
        let mut results = Vec::new();
        let blocks: Vec<Vec<u32>> = vec![vec![7, 3], vec![9, 8, 2], (20..180).rev().collect()];
        for rows in steps {
            let mut first_row = 0;
            let spans: Vec<Span<'_>> = rows
                .iter()
                .zip(&blocks)
                .map(|(&(context_tokens, rows), blocks)| {
                    first_row += rows;
                    Span { first_row: first_row - rows, rows, context_tokens, blocks }
                })
                .collect();
            let tokens: Vec<u32> = (0..first_row as u32).map(|row| (row * 7 + 1) % vocab as u32).collect();
            let turns: Vec<f32> = (0..first_row * head_dim).map(|i| ((i % 37) as f32 * 0.3).sin()).collect();
            kernels.write(&turns, head_dim, &mut angles)?;
            kernels.embed(&table, &tokens, &mut x)?;
            kernels.rms_norm(&x, &norm, 1e-5, &mut normed)?;
            kernels.linear_into(&normed, &qkv, &mut wide)?;
            let span = |first, heads| HeadSpan { first_column: first * head_dim, heads, head_dim };
            kernels.head_norm(&mut wide, span(heads, kv_heads), &head_norm, 1e-5)?;
            kernels.rope(&mut wide, &angles, span(0, heads + kv_heads))?;
            kernels.store_kv(&wide, &spans, 1, &mut pool)?;
            let scale = 1.0 / (head_dim as f32).sqrt();
            kernels.attention(
                &wide,
                &pool,
                AttentionShape { layer: 1, heads, scale, spans: &spans },
                &mut attended,
            )?;
            kernels.linear_add(&attended, &output, &mut x)?;
            kernels.rms_norm(&x, &norm, 1e-5, &mut normed)?;
            kernels.linear_into(&normed, &gate_up, &mut wide)?;
            kernels.silu_mul(&wide, &mut attended)?;
            kernels.linear_add(&attended, &down, &mut x)?;
            let last: Vec<usize> = spans.iter().map(|span| span.first_row + span.rows - 1).collect();
            kernels.select_rows(&x, &last, &mut attended)?;
            kernels.rms_norm(&attended, &norm, 1e-5, &mut normed)?;
            kernels.logits(&normed, &head, &mut logits)?;
            results.push(kernels.read(&logits)?.into_owned());
            after();
        }
        Ok(results)
    }
}

/// `(context, rows)` of three sequences: a prompt, a prompt in two chunks, and one that is decoded over 600 positions.
type Rows = [(usize, usize); 3];
const FIRST: Rows = [(0, 5), (0, 3), (0, 600)];
const SECOND: Rows = [(5, 1), (3, 6), (600, 1)];

fn compare_layers(kernels: &CudaKernels) {
    for head_dim in [64, 128, 256] {
        let layer = Layer::new(head_dim);
        let want = layer.run(&CpuKernels::new("test", 1).unwrap(), &[FIRST, SECOND], || {}).unwrap();
        let got = layer.run(kernels, &[FIRST, SECOND], || {}).unwrap();
        for (step, (got, want)) in got.iter().zip(&want).enumerate() {
            let spread = want.iter().map(|logit| logit.abs()).fold(0.0, f32::max);
            assert_eq!(got.len(), want.len());
            for (index, (got, want)) in got.iter().zip(want).enumerate() {
                let what = format!("head_dim {head_dim}, step {step}, logit {index}");
                assert!((got - want).abs() < 0.03 * spread, "{what}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn a_layer_gives_the_logits_of_the_cpu_and_gives_its_memory_back() {
    const NAME: &str = "a_layer_gives_the_logits_of_the_cpu_and_gives_its_memory_back";
    if runs_on_gpu() {
        return compare_layers(&CudaKernels::open(0).unwrap());
    }
    if !inside() {
        run_on(&machine_with_kernels(), NAME);
        return;
    }
    let before = fake("allocated");
    let kernels = CudaKernels::open(0).unwrap();
    compare_layers(&kernels);
    drop(kernels);
    assert_eq!(fake("allocated"), before);
}

/// What the fake GPU has counted.
fn fake(what: &str) -> u64 {
    let name = format!("fake_{what}");
    // SAFETY: the driver of this process is the fake, whose functions of such names have this type and read a number.
    unsafe { culib().get::<unsafe extern "C" fn() -> u64>(name.as_bytes()).unwrap()() }
}

/// Once buffers have grown, a step's only wait is that for its logits.
#[test]
fn a_step_waits_once() {
    if !inside() {
        run_on(&machine_with_kernels(), "a_step_waits_once");
        return;
    }
    let kernels = CudaKernels::open(0).unwrap();
    let mut waits = Vec::new();
    Layer::new(64).run(&kernels, &[SECOND, SECOND, SECOND], || waits.push(fake("waits"))).unwrap();
    assert_eq!([waits[1] - waits[0], waits[2] - waits[1]], [1, 1]);
}

/// The first layer of a step uploads what all of them need; the next step, or other blocks, is something new.
#[test]
fn a_steps_lists_are_uploaded_once_for_all_layers() {
    if !inside() {
        run_on(&machine_with_kernels(), "a_steps_lists_are_uploaded_once_for_all_layers");
        return;
    }
    let kernels = CudaKernels::open(0).unwrap();
    let layout = KvLayout { layers: 3, kv_heads: 2, head_dim: 64, block_tokens: 4, blocks: 10 };
    let (heads, rows) = (4, 6);
    let numbers = weight_bytes((heads + 4) * 64 * 8, 3);
    let weight =
        |rows, columns| WeightView::new(Dtype::Bf16, rows, columns, &numbers[..2 * rows * columns]).unwrap();
    let layer = kernels.linear(&[weight((heads + 4) * 64, 8)], &[]).unwrap();
    let norm = kernels.vector(weight(1, 8)).unwrap();
    let (mut x, mut normed, mut qkv, mut out) =
        (kernels.buffer(), kernels.buffer(), kernels.buffer(), kernels.buffer());
    kernels.write(&vec![1.0; rows * 8], 8, &mut x).unwrap();
    kernels.rms_norm(&x, &norm, 1e-5, &mut normed).unwrap();
    kernels.linear_into(&normed, &layer, &mut qkv).unwrap();
    let mut pool = kernels.kv_pool(layout).unwrap();
    let mut uploads_of = |spans: &[Span<'_>], layer| {
        let before = fake("uploads");
        kernels.store_kv(&qkv, spans, layer, &mut pool)?;
        kernels.attention(&qkv, &pool, AttentionShape { layer, heads, scale: 0.1, spans }, &mut out)?;
        Ok::<u64, KernelError>(fake("uploads") - before)
    };
    for last_block in [4, 5, 4] {
        let (first, second) = ([1, 2], [3, last_block]);
        let spans = [
            Span { first_row: 0, rows: 1, context_tokens: 7, blocks: &first },
            Span { first_row: 1, rows: 5, context_tokens: 2, blocks: &second },
        ];
        assert!(uploads_of(&spans, 0).unwrap() > 0);
        assert_eq!((uploads_of(&spans, 1).unwrap(), uploads_of(&spans, 2).unwrap()), (0, 0));
        let error = uploads_of(&spans, 3).unwrap_err().to_string();
        assert!(error.contains("a layer below 3"), "{error}");
    }
}

#[test]
fn too_little_memory_is_said_with_its_size() {
    if !inside() {
        run_on(&machine_with_kernels(), "too_little_memory_is_said_with_its_size");
        return;
    }
    let kernels = CudaKernels::open(0).unwrap();
    let layout = KvLayout { layers: 32, kv_heads: 8, head_dim: 128, block_tokens: 16, blocks: 1000 };
    let error = kernels.kv_pool(layout).err().unwrap();
    assert_eq!(error, KernelError::OutOfMemory { bytes: 32 * 8 * 128 * 16 * 1000 * 2 });
    for (layout, wanted) in [
        (KvLayout { head_dim: 96, ..layout }, "64, 128 or 256"),
        (KvLayout { block_tokens: 24, ..layout }, "power of two"),
        (KvLayout { blocks: 1 << 28, ..layout }, "positions"),
    ] {
        let error = kernels.kv_pool(layout).err().unwrap().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    assert!(matches!(CudaError::NoDevice.into(), KernelError::Device(_)));
}

/// A launch over memory of its own: silu(gate) · up of one row.
struct Gate {
    gate_up: Memory,
    out: Memory,
}

impl Gate {
    fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gate_up: Memory::kept(gpu, 32).unwrap(), out: Memory::kept(gpu, 16).unwrap() }
    }

    fn launch(&self, gpu: &Gpu) -> Result<(), CudaError> {
        let params =
            SiluMulParams { gate_up: self.gate_up.address(), out: self.out.address(), rows: 1, width: 8 };
        // SAFETY: a row of 16 numbers in, one of 8 out.
        unsafe { gpu.launch(launch::silu_mul(1, 8).unwrap(), &params) }
    }

    fn write(&self, up: f32) {
        let both = [vec![bf16::from_f32(30.0); 8], vec![bf16::from_f32(up); 8]].concat();
        self.gate_up.write(&both.into_iter().map(bf16::to_bits).collect::<Vec<u16>>()).unwrap();
    }

    fn result(&self) -> f32 {
        bf16::from_bits(self.out.read::<u16>(8).unwrap()[7]).to_f32()
    }
}

#[test]
fn a_graph_computes_anew_each_time_it_is_launched() {
    if !inside() && !runs_on_gpu() {
        run_on(&machine_with_kernels(), "a_graph_computes_anew_each_time_it_is_launched");
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let gate = Gate::new(&gpu);
    gate.write(1.0);
    gate.launch(&gpu).unwrap();
    let graph = Graph::record(&gpu, || gate.launch(&gpu)).unwrap();
    gate.write(2.0);
    assert_eq!(gate.result(), 30.0, "recording runs nothing");
    for up in [3.0, 4.0] {
        gate.write(up);
        // SAFETY: the memory that it was recorded with is still there.
        unsafe { graph.launch() }.unwrap();
        assert_eq!(gate.result(), 30.0 * up);
    }
    assert_eq!(Graph::record(&gpu, || Ok(())).err(), Some(CudaError::EmptyGraph));
    // What is refused within leaves a stream that runs things again.
    let refused: [(&str, &dyn Fn() -> Result<(), CudaError>); 4] = [
        ("a wait", &|| gpu.synchronize()),
        ("an allocation", &|| Memory::kept(&gpu, 16).map(drop)),
        ("a copy from the host", &|| gate.gate_up.write(&[1u16])),
        ("a copy to the host", &|| gate.out.read::<u16>(8).map(drop)),
    ];
    for (what, forbidden) in refused {
        let recorded = Graph::record(&gpu, || gate.launch(&gpu).and_then(|()| forbidden()));
        assert_eq!(recorded.err(), Some(CudaError::Recorded(what)));
    }
    gate.launch(&gpu).unwrap();
    assert_eq!(gate.result(), 120.0);
}

#[test]
fn memory_is_copied_in_the_order_of_the_launches() {
    if !inside() && !runs_on_gpu() {
        run_on(&machine_with_kernels(), "memory_is_copied_in_the_order_of_the_launches");
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let (gate, copy) = (Gate::new(&gpu), Memory::kept(&gpu, 16).unwrap());
    let step = || gate.launch(&gpu).and_then(|()| copy.copy_from(&gate.out));
    gate.write(2.0);
    step().unwrap();
    gate.write(3.0);
    gate.launch(&gpu).unwrap();
    assert_eq!((copy.read::<u16>(8).unwrap()[0], gate.result()), (bf16::from_f32(60.0).to_bits(), 90.0));
    let graph = Graph::record(&gpu, step).unwrap();
    // SAFETY: the memory that it was recorded with is still there.
    unsafe { graph.launch() }.unwrap();
    assert_eq!(copy.read::<u16>(8).unwrap()[7], bf16::from_f32(90.0).to_bits());
}

#[test]
fn work_is_done_when_its_time_is_known() {
    if !inside() && !runs_on_gpu() {
        run_on(&machine_with_kernels(), "work_is_done_when_its_time_is_known");
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let gate = Gate::new(&gpu);
    gate.write(2.0);
    assert!(gpu.time(|| gate.launch(&gpu)).unwrap() > Duration::ZERO);
    assert_eq!(gate.result(), 60.0);
}

/// More uploads between two waits than the staging memory holds, and larger ones, all different.
#[test]
fn uploads_keep_their_values_until_they_are_copied() {
    if !inside() && !runs_on_gpu() {
        run_on(&machine_with_kernels(), "uploads_keep_their_values_until_they_are_copied");
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let lengths = [1, 63, 64, 65, 1 << 20, 1 << 20, 7, (1 << 21) + 1, 100, 1 << 20];
    let upload = |number: usize, length: usize| {
        let values: Vec<u32> = (0..length as u32).map(|i| i * 7 + number as u32).collect();
        let memory = Memory::kept(&gpu, 4 * length).unwrap();
        memory.write(&values).unwrap();
        (memory, values)
    };
    let uploads: Vec<_> =
        lengths.into_iter().enumerate().map(|(number, length)| upload(number, length)).collect();
    for (number, (memory, values)) in uploads.iter().enumerate() {
        assert!(memory.read::<u32>(values.len()).unwrap() == *values, "upload {number}");
    }
}
