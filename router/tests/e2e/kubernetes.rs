//! A Kubernetes API over TLS, as much of it as the router asks, in which the test makes everything happen.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::harness::{bind, json_reply, read_request};
use crate::upstream_h2::tls;

/// The token that the API knows at first.
pub(crate) const TOKEN: &str = "the-first-token";

/// What the API holds, and how it behaves.
struct Shelf {
    /// Slices by name, each with its Service.
    slices: Vec<(String, String, Value)>,
    version: u64,
    /// Of each change its version, its Service and its line.
    log: Vec<(u64, String, Vec<u8>)>,
    /// Watches from before this version are refused.
    oldest: u64,
    token: String,
    /// Paths and tokens that were asked with.
    asked: Vec<(String, String)>,
    /// How often watches were to end by now, and how.
    end: (u64, End),
}

/// How watches end.
#[derive(Clone)]
pub(crate) enum End {
    /// Well, as they do after a time.
    Clean,
    /// After these bytes, and without an end.
    Cut(Vec<u8>),
}

/// A running API; dropping it ends it and its connections.
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    pub(crate) credentials: PathBuf,
    shelf: Arc<Mutex<Shelf>>,
    changed: watch::Sender<()>,
    acceptor: TlsAcceptor,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Drop for Api {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.credentials);
    }
}

/// A slice with one port named `http`, and these endpoints.
pub(crate) fn slice(port: u16, endpoints: &[Value]) -> Value {
    json!({"addressType": "IPv4", "ports": [{"name": "http", "port": port, "protocol": "TCP"}], "endpoints": endpoints})
}

/// An endpoint of a pod.
pub(crate) fn pod(name: &str, address: &str, conditions: &Value) -> Value {
    let target = json!({"kind": "Pod", "name": name, "uid": format!("uid-of-{name}")});
    json!({"addresses": [address], "conditions": conditions, "targetRef": target})
}

/// A slice with one pod that is ready.
pub(crate) fn slice_of(name: &str, address: SocketAddr) -> Value {
    let conditions = json!({"ready": true, "serving": true, "terminating": false});
    slice(address.port(), &[pod(name, &address.ip().to_string(), &conditions)])
}

impl Api {
    /// An API without slices, and credentials for it.
    pub(crate) async fn start() -> Self {
        let (authority, acceptor) = tls(&["h2", "http/1.1"]);
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await;
        let address = listener.local_addr().unwrap();
        let credentials =
            std::env::temp_dir().join(format!("router-kubernetes-{}-{}", std::process::id(), address.port()));
        std::fs::create_dir_all(&credentials).unwrap();
        std::fs::write(credentials.join("ca.crt"), authority).unwrap();
        std::fs::write(credentials.join("namespace"), "ml").unwrap();
        std::fs::write(credentials.join("token"), TOKEN).unwrap();
        let shelf = Shelf {
            slices: Vec::new(),
            version: 1,
            log: Vec::new(),
            oldest: 0,
            token: TOKEN.to_owned(),
            asked: Vec::new(),
            end: (0, End::Clean),
        };
        let (shelf, changed) = (Arc::new(Mutex::new(shelf)), watch::Sender::new(()));
        let mut api = Self { address, credentials, shelf, changed, acceptor, task: None };
        api.serve(listener);
        api
    }

