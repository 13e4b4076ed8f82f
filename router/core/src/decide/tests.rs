//! The decider over a small fleet.

mod adapters;
mod demand;
mod due;
mod left;
mod legs;
mod line;
mod nobody;
mod pools;
mod precedence;
mod told;
mod whole_answers;

use roundhouse_types::{ChainHasher, RouterPlace, WorkerLoad as ReportedWorkerLoad};

use super::*;
use crate::fleet::Fleet;
use crate::ledger::LoadReading;
use crate::policy::{Choice, by_name};
use crate::prefix::{PromptBlocks, PromptHasher};
use crate::reports::{EngineLoad, LoadReport};
use crate::request::Answer;
use crate::worker::{WorkerId, WorkerSpec};

const NOW: Duration = Duration::from_secs(100);

fn fleet(count: usize) -> Arc<FleetSnapshot> {
    let specs: Vec<_> = (0..count)
        .map(|n| WorkerSpec::new(WorkerId::new(&format!("w{n}")), format!("http://w{n}:8000")))
        .collect();
    let mut fleet = Fleet::default();
    fleet.reconcile(&specs);
    let snapshot = fleet.snapshot();
    for worker in snapshot.workers() {
        worker.mark_up();
    }
    snapshot
}

fn decider(policy: &str) -> Decider {
    Decider::new(by_name(policy).unwrap(), TreeLimits::within_bytes(1 << 20), 1)
}

fn hashed(prompt: &str) -> PromptBlocks {
    hashed_with_tools(None, prompt)
}

fn hashed_with_tools(tools: Option<&str>, prompt: &str) -> PromptBlocks {
    let mut hasher = PromptHasher::new(ChainHasher::new(3), PromptUse::Whole);
    if let Some(tools) = tools {
        hasher.push_tools(tools.as_bytes());
    }
    hasher.push(prompt.as_bytes());
    hasher.finish(ChainHasher::new(4))
}

fn view(prompt: &PromptBlocks) -> RequestView<'_> {
    RequestView {
        blocks: &prompt.hashes,
        opening: prompt.opening,
        prompt_bytes: prompt.prompt_bytes,
        prompt_tokens: prompt.prompt_bytes / 4,
        ..RequestView::default()
    }
}

#[test]
fn a_repeated_prompt_goes_back_with_a_predicted_hit() {
    let (fleet, decider) = (fleet(4), decider("prefix_aware"));
    let prompt = hashed(&"the same long story ".repeat(100));
    let first = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
    assert_eq!(first.hit_tokens, 0);
    let home = first.worker.slot;
    drop(first);
    let again = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
    assert_eq!(again.worker.slot, home);
    assert_eq!(again.hit_tokens, 1_984 / 4, "31 blocks of 64 bytes of the prompt's 2,000");
}

#[test]
fn equal_tools_are_a_hit_for_another_conversation() {
    let (fleet, decider) = (fleet(4), decider("prefix_aware"));
    let tools = "a tool and its parameters ".repeat(100);
    let first = hashed_with_tools(Some(&tools), &"how is the weather? ".repeat(40));
    let home = decider.decide(&fleet, &view(&first), Among::Untried(&[]), NOW).unwrap().worker.slot;
    let again = decider.decide(&fleet, &view(&first), Among::Untried(&[]), NOW).unwrap();
    assert_eq!(
        (again.worker.slot, again.hit_tokens),
        (home, (2_600 + 768) / 4),
        "all tools and 12 blocks of 64"
    );
    drop(again);
    let other = decider
        .decide(&fleet, &view(&hashed_with_tools(Some(&tools), &"x".repeat(800))), Among::Untried(&[]), NOW)
        .unwrap();
    assert_eq!((other.worker.slot, other.hit_tokens), (home, 2_560 / 4), "32 blocks of 64 and 2 of 256");
}

#[test]
fn a_burst_of_cold_prompts_spreads() {
    let (fleet, decider) = (fleet(4), decider("prefix_aware"));
    let decided: Vec<_> = (0..8)
        .map(|n| {
            decider
                .decide(&fleet, &view(&hashed(&format!("{n} {}", "x".repeat(800)))), Among::Untried(&[]), NOW)
                .unwrap()
        })
        .collect();
    let mut slots: Vec<_> = decided.iter().map(|decided| decided.worker.slot.0).collect();
    slots.sort_unstable();
    assert_eq!(slots, [0, 0, 1, 1, 2, 2, 3, 3]);
}

