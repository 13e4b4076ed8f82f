//! Two hundred requests for each kind of fault, every one of them accounted for: answered in full, or told clearly what
//! went wrong where nothing else was possible; and the metrics say the same.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinSet;

use crate::harness::*;

const REQUESTS: usize = 200;
const CLIENTS: usize = 8;
const CHAT: &str = "/v1/chat/completions";
const BUSY: &str = r#"{"error":{"message":"busy","type":"rate_limit_error","param":null,"code":"busy"}}"#;
const BROKEN: &str = r#"{"error":{"message":"broken","type":"server_error","param":null,"code":"broken"}}"#;
const EVENTS: [&str; 2] = [r#"{"n":1}"#, r#"{"n":2}"#];

/// Held by tests that open hundreds of connections, each of which is four files of this process.
static MANY_CONNECTIONS: Mutex<()> = Mutex::const_new(());

/// What became of requests.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// The whole answer came.
    pub(crate) answered: usize,
    /// An error came in place of an answer, by status and code.
    pub(crate) errors: BTreeMap<(u16, String), usize>,
    /// The stream broke, and said so, by code.
    pub(crate) broken: BTreeMap<String, usize>,
}

impl Account {
    /// Enters a reply; anything that a client could not make sense of is a failure of the test.
    pub(crate) fn enter(&mut self, reply: &Reply) {
        let text = reply.text();
        if reply.status != 200 {
            assert!(reply.whole, "{reply:?}");
            let error = &reply.json()["error"];
            assert!(error["message"].is_string() && error["type"].is_string(), "{text}");
            let code = error["code"].as_str().unwrap().to_owned();
            let needs_retry_after = [429, 503].contains(&reply.status);
            assert!(!needs_retry_after || !reply.header("retry-after").is_empty(), "{reply:?}");
            *self.errors.entry((reply.status, code)).or_default() += 1;
        } else if reply.whole {
            let good = EVENTS.map(|event| format!("data: {event}\n\n")).concat() + "data: [DONE]\n\n";
            assert_eq!(text, good);
            self.answered += 1;
        } else {
            assert!(!text.contains("[DONE]"), "{text}");
            let event = text.trim_end().rsplit("\n\n").next().unwrap().strip_prefix("data: ").unwrap();
            let event: serde_json::Value = serde_json::from_str(event).unwrap();
            let code = event["error"]["code"].as_str().unwrap_or_else(|| panic!("{text}"));
            *self.broken.entry(code.to_owned()).or_default() += 1;
        }
    }

    pub(crate) fn add(mut self, other: Self) -> Self {
        self.answered += other.answered;
        other.errors.into_iter().for_each(|(key, count)| *self.errors.entry(key).or_default() += count);
        other.broken.into_iter().for_each(|(key, count)| *self.broken.entry(key).or_default() += count);
        self
    }

    fn all_answered(count: usize) -> Self {
        Self { answered: count, ..Self::default() }
    }

    /// The metrics must tell the same story as the clients.
    async fn matches_metrics(&self, router: &Router) {
        let mut by_status = BTreeMap::from([(200, self.answered + self.broken.values().sum::<usize>())]);
        for ((status, _), count) in &self.errors {
            *by_status.entry(*status).or_default() += count;
        }
        for (status, count) in by_status {
            let name = format!("router_requests_total{{endpoint=\"chat\",status=\"{status}\"}}");
            until(&format!("{name} is {count}"), || async { router.metric(&name).await == count as f64 })
                .await;
        }
        until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 })
            .await;
        // Of statuses that a router relays, 429 is the client's to deal with.
        let of_worker = self.errors.iter().filter(|((status, _), _)| *status >= 500).map(|(_, count)| count);
        let blamed = of_worker.chain(self.broken.values()).sum::<usize>();
        assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, blamed as f64);
    }
}

fn stream() -> Vec<u8> {
    sse_reply(&EVENTS)
}

