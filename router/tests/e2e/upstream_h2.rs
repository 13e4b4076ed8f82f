//! Workers over HTTP/2 and TLS. The workers are hyper's servers, or bare streams where one must misbehave.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Version};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use router::transport::{HttpTransport, Transport, TransportError, read_certificates};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use crate::harness::*;
use crate::upstream::{post, text};

/// A request as the worker saw it.
#[derive(Clone, Debug)]
struct Seen {
    connection: usize,
    version: Version,
    authority: Option<String>,
    headers: HeaderMap,
    body: Bytes,
}

type Pieces = mpsc::Receiver<Bytes>;

/// What a worker does: answers a POST with pieces as they come.
#[derive(Clone)]
pub(crate) struct Engine {
    seen: Arc<Mutex<Vec<Seen>>>,
    connections: Arc<AtomicUsize>,
    pieces: Arc<dyn Fn(usize) -> Pieces + Send + Sync>,
    max_streams: Option<u32>,
    shut_down: Arc<Notify>,
    tls: Option<TlsAcceptor>,
}

/// One piece.
fn whole(text: &'static str) -> Pieces {
    let (send, pieces) = mpsc::channel(1);
    send.try_send(Bytes::from_static(text.as_bytes())).unwrap();
    pieces
}

fn ok(_: usize) -> Pieces {
    whole("ok")
}

impl Engine {
    fn new(pieces: impl Fn(usize) -> Pieces + Send + Sync + 'static) -> Self {
        Self {
            seen: Arc::default(),
            connections: Arc::default(),
            pieces: Arc::new(pieces),
            max_streams: None,
            shut_down: Arc::default(),
            tls: None,
        }
    }

    /// Answers every POST with `text`.
    pub(crate) fn answering(text: &'static str) -> Self {
        Self::new(move |_| whole(text))
    }

