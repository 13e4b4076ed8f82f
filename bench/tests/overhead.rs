//! `bench overhead` against its own mocks: everything is counted, and counted right. Nothing here is timed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bench::args::{Cli, Command as Subcommand};
use bench::overhead::args::OverheadArgs;
use bench::overhead::beside::{self, Neighbour};
use bench::overhead::load::Load;
use bench::overhead::measure;
use bench::overhead::mocks::{Mocks, Pace, Pacing, Plan};
use bench::overhead::process::ProcessTree;
use bench::overhead::rig::{Rig, Timing};
use bench::overhead::streams;
use bench::overhead::tally::{Counts, Tally};
use bench::overhead::workload::{Delivery, Workload};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;

const PATH: &str = "/v1/chat/completions";
/// Far beyond what any of this takes on any machine.
const LIMIT: Duration = Duration::from_secs(60);

async fn four_mocks() -> Mocks {
    Mocks::listen(&[0, 0, 0, 0]).await.unwrap()
}

/// This process stands in place of a router, which is not there.
fn rig(mocks: &Mocks, addresses: &[SocketAddr], connections: usize, [warmup, duration]: [u64; 2]) -> Rig {
    Rig {
        addresses: addresses.to_vec(),
        mocks: mocks.clone(),
        authority: "mocks".to_owned(),
        path_prefix: String::new(),
        process: Some(ProcessTree::of_this_process()),
        idle: None,
        connections,
        timing: Timing { warmup: Duration::from_millis(warmup), duration: Duration::from_millis(duration) },
    }
}

fn workload(kilobytes: usize, delivery: Delivery) -> Arc<Workload> {
    Arc::new(Workload::new("mocks", PATH, kilobytes, delivery).unwrap())
}

/// `each` requests on every one of `connections` connections, to the mocks in turn.
async fn ask(mocks: &Mocks, workload: &Arc<Workload>, connections: usize, each: u64) -> Arc<Tally> {
    let tally = Arc::<Tally>::default();
    let mut load = Load::new(&tally);
    load.spawn(connections, mocks.addresses(), workload, |lane, rng| lane.closed_loop(each, rng));
    load.finish(LIMIT).await;
    tally
}

/// Hits of a mock that gets the requests of one connection in their order, and remembers the last two prompts.
fn modelled_hits(workload: &Workload, connection: u64, requests: u64) -> u64 {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(connection);
    let (mut latest, mut before, mut hits) = (None, None, 0);
    for _ in 0..requests {
        let prompt = Some(workload.draft(&mut rng).prompt());
        if prompt == latest {
            hits += 1;
            continue;
        }
        hits += u64::from(prompt == before);
        (before, latest) = (latest, prompt);
    }
    hits
}

#[tokio::test]
async fn every_request_is_counted_and_hits_are_those_of_the_model() {
    for kilobytes in [1, 200] {
        let (mocks, workload) = (four_mocks().await, workload(kilobytes, Delivery::Whole));
        let tally = ask(&mocks, &workload, 4, 150).await;
        assert_eq!(tally.errors(), [].into());
        assert_eq!(tally.counts(), Counts { requests: 600, chunks: 0 });
        for (connection, counts) in (0..).zip(mocks.counts()) {
            assert_eq!((counts.requests, counts.untagged), (150, 0));
            assert_eq!(counts.hits, modelled_hits(&workload, connection, 150));
            assert!((1..150).contains(&counts.hits), "{} hits of 150 tell nothing", counts.hits);
        }
        assert!(mocks.other_requests().is_empty());
    }
}

#[tokio::test]
async fn an_error_status_is_an_error_and_the_rest_goes_on() {
    let mocks = four_mocks().await;
    mocks.answer_at(2, Plan::Status(500));
    let tally = ask(&mocks, &workload(1, Delivery::Whole), 8, 50).await;
    assert_eq!(tally.counts().requests, 300);
    assert_eq!(tally.errors(), [("status 500".to_owned(), 100)].into());
}

