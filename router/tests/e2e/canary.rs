//! What nobody may read in a log or a metric: prompts, answers, keys, sessions. Everything that could carry one carries a
//! canary, and the real program, as talkative as it can be, must not sing.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;

use crate::harness::*;
use crate::keys::TestFile;
use crate::kubernetes::{Api, End};
use crate::upstream_h2::Engine;

/// In all that is secret, and in nothing else.
const CANARY: &str = "canary";

/// The program, and all that it says.
struct Program {
    child: Child,
    clients: SocketAddr,
    admin: SocketAddr,
    said: [JoinHandle<String>; 2],
}

/// Ends the program if the test fails before it does.
impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    fn start(arguments: &[String]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_router"))
            .args(["--port=0", "--threads=2"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = child.stderr.take().unwrap();
        let logged = std::thread::spawn(move || {
            let mut text = String::new();
            log.read_to_string(&mut text).unwrap();
            text
        });
        let (tell, told) = mpsc::channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let printed = std::thread::spawn(move || {
            let mut text = String::new();
            for line in lines.map(Result::unwrap) {
                for (mark, at) in [(" on http://", 0), ("admin    http://", 1)] {
                    if let Some((_, rest)) = line.split_once(mark) {
                        let address: SocketAddr = rest.split('/').next().unwrap().parse().unwrap();
                        // Nobody listens once both are known.
                        let _ = tell.send((at, address));
                    }
                }
                text = text + &line + "\n";
            }
            text
        });
        let mut addresses = [None; 2];
        while addresses.contains(&None) {
            let (at, address) = told.recv_timeout(LIMIT).expect("the program says where it listens");
            addresses[at] = Some(address);
        }
        let [clients, admin] = addresses.map(Option::unwrap);
        Self { child, clients, admin, said: [logged, printed] }
    }

    /// Stops it as an operator does; returns the log and all else that it said.
    fn stop(mut self) -> [String; 2] {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
        let silent = || std::thread::spawn(String::new);
        let said = std::mem::replace(&mut self.said, [silent(), silent()]);
        said.map(|said| said.join().unwrap())
    }
}

/// Workers that answer, fail and break off, each with a canary in what it says.
async fn workers() -> (Vec<MockWorker>, String) {
    let secret =
        r#"{"choices":[{"text":"canary answer"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;
    let breaks = || {
        let half = chunk("data: {\"text\":\"canary piece\"}\n\n");
        vec![Act::Write(sse_head()), Act::Write(half), Act::Close]
    };
    let garbage = b"canary: this is no HTTP\r\n\r\n".to_vec();
    let mocks = vec![
        MockWorker::answering(&["good"], json_reply(200, secret)).await,
        MockWorker::answering(&["failing"], json_reply(500, r#"{"error":{"message":"canary failed"}}"#))
            .await,
        MockWorker::answering(&["busy"], json_reply(429, r#"{"error":{"message":"canary busy"}}"#)).await,
        MockWorker::start(&["breaking"], move |_| breaks()).await,
        MockWorker::start(&["closing"], |_| vec![Act::Close]).await,
        MockWorker::answering(&["garbage"], garbage).await,
    ];
    let mut list: Vec<_> = mocks.iter().map(|mock| mock.address.to_string()).collect();
    list.push(format!("h2c://{}", Engine::answering("canary answer").start().await));
    (mocks, format!("--workers={}", list.join(",")))
}

async fn sing(program: &Program, mocks: &[MockWorker]) {
    let to = program.clients;
    let headers = [
        ("authorization", "Bearer canary-client-key"),
        ("x-session-id", "canary-session"),
        ("x-custom", "canary-header"),
        ("cookie", "canary=1"),
    ];
    let body = |model: &str| {
        serde_json::json!({
            "model": model, "user": "canary-user", "cache_salt": "canary-salt", "stream": true,
            "messages": [{"role": "user", "content": "canary prompt ".repeat(100)}],
        })
        .to_string()
    };
    for (model, status, expected) in [
        ("good", 200, "canary answer"),
        // Of the worker that speaks HTTP/2.
        ("m", 200, "canary answer"),
        ("failing", 500, "canary failed"),
        ("busy", 429, "canary busy"),
        ("breaking", 200, "canary piece"),
        ("closing", 502, ""),
        ("garbage", 502, ""),
        ("canary-model", 404, "canary-model"),
    ] {
        for _ in 0..3 {
            let path = "/v1/chat/completions?canary=query";
            let reply = exchange(to, "POST", path, &headers, body(model).as_bytes()).await;
            assert_eq!(reply.status, status, "{model}: {}", reply.text());
            assert!(reply.text().contains(expected), "{model}: {}", reply.text());
        }
    }
    for (path, text) in [
        ("/v1/chat/completions", "{\"canary\": nonsense"),
        ("/v1/chat/completions", "[\"canary\"]"),
        ("/v1/chat/completions", "{\"model\": {\"canary\": 1}, \"messages\": \"canary\"}"),
        ("/v1/embeddings", "canary"),
        ("/canary", "canary"),
    ] {
        exchange(to, "POST", path, &headers, text.as_bytes()).await;
    }
    for key in ["Bearer canary-wrong-key", "canary", "Bearer"] {
        let wrong = [("authorization", key)];
        assert_eq!(exchange(to, "POST", "/v1/completions", &wrong, b"canary").await.status, 401);
    }
    // A client that leaves in the middle of its body, and one that speaks no HTTP.
    for text in [
        "POST /v1/completions HTTP/1.1\r\nhost: canary\r\ncontent-length: 99\r\n\r\ncanary",
        "canary\r\n\r\n",
    ] {
        let mut stream = tokio::net::TcpStream::connect(to).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, text.as_bytes()).await.unwrap();
    }
    let seen = mocks[0].seen();
    assert!(seen[0].headers["authorization"] == "Bearer canary-worker-key" && !seen[0].body.is_empty());
}

/// What operators are shown.
async fn shown(program: &Program) -> Vec<String> {
    let admin = async |method: &str, path: &str, key: &str, body: &str| {
        let reply = exchange(program.admin, method, path, &[("authorization", key)], body.as_bytes()).await;
        (reply.status, reply.text())
    };
    let key = "Bearer canary-admin-key";
    assert_eq!(admin("GET", "/metrics", "Bearer canary-no-admin-key", "").await.0, 401);
    let prompt = r#"{"model": "good", "prompt": "canary prompt"}"#;
    assert_eq!(admin("POST", "/explain", key, prompt).await.0, 200);
    assert_eq!(admin("POST", "/workers", key, r#"{"url": "canary://canary"}"#).await.0, 400);
    let (metrics, workers) =
        (admin("GET", "/metrics", key, "").await, admin("GET", "/workers", key, "").await);
    assert!(metrics.1.contains("router_requests_total") && workers.1.contains("\"w0\""));
    let info = [("authorization", "Bearer canary-client-key")];
    let info = exchange(program.clients, "GET", "/server_info", &info, b"").await;
    vec![metrics.1, workers.1, info.text()]
}

#[tokio::test(flavor = "multi_thread")]
async fn no_prompt_key_or_body_is_in_logs_or_metrics() {
    for format in ["text", "json"] {
        let (mocks, workers) = workers().await;
        let clients = TestFile::new("canary-client-key\n");
        let of_workers = TestFile::new("canary-worker-key\n");
        let admins = TestFile::new("canary-admin-key\n");
        let api = Api::start().await;
        api.expect_token("canary-kubernetes-token");
        std::fs::write(api.credentials.join("token"), "canary-kubernetes-token").unwrap();
        let [api_url, credentials] = api.flags();
        let arguments = [
            format!("{workers},k8s://watched"),
            api_url,
            credentials,
            clients.flag("api-key-file"),
            of_workers.flag("worker-api-key-file"),
            admins.flag("admin-key-file"),
            "--log-level=trace".to_owned(),
            format!("--log-format={format}"),
        ];
        let started = tokio::task::spawn_blocking(move || Program::start(&arguments));
        let program = started.await.unwrap();
        until("all are up", || async {
            let info = [("authorization", "Bearer canary-client-key")];
            let info = exchange(program.clients, "GET", "/server_info", &info, b"").await.json();
            info["workers"].as_array().unwrap().iter().all(|worker| worker["usable"] == true)
        })
        .await;
        sing(&program, &mocks).await;
        clients.write("canary-client-key\ncanary-second-key\n");
        until("the second key works", || async {
            let second = [("authorization", "Bearer canary-second-key")];
            exchange(program.clients, "GET", "/v1/models", &second, b"").await.status == 200
        })
        .await;
        clients.write("canary key of many words\n");
        std::fs::write(api.credentials.join("token"), "canary-wrong-token").unwrap();
        api.end_watches(End::Clean);
        until("the API refuses", || async {
            let key = [("authorization", "Bearer canary-admin-key")];
            let told = exchange(program.admin, "GET", "/workers", &key, b"").await;
            told.text().contains("401: Unauthorized")
        })
        .await;
        let shown = shown(&program).await;
        let [log, printed] = tokio::task::spawn_blocking(move || program.stop()).await.unwrap();
        // It did talk.
        for expected in
            ["request", "attempt failed", "stream broke", "keys have changed", "cannot be found", "draining"]
        {
            assert!(log.contains(expected), "{format} log lacks {expected:?}:\n{log}");
        }
        for (name, text) in
            [("log", &log), ("stdout", &printed)].into_iter().chain(shown.iter().map(|t| ("admin", t)))
        {
            let sung = text.lines().find(|line| line.to_ascii_lowercase().contains(CANARY));
            assert_eq!(sung, None, "{format} {name}");
        }
    }
}
