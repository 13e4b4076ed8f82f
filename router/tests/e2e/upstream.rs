//! HTTP/1 connections to workers: when they are used again, and when they must not be. The workers are raw sockets.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::uri::PathAndQuery;
use http::{Method, Response};
use http_body_util::BodyExt;
use router::keys::WorkerKeys;
use router::transport::{Connector, HttpTransport, Transport, TransportError, UpstreamBody, WorkerRequest};
use router_core::{WorkerId, WorkerSpec};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::harness::*;

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// One connection as a worker holds it.
struct Wire {
    stream: TcpStream,
    raw: Vec<u8>,
    /// Which one of the connections that have carried a POST.
    number: Option<usize>,
    posts: Arc<Mutex<Vec<usize>>>,
    numbers: Arc<AtomicUsize>,
}

impl Wire {
    /// The next POST; answers probes by itself. `None` when the router has closed.
    async fn post(&mut self) -> Option<Seen> {
        loop {
            let request = read_request(&mut self.stream, &mut self.raw).await?;
            if request.method == "GET" {
                self.stream.write_all(&probe_answer(&request.path, &["m"])).await.ok()?;
                continue;
            }
            let number = *self.number.get_or_insert_with(|| self.numbers.fetch_add(1, Ordering::Relaxed));
            self.posts.lock().unwrap().push(number);
            return Some(request);
        }
    }

    async fn write(&mut self, bytes: &[u8]) {
        // The router may have gone already.
        let _ = self.stream.write_all(bytes).await;
    }

    async fn closed(&mut self) {
        while self.stream.read_buf(&mut self.raw).await.is_ok_and(|count| count > 0) {}
    }
}

/// A worker whose connections each run a script.
struct RawWorker {
    address: SocketAddr,
    /// Which connection each POST came over.
    posts: Arc<Mutex<Vec<usize>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for RawWorker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RawWorker {
    async fn start<F: Future<Output = ()> + Send + 'static>(
        script: impl Fn(Wire) -> F + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (posts, numbers) = (Arc::<Mutex<Vec<usize>>>::default(), Arc::<AtomicUsize>::default());
        let seen = Arc::clone(&posts);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (posts, numbers) = (Arc::clone(&seen), Arc::clone(&numbers));
                connections.spawn(script(Wire { stream, raw: Vec::new(), number: None, posts, numbers }));
            }
        });
        Self { address, posts, task }
    }

    /// Answers the first POST of each connection with `first` and all others as one should.
    async fn odd_at_first(first: &'static [u8]) -> Self {
        Self::start(move |mut wire| async move {
            let mut reply = first;
            while wire.post().await.is_some() {
                wire.write(reply).await;
                reply = OK;
            }
        })
        .await
    }

    /// Answers every POST with `reply`.
    async fn answering(reply: Vec<u8>) -> Self {
        Self::start(move |mut wire| {
            let reply = reply.clone();
            async move {
                while wire.post().await.is_some() {
                    wire.write(&reply).await;
                }
            }
        })
        .await
    }

    fn posts(&self) -> Vec<usize> {
        self.posts.lock().unwrap().clone()
    }

    async fn router(&self) -> Router {
        Router::start(&[&format!("--workers={}", self.address)]).await
    }

    fn transport(&self) -> HttpTransport {
        transport(&format!("http://{}", self.address), Vec::new())
    }
}

/// A client that keeps its connection, so that all its requests are served by one thread.
struct Client(TcpStream);

impl Client {
    async fn of(router: &Router) -> Self {
        Self(TcpStream::connect(router.address).await.unwrap())
    }

    async fn post(&mut self) -> Reply {
        let request = request_bytes("POST", "/v1/chat/completions", &[], chat("x").as_bytes());
        self.0.write_all(&request).await.unwrap();
        tokio::time::timeout(LIMIT, read_reply(&mut self.0)).await.expect("the reply came in time")
    }
}

/// A way to `address` that trusts `authorities`.
pub(crate) fn transport(address: &str, authorities: Vec<CertificateDer<'static>>) -> HttpTransport {
    let connector = Connector::new(Duration::from_secs(5), authorities, WorkerKeys::default());
    connector.transport(&WorkerSpec::new(WorkerId::new("w0"), address.to_owned())).unwrap()
}

pub(crate) fn post(body: &str) -> WorkerRequest {
    let mut request = WorkerRequest::get(PathAndQuery::from_static("/v1/completions"));
    request.method = Method::POST;
    request.body = bytes::Bytes::from(body.to_owned()).into();
    request
}

