//! Mock workers in processes of their own, so that they can be killed as real ones are.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

use crate::overhead::machine::Core;

/// One process a port.
#[derive(Debug)]
pub struct MockProcesses {
    core: Core,
    mocks: Vec<Mock>,
    kills: u64,
}

#[derive(Debug)]
struct Mock {
    port: u16,
    /// `None` while it is away.
    child: Option<Child>,
    back_at: Duration,
}

impl MockProcesses {
    /// Starts a worker at each port.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub fn start(ports: &[u16], core: Core) -> anyhow::Result<Self> {
        let mock =
            |port: &u16| Ok(Mock { port: *port, child: Some(spawn(*port, core)?), back_at: Duration::ZERO });
        let mocks = ports.iter().map(mock).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self { core, mocks, kills: 0 })
    }

    /// Where they are.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.mocks.iter().map(|mock| format!("http://127.0.0.1:{}", mock.port)).collect()
    }

    /// How many have been killed.
    #[must_use]
    pub fn kills(&self) -> u64 {
        self.kills
    }

    /// Kills the next one when it is time, and brings back who has been away for `down`. Whether all are killed whose time
    /// has come: at most one is at once.
    ///
    /// # Errors
    /// A process cannot be started or killed.
    pub fn keep(&mut self, now: Duration, kill_every: Duration, down: Duration) -> anyhow::Result<bool> {
        for mock in &mut self.mocks {
            if mock.child.is_none() && now >= mock.back_at {
                mock.child = Some(spawn(mock.port, self.core)?);
            }
        }
        let due = now.as_secs() / kill_every.as_secs();
        if self.kills < due {
            let victim = usize::try_from(self.kills).unwrap_or(0) % self.mocks.len();
            let mock = &mut self.mocks[victim];
            if let Some(mut child) = mock.child.take() {
                child.kill()?;
                child.wait()?;
            }
            mock.back_at = now + down;
            self.kills += 1;
        }
        Ok(self.kills == due)
    }
}

impl Drop for MockProcesses {
    fn drop(&mut self) {
        for child in self.mocks.iter_mut().filter_map(|mock| mock.child.as_mut()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(port: u16, core: Core) -> anyhow::Result<Child> {
    let program = std::env::current_exe()?;
    Command::new(program)
        .args(["overhead", "--mocks-only", "--waiting", "sleep"])
        .args(["--mock-ports", &port.to_string(), "--core", &core.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start a mock worker")
}
