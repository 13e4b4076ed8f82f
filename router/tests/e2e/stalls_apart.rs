//! Engines that hang while their servers answer probes, where prompts are computed apart, and behind a gateway.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

impl Engine {
    async fn start(answer: fn() -> Vec<u8>) -> Self {
        let hangs = Arc::<AtomicBool>::default();
        let flag = Arc::clone(&hangs);
        let mock = MockWorker::start(&["m"], move |_| {
            if flag.load(Ordering::SeqCst) {
                vec![Act::Wait(Arc::new(Notify::new()))]
            } else {
                vec![Act::Write(answer())]
            }
        })
        .await;
        Self { mock, hangs }
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
        let prefill = [Engine::start(prefilled).await, Engine::start(prefilled).await];
        let generate = [Engine::start(generated).await, Engine::start(generated).await];
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
async fn a_prefill_engine_that_stands_still_loses_its_prompts_to_another() {
    for protocol in ["vllm", "sglang"] {
        let apart = Apart::start(protocol).await;
        let stuck = &apart.prefill[0];
        stuck.hang();
        let mut served = Vec::new();
        while stuck.chats() < 2 {
            served.push(apart.ask().await.header("x-router-prefill-worker").to_owned());
        }
        assert_eq!(served.last().unwrap(), "p1", "{protocol}: who was there was served by the other");
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
