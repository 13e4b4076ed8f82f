//! Asks each worker whether it is well and what it serves.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use router_core::Decider;
use serde_json::Value;

use crate::config::Settings;
use crate::fleet::Upstream;
use crate::payload::Payload;
use crate::transport::{Transport, TransportError};

/// Between two probes of a worker that is down: it serves again soon after it listens again.
const DOWN_INTERVAL: Duration = Duration::from_millis(250);
/// Probes that must fail, one after the other, to take out a worker that was up.
const FAILURES_TO_DOWN: usize = 2;
/// Models are asked for on the way up, and then with every so many-th probe.
const PROBES_PER_MODEL_LIST: usize = 5;
/// Most of a probe's answer that is read.
const MAX_ANSWER_BYTES: usize = 4 << 20;

/// Probes `upstream` until the task is aborted.
pub async fn keep_probing(upstream: Arc<Upstream>, decider: Arc<Decider>, settings: Settings) {
    let (mut failures, mut passed) = (0, 0);
    loop {
        let list_models = !upstream.worker.is_usable() || passed % PROBES_PER_MODEL_LIST == 0;
        let probe = probe(&upstream, list_models);
        match tokio::time::timeout(settings.probe_timeout, probe).await {
            Ok(Ok(())) => {
                (failures, passed) = (0, passed + 1);
                if upstream.worker.mark_up() {
                    let models = upstream.worker.models();
                    tracing::info!(worker = %upstream.worker.id(), ?models, "worker is up");
                }
            }
            outcome => {
                (failures, passed) = (failures + 1, 0);
                if failures >= FAILURES_TO_DOWN && upstream.worker.mark_down() {
                    let reason = outcome.err().map_or("refused", |_| "no answer in time");
                    tracing::warn!(worker = %upstream.worker.id(), reason, "worker is down");
                    decider.forget(upstream.worker.slot);
                }
            }
        }
        let well = upstream.worker.is_usable() && failures == 0;
        let wait = if well { settings.probe_interval } else { DOWN_INTERVAL };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = upstream.probe_now.notified() => {}
        }
    }
}

/// Why a probe did not pass.
#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("answered {0}")]
    Status(StatusCode),
    #[error("answered more than {MAX_ANSWER_BYTES} bytes")]
    TooLong,
}

async fn probe(upstream: &Upstream, list_models: bool) -> Result<(), ProbeError> {
    let (status, _) = get(&*upstream.transport, "/health").await?;
    // An engine without /health that answers at all is well.
    let has_none = matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED);
    if !status.is_success() && !has_none {
        return Err(ProbeError::Status(status));
    }
    if list_models {
        let (status, body) = get(&*upstream.transport, "/v1/models").await?;
        if let (true, Some(entries)) = (status.is_success(), entries_of(&body)) {
            let id = |entry: &Value| entry.get("id")?.as_str().map(str::to_owned);
            upstream.worker.set_models(entries.iter().filter_map(id).collect());
            if let Ok(mut known) = upstream.model_entries.write() {
                *known = entries.into();
            }
        }
    }
    Ok(())
}

fn entries_of(body: &[u8]) -> Option<Vec<Value>> {
    let mut body: Value = serde_json::from_slice(body).ok()?;
    serde_json::from_value(body.get_mut("data")?.take()).ok()
}

async fn get(transport: &dyn Transport, path: &'static str) -> Result<(StatusCode, Bytes), ProbeError> {
    let mut request = Request::new(Payload::default());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = http::Uri::from_static(path);
    let (head, mut body) = transport.send(request).await?.into_parts();
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            whole.extend_from_slice(&data);
        }
        if whole.len() > MAX_ANSWER_BYTES {
            return Err(ProbeError::TooLong);
        }
    }
    Ok((head.status, whole.freeze()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_model_lists_and_nothing_else() {
        assert_eq!(
            entries_of(br#"{"object": "list", "data": [{"id": "a"}, {"id": "b"}]}"#).unwrap().len(),
            2
        );
        for other in [&b"[]"[..], b"{}", b"{\"data\": 5}", b"", b"ok"] {
            assert!(entries_of(other).is_none());
        }
    }
}
