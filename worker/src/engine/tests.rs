//! The engine over a backend that takes each step when it is told.

use worker_core::step::{BackendError, Batch, KvCapacity, NextToken, SequenceId};
use worker_core::{PrefillOrder, SamplingParams};

use super::wakeful::WakefulCore;
use super::wakeful::tests::until;
use super::*;
use crate::cpu_quota::CpuQuota;

/// What a step comes to.
enum Outcome {
    Drawn,
    Refused(SequenceId),
}

/// Says which sequences it is to step, and waits to be told what comes of it.
struct Told {
    steps: std_mpsc::Sender<Vec<u64>>,
    outcomes: std_mpsc::Receiver<Outcome>,
}

impl Backend for Told {
    fn kv_capacity(&self) -> KvCapacity {
        KvCapacity { block_tokens: 4, blocks: 100 }
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        // The test may be over.
        let _ = self.steps.send(batch.sequences.iter().map(|step| step.id.0).collect());
        if let Ok(Outcome::Refused(id)) = self.outcomes.recv() {
            return Err(BackendError::InvalidSequence { id, reason: "of a bad kind".to_owned() });
        }
        let drawing = batch.sequences.iter().filter(|step| step.sample.is_some());
        Ok(drawing.map(|step| NextToken { id: step.id, token: 7, logprobs: None }).collect())
    }
}

/// An engine, what it steps, and how its steps are told to end.
struct Rig {
    engine: Engine,
    steps: std_mpsc::Receiver<Vec<u64>>,
    outcomes: std_mpsc::Sender<Outcome>,
}

impl Rig {
    fn new(max_running: usize, max_waiting: usize) -> Self {
        let ((say, steps), (outcomes, told)) = (std_mpsc::channel(), std_mpsc::channel());
        let backend = Box::new(Told { steps: say, outcomes: told });
        let limits = SchedulerLimits::mixed(max_running, 8);
        Self { engine: Engine::start(backend, limits, max_waiting, None).unwrap(), steps, outcomes }
    }

    /// Begins `choices` generations of a prompt of so many tokens.
    fn submit_for(
        &self,
        caller: &Caller,
        prompt_tokens: usize,
        choices: usize,
    ) -> Result<Vec<Generation>, RequestError> {
        let submission = || Submission {
            prompt: vec![1; prompt_tokens],
            params: Arc::new(SamplingParams::greedy()),
            max_tokens: 50,
            end_tokens: Arc::new([]),
            priority: 0,
            adapter: None,
        };
        self.engine.submit((0..choices).map(|_| submission()).collect(), caller, &HandOver::None)
    }

    fn submit(&self) -> Result<Generation, RequestError> {
        Ok(self.submit_for(&Caller::default(), 2, 1)?.remove(0))
    }

    /// Who takes part in the next step, which lasts until it is told to end.
    fn step(&self) -> Vec<u64> {
        self.steps.recv_timeout(std::time::Duration::from_secs(60)).expect("a step")
    }

    fn end(&self, outcome: Outcome) {
        self.outcomes.send(outcome).unwrap();
    }

    /// Who runs and who waits, once the engine has looked who has left.
    async fn present(&self) -> (usize, usize) {
        self.engine.flush_cache().await.expect("it runs");
        let stats = self.engine.stats();
        (stats.running, stats.waiting)
    }
}

impl Drop for Rig {
    /// Ends all steps to come, so that the engine can stop.
    fn drop(&mut self) {
        self.outcomes = std_mpsc::channel().0;
    }
}

#[test]
fn what_came_in_waits_also_while_its_first_step_lasts() {
    let rig = Rig::new(1, 1);
    let _running = rig.submit().unwrap();
    rig.step();
    let _waiting = rig.submit().unwrap();
    let is_busy = || matches!(rig.submit(), Err(RequestError::Busy { waiting: 1 }));
    assert!(is_busy(), "it is on its way");
    rig.end(Outcome::Drawn);
    assert_eq!(rig.step(), [0]);
    assert!(is_busy(), "it has come in");
}

