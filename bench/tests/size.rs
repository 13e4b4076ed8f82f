//! `bench size` as a whole: what it finds is enough, one less is not, and both of its questions have one answer.

use bench::args::{Cli, Command};
use bench::size::{Found, size};
use clap::Parser;

const PROMPTS: &[&str] =
    &["--workload", "groups", "--requests", "400", "--blocks", "500", "--goodput-ttft", "1500"];

fn run(flags: &[&str]) -> anyhow::Result<Vec<Found>> {
    let line = ["bench", "size"].iter().chain(PROMPTS).chain(flags);
    let Command::Size(args) = Cli::parse_from(line).command else { panic!("it is size") };
    size(&args)
}

#[test]
fn one_worker_less_is_not_enough() {
    let wanted = ["--rate", "40", "--policies", "prefix_aware,round_robin"];
    let found = run(&wanted).unwrap();
    assert_eq!(
        found.iter().map(|found| found.policy.as_str()).collect::<Vec<_>>(),
        ["prefix_aware", "round_robin"]
    );
    for Found { policy, workers, arrivals_per_s, met, good_share, .. } in &found {
        assert!(*met && *good_share >= 0.9 && *workers > 1, "{found:?}");
        assert!((arrivals_per_s / 40.0 - 1.0).abs() < 1e-6, "{found:?}");
        let fewer = (workers - 1).to_string();
        let short = run(&["--rate", "40", "--policies", policy, "--max-workers", &fewer]).unwrap();
        assert!(!short[0].met && short[0].good_share < 0.9 && short[0].workers == workers - 1, "{short:?}");
    }
    assert!(found[0].workers < found[1].workers, "{found:?}");
}

#[test]
fn a_fleet_of_which_one_dies_has_two_at_least() {
    let found = run(&["--rate", "1", "--fleet", "restarting", "--policies", "prefix_aware"]).unwrap();
    assert!(found[0].workers >= 2, "{found:?}");
    let refused = run(&["--fleet", "restarting", "--max-workers", "1"]).unwrap_err().to_string();
    assert!(refused.contains("--max-workers must be at least 2"), "{refused}");
}

#[test]
fn workers_are_enough_for_the_rate_that_they_are_said_to_carry() {
    let file = std::env::temp_dir().join(format!("roundhouse-size-{}.jsonl", std::process::id()));
    let path = file.display().to_string();
    let carried = run(&["--workers", "4", "--policies", "prefix_aware", "--json", &path]).unwrap();
    let Found { met, workers, arrivals_per_s, is_farthest, good_share, .. } = &carried[0];
    assert!(*met && !is_farthest && *workers == 4, "{carried:?}");
    let rate = (arrivals_per_s * 0.99).to_string();
    let found = run(&["--rate", &rate, "--policies", "prefix_aware", "--max-workers", "4"]).unwrap();
    assert!(found[0].met && found[0].workers <= 4, "{found:?}");
    let more = (arrivals_per_s * 1.03).to_string();
    let beyond = run(&["--rate", &more, "--policies", "prefix_aware", "--max-workers", "4"]).unwrap();
    assert!(!beyond[0].met, "{beyond:?}");

    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((line["policy"].as_str(), line["workers"].as_u64()), (Some("prefix_aware"), Some(4)));
    assert_eq!(
        (line["arrivals_per_s"].as_f64(), line["good_share"].as_f64()),
        (Some(*arrivals_per_s), Some(*good_share))
    );
    assert!(line["p99_ttft_ms"].as_f64().unwrap() > 0.0);
}

#[test]
fn flags_of_simulate_that_say_nothing_here_are_refused() {
    let message = run(&["--load", "0.7", "--engine", "plain", "--good-share", "0"]).unwrap_err().to_string();
    for problem in
        ["--load is for bench simulate", "--engine plain has no speed", "--good-share must be above 0"]
    {
        assert!(message.contains(problem), "{message}");
    }
}
