//! What operators see of the workers, and how they change which there are.

use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};
use router_core::{BreakerState, Role, Worker, WorkerId, WorkerSpec};
use serde_json::{Value, json};

use super::error;
use crate::answers::json_response;
use crate::app::App;
use crate::config::{parse_prefill_worker, parse_worker};
use crate::desired::{Desired, is_same_engine};
use crate::fleet::FleetError;
use crate::stages::relay::RelayBody;

/// All workers, and the sources of those that nobody has named.
pub(super) fn workers(app: &App) -> Value {
    let roster = app.fleet.roster();
    let tell = |worker: &Arc<Worker>| {
        let mut told = worker_state(worker, app.now());
        told["source"] = roster.source(worker.id()).into();
        if let Some(upstream) = roster.upstream(worker) {
            told["stands_still"] = upstream.stalls.is_now().into();
            told["stalls"] = upstream.stalls.count().into();
        }
        told
    };
    let workers: Vec<_> = roster.snapshot.workers().iter().map(tell).collect();
    let sources: Vec<_> = app.sources.iter().map(|source| source.told()).collect();
    json!({ "workers": workers, "sources": sources })
}

fn worker_state(worker: &Worker, now: Duration) -> Value {
    worker.load.lapse(now);
    let load = worker.load.read();
    let breaker = match worker.health.breaker(now) {
        BreakerState::Closed => "closed",
        BreakerState::HalfOpen => "half_open",
        BreakerState::Open => "open",
    };
    json!({
        "id": worker.id().as_str(),
        "address": worker.spec.address,
        "dp_rank": worker.spec.dp_rank.map(|rank| rank.number),
        "role": match worker.spec.role {
            Role::Generate => "generate",
            Role::Prefill => "prefill",
        },
        "usable": worker.is_usable(),
        "up": worker.is_up(),
        "down_by_probes_alone": worker.is_suspect(),
        "draining": worker.is_draining(),
        "breaker": breaker,
        "cooling_s": worker.health.cooling(now).unwrap_or_default().as_secs_f64(),
        "warming_share": worker.health.warming_share(now).unwrap_or(1.0),
        "models": worker.models().map(|models| models.to_vec()),
        "requests_in_flight": worker.load.own(),
        "replica_requests_in_flight": worker.load.others(),
        "prefilling": load.prefilling,
        "prefill_tokens": load.prefill_tokens,
        "context_tokens": load.context_tokens,
        "cache_trust": worker.reports.trust().label(),
        "kv_capacity_tokens": worker.reports.kv_capacity_tokens(),
        "adapter_places": worker.load.adapter_places(),
        "reported": worker.reports.load(now).map(|report| json!({
            "running": report.running,
            "waiting": report.waiting,
            "waiting_uncached_tokens": report.waiting_uncached_tokens,
            "kv_used_tokens": report.kv_used_tokens,
            "kv_free_tokens": report.kv_free_tokens,
            "prefill_tokens_per_second": report.prefill_tokens_per_second,
            "decode_tokens_per_second": report.decode_tokens_per_second,
            "age_ms": report.age_ms,
            "others": {
                "requests": report.others.requests,
                "waiting": report.others.waiting,
                "uncached_tokens": report.others.uncached_tokens,
            },
            "router_rank": report.place.rank,
            "routers": report.place.count,
        })),
    })
}

/// Takes `ID/drain` and `ID/undrain`, of a worker or of all data-parallel ranks that share a name. A worker that is drained has no requests in
/// flight any more.
pub(super) fn drain_worker(app: &App, path: &str) -> Response<RelayBody> {
    let Some((id, change)) =
        path.rsplit_once('/').filter(|(_, change)| ["drain", "undrain"].contains(change))
    else {
        return error(StatusCode::NOT_FOUND, "POST /workers/ID/drain or /workers/ID/undrain");
    };
    let roster = app.fleet.roster();
    let workers = roster.snapshot.workers();
    let meant: Vec<_> = workers.iter().filter(|worker| is_meant(&worker.spec, id)).collect();
    if meant.is_empty() {
        let known: Vec<_> = workers.iter().map(|worker| worker.id().as_str()).collect();
        return error(StatusCode::NOT_FOUND, &format!("no worker {id:?}; there are {}", known.join(", ")));
    }
    for worker in &meant {
        if change == "drain" {
            worker.drain();
        } else {
            worker.undrain();
        }
    }
    tracing::info!(worker = id, change, "an operator changed a worker");
    let states: Vec<_> = meant.iter().map(|worker| worker_state(worker, app.now())).collect();
    json_response(StatusCode::OK, &one_or_ranks(id, states))
}

/// Whether an operator who says `id` means the worker: by its own name, or by what all ranks of its endpoint are named.
fn is_meant(spec: &WorkerSpec, id: &str) -> bool {
    spec.id.as_str() == id || spec.endpoint_name() == id
}

/// What is said of the worker of that name, or of the ranks that share it.
fn one_or_ranks(id: &str, mut states: Vec<Value>) -> Value {
    let is_one = states.len() == 1 && states[0]["id"] == id;
    if is_one { states.remove(0) } else { json!({ "id": id, "ranks": states }) }
}

