//! Health against a naive model: a list of all outcomes, read from its beginning each time.

use proptest::prelude::*;

use super::*;

const MIDDLE: f64 = 0.5;

fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn fail_times(health: &Arc<Health>, now: Duration, count: usize) {
    for _ in 0..count {
        Trial::begin_anyway(health, now).fail(now, MIDDLE);
    }
}

fn standing(health: &Health, now: Duration) -> Standing {
    health.standing(now, &mut || MIDDLE)
}

#[test]
fn five_failures_in_a_row_open_it_whatever_went_before() {
    let health = Arc::new(Health::default());
    for _ in 0..1_000 {
        Trial::begin(&health, at(1.0)).unwrap().succeed(at(1.0));
    }
    fail_times(&health, at(2.0), 4);
    assert_eq!(standing(&health, at(2.0)), Standing::Ready);
    assert!(Trial::begin(&health, at(2.0)).unwrap().fail(at(2.0), MIDDLE), "says so");
    assert_eq!(health.breaker(at(2.0)), BreakerState::Open);
    assert_eq!(standing(&health, at(2.9)), Standing::Open);
}

#[test]
fn half_of_five_opens_it_and_a_third_does_not() {
    for (outcomes, expected) in [("fsfsf", BreakerState::Open), ("ssfssfssf", BreakerState::Closed)] {
        let health = Arc::new(Health::default());
        for outcome in outcomes.chars() {
            assert_eq!(health.breaker(at(1.0)), BreakerState::Closed);
            let trial = Trial::begin(&health, at(1.0)).unwrap();
            if outcome == 's' {
                trial.succeed(at(1.0));
            } else {
                trial.fail(at(1.0), MIDDLE);
            }
        }
        assert_eq!(health.breaker(at(1.0)), expected, "{outcomes}");
    }
}

#[test]
fn half_open_lets_one_probe_through_and_its_first_byte_closes() {
    let health = Arc::new(Health::default());
    fail_times(&health, at(1.0), 5);
    assert!(Trial::begin(&health, at(1.5)).is_none());
    let mut probe = Trial::begin(&health, at(2.0)).expect("its second is over");
    assert_eq!(health.breaker(at(2.0)), BreakerState::HalfOpen);
    assert!(Trial::begin(&health, at(2.0)).is_none(), "one at a time");
    probe.first_byte();
    assert_eq!(health.breaker(at(2.0)), BreakerState::Closed);
    assert_eq!(standing(&health, at(2.0)), Standing::Ready);
    // It breaks later: one failure among others.
    probe.fail(at(3.0), MIDDLE);
    assert_eq!(health.breaker(at(3.0)), BreakerState::Closed);
}

#[test]
fn a_probe_that_is_dropped_makes_room_for_the_next() {
    let health = Arc::new(Health::default());
    fail_times(&health, at(1.0), 5);
    drop(Trial::begin(&health, at(2.0)).unwrap());
    assert!(Trial::begin(&health, at(2.0)).is_some());
}

#[test]
fn failed_probes_double_the_wait_up_to_its_end() {
    let health = Arc::new(Health::default());
    let mut now = at(1.0);
    fail_times(&health, now, 5);
    for wait_s in [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
        assert!(Trial::begin(&health, now + at(wait_s - 0.1)).is_none(), "{wait_s}");
        now += at(wait_s);
        Trial::begin(&health, now).unwrap_or_else(|| panic!("{wait_s}")).fail(now, MIDDLE);
    }
}

#[test]
fn draws_spread_the_end_of_an_opening() {
    for (draw, end_s) in [(0.0, 1.8), (1.0, 2.2)] {
        let health = Arc::new(Health::default());
        for _ in 0..5 {
            Trial::begin(&health, at(1.0)).unwrap().fail(at(1.0), draw);
        }
        assert_eq!(health.breaker(at(end_s - 0.01)), BreakerState::Open);
        assert_eq!(health.breaker(at(end_s)), BreakerState::HalfOpen);
    }
}

#[test]
fn what_began_before_it_opened_says_nothing_new() {
    let health = Arc::new(Health::default());
    let old: Vec<_> = (0..3).map(|_| Trial::begin(&health, at(1.0)).unwrap()).collect();
    fail_times(&health, at(1.0), 5);
    for (trial, now) in old.into_iter().zip([1.1, 1.2, 2.5]) {
        if now < 1.15 {
            trial.succeed(at(now));
        } else {
            trial.fail(at(now), MIDDLE);
        }
        assert_ne!(health.breaker(at(now)), BreakerState::Closed);
    }
    assert!(Trial::begin(&health, at(2.5)).is_some(), "late failures did not lengthen it");
}

