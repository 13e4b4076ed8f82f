//! What is asked: chat completions of an exact size, of which a system prompt shared by an eighth of all requests makes
//! three quarters of the text, and the rest is different every time.
//!
//! A request is four pieces that are written together and never copied: head and system prompt (one for each prompt), a
//! serial number, words from a pool, the end. Knows neither sockets nor routers. Next on the path:
//! [`super::connection`].

use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

/// System prompts that requests share.
pub const SHARED_PROMPTS: usize = 8;
/// What every system prompt begins with; the name of the prompt follows in [`TAG_BYTES`] bytes.
pub const TAG_MARK: &[u8] = b"shared-prompt-";
/// Length of a prompt's name: size in KB, a dash, number.
pub const TAG_BYTES: usize = 8;

const POOL_BYTES: usize = 1 << 20;
/// Hexadecimal digits of a serial number, and a space.
const SERIAL_BYTES: usize = 17;
/// Parts of the text, in percent, that the system prompt makes.
const SHARED_PERCENT: usize = 75;

/// Whether the answer comes whole or as events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// One JSON object.
    Whole,
    /// A stream of this many chunks is asked for.
    Stream {
        /// Sent as `max_tokens`.
        chunks: u32,
    },
}

/// The requests of one size.
#[derive(Debug)]
pub struct Workload {
    /// HTTP head and body up to the serial number, one for each system prompt.
    openings: Vec<Vec<u8>>,
    pool: Vec<u8>,
    words_bytes: usize,
    ending: Vec<u8>,
    serial: AtomicU64,
}

/// One request before it is written.
#[derive(Debug)]
pub struct Draft {
    prompt: usize,
    serial: [u8; SERIAL_BYTES],
    words_at: usize,
}

impl Draft {
    /// Which system prompt it has.
    pub fn prompt(&self) -> usize {
        self.prompt
    }
}

/// A body of that size has no room for a prompt.
#[derive(Debug, thiserror::Error)]
#[error("a body of {0} KB has no room for a prompt; 1 KB is the least")]
pub struct TooSmall(pub usize);

impl Workload {
    /// 1-KB requests that share nothing, with one another or with any workload: asking whether a router is there must not
    /// teach it which worker has which prompt. While nothing else runs, some would give them all to one.
    pub fn of_strangers(authority: &str, path: &str) -> Result<Self, TooSmall> {
        Self::with_share(authority, path, 1, Delivery::Whole, 0)
    }

    /// Bodies of exactly `kilobytes` × 1,024 bytes for the server with this `host` header.
    ///
    /// # Errors
    /// [`TooSmall`] for 0 KB.
    pub fn new(authority: &str, path: &str, kilobytes: usize, delivery: Delivery) -> Result<Self, TooSmall> {
        Self::with_share(authority, path, kilobytes, delivery, SHARED_PERCENT)
    }

