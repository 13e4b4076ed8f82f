//! Do the tests notice? Each mutant is one change to one kernel that makes it wrong; the tests must fail.
//!
//! Takes minutes, so it runs when asked for, and writes its table to `MUTANTS.md`:
//! `cargo test --manifest-path worker/kernels/Cargo.toml --test cuda -- --ignored mutants`
//!
//! With `ROUNDHOUSE_MUTANTS=moe_` only mutants of files whose names begin so are run, and those that the table does not have; the others
//! keep their lines. The gate compares the table with the mutants and with the kernels' code: what is stale must be run again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::machine::crate_directory;

mod attention;
mod others;
mod wgmma;

/// Longer than the tests take by far; a mutant may run for ever.
const PATIENCE: Duration = Duration::from_secs(240);

/// One change.
struct Mutant {
    file: &'static str,
    what: &'static str,
    from: &'static str,
    to: &'static str,
}

impl Mutant {
    /// The file's text with the change.
    fn mutated(&self, text: &str) -> String {
        assert_eq!(text.matches(self.from).count(), 1, "{}: not there once: {}", self.file, self.from);
        text.replace(self.from, self.to)
    }

    /// What its line of a table says.
    fn verdict_in(&self, table: &str) -> Option<Verdict> {
        let words = table.lines().find_map(|line| {
            line.strip_prefix(&format!("| {} | {} | ", self.file, self.what))?.strip_suffix(" |")
        })?;
        Verdict::ALL.into_iter().find(|verdict| verdict.words() == words)
    }
}

/// How a mutant was noticed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Refused,
    WrongResult,
    Crashed,
    RanForEver,
    Survived,
}

impl Verdict {
    const ALL: [Self; 5] =
        [Self::Refused, Self::WrongResult, Self::Crashed, Self::RanForEver, Self::Survived];

    fn words(self) -> &'static str {
        match self {
            Self::Refused => "refused by the host machine",
            Self::WrongResult => "wrong result",
            Self::Crashed => "access outside of a buffer",
            Self::RanForEver => "did not end",
            Self::Survived => "**survived**",
        }
    }
}

#[test]
#[ignore = "takes minutes; run it when kernels or their tests change"]
fn mutants_are_caught() {
    let files = std::env::var("ROUNDHOUSE_MUTANTS");
    let keeps = |file: &str| files.as_ref().is_ok_and(|files| !file.starts_with(files));
    let known = std::fs::read_to_string(table_path()).unwrap();
    let mut digests = digests();
    digests.retain(|file, digest| {
        !keeps(file) || digest_in(&known, file).inspect(|known| *digest = *known).is_some()
    });
    let mut verdicts = Vec::new();
    for (number, mutant) in mutants().enumerate() {
        let verdict = keeps(mutant.file).then(|| mutant.verdict_in(&known)).flatten();
        let verdict = verdict.unwrap_or_else(|| {
            let verdict = try_out(mutant, number);
            println!("{} | {} | {}", mutant.file, mutant.what, verdict.words());
            verdict
        });
        verdicts.push(verdict);
    }
    let caught = verdicts.iter().filter(|verdict| **verdict != Verdict::Survived).count();
    std::fs::write(table_path(), table(&verdicts, caught, &digests)).unwrap();
    assert!(caught * 100 >= verdicts.len() * 95, "{caught} of {} mutants were caught", verdicts.len());
}

/// Fast, so that it is part of every run: nothing of the table is older than what it is about.
#[test]
fn the_table_is_of_these_mutants_and_this_code() {
    let known = std::fs::read_to_string(table_path()).unwrap();
    let again = "; run the mutants again, see the beginning of tests/cuda/mutants.rs";
    for mutant in mutants() {
        let Mutant { file, what, .. } = mutant;
        assert!(mutant.verdict_in(&known).is_some(), "MUTANTS.md has no line for {file}, {what}{again}");
        mutant.mutated(&source(file));
    }
    let lines = known
        .lines()
        .filter(|line| Verdict::ALL.iter().any(|verdict| line.ends_with(&format!(" {} |", verdict.words()))));
    assert_eq!(lines.count(), mutants().count(), "MUTANTS.md has lines for mutants that are no more{again}");
    for (file, digest) in digests() {
        assert_eq!(
            digest_in(&known, file),
            Some(digest),
            "{file} is not what MUTANTS.md was written for{again}"
        );
    }
}

fn table_path() -> PathBuf {
    crate_directory().join("MUTANTS.md")
}

fn source(file: &str) -> String {
    std::fs::read_to_string(crate_directory().join("cu").join(file)).unwrap()
}

/// Of the code of every file that has mutants; comments may change.
fn digests() -> BTreeMap<&'static str, u64> {
    mutants().map(|mutant| (mutant.file, digest_of_code(&source(mutant.file)))).collect()
}