#[test]
fn a_failed_attempt_leaves_no_trace() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = hashed(&"y".repeat(1_000));
    let mut failed = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
    let slot = failed.worker.slot;
    decider.take_back(&mut failed.lease, &failed.worker, &prompt.hashes, failed.basis);
    drop(failed);
    let retried = decider.decide(&fleet, &view(&prompt), Among::Untried(&[slot]), NOW).unwrap();
    assert_ne!(retried.worker.slot, slot);
    assert_eq!(retried.hit_tokens, 0);
    assert_eq!(decider.tree_blocks(), prompt.hashes.len());
}

#[test]
fn goes_only_to_workers_that_list_the_model() {
    let (fleet, decider) = (fleet(3), decider("round_robin"));
    for (worker, model) in fleet.workers().iter().zip(["a", "b", "a"]) {
        worker.set_models(vec![model.into()]);
    }
    let request = RequestView { model: Some("b"), ..RequestView::default() };
    for _ in 0..3 {
        assert_eq!(
            decider.decide(&fleet, &request, Among::Untried(&[]), NOW).unwrap().worker.id().as_str(),
            "w1"
        );
    }
}

#[test]
fn a_worker_that_never_said_what_it_serves_gets_only_what_nobody_lists() {
    let mut fleet = Fleet::default();
    let spec = |id: &str| WorkerSpec::new(WorkerId::new(id), format!("http://{id}:8000"));
    fleet.reconcile(&["lists", "lists-no-more", "silent"].map(spec));
    let workers = fleet.snapshot().workers().to_vec();
    workers.iter().for_each(|worker| assert!(worker.mark_up().is_some()));
    workers[0].set_models(vec!["a".into()]);
    workers[1].set_models(vec!["b".into()]);
    let decider = decider("round_robin");
    let picks = |fleet: &Fleet, model| {
        let request = RequestView { model: Some(model), ..RequestView::default() };
        let decide = || decider.decide(&fleet.snapshot(), &request, Among::Untried(&[]), NOW);
        (0..4).map(|_| decide().map(|decided| decided.worker.id().to_string())).collect::<Vec<_>>()
    };
    assert_eq!(picks(&fleet, "a"), vec![Ok("lists".to_owned()); 4]);
    assert_eq!(picks(&fleet, "c"), vec![Ok("silent".to_owned()); 4]);
    workers[1].mark_down();
    assert_eq!(picks(&fleet, "b"), vec![Err(PickError::ModelDown { model: "b".into() }); 4]);
    fleet.reconcile(&["lists", "silent"].map(spec));
    assert_eq!(picks(&fleet, "b"), vec![Ok("silent".to_owned()); 4], "nobody lists it any more");
    fleet.reconcile(&["silent"].map(spec));
    assert_eq!(picks(&fleet, "a"), vec![Ok("silent".to_owned()); 4]);
}

#[test]
fn explaining_changes_nothing() {
    let (fleet, decider) = (fleet(3), decider("prefix_aware"));
    let prompt = hashed(&"z".repeat(2_000));
    drop(decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap());
    let blocks = decider.tree_blocks();
    let first = decider.explain(&fleet, &view(&prompt), NOW).unwrap();
    let second = decider.explain(&fleet, &view(&prompt), NOW).unwrap();
    assert_eq!(first.picked, second.picked);
    assert_eq!(decider.tree_blocks(), blocks);
    let Explained { worker, candidate, cost, .. } = &first.candidates[first.picked];
    assert!(candidate.hit_tokens > 400);
    assert!(first.candidates.iter().all(|other| other.cost >= *cost));
    assert_eq!(
        decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap().worker.id(),
        worker.id()
    );
}

