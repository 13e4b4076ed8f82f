//! `--backend auto|cuda|cpu` as an operator meets it: the worker's program on machines with a fake GPU, and on machines without one.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "../../kernels/tests/cuda/fake.rs"]
mod fake;
mod model;
mod program;

use std::path::{Path, PathBuf};

use fake::FakeMachine;
use model::{Architecture, with_heads_of_64};
use program::{Program, refusal};

/// The crate that has the kernels and the fake driver.
fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

fn machine() -> FakeMachine {
    FakeMachine::new(&kernels())
}

/// Machines whose GPU cannot be used, and what the worker says of them.
fn machines_that_lack_something() -> Vec<(FakeMachine, &'static str)> {
    vec![
        (FakeMachine::without_driver(), "no NVIDIA driver: libcuda.so.1 cannot be loaded"),
        (
            machine().set("FAKE_VERSION", "12090"),
            "the NVIDIA driver is for CUDA 12.9; one of the 580 series (CUDA 13.0) or later is needed",
        ),
        (
            FakeMachine::with_an_ancient_driver(&kernels()),
            "the NVIDIA driver has no cuMemAllocAsync; one of the 580 series (CUDA 13.0) or later is needed",
        ),
        (machine().set("FAKE_DEVICES", "0"), "the NVIDIA driver finds no GPU"),
        (
            machine().set("FAKE_CAPABILITY_MAJOR", "7"),
            "Fake GPU has compute capability 7.0; 8.0 or later is needed",
        ),
        (
            machine().with_kernels(&kernels()).without_blas(),
            "no cuBLASLt: libcublasLt.so.13 cannot be loaded; it is part of CUDA 13",
        ),
    ]
}

#[test]
fn cuda_without_a_usable_gpu_is_an_error_that_says_why() {
    for (machine, reason) in machines_that_lack_something() {
        let said = refusal(&machine, &["--backend", "cuda"]);
        assert!(said.contains(&format!("backend cuda: {reason}\n")), "not {reason:?}:\n{said}");
    }
}

#[test]
fn auto_without_a_usable_gpu_says_why_and_computes_on_the_cpu() {
    for (machine, reason) in machines_that_lack_something() {
        let mut program = Program::start(&machine, &["--backend", "auto"]);
        assert!(program.described().contains("model builtin, cpu, 1 threads"), "{}", program.described());
        assert!(!program.complete("Hello", 3).is_empty());
        let said = program.stop();
        assert!(said.contains("computing on the CPU") && said.contains(reason), "not {reason:?}:\n{said}");
    }
}

#[test]
fn heads_without_kernels_are_computed_on_the_cpu_or_refused() {
    let machine = machine().with_kernels(&kernels());
    let mut program = Program::start(&machine, &["--backend", "auto"]);
    assert!(program.described().contains("cpu, 1 threads"), "{}", program.described());
    assert!(program.stop().contains("no CUDA kernels for the model's heads"));
    let said = refusal(&machine, &["--backend", "cuda"]);
    assert!(said.contains("heads of 64, 128 or 256 numbers"), "{said}");
}

#[test]
fn answers_of_cuda_are_those_of_the_cpu_token_for_token() {
    // On a machine with a GPU bench/gpu/run.sh has this test compare with what that computes.
    let real = std::env::var_os("ROUNDHOUSE_GPU").is_some();
    let machine = if real { FakeMachine::default() } else { machine().with_kernels(&kernels()) };
    let gpu = if real { "cuda, " } else { "cuda, Fake GPU (compute capability 9.0)" };
    // Llama over both backends; the others for what only they have, between the projections and the rotation.
    let models = [
        (Architecture::Llama, &["cuda", "auto"][..]),
        (Architecture::Qwen2, &["cuda"]),
        (Architecture::Qwen3, &["cuda"]),
    ];
    let mut before = Vec::new();
    for (architecture, backends) in models {
        let model = with_heads_of_64(architecture);
        let want = answers(&machine, &model, "cpu", "cpu, 1 threads");
        assert!(want.iter().all(|tokens| tokens.len() > 3), "{architecture:?}: {want:?}");
        for backend in backends {
            assert_eq!(answers(&machine, &model, backend, gpu), want, "{architecture:?}, {backend}");
        }
        // Where it were left out on CUDA, the answers would be Llama's.
        assert!(!before.contains(&want), "{architecture:?} shows nothing of its own");
        before.push(want);
        std::fs::remove_dir_all(model).unwrap();
    }
}

/// What the model answers to three prompts: the second finds the first one's blocks in the prefix cache, the third is longer than a
/// prefill tile.
fn answers(machine: &FakeMachine, model: &Path, backend: &str, described: &str) -> [Vec<String>; 3] {
    let model = model.to_str().unwrap();
    let arguments = ["--model", model, "--backend", backend, "--context-length", "1024", "--kv-blocks", "64"];
    let mut program = Program::start(machine, &arguments);
    assert!(program.described().contains(described), "{}", program.described());
    let long = "The small cat sat on the mat and looked at the dog. ".repeat(12);
    let answers = ["Once upon a time there was a", "Once upon a time there was a little", &long]
        .map(|prompt| program.complete(prompt, 24));
    program.stop();
    answers
}
