//! Routers that tell each other what they decide.

use std::sync::Mutex as StdMutex;

use super::line::{long, may_wait, tells_first_tokens};
use super::*;
use crate::decide::Booked;
use crate::models::PoolNumber;
use crate::pools::Part;
use crate::request::Leg;
use crate::telling::{Beginning, Found, Listener, Told, Word};

const LATER: Duration = Duration::from_secs(101);

fn costs(decider: &Decider, fleet: &FleetSnapshot, prompt: &PromptBlocks) -> Vec<f64> {
    let explained = decider.explain(fleet, &view(prompt), LATER).unwrap();
    explained.candidates.iter().map(|one| one.cost).collect()
}

/// What the router whose fleet that is books of a request that another one has sent to worker `at`.
fn book(decider: &Decider, fleet: &FleetSnapshot, at: usize, prompt: &PromptBlocks) -> Booked {
    decider.book(&fleet.workers()[at], &view(prompt), NOW).unwrap()
}

#[test]
fn what_another_has_sent_costs_and_holds_as_if_it_were_its_own() {
    let (fleet, other_fleet) = (fleet(3), fleet(3));
    let (one, other) = (decider("prefix_aware"), decider("prefix_aware"));
    let prompts: Vec<_> =
        (0..4).map(|n| hashed(&format!("{n} a long story, told again ").repeat(150))).collect();
    let mut decided = Vec::new();
    let mut booked = Vec::new();
    for prompt in prompts.iter().chain(&prompts[..2]) {
        let own = one.decide(&fleet, &view(prompt), Among::Untried(&[]), NOW).unwrap();
        let theirs = book(&other, &other_fleet, own.worker.slot.index(), prompt);
        assert_eq!((theirs.hit_tokens, theirs.basis), (own.hit_tokens, own.basis));
        decided.push(own);
        booked.push(theirs);
    }
    for prompt in &prompts {
        assert_eq!(costs(&one, &fleet, prompt), costs(&other, &other_fleet, prompt));
    }
    let own = |fleet: &FleetSnapshot| fleet.workers().iter().map(|worker| worker.load.own()).sum::<usize>();
    assert_eq!((own(&fleet), own(&other_fleet)), (6, 0), "whose retries they would be");
    for (own, theirs) in decided.iter_mut().zip(&mut booked) {
        one.first_token(&mut own.lease, LATER);
        other.first_token(&mut theirs.lease, LATER);
    }
    let worker = &other_fleet.workers()[0];
    assert_eq!(one.prefill_speed(&fleet.workers()[0]), other.prefill_speed(worker));
    assert_eq!(other_fleet.workers().iter().map(|worker| worker.load.others()).sum::<usize>(), 6);
    assert!(other_fleet.workers().iter().all(|worker| worker.load.own() == 0), "it has none of its own");
    drop((decided, booked));
    for worker in other_fleet.workers() {
        let LoadReading { requests, prefilling, prefill_tokens, context_tokens, held_tokens, .. } =
            worker.load.read();
        assert_eq!([requests, prefilling, prefill_tokens, context_tokens, held_tokens], [0; 5]);
        assert_eq!(worker.load.others(), 0);
    }
    for prompt in &prompts {
        assert_eq!(costs(&one, &fleet, prompt), costs(&other, &other_fleet, prompt));
    }
}

#[test]
fn what_failed_elsewhere_is_not_expected_there() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = hashed(&"the same long story ".repeat(100));
    let Booked { mut lease, basis, .. } = book(&decider, &fleet, 1, &prompt);
    let hits = || decider.explain(&fleet, &view(&prompt), LATER).unwrap().candidates[1].candidate.hit_tokens;
    assert!(hits() > 0);
    decider.take_back(&mut lease, &fleet.workers()[1], &prompt.hashes, basis);
    assert_eq!(hits(), 0);
}

#[test]
fn of_a_worker_that_has_left_nothing_is_booked() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = hashed(&"the same long story ".repeat(100));
    decider.retire(&fleet.workers()[1]);
    assert!(decider.book(&fleet.workers()[1], &view(&prompt), NOW).is_none());
    assert_eq!(decider.tree_blocks(), 0);
}

#[test]
fn what_is_fetched_from_another_worker_is_no_arrival_and_no_prefill() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = hashed(&"the same long story ".repeat(100));
    let decoding = RequestView { leg: Leg::Decode, ..view(&prompt) };
    let booked = decider.book(&fleet.workers()[0], &decoding, NOW).unwrap();
    assert_eq!(fleet.workers()[0].load.read().prefill_tokens, 1);
    drop(booked);
}