/// Workers picked for `count` requests that are over at once, by name.
fn picked(fleet: &FleetSnapshot, decider: &Decider, now: Duration, count: usize) -> Vec<String> {
    let pick = |_| {
        decider
            .decide(fleet, &RequestView::default(), Among::Untried(&[]), now)
            .unwrap()
            .worker
            .id()
            .to_string()
    };
    let mut names: Vec<_> = (0..count).map(pick).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn break_open(worker: &Worker) {
    for _ in 0..5 {
        Trial::begin_anyway(&worker.health, NOW).fail(NOW, 0.5);
    }
}

#[test]
fn open_and_busy_workers_are_avoided_until_all_are_like_them() {
    let (fleet, decider) = (fleet(3), decider("random"));
    break_open(&fleet.workers()[0]);
    assert_eq!(picked(&fleet, &decider, NOW, 50), ["w1", "w2"]);
    fleet.workers()[1].health.cool(NOW, Duration::from_secs(20));
    assert_eq!(picked(&fleet, &decider, NOW, 50), ["w2"]);
    break_open(&fleet.workers()[2]);
    assert_eq!(picked(&fleet, &decider, NOW, 50), ["w1"], "busy is better than failing");
    fleet.workers()[1].mark_down();
    assert_eq!(picked(&fleet, &decider, NOW, 50), ["w0", "w2"], "fails open");
}

#[test]
fn a_half_open_worker_gets_one_request_at_a_time() {
    let (fleet, decider) = (fleet(2), decider("round_robin"));
    break_open(&fleet.workers()[0]);
    let later = NOW + Duration::from_secs(2);
    let decide = || decider.decide(&fleet, &RequestView::default(), Among::Untried(&[]), later).unwrap();
    let decided: Vec<_> = (0..6).map(|_| decide()).collect();
    let probes = |decided: &[Decided]| decided.iter().filter(|one| one.worker.id().as_str() == "w0").count();
    assert_eq!(probes(&decided), 1);
    drop(decided);
    let mut probe = (0..2).map(|_| decide()).find(|one| one.worker.id().as_str() == "w0").unwrap();
    probe.trial.first_byte();
    let decided: Vec<_> = (0..6).map(|_| decide()).collect();
    assert_eq!(probes(&decided), 3);
}

#[test]
fn one_that_has_come_back_is_left_out_of_most_picks() {
    let (fleet, decider) = (fleet(2), decider("round_robin"));
    let back = &fleet.workers()[0];
    back.health.come_back(NOW, Some(Duration::from_secs(10)));
    let share = |now: Duration| {
        let of_it = |_: &usize| {
            let decided = decider.decide(&fleet, &RequestView::default(), Among::Untried(&[]), now).unwrap();
            decided.worker.slot == back.slot
        };
        (0..1_000).filter(of_it).count()
    };
    // Of those that it is not left out of, round_robin gives it nearly all: it was picked longest ago.
    assert!((50..150).contains(&share(NOW)), "a tenth");
    assert_eq!(share(NOW + Duration::from_secs(10)), 500);
    fleet.workers()[1].mark_down();
    assert_eq!(share(NOW), 1_000, "there is nobody else");
}

#[test]
fn a_model_whose_workers_are_down_is_not_unknown() {
    let (fleet, decider) = (fleet(2), decider("random"));
    for (worker, model) in fleet.workers().iter().zip(["a", "b"]) {
        worker.set_models(vec![model.into()]);
    }
    fleet.workers()[0].mark_down();
    let request = RequestView { model: Some("a"), ..RequestView::default() };
    let error = decider.decide(&fleet, &request, Among::Untried(&[]), NOW).unwrap_err();
    assert_eq!(error, PickError::ModelDown { model: "a".into() });
}

#[test]
fn a_model_that_a_worker_may_have_which_never_said_is_told_apart() {
    let (fleet, decider) = (fleet(3), decider("random"));
    fleet.workers()[0].set_models(vec!["a".into()]);
    fleet.workers()[1].set_models(vec!["b".into()]);
    fleet.workers()[1].mark_down();
    fleet.workers()[2].mark_down();
    let request = RequestView { model: Some("c"), ..RequestView::default() };
    let error = decider.decide(&fleet, &request, Among::Untried(&[]), NOW).unwrap_err();
    assert_eq!(
        error.to_string(),
        "model \"c\" is not served by the workers that have said what they serve (known models: a, b); workers that \
         have not said so yet: 1, none of them usable"
    );
}

#[test]
fn draining_workers_get_nothing_and_anyone_includes_those_that_are_down() {
    let (fleet, decider) = (fleet(3), decider("random"));
    fleet.workers()[0].drain();
    fleet.workers()[1].mark_down();
    assert_eq!(picked(&fleet, &decider, NOW, 20), ["w2"]);
    let slots: Vec<_> = fleet.workers().iter().map(|worker| worker.slot).collect();
    let request = RequestView::default();
    assert!(!Decider::can_decide(&fleet, &request, Among::Untried(&slots)));
    let anyone = || decider.decide(&fleet, &request, Among::Anyone, NOW).unwrap();
    assert_eq!(anyone().worker.id().as_str(), "w2", "one that is up comes first");
    fleet.workers()[2].mark_down();
    assert_ne!(anyone().worker.id().as_str(), "w0");
    fleet.workers()[1].drain();
    fleet.workers()[2].drain();
    assert!(!Decider::can_decide(&fleet, &request, Among::Anyone));
    let error = decider.decide(&fleet, &request, Among::Untried(&[]), NOW).unwrap_err();
    assert_eq!(error, PickError::NoneUsable { prefill: false, down: 2, draining: 1, total: 3 });
}

#[test]
fn where_most_are_down_by_their_probes_alone_they_are_asked_once_nobody_is_better() {
    let (fleet, decider) = (fleet(5), decider("random"));
    let workers = fleet.workers();
    let among = |tried: &[WorkerSlot]| {
        let request = RequestView::default();
        let can = Decider::can_decide(&fleet, &request, Among::Untried(tried));
        let decided = decider.decide(&fleet, &request, Among::Untried(tried), NOW);
        assert_eq!(can, decided.is_ok());
        decided.map(|decided| decided.worker.slot.0)
    };
    assert!(workers[1].mark_suspect() && workers[2].mark_suspect());
    assert!([0, 3, 4].contains(&among(&[]).unwrap()));
    let up = [WorkerSlot(0), WorkerSlot(3), WorkerSlot(4)];
    assert_eq!(among(&up), Err(PickError::AllTried { tried: 3 }), "of five only two fail their probes");
    workers[3].mark_suspect();
    assert_eq!(picked(&fleet, &decider, NOW, 50), ["w0", "w4"]);
    assert!([1, 2].contains(&among(&up).unwrap()), "three of five");
    workers[0].mark_down();
    workers[4].mark_down();
    assert_eq!(picked(&fleet, &decider, NOW, 50), ["w1", "w2", "w3"], "those that are gone get nothing");
    assert_eq!(decider.explain(&fleet, &RequestView::default(), NOW).unwrap().candidates.len(), 3);
    workers[1].drain();
    workers[2].mark_up();
    assert_eq!(picked(&fleet, &decider, NOW, 50), ["w2"]);
    for worker in workers {
        worker.mark_down();
    }
    assert_eq!(among(&[]), Err(PickError::NoneUsable { prefill: false, down: 5, draining: 0, total: 5 }));
}

#[test]
fn most_are_most_of_those_that_serve_the_model() {
    let (fleet, decider) = (fleet(4), decider("random"));
    for (worker, model) in fleet.workers().iter().zip(["a", "b", "b", "b"]) {
        worker.set_models(vec![model.into()]);
    }
    let decide = |model| {
        let request = RequestView { model: Some(model), ..RequestView::default() };
        decider.decide(&fleet, &request, Among::Untried(&[]), NOW).map(|decided| decided.worker.slot.0)
    };
    fleet.workers()[0].mark_suspect();
    assert_eq!(decide("a"), Ok(0), "its only one");
    fleet.workers()[0].mark_down();
    assert_eq!(decide("a"), Err(PickError::ModelDown { model: "a".into() }));
}

/// A closed loop of 32 requests over eight prompts, each with a question of its own, at four engines that hold two prompts each and answer
/// at once: how many find theirs.
fn hits_in_small_caches(policy: &str, requests: usize) -> usize {
    let (fleet, decider) = (fleet(4), decider(policy));
    let mut rng = SmallRng::seed_from_u64(5);
    let mut caches: Vec<Vec<usize>> = vec![Vec::new(); 4];
    let mut running = Vec::new();
    let mut hits = 0;
    for serial in 0..requests {
        let now = NOW + Duration::from_micros(30 * serial as u64);
        if running.len() == 32 {
            let mut ended: Decided = running.swap_remove(rng.random_range(0..32));
            decider.whole_answer(&mut ended.lease, now);
        }
        let number = rng.random_range(0..8);
        let system = format!("system prompt number {number} ").repeat(32);
        let prompt = hashed(&format!("{system}{}", format!("question {serial} ").repeat(16)));
        let decided = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), now).unwrap();
        let cache = &mut caches[decided.worker.slot.index()];
        let held = cache.iter().position(|one| *one == number);
        hits += usize::from(held.is_some());
        held.map(|at| cache.remove(at));
        cache.push(number);
        if cache.len() > 2 {
            cache.remove(0);
        }
        running.push(decided);
    }
    hits
}

