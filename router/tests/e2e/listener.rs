//! Connections: how long they may take, how many there may be, TLS, and how they end.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use crate::harness::*;
use crate::http2;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const OK: &str = r#"{"ok":true}"#;
const CHAT: &str = "/v1/chat/completions";

async fn one_worker() -> MockWorker {
    MockWorker::answering(&["m"], json_reply(200, OK)).await
}

/// What comes until the router closes.
async fn rest(stream: &mut TcpStream) -> String {
    let mut raw = Vec::new();
    let read = tokio::time::timeout(LIMIT, stream.read_to_end(&mut raw)).await;
    read.expect("the router closes the connection").unwrap();
    String::from_utf8(raw).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_trickles_is_answered_408() {
    let worker = one_worker().await;
    let router = Router::start(&[&workers(&[&worker]), "--client-timeout=200ms"]).await;
    // The first of a connection, one after another request, and what might become HTTP/2.
    for (before, trickle) in
        [("", "POST /v1/comp"), ("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n", "GET"), ("", "PR")]
    {
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        if !before.is_empty() {
            stream.write_all(before.as_bytes()).await.unwrap();
            assert_eq!(read_reply(&mut stream).await.status, 200);
        }
        stream.write_all(trickle.as_bytes()).await.unwrap();
        let answer = rest(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert!(answer.contains("--client-timeout") && answer.contains("connection: close"), "{answer}");
    }
    assert!(worker.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed_without_a_word() {
    let worker = one_worker().await;
    let router =
        Router::start(&[&workers(&[&worker]), "--client-timeout=300ms", "--keep-alive-timeout=200ms"]).await;
    let mut fresh = TcpStream::connect(router.address).await.unwrap();
    assert_eq!(rest(&mut fresh).await, "");
    let mut used = TcpStream::connect(router.address).await.unwrap();
    used.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
    assert_eq!(read_reply(&mut used).await.status, 200);
    assert_eq!(rest(&mut used).await, "");
    until("none is counted", || async { router.metric("router_connections ").await == 0.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_take_longer_than_a_connection_may_idle() {
    let go_on = Arc::new(Notify::new());
    let wait = Arc::clone(&go_on);
    let worker = MockWorker::start(&["m"], move |_| {
        vec![Act::Wait(Arc::clone(&wait)), Act::Write(json_reply(200, OK))]
    })
    .await;
    let router =
        Router::start(&[&workers(&[&worker]), "--client-timeout=100ms", "--keep-alive-timeout=100ms"]).await;
    let mut slow = TcpStream::connect(router.address).await.unwrap();
    slow.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
    until("the worker got it", || async { !worker.seen().is_empty() }).await;
    // A connection that idles from now on is closed before; so the limits have passed.
    let mut idle = TcpStream::connect(router.address).await.unwrap();
    assert_eq!(rest(&mut idle).await, "");
    go_on.notify_one();
    assert_eq!(read_reply(&mut slow).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn expect_continue_is_answered_before_the_body_comes() {
    let worker = one_worker().await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let body = chat("x");
    let request = request_bytes("POST", CHAT, &[("expect", "100-continue")], body.as_bytes());
    let (head, body) = request.split_at(request.len() - body.len());
    stream.write_all(head).await.unwrap();
    let expected = b"HTTP/1.1 100 Continue\r\n\r\n";
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, expected);
    stream.write_all(body).await.unwrap();
    assert_eq!(read_reply(&mut stream).await.status, 200);
    assert!(!worker.seen()[0].headers.contains_key("expect"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_waits_for_the_answers_before_it() {
    let go_on = Arc::new(Notify::new());
    let wait = Arc::clone(&go_on);
    let worker = MockWorker::start(&["m"], move |_| {
        vec![Act::Wait(Arc::clone(&wait)), Act::Write(json_reply(200, OK))]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    stream.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
    until("the worker got it", || async { !worker.seen().is_empty() }).await;
    // In a read of its own, so that the router could take its end for the client's.
    stream.write_all(b"GET / HTTP/1.1\r\nbad header\r\n\r\n").await.unwrap();
    assert_eq!(router.get("/livez").await.status, 200);
    go_on.notify_one();
    let answers = rest(&mut stream).await;
    assert!(answers.starts_with("HTTP/1.1 200 "), "{answers}");
    assert!(answers.contains("HTTP/1.1 400 "), "{answers}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_client_that_leaves_cancels_what_it_asked_before() {
    let closed = Arc::new(Notify::new());
    let tell = Arc::clone(&closed);
    let worker = MockWorker::start(&["m"], move |_| vec![Act::TellWhenClosed(Arc::clone(&tell))]).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    stream.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
    until("the worker got it", || async { !worker.seen().is_empty() }).await;
    stream.write_all(b"\0\0\0\0").await.unwrap();
    drop(stream);
    tokio::time::timeout(LIMIT, closed.notified()).await.expect("the worker's connection is closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_pipelines_and_leaves_cancels_what_it_asked_first() {
    let request = request_bytes("POST", CHAT, &[], chat("x").as_bytes());
    let two = [&request[..], &request].concat();
    // What comes with the first request, and what comes while it is answered: whole requests, a part of one, none, garbage.
    let beginnings = [(&two[..], &b""[..]), (&two, &two), (&two[..two.len() - 1], b""), (&two, b"\0\0\0\0")];
    for (at_once, later) in beginnings.into_iter().chain([(&request[..], &two[..])]) {
        let closed = Arc::new(Notify::new());
        let tell = Arc::clone(&closed);
        let worker = MockWorker::start(&["m"], move |_| vec![Act::TellWhenClosed(Arc::clone(&tell))]).await;
        let router = Router::start(&[&workers(&[&worker])]).await;
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        stream.write_all(at_once).await.unwrap();
        until("the worker got it", || async { !worker.seen().is_empty() }).await;
        stream.write_all(later).await.unwrap();
        drop(stream);
        let told = tokio::time::timeout(LIMIT, closed.notified()).await;
        told.unwrap_or_else(|_| panic!("{} and {} bytes: not cancelled", at_once.len(), later.len()));
        assert_eq!(worker.seen().len(), 1, "what was asked behind it is not begun");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_during_an_answer_is_answered_after_it() {
    let go_on = Arc::new(Notify::new());
    let wait = Arc::clone(&go_on);
    let worker = MockWorker::start(&["m"], move |seen| {
        let echo = json_reply(200, &format!("{{\"bytes\":{}}}", seen.body.len()));
        vec![Act::Wait(Arc::clone(&wait)), Act::Write(echo)]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    // The third is read ahead and cut there; the fourth is longer than what is read ahead.
    let bodies: Vec<_> = ["x", "yy", "zzz", &"w".repeat(50_000)].into_iter().map(chat).collect();
    let requests: Vec<_> =
        bodies.iter().map(|body| request_bytes("POST", CHAT, &[], body.as_bytes())).collect();
    let (third, end_of_third) = requests[2].split_at(40);
    stream.write_all(&[&requests[0], &requests[1], third].concat()).await.unwrap();
    until("the worker got it", || async { !worker.seen().is_empty() }).await;
    stream.write_all(&[end_of_third, &requests[3]].concat()).await.unwrap();
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    assert_eq!(router.get("/livez").await.status, 200);
    for begun in 1..=bodies.len() {
        go_on.notify_one();
        until("it goes on", || async { worker.seen().len() > begun || begun == bodies.len() }).await;
    }
    let answers = rest(&mut stream).await;
    let lengths: Vec<_> = bodies.iter().map(|body| format!("{{\"bytes\":{}}}", body.len())).collect();
    let found: Vec<_> = lengths.iter().map(|length| answers.find(length.as_str())).collect();
    assert!(found.iter().all(Option::is_some) && found.is_sorted(), "{found:?} in {answers}");
    assert_eq!(answers.matches("HTTP/1.1 200 ").count(), bodies.len() + 1, "{answers}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_are_refused_and_counted() {
    let worker = one_worker().await;
    let router = Router::start(&[&workers(&[&worker]), "--max-connections=2"]).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        assert_eq!(read_reply(&mut stream).await.status, 200);
        held.push(stream);
    }
    assert_eq!(router.metric("router_connections ").await, 2.0);
    let mut third = TcpStream::connect(router.address).await.unwrap();
    let reply = read_reply(&mut third).await;
    assert_eq!((reply.status, reply.error().1.as_str()), (503, "too_many_connections"));
    assert_eq!(reply.header("retry-after"), "1");
    for path in ["/livez", "/readyz"] {
        assert_eq!(router.admin("GET", path, "").await.status, 200, "{path}: not by what clients take");
    }
    assert_eq!(router.metric("router_connections_refused_total").await, 1.0);
    drop(held);
    until("there is room again", || async { router.metric("router_connections ").await == 0.0 }).await;
    assert_eq!(router.get("/livez").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_when_the_listener_closes_is_served() {
    let worker = one_worker().await;
    let mut router = Router::start(&[&workers(&[&worker])]).await;
    let mut waiting = Vec::new();
    for _ in 0..50 {
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        stream.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
        waiting.push(stream);
    }
    router.stop();
    for mut stream in waiting {
        let reply = tokio::time::timeout(LIMIT, read_reply(&mut stream)).await.unwrap();
        assert_eq!(reply.status, 200);
        assert_eq!(rest(&mut stream).await, "");
    }
    router.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_during_a_drain_say_that_the_connection_closes() {
    let go_on = Arc::new(Notify::new());
    let wait = Arc::clone(&go_on);
    let worker = MockWorker::start(&["m"], move |_| {
        vec![Act::Wait(Arc::clone(&wait)), Act::Write(json_reply(200, OK))]
    })
    .await;
    let mut router = Router::start(&[&workers(&[&worker])]).await;
    let address = router.address;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
    until("the worker got it", || async { !worker.seen().is_empty() }).await;
    // One on each core. They hear of it after the connection that came before them.
    let mut idle = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        assert_eq!(read_reply(&mut stream).await.status, 200);
        idle.push(stream);
    }
    router.stop();
    for mut stream in idle {
        assert_eq!(rest(&mut stream).await, "");
    }
    go_on.notify_one();
    let reply = read_reply(&mut stream).await;
    assert_eq!((reply.status, reply.header("connection")), (200, "close"));
    router.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_connection_is_given_up_by_an_answer_during_the_drain_delay() {
    let worker = one_worker().await;
    let mut router = Router::start(&[&workers(&[&worker]), "--drain-delay=20s"]).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let request = request_bytes("POST", CHAT, &[], chat("x").as_bytes());
    stream.write_all(&request).await.unwrap();
    assert_eq!(read_reply(&mut stream).await.header("connection"), "");
    router.stop();
    until("it is not ready any more", || async { router.get("/readyz").await.status == 503 }).await;
    stream.write_all(&request).await.unwrap();
    let reply = read_reply(&mut stream).await;
    assert_eq!((reply.status, reply.header("connection")), (200, "close"));
    assert_eq!(rest(&mut stream).await, "");
}

/// A certificate for localhost, its key and where they lie.
struct Certificate {
    folder: PathBuf,
    der: CertificateDer<'static>,
}

impl Certificate {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("router-e2e-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut certificate = Self { folder, der: CertificateDer::from(Vec::new()) };
        certificate.renew();
        certificate
    }

    fn renew(&mut self) {
        let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        std::fs::write(self.folder.join("key.pem"), pair.signing_key.serialize_pem()).unwrap();
        std::fs::write(self.folder.join("cert.pem"), pair.cert.pem()).unwrap();
        self.der = pair.cert.der().clone();
    }

    fn arguments(&self) -> [String; 2] {
        let path = |name| self.folder.join(name).display().to_string();
        [format!("--tls-cert={}", path("cert.pem")), format!("--tls-key={}", path("key.pem"))]
    }

    /// A client that trusts it, and offers one protocol.
    async fn connect(&self, router: &Router, protocol: &str) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).unwrap();
        let mut config =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let stream = TcpStream::connect(router.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }
}

impl Drop for Certificate {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_carries_both_versions_and_nothing_in_the_clear() {
    let worker = one_worker().await;
    let certificate = Certificate::new("both");
    let [cert, key] = certificate.arguments();
    let router = Router::start(&[&workers(&[&worker]), &cert, &key, "--client-timeout=5s"]).await;
    let mut client = http2::over(certificate.connect(&router, "h2").await.unwrap()).await;
    let (status, headers, body) = http2::ask(&mut client, http2::request("POST", CHAT, &chat("x"))).await;
    assert_eq!((status.as_u16(), &body[..]), (200, OK.as_bytes()));
    assert_eq!(headers["x-router-worker"], "w0");
    let mut stream = certificate.connect(&router, "http/1.1").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"http/1.1".as_slice()));
    for _ in 0..2 {
        stream.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
        let mut raw = Vec::new();
        while find(&raw, OK.as_bytes()).is_none() {
            assert!(stream.read_buf(&mut raw).await.unwrap() > 0, "{raw:?}");
        }
        assert!(raw.starts_with(b"HTTP/1.1 200 "));
    }
    stream.write_all(b"GET / HTTP/1.1\r\nbad header\r\n\r\n").await.unwrap();
    let mut refusal = Vec::new();
    stream.read_to_end(&mut refusal).await.unwrap();
    assert!(refusal.starts_with(b"HTTP/1.1 400 "), "{refusal:?}");
    assert!(certificate.connect(&router, "spdy/3").await.is_err(), "no protocol in common");
    let mut clear = TcpStream::connect(router.address).await.unwrap();
    clear.write_all(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut raw = Vec::new();
    // An alert may come before the end, or a reset.
    let _ = tokio::time::timeout(LIMIT, clear.read_to_end(&mut raw)).await.expect("it is closed");
    assert!(find(&raw, b"HTTP").is_none(), "{raw:?}");
    assert_eq!(worker.seen().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_taken_up_and_a_broken_one_is_not() {
    let worker = one_worker().await;
    let mut certificate = Certificate::new("renewed");
    let [cert, key] = certificate.arguments();
    let router = Router::start(&[&workers(&[&worker]), &cert, &key]).await;
    certificate.connect(&router, "http/1.1").await.unwrap();
    let old = certificate.der.clone();
    certificate.renew();
    assert_ne!(old, certificate.der);
    until("the new one is served", || async { certificate.connect(&router, "h2").await.is_ok() }).await;
    std::fs::write(certificate.folder.join("key.pem"), "no key").unwrap();
    // Not taken, however often the files are looked at; the third one is.
    for _ in 0..50 {
        certificate.connect(&router, "h2").await.unwrap();
    }
    certificate.renew();
    until("the third one is served", || async { certificate.connect(&router, "h2").await.is_ok() }).await;
}

/// The router as a process.
struct Process {
    child: Child,
    /// What it says; kept open, since it must be able to say it.
    _said: BufReader<ChildStdout>,
    address: String,
}

impl Process {
    fn start(arguments: &[&str]) -> Self {
        Self::run(Command::new(env!("CARGO_BIN_EXE_router")), arguments)
    }

    /// Starts it with at most so many files.
    fn with_files(files: usize, arguments: &[&str]) -> Self {
        let mut shell = Command::new("sh");
        let script = format!("ulimit -n {files}; exec \"$0\" \"$@\"");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_router")]);
        Self::run(shell, arguments)
    }

    fn run(mut command: Command, arguments: &[&str]) -> Self {
        command.stderr(Stdio::null());
        Self::spawn(command, arguments)
    }

    /// Starts it with a log that nobody reads.
    fn unread(arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_router"));
        command.stderr(Stdio::piped());
        Self::spawn(command, arguments)
    }

    fn spawn(mut command: Command, arguments: &[&str]) -> Self {
        let mut child =
            command.args(["--port=0", "--threads=2"]).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        let address = line.trim().rsplit("http://").next().unwrap().to_owned();
        Self { child, _said: said, address }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    async fn get(&self, path: &str) -> Reply {
        exchange(self.address.parse().unwrap(), "GET", path, &[], b"").await
    }

    /// Waits for its end, and says how it ended.
    async fn code(mut self) -> Option<i32> {
        until("it ends", || std::future::ready(self.child.try_wait().unwrap().is_some())).await;
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended, unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_drains_and_the_process_ends_well() {
    let worker = one_worker().await;
    let process = Process::start(&[&workers(&[&worker]), "--drain-delay=0s"]);
    // Nobody's terminal is gone: this is no reason to end.
    process.signal("-HUP");
    assert_eq!(process.get("/readyz").await.status, 200);
    process.signal("-TERM");
    assert_eq!(process.code().await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_reads_stops_nothing() {
    let worker = one_worker().await;
    let mut process = Process::unread(&[&workers(&[&worker]), "--drain-delay=0s"]);
    // A pipe holds 64 KiB, and each of these is a line.
    let mut stream = TcpStream::connect(&process.address).await.unwrap();
    for _ in 0..1_000 {
        stream.write_all(&request_bytes("GET", "/nothing/here", &[], b"")).await.unwrap();
        let reply = tokio::time::timeout(LIMIT, read_reply(&mut stream)).await.expect("it still serves");
        assert_eq!(reply.status, 404);
    }
    drop(stream);
    process.signal("-TERM");
    let log = process.child.stderr.take().unwrap();
    assert_eq!(process.code().await, Some(0));
    let text = std::io::read_to_string(log).unwrap();
    assert!(text.contains("endpoint=\"unknown\""), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_outlives_the_grace_period_is_logged_as_cut_off_by_the_router() {
    let act = || vec![Act::Write(sse_head()), Act::Write(chunk("data: 1\n\n")), Act::Wait(Arc::default())];
    let worker = MockWorker::start(&["m"], move |_| act()).await;
    let flags = [&workers(&[&worker]), "--drain-delay=0s", "--grace-period=100ms"];
    let mut process = Process::unread(&flags);
    let mut client = TcpStream::connect(&process.address).await.unwrap();
    client.write_all(&request_bytes("POST", CHAT, &[], chat("x").as_bytes())).await.unwrap();
    let mut come = Vec::new();
    while find(&come, b"data: 1").is_none() {
        assert!(client.read_buf(&mut come).await.unwrap() > 0);
    }
    process.signal("-TERM");
    let log = process.child.stderr.take().unwrap();
    assert_eq!(process.code().await, Some(0));
    let text = std::io::read_to_string(log).unwrap();
    let line = text.lines().find(|line| line.contains("outcome=")).unwrap_or(&text);
    assert!(line.contains("outcome=\"cut_off\"") && line.contains("status=200"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn why_it_cannot_start_is_said() {
    let taken = bind(([127, 0, 0, 1], 0).into()).await;
    let port = format!("--port={}", taken.local_addr().unwrap().port());
    let ended = Command::new(env!("CARGO_BIN_EXE_router")).args([&port, "--workers=127.0.0.1:1"]).output();
    let ended = ended.unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!((ended.status.code(), said.contains("router: cannot listen on")), (Some(1), true), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_serves_while_balancers_notice_and_a_second_signal_ends_it_at_once() {
    let worker = one_worker().await;
    for (second, code) in [("-TERM", 143), ("-INT", 130)] {
        let process = Process::start(&[&workers(&[&worker]), "--drain-delay=1h"]);
        process.signal("-TERM");
        until("it is not ready", || async { process.get("/readyz").await.status == 503 }).await;
        let address = process.address.parse().unwrap();
        let reply = exchange(address, "POST", CHAT, &[], chat("x").as_bytes()).await;
        assert_eq!(reply.status, 200, "it still serves");
        process.signal(second);
        assert_eq!(process.code().await, Some(code));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_files_run_out_it_waits_until_some_are_free() {
    let worker = one_worker().await;
    let process = Process::with_files(60, &[&workers(&[&worker]), "--drain-delay=0s"]);
    let mut held = Vec::new();
    for _ in 0..100 {
        // Those that are not accepted wait in the listener's queue.
        held.push(TcpStream::connect(&process.address).await.unwrap());
    }
    drop(held);
    assert_eq!(process.get("/livez").await.status, 200);
    process.signal("-TERM");
    assert_eq!(process.code().await, Some(0));
}