    pub(crate) async fn start(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let engine = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(engine.clone().connection(stream));
            }
        });
        address
    }

    async fn connection(self, stream: TcpStream) {
        let Some(tls) = &self.tls else { return self.http2(stream).await };
        // A client that does not trust us leaves here.
        let Ok(stream) = tls.accept(stream).await else { return };
        if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
            return self.http2(stream).await;
        }
        let number = self.connections.fetch_add(1, Ordering::SeqCst);
        let service = service_fn(|request| self.clone().answer(number, request));
        let _ =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
    }

    async fn http2(
        &self,
        stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    ) {
        let number = self.connections.fetch_add(1, Ordering::SeqCst);
        let engine = self.clone();
        let service = service_fn(move |request| engine.clone().answer(number, request));
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .max_concurrent_streams(self.max_streams)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = self.shut_down.notified() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }

    async fn answer(
        self,
        connection: usize,
        request: Request<Incoming>,
    ) -> Result<
        Response<http_body_util::combinators::UnsyncBoxBody<Bytes, std::convert::Infallible>>,
        hyper::Error,
    > {
        if request.method() == http::Method::GET {
            let list = r#"{"object":"list","data":[{"id":"m"}]}"#;
            return Ok(Response::new(http_body_util::Full::from(list).boxed_unsync()));
        }
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let authority = head.uri.authority().map(ToString::to_string);
        let number = {
            let mut seen = self.seen.lock().unwrap();
            seen.push(Seen { connection, version: head.version, authority, headers: head.headers, body });
            seen.len() - 1
        };
        let mut pieces = (self.pieces)(number);
        let stream = futures_util::stream::poll_fn(move |cx| {
            pieces.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
        });
        Ok(Response::new(StreamBody::new(stream).boxed_unsync()))
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

fn transport(address: &str) -> HttpTransport {
    crate::upstream::transport(address, Vec::new())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_over_http2_and_share_a_connection() {
    let engine = Engine::new(ok);
    let address = engine.start().await;
    let router = Router::start(&[&format!("--workers=h2c://{address}")]).await;
    let headers = [
        ("connection", "keep-alive, x-hop"),
        ("te", "trailers"),
        ("x-hop", "dropped"),
        ("x-custom", "kept"),
        ("authorization", "Bearer secret"),
    ];
    let exchanges = (0..64).map(|n| {
        let (to, body) = (router.address, chat(&format!("number {n}")));
        async move {
            let reply = exchange(to, "POST", "/v1/chat/completions?a=b", &headers, body.as_bytes()).await;
            assert_eq!((reply.status, reply.text().as_str()), (200, "ok"));
            assert!(reply.whole);
        }
    });
    futures_util::future::join_all(exchanges).await;
    let seen = engine.seen();
    assert_eq!(seen.len(), 64);
    for request in &seen {
        assert_eq!(request.version, Version::HTTP_2);
        assert_eq!(request.authority.as_deref(), Some(address.to_string().as_str()));
        assert_eq!(request.headers["x-custom"], "kept");
        assert_eq!(request.headers["authorization"], "Bearer secret");
        for gone in ["connection", "te", "host", "x-hop", "transfer-encoding"] {
            assert!(!request.headers.contains_key(gone), "{gone}");
        }
        assert!(request.body.starts_with(b"{\"model\":\"m\""));
    }
    // Two threads that serve, and the one that probes.
    assert!(engine.connections.load(Ordering::SeqCst) <= 3);
    assert!(router.metric("router_worker_connections{state=\"idle\",worker=\"w0\"}").await >= 1.0);
}

#[tokio::test]
async fn a_cancelled_stream_leaves_the_others_alone() {
    let senders: Arc<Mutex<Vec<mpsc::Sender<Bytes>>>> = Arc::default();
    let kept = Arc::clone(&senders);
    let engine = Engine::new(move |_| {
        let (send, pieces) = mpsc::channel(1);
        kept.lock().unwrap().push(send);
        pieces
    });
    let transport = transport(&format!("h2c://{}", engine.start().await));
    let one = transport.send(&post("1")).await.unwrap();
    let two = transport.send(&post("2")).await.unwrap();
    assert_eq!((transport.connections().busy, transport.connections().idle), (1, 0));
    let (first, second) = {
        let senders = senders.lock().unwrap();
        (senders[0].clone(), senders[1].clone())
    };
    drop(one);
    tokio::time::timeout(LIMIT, first.closed()).await.expect("the worker learns of it");
    second.send(Bytes::from_static(b"still here")).await.unwrap();
    senders.lock().unwrap().clear();
    drop(second);
    assert_eq!(text(two).await, "still here");

    // Before its answer has begun.
    let waits = tokio::time::timeout(Duration::from_millis(1), transport.send(&post("3"))).await;
    drop(waits);
    assert_eq!(engine.connections.load(Ordering::SeqCst), 1);
    assert_eq!((transport.connections().busy, transport.connections().idle), (0, 1));
}

#[tokio::test]
async fn a_full_connection_gets_a_neighbour() {
    let (hold, held) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Notify::new()));
    let kept = Arc::clone(&hold);
    let mut engine = Engine::new(move |_| {
        let (send, pieces) = mpsc::channel(1);
        kept.lock().unwrap().push(send);
        pieces
    });
    engine.max_streams = Some(2);
    let transport = transport(&format!("h2c://{}", engine.start().await));
    let mut answers = Vec::new();
    for n in 0..6 {
        answers.push(transport.send(&post(&n.to_string())).await.unwrap());
    }
    let by_connection: Vec<_> = engine.seen().iter().map(|seen| seen.connection).collect();
    assert_eq!(by_connection, [0, 0, 1, 1, 2, 2]);
    assert_eq!(transport.connections().busy, 3);
    hold.lock().unwrap().clear();
    for answer in answers {
        assert_eq!(text(answer).await, "");
    }
    drop(held);
}

#[tokio::test]
async fn a_worker_that_says_goodbye_is_connected_to_again() {
    let engine = Engine::new(ok);
    let transport = transport(&format!("h2c://{}", engine.start().await));
    for _ in 0..3 {
        assert_eq!(text(transport.send(&post("{}")).await.unwrap()).await, "ok");
        engine.shut_down.notify_one();
    }
    let connections: Vec<_> = engine.seen().iter().map(|seen| seen.connection).collect();
    // The goodbye may come after the next request was sent, which is then answered where it is.
    assert!(connections.is_sorted() && connections.len() == 3, "{connections:?}");
    until("the goodbye has come", || async { transport.connections().idle == 0 }).await;
    assert_eq!(text(transport.send(&post("{}")).await.unwrap()).await, "ok");
}

/// Refuses every stream of the first `refusing` connections, and answers those of later ones.
async fn worker_that_refuses(refusing: usize, reason: h2::Reason) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, asked) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        for number in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            let count = Arc::clone(&count);
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    count.fetch_add(1, Ordering::SeqCst);
                    if number < refusing {
                        respond.send_reset(reason);
                    } else {
                        let mut body = respond.send_response(Response::new(()), false).unwrap();
                        body.send_data(Bytes::from_static(b"ok"), true).unwrap();
                    }
                }
            });
        }
    });
    (address, asked)
}