#[test]
fn success_without_an_alternative_closes_it() {
    let health = Arc::new(Health::default());
    fail_times(&health, at(1.0), 5);
    let mut trial = Trial::begin_anyway(&health, at(1.1));
    trial.first_byte();
    assert_eq!(health.breaker(at(1.1)), BreakerState::Closed);
}

#[test]
fn a_busy_worker_is_left_alone_for_as_long_as_it_says() {
    let health = Arc::new(Health::default());
    health.cool(at(1.0), at(2.0));
    health.cool(at(1.0), at(0.5));
    assert_eq!(standing(&health, at(2.9)), Standing::Cooling);
    assert_eq!(health.cooling(at(2.0)), Some(at(1.0)));
    assert_eq!(standing(&health, at(3.0)), Standing::Ready);
    health.cool(at(4.0), at(3_600.0));
    assert_eq!(standing(&health, at(33.9)), Standing::Cooling);
    assert_eq!(standing(&health, at(34.0)), Standing::Ready);
}

#[test]
fn one_that_comes_back_gets_its_share_little_by_little() {
    let health = Arc::new(Health::default());
    fail_times(&health, at(1.0), 5);
    health.cool(at(1.0), at(20.0));
    health.come_back(at(10.0), Some(at(10.0)));
    assert_eq!(health.breaker(at(10.0)), BreakerState::Closed);
    let with = |now: f64, draw: f64| health.standing(at(now), &mut || draw);
    assert_eq!((with(10.0, 0.09), with(10.0, 0.11)), (Standing::Ready, Standing::Warming));
    assert_eq!((with(15.0, 0.54), with(15.0, 0.56)), (Standing::Ready, Standing::Warming));
    assert_eq!(with(20.0, 0.999), Standing::Ready);
    assert_eq!(health.warming_share(at(20.0)), None);
    health.come_back(at(30.0), None);
    assert_eq!(with(30.0, 0.999), Standing::Ready);
}

#[test]
fn gates_hold_what_was_written() {
    for era in [0, 1, MAX_ERA] {
        for until in [at(0.0), at(1.0), at(1e9 / 4.0)] {
            for state in [State::Open { until }, State::Probing { until }] {
                assert_eq!(read_gate(write_gate(state, era)), (state, era));
            }
        }
        assert_eq!(read_gate(write_gate(State::Closed, era)), (State::Closed, era));
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Wait(u64),
    Begin,
    BeginAnyway,
    FirstByte(usize),
    Succeed(usize),
    Fail(usize),
    Drop(usize),
    Cool(u64),
    ComeBack,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (1u64..4_000).prop_map(Operation::Wait),
        Just(Operation::Begin),
        Just(Operation::BeginAnyway),
        any::<usize>().prop_map(Operation::FirstByte),
        any::<usize>().prop_map(Operation::Succeed),
        any::<usize>().prop_map(Operation::Fail),
        any::<usize>().prop_map(Operation::Fail),
        any::<usize>().prop_map(Operation::Drop),
        (1u64..2_000).prop_map(Operation::Cool),
        Just(Operation::ComeBack),
    ]
}

/// What a trial is, in the model.
#[derive(Clone, Copy)]
struct Attempt {
    opened_before: usize,
    probe: bool,
}

#[derive(Default)]
struct Model {
    now_ms: u64,
    /// Since it was last closed for a reason: `(second, failed)`.
    outcomes: Vec<(u64, bool)>,
    /// When it opened and for how long, all of it; `closed` says whether the last one is over.
    openings: Vec<(u64, u64)>,
    closed: Option<bool>,
    in_a_row_of_openings: u32,
    cooling_until_ms: u64,
}

impl Model {
    fn is_closed(&self) -> bool {
        self.closed.unwrap_or(true)
    }

    fn close(&mut self) {
        self.closed = Some(true);
        self.in_a_row_of_openings = 0;
        self.outcomes.clear();
    }

    fn open(&mut self) {
        let length = (1_000 * 2u64.pow(self.in_a_row_of_openings)).min(30_000);
        self.openings.push((self.now_ms, length));
        self.in_a_row_of_openings = (self.in_a_row_of_openings + 1).min(10);
        self.closed = Some(false);
    }

