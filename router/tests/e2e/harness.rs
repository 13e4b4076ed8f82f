//! A router in this process, workers whose every byte the test decides, and a client that shows every byte.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use router::config::Cli;
use router::serve::serve;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};

/// No wait of a test is longer; reaching it is a failure.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// A running router; dropping it stops it.
pub(crate) struct Router {
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) gateways: Option<SocketAddr>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Router {
    /// Starts a router with `arguments` besides the ports.
    pub(crate) async fn start(arguments: &[&str]) -> Self {
        let mut all = vec!["--port=0".to_owned(), "--threads=2".to_owned()];
        if !arguments.iter().any(|argument| argument.starts_with("--drain-delay")) {
            all.push("--drain-delay=0s".to_owned());
        }
        all.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        let config = Cli::configure(&all, None).unwrap();
        let (tell, told) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let ready = move |_: &Arc<router::app::App>, addresses| tell.send(addresses).unwrap();
            runtime.block_on(serve(config, ready, async { drop(stopped.await) })).unwrap();
        });
        let addresses = told.await.unwrap();
        Self {
            address: addresses.clients,
            admin: addresses.admin.unwrap(),
            gateways: addresses.gateways,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Asks it to stop; it drains.
    pub(crate) fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has stopped.
    pub(crate) async fn stopped(mut self) {
        self.stop();
        let thread = self.thread.take().unwrap();
        tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
    }

    pub(crate) async fn post(&self, path: &str, body: &str) -> Reply {
        exchange(self.address, "POST", path, &[], body.as_bytes()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        exchange(self.address, "GET", path, &[], b"").await
    }

    pub(crate) async fn admin(&self, method: &str, path: &str, body: &str) -> Reply {
        exchange(self.admin, method, path, &[], body.as_bytes()).await
    }

    /// The value of a metric line that begins with `name`.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let text = self.admin("GET", "/metrics", "").await.text();
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
    }
}

/// Everything that came back.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
    /// Whether the body had the length or the end that its head promised.
    pub(crate) whole: bool,
}

impl Reply {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub(crate) fn error(&self) -> (String, String) {
        let error = &self.json()["error"];
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        (text("message"), text("code"))
    }
}

/// One exchange over a connection of its own.
pub(crate) async fn exchange(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&request_bytes(method, path, headers, body)).await.unwrap();
    tokio::time::timeout(LIMIT, read_reply(&mut stream)).await.expect("the reply came in time")
}

pub(crate) fn request_bytes(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    [head.as_bytes(), b"\r\n", body].concat()
}