#[tokio::test]
async fn a_refused_stream_is_sent_again_and_a_broken_one_is_not() {
    let (address, asked) = worker_that_refuses(1, h2::Reason::REFUSED_STREAM).await;
    let way = transport(&format!("h2c://{address}"));
    assert_eq!(text(way.send(&post("{}")).await.unwrap()).await, "ok");
    assert_eq!(asked.load(Ordering::SeqCst), 2);

    let (address, asked) = worker_that_refuses(usize::MAX, h2::Reason::REFUSED_STREAM).await;
    let error = transport(&format!("h2c://{address}")).send(&post("{}")).await.err().unwrap();
    assert!(matches!(error, TransportError::Refused(_)), "{error}");
    assert_eq!(asked.load(Ordering::SeqCst), 3, "there is an end to it");

    let (address, asked) = worker_that_refuses(1, h2::Reason::INTERNAL_ERROR).await;
    let error = transport(&format!("h2c://{address}")).send(&post("{}")).await.err().unwrap();
    assert!(matches!(error, TransportError::Broken(_)), "it may have been processed: {error}");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// An authority, as PEM, and a server that shows a certificate of it for 127.0.0.1.
pub(crate) fn tls(alpn: &[&str]) -> (String, TlsAcceptor) {
    let mut of_authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
    // Two authorities of one name would be told apart by their signatures only.
    let name = format!("authority {}", rand::random::<u64>());
    of_authority.distinguished_name.push(rcgen::DnType::CommonName, name);
    of_authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let pem = of_authority.self_signed(&authority_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(of_authority, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let of_worker = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = of_worker.signed_by(&key, &issuer).unwrap();
    let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let mut config = tokio_rustls::rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], private)
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    (pem, TlsAcceptor::from(Arc::new(config)))
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_speaks_what_was_agreed_upon() {
    for (alpn, expected) in [
        (&["h2", "http/1.1"][..], Version::HTTP_2),
        (&["http/1.1"], Version::HTTP_11),
        (&[], Version::HTTP_11),
    ] {
        let (authority, acceptor) = tls(alpn);
        let mut engine = Engine::new(ok);
        engine.tls = Some(acceptor);
        let address = engine.start().await;
        let file =
            std::env::temp_dir().join(format!("router-ca-{}-{}.pem", std::process::id(), address.port()));
        std::fs::write(&file, authority).unwrap();
        let ca = format!("--worker-ca={}", file.display());
        let router = Router::start(&[&format!("--workers=https://{address}"), &ca]).await;
        std::fs::remove_file(&file).unwrap();
        for n in 0..5 {
            let body = chat(&"long ".repeat(n * 50_000));
            let reply = router.post("/v1/chat/completions", &body).await;
            assert_eq!((reply.status, reply.text().as_str()), (200, "ok"), "{alpn:?}");
            assert_eq!(engine.seen()[n].body, body.as_bytes());
        }
        assert!(engine.seen().iter().all(|seen| seen.version == expected), "{alpn:?}");
        assert!(engine.connections.load(Ordering::SeqCst) <= 3, "connections are used again");
    }
}

#[tokio::test]
async fn a_worker_that_nobody_vouches_for_is_told_by_name() {
    let (_, acceptor) = tls(&["h2"]);
    let (another_authority, _) = tls(&["h2"]);
    let mut engine = Engine::new(ok);
    engine.tls = Some(acceptor);
    let address = format!("https://{}", engine.start().await);
    let trusted = read_certificates(another_authority.as_bytes()).unwrap();
    let error = crate::upstream::transport(&address, trusted).send(&post("{}")).await.err().unwrap();
    assert!(error.is_unreachable());
    let message = error.to_string();
    assert!(message.contains(&address) && message.contains("UnknownIssuer"), "{message}");

    // And one that does not speak TLS at all.
    let plain = Engine::new(ok).start().await;
    let error = transport(&format!("https://{plain}")).send(&post("{}")).await.err().unwrap();
    assert!(matches!(error, TransportError::Tls { .. }), "{error}");
}

#[test]
fn a_file_without_certificates_is_a_config_error() {
    for (text, expected) in [("", "no certificate"), ("-----BEGIN CERTIFICATE-----\nAAAA\n", "PEM")] {
        let error = read_certificates(text.as_bytes()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let missing = ["--workers=a".to_owned(), "--worker-ca=/no/such/file".to_owned()];
    let errors = router::config::Cli::configure(&missing, None).unwrap_err().0;
    assert!(errors.len() == 1 && errors[0].contains("worker-ca: /no/such/file"), "{errors:?}");
}
