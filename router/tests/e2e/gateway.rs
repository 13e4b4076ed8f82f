//! Gateways that ask where requests are to go, by Envoy's external processing: what a gateway says here is what Envoy 1.40 says, message by message.

use std::collections::HashMap;

use crate::disaggregated::prefilled;
use crate::harness::*;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use roundhouse_wire::gateway as wire;
use roundhouse_wire::gateway::processing_request::Request as Said;
use roundhouse_wire::gateway::processing_response::Response as Told;
use roundhouse_wire::gateway::value::Kind;
use router::grpc_messages::{Messages, frame_into};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
const COMPLETIONS: &str = "/v1/completions";
const DESTINATION: &str = "x-gateway-destination-endpoint";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const ANSWER: &str = r#"{"ok":true}"#;

async fn start(arguments: &[&str]) -> Router {
    Router::start(&[&["--gateway-listen=127.0.0.1:0"], arguments].concat()).await
}

/// A call of a gateway, of which the test says every message.
struct Call {
    says: Option<mpsc::UnboundedSender<Bytes>>,
    answered: Option<JoinHandle<Response<Incoming>>>,
    body: Option<Incoming>,
    messages: Messages<wire::ProcessingResponse>,
    /// gRPC's status and its message, once it has ended.
    ended: Option<(String, String)>,
}

impl Call {
    async fn open(router: &Router) -> Self {
        Self::at(router, PROCESS).await
    }

    /// Of a request that has gone to its worker.
    async fn sent(router: &Router) -> Self {
        let mut call = Self::open(router).await;
        call.post(COMPLETIONS, &[], &prompt("a"));
        call.sent_to().await;
        call.body_back().await;
        call
    }

    async fn at(router: &Router, path: &str) -> Self {
        let stream = TcpStream::connect(router.gateways.unwrap()).await.unwrap();
        let (mut client, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let (says, mut said) = mpsc::unbounded_channel();
        let said = futures_util::stream::poll_fn(move |cx| said.poll_recv(cx));
        let body = StreamBody::new(said.map(|data| Ok::<_, std::convert::Infallible>(Frame::data(data))));
        let request =
            Request::post(format!("http://router{path}")).header("content-type", "application/grpc");
        // Of a gateway that traces, the call is part of its trace.
        let request = request.header("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-01"));
        let asked = client.send_request(request.body(body).unwrap());
        let answered = tokio::spawn(async move { asked.await.unwrap() });
        Self {
            says: Some(says),
            answered: Some(answered),
            body: None,
            messages: Messages::default(),
            ended: None,
        }
    }

    /// The next piece of the answers, or how they end.
    async fn frame(&mut self) -> Option<Frame<Bytes>> {
        if let Some(answered) = self.answered.take() {
            let response =
                tokio::time::timeout(LIMIT, answered).await.expect("an answer came in time").unwrap();
            assert_eq!(response.headers()["content-type"], "application/grpc");
            self.body = Some(response.into_body());
        }
        let frame = self.body.as_mut().unwrap().frame();
        Some(tokio::time::timeout(LIMIT, frame).await.expect("an answer came in time")?.unwrap())
    }

    fn send(&self, message: &impl Message) {
        let mut framed = BytesMut::new();
        frame_into(&mut framed, message);
        // A call that has been answered may be over before all is said.
        let _ = self.says.as_ref().unwrap().send(framed.freeze());
    }

    fn say(&self, said: Said) {
        self.send(&wire::ProcessingRequest { request: Some(said), ..Default::default() });
    }

    /// The first message, with what Envoy says there.
    fn begin(&self, method: &str, path: &str, headers: &[(&str, &str)], is_bodiless: bool) {
        self.begin_within(None, method, path, headers, is_bodiless);
    }