/// Reads a reply to its end, or to the end of the connection.
pub(crate) async fn read_reply(stream: &mut TcpStream) -> Reply {
    let mut raw = Vec::new();
    let head_end = loop {
        if let Some(at) = find(&raw, b"\r\n\r\n") {
            break at;
        }
        assert!(read_some(stream, &mut raw).await, "connection closed before a reply: {raw:?}");
    };
    let head = String::from_utf8(raw[..head_end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers: HashMap<_, _> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let mut rest = raw[head_end + 4..].to_vec();
    let (body, whole) = if headers.get("transfer-encoding").is_some_and(|coding| coding == "chunked") {
        loop {
            if let (body, true) = dechunk(&rest) {
                break (body, true);
            }
            if !read_some(stream, &mut rest).await {
                break (dechunk(&rest).0, false);
            }
        }
    } else {
        let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        while rest.len() < length && read_some(stream, &mut rest).await {}
        let whole = rest.len() >= length;
        (rest, whole)
    };
    Reply { status, headers, body, whole }
}

async fn read_some(stream: &mut TcpStream, into: &mut Vec<u8>) -> bool {
    match stream.read_buf(into).await {
        Ok(count) => count > 0,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn find(within: &[u8], what: &[u8]) -> Option<usize> {
    if what.is_empty() {
        return Some(0);
    }
    within.windows(what.len()).position(|window| window == what)
}

/// The data of all whole chunks, and whether the last chunk has come.
fn dechunk(mut raw: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(line) = find(raw, b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&raw[..line]).unwrap(), 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = raw.get(line + 2..line + 2 + size) else { break };
        body.extend_from_slice(chunk);
        raw = raw.get(line + 4 + size..).unwrap_or_default();
    }
    (body, false)
}

/// A request as a worker saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

/// What a worker does with a request.
#[derive(Clone)]
pub(crate) enum Act {
    /// Writes bytes.
    Write(Vec<u8>),
    /// Takes its time, as computing does.
    Take(Duration),
    /// Waits for the test.
    Wait(Arc<Notify>),
    /// Waits until the router closes the connection, then tells the test.
    TellWhenClosed(Arc<Notify>),
    /// Waits until the router closes the connection, then counts.
    CountWhenClosed(Arc<AtomicUsize>),
    /// Closes the connection.
    Close,
    /// Closes it with a reset, as a process that crashes or a machine that is gone does.
    Reset,
}

type Script = Arc<dyn Fn(&Seen) -> Vec<Act> + Send + Sync>;

/// A worker that does what the test says. It answers probes by itself.
pub(crate) struct MockWorker {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    hangs: Arc<Hangs>,
    task: tokio::task::JoinHandle<()>,
}

/// Whether probes go unanswered, and how many have.
#[derive(Default)]
struct Hangs {
    now: AtomicBool,
    unanswered: AtomicUsize,
}

impl Drop for MockWorker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl MockWorker {
    /// A worker that serves `models` and answers POSTs by `script`.
    pub(crate) async fn start(
        models: &'static [&'static str],
        script: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), models, script).await
    }

    /// The same, where an earlier one was.
    pub(crate) async fn start_at(
        address: SocketAddr,
        models: &'static [&'static str],
        script: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        let listener = bind(address).await;
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let hangs = Arc::<Hangs>::default();
        let (script, log): (Script, _) = (Arc::new(script), Arc::clone(&seen));
        let hanging = Arc::clone(&hangs);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (script, log, hangs) = (Arc::clone(&script), Arc::clone(&log), Arc::clone(&hanging));
                connections.spawn(play(stream, models, script, (log, hangs)));
            }
        });
        Self { address, seen, hangs, task }
    }

    /// A worker that answers every POST with the same whole reply.
    pub(crate) async fn answering(models: &'static [&'static str], reply: Vec<u8>) -> Self {
        Self::start(models, move |_| vec![Act::Write(reply.clone())]).await
    }

    /// Kills it, and waits until nobody listens there any more. Connections to it are closed.
    pub(crate) async fn kill(self) {
        let address = self.address;
        drop(self);
        until("nobody listens", || async { TcpStream::connect(address).await.is_err() }).await;
    }

    /// From now on its probes go unanswered, or no longer.
    pub(crate) fn hang(&self, hangs: bool) {
        self.hangs.now.store(hangs, Ordering::SeqCst);
    }

    /// Probes that went unanswered.
    pub(crate) fn unanswered(&self) -> usize {
        self.hangs.unanswered.load(Ordering::SeqCst)
    }

    /// The POSTs it has seen.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

/// Listens at `address`, where an earlier listener may not have gone yet.
pub(crate) async fn bind(address: SocketAddr) -> TcpListener {
    let bound = async {
        loop {
            match TcpListener::bind(address).await {
                Ok(listener) => return listener,
                Err(error) if error.kind() == ErrorKind::AddrInUse => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err(error) => panic!("{address}: {error}"),
            }
        }
    };
    tokio::time::timeout(LIMIT, bound).await.expect("the address becomes free")
}

/// The `--workers` argument for some mock workers.
pub(crate) fn workers(mocks: &[&MockWorker]) -> String {
    let list: Vec<_> = mocks.iter().map(|mock| mock.address.to_string()).collect();
    format!("--workers={}", list.join(","))
}

