//! The router under test: started here, or found by the number of its process, and waited for until it answers.
//!
//! Next on the path: [`super::rig`].

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rustix::process::{Pid, Signal, kill_process_group};

use super::connection::Connection;
use super::machine::{Core, pin_to};
use super::rig::Rig;
use super::workload::Workload;

/// Pause between two questions whether the router is there.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Pause between two requests that look for the other workers: a policy that remembers prompts is to remember few of ours.
const ASK_NEXT: Duration = Duration::from_millis(10);
/// How long requests go on after the first good one, so that a router finds all its workers.
const ALL_SEEN: Duration = Duration::from_secs(2);
/// How long one question may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long the router may take to end before it is killed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A router that was started here and ends with this value.
#[derive(Debug)]
pub struct Launched {
    child: Child,
}

impl Launched {
    /// Starts a command on a core of its own. `{workers}` becomes the workers' URLs with commas, `{worker_list}` with
    /// spaces; the rest is the shell's.
    ///
    /// # Errors
    /// The command cannot be started, or its log not be written.
    pub fn start(
        command: &str,
        workers: &[String],
        cores: Cores,
        log: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let command =
            command.replace("{workers}", &workers.join(",")).replace("{worker_list}", &workers.join(" "));
        let (out, err) = match log {
            Some(path) => {
                let file = File::create(path).with_context(|| format!("--router-log {}", path.display()))?;
                (Stdio::from(file.try_clone()?), Stdio::from(file))
            }
            None => (Stdio::null(), Stdio::null()),
        };
        // A child keeps the core of the thread that starts it.
        pin_to(cores.router).context("--router-core")?;
        let child = Command::new("sh")
            .args(["-c", &format!("exec {command}")])
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .process_group(0)
            .spawn();
        pin_to(cores.bench).context("--core")?;
        Ok(Self { child: child.with_context(|| format!("--command {command}"))? })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("the router has ended ({status}); --router-log FILE keeps what it says"),
            None => Ok(()),
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else { return };
        let _ = kill_process_group(group, Signal::TERM);
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < END_LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
        // Also what a launcher left behind.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Who runs where.
#[derive(Debug, Clone, Copy)]
pub struct Cores {
    /// Generator and mocks.
    pub bench: Core,
    /// The router, if it is started here.
    pub router: Core,
}

/// Waits until the router answers, then until every mock was asked, though not for long: some policies prefer one.
///
/// # Errors
/// The router has ended, or does not answer within the limit; the last error says why.
pub async fn wait_until_ready(
    rig: &Rig,
    mut launched: Option<&mut Launched>,
    limit: Duration,
) -> anyhow::Result<()> {
    let workload = rig.strangers()?;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
    let (start, mut ready_since) = (Instant::now(), None::<Instant>);
    loop {
        if let Some(launched) = launched.as_deref_mut() {
            launched.check()?;
        }
        match ask(rig, &workload, &mut rng).await {
            Ok(()) => {
                let since = *ready_since.get_or_insert_with(Instant::now);
                let all_seen = rig.mocks.counts().iter().all(|counts| counts.requests > 0);
                if all_seen || since.elapsed() > ALL_SEEN {
                    return Ok(());
                }
            }
            Err(error) if start.elapsed() > limit => {
                return Err(error.context(format!(
                    "the router at {} did not answer a chat request within {} s (--wait)",
                    rig.authority,
                    limit.as_secs_f64()
                )));
            }
            Err(_) => ready_since = None,
        }
        tokio::time::sleep(if ready_since.is_some() { ASK_NEXT } else { ASK_AGAIN }).await;
    }
}

async fn ask(rig: &Rig, workload: &Workload, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<()> {
    let draft = workload.draft(rng);
    let exchange = async {
        let mut connection = Connection::open(rig.addresses[0]).await?;
        connection.exchange(workload.pieces(&draft)).await
    };
    Ok(tokio::time::timeout(ANSWER_LIMIT, exchange).await.context("no answer")??)
}

/// Waits for a file with the number of a process in it.
///
/// # Errors
/// No such file within the limit.
pub async fn read_pid_file(path: &Path, limit: Duration) -> anyhow::Result<u32> {
    let start = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if let Ok(pid) = text.trim().parse() {
            return Ok(pid);
        }
        if start.elapsed() > limit {
            bail!("--pid-file {}: no process number in it within {} s", path.display(), limit.as_secs_f64());
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}