#[tokio::test]
async fn an_answer_of_another_kind_and_a_closed_port_are_errors() {
    let mocks = four_mocks().await;
    mocks.answer_with(Plan::Flood { chunks: 3 });
    let tally = ask(&mocks, &workload(1, Delivery::Whole), 4, 5).await;
    assert_eq!(tally.counts().requests, 0);
    assert_eq!(tally.errors(), [("answer that is no chat completion".to_owned(), 20)].into());

    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let tally = Arc::<Tally>::default();
    let mut load = Load::new(&tally);
    load.spawn(1, &[gone], &workload(1, Delivery::Whole), |lane, rng| lane.closed_loop(3, rng));
    load.finish(LIMIT).await;
    assert_eq!(tally.errors(), [("connect failed: connection refused".to_owned(), 3)].into());
}

/// `streams` streams on each of eight connections, of which `expected` chunks each are awaited.
async fn read_streams(plan: Plan, streams: u64, expected: u32) -> Arc<Tally> {
    let mocks = four_mocks().await;
    mocks.answer_with(plan);
    let workload = workload(1, Delivery::Stream { chunks: expected });
    let tally = Arc::<Tally>::default();
    let mut load = Load::new(&tally);
    load.spawn(8, mocks.addresses(), &workload, |lane, rng| lane.read_streams(streams, expected, rng));
    load.finish(LIMIT).await;
    tally
}

#[tokio::test]
async fn every_chunk_of_every_stream_is_counted() {
    let pace = |pacing| Pace { streams: 8, interval: Duration::from_millis(1), pacing };
    for plan in [
        Plan::Flood { chunks: 40 },
        Plan::Paced { chunks: 40, pace: pace(Pacing::Steps) },
        Plan::Paced { chunks: 40, pace: pace(Pacing::Spread) },
    ] {
        let tally = read_streams(plan, 3, 40).await;
        assert_eq!(tally.errors(), [].into(), "{plan:?}");
        assert_eq!(tally.counts(), Counts { requests: 24, chunks: 960 }, "{plan:?}");
    }
}

#[tokio::test]
async fn a_stream_that_lacks_chunks_or_is_none_is_an_error() {
    let tally = read_streams(Plan::Flood { chunks: 39 }, 1, 40).await;
    assert_eq!(tally.errors(), [("stream with 39 chunks instead of 40".to_owned(), 8)].into());
    assert_eq!(tally.counts(), Counts { requests: 0, chunks: 312 });
    let tally = read_streams(Plan::Whole, 1, 40).await;
    assert_eq!(tally.errors(), [("stream without [DONE]".to_owned(), 8)].into());
}

fn parse(line: &str) -> OverheadArgs {
    let words = ["bench", "overhead"].into_iter().chain(line.split_whitespace());
    match Cli::try_parse_from(words).unwrap().command {
        Subcommand::Overhead(args) => *args,
        _ => panic!("parsed overhead as something else"),
    }
}

#[tokio::test]
async fn routers_side_by_side_are_compared_turn_by_turn() {
    let mocks = four_mocks().await;
    let rig = |number: usize| rig(&mocks, &mocks.addresses()[number..=number], 4, [10, 100]);
    let rigs = [("one".to_owned(), rig(0)), ("two".to_owned(), rig(1))];
    let beside = beside::measure(&rigs, 1, 3).await.unwrap();
    let [one, two] = &beside.routers[..] else { panic!("{beside:?}") };
    assert_eq!((one.beyond_first_us, one.over_first, one.errors), (0.0, 1.0, 0));
    assert!(two.cpu_us_per_request > 0.0 && two.range.0 <= two.cpu_us_per_request, "{two:?}");
    assert!(two.cpu_us_per_request <= two.range.1 && two.over_first > 0.0, "{two:?}");
    let counts = mocks.counts();
    assert!(counts[0].requests > 0 && counts[1].requests > 0, "both had their turns");
    assert_eq!(counts[2].requests, 0);
    assert_eq!("a=1=http://b".parse::<Neighbour>().unwrap().base_url, "http://b");
    for wrong in ["a", "a=b=http://c", "=1=http://c", "a=1"] {
        assert!(wrong.parse::<Neighbour>().unwrap_err().contains("NAME=PID=URL"), "{wrong}");
    }
}