#[test]
fn routers_that_decide_at_once_do_not_all_choose_the_same_worker() {
    let prompts: Vec<_> =
        (0..120).map(|n| hashed(&format!("{n} a long story, told again ").repeat(150))).collect();
    // So many prompts come in one instant, to each of the routers in turn, and nothing is told before the next instant.
    let most = |is_told: bool| {
        let routers: Vec<_> = (0..3).map(|_| (fleet(9), decider("prefix_aware"))).collect();
        if is_told {
            for (rank, (_, decider)) in (0..3).zip(&routers) {
                decider.is_told(RouterPlace { rank, count: 3 });
            }
        }
        let mut busiest = 0;
        for (instant, prompts) in prompts.chunks(6).enumerate() {
            let now = NOW + Duration::from_secs(instant as u64);
            let mut here = [0; 9];
            let mut leases = Vec::new();
            for (prompt, (fleet, decider)) in prompts.iter().zip(routers.iter().cycle()) {
                let decided = decider.decide(fleet, &view(prompt), Among::Untried(&[]), now).unwrap();
                here[decided.worker.slot.index()] += 1;
                leases.push(decided);
            }
            busiest += here.into_iter().max().unwrap_or(0);
        }
        busiest
    };
    assert!(most(true) < most(false), "{} beside {}", most(true), most(false));
}

/// How many workers three routers choose at first, and in the end, for six prompts each in twenty instants, where nothing is told before the next:
/// all of them the same prompt, or each router another.
fn chosen_at_once(is_same: bool) -> [usize; 2] {
    let late = Duration::from_millis(5);
    let routers: Vec<_> = (0..3).map(|_| (fleet(9), decider("prefix_aware"))).collect();
    for (rank, (_, decider)) in (0..3).zip(&routers) {
        decider.is_told(RouterPlace { rank, count: 3 });
    }
    let mut chosen = Vec::new();
    for instant in 0..200 {
        let now = NOW + Duration::from_secs(instant);
        let prompt = |router: usize| {
            let router = if is_same { 0 } else { router };
            hashed(&format!("{instant} {router} a long story, told again ").repeat(150))
        };
        let decide = |router: usize, prompt: &PromptBlocks| {
            let (fleet, decider) = &routers[router];
            decider.decide(fleet, &view(prompt), Among::Untried(&[]), now).unwrap()
        };
        let all = (0..6).map(|number| number % 3);
        let decided: Vec<_> = all.map(|router| (router, decide(router, &prompt(router)))).collect();
        let mut booked = Vec::new();
        for (from, own) in &decided {
            for (at, (fleet, decider)) in routers.iter().enumerate().filter(|(at, _)| at != from) {
                let worker = &fleet.workers()[own.worker.slot.index()];
                booked.push((at, decider.book(worker, &view(&prompt(*from)), now + late).unwrap()));
            }
        }
        let slots: std::collections::HashSet<_> = decided.iter().map(|(_, own)| own.worker.slot).collect();
        chosen.push(slots.len());
    }
    [chosen[..20].iter().sum(), chosen[180..].iter().sum()]
}

#[test]
fn routers_that_get_the_same_prompt_at_once_choose_the_same_worker_once_they_know_that_they_do() {
    let ([first, last], apart) = (chosen_at_once(true), chosen_at_once(false));
    assert!(last < first && 3 * last < 2 * apart[1], "{first} and {last} beside {apart:?}");
}

#[derive(Debug, Default)]
struct Heard(StdMutex<Vec<(u64, Word)>>);

impl Listener for Heard {
    fn hear(&self, request: u64, word: Word) {
        self.0.lock().unwrap().push((request, word));
    }
}

#[test]
fn a_lease_says_what_becomes_of_its_request() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = hashed(&"the same long story ".repeat(100));
    let heard = Arc::new(Heard::default());
    let decide = |request| {
        let mut decided = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
        decided.lease.tell(Told::new(request, Arc::clone(&heard) as Arc<dyn Listener>));
        assert_eq!(decided.lease.told(), Some(request));
        decided
    };
    let said = || std::mem::take(&mut *heard.0.lock().unwrap());
    let mut begun = decide(1);
    decider.first_token(&mut begun.lease, LATER);
    begun.lease.first_token();
    drop(begun);
    assert_eq!(said(), [(1, Word::Begun(Beginning::FirstToken)), (1, Word::Over)], "it begins once");
    let mut failed = decide(2);
    failed.lease.first_token();
    decider.take_back(&mut failed.lease, &failed.worker, &prompt.hashes, failed.basis);
    drop(failed);
    assert_eq!(said(), [(2, Word::Begun(Beginning::Other)), (2, Word::Failed), (2, Word::Over)]);
    drop(decide(3));
    assert_eq!(said(), [(3, Word::Over)]);
    heard.hear(4, Word::Found(Found { prompt_tokens: 1, cached_tokens: 1 }));
    assert_eq!(said().len(), 1);
}

