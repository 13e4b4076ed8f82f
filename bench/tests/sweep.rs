//! `bench sweep` and `bench knee` from end to end against a mock server on loopback.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other tests use the rest of it")]
mod mock;

use std::collections::HashSet;
use std::path::PathBuf;

use bench::args::{Cli, Command};
use bench::knee::search::Verdict;
use bench::knee::{Knee, KneeArgs};
use bench::sweep::{self, SweepArgs};
use clap::Parser;
use mock::{Mock, Reply};
use serde_json::Value;

fn command(words: &str, mock: &Mock, flags: &str) -> Command {
    let url = mock.url();
    let all =
        ["bench", words, "--base-url", &url, "--disable-tqdm"].into_iter().chain(flags.split_whitespace());
    let quiet = if flags.contains("--warmup-requests") { &[][..] } else { &["--warmup-requests", "0"] };
    Cli::try_parse_from(all.chain(quiet.iter().copied())).unwrap().command
}

fn sweep_args(mock: &Mock, flags: &str) -> SweepArgs {
    let Command::Sweep(args) = command("sweep", mock, flags) else { panic!("not sweep") };
    *args
}

fn knee_args(mock: &Mock, flags: &str) -> KneeArgs {
    let Command::Knee(args) = command("knee", mock, flags) else { panic!("not knee") };
    *args
}

fn two_words(_: usize) -> Reply {
    Reply::Stream(vec!["one", " two"])
}

/// A file of the system's temporary folder that is removed with the value.
struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("bench-sweep-{}-{name}", std::process::id())))
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_sweep_runs_every_cell_and_writes_a_table_a_plot_and_lines() {
    let mock = Mock::start(two_words);
    let (plot, lines) = (TestFile::new("plot.svg"), TestFile::new("lines.jsonl"));
    let flags = format!(
        "--concurrencies 1,3 --input-lens 4,9 --rounds 2 --random-output-len 2 --plot {} --output-file {}",
        plot.0.display(),
        lines.0.display()
    );
    let cells = sweep::sweep(&sweep_args(&mock, &flags)).unwrap();
    let sizes: Vec<_> = cells
        .iter()
        .map(|cell| (cell.input_len_tokens, cell.concurrency, cell.summary.statistics.completed_requests))
        .collect();
    assert_eq!(sizes, [(4, 1, 2), (4, 3, 6), (9, 1, 2), (9, 3, 6)]);

    let prompts: Vec<String> = mock
        .seen()
        .iter()
        .map(|seen| seen.body["messages"][0]["content"].as_str().unwrap().to_owned())
        .collect();
    let lengths = |range: std::ops::Range<usize>| {
        prompts[range].iter().map(|prompt| prompt.split(' ').count()).collect::<HashSet<_>>()
    };
    assert_eq!((lengths(0..8), lengths(8..16)), (HashSet::from([4]), HashSet::from([9])));
    assert_eq!(
        prompts.iter().collect::<HashSet<_>>().len(),
        16,
        "no cell finds another's prompts in a cache"
    );

    let table = sweep::table(&cells);
    let rows: Vec<Vec<_>> =
        table.lines().skip(1).take(4).map(|line| line.split_whitespace().take(4).collect()).collect();
    assert_eq!(
        rows,
        [["4", "1", "2", "0"], ["4", "3", "6", "0"], ["9", "1", "2", "0"], ["9", "3", "6", "0"]]
    );
    let svg = std::fs::read_to_string(&plot.0).unwrap();
    for chart in sweep::charts(&cells) {
        let points: Vec<_> =
            chart.series.iter().flat_map(|series| &series.points).map(|point| point.0).collect();
        assert_eq!(points, [1.0, 3.0, 1.0, 3.0], "{}", chart.title);
        assert!(svg.contains(&chart.title));
    }
    assert!(svg.contains("4 input tokens") && svg.contains("9 input tokens"));
    let lines = std::fs::read_to_string(&lines.0).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let cells: Vec<_> = lines
        .iter()
        .map(|line| (line["random_input_len"].as_u64().unwrap(), line["max_concurrency"].as_u64().unwrap()))
        .collect();
    assert_eq!(cells, [(4, 1), (4, 3), (9, 1), (9, 3)]);
}

