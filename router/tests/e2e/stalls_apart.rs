//! Engines that hang while their servers answer probes, where prompts are computed apart.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::disaggregated::{generated, prefilled, router};
use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
const FLAGS: [&str; 3] = ["--policy=round_robin", "--stall-timeout=200ms", "--probe-interval=20ms"];

/// A worker that hangs from when it is told to on: it takes requests, and nothing comes of them.
struct Engine {
    mock: MockWorker,
    hangs: Arc<AtomicBool>,
}

/// What has computed a prompt tells the engine that waits for it, as SGLang's do: by the number of their room.
#[derive(Clone, Default)]
struct Rooms(Arc<Mutex<HashMap<u64, Arc<Notify>>>>);

impl Rooms {
    /// That of a request, if it has any.
    fn of(&self, seen: &Seen) -> Option<Arc<Notify>> {
        let body: Value = serde_json::from_slice(&seen.body).unwrap();
        let room = body["bootstrap_room"].as_u64()?;
        Some(Arc::clone(self.0.lock().unwrap().entry(room).or_default()))
    }
}

impl Engine {
    async fn start(answer: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static) -> Self {
        let hangs = Arc::<AtomicBool>::default();
        let flag = Arc::clone(&hangs);
        // It counts what it computes, as vLLM and SGLang do.
        let mock = MockWorker::start(&["m", "lora-counts"], move |seen| {
            let hangs = flag.load(Ordering::SeqCst);
            if hangs { vec![Act::Wait(Arc::new(Notify::new()))] } else { answer(seen) }
        })
        .await;
        Self { mock, hangs }
    }

    async fn of_prompts(rooms: &Rooms) -> Self {
        let rooms = rooms.clone();
        Self::start(move |seen| {
            if let Some(room) = rooms.of(seen) {
                room.notify_one();
            }
            vec![Act::Write(prefilled())]
        })
        .await
    }

    async fn of_answers(rooms: &Rooms) -> Self {
        let rooms = rooms.clone();
        // A question of one token is in no room that anybody else is in.
        let waits = move |seen: &Seen| rooms.of(seen).filter(|_| seen.path == CHAT).map(Act::Wait);
        Self::start(move |seen| waits(seen).into_iter().chain([Act::Write(generated())]).collect()).await
    }

    fn hang(&self) {
        self.hangs.store(true, Ordering::SeqCst);
    }

    /// Chats that have come.
    fn chats(&self) -> usize {
        self.mock.seen().iter().filter(|seen| seen.path == CHAT).count()
    }
}

/// Two engines of each kind, each of which has answered.
struct Apart {
    prefill: [Engine; 2],
    generate: [Engine; 2],
    router: Router,
}

impl Apart {
    async fn start(protocol: &str) -> Self {
        let rooms = Rooms::default();
        let prefill = [Engine::of_prompts(&rooms).await, Engine::of_prompts(&rooms).await];
        let generate = [Engine::of_answers(&rooms).await, Engine::of_answers(&rooms).await];
        let protocol = format!("--prefill-protocol={protocol}");
        fn mocks(engines: &[Engine; 2]) -> [&MockWorker; 2] {
            engines.each_ref().map(|engine| &engine.mock)
        }
        let flags = [&FLAGS[..], &[&*protocol]].concat();
        let router = router(&mocks(&generate), &mocks(&prefill), &flags).await;
        let apart = Self { prefill, generate, router };
        for _ in 0..2 {
            apart.ask().await;
        }
        let engines = apart.prefill.iter().chain(&apart.generate);
        assert_eq!(engines.map(Engine::chats).collect::<Vec<_>>(), [1; 4]);
        apart
    }

    /// Sends a request, whose answer must be whole.
    async fn ask(&self) -> Reply {
        let reply = self.router.post(CHAT, &streamed()).await;
        assert_eq!((reply.status, reply.text().contains("hello")), (200, true), "{reply:?}");
        reply
    }

    async fn stalls(&self, id: &str) -> Value {
        let told = self.router.admin("GET", "/workers", "").await.json();
        let one =
            told["workers"].as_array().unwrap().iter().find(|worker| worker["id"] == id).unwrap().clone();
        json!([one["stalls"], one["stands_still"]])
    }
}

fn streamed() -> String {
    json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "x"}]}).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_engine_that_stands_still_loses_its_prompts_to_others() {
    // With vLLM's whoever generates computes the prompt as well; SGLang's need another of the kind.
    for (protocol, other) in [("vllm", ""), ("sglang", "p1")] {
        let apart = Apart::start(protocol).await;
        let stuck = &apart.prefill[0];
        stuck.hang();
        let mut served = Vec::new();
        while stuck.chats() < 2 {
            served.push(apart.ask().await.header("x-router-prefill-worker").to_owned());
        }
        assert_eq!(served.last().unwrap(), other, "{protocol}: who was there was served by others");
        assert_eq!(apart.stalls("p0").await, json!([1, true]), "{protocol}");
        let before = stuck.chats();
        for _ in 0..3 {
            assert_eq!(apart.ask().await.header("x-router-prefill-worker"), "p1", "{protocol}");
        }
        assert_eq!(stuck.chats(), before, "{protocol}: it gets nothing more");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_stands_still_behind_a_prefill_loses_its_requests_to_another() {
    for protocol in ["vllm", "sglang"] {
        let apart = Apart::start(protocol).await;
        let stuck = &apart.generate[0];
        stuck.hang();
        let mut served = Vec::new();
        while stuck.chats() < 2 {
            served.push(apart.ask().await.header("x-router-worker").to_owned());
        }
        assert_eq!(served.last().unwrap(), "w1", "{protocol}");
        assert_eq!(apart.stalls("w0").await, json!([1, true]), "{protocol}");
        for engine in &apart.prefill {
            assert!(engine.chats() >= 1, "{protocol}");
        }
    }
}
