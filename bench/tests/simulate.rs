//! `bench simulate` as a whole: figures that are known from elsewhere, repeatability, and the keys of its JSON.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bench::args::{Cli, Command};
use bench::simulate::args::{Apart, Background, FleetKind, Front, Routers};
use bench::simulate::contender::{Splits, named};
use bench::simulate::grid::{Cell, EngineKind, Job};
use bench::simulate::outcome::{Figures, Objective};
use bench::simulate::workload::generated::Kind;
use bench::simulate::workload::{Workload, trace};
use clap::Parser;

const OBJECTIVE: Objective = Objective { ttft_ms: 2_000.0, tpot_ms: 100.0 };

/// The Mooncake conversation trace, which is not part of this repository.
fn conversation() -> Option<Workload> {
    let folder = std::env::var_os("ROUNDHOUSE_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let path = folder.join("data/traces/conversation_trace.jsonl");
    if !path.exists() {
        eprintln!(
            "skipped: {} is not there (ROUNDHOUSE_SHARED names the folder that has data/)",
            path.display()
        );
        return None;
    }
    Some(trace::read(&path).unwrap())
}

fn cell(workload: &Workload, engine: EngineKind, seed: u64) -> Cell<'_> {
    Cell {
        workload,
        name: workload.name.clone(),
        seed,
        fleet: FleetKind::Even,
        workers: 8,
        blocks: 2_000,
        adapter_places: None,
        apart: Apart::NOBODY,
        routers: Routers::ONE,
        background: Background::LeftOut,
        engine,
        saturated: OnceLock::new(),
        floor: OnceLock::new(),
    }
}

fn figures(cell: &Cell<'_>, load: f64, policy: &str) -> Figures {
    let contender = &named(&[policy.to_owned()]).unwrap()[0];
    Job { cell, load, contender }.run(OBJECTIVE, &mut || {}).figures
}

/// The mean over ten seeds of what `read` reads; lots and rings are drawn from the seed.
fn mean(workload: &Workload, load: f64, policy: &str, read: impl Fn(&Figures) -> f64) -> f64 {
    let of = |seed| read(&figures(&cell(workload, EngineKind::Plain, seed), load, policy));
    (1..=10).map(of).sum::<f64>() / 10.0
}

#[track_caller]
fn within_five_percent(what: &str, simulated: f64, known: f64) {
    // The known figures are rounded to a tenth, which for the small ones is another 4 %.
    let allowed = known * 0.05 + 0.05;
    assert!((simulated - known).abs() <= allowed, "{what}: simulated {simulated}, known {known}");
}

#[test]
fn sessions_that_need_more_memory_than_there_is_do_not_evict_each_other_for_good() {
    let workload = Kind::Agentic.generate(3_000, 12);
    let engine = EngineKind::Preset(*worker_core::timing::preset("qwen3-8b").unwrap());
    let cell = Cell { workers: 4, blocks: 500, ..cell(&workload, engine, 12) };
    let ours = figures(&cell, 1.0, "prefix_aware");
    // Where all that comes is computed at once, half of it is found and the mean is 11 s.
    assert!(ours.hit_rate > 0.7 && ours.mean_ttft_ms < 6_000.0, "{} {}", ours.hit_rate, ours.mean_ttft_ms);
}

#[test]
fn the_plain_engine_gives_the_known_figures() {
    let Some(workload) = conversation() else { return };
    let known = [
        ("round_robin", 8.1, 3.3),
        ("random", 7.6, 4.5),
        ("power_of_two", 8.0, 3.5),
        ("hash_two_blocks", 26.8, 3.1),
        ("cache_aware_smallest_tree", 26.2, 2.0),
        ("min_ttft", 22.7, 1.4),
    ];
    for (policy, hit_percent, ttft_s) in known {
        let hits = mean(&workload, 0.64, policy, |figures| figures.hit_rate * 100.0);
        within_five_percent(&format!("{policy} hit %"), hits, hit_percent);
        let ttft = mean(&workload, 0.64, policy, |figures| figures.mean_ttft_ms / 1e3);
        within_five_percent(&format!("{policy} mean TTFT"), ttft, ttft_s);
    }
    for (policy, mean_s, p99_s) in
        [("round_robin", 10.8, 47.0), ("cache_aware_smallest_tree", 3.6, 21.0), ("min_ttft", 2.3, 14.0)]
    {
        let ttft = mean(&workload, 0.9, policy, |figures| figures.mean_ttft_ms / 1e3);
        within_five_percent(&format!("{policy} mean TTFT at 0.9"), ttft, mean_s);
        let p99 = mean(&workload, 0.9, policy, |figures| figures.p99_ttft_ms / 1e3);
        within_five_percent(&format!("{policy} P99 TTFT at 0.9"), p99, p99_s);
    }
}

