//! Fleets in which some workers compute prompts and do nothing else: which prompts, and how a request goes on where it is generated.
//!
//! As the router does with vLLM's engines: the prompt's KV is fetched by the worker that generates, which is chosen when the prompt has been
//! computed. Fetching is the engine's ([`scheduled`](crate::simulate::engine::scheduled)).

use std::time::Duration;

use router_core::{Among, Leg, RequestView};

use super::fleet::Router;
use super::knowledge::Knowledge;
use super::told::{Coming, Word};
use super::{Placed, Setup, Simulation};
use crate::simulate::args::Apart;
use crate::simulate::contender::Splits;
use crate::simulate::engine::{Engine, Part};

/// New tokens from which [`Splits::LongNew`] has a prompt computed elsewhere.
const LONG_NEW_TOKENS: u32 = 2_048;
/// Share of the prompt that is new from which it does so too.
const LONG_NEW_SHARE: f64 = 0.7;

impl Part {
    /// What an engine is asked for by that leg.
    pub(super) fn of(leg: Leg) -> Self {
        match leg {
            Leg::Whole => Self::Whole,
            Leg::Prefill => Self::Prompt,
            Leg::Decode => Self::Answer,
        }
    }
}

impl<E: Engine> Simulation<'_, E> {
    /// Which part of a request its router has placed last.
    pub(super) fn leg(&self, number: u32) -> Leg {
        self.placed[number as usize].as_ref().map_or(Leg::Whole, |placed| placed.leg)
    }

    /// Whether another worker than the one that generates is to compute the prompt of a request whose path has been read, and that has been looked
    /// up.
    pub(super) fn splits(&self, number: u32, now_ns: u64) -> bool {
        let Setup { workload, contender, apart: Apart { prefill_workers, splits, .. }, .. } = self.setup;
        if prefill_workers == 0 {
            return false;
        }
        match splits.unwrap_or(contender.splits) {
            Splits::Always => true,
            Splits::LongNew => {
                let prompt = workload.requests[number as usize].input_tokens;
                let held = Knowledge::held_tokens(workload, number, &self.engines[prefill_workers..]);
                let new = prompt.saturating_sub(held);
                new >= LONG_NEW_TOKENS || f64::from(new) >= LONG_NEW_SHARE * f64::from(prompt)
            }
            Splits::WherePays => {
                let Router { decider, fleet } = &self.routers[self.replicas[number as usize] as usize];
                let now = Duration::from_nanos(now_ns);
                decider.splits(fleet, &self.view(number), Among::Untried(&[]), now)
            }
        }
    }

    /// The prompt of a request has been computed where nothing else is done: it goes on where its router says now.
    pub(super) fn hand_over(&mut self, number: u32, now_ns: u64) {
        self.placed[number as usize] = None;
        self.tell(number, Word::Over, now_ns);
        let replica = self.replicas[number as usize] as usize;
        self.knowledge.look_up::<E>(self.setup.workload, (number, replica), &self.engines, now_ns);
        self.read_path(number);
        let (leg, turn) = (Leg::Decode, None);
        let view = RequestView { leg, may_wait_since: None, ..self.view(number) };
        let mut learn = |candidates: &mut [_], speed: &_| self.knowledge.tell(&view, candidates, speed);
        let Router { decider, fleet } = &self.routers[replica];
        let (among, now) = (Among::Untried(&[]), Duration::from_nanos(now_ns));
        let decided = decider.decide_knowing(fleet, &view, among, now, &mut learn);
        let decided = decided.expect("some workers generate");
        let record = &mut self.records[number as usize];
        record.prefill_worker = Some(std::mem::replace(&mut record.worker, decided.worker.slot.0));
        self.placed[number as usize] = Some(Placed { decided, leg, turn });
        self.tell(number, Word::Sent(Coming::New), now_ns);
        self.submit(number, now_ns);
    }
}