    fn serve(&mut self, listener: TcpListener) {
        let (acceptor, shelf, changed) =
            (self.acceptor.clone(), Arc::clone(&self.shelf), self.changed.clone());
        self.task = Some(tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, shelf) = (acceptor.clone(), Arc::clone(&shelf));
                let changed = changed.subscribe();
                connections.spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        answer(stream, shelf, changed).await;
                    }
                });
            }
        }));
    }

    /// Ends it, with all of its connections.
    pub(crate) fn stop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }

    /// Starts it again where it was.
    pub(crate) async fn start_again(&mut self) {
        let listener = bind(self.address).await;
        self.serve(listener);
    }

    /// The flags by which a router finds it.
    pub(crate) fn flags(&self) -> [String; 2] {
        [
            format!("--kubernetes-api=https://{}", self.address),
            format!("--kubernetes-credentials={}", self.credentials.display()),
        ]
    }

    fn change(&self, change: impl FnOnce(&mut Shelf)) {
        change(&mut self.shelf.lock().unwrap());
        self.changed.send_replace(());
    }

    /// Puts a slice of a Service there, in place of one of that name.
    pub(crate) fn put(&self, service: &str, name: &str, slice: Value) {
        self.change(|shelf| {
            let known = shelf.slices.iter().any(|(known, ..)| known == name);
            shelf.slices.retain(|(known, ..)| known != name);
            let slice = shelf.note(if known { "MODIFIED" } else { "ADDED" }, (service, name), slice);
            shelf.slices.push((name.to_owned(), service.to_owned(), slice));
        });
    }

    /// Takes a slice of a Service away.
    pub(crate) fn take(&self, service: &str, name: &str) {
        self.change(|shelf| {
            let at = shelf.slices.iter().position(|(known, ..)| known == name).unwrap();
            let (_, _, slice) = shelf.slices.remove(at);
            shelf.note("DELETED", (service, name), slice);
        });
    }

    /// Puts a line into watches of a Service, whatever it says.
    pub(crate) fn say(&self, service: &str, line: &str) {
        self.change(|shelf| {
            shelf.version += 1;
            let line = format!("{line}\n").into_bytes();
            shelf.log.push((shelf.version, service.to_owned(), line));
        });
    }

    /// The same, and forgets that it has happened: a list alone tells of it. Watches that are running hear that their version is too old, or
    /// end so.
    pub(crate) fn put_unseen(&self, (service, name): (&str, &str), slice: Value, end: Option<End>) {
        self.change(|shelf| {
            let slice = shelf.note("ADDED", (service, name), slice);
            shelf.slices.push((name.to_owned(), service.to_owned(), slice));
            shelf.log.clear();
            shelf.oldest = shelf.version;
            if let Some(end) = end {
                shelf.end = (shelf.end.0 + 1, end);
            }
        });
    }

    /// Ends all watches that are running.
    pub(crate) fn end_watches(&self, end: End) {
        self.change(|shelf| shelf.end = (shelf.end.0 + 1, end));
    }

    /// Says in watches of a Service that nothing has changed.
    pub(crate) fn bookmark(&self, service: &str) {
        let version = self.shelf.lock().unwrap().version + 1;
        let object = json!({"kind": "EndpointSlice", "metadata": {"resourceVersion": version.to_string()}});
        self.say(service, &json!({"type": "BOOKMARK", "object": object}).to_string());
    }

    /// From now on this token counts.
    pub(crate) fn expect_token(&self, token: &str) {
        self.change(|shelf| shelf.token = token.to_owned());
    }

    /// Paths that were asked for, and with which token.
    pub(crate) fn asked(&self) -> Vec<(String, String)> {
        self.shelf.lock().unwrap().asked.clone()
    }

    /// How many lists, and how many watches, were asked for.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let asked = self.asked();
        let watches = asked.iter().filter(|(path, _)| path.contains("watch=true")).count();
        (asked.len() - watches, watches)
    }
}

impl Shelf {
    fn note(&mut self, kind: &str, (service, name): (&str, &str), mut slice: Value) -> Value {
        self.version += 1;
        slice["metadata"] = json!({"name": name, "resourceVersion": self.version.to_string(),
            "labels": {"kubernetes.io/service-name": service}});
        let line = format!("{}\n", json!({"type": kind, "object": slice})).into_bytes();
        self.log.push((self.version, service.to_owned(), line));
        slice
    }