/// FNV-1a, whose values no version of a library changes.
fn digest_of_code(text: &str) -> u64 {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim_end());
    let bytes = code.filter(|line| !line.is_empty()).flat_map(|line| line.bytes().chain([b'\n']));
    bytes
        .fold(0xcbf2_9ce4_8422_2325, |digest, byte| (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn digest_in(table: &str, file: &str) -> Option<u64> {
    let words =
        table.lines().find_map(|line| line.strip_prefix(&format!("| {file} | `"))?.strip_suffix("` |"))?;
    u64::from_str_radix(words, 16).ok()
}

fn mutants() -> impl Iterator<Item = &'static Mutant> {
    attention::ATTENTION.iter().chain(wgmma::WGMMA).chain(others::OTHERS)
}

fn table(verdicts: &[Verdict], caught: usize, digests: &BTreeMap<&str, u64>) -> String {
    let mut table = format!(
        "# Mutants of the CUDA kernels\n\nWritten by `cargo test --manifest-path worker/kernels/Cargo.toml --test cuda -- \
         --ignored mutants`: each line is one change that makes a\nkernel wrong, and how its tests noticed. {caught} of {} \
         were caught.\n\n| file | change | noticed as |\n|---|---|---|\n",
        verdicts.len(),
    );
    for (mutant, verdict) in mutants().zip(verdicts) {
        writeln!(table, "| {} | {} | {} |", mutant.file, mutant.what, verdict.words()).unwrap();
    }
    table.push_str("\n## What it was written for\n\nThe gate fails when the code of a file is another than this.\n\n| file | digest |\n|---|---|\n");
    for (file, digest) in digests {
        writeln!(table, "| {file} | `{digest:016x}` |").unwrap();
    }
    table
}

/// Runs the tests of the mutant's file in a process of their own, against a copy of the sources with the change.
fn try_out(mutant: &Mutant, number: usize) -> Verdict {
    let sources = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mutant-{number}"));
    copy_directory(&crate_directory().join("cu"), &sources);
    std::fs::write(sources.join(mutant.file), mutant.mutated(&source(mutant.file))).unwrap();
    let log = sources.join("log");
    let verdict = wait(start(mutant, &sources, &log), &log);
    std::fs::remove_dir_all(&sources).unwrap();
    verdict
}

fn start(mutant: &Mutant, sources: &Path, log: &Path) -> Child {
    let log = std::fs::File::create(log).unwrap();
    Command::new(std::env::current_exe().unwrap())
        .args(tests_of(mutant.file))
        .args(["--test-threads", "2"])
        .env("ROUNDHOUSE_KERNEL_SOURCES", sources)
        .env("RUST_BACKTRACE", "0")
        // A mutant's failures are none to try again.
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true")
        .stdout(log.try_clone().unwrap())
        .stderr(Stdio::from(log))
        .spawn()
        .unwrap()
}

fn tests_of(file: &str) -> &'static [&'static str] {
    match file {
        "attention_prefill.cu" => {
            &["attention::prefill", "attention::huge", "attention::what_was", "sizes::the_last_row_of_128k"]
        }
        "attention_prefill_wgmma.cu" => &["attention::wgmma", "sizes::the_last_row_of_128k"],
        "attention_decode.cu" => {
            &["attention::chunks", "attention::decode", "attention::groups", "attention::what_was", "sizes::"]
        }
        "attention_combine.cu" => &["attention::decode", "sizes::parts"],
        "attention_mixed.cu" => {
            &["attention::prefill_and_decode", "attention::no_order", "sizes::the_last_row_of_128k"]
        }
        "adjust_logits.cu" | "candidates.cuh" | "sample.cu" => {
            &["sampling::", "sizes::the_last_of_32768_rows"]
        }
        "moe_route.cu" | "moe_group.cu" | "moe_gemm.cu" | "moe_sum.cu" => {
            &["moe::", "sizes::the_last_of_a_million_pairs", "sizes::the_last_of_128k_rows_gets_its_sum"]
        }
        "linear_few_rows.cu" => &["linear::", "sizes::the_last_row_of_a_matrix"],
        "gate.cuh" => &["linear::", "rowwise::"],
        "paged.cuh" => &["attention::", "rowwise::", "sizes::"],
        _ => &["rowwise::", "sizes::"],
    }
}

fn wait(mut tests: Child, log: &Path) -> Verdict {
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = tests.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > PATIENCE {
            tests.kill().unwrap();
            tests.wait().unwrap();
            return Verdict::RanForEver;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let log = std::fs::read_to_string(log).unwrap();
    assert!(
        !log.contains("g++ refuses") && !log.contains("running 0 tests"),
        "the mutant was not run:\n{log}"
    );
    match status.code() {
        Some(0) => Verdict::Survived,
        None => Verdict::Crashed,
        // What the shim says begins with the kernel's name and the block.
        Some(_) if log.contains(": block ") => Verdict::Refused,
        Some(_) => Verdict::WrongResult,
    }
}

fn copy_directory(from: &Path, to: &PathBuf) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_directory(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
