//! What a scheduler is configured with.

use super::GrowthReserve;

/// Bounds of a step, and its order.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    /// Sequences in a step.
    pub max_running: usize,
    /// Tokens in a step.
    pub max_tokens_per_step: usize,
    /// When prompts run.
    pub prefill: PrefillOrder,
    /// Room that is left for running sequences to grow into; `None` admits as long as a prompt fits.
    pub reserve: Option<GrowthReserve>,
    /// Adapters that sequences in a step may have between them, at least one; those of others wait until one of these has none that runs, as vLLM's
    /// `--max-loras` has it.
    pub max_adapters: usize,
    /// Whether a prompt finds what another one computes in the same step, and not only in the steps after: an engine that writes the KV of all tokens
    /// of a layer before it attends to any of them can, as vLLM and our worker do. SGLang looks its cache up before a step, and enters blocks after.
    pub shares_within_steps: bool,
}

impl SchedulerLimits {
    /// Prompts beside decodes, shared within steps, and no reserve.
    #[must_use]
    pub fn mixed(max_running: usize, max_tokens_per_step: usize) -> Self {
        Self {
            max_running,
            max_tokens_per_step,
            prefill: PrefillOrder::Mixed,
            reserve: None,
            max_adapters: usize::MAX,
            shares_within_steps: true,
        }
    }
}

/// When prompts are computed, relative to the sequences that decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PrefillOrder {
    /// Beside them: decodes first, prompts in what they leave of the step's token budget.
    #[default]
    Mixed,
    /// Before them: while a prompt can run, a step holds prompts only.
    First,
}