#[test]
fn the_same_seed_gives_the_same_figures() {
    let preset = worker_core::timing::preset("qwen3-8b").unwrap();
    for kind in [Kind::Zipf, Kind::MultiTurn] {
        let workload = kind.generate(200, 1);
        let of = |seed| {
            let cell = cell(&workload, EngineKind::Preset(*preset), seed);
            ["prefix_aware", "power_of_two", "llm_d", "dynamo", "oracle"]
                .map(|policy| figures(&cell, 0.9, policy))
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2), "power_of_two draws from the seed");
    }
}

#[test]
fn prompts_are_computed_by_those_who_do_nothing_else_and_answers_generated_by_the_others() {
    let workload = Kind::Zipf.generate(1_000, 1);
    let engine = EngineKind::Preset(*worker_core::timing::preset("qwen3-8b").unwrap());
    for (splits, policy) in [(None, "prefix_aware"), (None, "dynamo"), (None, "sglang_cache_aware")] {
        let apart = Apart { prefill_workers: 3, splits, ..Apart::NOBODY };
        let cell = Cell { apart, ..cell(&workload, engine, 1) };
        let contender = &named(&[policy.to_owned()]).unwrap()[0];
        let outcome = Job { cell: &cell, load: 0.9, contender }.outcome(&mut || {});
        let split = outcome.figures(&workload, OBJECTIVE).split;
        assert_eq!((split > 0.0, split < 1.0), (true, policy != "sglang_cache_aware"), "{policy} {split}");
        for record in &outcome.records {
            assert!(
                record.worker >= 3 && record.prefill_worker.is_none_or(|worker| worker < 3),
                "{record:?}"
            );
            let least_ns = if record.prefill_worker.is_some() { record.own_ns + 5_000_000 } else { 0 };
            assert!(record.first_ns > record.arrived_ns + least_ns && record.done_ns >= record.first_ns);
        }
    }
}

#[test]
fn the_routers_own_rule_does_not_bury_two_prefill_workers_that_are_too_few() {
    let workload = Kind::Zipf.generate(2_000, 1);
    let engine = EngineKind::Preset(*worker_core::timing::preset("qwen3-8b").unwrap());
    let of = |splits| {
        let apart = Apart { prefill_workers: 2, splits, ..Apart::NOBODY };
        figures(&Cell { apart, ..cell(&workload, engine, 1) }, 0.9, "prefix_aware")
    };
    let (ours, all) = (of(None), of(Some(Splits::Always)));
    assert!(all.mean_ttft_ms > 20.0 * ours.mean_ttft_ms, "{} {}", all.mean_ttft_ms, ours.mean_ttft_ms);
    let whole = figures(&cell(&workload, engine, 1), 0.9, "prefix_aware");
    assert!(
        ours.p99_tpot_ms < whole.p99_tpot_ms && ours.mean_e2e_ms < 1.05 * whole.mean_e2e_ms,
        "{ours:?} {whole:?}"
    );
}

#[test]
fn a_balancer_that_keeps_sessions_or_prefixes_together_costs_routers_no_hits() {
    let workload = Kind::MultiTurn.generate(1_500, 3);
    let engine = EngineKind::Preset(*worker_core::timing::preset("qwen3-8b").unwrap());
    let hits = |count, front| {
        let routers = Routers { count, front, ..Routers::ONE };
        figures(&Cell { routers, ..cell(&workload, engine, 3) }, 0.7, "prefix_aware").hit_rate
    };
    let (one, at_random) = (hits(1, Front::Random), hits(4, Front::Random));
    assert!(at_random < one - 0.05, "{at_random} beside {one}");
    for front in [Front::Session, Front::Prefix] {
        assert!(hits(4, front) > one - 0.03, "{front:?}: {} beside {one}", hits(4, front));
    }
}

