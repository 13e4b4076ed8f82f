//! A file of keys, read again when it changes.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::{ArcSwap, Guard};

use super::KeySet;

/// Between two looks at a file: a key that was taken away works for so much longer.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What tells a changed file from an unchanged one: when it was written, its size, and which file it is.
type Stamp = Option<(SystemTime, u64, u64)>;

/// A file of keys.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    keys: ArcSwap<KeySet>,
    /// Of the content that was read last, good or bad.
    stamp: Mutex<Stamp>,
}

impl KeyFile {
    /// Reads the keys at `path`, one a line; lines that begin with `#` say nothing.
    ///
    /// # Errors
    /// What is wrong with the file; it names no key.
    pub fn open(path: &Path) -> Result<Self, String> {
        // Before it is read: a change in between is found at the next look.
        let stamp = stamp(path);
        let keys = read(path).map_err(|error| format!("{} {error}", path.display()))?;
        Ok(Self { path: path.to_owned(), keys: ArcSwap::from_pointee(keys), stamp: Mutex::new(stamp) })
    }

    /// The keys as they are now.
    pub(super) fn keys(&self) -> Guard<Arc<KeySet>> {
        self.keys.load()
    }

    /// Looks at the file from time to time, until nobody holds its keys.
    pub(super) async fn keep_fresh(file: Weak<Self>) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let Some(file) = file.upgrade() else { return };
            // A file may lie on a disk that is slow to answer.
            if let Err(error) = tokio::task::spawn_blocking(move || file.look()).await {
                tracing::error!(%error, "the file of keys cannot be looked at");
                return;
            }
        }
    }

    /// Reads the file again if it has changed. A bad one leaves the keys as they are.
    fn look(&self) {
        let now = stamp(&self.path);
        let before = std::mem::replace(&mut *self.stamp.lock().unwrap_or_else(PoisonError::into_inner), now);
        if now == before {
            return;
        }
        let file = self.path.display();
        match read(&self.path) {
            Ok(keys) => {
                tracing::info!(%file, keys = keys.hashes.len(), "keys have changed");
                self.keys.store(Arc::new(keys));
            }
            Err(error) => tracing::error!(%file, error, "keys cannot be read; those before stay valid"),
        }
    }
}

fn read(path: &Path) -> Result<KeySet, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"))?;
    KeySet::parse(&text)
}

fn stamp(path: &Path) -> Stamp {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
}