fn first_event() -> Vec<Act> {
    vec![Act::Write(sse_head()), Act::Write(chunk(&format!("data: {}\n\n", EVENTS[0])))]
}

fn never() -> Act {
    Act::Wait(Arc::new(Notify::new()))
}

async fn good_worker() -> MockWorker {
    MockWorker::answering(&["m"], stream()).await
}

async fn bad_worker(acts: Vec<Act>) -> MockWorker {
    MockWorker::start(&["m"], move |_| acts.clone()).await
}

async fn start(mocks: &[&MockWorker], arguments: &[&str]) -> Router {
    let workers = workers(mocks);
    Router::start(&[&["--policy=round_robin", &workers], arguments].concat()).await
}

/// Sends `count` requests from [`CLIENTS`] clients at once; `done` counts those that are over.
async fn send_counting(address: SocketAddr, count: usize, done: Arc<AtomicUsize>) -> Account {
    let left = Arc::new(AtomicUsize::new(count));
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (left, done) = (Arc::clone(&left), Arc::clone(&done));
        clients.spawn(async move {
            let mut account = Account::default();
            let take = |left: usize| left.checked_sub(1);
            while let Ok(number) = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take) {
                let body = chat(&format!("client {client}, request {number}"));
                account.enter(&exchange(address, "POST", CHAT, &[], body.as_bytes()).await);
                done.fetch_add(1, Ordering::SeqCst);
            }
            account
        });
    }
    clients.join_all().await.into_iter().fold(Account::default(), Account::add)
}

pub(crate) async fn send(address: SocketAddr, count: usize) -> Account {
    send_counting(address, count, Arc::default()).await
}

