//! `--prefix-state-file`: what this router knows of the workers' caches, left to the one that takes its place.
//!
//! Written once nobody is served any more, and read, and removed, when a router starts; engines go on with their caches meanwhile. The file has the
//! seed of the hashes, so that they mean the same, and hashes of blocks of prompts, no text; only its owner may read it. Workers are known again
//! by their address and data-parallel rank, and get what they held when they join the fleet. What was evicted, or lost with an engine that has restarted
//! meanwhile, shows as any wrong prediction does. Used by [`App`](crate::app::App) and the [fleet](crate::fleet).

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use roundhouse_types::BlockHash;
use router_core::prefix::tree::{KeptBlock, KeptBlocks, OutOfOrder};
use router_core::{Decider, Worker, WorkerSpec};
use serde::{Deserialize, Serialize};

/// The form of the file. Another one is not read.
const VERSION: u32 = 1;
/// Older than this, a file says little of what is cached.
const MOST_AGE: Duration = Duration::from_secs(600);
/// Workers that join later than this after the start have been somewhere else meanwhile.
const JOIN_WITHIN: Duration = Duration::from_secs(60);

/// What is in the file, in msgpack.
#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    /// Seconds since 1970.
    written: u64,
    seed: u64,
    /// Hash, number of the parent plus 1 or 0 for none, size.
    blocks: Vec<(u64, u32, u32)>,
    /// By worker, the ends of its paths, the one that was used longest ago first.
    workers: HashMap<String, Vec<u32>>,
}

