//! Who goes before whom, where requests wait: higher priorities first, and tenants of one priority in turn, by what each has had.
//!
//! The turns are those of start-time fair queueing: who comes back after a pause, or for the first time, has had as much as whoever is served at that
//! time, so that nobody saves up turns and nobody is made to wait for what he had while others wanted nothing. Knows no clock and no requests. Used by
//! lines of single workers ([`speed`](crate::speed)) and by the [backlog](crate::backlog).

use std::cmp::Ordering;

use smallvec::SmallVec;

/// Tenants remembered that nobody waits of.
const MOST_IDLE: usize = 64;

/// How important a request is beside others; 0 is usual, and more is more important.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Priority(pub i8);

impl Priority {
    /// Whether it is only for time that nobody else needs.
    #[must_use]
    pub fn is_background(self) -> bool {
        self.0 < 0
    }
}

/// What a request waits by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Precedence {
    /// Its own, or that of its tenant's key.
    pub priority: Priority,
    /// Hash of the customer it is of; `None` for all of whom that is not known, who are one.
    pub tenant: Option<u64>,
}

impl Precedence {
    /// The same of one that has begun: whatever it was before, somebody has a part of its answer, or is computing it.
    #[must_use]
    pub fn of_one_that_has_begun(self) -> Self {
        Self { priority: self.priority.max(Priority::default()), ..self }
    }
}

/// Those of one tenant and priority who wait, in an order of their own.
pub(crate) trait Waiters: Default {
    fn is_empty(&self) -> bool;
}

#[derive(Debug)]
struct Group<Q> {
    whose: Precedence,
    /// Service, in any unit.
    had: f64,
    waiters: Q,
}

/// Queues of tenants and priorities, and whose turn it is.
#[derive(Debug)]
pub(crate) struct Turns<Q> {
    groups: Vec<Group<Q>>,
    /// What whoever was served last had had by then, by priority.
    now: SmallVec<[(Priority, f64); 1]>,
}

impl<Q> Default for Turns<Q> {
    fn default() -> Self {
        Self { groups: Vec::new(), now: SmallVec::new() }
    }
}

impl<Q: Waiters> Turns<Q> {
    fn now(&self, priority: Priority) -> f64 {
        self.now.iter().find(|one| one.0 == priority).map_or(0.0, |one| one.1)
    }

    /// Where a tenant's queue is; there is one from now on.
    fn place(&mut self, whose: Precedence) -> usize {
        if let Some(at) = self.groups.iter().position(|group| group.whose == whose) {
            return at;
        }
        if self.groups.len() > 2 * MOST_IDLE {
            self.forget_idle();
        }
        self.groups.push(Group { whose, had: self.now(whose.priority), waiters: Q::default() });
        self.groups.len() - 1
    }

    /// Keeps so many of those that nobody waits of: who has had the least beyond what others had forgets the least, since whoever comes back is taken to
    /// have had as much as they.
    fn forget_idle(&mut self) {
        let beyond = |group: &Group<Q>| group.had - self.now(group.whose.priority);
        let idle = self.groups.iter().filter(|group| group.waiters.is_empty());
        let mut most: Vec<f64> = idle.map(beyond).collect();
        if most.len() <= MOST_IDLE {
            return;
        }
        most.sort_unstable_by(|one, other| other.total_cmp(one));
        let least = most[MOST_IDLE];
        let kept: Vec<bool> =
            self.groups.iter().map(|group| !group.waiters.is_empty() || beyond(group) > least).collect();
        let mut kept = kept.into_iter();
        self.groups.retain(|_| kept.next().unwrap_or(true));
    }

    /// Whether nobody who waits goes before one of `whose`, who may not wait himself.
    pub(crate) fn is_turn_of(&self, whose: Precedence) -> bool {
        let own = self.groups.iter().find(|group| group.whose == whose);
        let now = self.now(whose.priority);
        let had = own.map_or(now, |own| if own.waiters.is_empty() { own.had.max(now) } else { own.had });
        let mut others = self.groups.iter().filter(|group| !group.waiters.is_empty() && group.whose != whose);
        others.all(|other| match other.whose.priority.cmp(&whose.priority) {
            Ordering::Less => true,
            Ordering::Equal => other.had >= had,
            Ordering::Greater => false,
        })
    }

