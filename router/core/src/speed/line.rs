//! Requests that wait in the router for a worker which has enough to compute.
//!
//! An engine computes prompts as they come, and keeps what was sent to it. What waits here can still go elsewhere, is lost with nobody, and
//! goes in a better order: higher priorities first, tenants in turn, and of each whoever would take the least of those that came about the same time.
//! Knows no clock and no tasks but their wakers.
//! Used by [`PrefillQueue`](super::PrefillQueue) alone.

use std::cmp::Ordering;
use std::task::Waker;

use smallvec::SmallVec;

use super::queue::Waiting;
use crate::adapters::Adapter;
use crate::precedence::{Precedence, Priority, Turns, Waiters};

/// How much later a request may go, for each second that its own prefill takes, than one that takes none: short prompts do not wait for long
/// ones that came a moment before, and no prompt waits for ever.
const LATER_BY_OWN: f64 = 16.0;
/// The same where memory is short: prompts are long there because they waited long, and what they came back for was evicted.
const LATER_WHERE_SHORT: f64 = 4.0;
/// And no later than this in all, in seconds, which is for slow workers: a prompt that takes two minutes there would be passed until its client
/// gives up.
const LATEST_S: f64 = 600.0;
/// Who adds at most such a part of what one does that does not fit goes before it.
const LITTLE: usize = 4;
/// Of those in line so many are looked at by each pick; whoever has more before it knows enough.
const MOST_COUNTED: usize = 64;

/// When a request is due that came at `arrived_s` and takes `own_s`.
#[must_use]
pub(super) fn due_s(arrived_s: f64, own_s: f64, memory: Memory) -> f64 {
    let later = match memory {
        Memory::Enough => LATER_BY_OWN,
        Memory::Short => LATER_WHERE_SHORT,
    };
    arrived_s + (later * own_s).min(LATEST_S)
}

/// How much memory a worker has, beside what its requests come back for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Memory {
    /// As much as they need, as far as is known.
    Enough,
    /// So little that what they may add to it is bounded.
    Short,
}

/// One in line.
#[derive(Debug)]
pub(super) struct InLine {
    due_s: f64,
    pub(super) waiting: Waiting,
    waker: Option<Waker>,
}

/// Of one tenant and priority. The next to go is the last.
#[derive(Debug, Default)]
struct Queue {
    requests: Vec<InLine>,
    owed_s: f64,
}

impl Waiters for Queue {
    fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }
}

impl Queue {
    fn remove(&mut self, at: usize) -> InLine {
        let gone = self.requests.remove(at);
        self.owed_s = less(self.owed_s, gone.waiting.service_s, self.requests.is_empty());
        gone
    }

    /// What those take who go before one that is due at `due_s`; all, if there are many.
    fn before_s(&self, due_s: f64) -> f64 {
        let mut before_s = 0.0;
        for (number, request) in self.requests.iter().rev().enumerate() {
            if request.due_s > due_s {
                return before_s;
            }
            if number >= MOST_COUNTED {
                break;
            }
            before_s += request.waiting.service_s;
        }
        self.owed_s
    }
}

/// Sums of many differences are off by a little.
fn less(sum: f64, by: f64, is_last: bool) -> f64 {
    if is_last { 0.0 } else { (sum - by).max(0.0) }
}

/// Where in line somebody is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    queue: usize,
    at: usize,
}

/// Those who wait for one worker.
#[derive(Debug, Default)]
pub(super) struct Line {
    turns: Turns<Queue>,
    count: usize,
    owed_s: f64,
    new_tokens: usize,
    /// To the worker's cache, all together.
    adds: usize,
}

impl Line {
    pub(super) fn enter(&mut self, due_s: f64, waiting: Waiting) {
        self.count += 1;
        self.owed_s += waiting.service_s;
        self.new_tokens += waiting.prefill.new_tokens;
        self.adds += waiting.adds;
        let queue = self.turns.enter(waiting.whose);
        queue.owed_s += waiting.service_s;
        let at = queue.requests.partition_point(|other| other.due_s > due_s);
        queue.requests.insert(at, InLine { due_s, waiting, waker: None });
    }