async fn play(
    mut stream: TcpStream,
    models: &[&str],
    script: Script,
    (log, hangs): (Arc<Mutex<Vec<Seen>>>, Arc<Hangs>),
) {
    let mut raw = Vec::new();
    loop {
        let Some(request) = read_request(&mut stream, &mut raw).await else { return };
        if request.method == "GET" && hangs.now.load(Ordering::SeqCst) {
            hangs.unanswered.fetch_add(1, Ordering::SeqCst);
            while stream.read_buf(&mut raw).await.is_ok_and(|count| count > 0) {}
            return;
        }
        let acts = if request.method == "GET" {
            vec![Act::Write(probe_answer(&request.path, models))]
        } else {
            log.lock().unwrap().push(request.clone());
            script(&request)
        };
        for act in acts {
            match act {
                Act::Write(bytes) => {
                    if stream.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Act::Take(time) => tokio::time::sleep(time).await,
                Act::Wait(signal) => signal.notified().await,
                Act::TellWhenClosed(signal) => {
                    let mut sink = Vec::new();
                    while stream.read_buf(&mut sink).await.is_ok_and(|count| count > 0) {}
                    signal.notify_one();
                    return;
                }
                Act::CountWhenClosed(count) => {
                    let mut sink = Vec::new();
                    while stream.read_buf(&mut sink).await.is_ok_and(|count| count > 0) {}
                    count.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                Act::Close => return,
                Act::Reset => {
                    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
                    return;
                }
            }
        }
    }
}

/// What starts with `lora-` is an adapter of the first model.
fn model_entry(id: &str, first: &str) -> serde_json::Value {
    let parent = id.starts_with("lora-").then_some(first);
    // Such a one is served by an engine that says which it is.
    let owner = ["vllm", "sglang"]
        .into_iter()
        .find(|owner| id.strip_prefix(owner).is_some_and(|rest| rest.starts_with('-')));
    serde_json::json!({"id": id, "object": "model", "parent": parent, "owned_by": owner})
}

pub(crate) fn probe_answer(path: &str, models: &[&str]) -> Vec<u8> {
    if path == "/v1/models" {
        let entries: Vec<_> = models.iter().map(|id| model_entry(id, models[0])).collect();
        return json_reply(200, &serde_json::json!({"object": "list", "data": entries}).to_string());
    }
    // How often anybody has asked: counts of an engine that goes on.
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    if path == "/metrics"
        && let Some(counts) = models.iter().find(|model| model.starts_with("lora-counts"))
    {
        let tokens = if *counts == "lora-counts-on" { ASKED.fetch_add(1, Ordering::SeqCst) } else { 7 };
        let running = "vllm:num_requests_running{engine=\"0\"} 1.0";
        return json_reply(
            200,
            &format!("{running}\nvllm:generation_tokens_total{{engine=\"0\"}} {tokens}.0\n"),
        );
    }
    // SGLang, that publishes its cache events at that port.
    if let Some(port) = models.iter().find_map(|model| model.strip_prefix("sglang-publishes-")) {
        let kv_events = serde_json::json!({"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port.parse::<u16>().unwrap(),
            "topic": "", "block_size": 16, "dp_size": 1});
        match path {
            "/kv_event_sources" => return json_reply(404, "{}"),
            "/server_info" => {
                return json_reply(200, &serde_json::json!({"kv_events": kv_events}).to_string());
            }
            _ => {}
        }
    }
    let told = match path {
        "/metrics" if models.contains(&"tells-blocks") => {
            "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"500\"} 1.0\n"
        }
        "/metrics" if models.contains(&"tells-ranks") => {
            "vllm:cache_config_info{block_size=\"16\",engine=\"0\",kv_cache_size_tokens=\"8000\",num_gpu_blocks=\"1100\"} 1.0\n\
             vllm:cache_config_info{block_size=\"16\",engine=\"1\",kv_cache_size_tokens=\"9600\",num_gpu_blocks=\"1100\"} 1.0\n"
        }
        "/metrics" if models.contains(&"lora-one") => {
            "vllm:num_requests_running{engine=\"0\"} 0.0\n\
             vllm:lora_requests_info{max_lora=\"1\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"} 1.7e+09\n"
        }
        "/metrics" if models.contains(&"has-others") => {
            "vllm:num_requests_running{engine=\"0\"} 30.0\nvllm:num_requests_waiting{engine=\"0\"} 6.0\n\
             vllm:prompt_tokens_total{engine=\"0\"} 5000.0\nvllm:prefix_cache_hits_total{engine=\"0\"} 1000.0\n\
             vllm:time_to_first_token_seconds_count{engine=\"0\"} 4.0\n"
        }
        "/metrics" if models.contains(&"has-others-at-one") => {
            "vllm:num_requests_running{engine=\"0\"} 0.0\nvllm:num_requests_waiting{engine=\"0\"} 0.0\n\
             vllm:num_requests_running{engine=\"1\"} 20.0\nvllm:num_requests_waiting{engine=\"1\"} 1.0\n"
        }
        "/v1/loads" if models.contains(&"sglang-has-others") => {
            r#"{"version":"0.5.23","loads":[{"dp_rank":0,"num_running_reqs":5,"num_waiting_reqs":2,"token_usage":0.5}]}"#
        }
        "/version" if models.contains(&"vllm-old") => r#"{"version":"0.31.2"}"#,
        "/version" => r#"{"version":"0.32.0"}"#,
        "/model_info" if models.contains(&"sglang-gpt-oss") => r#"{"model_type":"gpt_oss"}"#,
        "/model_info" => r#"{"model_type":"qwen3"}"#,
        "/server_info" if models.contains(&"tells-tokens") => {
            r#"{"max_total_num_tokens": 9000, "dp_size": 1}"#
        }
        _ => "",
    };
    json_reply(if path == "/unwell" { 503 } else { 200 }, told)
}

pub(crate) async fn read_request(stream: &mut (impl AsyncRead + Unpin), raw: &mut Vec<u8>) -> Option<Seen> {
    let head_end = loop {
        if let Some(at) = find(raw, b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(raw).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(raw[..head_end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let mut first = lines.next()?.split(' ');
    let mut headers = HashMap::<_, String>::new();
    for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
        // One that comes twice shows.
        let before = headers.entry(name.to_ascii_lowercase());
        before.and_modify(|before| *before += &format!(", {value}")).or_insert_with(|| value.to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    while raw.len() < head_end + 4 + length {
        if stream.read_buf(raw).await.ok()? == 0 {
            return None;
        }
    }
    let body = raw[head_end + 4..head_end + 4 + length].to_vec();
    raw.drain(..head_end + 4 + length);
    Some(Seen { method: first.next()?.to_owned(), path: first.next()?.to_owned(), headers, body })
}

/// A whole JSON reply.
pub(crate) fn json_reply(status: u16, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// The head of a stream of events.
pub(crate) fn sse_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec()
}

/// One chunk with `data`.
pub(crate) fn chunk(data: &str) -> Vec<u8> {
    format!("{:x}\r\n{data}\r\n", data.len()).into_bytes()
}

/// The end of a body in chunks.
pub(crate) fn last_chunk() -> Vec<u8> {
    b"0\r\n\r\n".to_vec()
}

/// A whole stream of `events`, `[DONE]` included.
pub(crate) fn sse_reply(events: &[&str]) -> Vec<u8> {
    let mut reply = sse_head();
    for event in events {
        reply.extend(chunk(&format!("data: {event}\n\n")));
    }
    reply.extend(chunk("data: [DONE]\n\n"));
    reply.extend(last_chunk());
    reply
}

/// A chat request for `content`.
pub(crate) fn chat(content: &str) -> String {
    serde_json::json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": content}]})
        .to_string()
}

/// Asks again until `condition` holds.
pub(crate) async fn until<F: std::future::Future<Output = bool>>(
    what: &str,
    mut condition: impl FnMut() -> F,
) {
    let asked = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, asked).await.unwrap_or_else(|_| panic!("waited in vain: {what}"));
}
