//! API keys: who may come in, and what the router shows its workers.
//!
//! Of the keys that clients and operators must have, only hashes are kept. A request is compared with all of them in
//! constant time, so that an answer's delay tells nothing. Knows no statuses: see [`error`](crate::error).

pub mod allowances;
mod file;
mod terms;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, header};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use router_core::{Priority, WorkerId, WorkerSpec};

pub use file::KeyFile;
pub use terms::{KeyLimits, Terms};

use self::terms::FORM;

use crate::routes::Endpoint;

/// In which Anthropic's clients send their key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Why a request may not come in. Never says the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unauthorized {
    /// It has no `authorization` header and no `x-api-key`, or several.
    #[error("no API key; send one as \"Authorization: Bearer KEY\" or \"x-api-key: KEY\"")]
    Missing,
    /// The header has another form.
    #[error("the authorization header is not of the form \"Bearer KEY\"")]
    Malformed,
    /// The key is none of those allowed.
    #[error("the API key is not known to this router")]
    Unknown,
}

/// The keys that requests must have.
#[derive(Clone, Default, Debug)]
pub struct Keys {
    /// Of clients; without, everybody may come in.
    pub clients: Option<Arc<KeyFile>>,
    /// Of operators.
    pub admins: Option<Arc<KeyFile>>,
}

impl Keys {
    /// Whether a client's request for `endpoint` may come in, and as what; `None` where no keys are wanted. Takes a key that was checked out of
    /// `headers`: it is the router's, and no worker's.
    ///
    /// # Errors
    /// When keys are wanted and the request has none of them; the probes' endpoints want none.
    pub fn authorize(
        &self,
        endpoint: Endpoint,
        headers: &mut HeaderMap,
    ) -> Result<Option<Grant>, Unauthorized> {
        let Some(clients) = &self.clients else { return Ok(None) };
        if matches!(endpoint, Endpoint::Live | Endpoint::Ready) {
            return Ok(None);
        }
        let grant = clients.check(headers)?;
        // The other header, if it is there, is for the engine.
        if headers.remove(header::AUTHORIZATION).is_none_or(|given| bearer(given.as_bytes()).is_none()) {
            headers.remove(X_API_KEY);
        }
        Ok(Some(grant))
    }

    /// Whether an operator's request may come in.
    ///
    /// # Errors
    /// When keys are wanted and the request has none of them.
    pub fn authorize_admin(&self, headers: &HeaderMap) -> Result<(), Unauthorized> {
        self.admins.as_ref().map_or(Ok(()), |admins| admins.check(headers).map(drop))
    }

    /// Starts to read files again when they change. Must be called within a tokio runtime; the tasks end with the keys.
    pub fn keep_fresh(&self) {
        for file in [&self.clients, &self.admins].into_iter().flatten() {
            tokio::spawn(KeyFile::keep_fresh(Arc::downgrade(file)));
        }
    }
}

impl KeyFile {
    fn check(&self, headers: &HeaderMap) -> Result<Grant, Unauthorized> {
        let given = only(headers, &header::AUTHORIZATION)?;
        let key = match given.and_then(bearer) {
            Some(key) => key,
            None if given.is_some() => only(headers, &X_API_KEY)?.ok_or(Unauthorized::Malformed)?,
            None => only(headers, &X_API_KEY)?.ok_or(Unauthorized::Missing)?,
        };
        self.keys().grant(key).ok_or(Unauthorized::Unknown)
    }
}

/// The value of a header that is there once at most.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a [u8]>, Unauthorized> {
    let mut given = headers.get_all(name).iter();
    let first = given.next().map(HeaderValue::as_bytes);
    if given.next().is_some() { Err(Unauthorized::Missing) } else { Ok(first) }
}

/// The key of `Bearer KEY`; the scheme's case does not matter.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("bearer ".len())?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key)
}

/// What a key makes of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Whose key it is: a part of its hash.
    pub tenant: u64,
    /// What goes with the key.
    pub terms: Terms,
}

/// Hashes of keys, and what goes with them.
pub struct KeySet {
    hashes: Vec<([u8; SHA256_OUTPUT_LEN], Terms)>,
}

impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeySet({} keys)", self.hashes.len())
    }
}

impl KeySet {
    /// Reads keys, one a line, each of which may be followed by its [`Terms`]. If any has a priority, those that have none have 0.
    fn parse(text: &str) -> Result<Self, String> {
        let mut hashes = Vec::new();
        for (number, line) in lines(text) {
            let wrong = |why: &str| wrong_line(number, why);
            let (key, terms) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            if !is_key(key) {
                return Err(wrong("is no key: it has no ASCII"));
            }
            let Some(terms) = Terms::parse(terms) else {
                return Err(wrong(&format!("has more than a key; after it there may be {FORM}")));
            };
            hashes.push((hash(key.as_bytes()), terms));
        }
        if hashes.is_empty() {
            return Err("has no key; it should have one a line".to_owned());
        }
        let mut known = HashMap::new();
        if hashes.iter().any(|(hash, terms)| *known.entry(hash).or_insert(terms) != terms) {
            return Err("has a key twice, with something else behind it; it should have it once".to_owned());
        }
        if hashes.iter().any(|(_, terms)| terms.priority.is_some()) {
            for (_, Terms { priority, .. }) in &mut hashes {
                *priority = priority.or(Some(Priority::default()));
            }
        }
        Ok(Self { hashes })
    }

