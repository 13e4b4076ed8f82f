//! A worker that plays a recorded engine: everything but the arithmetic is real, and it says so.

use http::Method;
use serde_json::{Value, json};
use worker::{BackendChoice, KvBudget, Worker, WorkerConfig, model::ModelSource};

use crate::{chat, get, info_once, post, send, stream, text};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

/// Qwen3-8B, a thousand times as fast.
fn start(change: impl FnOnce(&mut WorkerConfig)) -> Worker {
    Worker::start(configuration(change)).unwrap()
}

fn configuration(change: impl FnOnce(&mut WorkerConfig)) -> WorkerConfig {
    let BackendChoice::Timing(preset) = "timing:qwen3-8b".parse().unwrap() else {
        panic!("it is a timing backend")
    };
    let mut config = WorkerConfig::timing(preset, ModelSource::Builtin);
    config.time_scale = 0.001;
    change(&mut config);
    config
}

#[tokio::test]
async fn it_says_what_it_is() {
    let worker = start(|_| {});
    assert!(worker.is_simulated() && worker.describe().contains("SIMULATED"));
    let model = get(&worker, "/v1/models").await["data"][0].clone();
    assert_eq!((&model["id"], &model["simulated"]), (&json!("simulated-qwen3-8b"), &json!(true)));
    assert_eq!(
        (&model["owned_by"], &model["max_model_len"]),
        (&json!("roundhouse-simulated"), &json!(40_960))
    );
    let (status, _) = post(&worker, CHAT, &chat("x", &json!({}))).await;
    assert_eq!(status, 200);
    let info = get(&worker, "/server_info").await;
    assert_eq!(info["kv_blocks_total"], 417_000 / 16);
    assert_eq!(
        (&info["simulated"]["preset"], &info["simulated"]["time_scale"]),
        (&json!("qwen3-8b"), &json!(0.001))
    );
    assert!(info["simulated"]["step_lateness"]["steps"].as_u64().unwrap() >= 20);
    let metrics = text(send(&worker, Method::GET, "/metrics", "").await).await;
    for line in
        ["worker:simulated_info{preset=\"qwen3-8b\",time_scale=\"0.001\"} 1", "step_lateness_seconds_count"]
    {
        assert!(metrics.contains(line), "{metrics}");
    }
}

/// What it gets depends on who runs the test; that it asks, and that a clock that spins does not, shows all the same.
#[tokio::test]
async fn it_says_which_priority_its_clock_has() {
    for (time_scale, possible) in [(0.001, &["ordinary"][..]), (1.0, &["ordinary", "real-time"])] {
        let worker = start(|config| config.time_scale = time_scale);
        let info = get(&worker, "/server_info").await;
        let priority = info["simulated"]["clock_priority"].as_str().unwrap();
        assert!(possible.contains(&priority), "{priority} at {time_scale}");
        assert!(
            worker.describe().contains(&format!("clock with {priority} priority")),
            "{}",
            worker.describe()
        );
        let core = &info["simulated"]["clock_core"];
        if priority == "ordinary" {
            assert_eq!(core, &Value::Null, "it would not get it back at once");
        }
        assert_eq!(
            worker.describe().contains(&format!("on core {}, kept awake", core["number"])),
            core.is_object(),
            "{}",
            worker.describe()
        );
    }
}

#[tokio::test]
async fn a_computing_worker_says_so_too() {
    assert_eq!(get(&crate::SHARED, "/v1/models").await["data"][0]["simulated"], json!(false));
    assert_eq!(get(&crate::SHARED, "/server_info").await["simulated"], Value::Null);
}

#[tokio::test]
async fn lengths_stops_and_the_prefix_cache_are_real() {
    let worker = start(|_| {});
    let prompt: Vec<u32> = (10..1_034).collect();
    let body = json!({"prompt": prompt, "max_tokens": 50, "temperature": 0, "ignore_eos": true});
    let (_, first) = post(&worker, COMPLETION, &body).await;
    let (_, second) = post(&worker, COMPLETION, &body).await;
    assert_eq!(
        (&first["usage"]["completion_tokens"], &first["choices"][0]["finish_reason"]),
        (&json!(50), &json!("length"))
    );
    assert_eq!(first["choices"][0]["text"], second["choices"][0]["text"]);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 1_008);
    let words: Vec<&str> = first["choices"][0]["text"].as_str().unwrap().split_whitespace().collect();
    assert_eq!(words.len(), 50, "a word a token");
    let mut stopping = body.clone();
    stopping["stop"] = json!([words[20]]);
    let (_, stopped) = post(&worker, COMPLETION, &stopping).await;
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(
        first["choices"][0]["text"]
            .as_str()
            .unwrap()
            .starts_with(stopped["choices"][0]["text"].as_str().unwrap())
    );
    let (status, flushed) = post(&worker, "/flush_cache", &json!({})).await;
    assert_eq!(status, 200);
    assert!(flushed["flushed_blocks"].as_u64().unwrap() >= 64);
    let (_, third) = post(&worker, COMPLETION, &body).await;
    assert_eq!(third["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn a_stream_has_an_event_for_each_token() {
    let worker = start(|_| {});
    let objects = stream(&worker, CHAT, &chat("x", &json!({"stream": true, "max_tokens": 30}))).await;
    let with_text = objects.iter().filter(|object| {
        object["choices"][0]["delta"]["content"].as_str().is_some_and(|content| !content.is_empty())
    });
    assert_eq!(with_text.count(), 30);
}

#[tokio::test]
async fn what_the_pool_cannot_hold_alone_is_a_400_with_both_sizes() {
    let worker = start(|config| config.kv = KvBudget::Blocks(10));
    let prompt: Vec<u32> = (10..160).collect();
    let body = |max_tokens: usize| json!({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true});
    let (status, answer) = post(&worker, COMPLETION, &body(12)).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("kv_capacity_exceeded")));
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("161") && message.contains("160"), "{message}");
    assert_eq!(post(&worker, COMPLETION, &body(11)).await.0, 200);
    // A conversation that names no length gets what the pool has room for.
    let (status, answer) =
        post(&worker, CHAT, &json!({"messages": [{"role": "user", "content": "x"}]})).await;
    assert_eq!(status, 200);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let (status, answer) = post(&worker, COMPLETION, &body(50_000)).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("40960") && message.contains("50150"), "{message}");
}