#[tokio::test]
async fn every_part_gives_its_figures() {
    let args =
        parse("--rss-requests 640 --idle-streams 60 --streams 8 --flood-chunks 50 --chunk-interval-ms 5");
    let mocks = four_mocks().await;
    let rig = rig(&mocks, mocks.addresses(), 32, [50, 500]);
    let figures = measure(&rig, &args.load).await.unwrap();
    let json = serde_json::to_value(&figures).unwrap();
    let after = figures.after_requests.unwrap();
    assert_eq!((after.usage.requests, after.usage.mock_requests), (640, 640));
    assert_eq!(figures.rates.iter().map(|rate| rate.kilobytes).collect::<Vec<_>>(), [1, 16, 200]);
    for rate in &figures.rates {
        assert!(rate.usage.requests > 0 && rate.cpu_us_per_request.unwrap() > 0.0);
        assert!(rate.usage.errors.is_empty(), "{:?}", rate.usage.errors);
    }
    assert!(figures.latency.unwrap().p99_ms > 0.0);
    for streams in [figures.paced.unwrap(), figures.flood.unwrap()] {
        assert!(streams.usage.chunks > 0 && streams.cpu_us_per_chunk.unwrap() > 0.0);
        assert!(streams.usage.errors.is_empty(), "{:?}", streams.usage.errors);
    }
    let idle = figures.idle_streams.unwrap();
    assert_eq!((idle.streams, idle.ended_early, idle.usage.chunks), (60, 0, 60));
    assert!(figures.rss_idle_mb.unwrap() > 0.0 && figures.rss_end_mb.unwrap() > 0.0);
    assert!(json["rates"][2]["requests_per_s"].as_f64().unwrap() > 0.0, "{json}");
}

#[tokio::test]
async fn a_window_goes_on_until_something_has_come() {
    let mocks = four_mocks().await;
    let rig = rig(&mocks, mocks.addresses(), 2, [0, 1]);
    let pace = Pace { streams: 2, interval: Duration::from_millis(100), pacing: Pacing::Steps };
    let paced = streams::paced(&rig, pace).await.unwrap();
    assert!(paced.usage.chunks > 0 && paced.cpu_us_per_chunk.unwrap() > 0.0, "{paced:?}");
}

#[test]
fn names_all_problems_at_once() {
    let message = parse("--duration 0 --sizes 1,0 --rate 0").validate().unwrap_err().to_string();
    for flag in ["--duration", "--sizes", "--rate"] {
        assert!(message.contains(flag), "{flag} missing in {message}");
    }
    for line in ["--pid 1", "--command x", "--core first", "--mocks-only --base-url http://h:1"] {
        let words = ["bench", "overhead"].into_iter().chain(line.split_whitespace());
        assert!(Cli::try_parse_from(words).is_err(), "{line} was accepted");
    }
}

/// Another bench that serves mocks stands in for the router: it answers as one would.
#[test]
fn starts_measures_and_ends_a_router() {
    let bench = env!("CARGO_BIN_EXE_bench");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let directory = std::env::temp_dir().join(format!("bench-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let (lines, log) = (directory.join("lines"), directory.join("log"));
    let router = format!("{bench} overhead --mocks-only --core any --mock-ports {port}");
    let output = Command::new(bench)
        .args(["overhead", "--mock-ports", "0,0", "--core", "any", "--router-core", "any", "--name", "mocks"])
        .args(["--only", "rates", "--sizes", "1", "--warmup", "0.1", "--duration", "0.5"])
        .args(["--base-url", &format!("http://127.0.0.1:{port}"), "--command", &router])
        .args(["--output-file".as_ref(), lines.as_os_str(), "--router-log".as_ref(), log.as_os_str()])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with("workers: http://127.0.0.1:"), "{text}");
    assert!(text.contains("| mocks |"), "{text}");
    let line = std::fs::read_to_string(&lines).unwrap();
    let json: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(json["rates"][0]["router_cpu_s"].as_f64().unwrap() > 0.0, "{line}");
    assert!(json["rss_idle_mb"].as_f64().unwrap() > 0.0, "{line}");
    assert_eq!(json["rates"][0]["errors"], serde_json::json!({}), "{line}");
    assert!(std::fs::read_to_string(&log).unwrap().contains(&format!("workers: http://127.0.0.1:{port}")));
    // The port is free again only if the router has ended.
    TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn says_what_became_of_a_router_that_does_not_start() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["overhead", "--mock-ports", "0", "--core", "any", "--router-core", "any"])
        .args(["--base-url", "http://127.0.0.1:9", "--command", "false"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("the router has ended"), "{message}");
}