#[test]
fn no_cell_finds_the_prompt_of_its_warm_up_in_a_cache() {
    let mock = Mock::start(two_words);
    let flags = "--concurrencies 1,2 --input-lens 9 --rounds 2 --random-output-len 2 --warmup-requests 3";
    let cells = sweep::sweep(&sweep_args(&mock, flags)).unwrap();
    assert_eq!(cells.iter().map(|cell| cell.summary.statistics.completed_requests).sum::<u64>(), 2 + 4);
    let seen = mock.seen();
    let prompts: Vec<_> =
        seen.iter().map(|seen| seen.body["messages"][0]["content"].as_str().unwrap()).collect();
    assert_eq!(prompts.len(), 3 + 2 + 3 + 4);
    assert!(prompts.iter().all(|prompt| prompt.split(' ').count() == 9), "{prompts:?}");
    assert_eq!(
        prompts.iter().collect::<HashSet<_>>().len(),
        2 + 2 + 4,
        "each warm-up has one prompt of its own, and each measured request"
    );
}

#[test]
fn a_sweep_refuses_flags_that_contradict_the_grid() {
    let mock = Mock::start(two_words);
    let flags = "--num-prompts 5 --max-concurrency 2 --dataset-name multi-turn";
    let error = sweep::sweep(&sweep_args(&mock, flags)).unwrap_err().to_string();
    for part in ["--rounds", "--concurrencies", "--dataset-name"] {
        assert!(error.contains(part), "{part} missing in {error}");
    }
}

fn knee(mock: &Mock, flags: &str) -> Knee {
    let fast = "--start-rate 400 --max-rate 1600 --min-rate 100 --step-seconds 0.025 --random-input-len 4 \
                --random-output-len 2 --goodput e2el:1000000";
    bench::knee::knee(&knee_args(mock, &format!("{fast} {flags}"))).unwrap()
}

#[test]
fn a_server_that_meets_everything_has_its_knee_at_the_highest_rate() {
    let mock = Mock::start(two_words);
    let plot = TestFile::new("knee.svg");
    let found = knee(&mock, &format!("--plot {}", plot.0.display()));
    let steps: Vec<_> = found.steps.iter().map(|step| (step.rate, step.verdict)).collect();
    assert_eq!(steps, [400.0, 800.0, 1600.0].map(|rate| (rate, Verdict::Met)));
    assert_eq!(found.steps.iter().map(|s| s.summary.settings.num_prompts).collect::<Vec<_>>(), [10, 20, 40]);
    assert_eq!(found.rate, Some(1600.0));
    assert!(found.table().contains("knee: 1600.00 requests/s"), "{}", found.table());
    let svg = std::fs::read_to_string(&plot.0).unwrap();
    for chart in found.charts() {
        assert!(chart.series.iter().all(|series| series.points.len() == 3) && svg.contains(&chart.title));
    }
}

#[test]
fn failed_requests_are_not_good_and_a_share_of_them_is_too_many() {
    let mock =
        Mock::start(|number| if number % 5 == 0 { Reply::Status(500, "no") } else { two_words(number) });
    let found = knee(&mock, "--good-share 0.9");
    assert_eq!(found.rate, None);
    assert_eq!(found.steps.last().unwrap().rate, 100.0, "down to the lowest rate");
    assert!(found.table().contains("knee: none"));
    assert_eq!(knee(&mock, "--good-share 0.8").rate, Some(1600.0), "four of five are enough for this");
}

#[test]
fn a_knee_needs_objectives_and_sets_the_rate_itself() {
    let mock = Mock::start(two_words);
    let error = bench::knee::knee(&knee_args(&mock, "--request-rate 3 --good-share 2 --max-concurrency 4"))
        .unwrap_err()
        .to_string();
    for part in ["--goodput", "--request-rate", "--good-share", "--max-concurrency"] {
        assert!(error.contains(part), "{part} missing in {error}");
    }
}
