//! How long a worker has been silent: it has requests, and nothing has come of any of them. Its process may answer probes all the same: an engine hangs in a
//! kernel or a collective, and its server is well.
//!
//! Knows no clock, no network and no fleet; readings come in, a step comes out. Used by the [prober](super::Prober), who has it
//! [examined](super::examination) half-way.

use std::time::Duration;

use tokio::time::Instant;

use super::examination::Finding;

/// The silence that is expected counts so many times: while a long prompt is computed, some engines do nothing else, and what is expected of an engine may
/// be wrong.
const EXPECTED_COUNTS: u32 = 4;

/// How long a worker has been silent, and what was done about it.
#[derive(Debug)]
pub(super) struct Silence {
    /// The least silence that is a stall; `None` for none.
    limit: Option<Duration>,
    /// Whether it has ever generated anything: one that has not may still be compiling.
    has_spoken: bool,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Something came of late, or there is nothing to come.
    Well,
    /// What it may take on top of the limit is for its prompts.
    Silent {
        since: Instant,
        allowed: Duration,
    },
    /// It is being examined; again, if it is waited for.
    Examined {
        since: Instant,
        is_waited_for: bool,
    },
    /// It hangs, unless all others do the same.
    Hangs {
        since: Instant,
        is_waited_for: bool,
    },
    StandsStill,
}

/// What is so at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    pub(super) now: Instant,
    /// Whether it has generated anything since the last reading.
    pub(super) generates: bool,
    /// Whether it has requests.
    pub(super) has_requests: bool,
    /// For how long it may generate nothing while it computes prompts, as far as is expected.
    pub(super) expected: Duration,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Nothing,
    /// It is to be examined, for so long.
    Examine(Duration),
    /// If others do not hang as well, it stands still, and has been silent for so long.
    Judge(Duration),
    /// It stands still; those who wait for it are told again, since others may have come who could have what they asked for.
    TellAgain,
    /// It goes on.
    Recovered,
}

