//! `bench/gpu/run.sh` as it will be run on a machine with a GPU, on one with a fake GPU: what it promises is there, whatever fails.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::fake::FakeMachine;
use crate::gpu::machine_with_kernels;
use crate::machine::crate_directory;

/// Programs to carry, and what a run left.
struct Carried {
    directory: PathBuf,
}

impl Carried {
    /// This program, which has the tests, and the one that measures, in a directory of the test's own.
    fn new(test: &str) -> Self {
        let directory =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("carried-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(directory.join("out")).unwrap();
        let tests = std::env::current_exe().unwrap();
        let rates = tests.parent().unwrap().with_file_name("examples").join("rates");
        if !rates.exists() {
            build_rates();
        }
        for (program, name) in [(tests, "parity"), (rates, "rates")] {
            std::os::unix::fs::symlink(program, directory.join(name)).unwrap();
        }
        // The worker's programs are another crate's; its own tests run them.
        for name in ["answers", "worker"] {
            std::os::unix::fs::symlink("/bin/false", directory.join(name)).unwrap();
        }
        std::fs::write(directory.join("commit"), "0123abcd\n").unwrap();
        Self { directory }
    }

    fn run(&self, machine: &FakeMachine, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
        let script = crate_directory().join("../../bench/gpu/run.sh");
        let mut command = Command::new("bash");
        command.arg(script).args(arguments).env("CARRIED", &self.directory).env("OUT", self.out());
        command.env("ROUNDHOUSE_GPU", "fake").env("SHAPES", "small").env("ONE_SECONDS", "400");
        machine.enter(&mut command);
        command.envs(environment.iter().copied()).output().unwrap()
    }

    fn out(&self) -> PathBuf {
        self.directory.join("out")
    }

    fn json(&self, part: &str) -> Value {
        let text = std::fs::read_to_string(self.out().join(format!("{part}.json"))).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}:\n{text}"))
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Where only this program was built.
fn build_rates() {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--example", "rates", "--manifest-path"]).arg(crate_directory().join("Cargo.toml"));
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    assert!(cargo.status().unwrap().success(), "the program that measures cannot be built");
}

/// `(name, verdict)` of each result.
fn verdicts(json: &Value) -> Vec<(&str, &str)> {
    let text = |result: &'_ Value, key: &str| result[key].as_str().map(str::to_owned);
    let results = json["results"].as_array().unwrap();
    assert!(results.iter().all(|result| text(result, "test").is_some()), "{json}");
    results
        .iter()
        .map(|result| (result["test"].as_str().unwrap(), result["verdict"].as_str().unwrap()))
        .collect()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

const GATHER: &str = "rowwise::rows_are_gathered_bit_for_bit";
const GATE: &str = "rowwise::silu_mul_agrees_with_its_definition";

#[test]
fn parity_reports_every_test_and_one_that_fails_hides_no_other() {
    let (carried, machine) = (Carried::new("parity"), machine_with_kernels());
    let output = carried.run(&machine, &["parity", "rowwise::rows", "rowwise::silu"], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let json = carried.json("parity");
    assert_eq!(verdicts(&json), [(GATHER, "ok"), (GATE, "ok")]);
    assert_eq!((&json["complete"], &json["commit"]), (&true.into(), &"0123abcd".into()));
    assert_eq!(json["gpu"], "Fake GPU, compute capability 9.0");
    assert!(json["seed"].is_u64(), "{json}");

    // The kernel fails as one does that leaves its process without a GPU.
    let failing = [("FAKE_FAILS", "embed")];
    let output = carried.run(&machine, &["parity", "rowwise::rows", "rowwise::silu"], &failing);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let json = carried.json("parity");
    assert_eq!(verdicts(&json), [(GATHER, "failed"), (GATE, "ok")]);
    let reason = json["results"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("cuStreamSynchronize failed with 719"), "{reason}");
    assert!(std::fs::read_to_string(carried.out().join("parity.log")).unwrap().contains("719"));
}

#[test]
fn the_whole_of_parity_passes() {
    let carried = Carried::new("whole");
    let output = carried.run(&machine_with_kernels(), &["parity"], &[("PART_SECONDS", "3600")]);
    let (json, said) = (carried.json("parity"), said(&output));
    // The kernels' tests are in modules; the worker's are not, and fail of a worker that is none.
    let (kernels, worker): (Vec<_>, Vec<_>) =
        verdicts(&json).into_iter().partition(|(name, _)| name.contains("::"));
    assert!(kernels.len() > 30 && kernels.iter().all(|(_, verdict)| *verdict == "ok"), "{said}");
    assert!(worker.len() == 4 && worker.iter().all(|(_, verdict)| *verdict == "failed"), "{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
}

#[test]
fn what_there_was_no_time_for_is_reported_as_not_run() {
    let carried = Carried::new("late");
    let output = carried.run(&machine_with_kernels(), &["parity", "rowwise::"], &[("PART_SECONDS", "0")]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let json = carried.json("parity");
    let verdicts = verdicts(&json);
    assert!(
        verdicts.len() > 3 && verdicts.iter().all(|(_, verdict)| verdict.starts_with("not run")),
        "{json}"
    );

    // Whether PyTorch is there is not looked up either: importing it may take a minute.
    carried.run(&machine_with_kernels(), &["rates", "copy"], &[("PART_SECONDS", "0")]);
    let json = carried.json("rates");
    let reasons: Vec<&str> =
        json["results"].as_array().unwrap().iter().map(|result| result["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["", "not run: the part's time is over"], "{json}");
}

#[test]
fn rates_are_lines_of_numbers_and_one_that_fails_hides_no_other() {
    let (carried, machine) = (Carried::new("rates"), machine_with_kernels());
    let names = ["rates", "copy", "product", "silu_mul", "embed"];
    let output = carried.run(&machine, &names, &[("FAKE_FAILS", "silu_mul")]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let json = carried.json("rates");
    let results = json["results"].as_array().unwrap();
    let named = |name: &str| results.iter().find(|result| result["name"] == name).unwrap();
    for (name, unit) in [("copy", "gbytes_per_second"), ("product", "tflops"), ("embed", "gbytes_per_second")]
    {
        let result = named(name);
        for key in [unit, "microseconds", "eager_microseconds", "launches"] {
            assert!(result[key].is_number(), "{key} of {result}");
        }
    }
    assert_eq!(named("silu_mul")["verdict"], "failed");
    // With a GPU that is none PyTorch has nothing to say, here or where it is not installed.
    assert!(!named("pytorch")["verdict"].is_null(), "{json}");
}

#[test]
fn every_rate_is_measured_on_small_shapes() {
    let (carried, machine) = (Carried::new("all-rates"), machine_with_kernels());
    let list = Command::new(carried.directory.join("rates")).arg("list").output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    assert!(list.lines().count() > 15, "{list}");
    // Each kernel in one of its head dimensions: the fake GPU takes its time.
    let fast = |name: &&str| {
        !["prefill_64", "prefill_256", "prefill_64_wgmma", "decode_64", "decode_256"].contains(name)
    };
    let names: Vec<&str> = ["rates"].into_iter().chain(list.lines().filter(fast)).collect();
    let output = carried.run(&machine, &names, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let json = carried.json("rates");
    for name in &names[1..] {
        let results = json["results"].as_array().unwrap();
        assert!(results.iter().any(|result| result["name"] == *name), "no {name} in {json}");
    }
    goals_are_held_against(&carried.out().join("rates.json"));
}

/// Here nothing can meet them; but what was measured is in the table, and what was not is said.
fn goals_are_held_against(rates: &Path) {
    let script = crate_directory().join("../../bench/gpu/goals.py");
    let output = Command::new("python3").arg(script).arg(rates).output().unwrap();
    let table = said(&output);
    assert_eq!(output.status.code(), Some(1), "{table}");
    let line = |start: &str| {
        table.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}:\n{table}"))
    };
    assert!(!line("| decode_128, of the copy's").contains("not measured"), "{table}");
    assert!(line("| decode_64, of the copy's").contains("| not measured | 0.8 | no |"), "{table}");
    assert!(line("| prefill_128_long, TFLOP/s").ends_with("| 300 | no |"), "{table}");
    assert!(line("| prefill_128_wgmma, TFLOP/s").ends_with("| 540 | no |"), "{table}");
    // What has no goal is shown all the same.
    assert!(line("sample of 40 x 40, plain").contains(" µs, no goal; "), "{table}");
    assert!(!line("sample of 40 x 40, top-k").contains("not measured"), "{table}");
}

/// With a worker that is none; that of one that is there is held by the worker's tests.
#[test]
fn what_is_served_is_noted_until_a_worker_fails() {
    let carried = Carried::new("serve");
    let output = carried.run(&machine_with_kernels(), &["serve", "--threads", "1"], &[]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let json = carried.json("serve");
    assert_eq!((&json["part"], &json["complete"]), (&"serve".into(), &true.into()));
    let results = json["results"].as_array().unwrap();
    assert_eq!(results.last().unwrap()["verdict"], "failed", "{json}");
    assert!(results.last().unwrap()["reason"].as_str().unwrap().contains("the worker ended"), "{json}");
    assert_eq!(results[0]["what"], "the model, written", "{json}");
}

#[test]
fn a_machine_or_a_name_that_is_not_there_is_said_and_nothing_begun() {
    let carried = Carried::new("refused");
    let cases: [(FakeMachine, &[&str], &str); 4] = [
        (FakeMachine::without_driver(), &["parity"], "no NVIDIA driver: libcuda.so.1 cannot be loaded"),
        (FakeMachine::without_driver(), &["rates"], "no NVIDIA driver: libcuda.so.1 cannot be loaded"),
        (machine_with_kernels(), &["parity", "nothing::so"], "no test is called nothing::so"),
        (machine_with_kernels(), &["party"], "bench/gpu/run.sh parity"),
    ];
    for (machine, arguments, reason) in cases {
        let output = carried.run(&machine, arguments, &[]);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", said(&output));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains(reason), "{arguments:?}: not {reason:?}:\n{errors}");
    }
}

/// A module of tests that it does not name never runs on a GPU, and nobody would notice.
#[test]
fn parity_names_every_module_but_those_of_the_hosts_side() {
    let read = |path: &str| std::fs::read_to_string(crate_directory().join(path)).unwrap();
    let (main, script) = (read("tests/cuda/main.rs"), read("../../bench/gpu/run.sh"));
    let named = script.lines().find_map(|line| line.strip_prefix("on_a_gpu=(")).unwrap();
    let of_the_host = ["fake", "fenced", "machine", "mutants", "script", "sizes"];
    for module in main.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';')) {
        let is_named = named.split_whitespace().any(|name| name.starts_with(&format!("{module}::")));
        assert_ne!(is_named, of_the_host.contains(&module), "{module}");
    }
}