#[tokio::test]
async fn choices_of_a_client_that_left_during_their_prefill_are_not_begun() {
    let rig = Rig::new(8, 100);
    let choices = rig.submit_for(&Caller::default(), 40, 4).unwrap();
    assert_eq!(rig.step(), [0], "one computes the prompt");
    drop(choices);
    rig.end(Outcome::Drawn);
    assert_eq!(rig.present().await, (0, 0));
}

#[tokio::test]
async fn a_raised_flag_ends_what_nobody_reads() {
    let rig = Rig::new(8, 100);
    let caller = Caller::default();
    let mut unread = rig.submit_for(&caller, 2, 1).unwrap();
    let _other = rig.submit().unwrap();
    rig.step();
    caller.abort.raise();
    rig.end(Outcome::Drawn);
    // The other one has come in by the next step, if not before.
    rig.step();
    rig.end(Outcome::Drawn);
    rig.step();
    rig.end(Outcome::Drawn);
    let events = &mut unread[0].events;
    while let Some(event) = events.recv().await {
        assert!(matches!(event, Event::Token { .. }), "{event:?}");
    }
    assert_eq!(rig.step(), [1], "the other one goes on");
}

#[tokio::test]
async fn an_invalid_sequence_fails_alone() {
    let rig = Rig::new(8, 100);
    let mut sound = vec![rig.submit().unwrap()];
    assert_eq!(rig.step(), [0]);
    let mut invalid = rig.submit().unwrap();
    sound.push(rig.submit().unwrap());
    rig.end(Outcome::Drawn);
    assert_eq!(rig.step(), [0, 1, 2]);
    rig.end(Outcome::Refused(SequenceId(1)));
    assert_eq!(rig.step(), [0, 2], "the others' step is taken again");
    rig.end(Outcome::Drawn);
    let Some(Event::Failed(reason)) = invalid.events.recv().await else { panic!("it fails") };
    assert!(reason.contains("sequence 1: of a bad kind"), "{reason}");
    for sound in &mut sound {
        let event = sound.events.recv().await;
        assert!(matches!(event, Some(Event::Token { token: 7, .. })), "{event:?}");
    }
}

/// A backend over which the engine's thread breaks down, as by a mistake of the scheduler's.
struct Breaking;

impl Backend for Breaking {
    fn kv_capacity(&self) -> KvCapacity {
        KvCapacity { block_tokens: 4, blocks: 100 }
    }

    fn forward(&mut self, _: &Batch) -> Result<Vec<NextToken>, BackendError> {
        Ok(Vec::new())
    }

    fn idle(&mut self) {
        panic!("a mistake");
    }
}

/// An engine whose thread has panicked.
pub(crate) async fn broken_engine() -> Engine {
    let engine = Engine::start(Box::new(Breaking), SchedulerLimits::mixed(1, 1), 1, None).unwrap();
    assert_eq!(engine.flush_cache().await, None);
    engine
}

#[tokio::test]
async fn an_engine_that_broke_down_says_so() {
    assert!(broken_engine().await.has_ended());
    let rig = Rig::new(1, 1);
    assert!(!rig.engine.has_ended());
    rig.engine.stop();
    assert!(rig.engine.has_ended());
}

/// Says whether the core is kept awake while a step lasts, and while nothing is due.
struct Seeing {
    core: AwakeCore,
    steps: usize,
    seen: std_mpsc::Sender<&'static str>,
}

impl Backend for Seeing {
    fn kv_capacity(&self) -> KvCapacity {
        KvCapacity { block_tokens: 4, blocks: 100 }
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        until("the core is kept awake", || self.core.is_kept_awake());
        self.steps += 1;
        let drawing = batch.sequences.iter().filter(|step| step.sample.is_some());
        Ok(drawing.map(|step| NextToken { id: step.id, token: 7, logprobs: None }).collect())
    }