/// Sends `count` requests, all at once.
fn send_at_once(address: SocketAddr, count: usize) -> tokio::task::JoinHandle<Account> {
    let mut clients = JoinSet::new();
    for client in 0..count {
        clients.spawn(async move {
            exchange(address, "POST", CHAT, &[], chat(&format!("client {client}")).as_bytes()).await
        });
    }
    tokio::spawn(async move {
        let mut account = Account::default();
        clients.join_all().await.iter().for_each(|reply| account.enter(reply));
        account
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_before_and_between_requests() {
    let (bad, good) = (good_worker().await, good_worker().await);
    let router = start(&[&bad, &good], &[]).await;
    let before = send(router.address, REQUESTS / 2).await;
    assert!(!bad.seen().is_empty());
    drop(bad);
    let account = before.add(send(router.address, REQUESTS).await);
    assert_eq!(account, Account::all_answered(REQUESTS / 2 + REQUESTS));
    account.matches_metrics(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_with_more_requests_in_flight_than_the_budget_allows_to_retry() {
    let (bad, good) = (bad_worker(vec![never()]).await, good_worker().await);
    let router = start(&[&bad, &good], &["--retry-budget=0%"]).await;
    let _alone = MANY_CONNECTIONS.lock().await;
    // Beyond the floor of a hundred.
    let count = 240;
    let sent = send_at_once(router.address, count);
    until("half of them wait at the worker", || async { bad.seen().len() == count / 2 }).await;
    drop(bad);
    let account = sent.await.unwrap();
    assert_eq!(account, Account::all_answered(count), "all {} were saved", count / 2);
    assert_eq!(router.metric("router_retries_total").await, (count / 2) as f64);
    account.matches_metrics(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_in_the_middle_of_streams() {
    let (bad, good) = (bad_worker([first_event(), vec![never()]].concat()).await, good_worker().await);
    let router = start(&[&bad, &good], &[]).await;
    let _alone = MANY_CONNECTIONS.lock().await;
    let sent = send_at_once(router.address, REQUESTS);
    until("half of them stream", || async {
        let prefilling = router.metric("router_worker_prefill_tokens{worker=\"w0\"}").await;
        bad.seen().len() == REQUESTS / 2 && prefilling == 0.0
    })
    .await;
    drop(bad);
    let account = sent.await.unwrap();
    let broken = BTreeMap::from([("worker_failed".to_owned(), REQUESTS / 2)]);
    assert_eq!(account, Account { answered: REQUESTS / 2, broken, ..Account::default() });
    account.matches_metrics(&router).await;
    let name = "router_worker_attempts_total{outcome=\"broken\",worker=\"w0\"}";
    assert_eq!(router.metric(name).await, (REQUESTS / 2) as f64);
    assert!(router.metric("router_worker_breaker{worker=\"w0\"}").await > 0.0, "each was a failure of its");
}

#[tokio::test(flavor = "multi_thread")]
async fn hangs_before_the_first_byte() {
    let head = vec![Act::Write(sse_head()), never()];
    for acts in [vec![never()], head] {
        let (bad, good) = (bad_worker(acts).await, good_worker().await);
        let router = start(&[&bad, &good], &["--model-timeouts=m first-byte=200ms"]).await;
        let account = send(router.address, REQUESTS).await;
        // On a busy machine the good worker may be late as well.
        let late = REQUESTS - account.answered;
        let errors = BTreeMap::from([((504, "worker_timeout".to_owned()), late)]);
        assert_eq!(account, Account { answered: REQUESTS - late, errors, ..Account::default() });
        assert!(late >= bad.seen().len() && account.answered <= good.seen().len(), "{account:?}");
        assert!(bad.seen().len() + good.seen().len() <= REQUESTS, "a prompt never runs twice");
        assert_eq!(router.metric("router_retries_total").await, 0.0);
        assert!(router.metric("router_worker_breaker{worker=\"w0\"}").await > 0.0);
        account.matches_metrics(&router).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hangs_in_the_middle_of_streams() {
    let (bad, good) = (bad_worker([first_event(), vec![never()]].concat()).await, good_worker().await);
    let router = start(&[&bad, &good], &["--idle-timeout=200ms"]).await;
    let account = send(router.address, REQUESTS).await;
    let broken = BTreeMap::from([("worker_timeout".to_owned(), bad.seen().len())]);
    assert_eq!(account, Account { answered: good.seen().len(), broken, ..Account::default() });
    assert_eq!(account.answered + bad.seen().len(), REQUESTS);
    account.matches_metrics(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn closes_and_resets_before_the_first_byte() {
    let head = Act::Write(sse_head());
    for acts in [vec![Act::Close], vec![Act::Reset], vec![head.clone(), Act::Close], vec![head, Act::Reset]] {
        let (bad, good) = (bad_worker(acts).await, good_worker().await);
        let router = start(&[&bad, &good], &[]).await;
        let account = send(router.address, REQUESTS).await;
        assert_eq!(account, Account::all_answered(REQUESTS));
        assert_eq!(good.seen().len(), REQUESTS);
        assert_eq!(router.metric("router_retries_total").await, bad.seen().len() as f64);
        account.matches_metrics(&router).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resets_in_the_middle_of_streams() {
    let (bad, good) = (bad_worker([first_event(), vec![Act::Reset]].concat()).await, good_worker().await);
    let router = start(&[&bad, &good], &[]).await;
    let account = send(router.address, REQUESTS).await;
    // A reset may overtake the event before it; then nothing had come, and the request was saved.
    let broken: usize = account.broken.values().sum();
    assert!(account.errors.is_empty() && broken <= bad.seen().len() && !bad.seen().is_empty(), "{account:?}");
    assert_eq!(account.answered + broken, REQUESTS);
    account.matches_metrics(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_worker_answers_errors() {
    for status in [500, 502, 503, 504, 429] {
        let (bad, good) =
            (bad_worker(vec![Act::Write(json_reply(status, BROKEN))]).await, good_worker().await);
        let router = start(&[&bad, &good], &[]).await;
        let account = send(router.address, REQUESTS).await;
        assert_eq!(account, Account::all_answered(REQUESTS), "{status}");
        assert_eq!(router.metric("router_retries_total").await, bad.seen().len() as f64);
        let breaker = router.metric("router_worker_breaker{worker=\"w0\"}").await;
        assert_eq!(breaker > 0.0, status != 429, "{status}: load is no failure");
        account.matches_metrics(&router).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_answer_500_and_heal() {
    let well = Arc::new(AtomicBool::new(false));
    let script = |well: Arc<AtomicBool>| {
        move |_: &Seen| {
            let reply = if well.load(Ordering::SeqCst) { stream() } else { json_reply(500, BROKEN) };
            vec![Act::Write(reply)]
        }
    };
    let one = MockWorker::start(&["m"], script(Arc::clone(&well))).await;
    let two = MockWorker::start(&["m"], script(Arc::clone(&well))).await;
    let router = start(&[&one, &two], &[]).await;
    let sick = send(router.address, REQUESTS).await;
    let errors = BTreeMap::from([((500, "broken".to_owned()), REQUESTS)]);
    assert_eq!(sick, Account { errors, ..Account::default() }, "the workers' own answer");
    well.store(true, Ordering::SeqCst);
    let healed = send(router.address, REQUESTS).await;
    assert_eq!(healed, Account::all_answered(REQUESTS), "open breakers keep nobody waiting");
    sick.add(healed).matches_metrics(&router).await;
    until("the breakers are closed", || async {
        send(router.address, CLIENTS).await;
        let of = async |worker: &str| {
            router.metric(&format!("router_worker_breaker{{worker=\"{worker}\"}}")).await
        };
        of("w0").await + of("w1").await == 0.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_answer_429() {
    let busy = |seconds: u32| {
        let length = BUSY.len();
        format!("HTTP/1.1 429 X\r\nretry-after: {seconds}\r\ncontent-length: {length}\r\n\r\n{BUSY}")
            .into_bytes()
    };
    let one = MockWorker::answering(&["m"], busy(9)).await;
    let two = MockWorker::answering(&["m"], busy(7)).await;
    let router = start(&[&one, &two], &["--retry-budget=off"]).await;
    for _ in 0..REQUESTS / 10 {
        let reply = router.post(CHAT, &chat("x")).await;
        assert_eq!((reply.status, reply.header("retry-after"), reply.text().as_str()), (429, "7", BUSY));
    }
    let account = send(router.address, REQUESTS).await;
    assert_eq!(account.errors, BTreeMap::from([((429, "busy".to_owned()), REQUESTS)]));
    assert_eq!(router.metric("router_worker_breaker{worker=\"w0\"}").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_dead_and_back() {
    let (one, two) = (good_worker().await, good_worker().await);
    let addresses = [one.address, two.address];
    let router = start(&[&one, &two], &[]).await;
    one.kill().await;
    two.kill().await;
    // The first ones find out, and are told the same as the others.
    let dead = send(router.address, REQUESTS).await;
    let errors = BTreeMap::from([((503, "no_worker_available".to_owned()), REQUESTS)]);
    assert_eq!(dead, Account { errors, ..Account::default() });
    until("it is not ready", || async { router.get("/readyz").await.status == 503 }).await;
    let script = |_: &Seen| vec![Act::Write(stream())];
    let _one = MockWorker::start_at(addresses[0], &["m"], script).await;
    until("it is ready", || async { router.get("/readyz").await.status == 200 }).await;
    let _two = MockWorker::start_at(addresses[1], &["m"], script).await;
    let back = send(router.address, REQUESTS).await;
    assert_eq!(back, Account::all_answered(REQUESTS));
    dead.add(back).matches_metrics(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_flaps() {
    let (flapping, good) = (good_worker().await, good_worker().await);
    let address = flapping.address;
    let router = start(&[&flapping, &good], &["--slow-start=off"]).await;
    let done = Arc::new(AtomicUsize::new(0));
    let sending = tokio::spawn(send_counting(router.address, REQUESTS, Arc::clone(&done)));
    let mut listening = Some(flapping);
    for step in 1..8 {
        until("some more are done", || async { done.load(Ordering::SeqCst) >= step * REQUESTS / 8 }).await;
        listening = match listening {
            Some(worker) => {
                drop(worker);
                None
            }
            None => Some(MockWorker::start_at(address, &["m"], |_| vec![Act::Write(stream())]).await),
        };
    }
    let account = sending.await.unwrap();
    assert_eq!(account, Account::all_answered(REQUESTS));
    account.matches_metrics(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_get_everything() {
    // Far more than a client's socket holds at the size below.
    let long = "x".repeat(300_000);
    let reply = [sse_head(), chunk(&long), chunk(&long), b"0\r\n\r\n".to_vec()].concat();
    let worker = MockWorker::answering(&["m"], reply).await;
    let router = start(&[&worker], &[]).await;
    let address = router.address;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        clients.spawn(async move {
            for request in 0..REQUESTS / CLIENTS {
                let socket = TcpSocket::new_v4().unwrap();
                socket.set_recv_buffer_size(8 << 10).unwrap();
                let mut stream = socket.connect(address).await.unwrap();
                let body = chat(&format!("client {client}, request {request}"));
                stream.write_all(&request_bytes("POST", CHAT, &[], body.as_bytes())).await.unwrap();
                let (mut raw, mut sip) = (Vec::new(), [0; 4_000]);
                while !raw.ends_with(b"0\r\n\r\n") {
                    let count = stream.read(&mut sip).await.unwrap();
                    assert!(count > 0, "the stream ended early");
                    raw.extend_from_slice(&sip[..count]);
                    tokio::task::yield_now().await;
                }
                let body = &raw[find(&raw, b"\r\n\r\n").unwrap()..];
                assert_eq!(body.iter().filter(|byte| **byte == b'x').count(), 600_000);
            }
        });
    }
    clients.join_all().await;
    let name = "router_requests_total{endpoint=\"chat\",status=\"200\"}";
    until("all are recorded", || async { router.metric(name).await == REQUESTS as f64 }).await;
}

/// Clients that leave once `seen` has come to them; the worker must notice each of them.
async fn clients_leave(before: Vec<Act>, seen: &'static [u8]) {
    let _alone = MANY_CONNECTIONS.lock().await;
    let closed = Arc::new(AtomicUsize::new(0));
    let worker = bad_worker([before, vec![Act::CountWhenClosed(Arc::clone(&closed))]].concat()).await;
    let router = start(&[&worker], &[]).await;
    let address = router.address;
    let mut clients = JoinSet::new();
    for client in 0..REQUESTS {
        clients.spawn(async move {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let body = chat(&format!("client {client}"));
            stream.write_all(&request_bytes("POST", CHAT, &[], body.as_bytes())).await.unwrap();
            let mut raw = Vec::new();
            while find(&raw, seen).is_none() {
                assert!(stream.read_buf(&mut raw).await.unwrap() > 0);
            }
            stream
        });
    }
    let connections = clients.join_all().await;
    until("all wait at the worker", || async { worker.seen().len() == REQUESTS }).await;
    drop(connections);
    until("the worker has noticed all", || async { closed.load(Ordering::SeqCst) == REQUESTS }).await;
    let name = "router_requests_total{endpoint=\"chat\",status=\"499\"}";
    until("all are recorded", || async { router.metric(name).await == REQUESTS as f64 }).await;
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
    assert_eq!(router.metric("router_worker_requests_in_flight{worker=\"w0\"}").await, 0.0);
    assert_eq!(router.metric("router_worker_breaker{worker=\"w0\"}").await, 0.0, "no fault of the worker's");
    assert_eq!(router.metric("router_errors_total{blame=\"client\"}").await, REQUESTS as f64);
    assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_leave_before_the_head() {
    clients_leave(Vec::new(), b"").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_leave_streams() {
    clients_leave(first_event(), b"data: ").await;
}

/// The beginning of a document of `length` bytes.
fn first_of_document(length: usize) -> Vec<Act> {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{{\"some\":"
    );
    vec![Act::Write(head.into_bytes())]
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_leave_documents_that_come_as_they_are() {
    clients_leave(first_of_document(500_000), b"{\"some\":").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_leave_documents_that_are_not_whole_yet() {
    clients_leave(first_of_document(500), b"").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_under_load() {
    let go_on = Arc::new(Notify::new());
    let held = Arc::clone(&go_on);
    let draining = MockWorker::start(&["m"], move |seen| {
        if find(&seen.body, b"hold").is_none() {
            return vec![Act::Write(stream())];
        }
        let end = sse_reply(&EVENTS)[sse_head().len()..].to_vec();
        vec![Act::Write(sse_head()), Act::Wait(Arc::clone(&held)), Act::Write(end)]
    })
    .await;
    let other = good_worker().await;
    let router = start(&[&draining, &other], &[]).await;
    let address = router.address;
    // One of two in a row is held at the worker to be drained.
    let mut streams = JoinSet::new();
    for _ in 0..2 {
        streams.spawn(async move { exchange(address, "POST", CHAT, &[], chat("hold").as_bytes()).await });
    }
    until("both are on their way", || async { draining.seen().len() == 1 && other.seen().len() == 1 }).await;
    let done = Arc::new(AtomicUsize::new(0));
    let sending = tokio::spawn(send_counting(address, REQUESTS, Arc::clone(&done)));
    until("half are done", || async { done.load(Ordering::SeqCst) >= REQUESTS / 2 }).await;
    let reply = router.admin("POST", "/workers/w0/drain", "").await;
    assert_eq!((reply.status, &reply.json()["draining"]), (200, &true.into()));
    assert_eq!(sending.await.unwrap(), Account::all_answered(REQUESTS));
    let state = async || router.admin("GET", "/workers", "").await.json()["workers"][0].clone();
    until("only the held stream is left", || async { state().await["requests_in_flight"] == 1 }).await;
    let before = draining.seen().len();
    assert_eq!(send(address, CLIENTS).await, Account::all_answered(CLIENTS));
    assert_eq!(draining.seen().len(), before, "no new work");
    assert_eq!(router.metric("router_worker_draining{worker=\"w0\"}").await, 1.0);
    go_on.notify_one();
    let mut account = Account::default();
    streams.join_all().await.iter().for_each(|reply| account.enter(reply));
    assert_eq!(account, Account::all_answered(2), "streams finish");
    until("it is drained", || async { state().await["requests_in_flight"] == 0 }).await;
    Account::all_answered(REQUESTS + CLIENTS + 2).matches_metrics(&router).await;
    assert_eq!(router.admin("POST", "/workers/w0/undrain", "").await.status, 200);
    assert_eq!(send(address, CLIENTS).await, Account::all_answered(CLIENTS));
    assert!(draining.seen().len() > before);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_drained() {
    let worker = good_worker().await;
    let router = start(&[&worker], &[]).await;
    router.admin("POST", "/workers/w0/drain", "").await;
    let account = send(router.address, REQUESTS).await;
    assert_eq!(account.errors, BTreeMap::from([((503, "no_worker_available".to_owned()), REQUESTS)]));
    assert_eq!(router.get("/readyz").await.status, 503);
    for (path, expected) in [("/workers/w7/drain", "w0"), ("/workers/w0/stop", "undrain")] {
        let reply = router.admin("POST", path, "").await;
        assert!(reply.status == 404 && reply.error().0.contains(expected), "{}", reply.text());
    }
}
