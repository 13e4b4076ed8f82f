//! A step's batch, checked and flattened into rows.
//!
//! Parse, don't validate: [`FlatBatch`] can be made from a sound batch only. Next: [`super::cpu`] runs it.

use std::collections::HashSet;

use worker_core::step::{BackendError, Batch, KvCapacity, SequenceStep};
use worker_kernels::Span;

use crate::model::ModelConfig;

/// The sequences of a batch, one behind another.
pub(super) struct FlatBatch {
    /// One token a row.
    pub(super) tokens: Vec<u32>,
    /// Rows whose logits are wanted.
    pub(super) sampling: Vec<usize>,
    steps: Vec<FlatStep>,
}

struct FlatStep {
    first_row: usize,
    rows: usize,
    context_tokens: usize,
    blocks: Vec<u32>,
}

impl FlatStep {
    fn span(&self) -> Span<'_> {
        Span {
            first_row: self.first_row,
            rows: self.rows,
            context_tokens: self.context_tokens,
            blocks: &self.blocks,
        }
    }
}

impl FlatBatch {
    /// Checks `batch` against the model and the pool.
    pub(super) fn new(batch: &Batch, config: &ModelConfig, kv: KvCapacity) -> Result<Self, BackendError> {
        let mut flat = Self { tokens: Vec::new(), sampling: Vec::new(), steps: Vec::new() };
        let (mut ids, mut written) = (HashSet::new(), HashSet::new());
        for step in &batch.sequences {
            check(step, config, kv).map_err(|reason| invalid(step, &reason))?;
            if !ids.insert(step.id) {
                return Err(invalid(step, "it appears twice"));
            }
            let end = step.context_tokens + step.tokens.len();
            for block in
                &step.block_table[step.context_tokens / kv.block_tokens..end.div_ceil(kv.block_tokens)]
            {
                if !written.insert(*block) {
                    return Err(invalid(step, &format!("block {} is written by another entry too", block.0)));
                }
            }
            flat.push(step);
        }
        Ok(flat)
    }

    fn push(&mut self, step: &SequenceStep) {
        self.steps.push(FlatStep {
            first_row: self.tokens.len(),
            rows: step.tokens.len(),
            context_tokens: step.context_tokens,
            blocks: step.block_table.iter().map(|block| block.0).collect(),
        });
        self.tokens.extend_from_slice(&step.tokens);
        if step.sample.is_some() {
            self.sampling.push(self.tokens.len() - 1);
        }
    }

    /// The rows of each sequence.
    pub(super) fn spans(&self) -> Vec<Span<'_>> {
        self.steps.iter().map(FlatStep::span).collect()
    }
}

fn invalid(step: &SequenceStep, reason: &str) -> BackendError {
    BackendError::InvalidSequence { id: step.id, reason: reason.to_owned() }
}

fn check(step: &SequenceStep, config: &ModelConfig, kv: KvCapacity) -> Result<(), String> {
    if step.tokens.is_empty() {
        return Err("it has no tokens".into());
    }
    if let Some(token) = step.tokens.iter().find(|&&token| token as usize >= config.vocab) {
        return Err(format!("token {token} is not below the vocabulary's {}", config.vocab));
    }
    let end = step.context_tokens.saturating_add(step.tokens.len());
    if end > config.context_tokens {
        return Err(format!("position {} is beyond the context of {}", end - 1, config.context_tokens));
    }
    let needed = end.div_ceil(kv.block_tokens);
    if step.block_table.len() < needed {
        return Err(format!(
            "{end} positions need {needed} blocks, its table has {}",
            step.block_table.len()
        ));
    }
    if let Some(block) = step.block_table.iter().find(|block| block.0 as usize >= kv.blocks) {
        return Err(format!("block {} is not below the pool's {}", block.0, kv.blocks));
    }
    match step.sample.as_ref().and_then(|sample| sample.params.problem()) {
        Some(problem) => Err(problem),
        None => Ok(()),
    }
}