/// Why there is nothing to go on with.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("it cannot be understood: {0}")]
    Decode(#[from] rmp_serde::decode::Error),
    #[error("it cannot be written: {0}")]
    Encode(#[from] rmp_serde::encode::Error),
    #[error("it cannot be understood: {0}")]
    OutOfOrder(#[from] OutOfOrder),
    #[error("it is of version {0}, and this router reads {VERSION}")]
    Version(u32),
    #[error("it was written {} s ago", .0.as_secs())]
    Old(Duration),
    #[error("its hashes have another seed than --prefix-seed-file")]
    Seed,
}

/// What the router before this one knew.
pub struct Legacy {
    seed: u64,
    since: Instant,
    /// Until all workers have joined, or it is too late for that.
    estate: Mutex<Option<Estate>>,
}

/// What there is to give.
struct Estate {
    blocks: Arc<KeptBlocks>,
    /// Of workers that have not joined yet.
    workers: HashMap<String, Vec<u32>>,
}

impl Legacy {
    /// Reads the file and removes it; `None` if there is none, or none that could be used with `seed`, which may be any if that is `None`.
    #[must_use]
    pub fn take(path: &Path, seed: Option<u64>) -> Option<Self> {
        match Self::read(path, seed) {
            Ok(legacy) => {
                if let Some(Estate { blocks, workers }) = &*legacy.estate() {
                    let (workers, blocks) = (workers.len(), blocks.blocks().len());
                    tracing::info!(workers, blocks, "prefixes taken over");
                }
                Some(legacy)
            }
            Err(Unusable::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(reason) => {
                tracing::warn!(file = %path.display(), %reason, "prefixes are not taken over");
                None
            }
        }
    }

    fn read(path: &Path, seed: Option<u64>) -> Result<Self, Unusable> {
        let bytes = fs::read(path)?;
        // Whatever becomes of this router, the next one is not to believe it.
        fs::remove_file(path)?;
        let File { version, written, seed: theirs, blocks, workers } = rmp_serde::from_slice(&bytes)?;
        if version != VERSION {
            return Err(Unusable::Version(version));
        }
        let age = Duration::from_secs(now().saturating_sub(written));
        if age > MOST_AGE {
            return Err(Unusable::Old(age));
        }
        if seed.is_some_and(|seed| seed != theirs) {
            return Err(Unusable::Seed);
        }
        let block = |(hash, parent, size): (u64, u32, u32)| KeptBlock {
            hash: BlockHash(hash),
            parent: parent.checked_sub(1),
            size,
        };
        let blocks = Arc::new(KeptBlocks::of(blocks.into_iter().map(block).collect())?);
        let estate = Mutex::new(Some(Estate { blocks, workers }));
        Ok(Self { seed: theirs, since: Instant::now(), estate })
    }

    fn estate(&self) -> MutexGuard<'_, Option<Estate>> {
        self.estate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of the hashes.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// `worker` has joined: what it held is entered, by a thread that serves nobody.
    pub fn give(&self, worker: &Arc<Worker>, decider: &Arc<Decider>) {
        let mut estate = self.estate();
        let Some(Estate { blocks, workers }) = &mut *estate else { return };
        let ends = name(&worker.spec).and_then(|name| workers.remove(&name));
        let blocks = Arc::clone(blocks);
        if workers.is_empty() || self.since.elapsed() > JOIN_WITHIN {
            *estate = None;
        }
        let Some(ends) = ends.filter(|_| self.since.elapsed() <= JOIN_WITHIN) else { return };
        let (worker, decider) = (Arc::clone(worker), Arc::clone(decider));
        tokio::task::spawn_blocking(move || decider.put_back(&worker, &blocks, &ends));
    }
}

/// Writes what `decider` knows of `workers` for the next router.
pub fn leave(path: &Path, seed: u64, workers: &[Arc<Worker>], decider: &Decider) {
    match write(path, seed, workers, decider) {
        Ok(blocks) => tracing::info!(file = %path.display(), blocks, "prefixes left for the next router"),
        Err(reason) => {
            tracing::warn!(file = %path.display(), %reason, "prefixes could not be left for the next router");
        }
    }
}

fn write(path: &Path, seed: u64, workers: &[Arc<Worker>], decider: &Decider) -> Result<usize, Unusable> {
    let mut kept = KeptBlocks::default();
    let ends = |worker: &Arc<Worker>| Some((name(&worker.spec)?, decider.keep(worker, &mut kept)));
    let workers = workers.iter().filter_map(ends).collect();
    let block = |block: &KeptBlock| (block.hash.0, block.parent.map_or(0, |parent| parent + 1), block.size);
    let blocks: Vec<_> = kept.blocks().iter().map(block).collect();
    let count = blocks.len();
    let bytes = rmp_serde::to_vec(&File { version: VERSION, written: now(), seed, blocks, workers })?;
    // Not in its place before all of it is there.
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let _ = fs::remove_file(&beside);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    file.write_all(&bytes)?;
    fs::rename(&beside, path)?;
    Ok(count)
}

/// How a worker is known again; `None` for one whose cache ends with this process.
fn name(spec: &WorkerSpec) -> Option<String> {
    let rank = spec.dp_rank.map(|rank| rank.number);
    (!spec.address.starts_with("embedded:")).then(|| format!("{}#{rank:?}", spec.address))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use router_core::policy::by_name;
    use router_core::prefix::tree::TreeLimits;
    use router_core::{Among, Fleet, RequestView, WorkerId};

    use super::*;

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("roundhouse-legacy-{}-{name}", std::process::id()))
    }

    /// A decider, and a worker at that address that holds a prompt, if one is given.
    fn decider(address: &str, prompt: &[BlockHash]) -> (Arc<Decider>, Arc<Worker>) {
        let policy = by_name("prefix_aware").unwrap();
        let decider = Arc::new(Decider::new(policy, TreeLimits::within_bytes(1 << 20), 1));
        let mut fleet = Fleet::default();
        let spec = WorkerSpec::new(WorkerId::new("w"), address.to_owned());
        let worker = fleet.reconcile(&[spec]).added.remove(0);
        worker.mark_up();
        if !prompt.is_empty() {
            let request = RequestView { blocks: prompt, prompt_bytes: 999, ..RequestView::default() };
            let among = Among::Untried(&[]);
            drop(decider.decide(&fleet.snapshot(), &request, among, Duration::ZERO).unwrap());
        }
        (decider, worker)
    }

    const PROMPT: [BlockHash; 3] = [BlockHash(1), BlockHash(2), BlockHash(3)];

    #[tokio::test]
    async fn the_next_router_knows_what_this_one_knew() {
        use std::os::unix::fs::PermissionsExt as _;
        let path = file("knows");
        let (old, worker) = decider("http://w:1", &PROMPT);
        leave(&path, 7, &[worker], &old);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let legacy = Legacy::take(&path, None).unwrap();
        assert_eq!(legacy.seed(), 7);
        assert!(!path.exists(), "a second router would believe what is old by then");
        let (new, worker) = decider("http://w:1", &[]);
        legacy.give(&worker, &new);
        while new.tree_blocks() < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (other, stranger) = decider("http://w:2", &[]);
        legacy.give(&stranger, &other);
        assert!(legacy.estate().is_none(), "all has been given");
        assert_eq!(other.tree_blocks(), 0);
    }

    #[test]
    fn what_cannot_be_used_is_not_and_is_removed() {
        let path = file("not");
        assert!(Legacy::take(&path, None).is_none(), "there is none");
        let (old, worker) = decider("http://w:1", &PROMPT);
        let with = |change: fn(&mut File), seed| {
            leave(&path, 7, std::slice::from_ref(&worker), &old);
            let mut file: File = rmp_serde::from_slice(&fs::read(&path).unwrap()).unwrap();
            change(&mut file);
            fs::write(&path, rmp_serde::to_vec(&file).unwrap()).unwrap();
            let error = Legacy::read(&path, seed).err().map(|error| error.to_string());
            assert!(!path.exists());
            error.unwrap_or_default()
        };
        assert_eq!(with(|_| {}, Some(7)), "");
        assert!(with(|_| {}, Some(8)).contains("--prefix-seed-file"));
        assert!(with(|file| file.version = 2, None).contains("version 2"));
        assert!(with(|file| file.written -= 700, None).contains("700 s ago"));
        assert!(with(|file| file.blocks[0].1 = 9, None).contains("before its parent"));
        fs::write(&path, b"?").unwrap();
        assert!(Legacy::take(&path, None).is_none());
        // Ends that there are no blocks for are none.
        assert_eq!(with(|file| file.workers.values_mut().for_each(|ends| ends.push(99)), None), "");
    }
}