    fn list(&self, service: &str) -> String {
        let of = self.slices.iter().filter(|(_, known, _)| known == service).map(|(_, _, slice)| slice);
        let items: Vec<_> = of.collect();
        json!({"kind": "EndpointSliceList", "metadata": {"resourceVersion": self.version.to_string()}, "items": items})
            .to_string()
    }
}

fn query<'a>(path: &'a str, key: &str) -> Option<&'a str> {
    let (_, query) = path.split_once('?')?;
    query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
}

fn status(code: u16, message: &str) -> Vec<u8> {
    json_reply(code, &json!({"kind": "Status", "code": code, "message": message}).to_string())
}

/// Answers one request, which is all that comes on a connection.
async fn answer(
    mut stream: tokio_rustls::server::TlsStream<tokio::net::TcpStream>,
    shelf: Arc<Mutex<Shelf>>,
    mut changed: watch::Receiver<()>,
) {
    let Some(request) = read_request(&mut stream, &mut Vec::new()).await else { return };
    let token = request.headers.get("authorization").cloned().unwrap_or_default();
    let token = token.trim_start_matches("Bearer ").to_owned();
    let whole = {
        let mut shelf = shelf.lock().unwrap();
        shelf.asked.push((request.path.clone(), token.clone()));
        let service = query(&request.path, "labelSelector").and_then(|selector| selector.split("%3D").nth(1));
        let service = service.unwrap_or_default().to_owned();
        let from: Option<u64> =
            query(&request.path, "resourceVersion").map(|version| version.parse().unwrap());
        let is_there = request.path.starts_with("/apis/discovery.k8s.io/v1/namespaces/ml/endpointslices?");
        let is_watch = query(&request.path, "watch") == Some("true");
        if token != shelf.token {
            Err(status(401, "Unauthorized"))
        } else if !is_there || request.method != "GET" {
            Err(status(403, "endpointslices is forbidden"))
        } else if !is_watch {
            Err(json_reply(200, &shelf.list(&service)))
        } else if from.unwrap() < shelf.oldest {
            Err(status(410, "too old resource version"))
        } else {
            let asks = ["allowWatchBookmarks", "timeoutSeconds"].map(|key| query(&request.path, key));
            assert!(asks[0] == Some("true") && asks[1].is_some(), "{}", request.path);
            Ok((service, from.unwrap(), shelf.end.0))
        }
    };
    let (service, mut at, ended) = match whole {
        Ok(watch) => watch,
        Err(reply) => {
            let _ = stream.write_all(&reply).await;
            let _ = stream.shutdown().await;
            return;
        }
    };
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    if stream.write_all(head).await.is_err() {
        return;
    }
    loop {
        changed.mark_unchanged();
        let (mut lines, end) = {
            let shelf = shelf.lock().unwrap();
            let since = shelf.log.iter().filter(|(version, of, _)| *version > at && *of == service);
            let lines: Vec<_> = since.map(|(_, _, line)| line.clone()).collect();
            let is_old = at < shelf.oldest;
            at = shelf.version.max(at);
            let gone =
                json!({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}});
            let end = match &shelf.end {
                (times, end) if *times > ended => Some((Vec::new(), end.clone())),
                _ if is_old => Some((format!("{gone}\n").into_bytes(), End::Clean)),
                _ => None,
            };
            (lines.concat(), end)
        };
        if let Some((last, _)) = &end {
            lines.extend_from_slice(last);
        }
        if let Some((_, End::Cut(half))) = &end {
            lines.extend_from_slice(half);
        }
        // A line comes in several pieces, as it may.
        for piece in lines.chunks(50) {
            let chunk = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
            if stream.write_all(&chunk).await.is_err() {
                return;
            }
        }
        let _ = stream.flush().await;
        match end {
            None => {}
            Some((_, End::Clean)) => {
                let _ = stream.write_all(b"0\r\n\r\n").await;
                let _ = stream.shutdown().await;
                return;
            }
            Some((_, End::Cut(_))) => return,
        }
        if changed.changed().await.is_err() {
            return;
        }
    }
}