#[test]
fn hot_prompts_keep_their_homes_although_the_tree_thinks_that_all_hold_them() {
    let by_chance = hits_in_small_caches("round_robin", 4_000);
    assert!((900..1_100).contains(&by_chance), "{by_chance} of 4,000");
    let ours = hits_in_small_caches("prefix_aware", 4_000);
    assert!(ours > 2_000, "{ours} of 4,000");
}

#[test]
fn what_a_worker_has_room_for_bounds_what_the_tree_holds_of_it() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    let worker = &fleet.workers()[0];
    worker.reports.set_kv_capacity(Some(1_000));
    let decide = |text: &str| {
        let prompt = hashed(&text.repeat(200));
        drop(decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap());
        decider.explain(&fleet, &view(&prompt), NOW).unwrap().candidates[0].candidate.hit_tokens
    };
    for text in ["abcdefghij", "bcdefghijk", "cdefghijkl"] {
        assert_eq!(decide(text), 1_984 / 4);
    }
    // Four bytes a token: two prompts of 500 tokens, and what is pinned.
    assert!(decider.tree_blocks() <= 3 * 31);
    decide("d");
    assert!(decider.tree_blocks() <= 2 * 31 + 4, "{}", decider.tree_blocks());
    // One that tells what it evicts is not bounded by us.
    worker.reports.set_trust(CacheTrust::Exact);
    for text in ["efghijklmn", "fghijklmno", "ghijklmnop"] {
        decide(text);
    }
    assert!(decider.tree_blocks() >= 4 * 31);
}

