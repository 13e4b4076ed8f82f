//! The host's side of a GPU, on a fake one: `fake_cuda.cpp` runs what is asked of it on this machine, later than it was asked.
//!
//! What the same operations give is compared with the CPU's. And machines on which something is missing say so. Each test that needs a
//! machine runs itself once more, in a process that is on one.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Arc;

use cudarc::driver::sys::culib;
use worker_kernels::cuda::{
    CudaBuffer, CudaError, CudaKernels, CudaKvPool, CudaLinear, Gpu, Graph, Memory, blas, driver,
};
use worker_kernels::{
    AttentionShape, Device, Dtype, KernelError, Kernels, KvLayout, RopeShape, Span, WeightView,
};

use crate::device::has_gpu;
use crate::fake::FakeMachine;
use crate::layer::{Layer, SECOND, weight_bytes};
use crate::machine::crate_directory;

/// Set in a process on a fake machine.
const INSIDE: &str = "ROUNDHOUSE_FAKE_MACHINE";

pub(crate) fn inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs a test, named with its module, once more on `machine`; returns what it printed.
pub(crate) fn run_on(machine: &FakeMachine, test: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
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

pub(crate) fn machine_with_kernels() -> FakeMachine {
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
        let printed = run_on(&machine, "gpu::machines_that_lack_something_say_what");
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
        let printed = run_on(&machine, "gpu::every_generation_of_gpu_is_opened");
        assert!(printed.contains(&format!("Fake GPU {major}.0, {} bytes free\n", 1 << 30)), "{printed}");
    }
}

/// What the fake GPU has counted.
pub(crate) fn fake(what: &str) -> u64 {
    let name = format!("fake_{what}");
    // SAFETY: the driver of this process is the fake, whose functions of such names have this type and read a number.
    unsafe { culib().get::<unsafe extern "C" fn() -> u64>(name.as_bytes()).unwrap()() }
}

/// Once buffers have grown, a step's only wait is that for its logits.
#[test]
fn a_step_waits_once() {
    if !inside() {
        run_on(&machine_with_kernels(), "gpu::a_step_waits_once");
        return;
    }
    let kernels = CudaKernels::open(0).unwrap();
    let mut waits = Vec::new();
    Layer::new(64).run(&kernels, &[SECOND, SECOND, SECOND], || waits.push(fake("waits"))).unwrap();
    assert_eq!([waits[1] - waits[0], waits[2] - waits[1]], [1, 1]);
}

/// Part of a model: norm, projection, store and attention, over rows that a test writes.
struct Part {
    kernels: CudaKernels,
    norm: Memory,
    projection: CudaLinear,
    x: CudaBuffer,
    /// That turn nothing.
    angles: CudaBuffer,
    normed: CudaBuffer,
    qkv: CudaBuffer,
    out: CudaBuffer,
    pool: CudaKvPool,
}

const HEADS: usize = 4;
const ROWS: usize = 6;
const WIDTH: usize = 8;

impl Part {
    fn new() -> Self {
        let kernels = CudaKernels::open(0).unwrap();
        let layout = KvLayout { layers: 3, kv_heads: 2, head_dim: 64, block_tokens: 4, blocks: 10 };
        let outputs = (HEADS + 4) * 64;
        let numbers = weight_bytes(outputs * WIDTH, 3);
        let weight = |rows| WeightView::new(Dtype::Bf16, rows, WIDTH, &numbers[..2 * rows * WIDTH]).unwrap();
        let mut angles = kernels.buffer();
        kernels.write(&[[1.0; 32], [0.0; 32]].concat().repeat(16), 64, &mut angles).unwrap();
        Self {
            angles,
            norm: kernels.vector(weight(1)).unwrap(),
            projection: kernels.linear(&[weight(outputs)], &[]).unwrap(),
            x: kernels.buffer(),
            normed: kernels.buffer(),
            qkv: kernels.buffer(),
            out: kernels.buffer(),
            pool: kernels.kv_pool(layout).unwrap(),
            kernels,
        }
    }

