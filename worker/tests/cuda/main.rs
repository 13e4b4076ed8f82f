//! `--backend auto|cuda|cpu` as an operator meets it: the worker's program on machines with a fake GPU, and on machines without one.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "../../kernels/tests/cuda/fake.rs"]
mod fake;
mod model;
mod program;

use std::path::{Path, PathBuf};
use std::process::Command;

use fake::FakeMachine;
use model::{Architecture, with_heads_of_64};
use program::{Completion, Program, refusal};
use serde_json::{Value, json};

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
        // A GPU for nothing is somebody's mistake; a machine without one is not.
        let has_none = reason.contains("no NVIDIA driver") || reason.contains("finds no GPU");
        assert_eq!(said.contains("since the GPU cannot be used"), !has_none, "{said}");
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
fn steps_for_which_the_gpu_has_no_memory_are_refused_at_the_start() {
    let machine = machine().with_kernels(&kernels());
    let model = with_heads_of_64(Architecture::Llama);
    let arguments =
        ["--model", model.to_str().unwrap(), "--backend", "cuda", "--max-tokens-per-step", "8000000"];
    let said = refusal(&machine, &arguments);
    let expected = "steps of 8000000 tokens and 256 sequences take ";
    assert!(said.contains(expected) && said.contains("lower --max-tokens-per-step"), "{said}");
    std::fs::remove_dir_all(model).unwrap();
}

/// Such a failure takes the process's context along: what it is asked later would fail as well, for ever.
#[test]
fn a_worker_that_has_lost_its_gpu_is_not_healthy() {
    let machine = machine().with_kernels(&kernels()).set("FAKE_FAILS", "rope_store");
    let model = with_heads_of_64(Architecture::Llama);
    let arguments = ["--model", model.to_str().unwrap(), "--backend", "cuda", "--context-length", "256"];
    let mut program = Program::start(&machine, &[&arguments[..], &["--kv-blocks", "32"]].concat());
    assert_eq!(program.exchange("GET", "/health", "").0, 200);
    let asked = json!({"prompt": "Once upon a time", "max_tokens": 2}).to_string();
    let (status, body) = program.exchange("POST", "/v1/completions", &asked);
    assert!(status == 500 && body.contains("device lost: cuStreamSynchronize failed with 719"), "{body}");
    // It ends with the step.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while program.exchange("GET", "/health", "").0 != 503 {
        assert!(std::time::Instant::now() < deadline, "it is still healthy");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(program.exchange("POST", "/v1/completions", &asked).0, 503);
    program.stop();
    std::fs::remove_dir_all(model).unwrap();
}

#[test]
fn kernels_start_one_after_the_other_where_that_is_asked_for() {
    let machine = machine().with_kernels(&kernels()).set("FAKE_KEEPS_APART", "1");
    let model = with_heads_of_64(Architecture::Llama);
    let asked = json!({"prompt": "Once upon a time", "max_tokens": 2}).to_string();
    for (overlap, expected) in [("on", 500), ("off", 200)] {
        let arguments = ["--model", model.to_str().unwrap(), "--backend", "cuda", "--context-length", "256"];
        let more = ["--kv-blocks", "32", "--kernel-overlap", overlap];
        let mut program = Program::start(&machine, &[&arguments[..], &more].concat());
        let (status, body) = program.exchange("POST", "/v1/completions", &asked);
        assert_eq!(status, expected, "{overlap}: {body}");
        program.stop();
    }
    let said = refusal(&machine, &["--backend", "cpu", "--kernel-overlap", "off"]);
    assert!(said.contains("kernel-overlap is for a GPU: add --backend cuda, or leave it out"), "{said}");
    std::fs::remove_dir_all(model).unwrap();
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
        let want = answers(&machine, &model, &["--backend", "cpu"], "cpu, 1 threads");
        assert!(want.iter().all(|answer| answer.tokens.len() > 3), "{architecture:?}: {want:?}");
        for backend in backends {
            for (want, got) in want.iter().zip(&answers(&machine, &model, &["--backend", backend], gpu)) {
                assert_same(
                    got,
                    want,
                    if real { NEAR_TIE } else { TIE_OF_ROUNDING },
                    &format!("{architecture:?}, {backend}"),
                );
            }
        }
        // Where it were left out on CUDA, the answers would be Llama's.
        let tokens = want.map(|answer| answer.tokens);
        assert!(!before.contains(&tokens), "{architecture:?} shows nothing of its own");
        before.push(tokens);
        std::fs::remove_dir_all(model).unwrap();
    }
}