#[test]
fn what_engines_keep_in_their_hosts_memory_is_not_forgotten() {
    let fleet = fleet(1);
    fleet.workers()[0].reports.set_kv_capacity(Some(1_000));
    let held_blocks = |times: f64| {
        let decider = decider("prefix_aware").with_host_caches(times);
        for text in ["abcdefghij", "bcdefghijk", "cdefghijkl", "defghijklm", "efghijklmn"] {
            let prompt = hashed(&text.repeat(200));
            drop(decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap());
        }
        let prompt = hashed("other");
        drop(decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap());
        decider.tree_blocks()
    };
    // Two prompts of 500 tokens fit, or four of them.
    assert!((31..=2 * 31 + 4).contains(&held_blocks(0.0)), "{}", held_blocks(0.0));
    assert!((3 * 31..=4 * 31 + 4).contains(&held_blocks(1.0)), "{}", held_blocks(1.0));
    assert!(held_blocks(f64::MAX) >= 5 * 31);
}

/// Costs what workers report: a thousand for each token, one for each millisecond of age, and the share of KV in use.
struct ByReport;

impl Policy for ByReport {
    fn name(&self) -> &'static str {
        "by_report"
    }

    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let cost = |report: &LoadReport| {
            f64::from(report.waiting_uncached_tokens * 1_000 + report.age_ms) + report.kv_usage()
        };
        (0..choice.candidates.len()).map(|at| choice.report(at).map_or(0.0, cost)).collect()
    }
}

#[test]
fn reports_of_workers_reach_the_policy() {
    let limits = TreeLimits { total_blocks: 100, worker_blocks: 100 };
    let (fleet, decider) = (fleet(2), Decider::new(Box::new(ByReport), limits, 1));
    let load = roundhouse_types::WorkerLoad {
        running_requests: 3,
        waiting_requests: 4,
        waiting_uncached_tokens: 5,
        kv_used_tokens: 25,
        kv_free_tokens: 75,
        ..Default::default()
    };
    fleet.workers()[1].hear_load(&load, NOW);
    let later = NOW + Duration::from_millis(40);
    let explained = decider.explain(&fleet, &RequestView::default(), later).unwrap();
    let costs: Vec<_> = explained.candidates.iter().map(|one| one.cost).collect();
    assert_eq!(costs, [0.0, 5_040.25]);
    assert!(fleet.workers()[1].reports.kv_capacity_tokens().is_none());
    fleet.workers()[1].reports.forget_load();
    assert_eq!(decider.explain(&fleet, &RequestView::default(), later).unwrap().candidates[1].cost, 0.0);
}

/// What a worker says that has so many requests, one of which waits with `uncached_tokens` to compute.
fn told(requests: usize, uncached_tokens: usize) -> roundhouse_types::WorkerLoad {
    roundhouse_types::WorkerLoad {
        running_requests: requests - 1,
        waiting_requests: 1,
        waiting_uncached_tokens: uncached_tokens + requests - 1,
        kv_used_tokens: 1_000 * requests,
        kv_free_tokens: 1_000_000,
        ..Default::default()
    }
}

