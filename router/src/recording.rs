//! `--record FILE`: what passes, as a trace that [`bench simulate`](../../bench) can ask which policy would have served it best.
//!
//! A line a request in the format of Mooncake's traces: when it came, how long it was, how long its answer, and which blocks of 512 tokens its
//! prompt consists of, as numbers that are equal where prompts are. No text, no names; the numbers come from the process's secret seeds. Lines
//! are written by a thread of their own, and left out, counted, rather than waited for. Fed by [`record`](crate::stages::record).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use roundhouse_types::BlockHash;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::stages::parse::Reading;

/// Tokens of a trace's block.
const BLOCK_TOKENS: usize = 512;
/// Prompt bytes that stand for a block. One number for all models and for ever, so that equal prompts have equal blocks; where tokens
/// are longer or shorter than four bytes, blocks are.
const BLOCK_BYTES: usize = 4 * BLOCK_TOKENS;
/// Requests that may wait to be written.
const MOST_WAITING: usize = 8_192;
/// Readers of JSON keep so many bits of a number.
const ID_BITS: u32 = 53;
/// How long the end of the process waits for the last lines.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// A trace that is being written.
#[derive(Debug)]
pub struct Recording {
    entries: SyncSender<Entry>,
    /// By which sessions and tenants are hashed, so that nobody finds out whose they are by hashing names.
    seed: u64,
    left_out: AtomicU64,
}

/// What goes to the thread that writes.
#[derive(Debug)]
enum Entry {
    Request(Line),
    /// Everything before this is in the file once it is answered.
    Flush(SyncSender<()>),
}

/// A request, as it stands in the file.
#[derive(Debug, Serialize, PartialEq)]
struct Line {
    timestamp: u64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<u64>,
    #[serde(skip_serializing_if = "is_usual")]
    priority: i8,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_usual(priority: &i8) -> bool {
    *priority == 0
}

/// A trace cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the trace {}: {source}", path.display())]
pub struct RecordingError {
    path: PathBuf,
    source: std::io::Error,
}

/// What the record of a request adds to its reading.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    /// When it came, from the beginning of the process.
    pub arrived: Duration,
    /// Tokens of its prompt, if the worker said.
    pub prompt_tokens: Option<usize>,
    /// Tokens of its answer, as the worker said, or else pieces of its stream.
    pub output_tokens: usize,
}

impl Recording {
    /// Begins a trace. One that is there already is kept under the same name and `.old`.
    ///
    /// # Errors
    /// A file that cannot be made, or moved.
    pub fn begin(path: &Path) -> Result<Self, RecordingError> {
        let failed = |source| RecordingError { path: path.to_owned(), source };
        if path.exists() {
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            std::fs::rename(path, old).map_err(failed)?;
        }
        let file = BufWriter::new(File::create(path).map_err(failed)?);
        let (entries, received) = sync_channel(MOST_WAITING);
        let path = path.to_owned();
        let writer = move || {
            if let Err(error) = write(file, &received) {
                tracing::error!(path = %path.display(), %error, "the trace ends here: it cannot be written");
            }
        };
        std::thread::Builder::new().name("recording".into()).spawn(writer).map_err(failed)?;
        Ok(Self { entries, seed: rand::random(), left_out: AtomicU64::new(0) })
    }