    fn begin_within(
        &self,
        subset: Option<&[&str]>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        is_bodiless: bool,
    ) {
        let pseudo = [(":method", method), (":path", path), (":authority", "gateway"), (":scheme", "http")];
        let modes = wire::BodySendMode::FullDuplexStreamed.into();
        let subset = subset.map(|places| {
            let text = |place: &&str| wire::Value { kind: Some(Kind::StringValue((*place).to_owned())) };
            let list = wire::ListValue { values: places.iter().map(text).collect() };
            let list = wire::Value { kind: Some(Kind::ListValue(list)) };
            let inner =
                wire::Struct { fields: [("x-gateway-destination-endpoint-subset".to_owned(), list)].into() };
            wire::Metadata { filter_metadata: [("envoy.lb.subset_hint".to_owned(), inner)].into() }
        });
        self.send(&wire::ProcessingRequest {
            request: Some(Said::RequestHeaders(shown(&[&pseudo, headers].concat(), is_bodiless))),
            attributes: HashMap::new(),
            metadata_context: Some(subset.unwrap_or_default()),
            protocol_config: Some(wire::ProtocolConfiguration {
                request_body_mode: modes,
                response_body_mode: modes,
            }),
        });
    }

    /// A request as Envoy tells of it where its client speaks HTTP/1: the end of the body comes apart from it.
    fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) {
        let length = body.len().to_string();
        self.begin("POST", path, &[headers, &[("content-length", length.as_str())]].concat(), false);
        for piece in body.as_bytes().chunks(32 << 10) {
            self.body(piece, false);
        }
        self.body(b"", true);
    }

    fn body(&self, piece: &[u8], end_of_stream: bool) {
        self.say(Said::RequestBody(wire::HttpBody { body: Bytes::copy_from_slice(piece), end_of_stream }));
    }

    fn answer_head(&self, headers: &[(&str, &str)]) {
        self.say(Said::ResponseHeaders(shown(headers, false)));
    }

    /// The head of the answer of the worker at that place.
    fn answer_head_of(&self, place: &str, headers: &[(&str, &str)]) {
        let place = wire::Value { kind: Some(Kind::StringValue(place.to_owned())) };
        let told = wire::Struct { fields: [("upstream.address".to_owned(), place)].into() };
        self.send(&wire::ProcessingRequest {
            request: Some(Said::ResponseHeaders(shown(headers, false))),
            attributes: [("envoy.filters.http.ext_proc".to_owned(), told)].into(),
            ..Default::default()
        });
    }

    fn answer_body(&self, piece: &str, end_of_stream: bool) {
        let body = Bytes::copy_from_slice(piece.as_bytes());
        self.say(Said::ResponseBody(wire::HttpBody { body, end_of_stream }));
    }

    /// What it is told next, with the metadata; `None` once it has ended.
    async fn told(&mut self) -> Option<wire::ProcessingResponse> {
        loop {
            if let Some(message) = self.messages.take_next().unwrap() {
                return Some(message);
            }
            let frame = self.frame().await?;
            match frame.into_data() {
                Ok(data) => self.messages.push(data),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap();
                    let text =
                        |name| trailers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
                    self.ended = Some((text("grpc-status"), text("grpc-message")));
                }
            }
        }
    }

    /// Where the request is to go, and what of its headers changes.
    async fn sent_to(&mut self) -> (String, Vec<(String, String)>, Vec<String>) {
        let told = self.told().await.unwrap();
        let Some(Told::RequestHeaders(reply)) = told.response else { panic!("{told:?}") };
        let mutation = reply.response.unwrap().header_mutation.unwrap();
        let (mut changes, removed) = (set(&mutation), mutation.remove_headers);
        let at = changes.iter().position(|(name, _)| name == DESTINATION).unwrap();
        let (_, destination) = changes.remove(at);
        let metadata = told.dynamic_metadata.unwrap();
        let Some(Kind::StructValue(inner)) = &metadata.fields["envoy.lb"].kind else {
            panic!("{metadata:?}")
        };
        assert_eq!(inner.fields[DESTINATION].kind, Some(Kind::StringValue(destination.clone())));
        (destination, changes, removed)
    }

    /// A body that is given back, to its end.
    async fn body_back(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let told = self.told().await.unwrap();
            let reply = match told.response {
                Some(Told::RequestBody(reply) | Told::ResponseBody(reply)) => reply,
                _ => panic!("{told:?}"),
            };
            let piece = reply.response.unwrap().body_mutation.unwrap().streamed_response.unwrap();
            assert!(piece.body.len() < 64 << 10);
            body.extend_from_slice(&piece.body);
            if piece.end_of_stream {
                return body;
            }
        }
    }

    /// The headers that are added to an answer.
    async fn head_back(&mut self) -> Vec<(String, String)> {
        let told = self.told().await.unwrap();
        let Some(Told::ResponseHeaders(reply)) = told.response else { panic!("{told:?}") };
        set(&reply.response.unwrap().header_mutation.unwrap())
    }

    /// What it is to answer itself.
    async fn answers(&mut self) -> (u32, String) {
        let told = self.told().await.unwrap();
        let Some(Told::ImmediateResponse(answer)) = told.response else { panic!("{told:?}") };
        let kind =
            set(&answer.headers.unwrap()).into_iter().find(|(name, _)| name == "content-type").unwrap().1;
        assert_eq!(kind, "application/json");
        (answer.status.unwrap().code, String::from_utf8(answer.body.to_vec()).unwrap())
    }

    async fn end(&mut self) -> (String, String) {
        assert!(self.told().await.is_none());
        self.ended.clone().expect("a call ends with a status")
    }
}

