//! The seam between engine and model: one step's batch in, the next tokens out.

use std::sync::Arc;

use roundhouse_types::TokenId;
use smallvec::SmallVec;

use crate::block_table::BlockTable;
use crate::sampling::{History, Logprobs, SamplingParams};

/// One sequence inside a worker; unique for the life of the engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SequenceId(pub u64);

/// A block of the KV pool: `block_tokens` consecutive positions of one sequence, in all layers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId(pub u32);

/// The tokens a sequence runs in a step; one mostly, which then needs no allocation.
pub type StepTokens = SmallVec<[TokenId; 4]>;

/// What one sequence does in a step.
///
/// Its `tokens` take the positions `context_tokens..context_tokens + tokens.len()`; KV of everything before them is in
/// the blocks already. `block_table[i]` holds positions `i * block_tokens..(i + 1) * block_tokens`, and reaches at least
/// to the last position written in this step.
#[derive(Clone, Debug)]
pub struct SequenceStep {
    /// Whose step it is.
    pub id: SequenceId,
    /// Tokens to run through the model, at least one: a chunk of the prompt, or the token drawn last.
    pub tokens: StepTokens,
    /// Positions whose KV is in the blocks already.
    pub context_tokens: usize,
    /// Whether that is the one token behind those that are computed: the one drawn last, or the last of a prompt that came from another worker.
    pub decodes: bool,
    /// Blocks of the sequence, in order of position.
    pub block_table: BlockTable,
    /// Draw a token after the last of `tokens`; `None` for a chunk of a prompt that goes on.
    pub sample: Option<SampleRequest>,
}

/// How to draw the token that follows a sequence's last one.
#[derive(Clone, Debug)]
pub struct SampleRequest {
    /// What the request asked for.
    pub params: Arc<SamplingParams>,
    /// How many tokens the sequence has generated; mixed into the seed, so that a draw does not depend on the batch.
    pub generated_tokens: u64,
    /// The tokens before, where [`SamplingParams::reads_history`] says that they matter.
    pub history: Option<History>,
}

/// Everything a backend computes in one step.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// At most one entry a sequence; prefill chunks and decodes mixed, in any order.
    pub sequences: Vec<SequenceStep>,
}

impl Batch {
    /// Tokens that go through the model in this step.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).sum()
    }
}

/// A token drawn for a sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct NextToken {
    /// For whom.
    pub id: SequenceId,
    /// The token.
    pub token: TokenId,
    /// Log-probabilities, where [`SamplingParams::logprobs`] asks for them and the backend has logits.
    pub logprobs: Option<Box<Logprobs>>,
}

/// The size of a backend's KV pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvCapacity {
    /// Positions in a block.
    pub block_tokens: usize,
    /// Blocks in the pool.
    pub blocks: usize,
}

/// How a backend's KV blocks go to another worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvFormat {
    /// Workers of one model whose backends say the same understand each other.
    pub name: String,
    /// What a block takes.
    pub block_bytes: usize,
}

/// A model that can be stepped. It never hears of requests, channels or text.
pub trait Backend: Send {
    /// The KV pool that `block_table`s may name.
    fn kv_capacity(&self) -> KvCapacity;

    /// Runs one step and returns one token for every sequence with a `sample`, in batch order.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the device failed. KV written by this step is undefined after it; the engine ends the
    /// batch's sequences with an error. [`BackendError::InvalidSequence`] when nothing was computed for the fault of one; the
    /// engine ends that one.
    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError>;

    /// How its KV goes to another worker; `None` where it does not.
    fn kv_format(&self) -> Option<KvFormat> {
        None
    }

    /// What is in `blocks`, one behind another.
    ///
    /// # Errors
    /// [`BackendError::Device`].
    fn read_kv(&mut self, _blocks: &[BlockId]) -> Result<Vec<u8>, BackendError> {
        Err(BackendError::Device("its KV cannot be read".to_owned()))
    }

    /// Writes what another worker's [`read_kv`](Self::read_kv) gave into `blocks`, which nobody else refers to.
    ///
    /// # Errors
    /// [`BackendError::Device`]; what is in the blocks is undefined then.
    fn write_kv(&mut self, _blocks: &[BlockId], _bytes: &[u8]) -> Result<(), BackendError> {
        Err(BackendError::Device("its KV cannot be written".to_owned()))
    }

    /// The engine has nothing to do: the next step begins whenever work comes. For backends that keep time.
    fn idle(&mut self) {}
}

/// Why a step could not be computed.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A sequence that breaks the contract of [`SequenceStep`]; a bug in the caller. Nothing was computed: without it the
    /// others can go on.
    #[error("invalid batch: sequence {}: {reason}", .id.0)]
    InvalidSequence {
        /// Which.
        id: SequenceId,
        /// What is wrong with it.
        reason: String,
    },
    /// The device or its driver failed.
    #[error("device failed: {0}")]
    Device(String),
    /// The same, and no later step can be computed: the process must be started anew.
    #[error("device lost: {0}")]
    DeviceLost(String),
}