impl Silence {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, has_spoken: false, state: State::Well }
    }

    /// Takes in how things are.
    pub(super) fn look(&mut self, Reading { now, generates, has_requests, expected }: Reading) -> Step {
        let Some(limit) = self.limit else { return Step::Nothing };
        if generates {
            self.has_spoken = true;
            return self.goes_on();
        }
        if matches!(self.state, State::StandsStill) {
            // That it goes on is told by who examines it.
            return if has_requests { Step::TellAgain } else { Step::Nothing };
        }
        if !has_requests || !self.has_spoken {
            self.state = State::Well;
            return Step::Nothing;
        }
        let (since, allowed) = match self.state {
            State::Silent { since, allowed } => (since, allowed),
            State::Examined { .. } => return Step::Nothing,
            State::Hangs { since, .. } => return Step::Judge(now - since),
            State::Well | State::StandsStill => (now, Duration::ZERO),
        };
        let allowed = allowed.max(expected * EXPECTED_COUNTS);
        let half = (limit + allowed) / 2;
        if now - since < half {
            self.state = State::Silent { since, allowed };
            return Step::Nothing;
        }
        self.state = State::Examined { since, is_waited_for: false };
        Step::Examine(half)
    }

    /// Takes in what an examination has found.
    pub(super) fn found(&mut self, finding: Finding) -> Step {
        match (self.state, finding) {
            (State::Examined { since, is_waited_for }, Finding::Hangs) => {
                self.state = State::Hangs { since, is_waited_for };
                Step::Nothing
            }
            _ => self.goes_on(),
        }
    }

    fn goes_on(&mut self) -> Step {
        match std::mem::replace(&mut self.state, State::Well) {
            State::StandsStill => Step::Recovered,
            _ => Step::Nothing,
        }
    }

    /// Nobody could stand in for it, so that it is waited for. Returns for how long it is to be examined again before it can be judged anew, since by then it
    /// may go on and not have told; and whether that it is waited for is news.
    pub(super) fn waits_for_it(&mut self) -> Option<(Duration, bool)> {
        let (State::Hangs { since, is_waited_for }, Some(limit)) = (self.state, self.limit) else {
            return None;
        };
        self.state = State::Examined { since, is_waited_for: true };
        Some((limit / 2, !is_waited_for))
    }

    /// Others do not hang, so it stands still.
    pub(super) fn stands_still(&mut self) {
        self.state = State::StandsStill;
    }

    pub(super) fn is_still(&self) -> bool {
        matches!(self.state, State::StandsStill)
    }

    /// Whether there is nothing to be found out.
    pub(super) fn is_well(&self) -> bool {
        matches!(self.state, State::Well)
    }

    /// Its process has ended: what comes next is another.
    pub(super) fn forget(&mut self) {
        *self = Self::new(self.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    struct Case {
        silence: Silence,
        began: Instant,
        expected: Duration,
    }

    impl Case {
        /// A worker that has just said something.
        fn begin() -> Self {
            let mut case =
                Self { silence: Silence::new(Some(LIMIT)), began: Instant::now(), expected: Duration::ZERO };
            assert_eq!(case.at(0, true), Step::Nothing);
            case
        }

        fn reading(&self, second: u64, generates: bool) -> Reading {
            let now = self.began + Duration::from_secs(second);
            Reading { now, generates, has_requests: true, expected: self.expected }
        }

        fn at(&mut self, second: u64, generates: bool) -> Step {
            self.silence.look(self.reading(second, generates))
        }

        /// Steps other than nothing, of a silent reading each second, with when they came.
        fn silent(&mut self, seconds: std::ops::RangeInclusive<u64>) -> Vec<(u64, Step)> {
            let steps = seconds.map(|second| (second, self.at(second, false)));
            steps.filter(|(_, step)| *step != Step::Nothing).collect()
        }
    }

    #[test]
    fn a_silent_worker_is_examined_half_way_and_judged_if_it_hangs() {
        let mut case = Case::begin();
        // Silent since the first reading in which nothing had come.
        assert_eq!(case.silent(1..=30), [(16, Step::Examine(LIMIT / 2))]);
        assert_eq!(case.silence.found(Finding::Hangs), Step::Nothing);
        let judged = |second, seconds| (second, Step::Judge(Duration::from_secs(seconds)));
        assert_eq!(case.silent(31..=31), [judged(31, 30)]);
        assert_eq!(case.silence.waits_for_it(), Some((LIMIT / 2, true)), "others hang as well");
        assert_eq!(case.silent(32..=45), []);
        case.silence.found(Finding::Hangs);
        assert_eq!(case.silent(46..=46), [judged(46, 45)]);
        assert_eq!(case.silence.waits_for_it(), Some((LIMIT / 2, false)), "that is no news");
        case.silence.found(Finding::Hangs);
        case.silence.stands_still();
        assert_eq!((case.at(47, false), case.silence.is_still()), (Step::TellAgain, true));
        let without = Reading { has_requests: false, ..case.reading(48, false) };
        assert_eq!((case.silence.look(without), case.silence.is_still()), (Step::Nothing, true));
        assert_eq!((case.silence.found(Finding::Generates), case.silence.is_well()), (Step::Recovered, true));
        case.silence.stands_still();
        assert_eq!(case.at(50, true), Step::Recovered);
    }

    #[test]
    fn whatever_else_is_found_and_any_word_of_it_begin_anew() {
        for finding in [Finding::Generates, Finding::Unknown] {
            let mut case = Case::begin();
            assert_eq!(case.silent(1..=20).len(), 1);
            assert_eq!(case.silence.found(finding), Step::Nothing);
            assert_eq!(case.silent(21..=40), [(36, Step::Examine(LIMIT / 2))]);
        }
        let mut case = Case::begin();
        assert_eq!(case.silent(1..=20).len(), 1);
        assert_eq!((case.at(21, true), case.silence.is_well()), (Step::Nothing, true));
        let mut case = Case::begin();
        case.silent(1..=20);
        case.silence.found(Finding::Hangs);
        case.at(22, true);
        assert_eq!(case.silent(23..=37), []);
    }

    #[test]
    fn prompts_are_given_their_time() {
        let mut case = Case::begin();
        case.expected = Duration::from_secs(10);
        assert_eq!(case.silent(1..=71), [(36, Step::Examine(Duration::from_secs(35)))]);
        // What was expected when the silence began counts, though it was expected to be computed by now.
        let mut case = Case::begin();
        case.expected = Duration::from_secs(10);
        case.at(1, false);
        case.expected = Duration::ZERO;
        assert_eq!(case.silent(2..=71), [(36, Step::Examine(Duration::from_secs(35)))]);
    }

    #[test]
    fn one_without_requests_one_that_has_never_spoken_and_one_that_is_another_are_not_judged() {
        let mut case = Case::begin();
        for second in 1..100 {
            let reading = Reading { has_requests: false, ..case.reading(second, false) };
            assert_eq!(case.silence.look(reading), Step::Nothing);
        }
        let mut case = Case::begin();
        case.silence.forget();
        assert_eq!(case.silent(1..=100), []);
        let mut never = Case { silence: Silence::new(None), ..Case::begin() };
        never.at(0, true);
        assert_eq!(never.silent(1..=100), []);
    }
}