    /// A request has been answered. Returns how many have been left out by now, if this one was.
    pub fn passed(&self, reading: &Reading, passed: Passed) -> Option<u64> {
        let line = Line::of(reading, passed, self.seed);
        let refused = self.entries.try_send(Entry::Request(line)).is_err();
        refused.then(|| self.left_out.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Waits, for a moment, until what has passed is in the file.
    pub fn flush(&self) {
        let (written, wait) = sync_channel(1);
        if self.entries.try_send(Entry::Flush(written)).is_ok() {
            // If the disk takes longer, the process ends without its last lines.
            let _ = wait.recv_timeout(LAST_WAIT);
        }
    }
}

impl Line {
    fn of(reading: &Reading, passed: Passed, seed: u64) -> Self {
        let input_length = passed.prompt_tokens.unwrap_or(reading.prompt_tokens).max(1);
        let mut hash_ids: Vec<u64> = (1..)
            .map_while(|count| Some(id(*reading.blocks.get(last_block(reading, count)?)?, count)))
            .take(input_length.div_ceil(BLOCK_TOKENS))
            .collect();
        // Of tokens that are shorter than four bytes there are more than blocks.
        let last = reading.blocks.last().copied().unwrap_or(BlockHash(rand::random()));
        let first_missing = hash_ids.len() + 1;
        hash_ids.extend((first_missing..=input_length.div_ceil(BLOCK_TOKENS)).map(|count| id(last, count)));
        let hidden = |id: u64| xxh3_64_with_seed(&id.to_le_bytes(), seed) >> (u64::BITS - ID_BITS);
        Self {
            timestamp: u64::try_from(passed.arrived.as_millis()).unwrap_or(u64::MAX),
            input_length,
            output_length: passed.output_tokens.max(1),
            hash_ids,
            session_id: reading.session.map(hidden),
            tenant: reading.precedence.tenant.map(hidden),
            priority: reading.precedence.priority.0,
        }
    }
}

/// Index of the block with which the prompt's first `count` blocks of the trace end.
fn last_block(reading: &Reading, count: usize) -> Option<usize> {
    let end_bytes = count * BLOCK_BYTES;
    let covers = |blocks: usize| reading.opening.covered_bytes(blocks) >= end_bytes;
    let (mut too_few, mut enough) = (0, reading.blocks.len());
    if !covers(enough) {
        return None;
    }
    while enough - too_few > 1 {
        let middle = too_few.midpoint(enough);
        if covers(middle) { enough = middle } else { too_few = middle }
    }
    Some(enough - 1)
}

/// Two blocks of the trace may end in one block of ours.
fn id(block: BlockHash, count: usize) -> u64 {
    block.0.wrapping_add((count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> (u64::BITS - ID_BITS)
}

fn write(mut file: BufWriter<File>, entries: &Receiver<Entry>) -> std::io::Result<()> {
    while let Ok(first) = entries.recv() {
        for entry in std::iter::once(first).chain(entries.try_iter()) {
            match entry {
                Entry::Request(line) => {
                    serde_json::to_writer(&mut file, &line)?;
                    file.write_all(b"\n")?;
                }
                Entry::Flush(written) => {
                    file.flush()?;
                    // Whoever asked may have given up.
                    let _ = written.try_send(());
                }
            }
        }
        file.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use roundhouse_types::ChainHasher;
    use router_core::prefix::PromptHasher;
    use router_core::request::PromptUse;
    use router_core::{Precedence, Priority};

    use super::*;

    fn reading(prompt: &str) -> Reading {
        let mut hasher = PromptHasher::new(ChainHasher::new(7), PromptUse::Whole);
        hasher.push(prompt.as_bytes());
        let blocks = hasher.finish(ChainHasher::new(8));
        Reading {
            blocks: blocks.hashes,
            opening: blocks.opening,
            prompt_bytes: blocks.prompt_bytes,
            prompt_tokens: blocks.prompt_bytes / 4,
            ..Reading::default()
        }
    }

    fn line(prompt: &str, prompt_tokens: Option<usize>) -> Line {
        let passed = Passed { arrived: Duration::from_millis(1_500), prompt_tokens, output_tokens: 0 };
        Line::of(&reading(prompt), passed, 1)
    }

    #[test]
    fn equal_beginnings_have_equal_blocks() {
        let story = "once upon a time ".repeat(2_000);
        let one = line(&format!("{story}and then"), None);
        let two = line(&format!("{}but no", &story[..20_480]), None);
        assert_eq!(one.input_length, 34_008 / 4);
        assert_eq!(one.hash_ids.len(), 17, "the last one is not full");
        let shared = one.hash_ids.iter().zip(&two.hash_ids).take_while(|(one, two)| one == two).count();
        assert_eq!(shared, 10, "20,480 bytes");
        let mut distinct = one.hash_ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 17);
        assert!(one.hash_ids.iter().all(|id| *id < 1 << ID_BITS));
    }

    #[test]
    fn lengths_are_the_workers_where_it_says_them() {
        let prompt = "x".repeat(9_000);
        assert_eq!(line(&prompt, Some(1_000)).hash_ids.len(), 2);
        let many = line(&prompt, Some(4_000));
        assert_eq!((many.hash_ids.len(), many.input_length, many.output_length), (8, 4_000, 1));
        assert_eq!(line(&prompt, Some(1_000)).hash_ids, many.hash_ids[..2]);
        assert_eq!(line("", None).input_length, 1);
    }

    #[test]
    fn sessions_are_told_apart_by_numbers_that_name_nobody() {
        let passed = Passed { arrived: Duration::ZERO, prompt_tokens: None, output_tokens: 1 };
        let id = |session, seed| {
            let reading = Reading { session, ..reading("hello") };
            Line::of(&reading, passed, seed).session_id
        };
        let ann = id(Some(77), 1);
        assert!(ann.is_some_and(|id| id < 1 << ID_BITS && id != 77));
        assert_eq!((id(Some(77), 1), id(None, 1)), (ann, None));
        assert!(id(Some(78), 1) != ann && id(Some(77), 2) != ann, "another session, another process");
        let text = serde_json::to_string(&Line::of(&reading("hello"), passed, 1)).unwrap();
        assert!(!["session_id", "tenant", "priority"].iter().any(|key| text.contains(key)), "{text}");
        let precedence = Precedence { priority: Priority(-1), tenant: Some(77) };
        let line = Line::of(&Reading { precedence, ..reading("hello") }, passed, 1);
        assert_eq!((line.tenant, line.priority), (ann, -1));
    }

    #[test]
    fn a_trace_is_written_and_the_one_before_is_kept() {
        let folder = std::env::temp_dir().join(format!("roundhouse-recording-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("trace.jsonl");
        for _ in 0..2 {
            let recording = Recording::begin(&path).unwrap();
            let passed =
                Passed { arrived: Duration::from_millis(20), prompt_tokens: Some(3), output_tokens: 5 };
            assert_eq!(recording.passed(&reading(&"y".repeat(64)), passed), None);
            recording.flush();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(
                text.starts_with(r#"{"timestamp":20,"input_length":3,"output_length":5,"hash_ids":["#),
                "{text}"
            );
            assert_eq!(text.lines().count(), 1);
        }
        assert!(folder.join("trace.jsonl.old").exists());
        let error = Recording::begin(&folder.join("missing/trace.jsonl")).unwrap_err().to_string();
        assert!(error.starts_with("cannot write the trace") && error.contains("missing"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
