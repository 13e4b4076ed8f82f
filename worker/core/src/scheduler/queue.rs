//! Who waits, and in which order: higher priority first, and among equals whoever came first.
//!
//! A retracted sequence comes behind all others of its priority. Next: [`super::Scheduler`] takes from the front, or whoever comes first there with a place for its adapter.

use std::collections::VecDeque;

use crate::sequence::Sequence;
use crate::step::SequenceId;

/// Sequences in order.
#[derive(Clone, Debug, Default)]
pub(super) struct WaitingQueue {
    sequences: VecDeque<Sequence>,
}

impl WaitingQueue {
    /// Adds one behind all of its priority. O(1) unless others of a lower priority wait.
    pub(super) fn push(&mut self, sequence: Sequence) {
        if self.sequences.back().is_none_or(|last| last.priority >= sequence.priority) {
            return self.sequences.push_back(sequence);
        }
        let at = self.sequences.partition_point(|other| other.priority >= sequence.priority);
        self.sequences.insert(at, sequence);
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Sequence> {
        self.sequences.get_mut(at)
    }

    pub(super) fn take(&mut self, at: usize) -> Option<Sequence> {
        self.sequences.remove(at)
    }

    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        let at = self.sequences.iter().position(|sequence| sequence.id == id)?;
        self.sequences.remove(at)
    }

    pub(super) fn len(&self) -> usize {
        self.sequences.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.iter()
    }
}