pub(crate) async fn text(response: Response<UpstreamBody>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_used_again() {
    for informational in ["", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"] {
        let reply = [informational.as_bytes(), OK].concat();
        let worker = RawWorker::answering(reply).await;
        let router = worker.router().await;
        let mut client = Client::of(&router).await;
        for _ in 0..5 {
            let reply = client.post().await;
            assert_eq!((reply.status, reply.text().as_str()), (200, "ok"));
        }
        assert_eq!(worker.posts(), [0; 5]);
        let busy = "router_worker_connections{state=\"busy\",worker=\"w0\"}";
        let idle = "router_worker_connections{state=\"idle\",worker=\"w0\"}";
        assert_eq!(router.metric(busy).await, 0.0);
        assert!(router.metric(idle).await >= 1.0);
    }
}

/// After such a reply the connection is not used again, and the next request gets its own answer.
async fn is_not_used_again(what: &str, reply: &'static [u8], body: &str) {
    let worker = RawWorker::odd_at_first(reply).await;
    let router = worker.router().await;
    let mut client = Client::of(&router).await;
    let first = client.post().await;
    assert_eq!((first.status, first.text().as_str()), (200, body), "{what}");
    assert!(first.whole, "{what}");
    let second = client.post().await;
    assert_eq!(second.status, 200, "{what}");
    assert_eq!(worker.posts(), [0, 1], "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_not_clean_is_not_used_again() {
    let closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbye";
    is_not_used_again("connection: close", closing, "bye").await;
    let keep_alive_undone =
        b"HTTP/1.1 200 OK\r\nconnection: close\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\nbye";
    is_not_used_again("close, then keep-alive", keep_alive_undone, "bye").await;
    let old = b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nold";
    is_not_used_again("HTTP/1.0", old, "old").await;
    let too_long = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nlong-winded";
    is_not_used_again("more than content-length", too_long, "lon").await;
    let two =
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nOneHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil";
    is_not_used_again("two answers", two, "One").await;
    let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil";
    is_not_used_again("two answers, chunked", chunked, "abc").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_ends_with_its_connection_is_whole() {
    for head in ["HTTP/1.0 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n"] {
        let worker = RawWorker::start(move |mut wire| async move {
            if wire.post().await.is_some() {
                wire.write(head.as_bytes()).await;
                wire.write(b"to the end").await;
            }
        })
        .await;
        let router = worker.router().await;
        let mut client = Client::of(&router).await;
        for _ in 0..2 {
            let reply = client.post().await;
            assert_eq!((reply.status, reply.text().as_str()), (200, "to the end"));
            assert!(reply.whole);
        }
        assert_eq!(worker.posts(), [0, 1]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_could_be_read_in_two_ways_are_refused() {
    let long_header =
        format!("HTTP/1.1 200 OK\r\nx-long: {}\r\ncontent-length: 0\r\n\r\n", "x".repeat(100_000));
    let many_headers = format!("HTTP/1.1 200 OK\r\n{}content-length: 0\r\n\r\n", "x-many: 1\r\n".repeat(200));
    for (reply, expected) in [
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
            "both transfer-encoding and content-length",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "both transfer-encoding and content-length",
        ),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "other than chunked"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, identity\r\n\r\nbody", "other than chunked"),
        ("HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "broke"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "broke"),
        ("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "broke"),
        ("HTTP/1.1 200 OK\r\nfolded: a\r\n b\r\ncontent-length: 0\r\n\r\n", "broke"),
        ("HTTP/1.1 200 OK\r\nspaced : a\r\ncontent-length: 0\r\n\r\n", "broke"),
        (
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            "switches protocols",
        ),
        ("no HTTP at all\r\n\r\n", "broke"),
        (&long_header, "broke"),
        (&many_headers, "broke"),
    ] {
        let worker = RawWorker::answering(reply.as_bytes().to_vec()).await;
        let router = worker.router().await;
        let mut client = Client::of(&router).await;
        let told = client.post().await;
        assert_eq!(told.status, 502, "{reply:.100}");
        let (message, code) = told.error();
        assert_eq!((told.status, code.as_str()), (502, "worker_failed"), "{reply:.100}");
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_comes_before_the_request_is_out_is_relayed() {
    const EARLY: &[u8] =
        b"HTTP/1.1 413 Payload Too Large\r\ncontent-length: 9\r\nconnection: close\r\n\r\ntoo large";
    for round in 0..10 {
        let worker = RawWorker::start(move |mut wire| async move {
            // Reads the beginning of a POST, answers, and closes in the middle of the rest.
            loop {
                let head = find(&wire.raw, b"\r\n\r\n");
                match head {
                    Some(end) if wire.raw.starts_with(b"GET") => {
                        wire.write(&probe_answer("/v1/models", &["m"])).await;
                        wire.raw.drain(..end + 4);
                    }
                    Some(_) => break,
                    None => {
                        if wire.stream.read_buf(&mut wire.raw).await.unwrap_or(0) == 0 {
                            return;
                        }
                    }
                }
            }
            wire.write(EARLY).await;
            if round % 2 == 0 {
                // Stays, without reading on.
                std::future::pending::<()>().await;
            }
        })
        .await;
        let router = worker.router().await;
        let body = chat(&"x".repeat(50 << 20));
        let reply = router.post("/v1/chat/completions", &body).await;
        assert_eq!((reply.status, reply.text().as_str()), (413, "too large"), "round {round}");
        let open = "router_worker_connections{state=\"busy\",worker=\"w0\"}";
        until("the connection is closed", || async { router.metric(open).await == 0.0 }).await;
    }
}

/// Answers the first POST of each connection; reads another, and closes.
async fn worker_with_stale_connections() -> RawWorker {
    RawWorker::start(|mut wire| async move {
        if wire.post().await.is_some() {
            wire.write(OK).await;
            wire.post().await;
        }
    })
    .await
}

#[tokio::test]
async fn what_was_lost_with_an_idle_connection_is_sent_again_on_a_new_one() {
    let stale = worker_with_stale_connections().await;
    let transport = stale.transport();
    for _ in 0..3 {
        assert_eq!(text(transport.send(&post("{}")).await.unwrap()).await, "ok");
    }
    assert_eq!(stale.posts(), [0, 0, 1, 1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_with_one_replica_survives_its_connections_going_stale() {
    let stale = worker_with_stale_connections().await;
    let router = stale.router().await;
    let mut client = Client::of(&router).await;
    for _ in 0..3 {
        let reply = client.post().await;
        assert_eq!((reply.status, reply.text().as_str()), (200, "ok"));
    }
    assert_eq!(stale.posts(), [0, 0, 1, 1, 2]);
    assert_eq!(router.metric("router_worker_breaker{worker=\"w0\"}").await, 0.0);
    assert_eq!(router.metric("router_retries_total").await, 0.0);
}

/// Sends a POST, whose answer will be its text.
fn sent(transport: &Arc<HttpTransport>) -> tokio::task::JoinHandle<String> {
    let transport = Arc::clone(transport);
    tokio::spawn(async move { text(transport.send(&post("{}")).await.unwrap()).await })
}

/// Sends two, each on a connection of its own.
async fn two_in_flight(
    worker: &RawWorker,
    transport: &Arc<HttpTransport>,
) -> [tokio::task::JoinHandle<String>; 2] {
    let one = sent(transport);
    until("one is in flight", || async { worker.posts().len() == 1 }).await;
    let two = sent(transport);
    until("two are in flight", || async { worker.posts().len() == 2 }).await;
    [one, two]
}

#[tokio::test]
async fn connections_that_have_been_idle_for_longer_than_a_stale_one_go_with_it() {
    let go: [Arc<Notify>; 2] = Default::default();
    let waits = go.clone();
    // Of the first two connections each answers one POST when told to; reads another, and closes.
    let worker = RawWorker::start(move |mut wire| {
        let waits = waits.clone();
        async move {
            while wire.post().await.is_some() {
                match wire.number.and_then(|number| waits.get(number)) {
                    Some(wait) => {
                        wait.notified().await;
                        wire.write(OK).await;
                        wire.post().await;
                        return;
                    }
                    None => wire.write(OK).await,
                }
            }
        }
    })
    .await;
    let transport = Arc::new(worker.transport());
    let [one, two] = two_in_flight(&worker, &transport).await;
    for (notify, sent) in go.iter().zip([one, two]) {
        notify.notify_one();
        assert_eq!(sent.await.unwrap(), "ok");
    }
    assert_eq!(transport.connections().idle, 2);
    assert_eq!(sent(&transport).await.unwrap(), "ok");
    assert_eq!(worker.posts(), [0, 1, 1, 2]);
    assert_eq!(transport.connections().idle, 1, "the new one; the other was as old");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_otherwise_is_not_stale() {
    let dies = RawWorker::start(|mut wire| async move {
        wire.post().await;
    })
    .await;
    let error = dies.transport().send(&post("{}")).await.err().unwrap();
    assert!(matches!(error, TransportError::Broken(_)), "a fresh connection is not stale: {error}");
    assert_eq!(dies.posts(), [0]);

    let cuts_its_head = RawWorker::start(|mut wire| async move {
        if wire.post().await.is_some() {
            wire.write(OK).await;
            wire.post().await;
            wire.write(b"HTTP/1.1 200 O").await;
        }
    })
    .await;
    let transport = cuts_its_head.transport();
    text(transport.send(&post("{}")).await.unwrap()).await;
    let error = transport.send(&post("{}")).await.err().unwrap();
    assert!(matches!(error, TransportError::Broken(_)), "an answer had begun: {error}");
    assert_eq!(cuts_its_head.posts(), [0, 0]);
}

#[tokio::test]
async fn a_worker_that_dies_with_a_request_on_an_idle_connection_may_have_died_of_it() {
    // Nobody listens any more when the second request is read.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let dying = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut raw = Vec::new();
        read_request(&mut stream, &mut raw).await.unwrap();
        stream.write_all(OK).await.unwrap();
        read_request(&mut stream, &mut raw).await.unwrap();
        drop(listener);
    });
    let transport = transport(&format!("http://{address}"), Vec::new());
    assert_eq!(text(transport.send(&post("{}")).await.unwrap()).await, "ok");
    let error = transport.send(&post("{}")).await.err().unwrap();
    assert!(matches!(error, TransportError::Broken(_)), "not that there was no connection: {error}");
    dying.await.unwrap();
}

#[tokio::test]
async fn a_connection_found_closed_or_poisoned_is_replaced() {
    for poison in [&b""[..], b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"] {
        let gone = Arc::new(Notify::new());
        let tell = Arc::clone(&gone);
        let worker = RawWorker::start(move |mut wire| {
            let tell = Arc::clone(&tell);
            async move {
                if wire.post().await.is_some() {
                    wire.write(OK).await;
                    // Only once the answer has been taken.
                    tell.notified().await;
                    wire.write(poison).await;
                    drop(wire);
                    tell.notify_one();
                }
            }
        })
        .await;
        let transport = worker.transport();
        assert_eq!(text(transport.send(&post("{}")).await.unwrap()).await, "ok");
        gone.notify_one();
        tokio::task::yield_now().await;
        until("the worker has closed", || async {
            // Each turn of the timer is one of the reactor, which learns of what has come.
            Arc::strong_count(&gone) == 2
        })
        .await;
        assert_eq!(text(transport.send(&post("{}")).await.unwrap()).await, "ok");
        assert_eq!(worker.posts(), [0, 1]);
    }
}

/// Answers each POST when told to, by number of its connection.
async fn worker_that_waits(go: [Arc<Notify>; 2], closed: [Arc<Notify>; 2]) -> RawWorker {
    RawWorker::start(move |mut wire| {
        let (go, closed) = (go.clone(), closed.clone());
        async move {
            while wire.post().await.is_some() {
                let number = wire.number.unwrap();
                if number < 2 {
                    tokio::select! {
                        () = go[number].notified() => wire.write(OK).await,
                        () = wire.closed() => closed[number].notify_one(),
                    }
                }
            }
        }
    })
    .await
}

#[tokio::test]
async fn the_connection_used_last_comes_first_and_a_cancelled_one_goes_alone() {
    let go: [Arc<Notify>; 2] = Default::default();
    let closed: [Arc<Notify>; 2] = Default::default();
    let worker = worker_that_waits(go.clone(), closed.clone()).await;
    let transport = Arc::new(worker.transport());
    let [one, two] = two_in_flight(&worker, &transport).await;
    assert_eq!(transport.connections().busy, 2);
    go[1].notify_one();
    two.await.unwrap();
    go[0].notify_one();
    one.await.unwrap();
    assert_eq!((transport.connections().idle, transport.connections().busy), (2, 0));

    let third = sent(&transport);
    until("the third is in flight", || async { worker.posts().len() == 3 }).await;
    let fourth = sent(&transport);
    until("the fourth is in flight", || async { worker.posts().len() == 4 }).await;
    assert_eq!(worker.posts()[2..], [0, 1], "the one used last comes first");
    third.abort();
    tokio::time::timeout(LIMIT, closed[0].notified()).await.expect("its connection was closed");
    go[1].notify_one();
    assert_eq!(fourth.await.unwrap(), "ok", "the other was left alone");
    assert_eq!((transport.connections().idle, transport.connections().busy), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_are_closed_when_their_worker_leaves() {
    let open = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&open);
    let worker = RawWorker::start(move |mut wire| {
        let open = Arc::clone(&counted);
        async move {
            open.fetch_add(1, Ordering::SeqCst);
            while wire.post().await.is_some() {
                wire.write(OK).await;
            }
            open.fetch_sub(1, Ordering::SeqCst);
        }
    })
    .await;
    let router = worker.router().await;
    // As many clients as threads, and more.
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = Client::of(&router).await;
        assert_eq!(client.post().await.status, 200);
        clients.push(client);
    }
    assert!(open.load(Ordering::SeqCst) >= 2);
    assert_eq!(router.admin("DELETE", "/workers/w0", "").await.status, 200);
    until("every connection is closed", || async { open.load(Ordering::SeqCst) == 0 }).await;
}

#[tokio::test]
async fn an_idle_connection_is_given_up_after_a_while() {
    let worker = RawWorker::answering(OK.to_vec()).await;
    let transport = worker.transport();
    text(transport.send(&post("{}")).await.unwrap()).await;
    assert_eq!(transport.connections().idle, 1);
    until("it is closed", || async { transport.connections().idle == 0 }).await;
    // A sweeper starts again with the next one.
    text(transport.send(&post("{}")).await.unwrap()).await;
    until("that is closed, too", || async { transport.connections().idle == 0 }).await;
    assert_eq!(worker.posts(), [0, 1]);
}

#[tokio::test]
async fn a_long_answer_and_a_long_request_pass_at_once() {
    // An engine that echoes while it reads: both directions move, and neither waits for the other.
    const BYTES: usize = 20 << 20;
    let worker = RawWorker::start(|mut wire| async move {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {BYTES}\r\n\r\n");
        let (mut from, mut to) = wire.stream.split();
        let mut raw = Vec::new();
        let end = loop {
            match find(&raw, b"\r\n\r\n") {
                Some(end) => break end + 4,
                None => drop(from.read_buf(&mut raw).await.unwrap()),
            }
        };
        to.write_all(head.as_bytes()).await.unwrap();
        to.write_all(&raw[end..]).await.unwrap();
        tokio::io::copy(&mut from, &mut to).await.unwrap();
    })
    .await;
    let transport = worker.transport();
    let body: String = "0123456789abcdef".chars().cycle().take(BYTES).collect();
    let request = post(&body);
    let answer = tokio::time::timeout(LIMIT, async { text(transport.send(&request).await.unwrap()).await });
    assert!(answer.await.expect("nothing waits for ever") == body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_sets_out_once_there_is_a_way() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // Accepts in the background, as any listener does, and says nothing.
    for (scheme, sets_out) in [("https", false), ("http", true)] {
        let transport = transport(&format!("{scheme}://{address}"), Vec::new());
        let underway = Arc::new(AtomicBool::new(false));
        let request = WorkerRequest { underway: Some(Arc::clone(&underway)), ..post("{}") };
        let sent = transport.send(&request);
        tokio::pin!(sent);
        let (mut stream, _) = tokio::select! {
            _ = &mut sent => panic!("nobody answers"),
            accepted = listener.accept() => accepted.unwrap(),
        };
        // With the first byte, the handshake's or the request's, it is clear which of them the router waits with.
        tokio::select! {
            _ = &mut sent => panic!("nobody answers"),
            first = stream.read_u8() => assert!(first.is_ok()),
        }
        assert_eq!(underway.load(Ordering::Relaxed), sets_out, "{scheme}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_asked_how_much_their_caches_hold() {
    let blocks = MockWorker::answering(&["tells-blocks"], json_reply(200, "{}")).await;
    let tokens = MockWorker::answering(&["tells-tokens"], json_reply(200, "{}")).await;
    let nothing = MockWorker::answering(&["tells-nothing"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&blocks, &tokens, &nothing])]).await;
    let told = async || {
        let workers = router.admin("GET", "/workers", "").await.json()["workers"].clone();
        workers
            .as_array()
            .unwrap()
            .iter()
            .map(|worker| worker["kv_capacity_tokens"].as_u64())
            .collect::<Vec<_>>()
    };
    until("they have told", || async { told().await == [Some(8_000), Some(9_000), None] }).await;
}