/// Whichever the default takes.
#[test]
fn answers_by_each_kernel_for_prompts_are_those_of_the_cpu() {
    let real = std::env::var_os("ROUNDHOUSE_GPU").is_some();
    let machine = if real { FakeMachine::default() } else { machine().with_kernels(&kernels()) };
    let model = with_heads_of_64(Architecture::Llama);
    let mut plain = Program::start(&machine, &["--model", model.to_str().unwrap(), "--backend", "cuda"]);
    let has_wgmma = plain.described().contains("(compute capability 9.0)");
    plain.stop();
    assert!(has_wgmma || real, "the fake one has");
    let want = answers(&machine, &model, &["--backend", "cpu"], "cpu, 1 threads");
    let kernels = if has_wgmma { &["mma-sync", "wgmma"][..] } else { &["mma-sync"] };
    for kernel in kernels {
        let by_it = ["--backend", "cuda", "--prefill-kernel", kernel];
        for (got, want) in answers(&machine, &model, &by_it, "cuda, ").iter().zip(&want) {
            assert_same(got, want, tie(real), kernel);
        }
    }
    std::fs::remove_dir_all(model).unwrap();
}

/// What `bench/gpu/run.sh serve` runs on a machine with a GPU.
#[test]
fn what_a_worker_serves_of_random_numbers_is_measured() {
    let machine = machine().with_kernels(&kernels());
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("served-{}", std::process::id()));
    let measure = |limit: &str| {
        let mut command = Command::new("python3");
        command.arg(crate_directory.join("../bench/gpu/serve.py")).arg(env!("CARGO_BIN_EXE_worker"));
        command.arg(&directory).args(["--backend", "cuda", "--kv-blocks", "64", "--context-length", limit]);
        machine.enter(&mut command);
        let output = command.env("SHAPES", "small").env("NO_COLOR", "1").output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), errors)
    };
    let (status, said, errors) = measure("256");
    assert_eq!(status, Some(0), "{said}{errors}");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |what: &str| {
        let found = lines.iter().find(|line| line["what"].as_str().unwrap().starts_with(what));
        found.unwrap_or_else(|| panic!("no {what:?} in {said}"))
    };
    assert!(of("the worker, started")["what"].as_str().unwrap().contains("cuda, Fake GPU"), "{said}");
    assert!(of("a prompt of 16 tokens")["prompt_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(of("an answer of 3 tokens after 8")["median_ms_between_tokens"].as_f64().unwrap() > 0.0);
    assert!(of("2 answers of 3 tokens")["answer_tokens_per_second"].as_f64().unwrap() > 0.0);

    // What the worker refuses is told.
    let (status, _, errors) = measure("16");
    assert!(status == Some(1) && errors.contains("serve.py: the worker said"), "{errors}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn wgmma_where_there_is_none_is_an_error_that_says_why() {
    let machine = machine().with_kernels(&kernels()).set("FAKE_CAPABILITY_MAJOR", "8");
    let model = with_heads_of_64(Architecture::Llama);
    let by_wgmma = ["--model", model.to_str().unwrap(), "--prefill-kernel", "wgmma", "--backend"];
    for (backend, reason) in [
        (
            "cuda",
            "prefill-kernel wgmma: Fake GPU has compute capability 8.0; kernels by wgmma are for 9.0 only",
        ),
        (
            "auto",
            "prefill-kernel wgmma: Fake GPU has compute capability 8.0; kernels by wgmma are for 9.0 only",
        ),
        ("cpu", "prefill-kernel is for a GPU: add --backend cuda, or leave it out"),
    ] {
        let said = refusal(&machine, &[&by_wgmma[..], &[backend]].concat());
        assert!(said.contains(reason), "{backend}: {said}");
    }
    std::fs::remove_dir_all(model).unwrap();
}

/// Log-probabilities so far apart may change places: on a real GPU, which sums in other orders, by what bf16 rounds; and on the fake one
/// by what products round that are fused with their sums, which the CPU path's are not.
const NEAR_TIE: f64 = 0.05;
const TIE_OF_ROUNDING: f64 = 0.001;

fn tie(on_a_real_gpu: bool) -> f64 {
    if on_a_real_gpu { NEAR_TIE } else { TIE_OF_ROUNDING }
}

/// Token for token, but for ties below `tie` in what the model says.
fn assert_same(got: &Completion, want: &Completion, tie: f64, what: &str) {
    let parting = want.parting(got);
    let same = got.tokens == want.tokens || (0.0..tie).contains(&parting);
    assert!(same, "{what}: {:?}, not {:?}, which part by {parting}", got.tokens, want.tokens);
}

/// What the model answers to three prompts: the second finds the first one's blocks in the prefix cache, the third is longer than a
/// prefill tile.
fn answers(machine: &FakeMachine, model: &Path, backend: &[&str], described: &str) -> [Completion; 3] {
    let model = model.to_str().unwrap();
    let arguments = ["--model", model, "--context-length", "1024", "--kv-blocks", "64"];
    let mut program = Program::start(machine, &[&arguments[..], backend].concat());
    assert!(program.described().contains(described), "{}", program.described());
    let long = "The small cat sat on the mat and looked at the dog. ".repeat(12);
    let answers = ["Once upon a time there was a", "Once upon a time there was a little", &long]
        .map(|prompt| program.complete_with(prompt, &json!({"max_tokens": 24, "temperature": 0})));
    program.stop();
    answers
}

#[test]
fn a_prompt_that_one_gpu_has_computed_another_goes_on_from() {
    let real = std::env::var_os("ROUNDHOUSE_GPU").is_some();
    let machine = if real { FakeMachine::default() } else { machine().with_kernels(&kernels()) };
    let model = with_heads_of_64(Architecture::Llama);
    let start = || {
        let model = model.to_str().unwrap();
        let arguments =
            ["--model", model, "--backend", "cuda", "--context-length", "256", "--kv-blocks", "32"];
        Program::start(&machine, &[&arguments[..], &["--kv-transfer", "on"]].concat())
    };
    let (mut first, mut second, mut alone) = (start(), start(), start());
    let prompt = "Once upon a time there was a little cat who looked at the dog and sat on the mat";
    let parameters = json!({"max_tokens": 16, "temperature": 0, "ignore_eos": true});
    let asked = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}});
    let params = first.post("/v1/completions", &asked)["kv_transfer_params"].take();
    let mut goes_on = parameters.clone();
    goes_on["kv_transfer_params"] = params;
    let got = second.complete_with(prompt, &goes_on);
    assert_same(&got, &alone.complete_with(prompt, &parameters), tie(real), "handed over");
    assert_eq!(
        second.info()["computed_tokens"],
        16,
        "the last of the prompt, and all but the last of the answer"
    );
    for program in [&mut first, &mut second, &mut alone] {
        program.stop();
    }
    std::fs::remove_dir_all(model).unwrap();
}

