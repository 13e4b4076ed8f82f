//! Load reports.

use roundhouse_wire::v1;
use tonic::Code;
use worker::model::ModelSource;
use worker::{KvEventRecording, WorkerConfig};

use crate::harness::*;

#[tokio::test]
async fn load_follows_what_runs_and_tells_how_fast() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let request = v1::LoadRequest { interval_ms: Some(10), router: None };
    let mut load = client.load(request).await.unwrap().into_inner();
    let idle = in_time(load.message()).await.unwrap().unwrap();
    assert_eq!((idle.running_requests, idle.kv_used_tokens), (0, 0));
    assert_eq!((idle.prefill_tokens_per_second, idle.decode_tokens_per_second), (None, None));
    let info = client.info(v1::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(idle.kv_free_tokens, info.kv_blocks * u64::from(info.block_tokens));
    let stream = client.generate(tokens("", vec![5; 40], 400)).await.unwrap();
    let busy = loop {
        let report = in_time(load.message()).await.unwrap().unwrap();
        if report.running_requests == 1 && report.decode_tokens_per_second.is_some() {
            break report;
        }
    };
    assert!(busy.kv_used_tokens >= 40, "{busy:?}");
    assert_eq!(busy.kv_used_tokens + busy.kv_free_tokens, idle.kv_free_tokens);
    assert!(busy.prefill_tokens_per_second.is_some_and(|speed| speed > 0.0), "{busy:?}");
    drop(stream);
    while in_time(load.message()).await.unwrap().unwrap().kv_used_tokens > 0 {}
}

#[tokio::test]
async fn routers_are_told_their_place_among_those_that_follow() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let mut follow = async |router| {
        let request = v1::LoadRequest { interval_ms: Some(10), router };
        client.load(request).await.unwrap().into_inner()
    };
    let (mut second, mut other, first) = (follow(Some(9)).await, follow(None).await, follow(Some(4)).await);
    let place = |rank, count| Some(v1::RouterPlace { rank, count });
    while in_time(second.message()).await.unwrap().unwrap().place != place(1, 2) {}
    assert_eq!(in_time(other.message()).await.unwrap().unwrap().place, None, "not a router");
    drop(first);
    while in_time(second.message()).await.unwrap().unwrap().place != place(0, 1) {}
}

#[tokio::test]
async fn a_worker_that_drains_does_not_wait_for_followers() {
    let mut config = WorkerConfig::new(ModelSource::Builtin);
    config.kv_events = KvEventRecording::On;
    config.threads = 1;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let mut served = serve_until(config, LIMIT * 1_000, async { drop(stopped.await) }).await;
    let mut client = served.client().await;
    let mut load = client.load(v1::LoadRequest::default()).await.unwrap().into_inner();
    let mut events = client.kv_events(v1::KvEventsRequest::default()).await.unwrap().into_inner();
    in_time(load.message()).await.unwrap().unwrap();
    in_time(events.message()).await.unwrap().unwrap();
    stop.send(()).unwrap();
    in_time(served.ended()).await;
    while in_time(load.message()).await.unwrap().is_some() {}
    while in_time(events.message()).await.unwrap().is_some() {}
}

#[tokio::test]
async fn an_interval_out_of_range_is_refused() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    for interval_ms in [0, 9, 60_001] {
        let request = v1::LoadRequest { interval_ms: Some(interval_ms), router: None };
        let status = client.load(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("from 10 to 60000"), "{status}");
    }
}