#[test]
fn what_others_have_to_compute_at_a_worker_counts_and_what_is_ours_counts_once() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = hashed(&"of a book that nobody has read ".repeat(400));
    let ours = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
    let (busy, free) = (ours.worker.slot.index(), 1 - ours.worker.slot.index());
    let other = hashed(&"of another one ".repeat(800));
    let next = || decider.explain(&fleet, &view(&other), NOW).unwrap();
    let before = next();
    assert_eq!(before.picked, free);
    // All that the busy one says is what this router sent there, and the other one has far more to do for others.
    fleet.workers()[busy].hear_load(&told(1, 3_100), NOW);
    let after = next();
    assert!(
        (after.candidates[busy].cost - before.candidates[busy].cost).abs() < 1e-9,
        "nothing new was said"
    );
    fleet.workers()[free].hear_load(&told(6, 60_000), NOW);
    assert_eq!(next().picked, busy);
}

#[test]
fn what_engines_count_of_others_adds_to_what_is_ours_and_what_is_ours_counts_once() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    let prompt = hashed(&"of a book that nobody has read ".repeat(400));
    let ours = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
    let (busy, free) = (ours.worker.slot.index(), 1 - ours.worker.slot.index());
    let other = hashed(&"of another one ".repeat(800));
    let next = || decider.explain(&fleet, &view(&other), NOW).unwrap();
    let before = next();
    assert_eq!(before.picked, free);
    let count = |worker: usize, running, waiting| {
        let load = EngineLoad { running, waiting, uncached_tokens: 5_000.0, ..EngineLoad::default() };
        let worker = &fleet.workers()[worker];
        worker.hear_counts(&load, &worker.sent_there(), NOW);
    };
    // It counts the one request that this router has there, whatever it calls it, and of one that has just ended it may count another.
    for (running, waiting) in [(0, 1), (1, 0), (0, 0)] {
        count(busy, running, waiting);
        assert!(
            (next().candidates[busy].cost - before.candidates[busy].cost).abs() < 1e-9,
            "nothing new was said"
        );
    }
    let worker = &fleet.workers()[busy];
    let one_more = LoadReading { requests: 2, prefilling: 2, ..worker.sent_there() };
    worker.hear_counts(
        &EngineLoad { waiting: 2, uncached_tokens: 5_000.0, ..EngineLoad::default() },
        &one_more,
        NOW,
    );
    assert!((next().candidates[busy].cost - before.candidates[busy].cost).abs() < 1e-9, "it ended meanwhile");
    count(free, 0, 8);
    let after = next();
    assert_eq!(after.picked, busy);
    assert!(
        after.candidates[free].cost > 8.0 * before.candidates[free].cost,
        "each of the eight waits for its own"
    );
}

#[test]
fn a_prompt_guessed_too_short_is_not_taken_for_somebody_elses() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    let before = decider.prefill_speed(&fleet.workers()[0]);
    for number in 0..40 {
        let prompt = hashed(&format!("{number} is a number that was told at length ").repeat(50));
        let now = NOW + Duration::from_secs(10 * number);
        let mut ours = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), now).unwrap();
        // With the template's tokens it is longer than the router thinks.
        fleet.workers()[0].hear_load(&told(1, 10_000), now + Duration::from_secs(1));
        decider.first_token(&mut ours.lease, now + Duration::from_secs(2));
    }
    assert_ne!(decider.prefill_speed(&fleet.workers()[0]), before, "its speed is learned from all the same");
}

#[test]
fn routers_that_decide_in_one_moment_by_the_same_reports_do_not_all_choose_the_same_worker() {
    const ROUTERS: u64 = 60;
    let prompt = hashed(&"nobody has read this ".repeat(800));
    let mut picks = [0; 4];
    for seed in 0..ROUTERS {
        let fleet = fleet(4);
        let limits = TreeLimits::within_bytes(1 << 20);
        let decider = Decider::new(by_name("prefix_aware").unwrap(), limits, seed);
        let _ours = decider.decide(&fleet, &view(&hashed("short")), Among::Untried(&[]), NOW).unwrap();
        for (worker, requests) in fleet.workers().iter().zip([4, 3, 2, 1]) {
            worker.hear_load(&told(requests, 4_000 * requests), NOW);
        }
        let later = NOW + Duration::from_millis(1);
        let decided = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), later).unwrap();
        picks[decided.worker.slot.index()] += 1;
    }
    assert!(picks[3] > picks[0], "the freest is chosen most: {picks:?}");
    assert!(picks[3] < ROUTERS * 3 / 4, "{picks:?}");
}