    fn idle(&mut self) {
        until("the core is left alone", || !self.core.is_kept_awake());
        self.seen.send(if self.steps == 0 { "nothing yet" } else { "nothing any more" }).unwrap();
    }
}

#[test]
fn the_core_is_kept_awake_from_the_first_step_until_nothing_is_due() {
    let (seen, sights) = std_mpsc::channel();
    let (commands, inbox) = std_mpsc::channel();
    let body = move || {
        let core = WakefulCore::start(Priority::RealTime, CpuQuota::Unlimited).expect("a core");
        let awake = core.core();
        let backend = Box::new(Seeing { core: awake.clone(), steps: 0, seen });
        let scheduler = Scheduler::new(backend.kv_capacity(), SchedulerLimits::mixed(1, 8), 1);
        let mut run = Run::new(scheduler, backend, (inbox, Arc::default()), None);
        run.core = Some(core);
        run.run();
        awake
    };
    let thread = std::thread::spawn(body);
    let sight = || sights.recv_timeout(std::time::Duration::from_secs(120)).expect("the engine goes on");
    assert_eq!(sight(), "nothing yet");
    let (sender, _events) = mpsc::unbounded_channel();
    let submission = Submission {
        prompt: vec![1; 2],
        params: Arc::new(SamplingParams::greedy()),
        max_tokens: 5,
        end_tokens: Arc::new([]),
        priority: 0,
        adapter: None,
    };
    let client = Client { events: sender, caller: Caller::default(), hand_over: HandOver::None };
    commands.send(Command::Submit([Asked { submission, client }].into())).unwrap();
    assert_eq!(sight(), "nothing any more");
    commands.send(Command::Stop).unwrap();
    assert!(!thread.join().unwrap().is_kept_awake());
}

/// Has KV of its own that nobody can write to, and draws at once.
struct Unwritable;

impl Backend for Unwritable {
    fn kv_capacity(&self) -> KvCapacity {
        KvCapacity { block_tokens: 4, blocks: 100 }
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        let drawing = batch.sequences.iter().filter(|step| step.sample.is_some());
        Ok(drawing.map(|step| NextToken { id: step.id, token: 7, logprobs: None }).collect())
    }
}

#[tokio::test]
async fn kv_that_could_not_be_written_is_found_by_nobody() {
    for prefill in [PrefillOrder::Mixed, PrefillOrder::First] {
        let log = Arc::new(KvLog::new(1));
        let limits = SchedulerLimits { prefill, ..SchedulerLimits::mixed(4, 16) };
        let engine = Engine::start(Box::new(Unwritable), limits, 4, Some(Arc::clone(&log))).unwrap();
        let begin = |token: u32, hand_over| {
            let submission = Submission {
                prompt: vec![token; 11],
                params: Arc::new(SamplingParams::greedy()),
                max_tokens: 1,
                end_tokens: Arc::new([]),
                priority: 0,
                adapter: None,
            };
            engine.submit(vec![submission], &Caller::default(), &hand_over).unwrap().remove(0)
        };
        let kv = FetchedKv { bytes: Bytes::from(vec![0; 30]), from_blocks: 0, block_bytes: 10 };
        let event = begin(1, HandOver::Fetched(kv)).events.recv().await;
        assert!(matches!(event, Some(Event::Failed(_))), "{event:?}");
        assert_eq!(engine.cached_prefix_blocks(&[1; 11], None).await, Some(0));
        assert!(log.snapshot().blocks.is_empty(), "whoever follows has heard that it is gone");
        let event = begin(1, HandOver::None).events.recv().await;
        assert!(matches!(event, Some(Event::Token { cached_tokens: 0, .. })), "{event:?}");
        assert_eq!(engine.cached_prefix_blocks(&[1; 11], None).await, Some(2));
    }
}