#[test]
fn lines_of_all_routers_are_one_line() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    tells_first_tokens(&decider, &fleet);
    let worker = &fleet.workers()[0];
    let prompts = ["one", "two", "three"].map(long);
    let short = hashed(&"a few words ".repeat(200));
    let mut sent: Vec<_> = prompts[..2].iter().map(|prompt| book(&decider, &fleet, 0, prompt)).collect();
    let own = decider.decide(&fleet, &may_wait(&prompts[2]), Among::Untried(&[]), NOW).unwrap();
    let mut turn = own.lease.turn().expect("others have sent it enough");
    let mut is_ready = || {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::Pin::new(&mut turn).poll(&mut cx).is_ready()
    };
    let mut theirs = decider.book(worker, &may_wait(&short), NOW).unwrap();
    assert!(theirs.lease.waits() && worker.load.in_line() == 2);
    let blocks = decider.tree_blocks();
    decider.first_token(&mut sent[0].lease, LATER);
    assert_eq!((is_ready(), worker.load.in_line()), (false, 1), "the other's is shorter, and taken to go");
    decider.goes_elsewhere(&mut theirs, &may_wait(&short), LATER);
    assert!(decider.tree_blocks() > blocks && !theirs.lease.waits(), "it is held there now");
    decider.first_token(&mut sent[1].lease, LATER);
    assert!(is_ready());
    drop((sent, own, theirs));
    assert_eq!((worker.load.in_line(), worker.load.others(), worker.load.read().requests), (0, 0, 0));
}

#[test]
fn who_goes_elsewhere_goes_whatever_was_expected_here() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    tells_first_tokens(&decider, &fleet);
    let worker = &fleet.workers()[0];
    let prompts = ["one", "two", "three", "four"].map(long);
    let sent: Vec<_> = prompts[..2].iter().map(|prompt| book(&decider, &fleet, 0, prompt)).collect();
    let line: Vec<_> =
        prompts[2..].iter().map(|prompt| decider.book(worker, &may_wait(prompt), NOW).unwrap()).collect();
    let before = worker.load.sent();
    let [third, mut fourth] = <[Booked; 2]>::try_from(line).unwrap();
    decider.goes_elsewhere(&mut fourth, &may_wait(&prompts[3]), LATER);
    assert_eq!((worker.load.in_line(), third.lease.waits(), fourth.lease.waits()), (1, true, false));
    assert!(worker.load.sent().tokens > before.tokens);
    drop((sent, third, fourth));
    assert_eq!((worker.load.in_line(), worker.load.read().prefill_tokens), (0, 0));
}

#[test]
fn who_is_in_line_elsewhere_is_held_nowhere_until_it_goes_though_it_would_go_from_here() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    let (worker, prompt) = (&fleet.workers()[0], long("one"));
    let mut booked = decider.book(worker, &may_wait(&prompt), NOW).unwrap();
    assert_eq!((worker.load.in_line(), decider.tree_blocks()), (0, 0), "no first tokens have been seen here");
    decider.goes_elsewhere(&mut booked, &may_wait(&prompt), LATER);
    assert!(decider.tree_blocks() > 0);
    assert_eq!((booked.hit_tokens, booked.basis), (0, Basis::default()), "it expects nothing of itself");
    let found = Found { prompt_tokens: 40_000, cached_tokens: 0 };
    let comparison = found.beside(booked.hit_tokens, may_wait(&prompt).prompt_tokens);
    assert_eq!(decider.compare(worker, booked.basis, comparison), 0, "as expected");
}

#[test]
fn who_is_decided_anew_elsewhere_comes_once() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = long("one");
    let arrivals_per_s = || {
        let parts = [0].map(|_| Part { pool: PoolNumber::default(), of_candidates: 1.0, of_pool: 1.0 });
        decider.lock().pools.arrivals_per_s(parts.into_iter())
    };
    drop(decider.book(&fleet.workers()[0], &may_wait(&prompt), NOW).unwrap());
    let once = arrivals_per_s();
    assert!(once > 0.0);
    for number in 0..20 {
        drop(decider.book_again(&fleet.workers()[number % 2], &may_wait(&prompt), NOW).unwrap());
    }
    assert_eq!(arrivals_per_s(), once);
}
