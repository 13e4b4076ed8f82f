//! What stands in other files than the configuration's own: keys and certificates.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use rustls::pki_types::CertificateDer;
use xxhash_rust::xxh3::xxh3_64;

use super::Settings;
use crate::keys::{KeyFile, Keys, WorkerKeys};
use crate::transport::read_certificates;

/// Fewer could be guessed by somebody who wants to aim for collisions.
const LEAST_SEED_BYTES: usize = 16;
/// Stands before the seed where it is a key.
const REPLICA_KEY: &[u8] = b"roundhouse replicas";

/// What the files hold that the knobs name.
pub(super) struct Files {
    pub(super) keys: Keys,
    pub(super) worker_keys: WorkerKeys,
    pub(super) worker_authorities: Vec<CertificateDer<'static>>,
    pub(super) prefix_seed: Option<u64>,
    pub(super) replica_key: Option<[u8; 32]>,
}

impl Files {
    /// Reads all of them; what is wrong goes to `errors`.
    pub(super) fn open(settings: &Settings, errors: &mut Vec<String>) -> Self {
        let key_file = |path: &Path| KeyFile::open(path).map(Arc::new);
        let certificates = |path: &Path| {
            let pem = std::fs::read(path).map_err(|error| format!("cannot be read: {error}"));
            let found = pem.and_then(|pem| read_certificates(&pem));
            found.map_err(|error| format!("{} {error}", path.display()))
        };
        let keys = Keys {
            clients: read("api-key-file", settings.api_key_file.as_ref(), errors, key_file),
            admins: read("admin-key-file", settings.admin_key_file.as_ref(), errors, key_file),
        };
        let of_workers = settings.worker_api_key_file.as_ref();
        let worker_keys = read("worker-api-key-file", of_workers, errors, WorkerKeys::open);
        let seeds = read("prefix-seed-file", settings.prefix_seed_file.as_ref(), errors, seeds);
        let (prefix_seed, replica_key) = seeds.unzip();
        let worker_authorities = read("worker-ca", settings.worker_ca.as_ref(), errors, certificates);
        Self {
            keys,
            worker_keys: worker_keys.unwrap_or_default(),
            worker_authorities: worker_authorities.unwrap_or_default(),
            prefix_seed,
            replica_key,
        }
    }
}

/// What is in the file, as a seed of hashes, and as a key by which routers know each other; neither tells the other. White space around it does not
/// count.
fn seeds(path: &Path) -> Result<(u64, [u8; 32]), String> {
    let read = std::fs::read(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    match read.trim_ascii() {
        text if text.len() < LEAST_SEED_BYTES => Err(format!(
            "{} has {} bytes; give {LEAST_SEED_BYTES} random ones or more",
            path.display(),
            text.len()
        )),
        text => {
            let mut key = [0; 32];
            key.copy_from_slice(digest(&SHA256, &[REPLICA_KEY, text].concat()).as_ref());
            Ok((xxh3_64(text), key))
        }
    }
}

fn read<T>(
    name: &str,
    path: Option<&PathBuf>,
    errors: &mut Vec<String>,
    open: impl FnOnce(&Path) -> Result<T, String>,
) -> Option<T> {
    let opened = open(path?);
    opened.map_err(|error| errors.push(format!("{name}: {error}"))).ok()
}