#[test]
fn routers_that_know_their_places_go_to_workers_of_their_own_in_one_moment() {
    const ROUTERS: u32 = 3;
    for rank in 0..ROUTERS {
        let fleet = fleet(9);
        let limits = TreeLimits::within_bytes(1 << 20);
        let decider = Decider::new(by_name("prefix_aware").unwrap(), limits, u64::from(rank));
        let mut own = 0;
        for moment in 0..80u64 {
            let now = NOW + Duration::from_secs(60 * moment);
            let mut running = Vec::new();
            for worker in fleet.workers() {
                worker.reports.set_place(RouterPlace { rank, count: ROUTERS });
                worker.hear_load(&told(2, 8_000), now);
            }
            for number in 0..3 {
                let prompt = hashed(&format!("{moment} and {number} of what is new ").repeat(800));
                let decided = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), now).unwrap();
                // How much comes in one moment is learned first.
                own += u32::from(moment >= 60 && decided.worker.slot.0 % ROUTERS == rank);
                running.push(decided);
            }
        }
        assert!(own >= 55, "of 60 the router of rank {rank} sent {own} to its own three workers");
    }
}

#[test]
fn what_a_worker_held_is_forgotten_however_much_it_is_and_whatever_runs_there() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    let prompt = |number: usize| hashed(&format!("{number} of many stories ").repeat(60));
    let decide = |number| {
        let prompt = prompt(number);
        decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap()
    };
    let running: Vec<_> = (0..3).map(|number| decide(number * 100)).collect();
    (0..300).for_each(|number| drop(decide(number)));
    assert!(decider.tree_blocks() > 2 * FORGET_BLOCKS);
    decider.forget(&running[0].worker);
    assert_eq!(decider.tree_blocks(), 0);
    drop(running);
    assert_eq!(decide(7).hit_tokens, 0);
    assert!(decide(7).hit_tokens > 0);
}

#[test]
fn hits_are_found_wherever_a_candidate_stands() {
    let (fleet, decider) = (fleet(6), decider("prefix_aware"));
    let prompt = hashed(&"the same long story ".repeat(100));
    for tried in 0..6 {
        let others: Vec<_> = (0..6).filter(|slot| *slot != tried).map(WorkerSlot).collect();
        drop(decider.decide(&fleet, &view(&prompt), Among::Untried(&others), NOW).unwrap());
    }
    fleet.workers()[1].mark_down();
    fleet.workers()[4].mark_down();
    let told = decider.explain(&fleet, &view(&prompt), NOW).unwrap();
    let hits: Vec<_> = told.candidates.iter().map(|one| one.candidate.hit_tokens).collect();
    assert_eq!(hits, [1_984 / 4; 4]);
}

#[test]
fn in_a_large_fleet_whoever_holds_a_prefix_is_found_and_all_get_work() {
    let (fleet, decider) = (fleet(1_500), decider("prefix_aware"));
    let decide = |number| {
        let prompt = hashed(&format!("{number} is what begins this prompt ").repeat(60));
        decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap()
    };
    let mut homes = std::collections::HashSet::new();
    for number in 0..50 {
        let cold = decide(number).worker.slot;
        let warm = decide(number);
        assert_eq!(warm.worker.slot, cold);
        assert!(warm.hit_tokens > 0);
        homes.insert(cold);
    }
    assert!(homes.len() > 30, "{homes:?}");
    let leases: Vec<_> = (50..3_050).map(decide).collect();
    let busy: std::collections::HashSet<_> = leases.iter().map(|lease| lease.worker.slot).collect();
    assert!(busy.len() > 1_400, "{} of 1,500 have work", busy.len());
    let most = fleet.workers().iter().map(|worker| worker.load.read().requests).max();
    assert!(most <= Some(4), "{most:?} where two would be even");
}

#[test]
fn in_a_large_fleet_the_only_one_that_is_up_is_found() {
    let (fleet, decider) = (fleet(1_500), decider("prefix_aware"));
    fleet.workers().iter().filter(|worker| worker.slot.0 != 700).for_each(|worker| {
        worker.mark_down();
    });
    for _ in 0..20 {
        let only = decider.decide(&fleet, &RequestView::default(), Among::Untried(&[]), NOW).unwrap();
        assert_eq!(only.worker.slot, WorkerSlot(700));
        assert!(
            decider.decide(&fleet, &RequestView::default(), Among::Untried(&[WorkerSlot(700)]), NOW).is_err()
        );
    }
}

