//! How large the KV pool is: what was asked for, or a share of the memory that is available.
//!
//! The pool is backed by memory as it is written, so what one worker has set aside and not used yet still looks available
//! to the next. Hence a share that leaves room for others who reckon alike, and embedded workers, who know of each other,
//! divide. Computes and decides; reads no system. Next: the backend allocates it.

use worker_core::step::KvCapacity;

use crate::KvBudget;

/// What is taken to be available where the system does not say.
const UNKNOWN_AVAILABLE_BYTES: u64 = 4 << 30;

/// Whose memory the pool is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum KvMemory {
    /// The machine's, which others use as well.
    Host,
    /// A GPU's, of which nobody else can use what is left.
    Gpu,
}

impl KvMemory {
    /// What a pool takes unasked of `available` bytes: of the host's a quarter, with which two or three workers started at
    /// once still fit; of a GPU's four fifths of what weights and the largest step leave, the rest being for what has no bound worth keeping free: parts of
    /// attention over long contexts, lists, the driver's own.
    fn share(self, available: u64) -> u64 {
        match self {
            Self::Host => available / 4,
            Self::Gpu => available / 5 * 4,
        }
    }
}

/// What the pool is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvNeed {
    /// Positions of a block.
    pub block_tokens: usize,
    /// Bytes of a block, all layers together.
    pub block_bytes: usize,
    /// Longest prompt and answer together.
    pub context_tokens: usize,
    /// Sequences side by side. More than a full context for each of them is never taken unasked of the host's memory.
    pub max_running: usize,
}

/// What there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvRoom {
    /// Where it is.
    pub memory: KvMemory,
    /// Bytes available to all sharers together, if that is known.
    pub available_bytes: Option<u64>,
    /// Workers that divide it, this one included; at least one.
    pub sharers: usize,
}

/// Why there is no pool of that size.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum KvSizeError {
    /// More than there is.
    #[error(
        "the KV pool would take {}, but {} available{}; ask for less with --kv-memory or --kv-blocks, \
         or set a shorter --context-length",
        size(*.asked_bytes), is(*.available_bytes), among(*.sharers)
    )]
    TooLarge {
        /// What the pool would take.
        asked_bytes: u64,
        /// What this worker can have.
        available_bytes: u64,
        /// Workers that divide the machine's memory.
        sharers: usize,
    },
    /// Not even one full context.
    #[error(
        "the KV pool has {blocks} blocks, but a context of {context_tokens} tokens needs {context_blocks} ({}); \
         give more KV memory, or set a shorter --context-length",
        size(*.context_bytes)
    )]
    TooSmall {
        /// What was asked for.
        blocks: usize,
        /// Longest prompt and answer together.
        context_tokens: usize,
        /// Blocks that it takes.
        context_blocks: usize,
        /// Bytes that they take.
        context_bytes: u64,
    },
}

fn is(bytes: u64) -> String {
    format!("{} is", size(bytes))
}

fn among(sharers: usize) -> String {
    if sharers > 1 { format!(" to each of {sharers} workers that share this machine") } else { String::new() }
}

/// Bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

impl KvNeed {
    fn bytes(&self, blocks: usize) -> u64 {
        (blocks as u64).saturating_mul(self.block_bytes as u64)
    }

    /// Whole blocks within `bytes`; their ids are u32.
    fn blocks(&self, bytes: u64) -> usize {
        (bytes / (self.block_bytes as u64).max(1)).min(u64::from(u32::MAX)) as usize
    }

