//! The host's side of a GPU, on a fake one: `fake_cuda.cpp` runs what is asked of it on this machine, later than it was asked.
//!
//! What the same operations give is compared with the CPU's. And machines on which something is missing say so.

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use half::bf16;
use rand::RngExt;
use worker_kernels::cuda::{CudaError, CudaKernels, Gpu, Libraries};
use worker_kernels::{
    AttentionShape, CpuKernels, Device, Dtype, HeadSpan, KernelError, Kernels, KvLayout, Span, WeightView,
};

use crate::machine::{compile, dlopen, dlsym, gpu_libraries, rng};

/// One test at a time: the fake is one machine.
static FAKE: Mutex<()> = Mutex::new(());

const SOURCES: [&str; 9] = [
    "adjust_logits.cu",
    "attention_combine.cu",
    "attention_decode.cu",
    "attention_prefill.cu",
    "gather.cu",
    "rms_norm.cu",
    "rope_store.cu",
    "sample.cu",
    "silu_mul.cu",
];

/// A machine with these macros changed.
fn build(name: &str, macros: &[&str]) -> Libraries {
    let library =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-{name}-{}.so", std::process::id()));
    let output = Command::new("g++")
        .args(["-std=c++17", "-O2", "-Wall", "-Wno-unused-variable", "-Werror", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .args(macros)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/fake_cuda.cpp"))
        .output()
        .expect("g++ is needed to build a fake GPU; Debian's package is g++");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Libraries { driver: library.clone(), blas: library }
}

/// A function of the fake that the real libraries have not.
fn extra(libraries: &Libraries, name: &str) -> *mut c_void {
    let path = CString::new(libraries.driver.to_str().unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: our own library, whose constructors only make empty tables; terminated strings.
    let function = unsafe { dlsym(dlopen(path.as_ptr(), 2), name.as_ptr()) };
    assert!(!function.is_null());
    function
}

/// A whole machine, with all kernels.
fn whole(name: &str, macros: &[&str]) -> Libraries {
    let libraries = build(name, macros);
    let add = extra(&libraries, "fake_add_library");
    // SAFETY: the function's type in fake_cuda.cpp.
    let add: unsafe extern "C" fn(*const std::ffi::c_char) -> i32 = unsafe { std::mem::transmute(add) };
    for source in SOURCES {
        let path = CString::new(compile(source).to_str().unwrap()).unwrap();
        // SAFETY: a terminated string.
        assert_eq!(unsafe { add(path.as_ptr()) }, 0, "{source}");
    }
    libraries
}

fn refusal(libraries: &Libraries, ordinal: usize) -> String {
    CudaKernels::open(libraries, ordinal).err().expect("something is missing").to_string()
}

#[test]
fn machines_that_lack_something_say_what() {
    let _one = FAKE.lock().unwrap();
    let nowhere =
        Libraries { driver: PathBuf::from("/nowhere/libcuda.so.1"), blas: PathBuf::from("/nowhere") };
    assert_eq!(refusal(&nowhere, 0), "no NVIDIA driver: /nowhere/libcuda.so.1 cannot be loaded");
    let old = build("old", &["-DVERSION=12090"]);
    assert_eq!(
        refusal(&old, 0),
        "the NVIDIA driver is for CUDA 12.9; one of the 580 series (CUDA 13.0) or later is needed"
    );
    let ancient = build("ancient", &["-DOLD"]);
    assert_eq!(
        refusal(&ancient, 0),
        "the NVIDIA driver has no cuMemAllocAsync; one of the 580 series (CUDA 13.0) or later is needed"
    );
    for empty in [build("empty", &["-DDEVICES=0"]), build("none", &["-DINIT_STATUS=100"])] {
        assert_eq!(refusal(&empty, 0), "the NVIDIA driver finds no GPU");
    }
    assert_eq!(refusal(&build("broken", &["-DINIT_STATUS=999"]), 0), "cuInit failed with 999");
    let small = build("small", &["-DCAPABILITY_MAJOR=7"]);
    assert_eq!(refusal(&small, 0), "Fake GPU has compute capability 7.0; 8.0 or later is needed");
    let whole = whole("plain", &[]);
    assert_eq!(refusal(&whole, 3), "there is no GPU 3: the driver finds 1, counted from 0");
    let no_blas = Libraries { blas: PathBuf::from("/nowhere/libcublasLt.so.13"), ..whole };
    assert!(refusal(&no_blas, 0).starts_with("no cuBLASLt: /nowhere/libcublasLt.so.13 cannot be loaded"));
}

#[test]
fn every_generation_of_gpu_is_opened() {
    let _one = FAKE.lock().unwrap();
    for major in [8, 9, 10, 11, 12] {
        let libraries = whole(&format!("cc{major}"), &[&format!("-DCAPABILITY_MAJOR={major}")]);
        let gpu = Gpu::open(&libraries, 0).unwrap();
        assert_eq!((gpu.name(), gpu.capability()), ("Fake GPU", (major, 0)));
        assert_eq!(gpu.free_bytes().unwrap(), 1 << 30);
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

    /// One layer of a decoder over two steps, every operation in it; returns the logits of both.
    fn run<K: Kernels>(&self, kernels: &K) -> Result<Vec<Vec<f32>>, KernelError> {
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
        // Of three sequences: a prompt, a prompt in two chunks, and one that is decoded over 600 positions.
        let blocks: Vec<Vec<u32>> = vec![vec![7, 3], vec![9, 8, 2], (20..180).rev().collect()];
        for rows in [[(0, 5), (0, 3), (0, 600)], [(5, 1), (3, 6), (600, 1)]] {
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
        }
        Ok(results)
    }
}

fn compare_layers(kernels: &CudaKernels) {
    for head_dim in [64, 128, 256] {
        let layer = Layer::new(head_dim);
        let want = layer.run(&CpuKernels::new("test", 1).unwrap()).unwrap();
        let got = layer.run(kernels).unwrap();
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
    let _one = FAKE.lock().unwrap();
    if let Some(libraries) = gpu_libraries() {
        return compare_layers(&CudaKernels::open(&libraries, 0).unwrap());
    }
    let libraries = whole("parity", &[]);
    let allocated = extra(&libraries, "fake_allocated");
    // SAFETY: the function's type in fake_cuda.cpp.
    let allocated: unsafe extern "C" fn() -> u64 = unsafe { std::mem::transmute(allocated) };
    let kernels = CudaKernels::open(&libraries, 0).unwrap();
    // SAFETY: reads a number, while nothing else uses the fake.
    let before = unsafe { allocated() };
    compare_layers(&kernels);
    kernels.gpu().synchronize().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { allocated() }, before);
}

#[test]
fn too_little_memory_is_said_with_its_size() {
    let _one = FAKE.lock().unwrap();
    let libraries = whole("tight", &[]);
    let kernels = CudaKernels::open(&libraries, 0).unwrap();
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
