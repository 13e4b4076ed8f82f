//! Background requests that wait for a worker with time to spare: who asks next whether there is one.
//!
//! They are in no worker's line, since nobody knows beforehand where there will be time, and nobody who is not in the background is to see them.
//! Whoever is first asks [`Decider::decide_spare`](crate::Decider::decide_spare) again and again, and the others wait for him. Knows no clock and no
//! tasks; the router and the simulator have those.

use std::collections::VecDeque;

use crate::precedence::{Precedence, Turns, Waiters};

/// A place in the backlog.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BacklogTicket(u64);

impl Waiters for VecDeque<BacklogTicket> {
    fn is_empty(&self) -> bool {
        self.is_empty()
    }
}

/// Those who wait for the same.
#[derive(Debug, Default)]
pub struct Backlog {
    turns: Turns<VecDeque<BacklogTicket>>,
    next: u64,
    count: usize,
}

impl Backlog {
    /// One more waits.
    pub fn enter(&mut self, whose: Precedence) -> BacklogTicket {
        let ticket = BacklogTicket(self.next);
        self.next += 1;
        self.count += 1;
        self.turns.enter(whose).push_back(ticket);
        ticket
    }

    /// Who is first: of the highest priority, of the tenant that has had the least, whoever has waited longest.
    #[must_use]
    pub fn first(&self) -> Option<BacklogTicket> {
        let place = self.turns.first()?;
        self.turns.at(place).1.front().copied()
    }

    /// One waits no more: it has been sent, and so many `tokens` of its prompt with it, or it has given up.
    pub fn leave(&mut self, whose: Precedence, ticket: BacklogTicket, tokens: usize) {
        if tokens > 0 {
            self.turns.charge(whose, tokens as f64);
        }
        let queue = self.turns.enter(whose);
        let before = queue.len();
        if queue.front() == Some(&ticket) {
            queue.pop_front();
        } else {
            queue.retain(|other| *other != ticket);
        }
        self.count -= before - queue.len();
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precedence::Priority;

    fn of(priority: i8, tenant: u64) -> Precedence {
        Precedence { priority: Priority(priority), tenant: Some(tenant) }
    }

    #[test]
    fn tenants_take_turns_by_tokens_and_each_in_order() {
        let mut backlog = Backlog::default();
        let (long, short) = (of(-1, 1), of(-1, 2));
        let tickets: Vec<_> = (0..3).map(|_| (long, backlog.enter(long))).collect();
        let others: Vec<_> = (0..3).map(|_| (short, backlog.enter(short))).collect();
        let mut order = Vec::new();
        while let Some(first) = backlog.first() {
            let (whose, ticket) =
                *tickets.iter().chain(&others).find(|(_, ticket)| *ticket == first).unwrap();
            order.push(ticket);
            backlog.leave(whose, ticket, if whose == long { 300 } else { 100 });
        }
        let (long, short) = (|at: usize| tickets[at].1, |at: usize| others[at].1);
        assert_eq!(order, [long(0), short(0), short(1), short(2), long(1), long(2)]);
        assert!(backlog.is_empty());
    }

    #[test]
    fn who_gives_up_is_gone_wherever_it_was() {
        let mut backlog = Backlog::default();
        let whose = of(-2, 1);
        let tickets: Vec<_> = (0..4).map(|_| backlog.enter(whose)).collect();
        backlog.leave(whose, tickets[2], 0);
        backlog.leave(whose, tickets[2], 0);
        backlog.leave(whose, tickets[0], 0);
        assert_eq!((backlog.len(), backlog.first()), (2, Some(tickets[1])));
        let before = backlog.enter(of(-1, 9));
        assert_eq!(backlog.first(), Some(before), "a higher priority");
    }
}
