//! Routers that tell each other what they do: each word reaches all others some time later, and is booked there.

use std::collections::HashMap;
use std::time::Duration;

use router_core::{Leg, RequestView};

use super::fleet::Router;
use super::{Event, Simulation};
use crate::simulate::engine::Engine;

/// What a router tells of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Word {
    /// It has sent it to a worker.
    Sent(Coming),
    /// It has it in line for a worker.
    Waits(Coming),
    /// It was in line, and is sent.
    Goes,
    /// Its first token has come.
    Begun,
    /// It is there no more.
    Over,
}

/// Whether a request has been placed before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Coming {
    /// It has just come.
    New,
    /// It was in line, and has been decided anew.
    Anew,
}

/// What one router has been told of, by number of the request.
pub(super) type Heard = HashMap<u32, router_core::Booked>;

impl<E: Engine> Simulation<'_, E> {
    /// The router that has a request says so to all others, if they tell each other anything. Strangers say nothing.
    pub(super) fn tell(&mut self, number: u32, word: Word, now_ns: u64) {
        let tells = self.heard.len() > 1 && usize::from(self.replicas[number as usize]) < self.heard.len();
        if let (Some(after_ms), true) = (self.setup.routers.told_after_ms, tells) {
            self.enter(now_ns.saturating_add(after_ms * 1_000_000), Event::Told(number, word));
        }
    }

    /// The others have heard it.
    pub(super) fn hear(&mut self, number: u32, word: Word, now_ns: u64) {
        let (sender, now) = (self.replicas[number as usize] as usize, Duration::from_nanos(now_ns));
        if matches!(word, Word::Sent(_) | Word::Waits(_) | Word::Goes) {
            self.read_path(number);
        }
        let mut heard = std::mem::take(&mut self.heard);
        for (at, heard) in heard.iter_mut().enumerate().filter(|(at, _)| *at != sender) {
            self.book(at, heard, (number, word), now);
        }
        self.heard = heard;
    }

    /// Books a word at the router at that place, whose path has been read if it needs to be.
    fn book(&self, at: usize, heard: &mut Heard, (number, word): (u32, Word), now: Duration) {
        let Router { decider, fleet } = &self.routers[at];
        let leg = self.leg(number);
        match word {
            Word::Sent(coming) | Word::Waits(coming) => {
                let all = self.view(number);
                let may_wait_since = all.may_wait_since.filter(|_| matches!(word, Word::Waits(_)));
                let view = RequestView { leg, may_wait_since, ..all };
                let worker = &fleet.workers()[self.records[number as usize].worker as usize];
                let booked = match coming {
                    Coming::New => decider.book(worker, &view, now),
                    Coming::Anew => decider.book_again(worker, &view, now),
                };
                heard.extend(booked.map(|booked| (number, booked)));
            }
            Word::Over => drop(heard.remove(&number)),
            Word::Goes | Word::Begun => {
                let Some(booked) = heard.get_mut(&number) else { return };
                match (word, leg) {
                    (Word::Goes, _) => {
                        decider.goes_elsewhere(booked, &RequestView { leg, ..self.view(number) }, now);
                    }
                    (_, Leg::Decode) => booked.lease.first_token(),
                    _ => decider.first_token(&mut booked.lease, now),
                }
            }
        }
    }
}