#[test]
fn in_a_large_fleet_all_that_serve_a_rare_model_are_looked_at() {
    let (fleet, decider) = (fleet(1_500), decider("prefix_aware"));
    let serves_rare = |worker: &&Arc<Worker>| worker.slot.0 % 75 == 3;
    for worker in fleet.workers() {
        let model = if serves_rare(&worker) { "rare" } else { "common" };
        worker.set_models(vec![model.to_owned()]);
    }
    let request = RequestView { model: Some("rare"), prompt_tokens: 100, ..RequestView::default() };
    let decide = || decider.decide(&fleet, &request, Among::Untried(&[]), NOW).unwrap();
    let leases: Vec<_> = (0..40).map(|_| decide()).collect();
    for worker in fleet.workers() {
        let expected = if serves_rare(&worker) { 2 } else { 0 };
        assert_eq!(worker.load.read().requests, expected, "{}", worker.id());
    }
    drop(leases);
}

#[test]
fn in_a_large_fleet_a_prefix_that_all_hold_makes_no_candidates_of_all() {
    let (fleet, decider) = (fleet(1_500), decider("prefix_aware"));
    let prompt = hashed(&"what everybody begins with ".repeat(100));
    for worker in fleet.workers() {
        let index = &mut decider.lock().index;
        let hits = index.hits(&prompt.hashes);
        index.enter(worker.slot, (view(&prompt).path(), &hits), WorkerTells::default());
    }
    let decided = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
    assert!(decided.hit_tokens > 0);
    let looked_at = decider.lock().candidates.list.len();
    assert!((257..=512).contains(&looked_at), "{looked_at}");
}

#[test]
fn who_begins_is_expected_to_be_followed_as_others_were() {
    let (fleet, others) = (fleet(2), decider("least_load"));
    let decider = decider("prefix_aware");
    let turn = |session: usize, number: usize| {
        let said =
            (0..number).map(|at| format!("turn {at} of session {session}: {}", "and so on ".repeat(40)));
        hashed(&said.collect::<String>())
    };
    let later_turns = |decider: &Decider, prompt: &PromptBlocks| {
        decider.explain(&fleet, &view(prompt), NOW).unwrap().later_turns
    };
    for session in 0..100 {
        for prompt in [turn(session, 1), turn(session, 2), turn(session, 3)] {
            for decider in [&decider, &others] {
                decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
            }
        }
    }
    let expected = later_turns(&decider, &turn(100, 1));
    assert!((1.4..=2.0).contains(&expected), "two follow: {expected}");
    assert_eq!(later_turns(&decider, &turn(100, 1)), expected, "explaining changes nothing");
    assert_eq!(later_turns(&decider, &turn(99, 4)), 0.0, "it is in the middle");
    assert_eq!(later_turns(&others, &turn(100, 1)), 0.0, "a policy that reads no prompts");
}

#[test]
fn threads_that_decide_fail_end_and_forget_at_once_leave_a_sound_tree_and_idle_workers() {
    const TOTAL_BLOCKS: usize = 120;
    let fleet = fleet(3);
    let limits = TreeLimits { total_blocks: TOTAL_BLOCKS, worker_blocks: 60 };
    let decider = Decider::new(by_name("prefix_aware").unwrap(), limits, 1);
    let work = &|seed: u64| {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut running: Vec<Decided> = Vec::new();
        for turn in 0..300 {
            let system = format!("system prompt {} ", rng.random_range(0..4)).repeat(30);
            let own = format!("{seed} {} ", turn / 2).repeat(rng.random_range(1..60));
            let prompt = hashed(&(system + &own));
            let answer = if rng.random_bool(0.5) { Answer::Streamed } else { Answer::Whole };
            let (request, now) = (RequestView { answer, ..view(&prompt) }, NOW + Duration::from_millis(turn));
            let mut one = decider.decide(&fleet, &request, Among::Untried(&[]), now).unwrap();
            match rng.random_range(0..8) {
                0 => decider.take_back(&mut one.lease, &one.worker, &prompt.hashes, one.basis),
                1 => decider.first_token(&mut one.lease, now),
                2 if seed == 0 => decider.forget(&one.worker),
                3 => decider.whole_answer(&mut one.lease, now),
                _ => {}
            }
            running.push(one);
            if running.len() > 4 {
                running.swap_remove(rng.random_range(0..4));
            }
        }
    };
    std::thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || work(seed));
        }
    });
    decider.lock().index.catch_up();
    decider.lock().index.tree().check_invariants();
    assert!((1..=TOTAL_BLOCKS).contains(&decider.tree_blocks()), "{}", decider.tree_blocks());
    for worker in fleet.workers() {
        let load = worker.load.read();
        assert_eq!((load.requests, load.prefilling, load.prefill_tokens, load.held_tokens), (0, 0, 0, 0));
    }
    decider.forget_unused_since(decider.tree_clock());
    assert_eq!(decider.tree_blocks(), 0, "a pin was lost");
}
