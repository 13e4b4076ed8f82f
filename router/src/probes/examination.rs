//! Whether an engine hangs whose requests nothing comes of: it is asked for one token, and whether it counts on.
//!
//! Neither says everything. A question waits behind other answers where an engine computes no more of them at once; and not every engine counts, or tells
//! whoever asks. Used by the [prober](super::Prober).

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::uri::PathAndQuery;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::ask;
use crate::disaggregation::PrefillProtocol;
use crate::fleet::Upstream;
use crate::metrics_text::samples;
use crate::transport::{TransportError, WorkerRequest};

/// How long an engine may take to tell its metrics.
const METRICS_LIMIT: Duration = Duration::from_secs(5);
/// A question that was lost on its way is asked again after so long,
const BETWEEN_QUESTIONS: Duration = Duration::from_secs(1);
/// and one that a hanging engine owes the answer to after so long, since its connection may be gone without a word.
const QUESTION_LIMIT: Duration = Duration::from_secs(60);
/// What engines count while they compute: tokens, steps, or what of their cache is in use.
const COUNTS: [&str; 8] = [
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:num_used_tokens",
    "sglang:gen_throughput",
    "worker:generation_tokens_total",
];

/// What tells that it has something to compute.
const HAVE_REQUESTS: [&str; 4] = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
];

/// What was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Finding {
    /// It has generated a token, or counted on.
    Generates,
    /// It has done neither, as far as it can be asked.
    Hangs,
    /// It cannot be asked, or may have too much to do.
    Unknown,
}

/// Examines an engine, that hands prompts over by `protocol` if it does, for `time`.
pub(super) async fn examine(upstream: &Upstream, protocol: PrefillProtocol, time: Duration) -> Finding {
    let end = Instant::now() + time;
    let before = told(upstream).await;
    let answer = timeout_at(end, ask_for_a_token(upstream, protocol)).await;
    if answer == Ok(Answer::Token) {
        return Finding::Generates;
    }
    sleep_until(end).await;
    match (before, told(upstream).await) {
        (Some(before), Some(after)) if before.counts != after.counts => Finding::Generates,
        // The router may count a request that has left it, whose client is slow.
        (Some(_), Some(after)) if answer.is_err() || after.has_requests => Finding::Hangs,
        // A stream that has begun has its place among those that are computed; and a process that does not answer probes has more than much to do.
        _ if answer.is_err() && (upstream.stalls.streams() > 0 || !upstream.worker.is_up()) => Finding::Hangs,
        _ => Finding::Unknown,
    }
}

/// Waits until an engine that hangs generates again, or, if it cannot be asked, for `patience`, after which it may be tried.
pub(super) async fn recovery(upstream: &Upstream, protocol: PrefillProtocol, patience: Duration) -> Finding {
    loop {
        match timeout(QUESTION_LIMIT, ask_for_a_token(upstream, protocol)).await {
            Ok(Answer::Token) => return Finding::Generates,
            Ok(Answer::None) => {
                sleep(patience).await;
                return Finding::Unknown;
            }
            Err(_) => {}
        }
    }
}

/// What an engine tells of itself, of its own rank if it tells them apart.
#[derive(PartialEq, Eq, Debug)]
struct Told {
    /// What it has counted up to now.
    counts: Vec<String>,
    has_requests: bool,
}

/// `None` if it does not say.
async fn told(upstream: &Upstream) -> Option<Told> {
    let metrics = ask(&*upstream.transport, PathAndQuery::from_static("/metrics"));
    let text = timeout(METRICS_LIMIT, metrics).await.ok()??;
    let rank = upstream.worker.spec.dp_rank.map(|rank| rank.number.to_string());
    let told = read(&String::from_utf8_lossy(&text), rank.as_deref());
    (!told.counts.is_empty()).then_some(told)
}