    fn wait_is_over(&self) -> bool {
        self.openings.last().is_some_and(|(from, length)| self.now_ms >= from + length)
    }

    fn fail(&mut self, attempt: Attempt) {
        self.outcomes.push((self.now_ms / 1_000, true));
        if !self.is_closed() {
            if attempt.probe && attempt.opened_before == self.openings.len() {
                self.open();
            }
            return;
        }
        let recent: Vec<_> =
            self.outcomes.iter().filter(|(second, _)| second + 10 > self.now_ms / 1_000).collect();
        let failed = recent.iter().filter(|(_, failed)| *failed).count();
        let in_a_row = self.outcomes.iter().rev().take_while(|(_, failed)| *failed).count();
        if recent.len() >= 5 && failed * 2 >= recent.len() || in_a_row >= 5 {
            self.open();
        }
    }

    /// A good first byte, or a good end.
    fn good(&mut self, attempt: Attempt, ended: bool) {
        if self.is_closed() {
            if ended {
                self.outcomes.push((self.now_ms / 1_000, false));
            }
        } else if attempt.opened_before == self.openings.len() {
            self.close();
        }
    }
}

proptest! {
    #[test]
    fn does_what_the_naive_model_does(operations in prop::collection::vec(operation(), 1..300)) {
        let health = Arc::new(Health::default());
        let mut model = Model::default();
        let mut flying: Vec<(Trial, Attempt)> = Vec::new();
        for operation in operations {
            let now = Duration::from_millis(model.now_ms);
            let probing = !model.is_closed() && flying.iter()
                .any(|(_, attempt)| attempt.probe && attempt.opened_before == model.openings.len());
            let index = |at: usize| (!flying.is_empty()).then(|| at % flying.len().max(1));
            match operation {
                Operation::Wait(ms) => model.now_ms += ms,
                Operation::Begin | Operation::BeginAnyway => {
                    let free_probe = !model.is_closed() && model.wait_is_over() && !probing;
                    let anyway = matches!(operation, Operation::BeginAnyway);
                    let trial = if anyway {
                        Some(Trial::begin_anyway(&health, now))
                    } else {
                        Trial::begin(&health, now)
                    };
                    prop_assert_eq!(trial.is_some(), anyway || model.is_closed() || free_probe);
                    let attempt = Attempt { opened_before: model.openings.len(), probe: free_probe };
                    flying.extend(trial.map(|trial| (trial, attempt)));
                }
                Operation::FirstByte(at) => if let Some(at) = index(at) {
                    flying[at].0.first_byte();
                    model.good(flying[at].1, false);
                    flying[at].1.probe = false;
                },
                Operation::Succeed(at) => if let Some(at) = index(at) {
                    let (trial, attempt) = flying.swap_remove(at);
                    trial.succeed(now);
                    model.good(attempt, true);
                },
                Operation::Fail(at) => if let Some(at) = index(at) {
                    let (trial, attempt) = flying.swap_remove(at);
                    trial.fail(now, MIDDLE);
                    model.fail(attempt);
                },
                Operation::Drop(at) => if let Some(at) = index(at) {
                    drop(flying.swap_remove(at));
                },
                Operation::Cool(ms) => {
                    health.cool(now, Duration::from_millis(ms));
                    model.cooling_until_ms = model.cooling_until_ms.max(model.now_ms + ms);
                }
                Operation::ComeBack => {
                    health.come_back(now, None);
                    model.close();
                    model.cooling_until_ms = 0;
                }
            }
            let now = Duration::from_millis(model.now_ms);
            let probing = flying.iter()
                .any(|(_, attempt)| attempt.probe && attempt.opened_before == model.openings.len());
            let expected = match (model.is_closed(), model.wait_is_over()) {
                (true, _) => BreakerState::Closed,
                (false, over) if over || probing => BreakerState::HalfOpen,
                _ => BreakerState::Open,
            };
            prop_assert_eq!(health.breaker(now), expected);
            let expected = match expected {
                BreakerState::Open => Standing::Open,
                BreakerState::HalfOpen if probing => Standing::Open,
                _ if model.cooling_until_ms > model.now_ms => Standing::Cooling,
                _ => Standing::Ready,
            };
            prop_assert_eq!(standing(&health, now), expected);
        }
    }
}