#[test]
fn routers_that_tell_each_other_do_as_well_as_one() {
    let workload = Kind::MultiTurn.generate(1_500, 3);
    let engine = EngineKind::Preset(*worker_core::timing::preset("qwen3-8b").unwrap());
    let of = |count, told_after_ms| {
        let routers = Routers { count, told_after_ms, ..Routers::ONE };
        figures(&Cell { routers, ..cell(&workload, engine, 3) }, 0.7, "prefix_aware")
    };
    let (one, apart, told) = (of(1, None), of(4, None), of(4, Some(2)));
    assert!(apart.mean_ttft_ms > 1.3 * one.mean_ttft_ms, "{apart:?} beside {one:?}");
    assert!((told.mean_ttft_ms / one.mean_ttft_ms - 1.0).abs() < 0.05, "{told:?} beside {one:?}");
    assert!((told.hit_rate - one.hit_rate).abs() < 0.01, "{told:?} beside {one:?}");
}

#[test]
fn who_knows_of_places_for_adapters_keeps_requests_from_waiting_for_one() {
    let preset = worker_core::timing::preset("qwen3-8b").unwrap();
    let mut workload = Kind::MultiTurn.generate(1_500, 3);
    workload.give_adapters(24, 3).unwrap();
    let cell = Cell { adapter_places: Some(4), ..cell(&workload, EngineKind::Preset(*preset), 3) };
    let [ours, theirs] = ["prefix_aware", "kv_aware"].map(|policy| figures(&cell, 0.7, policy).mean_ttft_ms);
    assert!(ours < theirs / 4.0, "{ours} beside {theirs}");
}

#[test]
fn offered_far_more_than_it_takes_a_fleet_completes_what_it_can() {
    let preset = worker_core::timing::preset("qwen3-8b").unwrap();
    let workload = Kind::Groups.generate(3_000, 1);
    let cell = cell(&workload, EngineKind::Preset(*preset), 1);
    let saturated = cell.saturated_rps(&mut || {}).unwrap();
    let contender = &named(&["round_robin".to_owned()]).unwrap()[0];
    let at = |load| Job { cell: &cell, load, contender }.outcome(&mut || {}).rate();
    let (half, triple) = (at(0.5), at(3.0));
    assert!((half / saturated - 0.5).abs() < 0.05, "half of {saturated} is offered, {half} done");
    assert!((triple / saturated - 1.0).abs() < 0.1, "three times {saturated} is offered, {triple} done");
}

#[test]
fn writes_one_object_a_line_with_the_agreed_keys() {
    let file = std::env::temp_dir().join(format!("roundhouse-simulate-{}.jsonl", std::process::id()));
    let line = format!(
        "bench simulate --workload groups,bursts --requests 120 --workers 2,3 --blocks 500 --load 0.7 \
         --policies prefix_aware,kv_aware --fleet even,slowing --seeds 2 --threads 2 --json {}",
        file.display()
    );
    let Command::Simulate(args) = Cli::parse_from(line.split_whitespace()).command else { panic!() };
    assert_eq!(bench::simulate::simulate(&args).unwrap(), 2 * 2 * 2 * 2 * 2);
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let keys = [
        "policy",
        "family",
        "workers",
        "blocks",
        "load",
        "trace",
        "seed",
        "requests",
        "mean_ttft_ms",
        "p50_ttft_ms",
        "p90_ttft_ms",
        "p99_ttft_ms",
        "mean_tpot_ms",
        "p99_tpot_ms",
        "mean_e2e_ms",
        "goodput_rps",
        "hit_rate",
        "imbalance",
        "retractions",
    ];
    let rows: Vec<serde_json::Map<String, serde_json::Value>> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 32);
    for row in &rows {
        assert!(row.keys().eq(keys), "{row:?}");
        assert_eq!(row["requests"], 120);
    }
    assert_eq!((&rows[0]["policy"], &rows[0]["family"]), (&"prefix_aware".into(), &"ours".into()));
    assert!(rows.iter().any(|row| row["trace"] == "bursts+slowing" && row["seed"] == 2));
}