/// Takes `{"url": "…", "id": "…", "role": "generate"}`; the id may be left out, and the role, which may be `prefill`.
pub(super) async fn add_worker(app: &Arc<App>, body: &[u8]) -> Response<RelayBody> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NewWorker {
        url: String,
        id: Option<String>,
        #[serde(default)]
        role: NewRole,
    }
    #[derive(Clone, Copy, Default, serde::Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum NewRole {
        #[default]
        Generate,
        Prefill,
    }
    let new: NewWorker = match serde_json::from_slice(body) {
        Ok(new) => new,
        Err(reason) => {
            let message = format!(
                "expected {{\"url\": \"http://host:port\", \"id\": \"name\", \"role\": \"generate\"}}: {reason}"
            );
            return error(StatusCode::BAD_REQUEST, &message);
        }
    };
    change(app, StatusCode::CREATED, move |desired| {
        let known: Vec<_> = desired.whole().into_iter().map(|wanted| wanted.worker.spec).collect();
        let (letter, parse): (_, fn(&str, &str) -> _) = match new.role {
            NewRole::Generate => ("w", parse_worker),
            NewRole::Prefill => ("p", parse_prefill_worker),
        };
        let is_free = |id: &String| !known.iter().any(|known| is_meant(known, id));
        let free = || (0..).map(|n| format!("{letter}{n}")).find(is_free);
        let id = new.id.clone().or_else(free).unwrap_or_default();
        let specs: Vec<_> = parse(&format!("{id}={}", new.url), &id).map_err(ChangeError::Address)?;
        // Also of ranks, which are meant all by what their names begin with.
        let clashes = |spec: &WorkerSpec, known: &WorkerSpec| {
            is_meant(known, spec.id.as_str()) || is_meant(spec, known.id.as_str())
        };
        if let Some(spec) = specs.iter().find(|spec| known.iter().any(|known| clashes(spec, known))) {
            return Err(ChangeError::Known(spec.id.clone()));
        }
        // What a source has found is taken over.
        let at = |spec: &WorkerSpec| desired.named.iter().find(|named| is_same_engine(named, spec));
        if let Some(other) = specs.iter().find_map(at) {
            return Err(ChangeError::There { id: other.id.clone(), address: other.address.clone() });
        }
        let added = specs.iter().map(|spec| json!({ "id": spec.id.as_str(), "address": spec.address }));
        let added = one_or_ranks(&id, added.collect());
        desired.named.extend(specs);
        Ok(added)
    })
    .await
}

/// Takes a worker out that an operator has named, or all ranks of an endpoint.
pub(super) async fn remove_worker(app: &Arc<App>, id: &str) -> Response<RelayBody> {
    let gone = id.to_owned();
    change(app, StatusCode::OK, move |desired| {
        let is_gone = |spec: &WorkerSpec| is_meant(spec, &gone);
        if desired.named.iter().any(is_gone) {
            desired.named.retain(|spec| !is_gone(spec));
            return Ok(json!({ "id": gone, "removed": true }));
        }
        let whole = desired.whole();
        match whole.iter().find(|wanted| is_gone(&wanted.worker.spec)).and_then(|found| found.source.as_ref())
        {
            Some(source) => Err(ChangeError::Found { from: Arc::clone(source), id: gone }),
            None => {
                let known: Vec<_> = whole.iter().map(|wanted| wanted.worker.spec.id.as_str()).collect();
                Err(ChangeError::Unknown { known: known.join(", "), id: gone })
            }
        }
    })
    .await
}

/// Why the fleet stays as it is.
#[derive(Debug, thiserror::Error)]
enum ChangeError {
    #[error("{0}")]
    Address(String),
    #[error("there is a worker named {0} already")]
    Known(WorkerId),
    #[error("worker {id} is at {address} already")]
    There { id: WorkerId, address: String },
    #[error(
        "worker {id} comes from {from}, which would bring it back; POST /workers/{id}/drain takes it out"
    )]
    Found { id: String, from: Arc<str> },
    #[error("no worker {id:?}; there are {known}")]
    Unknown { id: String, known: String },
    #[error(transparent)]
    Fleet(#[from] FleetError),
}

/// Edits the fleet; `edit` gives what to answer.
async fn change(
    app: &Arc<App>,
    done: StatusCode,
    edit: impl FnOnce(&mut Desired) -> Result<Value, ChangeError> + Send + 'static,
) -> Response<RelayBody> {
    let app = Arc::clone(app);
    // An embedded worker loads its model.
    let outcome = tokio::task::spawn_blocking(move || app.fleet.update(&app.decider, edit)).await;
    match outcome {
        Ok(Ok(answer)) => json_response(done, &answer),
        Ok(Err(reason)) => {
            let status = match reason {
                ChangeError::Known(_) | ChangeError::There { .. } | ChangeError::Found { .. } => {
                    StatusCode::CONFLICT
                }
                ChangeError::Unknown { .. } => StatusCode::NOT_FOUND,
                ChangeError::Address(_) | ChangeError::Fleet(_) => StatusCode::BAD_REQUEST,
            };
            error(status, &reason.to_string())
        }
        Err(reason) => error(StatusCode::INTERNAL_SERVER_ERROR, &reason.to_string()),
    }
}
