//! `--otlp-traces-endpoint`: what a collector is told of requests, and engines of their traces.

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tokio::sync::Notify;

use crate::continuing::{MODEL, breaks, content, opening, pair, stop, usage, whole};
use crate::disaggregated::prefilled;
use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
const CALLER: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLERS_SPAN: &str = "00f067aa0ba902b7";
const TEXT: &str = "a secret between a client and an engine";

async fn collector() -> MockWorker {
    MockWorker::answering(&[], json_reply(200, "")).await
}

fn endpoint(collector: &MockWorker) -> String {
    format!("--otlp-traces-endpoint=http://{}", collector.address)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a span's attribute says.
fn said(attributes: &[KeyValue], name: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == name);
    match found.and_then(|attribute| attribute.value.as_ref()?.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        None => String::new(),
        other => format!("{other:?}"),
    }
}

/// All spans that have been sent, in the order of their beginnings.
fn spans(collector: &MockWorker) -> Vec<Span> {
    let mut spans: Vec<_> = collector
        .seen()
        .iter()
        .flat_map(|seen| {
            assert_eq!(
                (seen.path.as_str(), seen.headers["content-type"].as_str()),
                ("/v1/traces", "application/x-protobuf")
            );
            let whole = String::from_utf8_lossy(&seen.body);
            assert!(!whole.contains(TEXT) && !whole.contains("a key"), "{whole}");
            ExportTraceServiceRequest::decode(seen.body.as_slice()).unwrap().resource_spans
        })
        .flat_map(|resource| {
            let attributes = resource.resource.unwrap().attributes;
            assert_eq!(said(&attributes, "service.name"), "roundhouse-router");
            resource.scope_spans
        })
        .flat_map(|scope| scope.spans)
        .collect();
    spans.sort_by_key(|span| span.start_time_unix_nano);
    spans
}

fn names(spans: &[Span]) -> Vec<&str> {
    spans.iter().map(|span| span.name.as_str()).collect()
}

/// Whether a span says that something went wrong.
fn is_error(span: &Span) -> bool {
    span.status.as_ref().is_some_and(|status| status.code == 2)
}