    fn write(&mut self, seed: usize) {
        let rows: Vec<f32> = (0..ROWS * WIDTH).map(|index| ((index * seed) % 13) as f32 - 6.0).collect();
        self.kernels.write(&rows, WIDTH, &mut self.x).unwrap();
    }

    fn run(&mut self, spans: &[Span<'_>], layer: usize) -> Result<(), KernelError> {
        self.kernels.rms_norm(&self.x, &self.norm, 1e-5, &mut self.normed)?;
        self.kernels.linear_into(&self.normed, &self.projection, &mut self.qkv)?;
        let shape = RopeShape { layer, heads: HEADS, angles: &self.angles, norm: None, spans };
        self.kernels.rope_store(&mut self.qkv, shape, &mut self.pool)?;
        let shape = AttentionShape { layer, heads: HEADS, scale: 0.1, spans };
        self.kernels.attention(&self.qkv, &self.pool, shape, &mut self.out)
    }

    fn result(&self) -> Vec<f32> {
        self.kernels.read(&self.out).unwrap().into_owned()
    }
}

/// One that decodes and one that prefills, after so many positions.
fn spans<'a>(contexts: [usize; 2], first: &'a [u32], second: &'a [u32]) -> [Span<'a>; 2] {
    [
        Span { first_row: 0, rows: 1, context_tokens: contexts[0], blocks: first },
        Span { first_row: 1, rows: 5, context_tokens: contexts[1], blocks: second },
    ]
}

/// The first layer of a step uploads what all of them need; the next step, or other blocks, is something new.
#[test]
fn a_steps_lists_are_uploaded_once_for_all_layers() {
    if !inside() {
        run_on(&machine_with_kernels(), "gpu::a_steps_lists_are_uploaded_once_for_all_layers");
        return;
    }
    let mut part = Part::new();
    part.write(5);
    let mut uploads_of = |spans: &[Span<'_>], layer| {
        let before = fake("uploads");
        part.run(spans, layer)?;
        Ok::<u64, KernelError>(fake("uploads") - before)
    };
    for last_block in [4, 5, 4] {
        let second = [3, last_block];
        let spans = spans([7, 2], &[1, 2], &second);
        assert!(uploads_of(&spans, 0).unwrap() > 0);
        assert_eq!((uploads_of(&spans, 1).unwrap(), uploads_of(&spans, 2).unwrap()), (0, 0));
        let error = uploads_of(&spans, 3).unwrap_err().to_string();
        assert!(error.contains("a layer below 3"), "{error}");
    }
}

/// What a layer does is launches only, once its buffers and lists are there: a decode step may become a graph.
#[test]
fn a_layers_operations_are_recorded_and_computed_anew() {
    if !has_gpu("gpu::a_layers_operations_are_recorded_and_computed_anew") {
        return;
    }
    let (mut part, spans) = (Part::new(), spans([0, 0], &[1, 2], &[3, 4]));
    let gpu = Arc::clone(part.kernels.gpu());
    part.write(5);
    part.run(&spans, 1).unwrap();
    let first = part.result();
    let graph = Graph::record(&gpu, || part.run(&spans, 1)).unwrap();
    part.write(7);
    // SAFETY: buffers, pool and the step's lists are those that it was recorded with.
    unsafe { graph.launch() }.unwrap();
    let from_graph = part.result();
    part.run(&spans, 1).unwrap();
    assert!(from_graph == part.result() && from_graph != first && from_graph.iter().all(|x| x.is_finite()));
    // Other spans would upload their lists, which no graph may.
    let others = [Span { rows: ROWS, context_tokens: 0, ..spans[0] }];
    let error = Graph::record(&gpu, || part.run(&others, 1)).err().unwrap().to_string();
    assert!(error.contains("cannot be part of a graph"), "{error}");
}

#[test]
fn too_little_memory_is_said_with_its_size() {
    if !inside() {
        run_on(&machine_with_kernels(), "gpu::too_little_memory_is_said_with_its_size");
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
