//! What reading a body costs: chat requests of three sizes, and the longest stretch that a large one holds its thread for.
//!
//! `cargo bench -p router --bench parse -- --quick`

mod chats;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use router::openai::scan::{BodyScanner, ScanConfig};
use router::turns::TURN_BYTES;
use router_core::PromptUse;
use serde::de::IgnoredAny;

use chats::{chats, prose};

fn scan(body: &[u8], prompt_use: PromptUse) -> usize {
    let mut scanner = BodyScanner::new(ScanConfig { seed: 7, prompt_use });
    scanner.push(body).expect("it is JSON");
    scanner.finish().expect("it is whole").prompt.prompt_bytes
}

fn whole_bodies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("body");
    for kilobytes in [1, 16, 200] {
        let bodies = chats(kilobytes * 1_000);
        group.throughput(Throughput::Bytes(bodies[0].len() as u64));
        let mut run = |name: &str, read: &dyn Fn(&[u8]) -> usize| {
            let mut at = 0;
            group.bench_function(BenchmarkId::new(name, format!("{kilobytes} KB")), |bencher| {
                bencher.iter(|| {
                    at = (at + 1) % bodies.len();
                    black_box(read(black_box(&bodies[at])))
                });
            });
        };
        run("scan", &|body| scan(body, PromptUse::None));
        run("scan, first KiB hashed", &|body| scan(body, PromptUse::FirstKib));
        run("scan, hashed", &|body| scan(body, PromptUse::Whole));
        run("serde_json IgnoredAny", &|body| {
            serde_json::from_slice::<IgnoredAny>(body).expect("it is JSON");
            body.len()
        });
    }
    group.finish();
}

/// Bodies that make the scanner work for each byte.
fn hard_bodies() -> [(&'static str, Vec<u8>); 6] {
    let size = 4 * TURN_BYTES;
    let repeated = |head: &str, item: &str, tail: &str| {
        let count = size / item.len();
        format!("{head}{}0{tail}", item.repeat(count)).into_bytes()
    };
    let chinese = "凡是过往，皆为序章。".repeat(size / 30);
    [
        ("prose", format!(r#"{{"prompt": {}}}"#, serde_json::json!(prose(0, size))).into_bytes()),
        ("Chinese", format!(r#"{{"prompt": "{chinese}"}}"#).into_bytes()),
        ("escapes alone", format!(r#"{{"prompt": "{}"}}"#, "\\n\\u00e9".repeat(size / 8)).into_bytes()),
        ("token ids", repeated("{\"input_ids\": [", "31415, ", "]}")),
        ("one-digit numbers", repeated("{\"x\": [", "1,", "]}")),
        ("empty messages", repeated("{\"messages\": [", "{\"role\":\"\"},", "]}")),
    ]
}

/// One turn of a large body: how long it holds its thread. A 50-MB body is some 760 of these, others between each two.
fn turns(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("turn");
    group.throughput(Throughput::Bytes(TURN_BYTES as u64));
    for (name, body) in hard_bodies() {
        let (before, rest) = body.split_at(TURN_BYTES);
        let turn = &rest[..TURN_BYTES];
        for (hashed, prompt_use) in [("not hashed", PromptUse::None), ("hashed", PromptUse::Whole)] {
            let started = || {
                let mut scanner = BodyScanner::new(ScanConfig { seed: 7, prompt_use });
                scanner.push(before).expect("it is JSON");
                scanner
            };
            group.bench_function(BenchmarkId::new(name, hashed), |bencher| {
                bencher.iter_batched_ref(
                    started,
                    |scanner| scanner.push(black_box(turn)).expect("it is JSON"),
                    criterion::BatchSize::LargeInput,
                );
            });
        }
    }
    group.finish();
}

/// The end of a 50-MB body: what is left to do once all of it has been read.
fn end(criterion: &mut Criterion) {
    let body = format!(r#"{{"prompt": "{}"}}"#, "x".repeat(50_000_000)).into_bytes();
    let read = || {
        let mut scanner = BodyScanner::new(ScanConfig { seed: 7, prompt_use: PromptUse::Whole });
        body.chunks(TURN_BYTES).for_each(|part| scanner.push(part).expect("it is JSON"));
        scanner
    };
    let mut group = criterion.benchmark_group("end");
    group.sample_size(10);
    group.bench_function("of a 50-MB body", |bencher| {
        bencher.iter_batched(
            read,
            |scanner| scanner.finish().expect("it is whole"),
            criterion::BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, whole_bodies, turns, end);
criterion_main!(benches);
