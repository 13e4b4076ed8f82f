//! The strings of a body that are kept: `model`, `user`, `service_tier`, and those that keep prompts apart.

use std::borrow::Cow;
use std::ops::Deref;

use router_core::Priority;
use smallvec::SmallVec;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Longer ones, in bytes as they stand in the body, are treated as absent. No model is named like that, and a
/// connection must not make the router keep megabytes.
pub const MAX_FIELD_BYTES: usize = 4 << 10;

/// A field that is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Field {
    Model,
    User,
    ServiceTier,
    Apart(Apart),
}

/// What an engine takes into the keys of its cache beside the prompt: KV of one value is of no use to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Apart {
    /// vLLM's and SGLang's.
    CacheSalt = 0,
    /// SGLang's, which names an adapter where `model` does not.
    LoraPath = 1,
    /// SGLang's.
    ExtraKey = 2,
}

/// What was found of them. Absent, `null`, empty, too long and of another type are all `None`; the last one counts.
#[derive(Debug, Default)]
pub(super) struct Fields {
    pub(super) model: Option<Name>,
    /// By hash; that is all that is asked of it.
    pub(super) user: Option<u64>,
    /// What `service_tier` says of the request's priority, if anything.
    pub(super) priority: Option<Priority>,
    /// What keeps prompts apart, each by hash.
    pub(super) apart: [Option<u64>; 3],
    /// What came of the current one in earlier pieces.
    before: Vec<u8>,
}

/// OpenAI's `flex` is for whoever can wait, and `priority` for whoever cannot; all other tiers are usual.
fn priority_of_tier(tier: &str) -> Option<Priority> {
    match tier {
        "flex" => Some(Priority(-1)),
        "priority" => Some(Priority(1)),
        _ => None,
    }
}

impl Fields {
    /// `field` begins; what it was before counts no more.
    pub(super) fn begin(&mut self, field: Field) {
        self.before.clear();
        match field {
            Field::Model => self.model = None,
            Field::User => self.user = None,
            Field::ServiceTier => self.priority = None,
            Field::Apart(what) => self.apart[what as usize] = None,
        }
    }

    /// A part of the current field, up to the end of a piece.
    pub(super) fn push(&mut self, part: &[u8]) {
        // One byte more than the limit says that it is too long.
        let room = (MAX_FIELD_BYTES + 1).saturating_sub(self.before.len());
        self.before.extend_from_slice(&part[..part.len().min(room)]);
    }

    /// The last part of `field`.
    pub(super) fn finish(&mut self, field: Field, part: &[u8]) {
        let raw = if self.before.is_empty() {
            part
        } else {
            self.push(part);
            &self.before
        };
        let raw = Some(raw).filter(|raw| !raw.is_empty() && raw.len() <= MAX_FIELD_BYTES);
        let Some(text) = raw.and_then(unescaped) else { return };
        match field {
            Field::Model => self.model = Some(Name::from(&*text)),
            Field::User => self.user = Some(xxh3_64(text.as_bytes())),
            Field::ServiceTier => self.priority = priority_of_tier(&text),
            // By different hashes, so that a salt and an adapter of one name are two.
            Field::Apart(what) => {
                self.apart[what as usize] = Some(xxh3_64_with_seed(text.as_bytes(), what as u64));
            }
        }
    }
}

/// The text of a string as it stands between its quotes; `None` if it has a lone surrogate, which is no text.
pub(super) fn unescaped(raw: &[u8]) -> Option<Cow<'_, str>> {
    if !raw.contains(&b'\\') {
        return std::str::from_utf8(raw).ok().map(Cow::Borrowed);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).ok().map(Cow::Owned)
}

/// A model's name, which needs no allocation unless it is longer than most.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Name(SmallVec<[u8; 64]>);

impl Name {
    /// Its bytes, which are UTF-8.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self(SmallVec::from_slice(text.as_bytes()))
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        std::str::from_utf8(&self.0).expect("it was made of a str")
    }
}
