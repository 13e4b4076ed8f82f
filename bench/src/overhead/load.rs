//! The tasks that send, and the closed loop that asks as fast as answers come.
//!
//! Knows nothing of what is measured meanwhile. Next on the path: [`super::connection`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use tokio::task::JoinSet;

use super::connection::{Connection, ExchangeError};
use super::tally::Tally;
use super::workload::Workload;

/// How long the last answers may take after the load has ended.
pub const LAST_ANSWER: Duration = Duration::from_secs(30);
/// Pause after a connection that could not be made.
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);

/// Tasks that send until they are told to stop or have sent what they were to send.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
    tally: Arc<Tally>,
    first_seed: u64,
}

/// What every task of a load needs.
#[derive(Debug, Clone)]
pub struct Lane {
    /// Where it connects.
    pub address: SocketAddr,
    /// What it asks for.
    pub workload: Arc<Workload>,
    /// Where it counts.
    pub tally: Arc<Tally>,
    /// Set when it is to end.
    pub stop: Arc<AtomicBool>,
}

impl Load {
    /// A load without tasks, counted in `tally`.
    pub fn new(tally: &Arc<Tally>) -> Self {
        Self::seeded(tally, 0)
    }

    /// The same, whose tasks draw from seeds that begin with this one.
    pub fn seeded(tally: &Arc<Tally>, first_seed: u64) -> Self {
        Self { stop: Arc::default(), tasks: JoinSet::new(), tally: Arc::clone(tally), first_seed }
    }

    /// Starts `connections` tasks, spread over the addresses in turn.
    pub fn spawn<F>(
        &mut self,
        connections: usize,
        addresses: &[SocketAddr],
        workload: &Arc<Workload>,
        task: impl Fn(Lane, Xoshiro256PlusPlus) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        for number in 0..connections {
            let lane = Lane {
                address: addresses[number % addresses.len()],
                workload: Arc::clone(workload),
                tally: Arc::clone(&self.tally),
                stop: Arc::clone(&self.stop),
            };
            let seed = self.first_seed + number as u64;
            self.tasks.spawn(task(lane, Xoshiro256PlusPlus::seed_from_u64(seed)));
        }
    }

    /// Tells the tasks to stop and waits for the last answers.
    pub async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.finish(LAST_ANSWER).await;
    }

    /// Waits until every task is through; those that are not in time count as errors.
    pub async fn finish(mut self, limit: Duration) {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(limit, all).await.is_err() {
            for _ in 0..self.tasks.len() {
                self.tally.add_error(&format!("no answer within {} s", limit.as_secs_f64()));
            }
        }
    }
}

impl Lane {
    /// Whether the load has ended.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Asks again as soon as the answer is there, at most `requests` times.
    pub async fn closed_loop(self, requests: u64, mut rng: Xoshiro256PlusPlus) {
        let mut connection = None;
        for _ in 0..requests {
            if self.is_stopped() {
                return;
            }
            match self.ask(&mut connection, &mut rng).await {
                Ok(()) => {
                    self.tally.add_request();
                }
                Err(error) => self.fail(&error).await,
            }
        }
    }

    /// Counts an error, and pauses after one that would come again at once.
    pub async fn fail(&self, error: &ExchangeError) {
        self.tally.add_error(error);
        if matches!(error, ExchangeError::Connect(_)) {
            tokio::time::sleep(RECONNECT_PAUSE).await;
        }
    }

    /// One request over the connection, which is opened when there is none and dropped when it is of no more use.
    async fn ask(
        &self,
        kept: &mut Option<Connection>,
        rng: &mut Xoshiro256PlusPlus,
    ) -> Result<(), ExchangeError> {
        let draft = self.workload.draft(rng);
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => Connection::open(self.address).await?,
        };
        connection.exchange(self.workload.pieces(&draft)).await?;
        *kept = (!connection.closes()).then_some(connection);
        Ok(())
    }
}
