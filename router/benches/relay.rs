//! What a request costs on its way through all stages, and each piece of a stream, with a worker whose answer is known beforehand: no
//! sockets, no HTTP.
//!
//! `cargo bench -p router --bench relay -- --quick`

mod chats;

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use http::{HeaderMap, HeaderValue, Method, Request, header};
use http_body_util::{BodyExt, Full};
use router::app::App;
use router::config::Cli;
use router::stages::accept::serve;
use router::transport::{CannedTransport, Transport};
use router_core::{WorkerId, WorkerSpec};
use tokio::runtime::{Builder, Runtime};

use chats::chats;

/// Pieces of the streamed answer, less the first and the last ones.
const TOKENS: usize = 1_000;

/// A router before four workers that all give this answer.
fn router(runtime: &Runtime, policy: &str, answer: &CannedTransport) -> Arc<App> {
    let arguments =
        ["--workers=127.0.0.1:1", "--log-level=off", &format!("--policy={policy}")].map(str::to_owned);
    let _inside = runtime.enter();
    let app = App::build(&Cli::configure(&arguments, None).expect("it holds together")).expect("it starts");
    let worker = |n| WorkerSpec::new(WorkerId::new(&format!("w{n}")), format!("http://canned:{n}"));
    let workers: Vec<_> = (1..=4).map(worker).collect();
    let way = |_: &WorkerSpec| Ok(Arc::new(answer.clone()) as Arc<dyn Transport>);
    app.fleet.set_over(&workers, &app.decider, way).expect("every way can be made");
    runtime.block_on(async {
        // Until a probe has passed nobody is asked.
        while !app.fleet.roster().snapshot.workers().iter().all(|worker| worker.is_usable()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    app
}

fn answer(content_type: &'static str, pieces: impl IntoIterator<Item = String>) -> CannedTransport {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    CannedTransport { headers, pieces: pieces.into_iter().map(Bytes::from).collect::<VecDeque<_>>() }
}

fn request(body: &Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = "/v1/chat/completions".parse().expect("it is a path");
    for (name, value) in [("host", "router"), ("user-agent", "bench"), ("content-type", "application/json")] {
        request.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    request
}

/// Sends a request and takes all of its answer: how many pieces that had.
async fn exchange(app: &Arc<App>, body: &Bytes) -> usize {
    let response = serve(app, request(body)).await;
    assert!(response.status().is_success(), "{}", response.status());
    let (mut body, mut pieces) = (response.into_body(), 0);
    while let Some(frame) = body.frame().await {
        black_box(frame.expect("it does not break"));
        pieces += 1;
    }
    pieces
}

fn walks(criterion: &mut Criterion) {
    let usage = r#""usage":{"prompt_tokens":250,"completion_tokens":16,"total_tokens":266}"#;
    let whole = answer(
        "application/json",
        [format!(
            r#"{{"id":"x","object":"chat.completion","choices":[{{"text":"{}"}}],{usage}}}"#,
            "y".repeat(400)
        )],
    );
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut group = criterion.benchmark_group("walk");
    for kilobytes in [1, 16, 200] {
        let bodies: Vec<_> = chats(kilobytes * 1_000).into_iter().map(Bytes::from).collect();
        for policy in ["round_robin", "prefix_aware"] {
            let app = router(&runtime, policy, &whole);
            group.bench_function(BenchmarkId::new(policy, format!("{kilobytes} KB")), |bencher| {
                bencher.iter_custom(|count| timed(&runtime, count, &app, &bodies));
            });
        }
    }
    group.finish();
}

fn streams(criterion: &mut Criterion) {
    let event = |n: usize| {
        let delta = format!(r#"{{"index":0,"delta":{{"content":" token{n}"}},"finish_reason":null}}"#);
        format!(
            "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{delta}]}}\n\n"
        )
    };
    let stream = answer("text/event-stream", (0..TOKENS).map(event).chain(["data: [DONE]\n\n".to_owned()]));
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let app = router(&runtime, "round_robin", &stream);
    let bodies: Vec<_> = chats(1_000).into_iter().map(Bytes::from).collect();
    let mut group = criterion.benchmark_group("stream");
    group.throughput(criterion::Throughput::Elements(TOKENS as u64));
    group.bench_function(BenchmarkId::new("pieces", TOKENS), |bencher| {
        bencher.iter_custom(|count| timed(&runtime, count, &app, &bodies));
    });
    group.finish();
}

fn timed(runtime: &Runtime, count: u64, app: &Arc<App>, bodies: &[Bytes]) -> Duration {
    runtime.block_on(async {
        let began = Instant::now();
        for body in bodies.iter().cycle().take(usize::try_from(count).unwrap_or(usize::MAX)) {
            black_box(exchange(app, body).await);
        }
        began.elapsed()
    })
}

criterion_group!(benches, walks, streams);
criterion_main!(benches);