async fn ask(router: &Router, traceparent: Option<&str>) -> Reply {
    let headers = traceparent.map(|traceparent| ("traceparent", traceparent));
    let headers: Vec<_> = headers.into_iter().chain([("authorization", "Bearer a key")]).collect();
    exchange(router.address, "POST", CHAT, &headers, chat(TEXT).as_bytes()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_callers_trace_is_gone_on_with_and_the_engine_is_told_of_the_attempt() {
    let (collector, events) = (collector().await, [&*content("1", "hello"), &usage("1", 12, 3)]);
    let mock = MockWorker::answering(&["m"], sse_reply(&events)).await;
    let router = Router::start(&[&workers(&[&mock]), &endpoint(&collector), "--otlp-traces-share=0%"]).await;
    assert_eq!(ask(&router, Some(&format!("00-{CALLER}-{CALLERS_SPAN}-01"))).await.status, 200);
    router.stopped().await;
    let spans = spans(&collector);
    assert_eq!(names(&spans), ["chat m", "read", "pick", "attempt"]);
    assert!(spans.iter().all(|span| hex(&span.trace_id) == CALLER && !is_error(span)));
    assert_eq!(hex(&spans[0].parent_span_id), CALLERS_SPAN);
    assert!(spans[1..].iter().all(|span| span.parent_span_id == spans[0].span_id));
    assert!(spans.iter().all(|span| span.end_time_unix_nano <= spans[0].end_time_unix_nano));
    let told = format!("00-{CALLER}-{}-01", hex(&spans[3].span_id));
    assert_eq!(mock.seen()[0].headers["traceparent"], told);
    let [whole, _, pick, attempt] = &spans[..] else { panic!() };
    for (span, name, value) in [
        (whole, "gen_ai.operation.name", "chat"),
        (whole, "gen_ai.request.model", "m"),
        (whole, "gen_ai.usage.input_tokens", "12"),
        (whole, "gen_ai.usage.output_tokens", "3"),
        (whole, "http.response.status_code", "200"),
        (whole, "url.path", CHAT),
        (whole, "router.outcome", "complete"),
        (whole, "router.worker", "w0"),
        (pick, "router.worker", "w0"),
        (attempt, "server.address", "127.0.0.1"),
        (attempt, "server.port", &mock.address.port().to_string()),
    ] {
        assert_eq!(said(&span.attributes, name), value, "{name}");
    }
    assert!(said(&pick.attributes, "router.why").starts_with("prefix_aware: w0 costs"), "{pick:?}");
    assert_eq!(attempt.events.iter().map(|event| event.name.as_str()).collect::<Vec<_>>(), ["first piece"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_to_be_traced_is_not_and_engines_are_told_so() {
    let collector = collector().await;
    let mock = MockWorker::answering(&["m"], sse_reply(&[])).await;
    let router = Router::start(&[&workers(&[&mock]), &endpoint(&collector), "--otlp-traces-share=0%"]).await;
    let not_sampled = format!("00-{CALLER}-{CALLERS_SPAN}-00");
    ask(&router, Some(&not_sampled)).await;
    ask(&router, None).await;
    router.get("/v1/models").await;
    router.stopped().await;
    assert!(spans(&collector).is_empty());
    let told: Vec<_> = mock.seen().iter().map(|seen| seen.headers["traceparent"].clone()).collect();
    assert_eq!(told[0], not_sampled);
    assert!(told[1].starts_with("00-") && told[1].ends_with("-00") && told[1].len() == 55, "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_has_a_span_and_the_one_that_failed_says_why() {
    let collector = collector().await;
    let [fails, other] = pair(&["m"], vec![Act::Write(json_reply(503, "{}"))], whole(&[])).await;
    let router = Router::start(&[&workers(&[&fails, &other]), &endpoint(&collector)]).await;
    assert_eq!(ask(&router, None).await.status, 200);
    router.stopped().await;
    let spans = spans(&collector);
    assert_eq!(names(&spans), ["chat m", "read", "pick", "attempt", "pick", "attempt"]);
    assert_eq!(spans.iter().map(is_error).collect::<Vec<_>>(), [false, false, false, true, false, false]);
    assert_eq!(said(&spans[3].attributes, "http.response.status_code"), "503");
    assert_eq!(said(&spans[0].attributes, "router.attempts"), "2");
    assert!(spans.iter().all(|span| span.trace_id == spans[0].trace_id));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_gone_on_with_has_both_workers_in_its_trace() {
    let collector = collector().await;
    let first = breaks(&[opening("1"), content("1", "one ")]);
    let rest = whole(&[opening("2"), content("2", "two"), stop("2")]);
    let [one, other] = pair(&[MODEL], first, rest).await;
    let router = Router::start(&[&workers(&[&one, &other]), &endpoint(&collector)]).await;
    let body = chat(TEXT).replace("\"m\"", &format!("\"{MODEL}\""));
    let reply = router.post(CHAT, &body).await;
    assert!(reply.text().contains("two") && reply.text().contains("[DONE]"), "{}", reply.text());
    router.stopped().await;
    let spans = spans(&collector);
    assert_eq!(names(&spans), [&format!("chat {MODEL}"), "read", "pick", "attempt", "pick", "attempt"]);
    assert_eq!(spans.iter().map(is_error).collect::<Vec<_>>(), [false, false, false, true, false, false]);
    assert_eq!(said(&spans[0].attributes, "router.continued"), "1");
    let asked: Vec<_> = [&spans[3], &spans[5]].map(|span| said(&span.attributes, "router.worker")).into();
    assert_ne!(asked[0], asked[1]);
}

/// A router whose prompts are computed by the second worker.
async fn apart(protocol: &str, mocks: [&MockWorker; 2], collector: &MockWorker) -> Router {
    let prefill = workers(&[mocks[1]]).replace("--workers", "--prefill");
    let (protocol, all) = (format!("--prefill-protocol={protocol}"), workers(&[mocks[0]]));
    let endpoint = endpoint(collector);
    let arguments: [&str; 6] =
        [&all, &prefill, &protocol, &endpoint, "--policy=round_robin", "--max-retries=0"];
    let router = Router::start(&arguments).await;
    let up = "router_worker_up{worker=\"p0\"}";
    until("the other one is up", || async { router.metric(up).await > 0.0 }).await;
    router
}

#[tokio::test(flavor = "multi_thread")]
async fn both_legs_of_a_prompt_computed_elsewhere_are_told() {
    for protocol in ["vllm", "sglang"] {
        let collector = collector().await;
        let prefill = MockWorker::answering(&["m"], prefilled()).await;
        let generates = Arc::new(Notify::new());
        let waits = Arc::clone(&generates);
        let script = move |_: &Seen| {
            vec![Act::Wait(Arc::clone(&waits)), Act::Write(sse_reply(&[&content("1", "hello")]))]
        };
        let generate = MockWorker::start(&["m"], script).await;
        let router = apart(protocol, [&generate, &prefill], &collector).await;
        let (address, body) = (router.address, chat(TEXT));
        let asking = tokio::spawn(async move { exchange(address, "POST", CHAT, &[], body.as_bytes()).await });
        // The one that has computed the prompt has ended, whatever the other one does.
        until("one leg is told", || async { names(&spans(&collector)).contains(&"prefill") }).await;
        generates.notify_one();
        assert_eq!(asking.await.unwrap().status, 200);
        router.stopped().await;
        let spans = spans(&collector);
        assert_eq!(names(&spans), ["chat m", "read", "pick", "prefill", "decode"], "{protocol}");
        assert!(!spans.iter().any(is_error));
        for (mock, span) in [(&prefill, &spans[3]), (&generate, &spans[4])] {
            let told = &mock.seen()[0].headers["traceparent"];
            assert_eq!(*told, format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id)));
            assert_eq!(said(&span.attributes, "http.response.status_code"), "200");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leg_that_is_given_up_says_so() {
    let collector = collector().await;
    let prefill = MockWorker::answering(&["m"], json_reply(500, "{}")).await;
    let generate = MockWorker::start(&["m"], |_| vec![Act::TellWhenClosed(Arc::default())]).await;
    let router = apart("sglang", [&generate, &prefill], &collector).await;
    assert_eq!(ask(&router, None).await.status, 500);
    router.stopped().await;
    let spans = spans(&collector);
    assert_eq!(names(&spans), ["chat m", "read", "pick", "prefill", "decode"]);
    assert_eq!(spans.iter().map(is_error).collect::<Vec<_>>(), [true, false, false, true, true]);
    assert_eq!(said(&spans[3].attributes, "http.response.status_code"), "500");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_refused_says_why_and_nothing_of_what_its_client_wrote() {
    let collector = collector().await;
    let mock = MockWorker::answering(&["m"], sse_reply(&[])).await;
    let router = Router::start(&[&workers(&[&mock]), &endpoint(&collector)]).await;
    assert_eq!(router.post(CHAT, "{").await.status, 400);
    let unknown = chat("x").replace("\"m\"", &format!("\"{TEXT}\""));
    assert_eq!(router.post(CHAT, &unknown).await.status, 404);
    mock.kill().await;
    assert_eq!(ask(&router, None).await.status, 503);
    router.stopped().await;
    let spans = spans(&collector);
    let whole: Vec<_> = spans.iter().filter(|span| span.kind == 2).collect();
    for (span, name, kind) in
        [(whole[0], "chat", "400"), (whole[1], "chat", "404"), (whole[2], "chat m", "503")]
    {
        assert_eq!((span.name.as_str(), said(&span.attributes, "error.type").as_str()), (name, kind));
    }
    assert!(!is_error(whole[0]) && !is_error(whole[1]), "that is the clients'");
    assert!(is_error(whole[2]) && !whole[2].status.as_ref().unwrap().message.is_empty(), "{:?}", whole[2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_no_key_has_no_trace() {
    let collector = collector().await;
    let mock = MockWorker::answering(&["m"], sse_reply(&[])).await;
    let keys = std::env::temp_dir().join(format!("router-spans-keys-{}", std::process::id()));
    std::fs::write(&keys, "right\n").unwrap();
    let keys_argument = format!("--api-key-file={}", keys.display());
    let router = Router::start(&[&workers(&[&mock]), &endpoint(&collector), &keys_argument]).await;
    assert_eq!(ask(&router, Some(&format!("00-{CALLER}-{CALLERS_SPAN}-01"))).await.status, 401);
    router.stopped().await;
    std::fs::remove_file(&keys).unwrap();
    assert!(spans(&collector).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_collector_does_not_keep_is_counted() {
    let response = ExportTraceServiceResponse {
        partial_success: Some(ExportTracePartialSuccess { rejected_spans: 3, error_message: "full".into() }),
    };
    let answer = [json_reply(200, &"x".repeat(response.encoded_len())), Vec::new()].concat();
    let head = find(&answer, b"\r\n\r\n").unwrap() + 4;
    let collector = MockWorker::answering(&[], [&answer[..head], &response.encode_to_vec()].concat()).await;
    let mock = MockWorker::answering(&["m"], sse_reply(&[])).await;
    let router = Router::start(&[&workers(&[&mock]), &endpoint(&collector)]).await;
    ask(&router, None).await;
    let rejected = "router_spans_total{state=\"rejected\"}";
    until("they are rejected", || async { router.metric(rejected).await == 3.0 }).await;
    until("they are sent", || async { router.metric("router_spans_total{state=\"sent\"}").await == 4.0 })
        .await;
    router.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_away_costs_no_request() {
    let collector = collector().await;
    let endpoint = endpoint(&collector);
    collector.kill().await;
    let mock = MockWorker::answering(&["m"], sse_reply(&[])).await;
    let router = Router::start(&[&workers(&[&mock]), &endpoint]).await;
    for _ in 0..150 {
        assert_eq!(ask(&router, None).await.status, 200);
    }
    until("they cannot be sent", || async {
        router.metric("router_spans_total{state=\"failed\"}").await > 0.0
    })
    .await;
    assert_eq!(router.metric("router_spans_total{state=\"ended\"}").await, 600.0);
    assert_eq!(router.metric("router_spans_total{state=\"sent\"}").await, 0.0);
    router.stopped().await;
}
