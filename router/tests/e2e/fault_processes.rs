//! Real processes: the router's program in front of workers that are killed with SIGKILL.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use crate::fault_suite::{Account, send};
use crate::harness::*;

/// Tells this test program, started once more, to be a worker on that port.
const WORKER_PORT: &str = "ROUNDHOUSE_TEST_WORKER_PORT";

/// No test, but the program of the workers below: the one test program there is, told to run this alone.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "is the worker process of the tests beside it"]
async fn worker_process() {
    let Ok(port) = std::env::var(WORKER_PORT) else { return };
    let address = SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()));
    let reply = sse_reply(&[r#"{"n":1}"#, r#"{"n":2}"#]);
    let worker = MockWorker::start_at(address, &["m"], move |_| vec![Act::Write(reply.clone())]).await;
    println!("listening on http://{}", worker.address);
    // Ends with the test, however that ends.
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    ended.await.unwrap().unwrap();
}

/// A process that ends with the test.
struct Process {
    child: Child,
    /// Addresses it said it listens on, in order.
    addresses: Vec<SocketAddr>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL; it may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts `command` and waits until it has named `count` addresses.
    async fn start(mut command: Command, count: usize) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let reading = tokio::task::spawn_blocking(move || {
            let mut addresses = Vec::new();
            while addresses.len() < count {
                let line = lines.next().expect("it named its addresses before it ended").unwrap();
                let after = line.split(" http://").nth(1).unwrap_or_default();
                addresses
                    .extend(after.split(['/', ' ']).next().and_then(|text| text.parse::<SocketAddr>().ok()));
            }
            // Goes on reading, so that the process never waits for us.
            std::thread::spawn(move || lines.for_each(drop));
            addresses
        });
        let addresses =
            tokio::time::timeout(LIMIT, reading).await.expect("it said where it listens").unwrap();
        Self { child, addresses }
    }

    async fn worker(port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "fault_processes::worker_process", "--ignored", "--nocapture"]);
        command.env(WORKER_PORT, port.to_string());
        Self::start(command, 1).await
    }

    async fn router(workers: &[&Self]) -> Self {
        let list: Vec<_> = workers.iter().map(|worker| worker.addresses[0].to_string()).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_router"));
        command.args(["--port=0", "--threads=2", "--policy=round_robin", "--slow-start=off", "--workers"]);
        command.arg(list.join(","));
        // Its own, those of the workers, and the admin listener's.
        Self::start(command, workers.len() + 2).await
    }
}

async fn up(admin: SocketAddr) -> Vec<bool> {
    let listed = exchange(admin, "GET", "/workers", &[], b"").await.json();
    listed["workers"].as_array().unwrap().iter().map(|worker| worker["up"] == true).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_are_killed_and_come_back_cost_nobody_an_answer() {
    let mut workers = [Process::worker(0).await, Process::worker(0).await];
    let router = Process::router(&[&workers[0], &workers[1]]).await;
    let (clients, admin) = (router.addresses[0], *router.addresses.last().unwrap());
    until("both are up", || async { up(admin).await == [true, true] }).await;
    let mut account = Account::default();
    for killed in [0, 1, 0] {
        let port = workers[killed].addresses[0].port();
        let sending = tokio::spawn(send(clients, 200));
        // While requests are on their way, or before, or after: all must be answered.
        workers[killed].child.kill().unwrap();
        account = account.add(sending.await.unwrap());
        account = account.add(send(clients, 200).await);
        until("it is out", || async { !up(admin).await[killed] }).await;
        workers[killed] = Process::worker(port).await;
        until("it is back", || async { up(admin).await[killed] }).await;
    }
    let broken: usize = account.broken.values().sum();
    assert!(account.errors.is_empty(), "{account:?}");
    assert_eq!(account.answered + broken, 1_200, "{account:?}");
    // Only what had its first byte when its worker was killed may break: one for each client and kill at most.
    assert!(broken <= 24, "{account:?}");
    let text = exchange(admin, "GET", "/metrics", &[], b"").await.text();
    assert!(text.contains("router_requests_total{endpoint=\"chat\",status=\"200\"} 1200"), "{text}");
}