    /// The pool: room for a full context at least, and no more than there is.
    ///
    /// # Errors
    /// [`KvSizeError`], with what is asked for and what there is.
    pub(crate) fn capacity(&self, budget: KvBudget, room: KvRoom) -> Result<KvCapacity, KvSizeError> {
        let context_blocks = self.context_tokens.div_ceil(self.block_tokens);
        let sharers = room.sharers.max(1);
        let available = room.available_bytes.map(|bytes| bytes / sharers as u64);
        let blocks = match budget {
            KvBudget::Blocks(blocks) => blocks,
            KvBudget::Bytes(bytes) => self.blocks(bytes),
            KvBudget::Auto => {
                let share = self.blocks(room.memory.share(available.unwrap_or(UNKNOWN_AVAILABLE_BYTES)));
                let most = match room.memory {
                    KvMemory::Host => context_blocks.saturating_mul(self.max_running),
                    KvMemory::Gpu => usize::MAX,
                };
                share.min(most).max(context_blocks)
            }
        };
        if blocks < context_blocks {
            return Err(KvSizeError::TooSmall {
                blocks,
                context_tokens: self.context_tokens,
                context_blocks,
                context_bytes: self.bytes(context_blocks),
            });
        }
        match available {
            Some(available_bytes) if self.bytes(blocks) > available_bytes => {
                Err(KvSizeError::TooLarge { asked_bytes: self.bytes(blocks), available_bytes, sharers })
            }
            _ => Ok(KvCapacity { block_tokens: self.block_tokens, blocks }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A block is a mebibyte, a context 10 of them.
    const NEED: KvNeed =
        KvNeed { block_tokens: 16, block_bytes: MIB as usize, context_tokens: 160, max_running: 8 };

    fn room(available_mib: u64, sharers: usize) -> KvRoom {
        KvRoom { memory: KvMemory::Host, available_bytes: Some(available_mib * MIB), sharers }
    }

    fn blocks(budget: KvBudget, room: KvRoom) -> usize {
        NEED.capacity(budget, room).unwrap().blocks
    }

    #[test]
    fn unasked_it_is_a_share_of_what_is_available_between_one_context_and_one_for_each_sequence() {
        assert_eq!(blocks(KvBudget::Auto, room(200, 1)), 50);
        assert_eq!(blocks(KvBudget::Auto, room(4_000, 1)), 80);
        assert_eq!(blocks(KvBudget::Auto, room(12, 1)), 10, "a context, if that fits");
        let unknown = KvRoom { memory: KvMemory::Host, available_bytes: None, sharers: 1 };
        assert_eq!(blocks(KvBudget::Auto, unknown), 80);
    }

    #[test]
    fn of_a_gpu_it_takes_most_however_few_sequences_run() {
        let gpu = KvRoom { memory: KvMemory::Gpu, ..room(4_000, 1) };
        assert_eq!(blocks(KvBudget::Auto, gpu), 3_200);
    }

    #[test]
    fn workers_that_share_a_machine_divide_it() {
        for sharers in 1..=4 {
            let each = blocks(KvBudget::Auto, room(300, sharers));
            assert_eq!(each, 75 / sharers);
            assert!((each * sharers) as u64 * MIB <= 300 * MIB / 4);
        }
        assert_eq!(blocks(KvBudget::Blocks(50), room(100, 2)), 50);
        let said = NEED.capacity(KvBudget::Blocks(51), room(100, 2)).unwrap_err().to_string();
        assert!(said.contains("51.0 MiB") && said.contains("50.0 MiB is available to each of 2"), "{said}");
    }

    #[test]
    fn more_than_there_is_is_refused_with_both_sizes() {
        assert_eq!(blocks(KvBudget::Bytes(100 * MIB + 5), room(100, 1)), 100);
        for budget in [KvBudget::Bytes(3_072 * MIB), KvBudget::Blocks(3_072)] {
            let said = NEED.capacity(budget, room(100, 1)).unwrap_err().to_string();
            assert!(said.contains("3.0 GiB") && said.contains("100.0 MiB"), "{said}");
        }
        let said = NEED.capacity(KvBudget::Auto, room(9, 1)).unwrap_err().to_string();
        assert!(said.contains("10.0 MiB") && said.contains("--context-length"), "{said}");
        assert!(NEED.capacity(KvBudget::Blocks(usize::MAX), room(100, 1)).is_err());
    }

    #[test]
    fn less_than_a_context_is_refused_with_what_one_takes() {
        let said = NEED.capacity(KvBudget::Bytes(9 * MIB), room(100, 1)).unwrap_err().to_string();
        assert!(said.contains("9 blocks") && said.contains("needs 10 (10.0 MiB)"), "{said}");
    }
}