/// The draw on a GPU takes every parameter that the CPU's takes. Where a draw falls near a border between two tokens, what bf16 rounds may
/// decide it, so that only the greedy ones are compared token for token.
#[test]
fn tokens_are_drawn_on_cuda_as_the_request_says() {
    let real = std::env::var_os("ROUNDHOUSE_GPU").is_some();
    let machine = if real { FakeMachine::default() } else { machine().with_kernels(&kernels()) };
    let model = with_heads_of_64(Architecture::Llama);
    let start = |backend| {
        let model = model.to_str().unwrap();
        let arguments =
            ["--model", model, "--backend", backend, "--context-length", "256", "--kv-blocks", "32"];
        Program::start(&machine, &arguments)
    };
    let (mut cpu, mut gpu) = (start("cpu"), start("cuda"));
    let prompt = "Once upon a time there was a";
    let greedy = json!({"max_tokens": 16, "temperature": 0});
    let plain = cpu.complete_with(prompt, &greedy).tokens;
    // Each leads elsewhere, in the same way on both.
    for change in [
        json!({"frequency_penalty": 1.5, "presence_penalty": 1.0}),
        json!({"repetition_penalty": 1.8}),
        json!({"logit_bias": {"300": 100}}),
    ] {
        let mut parameters = greedy.clone();
        parameters.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let want = cpu.complete_with(prompt, &parameters);
        let got = gpu.complete_with(prompt, &parameters);
        assert_same(&got, &want, tie(real), &change.to_string());
        assert_ne!(got.tokens, plain, "{change} changes nothing");
        // Of the logits as the model gave them, whatever was done to them then.
        let together = got.tokens.iter().zip(&want.tokens).take_while(|(got, want)| got == want).count();
        for (got, want) in got.logprobs.iter().zip(&want.logprobs).take(together) {
            assert!((got - want).abs() < 0.1 + 0.02 * want.abs(), "{change}: {got}, not {want}");
        }
    }
    let drawn = |seed: u64, top_k: i64| {
        let parameters =
            json!({"max_tokens": 16, "temperature": 1.5, "seed": seed, "top_k": top_k, "ignore_eos": true});
        gpu.complete_with(prompt, &parameters).tokens
    };
    assert_eq!(drawn(1, -1), drawn(1, -1), "the same again");
    assert!((2..6).any(|seed| drawn(seed, -1) != drawn(1, -1)), "seeds make a difference");
    assert_eq!(drawn(1, 1), drawn(2, 1), "but not where one token is left");
    cpu.stop();
    gpu.stop();
    std::fs::remove_dir_all(model).unwrap();
}
