//! Who may come in, and what workers are shown.

use std::path::PathBuf;
use std::sync::Arc;

use router::config::Cli;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::harness::*;

const PATH: &str = "/v1/chat/completions";

/// A file of the test's own, gone at its end.
pub(crate) struct TestFile(PathBuf);

impl TestFile {
    pub(crate) fn new(text: &str) -> Self {
        let name = format!("router-keys-{}-{:x}", std::process::id(), rand::random::<u64>());
        let file = Self(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    pub(crate) fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }

    pub(crate) fn flag(&self, name: &str) -> String {
        format!("--{name}={}", self.0.display())
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn worker() -> MockWorker {
    MockWorker::answering(&["m"], json_reply(200, "{}")).await
}

async fn with(router: &Router, authorization: &[&str], method: &str, path: &str) -> Reply {
    let headers: Vec<_> = authorization.iter().map(|value| ("authorization", *value)).collect();
    let body = if method == "POST" { chat("x") } else { String::new() };
    exchange(router.address, method, path, &headers, body.as_bytes()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_key_nobody_comes_in_but_probes() {
    let (worker, keys) = (worker().await, TestFile::new("# ann\nsk-ann\n# bob\nsk-bob\n"));
    let router = Router::start(&[&workers(&[&worker]), &keys.flag("api-key-file")]).await;
    for (given, expected) in [
        (&[][..], "no API key"),
        (&["sk-ann"], "Bearer KEY"),
        (&["Basic sk-ann"], "Bearer KEY"),
        (&["Bearer sk-eve"], "not known"),
        (&["Bearer sk-an"], "not known"),
        (&["Bearer sk-ann", "Bearer sk-bob"], "no API key"),
    ] {
        for (method, path) in [
            ("POST", PATH),
            ("POST", "/v1/embeddings"),
            ("GET", "/v1/models"),
            ("GET", "/server_info"),
            ("GET", "/nowhere"),
            ("GET", PATH),
        ] {
            let reply = with(&router, given, method, path).await;
            let (message, code) = reply.error();
            assert_eq!((reply.status, code.as_str()), (401, "invalid_api_key"), "{path} {given:?}");
            assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
            assert_eq!(reply.header("www-authenticate"), "Bearer");
            assert!(message.contains(expected) && !message.contains("sk-"), "{message}");
        }
    }
    assert!(worker.seen().is_empty());
    for key in ["Bearer sk-ann", "bearer sk-bob"] {
        assert_eq!(with(&router, &[key], "POST", PATH).await.status, 200);
        assert_eq!(with(&router, &[key], "GET", "/v1/models").await.status, 200);
        assert_eq!(with(&router, &[key], "GET", "/nowhere").await.status, 404);
    }
    for path in ["/livez", "/readyz", "/health"] {
        assert_eq!(router.get(path).await.status, 200, "{path}");
    }
    assert!(worker.seen().iter().all(|seen| !seen.headers.contains_key("authorization")));
    assert!(router.metric("router_requests_total{endpoint=\"chat\",status=\"401\"}").await >= 6.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn anthropics_clients_send_theirs_in_a_header_of_its_own() {
    let (worker, keys) = (worker().await, TestFile::new("sk-ann\n"));
    let router = Router::start(&[&workers(&[&worker]), &keys.flag("api-key-file")]).await;
    for (headers, status, passed) in [
        (vec![("x-api-key", "sk-ann")], 200, None),
        (vec![("x-api-key", "sk-eve")], 401, None),
        (vec![("x-api-key", "sk-ann"), ("x-api-key", "sk-ann")], 401, None),
        (vec![("authorization", "Basic eDp5"), ("x-api-key", "sk-ann")], 200, None),
        (vec![("authorization", "Bearer sk-eve"), ("x-api-key", "sk-ann")], 401, None),
        // It is for the engine then.
        (vec![("authorization", "Bearer sk-ann"), ("x-api-key", "other")], 200, Some("other")),
    ] {
        let reply = exchange(router.address, "POST", "/v1/messages", &headers, chat("x").as_bytes()).await;
        assert_eq!(reply.status, status, "{headers:?}: {}", reply.text());
        if status == 200 {
            let seen = worker.seen().pop().unwrap().headers;
            assert_eq!(
                (seen.get("x-api-key").map(String::as_str), seen.get("authorization")),
                (passed, None)
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_goes_on_after_a_refusal() {
    let (worker, keys) = (worker().await, TestFile::new("sk-ann"));
    let router = Router::start(&[&workers(&[&worker]), &keys.flag("api-key-file")]).await;
    let mut stream = tokio::net::TcpStream::connect(router.address).await.unwrap();
    for (key, status) in [("Bearer no", 401), ("Bearer sk-ann", 200), ("Bearer no", 401)] {
        let request = request_bytes("POST", PATH, &[("authorization", key)], chat("x").as_bytes());
        tokio::io::AsyncWriteExt::write_all(&mut stream, &request).await.unwrap();
        assert_eq!(read_reply(&mut stream).await.status, status);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_read_again_when_they_change() {
    let (worker, keys) = (worker().await, TestFile::new("sk-old"));
    let router = Router::start(&[&workers(&[&worker]), &keys.flag("api-key-file")]).await;
    let status = async |key: &str| with(&router, &[key], "POST", PATH).await.status;
    assert_eq!((status("Bearer sk-old").await, status("Bearer sk-new").await), (200, 401));
    keys.write("sk-new\nsk-other");
    until("the new key works", || async { status("Bearer sk-new").await == 200 }).await;
    assert_eq!(status("Bearer sk-old").await, 401);
    // What is no file of keys changes nothing; nor does none at all.
    keys.write("not one key but many words\n");
    keys.write("");
    std::fs::remove_file(&keys.0).unwrap();
    assert_eq!(status("Bearer sk-new").await, 200);
    keys.write("sk-third");
    until("the third key works", || async { status("Bearer sk-third").await == 200 }).await;
    assert_eq!(status("Bearer sk-new").await, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_get_their_own_key_in_place_of_the_clients() {
    let (one, two) = (worker().await, worker().await);
    let (clients, of_workers) = (TestFile::new("sk-client"), TestFile::new("*=wk-all\nw1=wk-one\n"));
    let flags = [&workers(&[&one, &two]), "--policy=round_robin", &of_workers.flag("worker-api-key-file")];
    // Keys wanted: the client's goes no further.
    let router = Router::start(&[&flags[..], &[&clients.flag("api-key-file")]].concat()).await;
    for _ in 0..4 {
        assert_eq!(with(&router, &["Bearer sk-client"], "POST", PATH).await.status, 200);
    }
    assert!(one.seen().iter().all(|seen| seen.headers["authorization"] == "Bearer wk-all"));
    assert!(two.seen().iter().all(|seen| seen.headers["authorization"] == "Bearer wk-one"));
    assert!(!one.seen().is_empty() && !two.seen().is_empty());
    drop(router);

    // None wanted: the client's own goes first.
    let router = Router::start(&flags).await;
    for (given, expected) in [(&["Bearer theirs"][..], "Bearer theirs"), (&[], "Bearer wk-all")] {
        let before = one.seen().len();
        while one.seen().len() == before {
            assert_eq!(with(&router, given, "POST", PATH).await.status, 200);
        }
        assert_eq!(one.seen().last().unwrap().headers["authorization"], expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_show_the_workers_key() {
    // Without the key, there is no model.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut raw = Vec::new();
                while let Some(request) = read_request(&mut stream, &mut raw).await {
                    let known = request.headers.get("authorization").is_some_and(|key| key == "Bearer wk");
                    let answer =
                        if known { probe_answer(&request.path, &["guarded"]) } else { json_reply(401, "{}") };
                    tokio::io::AsyncWriteExt::write_all(&mut stream, &answer).await.unwrap();
                }
            });
        }
    });
    let keys = TestFile::new("wk\n");
    let workers = format!("--workers={address}");
    let router = Router::start(&[&workers, &keys.flag("worker-api-key-file")]).await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    assert!(router.get("/v1/models").await.text().contains("guarded"));
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_have_keys_of_their_own() {
    let worker = worker().await;
    let (clients, admins) = (TestFile::new("sk-client"), TestFile::new("ak-admin"));
    let scraped = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let router = Router::start(&[
        &workers(&[&worker]),
        &clients.flag("api-key-file"),
        &admins.flag("admin-key-file"),
        // Reachable from elsewhere, which only a key allows.
        "--admin-listen=0.0.0.0:0",
        &format!("--metrics-listen={scraped}"),
    ])
    .await;
    let admin = ([127, 0, 0, 1], router.admin.port()).into();
    for (method, path) in [
        ("GET", "/metrics"),
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("DELETE", "/workers/w0"),
        ("POST", "/explain"),
        ("GET", "/nothing"),
    ] {
        for key in [None, Some("Bearer sk-client"), Some("ak-admin")] {
            let headers: Vec<_> = key.map(|key| ("authorization", key)).into_iter().collect();
            let reply = exchange(admin, method, path, &headers, b"").await;
            assert_eq!((reply.status, reply.header("www-authenticate")), (401, "Bearer"), "{path}");
            assert!(!reply.text().contains("ak-"), "{}", reply.text());
        }
        let reply = exchange(admin, method, path, &[("authorization", "Bearer ak-admin")], b"").await;
        assert_ne!(reply.status, 401, "{path}");
    }
    for (path, status) in [("/metrics", 200), ("/livez", 200), ("/readyz", 503), ("/workers", 404)] {
        // Its worker has been removed above.
        assert_eq!(exchange(scraped, "GET", path, &[], b"").await.status, status, "{path}");
    }
    assert_eq!(exchange(admin, "GET", "/livez", &[], b"").await.status, 200, "as on the clients' listener");
    assert_eq!(with(&router, &["Bearer ak-admin"], "POST", PATH).await.status, 401);
}

#[test]
fn files_that_hold_no_keys_are_config_errors() {
    let configure = |flags: &[String]| {
        let flags = [&["--workers=a".to_owned()], flags].concat();
        Cli::configure(&flags, None).map_err(|errors| errors.0)
    };
    let (empty, wrong) = (TestFile::new("# none\n"), TestFile::new("some words\n"));
    for name in ["api-key-file", "admin-key-file", "worker-api-key-file"] {
        let errors = configure(&[empty.flag(name)]).unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].starts_with(name) && errors[0].contains("no key"),
            "{errors:?}"
        );
        let errors = configure(&[wrong.flag(name)]).unwrap_err();
        assert!(errors[0].contains("line 1") && !errors[0].contains("words"), "{errors:?}");
        assert!(configure(&[format!("--{name}=/no/such/file")]).unwrap_err()[0].contains("/no/such/file"));
    }
    let open = "--admin-listen=0.0.0.0:9000".to_owned();
    assert!(configure(std::slice::from_ref(&open)).unwrap_err()[0].contains("--admin-key-file"));
    let keys = TestFile::new("k");
    assert!(configure(&[open, keys.flag("admin-key-file")]).is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_gets_no_more_than_it_may() {
    let usage = r#"{"usage":{"prompt_tokens":700,"completion_tokens":400}}"#;
    let worker = MockWorker::answering(&["m"], json_reply(200, usage)).await;
    let keys = TestFile::new("few requests-per-minute=2\nshort tokens-per-minute=1000\nfree\n");
    let router = Router::start(&[&workers(&[&worker]), &keys.flag("api-key-file")]).await;
    let ask = async |key: &str| with(&router, &[&format!("Bearer {key}")], "POST", PATH).await;
    for (key, allowed, what) in
        [("few", 2, "2 requests in a minute"), ("short", 1, "1000 tokens in a minute")]
    {
        for _ in 0..allowed {
            assert_eq!(ask(key).await.status, 200, "{key}");
        }
        let refused = ask(key).await;
        let (kind, limit) = if key == "few" { ("requests", "2") } else { ("tokens", "1000") };
        assert_eq!(refused.header(&format!("x-ratelimit-limit-{kind}")), limit);
        assert_eq!(refused.header(&format!("x-ratelimit-remaining-{kind}")), "0");
        let (message, code) = refused.error();
        assert_eq!((refused.status, code.as_str()), (429, "rate_limit_exceeded"), "{message}");
        assert!(message.contains(what) && !message.contains(key), "{message}");
        let wait: u64 = refused.header("retry-after").parse().unwrap();
        assert!((1..=30).contains(&wait), "{wait}");
    }
    assert_eq!(
        with(&router, &["Bearer few"], "GET", "/v1/models").await.status,
        200,
        "that computes nothing"
    );
    for _ in 0..4 {
        let answer = ask("free").await;
        assert_eq!((answer.status, answer.header("x-ratelimit-limit-requests")), (200, ""));
    }
    assert_eq!(worker.seen().len(), 7);
    // What has been had stays so, whatever it may be from now on.
    keys.write("few requests-per-minute=100\nshort\nfree max-in-flight=1\n");
    until("the file is read", || async { ask("few").await.status == 200 }).await;
    assert_eq!(ask("few").await.header("x-ratelimit-limit-requests"), "100");
    assert_eq!(ask("short").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_nobody_tells_count_and_those_of_failures_do_not() {
    let long = format!(r#"{{"text":"{}"}}"#, "a word ".repeat(2_000));
    for (reply, allowed, answered) in [
        (sse_reply(&[r#"{"choices":[]}"#; 600]), 2, 200),
        (json_reply(200, &long), 1, 200),
        (json_reply(400, &long), 5, 400),
    ] {
        let worker = MockWorker::answering(&["m"], reply).await;
        let keys = TestFile::new("short tokens-per-minute=1000\n");
        let router = Router::start(&[&workers(&[&worker]), &keys.flag("api-key-file")]).await;
        let mut statuses = Vec::new();
        for _ in 0..5 {
            statuses.push(with(&router, &["Bearer short"], "POST", PATH).await.status);
        }
        let expected: Vec<_> = (0..5).map(|number| if number < allowed { answered } else { 429 }).collect();
        assert_eq!(statuses, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_may_have_so_many_requests_at_once() {
    let ends = Arc::new(Notify::new());
    let waits = Arc::clone(&ends);
    let script = move |_: &Seen| vec![Act::Wait(Arc::clone(&waits)), Act::Write(sse_reply(&["{}"]))];
    let worker = MockWorker::start(&["m"], script).await;
    let keys = TestFile::new("one max-in-flight=1\n");
    let router = Router::start(&[&workers(&[&worker]), &keys.flag("api-key-file")]).await;
    let ask = async || with(&router, &["Bearer one"], "POST", PATH).await;
    let mut first = TcpStream::connect(router.address).await.unwrap();
    let headers = [("authorization", "Bearer one")];
    first.write_all(&request_bytes("POST", PATH, &headers, chat("x").as_bytes())).await.unwrap();
    until("it is there", || async { worker.seen().len() == 1 }).await;
    let refused = ask().await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"));
    assert!(refused.error().0.contains("1 requests in flight"), "{:?}", refused.error());
    // Whoever leaves makes room, and whoever has been answered.
    drop(first);
    let answering = tokio::spawn(async move {
        loop {
            ends.notify_waiters();
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
    for _ in 0..2 {
        until("there is room", || async { ask().await.status == 200 }).await;
    }
    answering.abort();
}