    fn with_share(
        authority: &str,
        path: &str,
        kilobytes: usize,
        delivery: Delivery,
        shared_percent: usize,
    ) -> Result<Self, TooSmall> {
        let (max_tokens, stream) = match delivery {
            Delivery::Whole => (16, false),
            Delivery::Stream { chunks } => (chunks, true),
        };
        let opening = r#"{"model":"mock","messages":[{"role":"system","content":""#;
        let middle = r#""},{"role":"user","content":""#;
        let ending = format!(r#""}}],"max_tokens":{max_tokens},"temperature":0,"stream":{stream}}}"#);
        let body_bytes = kilobytes * 1024;
        let frame_bytes = opening.len() + middle.len() + ending.len();
        let text_bytes = body_bytes.checked_sub(frame_bytes).ok_or(TooSmall(kilobytes))?;
        let system_bytes = text_bytes * shared_percent / 100;
        let words_bytes = text_bytes - system_bytes - SERIAL_BYTES;
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {authority}\r\nuser-agent: bench-overhead\r\naccept: */*\r\n\
             content-type: application/json\r\ncontent-length: {body_bytes}\r\n\r\n"
        );
        let openings = (0..SHARED_PROMPTS).map(|prompt| {
            let system = system_prompt(kilobytes, prompt, system_bytes);
            [head.as_bytes(), opening.as_bytes(), &system, middle.as_bytes()].concat()
        });
        Ok(Self {
            openings: openings.collect(),
            pool: words(u64::MAX, POOL_BYTES + words_bytes),
            words_bytes,
            ending: ending.into_bytes(),
            serial: AtomicU64::new(0),
        })
    }

    /// The next request: a system prompt by chance (in turn, round robin over four workers would always hit), and a text
    /// that no other request has.
    pub fn draft(&self, rng: &mut Xoshiro256PlusPlus) -> Draft {
        let random: u64 = rng.random();
        Draft {
            prompt: (random % SHARED_PROMPTS as u64) as usize,
            serial: hexadecimal(self.serial.fetch_add(1, Ordering::Relaxed)),
            words_at: (random >> 32) as usize % POOL_BYTES,
        }
    }

    /// The pieces of a request in their order.
    pub fn pieces<'a>(&'a self, draft: &'a Draft) -> [IoSlice<'a>; 4] {
        [
            IoSlice::new(&self.openings[draft.prompt]),
            IoSlice::new(&draft.serial),
            IoSlice::new(&self.pool[draft.words_at..draft.words_at + self.words_bytes]),
            IoSlice::new(&self.ending),
        ]
    }
}

/// The tag, then words of the prompt's own.
fn system_prompt(kilobytes: usize, prompt: usize, bytes: usize) -> Vec<u8> {
    let mut text = TAG_MARK.to_vec();
    text.extend_from_slice(format!("{kilobytes:05}-{prompt:02}").as_bytes());
    text.push(b' ');
    text.extend(words((kilobytes * SHARED_PROMPTS + prompt) as u64, bytes));
    text.truncate(bytes);
    text
}

/// Lower-case words with single spaces, the same for the same seed.
fn words(seed: u64, bytes: usize) -> Vec<u8> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut text = Vec::with_capacity(bytes + 10);
    while text.len() < bytes {
        let letters: u64 = rng.random();
        let length = 2 + letters % 8;
        text.extend((0..length).map(|at| b'a' + ((letters >> (8 + 6 * at)) & 63) as u8 % 26));
        text.push(b' ');
    }
    text.truncate(bytes);
    text
}

fn hexadecimal(number: u64) -> [u8; SERIAL_BYTES] {
    let mut digits = [b' '; SERIAL_BYTES];
    for (at, digit) in digits[..16].iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(number >> (60 - 4 * at)) as usize & 15];
    }
    digits
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::Value;

    use super::*;

    fn body(workload: &Workload, draft: &Draft) -> Vec<u8> {
        let whole: Vec<u8> = workload.pieces(draft).iter().flat_map(|piece| piece.iter().copied()).collect();
        let head = whole.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        whole[head + 4..].to_vec()
    }

    #[test]
    fn bodies_have_their_size_their_share_and_no_two_alike() {
        for kilobytes in [1, 16, 200] {
            let workload = Workload::new("h:1", "/v1/chat/completions", kilobytes, Delivery::Whole).unwrap();
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
            let (mut bodies, mut systems) = (HashSet::new(), HashSet::new());
            for _ in 0..100 {
                let body = body(&workload, &workload.draft(&mut rng));
                assert_eq!(body.len(), kilobytes * 1024);
                let json: Value = serde_json::from_slice(&body).unwrap();
                let text = |at: usize| json["messages"][at]["content"].as_str().unwrap().to_owned();
                let (system, user) = (text(0), text(1));
                let percent = system.len() * 100 / (system.len() + user.len());
                assert!((74..=75).contains(&percent), "{percent} % is shared");
                assert_eq!(json["stream"], false);
                systems.insert(system);
                assert!(bodies.insert(user));
            }
            assert_eq!(systems.len(), SHARED_PROMPTS);
        }
    }

    #[test]
    fn strangers_share_nothing_but_their_frame() {
        let workload = Workload::of_strangers("h:1", "/v1/chat/completions").unwrap();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let user = |body: Vec<u8>| {
            let json: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!((body.len(), json["messages"][0]["content"].as_str()), (1024, Some("")));
            json["messages"][1]["content"].as_str().unwrap().to_owned()
        };
        let (one, other) = (workload.draft(&mut rng), workload.draft(&mut rng));
        let (one, other) = (user(body(&workload, &one)), user(body(&workload, &other)));
        let alike = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        assert!(alike < one.len() / 20, "{alike} bytes of {} are alike", one.len());
    }

    #[test]
    fn a_tag_names_size_and_prompt_in_its_fixed_width() {
        let text = system_prompt(16, 3, 100);
        assert_eq!(&text[..TAG_MARK.len() + TAG_BYTES + 1], b"shared-prompt-00016-03 ");
        assert!(Workload::new("h", "/", 0, Delivery::Whole).is_err());
    }
}