    /// One is sent to the worker, from here or without having been in line: its tenant has had that.
    pub(super) fn charge(&mut self, one: &Waiting) {
        self.turns.charge(one.whose, one.service_s);
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// What all of them take, in seconds.
    pub(super) fn owed_s(&self) -> f64 {
        self.owed_s
    }

    /// Uncached tokens of all of them.
    pub(super) fn new_tokens(&self) -> usize {
        self.new_tokens
    }

    /// What all of them will add to the worker's cache.
    pub(super) fn adds(&self) -> usize {
        self.adds
    }

    /// What those take who go after one of `whose` that is due at `due_s` and takes `own_s`. Of another tenant as much goes before it as its own
    /// tenant has by then.
    pub(super) fn behind_s(&self, whose: Precedence, due_s: f64, own_s: f64) -> f64 {
        let of_own = self.turns.all().find(|(other, _)| *other == whose);
        let own_before_s = of_own.map_or(0.0, |(_, queue)| queue.before_s(due_s));
        let of_others = self.turns.all().filter(|(other, _)| *other != whose).take(MOST_COUNTED);
        let before_s = |(other, queue): (Precedence, &Queue)| match other.priority.cmp(&whose.priority) {
            Ordering::Greater => queue.owed_s,
            Ordering::Equal => queue.owed_s.min(own_before_s + own_s),
            Ordering::Less => 0.0,
        };
        (self.owed_s - own_before_s - of_others.map(before_s).sum::<f64>()).max(0.0)
    }

    /// Where the next to go is, given whether so many tokens more fit into the worker's cache, and whether one may go whether it fits or not. Who does
    /// not fit waits on, and is passed by those alone that are little beside it: it would never go otherwise. Who may not go is passed by all.
    pub(super) fn next(
        &self,
        fits: impl Fn(usize) -> bool,
        may_go: impl Fn(&Waiting) -> bool,
    ) -> Option<Place> {
        let mut most = usize::MAX;
        let mut goes = |one: &InLine| {
            if !may_go(&one.waiting) {
                return false;
            }
            let tokens = one.waiting.adds;
            let goes = tokens <= most && fits(tokens);
            most = most.min(tokens / LITTLE);
            goes
        };
        let mut go_of = |queue: usize| {
            let at = self.turns.at(queue).1.requests.iter().rposition(&mut goes)?;
            Some(Place { queue, at })
        };
        // Nearly always there is one in the first queue, and the order of the others does not matter.
        let first = self.turns.first()?;
        go_of(first).or_else(|| self.turns.in_turn().into_iter().skip(1).find_map(go_of))
    }

    /// Whether nobody in line goes before one of `whose`, but maybe others of the same.
    pub(super) fn is_turn_of(&self, whose: Precedence) -> bool {
        self.turns.is_turn_of(whose)
    }

    /// Of those in line the highest.
    pub(super) fn highest(&self) -> Option<Priority> {
        self.turns.all().map(|(whose, _)| whose.priority).max()
    }

    /// Takes out the one there.
    pub(super) fn take(&mut self, place: Place) -> (Waiting, Option<Waker>) {
        let next = self.turns.at_mut(place.queue).remove(place.at);
        self.left(&next);
        (next.waiting, next.waker)
    }

    pub(super) fn leave(&mut self, ticket: u64) -> Option<Waiting> {
        let gone = self.turns.all_mut().find_map(|queue| {
            let at = queue.requests.iter().position(|request| request.waiting.ticket == ticket)?;
            Some(queue.remove(at))
        })?;
        self.left(&gone);
        Some(gone.waiting)
    }

    /// Whether `ticket` is in line.
    pub(super) fn has(&self, ticket: u64) -> bool {
        let mut all = self.turns.all().flat_map(|(_, queue)| &queue.requests);
        all.any(|request| request.waiting.ticket == ticket)
    }

    /// The first of each tenant, so many in all.
    fn first_ones(&self) -> impl Iterator<Item = &InLine> {
        let each = (MOST_COUNTED / self.turns.all().count().max(1)).max(1);
        let all = self.turns.all().flat_map(move |(_, queue)| queue.requests.iter().rev().take(each));
        all.take(MOST_COUNTED)
    }

    /// Whether one that was due before `due_s`, and that nobody in line is more important than, is for an adapter that `waits`, as far as the first of
    /// them tell.
    pub(super) fn is_overdue(&self, due_s: f64, waits: impl Fn(Adapter) -> bool) -> bool {
        let highest = self.highest();
        let mut overdue =
            self.first_ones().filter(|one| one.due_s < due_s && Some(one.waiting.whose.priority) == highest);
        overdue.any(|one| one.waiting.adapter.is_some_and(&waits))
    }

    /// How many adapters besides `one` are wanted by those in line that `wait`, of the first of them.
    pub(super) fn adapters_but(&self, one: Adapter, wait: impl Fn(Adapter) -> bool) -> usize {
        let mut others: SmallVec<[Adapter; 8]> = SmallVec::new();
        for request in self.first_ones() {
            let other = request.waiting.adapter.filter(|other| *other != one && wait(*other));
            others.extend(other.filter(|other| !others.contains(other)));
        }
        others.len()
    }

    /// Whether `ticket` still waits; `waker` is told when it goes.
    pub(super) fn waits(&mut self, ticket: u64, waker: &Waker) -> bool {
        let mut all = self.turns.all_mut().flat_map(|queue| &mut queue.requests);
        let found = all.find(|request| request.waiting.ticket == ticket);
        found.map(|request| request.waker = Some(waker.clone())).is_some()
    }

    fn left(&mut self, gone: &InLine) {
        self.count -= 1;
        self.new_tokens -= gone.waiting.prefill.new_tokens;
        self.adds -= gone.waiting.adds;
        self.owed_s = less(self.owed_s, gone.waiting.service_s, self.count == 0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::request::Answer;
    use crate::speed::{Prefill, Siblings};

    fn one(ticket: u64, service_s: f64) -> Waiting {
        let prefill = Prefill { new_tokens: 1, cached_tokens: 0 };
        Waiting {
            ticket,
            sent: Duration::ZERO,
            prefill,
            service_s,
            adds: 1,
            is_past: false,
            answer: Answer::Streamed,
            adapter: None,
            siblings: Siblings::default(),
            has_begun: false,
            whose: Precedence::default(),
        }
    }

    /// Who goes next, if so many tokens more fit.
    fn next(line: &mut Line, room: usize) -> Option<u64> {
        let at = line.next(|tokens| tokens <= room, |_| true)?;
        Some(line.take(at).0.ticket)
    }

    #[test]
    fn who_takes_least_goes_first_and_who_takes_much_does_not_wait_for_ever() {
        let mut line = Line::default();
        let arrivals = [(1, 0.0, 2.0), (2, 1.0, 0.1), (3, 2.0, 0.1), (4, 31.0, 0.5), (5, 38.0, 0.1)];
        for (ticket, arrived_s, own_s) in arrivals {
            line.enter(due_s(arrived_s, own_s, Memory::Enough), one(ticket, own_s));
        }
        assert!(line.len() == 5 && (line.owed_s() - 2.8).abs() < 1e-9);
        let order: Vec<u64> = std::iter::from_fn(|| next(&mut line, usize::MAX)).collect();
        assert_eq!(order, [2, 3, 1, 4, 5]);
        assert_eq!((line.len(), line.owed_s()), (0, 0.0));
        assert!(
            due_s(0.0, 2.0, Memory::Short) < due_s(10.0, 0.1, Memory::Short),
            "it has waited long enough"
        );
        assert!(due_s(0.0, 2.0, Memory::Enough) > due_s(10.0, 0.1, Memory::Enough));
        assert_eq!(due_s(5.0, 100.0, Memory::Enough), 605.0, "nobody is passed for longer");
    }

    #[test]
    fn equals_go_in_the_order_they_came() {
        let mut line = Line::default();
        (1..=3).for_each(|ticket| line.enter(1.0, one(ticket, 0.5)));
        assert!(line.leave(2).is_some() && line.leave(2).is_none());
        assert_eq!(next(&mut line, 9), Some(1));
        assert_eq!(next(&mut line, 9), Some(3));
        assert!(next(&mut line, 9).is_none());
    }

    #[test]
    fn who_does_not_fit_is_passed_by_little_ones_alone() {
        let mut line = Line::default();
        for (ticket, adds) in [(1, 1_000), (2, 300), (3, 60), (4, 900)] {
            line.enter(ticket as f64, Waiting { adds, ..one(ticket, 1.0) });
        }
        let mut next = |room| next(&mut line, room);
        assert_eq!(next(400), Some(3), "the second would fit, and is not little beside the first");
        assert_eq!(next(400), None);
        assert_eq!((next(1_000), next(1_000), next(1_000)), (Some(1), Some(2), Some(4)));
    }

    #[test]
    fn one_that_comes_waits_for_higher_priorities_and_for_as_much_of_each_tenant_as_of_its_own() {
        let of = |priority, tenant| Precedence { priority: Priority(priority), tenant: Some(tenant) };
        let mut line = Line::default();
        for (ticket, (whose, service_s)) in
            (1..).zip([(of(1, 1), 4.0), (of(0, 2), 8.0), (of(0, 3), 1.0), (of(-1, 4), 16.0)])
        {
            line.enter(1.0, Waiting { whose, ..one(ticket, service_s) });
        }
        // 2 s of its own: so much of the second tenant's goes before it, and all of the third's.
        assert_eq!(line.behind_s(of(0, 5), 2.0, 2.0), 29.0 - 4.0 - 2.0 - 1.0);
        assert_eq!(line.behind_s(of(0, 3), 2.0, 2.0), 29.0 - 4.0 - 3.0 - 1.0, "behind its own tenant's");
        assert_eq!(line.behind_s(of(2, 3), 2.0, 2.0), 29.0);
        assert!(!line.is_turn_of(of(0, 5)) && line.is_turn_of(of(1, 5)));
        assert_eq!(line.highest(), Some(Priority(1)));
        let mut order = Vec::new();
        while let Some(place) = line.next(|_| true, |_| true) {
            order.push(line.take(place).0.ticket);
        }
        assert_eq!(order, [1, 2, 3, 4]);
    }

    #[test]
    fn whoever_waits_for_more_important_ones_is_not_overdue() {
        let mut line = Line::default();
        let named = |number: u64| Adapter::named(&number.to_string());
        let of = |priority, ticket| {
            let whose = Precedence { priority: Priority(priority), tenant: None };
            Waiting { whose, adapter: Some(named(ticket)), ..one(ticket, 1.0) }
        };
        line.enter(1.0, of(0, 7));
        assert!(line.is_overdue(2.0, |one| one == named(7)));
        assert!(!line.is_overdue(0.5, |one| one == named(7)) && !line.is_overdue(2.0, |_| false));
        line.enter(1.5, of(1, 8));
        assert!(!line.is_overdue(2.0, |one| one == named(7)));
        assert!(line.is_overdue(2.0, |one| one == named(8)));
        line.leave(8).unwrap();
        assert!(line.is_overdue(2.0, |one| one == named(7)));
    }

    #[test]
    fn one_that_comes_waits_for_those_alone_who_go_before_it() {
        let mut line = Line::default();
        for (ticket, due_s) in [(1, 5.0), (2, 7.0), (3, 9.0)] {
            line.enter(due_s, one(ticket, 1.0));
        }
        for (due_s, behind_s) in [(0.0, 3.0), (5.0, 2.0), (8.0, 1.0), (9.5, 0.0)] {
            assert_eq!(line.behind_s(Precedence::default(), due_s, 0.5), behind_s, "{due_s}");
        }
    }
}