    /// The queue that one more gets into.
    pub(crate) fn enter(&mut self, whose: Precedence) -> &mut Q {
        let (at, now) = (self.place(whose), self.now(whose.priority));
        let group = &mut self.groups[at];
        if group.waiters.is_empty() {
            group.had = group.had.max(now);
        }
        &mut group.waiters
    }

    /// A tenant has had that: its turn comes so much later.
    pub(crate) fn charge(&mut self, whose: Precedence, service: f64) {
        let at = self.place(whose);
        let group = &mut self.groups[at];
        let since = match self.now.iter_mut().find(|one| one.0 == whose.priority) {
            Some((_, now)) => now,
            None => {
                self.now.push((whose.priority, 0.0));
                &mut self.now.last_mut().expect("it has just been pushed").1
            }
        };
        if group.waiters.is_empty() {
            group.had = group.had.max(*since);
        }
        *since = since.max(group.had);
        group.had += service;
    }

    /// The queue whose turn it is, of those that somebody waits in.
    pub(crate) fn first(&self) -> Option<usize> {
        self.waited_in().min_by(|one, other| self.in_order(*one, *other))
    }

    /// All of them, whose turn it is first.
    pub(crate) fn in_turn(&self) -> SmallVec<[usize; 4]> {
        let mut places: SmallVec<[usize; 4]> = self.waited_in().collect();
        if places.len() > 1 {
            places.sort_by(|one, other| self.in_order(*one, *other));
        }
        places
    }

    fn waited_in(&self) -> impl Iterator<Item = usize> {
        (0..self.groups.len()).filter(|at| !self.groups[*at].waiters.is_empty())
    }

    /// Whoever has had as much is told apart by his number: places change when somebody is forgotten.
    fn in_order(&self, one: usize, other: usize) -> Ordering {
        let [one, other] = [one, other].map(|at| &self.groups[at]);
        let by_priority = other.whose.priority.cmp(&one.whose.priority);
        by_priority.then(one.had.total_cmp(&other.had)).then(one.whose.tenant.cmp(&other.whose.tenant))
    }

    /// A queue by its place, and whose it is.
    pub(crate) fn at(&self, place: usize) -> (Precedence, &Q) {
        let group = &self.groups[place];
        (group.whose, &group.waiters)
    }

    pub(crate) fn at_mut(&mut self, place: usize) -> &mut Q {
        &mut self.groups[place].waiters
    }

