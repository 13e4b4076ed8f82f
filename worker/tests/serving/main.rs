//! The worker as its clients see it: over HTTP requests in this process, with the built-in model.
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod answers;
mod errors;
mod kv_transfer;
mod sampling;
mod simulated;
mod tokens;

use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use worker::{Worker, WorkerBody, WorkerConfig, model::ModelSource};

/// No wait of a test is longer.
const LIMIT: Duration = Duration::from_secs(60);

/// One worker for all tests that leave no traces.
static SHARED: LazyLock<Worker> = LazyLock::new(|| start(|_| {}));

fn start(change: impl FnOnce(&mut WorkerConfig)) -> Worker {
    let mut config = WorkerConfig::new(ModelSource::Builtin);
    change(&mut config);
    Worker::start(config).unwrap()
}

async fn send(worker: &Worker, method: Method, path: &str, body: impl Into<Bytes>) -> Response<WorkerBody> {
    let request = Request::builder().method(method).uri(path).body(body.into()).unwrap();
    tokio::time::timeout(LIMIT, worker.handle(request)).await.expect("an answer in time")
}

async fn text(response: Response<WorkerBody>) -> String {
    let whole = tokio::time::timeout(LIMIT, response.into_body().collect()).await.expect("its end in time");
    String::from_utf8(whole.unwrap().to_bytes().to_vec()).unwrap()
}

async fn post(worker: &Worker, path: &str, body: &Value) -> (u16, Value) {
    let response = send(worker, Method::POST, path, body.to_string()).await;
    let status = response.status().as_u16();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

async fn get(worker: &Worker, path: &str) -> Value {
    serde_json::from_str(&text(send(worker, Method::GET, path, "").await).await).unwrap()
}

/// What the worker says of itself once this holds of it. The engine counts a step after it has handed out its tokens, so that an
/// answer may be there before its end is counted.
async fn info_once(worker: &Worker, holds: impl Fn(&Value) -> bool) -> Value {
    let waiting = async {
        loop {
            let info = get(worker, "/server_info").await;
            if holds(&info) {
                break info;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LIMIT, waiting).await.expect("it holds in time")
}

/// The objects of a stream; checks that it ends as it should.
async fn stream(worker: &Worker, path: &str, body: &Value) -> Vec<Value> {
    let response = send(worker, Method::POST, path, body.to_string()).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let text = text(response).await;
    let events: Vec<_> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
    let (done, objects) = events.split_last().unwrap();
    assert_eq!(*done, "data: [DONE]");
    objects.iter().map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

fn chat(content: &str, extra: &Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 20});
    body.as_object_mut().unwrap().extend(extra.as_object().cloned().unwrap_or_default());
    body
}