    /// What `key` gives, if it is one of them. Compares with all, and each to its end.
    fn grant(&self, key: &[u8]) -> Option<Grant> {
        let hash = hash(key);
        let mut found = None;
        for (known, terms) in &self.hashes {
            let difference = known.iter().zip(&hash).fold(0, |sum, (one, other)| sum | (one ^ other));
            if std::hint::black_box(difference) == 0 {
                found = Some(*terms);
            }
        }
        let first = hash.first_chunk().copied().unwrap_or_default();
        std::hint::black_box(found).map(|terms| Grant { tenant: u64::from_le_bytes(first), terms })
    }
}

fn hash(key: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    let mut hash = [0; SHA256_OUTPUT_LEN];
    hash.copy_from_slice(digest(&SHA256, key).as_ref());
    hash
}

/// Lines that say something, with their numbers.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// Whether a header can carry it, and nobody mistakes where it ends.
fn is_key(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn wrong_line(number: usize, why: &str) -> String {
    format!("line {number} {why}")
}

/// The keys that workers want to see.
#[derive(Clone, Default)]
pub struct WorkerKeys {
    all: Option<HeaderValue>,
    own: HashMap<WorkerId, HeaderValue>,
}

impl fmt::Debug for WorkerKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerKeys({} of their own)", self.own.len())
    }
}

impl WorkerKeys {
    /// Reads a file of lines `KEY` or `*=KEY`, for all workers, and `ID=KEY`, for one.
    ///
    /// # Errors
    /// What is wrong, without the key.
    pub fn open(path: &Path) -> Result<Self, String> {
        let read = std::fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"));
        read.and_then(|text| Self::parse(&text)).map_err(|error| format!("{} {error}", path.display()))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut keys = Self::default();
        for (number, line) in lines(text) {
            let wrong = |why| wrong_line(number, why);
            // Base64 may end in `=`; that begins no key.
            let named = line.split_once('=').filter(|(_, key)| !key.trim_matches('=').is_empty());
            let (id, key) = named.map_or(("*", line), |(id, key)| (id.trim(), key.trim()));
            let value = is_key(key).then(|| HeaderValue::try_from(format!("Bearer {key}")).ok()).flatten();
            let mut value = value.ok_or_else(|| wrong("has no key: there are spaces in it, or no ASCII"))?;
            // Keeps it out of everything that prints headers.
            value.set_sensitive(true);
            let known = if id == "*" {
                keys.all.replace(value)
            } else if crate::config::is_worker_id(id) {
                keys.own.insert(WorkerId::new(id), value)
            } else {
                return Err(wrong("names no worker before '='; write ID=KEY, or *=KEY for all"));
            };
            if known.is_some() {
                return Err(wrong("has a second key for the same worker"));
            }
        }
        if keys.all.is_none() && keys.own.is_empty() {
            return Err("has no key; it should have one, or lines ID=KEY".to_owned());
        }
        Ok(keys)
    }

    /// What `worker` is shown in `authorization`: its own key, or, of a data-parallel rank, the key of all ranks there, or the one for all workers.
    #[must_use]
    pub fn of(&self, worker: &WorkerSpec) -> Option<HeaderValue> {
        let endpoint = || self.own.get(&WorkerId::new(worker.endpoint_name()));
        self.own.get(&worker.id).or_else(endpoint).or(self.all.as_ref()).cloned()
    }
}

#[cfg(test)]
mod tests {
    use router_core::{DpRanks, ToldBy};

    use super::*;