#[test]
fn says_all_that_is_wrong_at_once() {
    let line = "bench simulate --workers 0 --load=-1 --threads 0";
    let Command::Simulate(args) = Cli::parse_from(line.split_whitespace()).command else { panic!() };
    let message = bench::simulate::simulate(&args).unwrap_err().to_string();
    for part in ["--workers", "--load", "--threads", "--trace FILE"] {
        assert!(message.contains(part), "{part} missing in {message}");
    }
}

#[test]
fn the_background_is_served_beside_the_others_and_is_in_no_figure_of_theirs() {
    let mut workload = Kind::Zipf.generate(400, 1);
    workload.put_behind(&Kind::Groups.generate(4_000, 2)).unwrap();
    let engine = EngineKind::Preset(*worker_core::timing::preset("qwen3-8b").unwrap());
    let figures = |background| {
        let cell = Cell { background, workers: 2, ..cell(&workload, engine, 1) };
        figures(&cell, 0.5, "prefix_aware")
    };
    let alone = figures(Background::LeftOut);
    assert_eq!((alone.requests, alone.spare_tokens_per_s), (400, 0.0));
    let [little, much] = [0.4, 0.8].map(|load| figures(Background::Spare(load)));
    let clients = figures(Background::Clients(4));
    assert!([little, much, clients].iter().all(|figures| figures.requests == 400));
    assert!(little.spare_tokens_per_s > 0.0 && clients.spare_tokens_per_s > 0.0);
    assert!(much.spare_tokens_per_s > 1.2 * little.spare_tokens_per_s, "{little:?} {much:?}");
    assert!(much.mean_e2e_ms > alone.mean_e2e_ms, "nothing is free");
    assert_eq!(figures(Background::Spare(0.8)), much, "the same again");
}

/// Runs a small simulation of these flags more. Returns how many it has figures of, and the mean times in its file.
fn resumable(folder: &Path, more: &[&str]) -> anyhow::Result<(usize, Vec<f64>)> {
    let file = folder.join("figures.jsonl");
    let flags =
        ["bench", "simulate", "--workload", "zipf", "--requests", "200", "--workers", "2", "--load", "0.7"];
    let flags = flags.iter().chain(&["--policies", "prefix_aware,round_robin", "--resume", "--json"]);
    let flags = flags.copied().chain([file.to_str().unwrap()]).chain(more.iter().copied());
    let Command::Simulate(args) = Cli::parse_from(flags).command else { panic!("it is simulate") };
    let count = bench::simulate::simulate(&args)?;
    let mean = |line: &str| -> f64 {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["mean_ttft_ms"].as_f64().unwrap()
    };
    Ok((count, std::fs::read_to_string(file).unwrap().lines().map(mean).collect()))
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("roundhouse-simulate-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn what_is_resumed_is_done_when_nothing_is_left_and_is_not_another_engines() {
    let folder = folder("resume");
    let (count, first) = resumable(&folder, &[]).unwrap();
    assert_eq!((count, first.len()), (2, 2));
    assert_eq!(resumable(&folder, &[]).unwrap(), (2, first.clone()));
    let (_, both) = resumable(&folder, &["--engine", "qwen3-32b"]).unwrap();
    assert_eq!((both.len(), &both[..2]), (4, &first[..]));
    assert!(both[2] > first[0] && both[3] > first[1], "{both:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn traces_of_one_name_are_refused_and_one_instant_is_no_pace() {
    let folder = folder("names");
    let line =
        |at: u64| format!(r#"{{"timestamp":{at},"input_length":900,"output_length":5,"hash_ids":[1,2]}}"#);
    let paths = ["one/t.jsonl", "two/t.jsonl"].map(|name| folder.join(name));
    for path in &paths {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{}\n{}\n", line(60_000), line(60_000))).unwrap();
    }
    let [one, two] = paths.map(|path| path.to_str().unwrap().to_owned());
    let run = |traces: &str| {
        let flags = ["bench", "simulate", "--trace", traces, "--workers", "2", "--policies", "prefix_aware"];
        let Command::Simulate(args) = Cli::parse_from(flags).command else { panic!("it is simulate") };
        bench::simulate::simulate(&args)
    };
    let refused = run(&format!("{one},{two}")).unwrap_err().to_string();
    assert!(refused.contains("two traces are called \"t\""), "{refused}");
    assert_eq!(run(&one).unwrap(), 2, "two loads");
    std::fs::remove_dir_all(folder).unwrap();
}