#[tokio::test]
async fn probabilities_that_it_does_not_have_are_refused() {
    let worker = start(|_| {});
    for (path, body) in [
        (CHAT, chat("x", &json!({"logprobs": true}))),
        (CHAT, chat("x", &json!({"logprobs": true, "top_logprobs": 3, "stream": true}))),
        (COMPLETION, json!({"prompt": "x", "logprobs": 0})),
        (COMPLETION, json!({"prompt": "x", "logprobs": 5, "echo": true})),
    ] {
        let (status, answer) = post(&worker, path, &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("logprobs")), "{body}");
    }
    for (path, body) in [
        (CHAT, chat("x", &json!({"logprobs": false, "top_logprobs": 0}))),
        (COMPLETION, json!({"prompt": "x", "echo": true, "max_tokens": 2})),
    ] {
        assert_eq!(post(&worker, path, &body).await.0, 200, "{body}");
    }
}

#[tokio::test]
async fn what_would_change_probabilities_is_refused() {
    let worker = start(|_| {});
    for (name, value, harmless) in [
        ("logit_bias", json!({"7": 5}), json!({})),
        ("repetition_penalty", json!(1.5), json!(1.0)),
        ("frequency_penalty", json!(0.5), json!(0)),
        ("presence_penalty", json!(-0.5), json!(0.0)),
    ] {
        let (status, answer) = post(&worker, CHAT, &chat("x", &json!({name: value}))).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(name)), "{answer}");
        assert_eq!(post(&worker, CHAT, &chat("x", &json!({name: harmless}))).await.0, 200);
    }
}

#[tokio::test]
async fn min_tokens_holds_against_stop_tokens() {
    let worker = start(|_| {});
    let prompt: Vec<u32> = (10..20).collect();
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
    let (_, free) = post(&worker, COMPLETION, &body).await;
    let text = free["choices"][0]["text"].as_str().unwrap();
    let (_, tokens) = post(&worker, "/tokenize", &json!({"prompt": text, "add_special_tokens": false})).await;
    let mut stopping = body.clone();
    stopping["stop_token_ids"] = json!([tokens["tokens"][0]]);
    let (_, stopped) = post(&worker, COMPLETION, &stopping).await;
    assert_eq!(stopped["usage"]["completion_tokens"], 1, "the first word ends it");
    stopping["min_tokens"] = json!(8);
    let (_, whole) = post(&worker, COMPLETION, &stopping).await;
    assert_eq!(whole["usage"]["completion_tokens"], 8);
}

#[tokio::test]
async fn whom_kv_has_no_room_for_waits_and_everybody_gets_an_answer() {
    let worker = start(|config| config.kv = KvBudget::Blocks(12));
    let body = |first: u32| {
        let prompt: Vec<u32> = (first..first + 40).collect();
        json!({"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": true})
    };
    let mut running = tokio::task::JoinSet::new();
    for request in 0..8 {
        let (worker, body) = (worker.clone(), body(request * 100));
        running.spawn(async move { post(&worker, COMPLETION, &body).await });
    }
    for (status, answer) in running.join_all().await {
        assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(100)));
    }
    info_once(&worker, |info| info["requests_running"] == 0).await;
}

#[test]
fn what_makes_no_sense_is_refused() {
    let refused = |change: fn(&mut WorkerConfig)| {
        Worker::start(configuration(change)).err().expect("refused").to_string()
    };
    assert!(refused(|config| config.time_scale = 0.0).contains("above 0"));
    assert!(refused(|config| config.kv = KvBudget::Bytes(1 << 30)).contains("kv-blocks"));
    assert!(refused(|config| config.kv = KvBudget::Blocks(0)).contains("at least 1"));
    assert!(refused(|config| config.backend = BackendChoice::Cpu).contains("timing:PRESET"));
    assert!(refused(|config| config.max_running = Some(0)).contains("max-running"));
}

/// The step lasts for hours, so that an answer that waited for the engine's thread would never come.
#[tokio::test]
async fn texts_are_tokenized_while_a_step_lasts() {
    let worker = start(|config| config.time_scale = 1e6);
    let generating = async { post(&worker, CHAT, &chat("x", &json!({}))).await };
    let tokenizing = async {
        while !is_stepping(&worker).await {
            tokio::task::yield_now().await;
        }
        let answered = post(&worker, "/tokenize", &json!({"prompt": "word ".repeat(20_000)})).await;
        assert!(is_stepping(&worker).await);
        answered
    };
    let (status, answer) = tokio::select! {
        answered = tokenizing => answered,
        _ = generating => panic!("its step is not over"),
    };
    assert_eq!(status, 200);
    assert!(answer["count"].as_u64().unwrap() >= 20_000, "{}", answer["count"]);
    // It would wait for its step to end.
    std::mem::forget(worker);
}

/// Whether the engine has begun a step and not ended it: it counts those who take part before, and nobody has a token.
async fn is_stepping(worker: &Worker) -> bool {
    let metrics = text(send(worker, Method::GET, "/metrics", "").await).await;
    let value = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    value("worker:num_requests_running") == 1.0 && value("worker:generation_tokens_total") == 0.0
}