    /// All queues that somebody waits in, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (Precedence, &Q)> {
        let all = self.groups.iter().map(|group| (group.whose, &group.waiters));
        all.filter(|(_, waiters)| !waiters.is_empty())
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Q> {
        self.groups.iter_mut().map(|group| &mut group.waiters).filter(|waiters| !waiters.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tickets.
    impl Waiters for Vec<u32> {
        fn is_empty(&self) -> bool {
            self.as_slice().is_empty()
        }
    }

    fn of(priority: i8, tenant: u64) -> Precedence {
        Precedence { priority: Priority(priority), tenant: Some(tenant) }
    }

    /// Who is served next, with one unit.
    fn next(turns: &mut Turns<Vec<u32>>) -> Option<u64> {
        let place = turns.first()?;
        assert_eq!(turns.in_turn().first(), Some(&place));
        let whose = turns.at(place).0;
        turns.at_mut(place).remove(0);
        turns.charge(whose, 1.0);
        whose.tenant
    }

    fn order(turns: &mut Turns<Vec<u32>>, count: usize) -> Vec<u64> {
        std::iter::from_fn(|| next(turns)).take(count).collect()
    }

    #[test]
    fn what_has_begun_is_in_the_background_no_more_and_otherwise_what_it_was() {
        for (priority, begun) in [(-10, 0), (-1, 0), (0, 0), (1, 1), (10, 10)] {
            assert_eq!(of(priority, 7).of_one_that_has_begun(), of(begun, 7));
        }
    }

    #[test]
    fn tenants_take_turns_however_many_wait_of_each() {
        let mut turns: Turns<Vec<u32>> = Turns::default();
        turns.enter(of(0, 1)).extend(0..100);
        assert_eq!(order(&mut turns, 10), [1; 10]);
        turns.enter(of(0, 2)).extend(0..3);
        let shared = order(&mut turns, 6);
        assert_eq!(shared.iter().filter(|one| **one == 2).count(), 3, "{shared:?}");
        assert_eq!(order(&mut turns, 2), [1, 1]);
    }

    #[test]
    fn who_comes_back_has_saved_nothing_up_and_owes_nothing_of_old() {
        let mut turns: Turns<Vec<u32>> = Turns::default();
        turns.enter(of(0, 1)).extend(0..100);
        assert_eq!(order(&mut turns, 60).len(), 60);
        // It had much while nobody else wanted anything.
        turns.enter(of(0, 2)).extend(0..100);
        let shared = order(&mut turns, 20);
        assert_eq!(shared.iter().filter(|one| **one == 1).count(), 10, "{shared:?}");
        // The second one pauses: that it had little in the meantime is no credit.
        turns.at_mut(turns.place_of(of(0, 2))).clear();
        assert_eq!(order(&mut turns, 20), [1; 20]);
        turns.enter(of(0, 2)).extend(0..100);
        let shared = order(&mut turns, 10);
        assert!((4..=6).contains(&shared.iter().filter(|one| **one == 2).count()), "{shared:?}");
    }

    #[test]
    fn what_was_served_without_waiting_counts() {
        let mut turns: Turns<Vec<u32>> = Turns::default();
        for _ in 0..5 {
            turns.charge(of(0, 1), 1.0);
            turns.charge(of(0, 2), 1.0);
        }
        turns.charge(of(0, 1), 3.0);
        turns.enter(of(0, 1)).extend(0..9);
        turns.enter(of(0, 2)).extend(0..9);
        assert_eq!(order(&mut turns, 3), [2, 2, 2], "it has had three less");
    }

    #[test]
    fn higher_priorities_go_first_and_have_turns_of_their_own() {
        let mut turns: Turns<Vec<u32>> = Turns::default();
        turns.enter(of(0, 1)).extend(0..2);
        turns.enter(of(5, 2)).extend(0..2);
        turns.enter(of(5, 3)).extend(0..1);
        turns.enter(of(-1, 4)).extend(0..1);
        let all = order(&mut turns, 9);
        assert_eq!((&all[3..], all.len()), (&[1, 1, 4][..], 6));
        assert!(Priority(-1).is_background() && !Priority(0).is_background());
    }

    #[test]
    fn tenants_that_have_gone_are_forgotten_at_last() {
        let mut turns: Turns<Vec<u32>> = Turns::default();
        turns.enter(of(0, 7)).push(1);
        // As many at once, and one after another.
        (1_000..3_000).for_each(|tenant| turns.enter(of(0, tenant)).push(1));
        turns
            .groups
            .iter_mut()
            .filter(|group| group.whose != of(0, 7))
            .for_each(|group| group.waiters.clear());
        (100..1_000).for_each(|tenant| turns.charge(of(0, tenant), 0.1));
        assert!(turns.groups.len() <= 2 * MOST_IDLE + 1, "{}", turns.groups.len());
        assert_eq!(next(&mut turns), Some(7), "who waits is not");
    }

    #[test]
    fn who_owes_the_most_is_remembered_whatever_the_priority() {
        let mut turns: Turns<Vec<u32>> = Turns::default();
        // The others of its priority have had more than anybody of that one.
        (0..20).for_each(|_| turns.charge(of(5, 1), 100.0));
        (10..300).for_each(|tenant| turns.charge(of(5, tenant), 0.1));
        turns.charge(of(0, 2), 50.0);
        (300..900).for_each(|tenant| turns.charge(of(5, tenant), 0.1));
        turns.enter(of(0, 3)).push(1);
        turns.enter(of(0, 2)).push(1);
        assert_eq!(order(&mut turns, 2), [3, 2]);
    }

    #[test]
    fn one_that_comes_goes_before_those_who_have_had_more() {
        let mut turns: Turns<Vec<u32>> = Turns::default();
        assert!(turns.is_turn_of(of(0, 1)));
        turns.enter(of(0, 1)).extend(0..9);
        assert_eq!(order(&mut turns, 4), [1; 4]);
        assert!(turns.is_turn_of(of(0, 1)) && turns.is_turn_of(of(0, 2)) && !turns.is_turn_of(of(-1, 3)));
        turns.charge(of(0, 2), 5.0);
        assert!(!turns.is_turn_of(of(0, 2)) && turns.is_turn_of(of(1, 2)));
    }

    impl<Q: Waiters> Turns<Q> {
        fn place_of(&self, whose: Precedence) -> usize {
            self.groups.iter().position(|group| group.whose == whose).unwrap()
        }
    }
}