    #[test]
    fn keys_are_lines_and_whole_ones() {
        let keys = KeySet::parse("# ann\nsk-one\n\n  sk=two==  \r\n#sk-three\n").unwrap();
        assert_eq!(keys.hashes.len(), 2);
        let grants = [&b"sk-one"[..], b"sk=two=="].map(|key| keys.grant(key).unwrap());
        assert_ne!(grants[0].tenant, grants[1].tenant);
        assert_eq!(grants.map(|grant| grant.terms), [Terms::default(); 2]);
        for other in ["", "sk-on", "sk-onee", "SK-ONE", "# ann", "sk-three"] {
            assert_eq!(keys.grant(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn keys_have_priorities_where_any_has() {
        let keys = KeySet::parse("sk-app priority=5\nsk-batch\t priority=-1\nsk-other\n").unwrap();
        let priority = |key: &[u8]| keys.grant(key).unwrap().terms.priority;
        assert_eq!(
            [priority(b"sk-app"), priority(b"sk-batch"), priority(b"sk-other")],
            [5, -1, 0].map(|number| Some(Priority(number)))
        );
        assert!(KeySet::parse("k priority=1\nj\nk priority=1\n").is_ok());
        for twice in ["k priority=1\nk priority=2", "k\nk priority=0"] {
            assert!(KeySet::parse(twice).unwrap_err().contains("a key twice"), "{twice}");
        }
        for wrong in ["k priority=11", "k priority=", "k priority=1 x", "k weight=2"] {
            assert!(KeySet::parse(wrong).unwrap_err().contains("priority=N"), "{wrong}");
        }
    }

    #[test]
    fn keys_have_limits() {
        let keys =
            KeySet::parse("k tokens-per-minute=5  priority=1 max-in-flight=2\nj requests-per-minute=60\n");
        let keys = keys.unwrap();
        let limits = |key: &[u8]| keys.grant(key).unwrap().terms.limits;
        let none = KeyLimits::default();
        assert_eq!(limits(b"k"), KeyLimits { tokens_per_minute: Some(5), in_flight: Some(2), ..none });
        assert_eq!(limits(b"j"), KeyLimits { requests_per_minute: Some(60), ..none });
        for wrong in [
            "k tokens-per-minute=0",
            "k max-in-flight",
            "k max-in-flight=1 max-in-flight=1",
            "k priority=1 priority=1",
            "k requests-per-minute=-1",
            "k requests-per-second=1",
        ] {
            assert!(KeySet::parse(wrong).unwrap_err().contains("tokens-per-minute=N"), "{wrong}");
        }
        assert!(KeySet::parse("k max-in-flight=1\nk max-in-flight=2").unwrap_err().contains("a key twice"));
    }

    #[test]
    fn wrong_files_are_told_without_their_keys() {
        for (text, expected) in [
            ("", "no key"),
            ("# nothing\n\n", "no key"),
            ("fine\nhush hush\n", "line 2"),
            ("h\u{fc}sh\n", "line 1"),
        ] {
            let error = KeySet::parse(text).unwrap_err();
            assert!(error.contains(expected) && !error.contains("hush"), "{error}");
        }
        for (text, expected) in [
            ("", "no key"),
            ("hush\nhush\n", "line 2 has a second key"),
            ("a=hush\na=other", "line 2 has a second key"),
            ("a b=hush", "line 1 names no worker"),
            ("a=hush hush", "line 1 has no key"),
        ] {
            let error = WorkerKeys::parse(text).unwrap_err();
            assert!(error.contains(expected) && !error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_worker_has_its_own_key_or_the_one_for_all() {
        let spec = |id: &str| WorkerSpec::new(WorkerId::new(id), String::new());
        let text = |value: HeaderValue| value.to_str().unwrap().to_owned();
        let of = |keys: &WorkerKeys, id: &str| keys.of(&spec(id)).map(text);
        let keys = WorkerKeys::parse("for-all==\nw1=own\n").unwrap();
        assert_eq!(of(&keys, "w0").as_deref(), Some("Bearer for-all=="));
        assert_eq!(of(&keys, "w1").as_deref(), Some("Bearer own"));
        let keys = WorkerKeys::parse("*=a=b\nw1=c=\n").unwrap();
        assert_eq!(of(&keys, "w0").as_deref(), Some("Bearer a=b"));
        assert_eq!(of(&keys, "w1").as_deref(), Some("Bearer c="));
        let keys = WorkerKeys::parse("w1=own").unwrap();
        assert_eq!(of(&keys, "w0"), None);
        assert!(!format!("{keys:?}").contains("own="), "{keys:?}");
        assert_eq!(format!("{:?}", keys.of(&spec("w1"))), "Some(Sensitive)");
        let keys = WorkerKeys::parse("w1=both\nw1-dp1=one\n").unwrap();
        let ranks: Vec<_> = DpRanks { count: 2, told_by: ToldBy::Header }.of(&spec("w1")).collect();
        let shown = ranks.iter().map(|rank| text(keys.of(rank).unwrap()));
        assert_eq!(shown.collect::<Vec<_>>(), ["Bearer both", "Bearer one"]);
    }

    #[test]
    fn the_scheme_is_bearer() {
        assert_eq!(bearer(b"Bearer k"), Some(&b"k"[..]));
        assert_eq!(bearer(b"bEARER  k "), Some(&b"k"[..]));
        for other in ["", "Bearer", "Bearer ", "Bearer   ", "Basic k", "k", "Bearerk"] {
            assert_eq!(bearer(other.as_bytes()), None, "{other}");
        }
    }
}
