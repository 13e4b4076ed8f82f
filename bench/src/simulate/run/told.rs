//! Routers that tell each other what they do: each word reaches all others some time later, and is booked there.

use std::collections::HashMap;
use std::time::Duration;

use router_core::{Leg, RequestView};

use super::{Event, Simulation};
use crate::simulate::engine::Engine;

/// What a router tells of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Word {
    /// It has sent it to a worker.
    Sent,
    /// Its first token has come.
    Begun,
    /// It is there no more.
    Over,
}

/// What one router has been told of, by number of the request.
pub(super) type Heard = HashMap<u32, router_core::Booked>;

impl<E: Engine> Simulation<'_, E> {
    /// The router that has a request says so to all others, if they tell each other anything.
    pub(super) fn tell(&mut self, number: u32, word: Word, now_ns: u64) {
        if let (Some(after_ms), true) = (self.setup.routers.told_after_ms, self.routers.len() > 1) {
            self.enter(now_ns.saturating_add(after_ms * 1_000_000), Event::Told(number, word));
        }
    }

    /// The others have heard it.
    pub(super) fn hear(&mut self, number: u32, word: Word, now_ns: u64) {
        let (sender, now) = (self.replicas[number as usize] as usize, Duration::from_nanos(now_ns));
        if word == Word::Sent {
            self.read_path(number);
        }
        let leg = self.leg(number);
        for at in (0..self.routers.len()).filter(|at| *at != sender) {
            let router = &self.routers[at];
            match word {
                Word::Sent => {
                    let view = RequestView { leg, may_wait_since: None, ..self.view(number) };
                    let worker = &router.fleet.workers()[self.records[number as usize].worker as usize];
                    if let Some(booked) = router.decider.book(worker, &view, now) {
                        self.heard[at].insert(number, booked);
                    }
                }
                Word::Begun => {
                    if let Some(booked) = self.heard[at].get_mut(&number) {
                        match leg {
                            Leg::Decode => booked.lease.first_token(),
                            Leg::Whole | Leg::Prefill => router.decider.first_token(&mut booked.lease, now),
                        }
                    }
                }
                Word::Over => drop(self.heard[at].remove(&number)),
            }
        }
    }
}