fn shown(headers: &[(&str, &str)], end_of_stream: bool) -> wire::HttpHeaders {
    let header = |(key, value): &(&str, &str)| wire::HeaderValue {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    wire::HttpHeaders {
        headers: Some(wire::HeaderMap { headers: headers.iter().map(header).collect() }),
        end_of_stream,
    }
}

fn set(mutation: &wire::HeaderMutation) -> Vec<(String, String)> {
    let text = |option: &wire::HeaderValueOption| {
        let header = option.header.as_ref().unwrap();
        (header.key.clone(), String::from_utf8(header.raw_value.to_vec()).unwrap())
    };
    mutation.set_headers.iter().map(text).collect()
}

fn place(worker: &MockWorker) -> String {
    worker.address.to_string()
}

fn header<'a>(headers: &'a [(String, String)], name: &str) -> &'a str {
    headers.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
}

fn prompt(text: &str) -> String {
    format!(r#"{{"model":"m","prompt":"{text}"}}"#)
}

/// A whole request: where it went, what the worker gets, and the headers that its client gets besides the worker's.
async fn pass(router: &Router, body: &str) -> (String, Vec<u8>, Vec<(String, String)>) {
    let mut call = Call::open(router).await;
    call.post(COMPLETIONS, &[], body);
    let (to, ..) = call.sent_to().await;
    let sent = call.body_back().await;
    call.answer_head(&[(":status", "200"), ("content-type", "application/json")]);
    call.answer_body(ANSWER, false);
    call.answer_body("", true);
    let head = call.head_back().await;
    assert_eq!(call.body_back().await, ANSWER.as_bytes());
    assert_eq!(call.end().await.0, "0");
    (to, sent, head)
}

async fn two() -> (MockWorker, MockWorker) {
    (MockWorker::answering(&["m"], vec![]).await, MockWorker::answering(&["m"], vec![]).await)
}

async fn nothing_in_flight(router: &Router) {
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_goes_where_it_is_cached_and_passes_as_it_came() {
    let (one, two) = two().await;
    let router = start(&[&workers(&[&one, &two])]).await;
    let body = prompt(&"The same words again. ".repeat(10_000));
    let (first, sent, head) = pass(&router, &body).await;
    assert!([place(&one), place(&two)].contains(&first));
    assert_eq!(sent, body.as_bytes(), "200 KB, in pieces");
    assert_eq!(header(&head, "x-router-hit-tokens"), "0");
    assert!(!header(&head, "x-router-worker").is_empty() && !header(&head, "x-request-id").is_empty());
    let (second, _, head) = pass(&router, &body).await;
    assert_eq!(second, first);
    assert!(header(&head, "x-router-hit-tokens").parse::<u32>().unwrap() > 10_000);
    let (other, ..) = pass(&router, &prompt(&"Something else. ".repeat(10_000))).await;
    assert_ne!(other, first);
    nothing_in_flight(&router).await;
    assert_eq!(router.metric("router_requests_total{endpoint=\"completions\",status=\"200\"}").await, 3.0);
    assert!(one.seen().is_empty() && two.seen().is_empty(), "the router itself sends nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_router_knows_the_gateway_answers() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let mut call = Call::open(&router).await;
    call.begin("GET", "/v1/models", &[], true);
    let (status, body) = call.answers().await;
    assert!(status == 200 && body.contains(r#""id":"m""#), "{body}");
    assert_eq!(call.end().await.0, "0");
    for (path, body, status, said) in [
        (COMPLETIONS, "{bad", 400, "not valid JSON"),
        (COMPLETIONS, r#"{"model":"other","prompt":""}"#, 404, "known models: m"),
        ("/elsewhere", "{}", 404, "no such endpoint"),
    ] {
        let mut call = Call::open(&router).await;
        call.post(path, &[], body);
        let (found, answer) = call.answers().await;
        assert!(found == status && answer.contains(said), "{found} {answer}");
        assert_eq!(call.end().await.0, "0");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_passes_piece_by_piece_and_ends_with_trailers_where_it_does() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let mut call = Call::open(&router).await;
    call.begin("POST", COMPLETIONS, &[], false);
    call.body(prompt("a").as_bytes(), false);
    call.say(Said::RequestTrailers(wire::HttpTrailers::default()));
    assert_eq!(call.sent_to().await.0, place(&worker));
    let told = call.told().await.unwrap();
    let Some(Told::RequestBody(reply)) = told.response else { panic!("{told:?}") };
    let piece = reply.response.unwrap().body_mutation.unwrap().streamed_response.unwrap();
    assert!(!piece.end_of_stream && piece.body == prompt("a"), "the trailers end it");
    assert!(matches!(call.told().await.unwrap().response, Some(Told::RequestTrailers(_))));
    call.answer_head(&[(":status", "200"), ("content-type", "text/event-stream")]);
    for event in ["data: one\n\n", "data: two\n\n"] {
        call.answer_body(event, false);
        if event.contains("one") {
            call.head_back().await;
        }
        let told = call.told().await.unwrap();
        let Some(Told::ResponseBody(reply)) = told.response else { panic!("{told:?}") };
        let piece = reply.response.unwrap().body_mutation.unwrap().streamed_response.unwrap();
        assert!(!piece.end_of_stream && piece.body == event);
    }
    call.say(Said::ResponseTrailers(wire::HttpTrailers::default()));
    assert!(matches!(call.told().await.unwrap().response, Some(Told::ResponseTrailers(_))));
    assert_eq!(call.end().await.0, "0");
    nothing_in_flight(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_checked_here_and_workers_are_shown_theirs() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let folder = std::env::temp_dir().join(format!("gateway-keys-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (clients, worker_keys) = (folder.join("clients"), folder.join("workers"));
    std::fs::write(&clients, "client-key").unwrap();
    std::fs::write(&worker_keys, "worker-key").unwrap();
    let router = start(&[
        &workers(&[&worker]),
        &format!("--api-key-file={}", clients.display()),
        &format!("--worker-api-key-file={}", worker_keys.display()),
    ])
    .await;
    let mut call = Call::open(&router).await;
    call.post(COMPLETIONS, &[("authorization", "Bearer wrong")], &prompt("a"));
    assert_eq!(call.answers().await.0, 401);
    let mut call = Call::open(&router).await;
    call.post(
        COMPLETIONS,
        &[("authorization", "Bearer client-key"), (DESTINATION, "10.0.0.1:1")],
        &prompt("a"),
    );
    let (to, changes, removed) = call.sent_to().await;
    assert_eq!(to, place(&worker), "whatever the client wants");
    assert_eq!(header(&changes, "authorization"), "Bearer worker-key");
    assert!(removed.is_empty(), "{removed:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_fails_at_a_gateway_is_one_that_fails() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let mut call = Call::sent(&router).await;
    // What Envoy itself answers where it finds nobody.
    call.answer_head(&[(":status", "503"), ("content-type", "text/plain")]);
    call.answer_body("upstream connect error", true);
    call.head_back().await;
    assert_eq!(call.body_back().await, b"upstream connect error");
    call.end().await;
    nothing_in_flight(&router).await;
    assert_eq!(router.metric("router_worker_attempts_total{outcome=\"5xx\"").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateways_trace_is_gone_on_with_where_its_client_has_none() {
    let (collector, mock) = two().await;
    let endpoint = format!("--otlp-traces-endpoint=http://{}", collector.address);
    let clients = "00-11111111111111111111111111111111-2222222222222222-01";
    for (headers, trace) in [(&[][..], TRACE), (&[("traceparent", clients)], &clients[3..35])] {
        let router = start(&[&workers(&[&mock]), &endpoint]).await;
        let mut call = Call::open(&router).await;
        call.post(COMPLETIONS, headers, &prompt("a"));
        let (_, set, _) = call.sent_to().await;
        let told = header(&set, "traceparent");
        assert!(told.starts_with(&format!("00-{trace}-")) && told.ends_with("-01"), "{told}");
        assert_ne!(told, clients);
    }
    let router = start(&[&workers(&[&mock])]).await;
    let mut call = Call::open(&router).await;
    call.post(COMPLETIONS, &[], &prompt("a"));
    let (_, set, _) = call.sent_to().await;
    assert!(!set.iter().any(|(name, _)| name == "traceparent"), "{set:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_leaves_takes_its_request_along() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let cancelled = "router_worker_attempts_total{outcome=\"cancelled\"";
    // In the body, before the answer, and within it; the last one says that it has no more to say.
    for (at, cancels) in [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)] {
        let mut call = Call::open(&router).await;
        call.begin("POST", COMPLETIONS, &[], false);
        if at > 0 {
            call.body(prompt("a").as_bytes(), true);
            call.sent_to().await;
            call.body_back().await;
        }
        if at > 1 {
            call.answer_head(&[(":status", "200"), ("content-type", "text/event-stream")]);
            call.answer_body("data: one\n\n", false);
            call.head_back().await;
        }
        if at == 3 {
            call.says.take();
            call.told().await;
            assert_eq!(call.end().await.0, "0");
        }
        drop(call);
        nothing_in_flight(&router).await;
        until("it is noticed", || async { router.metric(cancelled).await == cancels }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_those_that_the_gateway_reaches_are_picked() {
    let (one, two) = two().await;
    let router = start(&[&workers(&[&one, &two])]).await;
    for _ in 0..4 {
        let mut call = Call::open(&router).await;
        let only = place(&two);
        call.begin_within(Some(&["10.0.0.1:1", &only]), "POST", COMPLETIONS, &[], false);
        call.body(prompt("a").as_bytes(), true);
        assert_eq!(call.sent_to().await.0, only);
    }
    for subset in [&[][..], &["10.0.0.1:1"]] {
        let mut call = Call::open(&router).await;
        call.begin_within(Some(subset), "POST", COMPLETIONS, &[], false);
        call.body(prompt("a").as_bytes(), true);
        assert_eq!(call.answers().await.0, 503);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_such_protocol_is_told_what_would_be() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let headers = || Said::RequestHeaders(shown(&[(":method", "POST"), (":path", COMPLETIONS)], false));
    let modes = |request_body_mode, response_body_mode| wire::ProcessingRequest {
        request: Some(headers()),
        protocol_config: Some(wire::ProtocolConfiguration { request_body_mode, response_body_mode }),
        ..Default::default()
    };
    let body = Said::RequestBody(wire::HttpBody::default());
    let only = |said| wire::ProcessingRequest { request: Some(said), ..Default::default() };
    for (message, said) in [
        (modes(2, 4), "request_body_mode: FULL_DUPLEX_STREAMED"),
        (modes(4, 0), "response_body_mode: FULL_DUPLEX_STREAMED"),
        (only(body), "before what should be before it"),
        (wire::ProcessingRequest::default(), "not known here"),
    ] {
        let mut call = Call::open(&router).await;
        call.send(&message);
        let (status, message) = call.end().await;
        assert!(status == "3" && message.contains(said), "{status} {message}");
    }
    let mut call = Call::open(&router).await;
    call.says.as_ref().unwrap().send(Bytes::from_static(b"\0\0\0\0\x02\xff\xff")).unwrap();
    assert_eq!(call.end().await.0, "3");
    // It has answered by itself, what it was not to be told.
    let mut call = Call::open(&router).await;
    call.begin("POST", COMPLETIONS, &[], false);
    call.answer_head(&[(":status", "408")]);
    assert_eq!(call.end().await.0, "0");
    let (status, message) = Call::at(&router, "/other.Service/Call").await.end().await;
    assert!(status == "12" && message.contains("ExternalProcessor/Process"), "{status} {message}");
    nothing_in_flight(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_asks_whether_the_router_is_well() {
    let router = start(&["--workers=127.0.0.1:9", "--probe-interval-down=20ms"]).await;
    let status = async |service: &str| {
        let mut call = Call::at(&router, "/grpc.health.v1.Health/Check").await;
        call.send(&wire::HealthCheckRequest { service: service.to_owned() });
        call.says.take();
        let mut message = Vec::new();
        while let Some(frame) = call.frame().await {
            if let Ok(data) = frame.into_data() {
                message.extend_from_slice(&data[5..]);
            }
        }
        wire::HealthCheckResponse::decode(&message[..]).unwrap().status
    };
    assert_eq!(status("liveness").await, 1);
    assert_eq!(status("").await, 2, "there is no worker");
    let worker = MockWorker::answering(&["m"], vec![]).await;
    router.admin("POST", "/workers", &format!(r#"{{"url":"http://{}"}}"#, place(&worker))).await;
    until("it is ready", || async { status("envoy.service.ext_proc.v3.ExternalProcessor").await == 1 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_another_computes_goes_there_by_the_router() {
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    let generate = MockWorker::answering(&["m"], vec![]).await;
    let prefill_list = workers(&[&prefill]).replace("--workers", "--prefill");
    let router = start(&[&workers(&[&generate]), &prefill_list, "--policy=round_robin"]).await;
    until("both are up", || async { router.metric("router_worker_up{worker=\"p0\"}").await == 1.0 }).await;
    let (to, sent, head) = pass(&router, &prompt("a")).await;
    assert_eq!(to, place(&generate));
    assert!(
        sent.starts_with(br#"{"kv_transfer_params":{"remote_block_ids": [[3, 5]]"#),
        "{}",
        String::from_utf8_lossy(&sent)
    );
    assert_eq!(header(&head, "x-router-prefill-worker"), "p0");
    assert_eq!(prefill.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_prefill_worker_refuses_the_gateway_answers() {
    let prefill = MockWorker::answering(&["m"], json_reply(400, r#"{"error":"too long"}"#)).await;
    let generate = MockWorker::answering(&["m"], vec![]).await;
    let prefill_list = workers(&[&prefill]).replace("--workers", "--prefill");
    let router = start(&[&workers(&[&generate]), &prefill_list, "--policy=round_robin"]).await;
    until("both are up", || async { router.metric("router_worker_up{worker=\"p0\"}").await == 1.0 }).await;
    let mut call = Call::open(&router).await;
    call.post(COMPLETIONS, &[], &prompt("a"));
    assert_eq!(call.answers().await, (400, r#"{"error":"too long"}"#.to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_is_told_by_its_header() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&format!("{}?dp=2", workers(&[&worker])), "--policy=round_robin"]).await;
    let mut ranks = Vec::new();
    for _ in 0..2 {
        let mut call = Call::open(&router).await;
        call.post(COMPLETIONS, &[], &prompt("a"));
        let (to, changes, _) = call.sent_to().await;
        assert_eq!(to, place(&worker));
        ranks.push(header(&changes, "x-data-parallel-rank").to_owned());
    }
    ranks.sort();
    assert_eq!(ranks, ["0", "1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_goes_on_to_another_worker_is_believed() {
    let (one, two) = two().await;
    let three = MockWorker::answering(&["other"], vec![]).await;
    let router = start(&[&workers(&[&one, &two, &three]), "--gateway-fallbacks=5"]).await;
    until("all are up", || async { router.metric("router_worker_up{worker=\"w2\"}").await == 1.0 }).await;
    let mut call = Call::open(&router).await;
    call.post(COMPLETIONS, &[], &prompt(&"Some words. ".repeat(1_000)));
    let (to, ..) = call.sent_to().await;
    let (first, second) = to.split_once(',').unwrap();
    let mut places = [first, second];
    places.sort_unstable();
    let mut both = [place(&one), place(&two)];
    both.sort();
    assert_eq!(places, [&both[0], &both[1]], "nobody who does not serve the model");
    call.body_back().await;
    call.answer_head_of(second, &[(":status", "200"), ("content-type", "application/json")]);
    call.answer_body(ANSWER, true);
    let head = call.head_back().await;
    let went_to = if second == place(&one) { "w0" } else { "w1" };
    assert_eq!(header(&head, "x-router-worker"), went_to);
    assert_eq!(call.body_back().await, ANSWER.as_bytes());
    call.end().await;
    nothing_in_flight(&router).await;
    let passed_over = if went_to == "w0" { "w1" } else { "w0" };
    for (outcome, worker) in [("2xx", went_to), ("failed", passed_over)] {
        let name = format!("router_worker_attempts_total{{outcome=\"{outcome}\",worker=\"{worker}\"}}");
        assert_eq!(router.metric(&name).await, 1.0, "{name}");
    }
    // Its prompt is known to be there, and not where it was to be.
    let (to, ..) = pass(&router, &prompt(&"Some words. ".repeat(1_000))).await;
    assert!(to.starts_with(second), "{to}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_while_a_request_waits_in_the_queue_is_read_when_it_has_a_place() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker]), "--max-in-flight=1", "--max-queue=5"]).await;
    let mut first = Call::open(&router).await;
    first.post(COMPLETIONS, &[], &prompt("a"));
    first.sent_to().await;
    let mut second = Call::open(&router).await;
    second.post(COMPLETIONS, &[], &prompt("b"));
    until("it waits", || async { router.metric("router_requests_queued").await == 1.0 }).await;
    drop(first);
    assert_eq!(second.sent_to().await.0, place(&worker));
    assert_eq!(second.body_back().await, prompt("b").as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn pieces_that_come_at_once_pass_at_once_also_where_an_event_is_cut() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let mut call = Call::sent(&router).await;
    call.answer_head(&[(":status", "200"), ("content-type", "text/event-stream")]);
    let pieces = ["data: one\n\n", "data: tw", "o\n\n", ""];
    let mut together = BytesMut::new();
    for (at, piece) in pieces.iter().enumerate() {
        let body = wire::HttpBody { body: Bytes::from_static(piece.as_bytes()), end_of_stream: at == 3 };
        let said = wire::ProcessingRequest { request: Some(Said::ResponseBody(body)), ..Default::default() };
        frame_into(&mut together, &said);
    }
    call.says.take().unwrap().send(together.freeze()).unwrap();
    call.head_back().await;
    assert_eq!(call.body_back().await, pieces.concat().as_bytes(), "though it has no more to say");
    assert_eq!(call.end().await.0, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_empty_end_as_they_began() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let path = "/v1/embeddings";
    // The end of the body in a message of its own, with and without a length.
    for headers in [&[][..], &[("content-length", "0")]] {
        let mut call = Call::open(&router).await;
        call.begin("POST", path, headers, false);
        call.body(b"", true);
        call.sent_to().await;
        assert_eq!(call.body_back().await, b"");
    }
    // As trailers.
    let mut call = Call::open(&router).await;
    call.begin("POST", path, &[], false);
    call.say(Said::RequestTrailers(wire::HttpTrailers::default()));
    call.sent_to().await;
    assert!(matches!(call.told().await.unwrap().response, Some(Told::RequestBody(_))));
    assert!(matches!(call.told().await.unwrap().response, Some(Told::RequestTrailers(_))));
    drop(call);
    // No body, and an answer without one.
    let mut call = Call::open(&router).await;
    call.begin("POST", path, &[], true);
    call.sent_to().await;
    call.say(Said::ResponseHeaders(shown(&[(":status", "204")], true)));
    call.head_back().await;
    assert_eq!(call.end().await.0, "0");
    nothing_in_flight(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_odd_path_is_the_clients_fault() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker])]).await;
    let mut call = Call::open(&router).await;
    call.begin("POST", "/v1/\u{7f}", &[], false);
    let (status, body) = call.answers().await;
    assert!(status == 400 && body.contains("a path that is none"), "{status} {body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_a_worker_that_cannot_be_picked_any_more_passes() {
    let (one, two) = two().await;
    let router = start(&[&workers(&[&one, &two]), "--gateway-fallbacks=1"]).await;
    until("both are up", || async { router.metric("router_worker_up{worker=\"w1\"}").await == 1.0 }).await;
    let elsewhere = "10.0.0.1:1".to_owned();
    for goes_on_to_offered in [true, false] {
        let mut call = Call::open(&router).await;
        call.post(COMPLETIONS, &[], &prompt("a"));
        let (to, ..) = call.sent_to().await;
        let second = to.split_once(',').unwrap().1.to_owned();
        call.body_back().await;
        let id = if second == place(&one) { "w0" } else { "w1" };
        if goes_on_to_offered {
            router.admin("POST", &format!("/workers/{id}/drain"), "").await;
        }
        let served = if goes_on_to_offered { &second } else { &elsewhere };
        call.answer_head_of(served, &[(":status", "200"), ("content-type", "application/json")]);
        call.answer_body(ANSWER, true);
        let head = call.head_back().await;
        let is_the_pickeds = header(&head, "x-router-worker") != id;
        assert_eq!(is_the_pickeds, !goes_on_to_offered);
        assert_eq!(call.body_back().await, ANSWER.as_bytes());
        assert_eq!(call.end().await.0, "0");
        router.admin("POST", &format!("/workers/{id}/undrain"), "").await;
    }
    nothing_in_flight(&router).await;
    let failed = "router_worker_attempts_total{outcome=\"failed\"";
    let metrics = router.admin("GET", "/metrics", "").await.text();
    let failed = metrics.lines().filter(|line| line.starts_with(failed) && !line.ends_with(" 0"));
    assert_eq!(failed.count(), 1, "nobody fails for an address that is nobody's");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_in_which_nothing_is_said_has_an_end() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker]), "--client-timeout=50ms"]).await;
    assert_eq!(Call::open(&router).await.end().await.0, "1");
}

#[test]
fn what_gateways_cannot_send_to_is_refused_at_once() {
    let errors = |arguments: &[&str]| {
        let all: Vec<_> =
            ["--gateway-listen=127.0.0.1:0"].iter().chain(arguments).map(|text| (*text).to_owned()).collect();
        router::config::Cli::configure(&all, None).err().map(|errors| errors.0.concat()).unwrap_or_default()
    };
    assert!(errors(&["--workers=grpc://a:1"]).contains("gateways send to workers that speak HTTP"));
    assert!(errors(&["--workers=a:1", "--gateway-fallbacks=1000"]).contains("at most 16"));
    assert_eq!(errors(&["--workers=a:1"]), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_gateway_asks_for_keeps_its_name() {
    let worker = MockWorker::answering(&["m"], vec![]).await;
    let router = start(&[&workers(&[&worker]), "--model-aliases=gpt m"]).await;
    let mut call = Call::open(&router).await;
    call.post(COMPLETIONS, &[], r#"{"model": "gpt", "prompt": "a"}"#);
    let (status, said) = call.answers().await;
    assert!(status == 404 && said.contains("gpt"), "{status} {said}");
}