fn read(text: &str, rank: Option<&str>) -> Told {
    let mut told = Told { counts: Vec::new(), has_requests: false };
    for sample in samples(text) {
        let of = sample.label("engine").or(sample.label("dp_rank"));
        let (true, Some(number)) = (of.is_none() || rank.is_none() || of == rank, sample.number()) else {
            continue;
        };
        if COUNTS.contains(&sample.name) {
            told.counts.push(format!("{} {number}", sample.name));
        }
        told.has_requests |= HAVE_REQUESTS.contains(&sample.name) && number > 0.0;
    }
    told
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Token,
    /// It does not answer such a question, or not to the router.
    None,
}

/// Asks for one token until there is an answer.
async fn ask_for_a_token(upstream: &Upstream, protocol: PrefillProtocol) -> Answer {
    let Some(request) = question(&upstream.entries(), protocol) else { return Answer::None };
    loop {
        match status_of(upstream, &request).await {
            Ok(status) if status.is_success() => return Answer::Token,
            // Whoever is in between has given up.
            Ok(StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT) | Err(_) => {
                sleep(BETWEEN_QUESTIONS).await;
            }
            Ok(_) => return Answer::None,
        }
    }
}

async fn status_of(upstream: &Upstream, request: &WorkerRequest) -> Result<StatusCode, TransportError> {
    let (head, mut body) = upstream.transport.send(request).await?.into_parts();
    while let Some(frame) = body.frame().await {
        frame?;
    }
    Ok(head.status)
}

/// `None` for a server of several models: it might load one that nobody waits for in place of another.
fn question(entries: &[Value], protocol: PrefillProtocol) -> Option<WorkerRequest> {
    let mut models = entries.iter().filter(|entry| !entry["parent"].is_string());
    let mut body = json!({"prompt": "1", "max_tokens": 1, "temperature": 0});
    if let Some((host, room)) = protocol.without_the_other() {
        (body["bootstrap_host"], body["bootstrap_room"]) = (host.into(), room.into());
    }
    if let Some(model) = models.next() {
        body["model"] = model["id"].clone();
    }
    if models.next().is_some() {
        return None;
    }
    let path = PathAndQuery::from_static("/v1/completions");
    let mut request =
        WorkerRequest { body: Bytes::from(body.to_string()).into(), ..WorkerRequest::post(path) };
    request.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Some(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_goes_by_its_own_counts() {
        let text = "vllm:generation_tokens_total{engine=\"0\",model_name=\"m\"} 5.0\nvllm:generation_tokens_total{engine=\"1\"} 7.0\n\
                    vllm:num_requests_running{engine=\"0\"} 3\nsglang:num_used_tokens 9\nhttp_requests_total 4\n";
        let [of_first, of_second, of_both] =
            ["vllm:generation_tokens_total 5", "vllm:generation_tokens_total 7", "sglang:num_used_tokens 9"];
        let (first, second) = (read(text, Some("0")), read(text, Some("1")));
        assert_eq!((first.counts, first.has_requests), (vec![of_first.into(), of_both.into()], true));
        assert_eq!((second.counts, second.has_requests), (vec![of_second.into(), of_both.into()], false));
        assert_eq!(read(text, None).counts, [of_first, of_second, of_both]);
        assert!(read("a 1\n", None).counts.is_empty());
    }

    #[test]
    fn who_serves_several_models_is_not_asked_and_adapters_are_none() {
        let entry = |id: &str, parent: Option<&str>| json!({"id": id, "parent": parent});
        let (one, other, adapter) = (entry("m", None), entry("n", None), entry("a", Some("m")));
        let question = |entries: &[Value], protocol| {
            let body = question(entries, protocol)?.body.joined();
            Some(serde_json::from_slice::<Value>(&body).unwrap())
        };
        let (vllm, sglang) = (PrefillProtocol::Vllm, PrefillProtocol::Sglang);
        let asked = question(&[], vllm).unwrap();
        assert!(asked.get("bootstrap_host").is_none() && question(&[adapter, one.clone()], vllm).is_some());
        assert_eq!(question(&[], sglang).unwrap()["bootstrap_host"], "2.2.2.2", "nobody else takes part");
        assert!(question(&[one, other], vllm).is_none());
    }
}
