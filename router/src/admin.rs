//! The operators' listener: metrics, probes, the workers, and why a request would go where. Loopback unless told otherwise.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use router_core::{
    Among, BreakerState, Explanation, Leg, RequestView, Role, SplitCosts, Worker, WorkerId, WorkerSpec,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower::{Service, ServiceBuilder, ServiceExt};

use crate::answers::{self, json_response, respond};
use crate::app::App;
use crate::config::{parse_prefill_worker, parse_worker};
use crate::error::error_body;
use crate::fleet::FleetError;
use crate::listener::client_stream::ClientStream;
use crate::listener::socket::Socket;
use crate::liveness;
use crate::routes::{Endpoint, Routes};
use crate::stages::parse::Reading;
use crate::stages::pick::check_model;
use crate::stages::relay::RelayBody;

/// Admin requests at once; more are answered 503.
const MAX_CONCURRENT: usize = 32;
/// Connections at once, of each of the two listeners; more wait to be accepted.
const MAX_CONNECTIONS: usize = 256;
/// Time for one admin request.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// What a listener shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Everything.
    Admin,
    /// `/metrics`, and what probes ask.
    MetricsOnly,
}

/// Serves the admin API for ever.
pub async fn serve(app: Arc<App>, listener: TcpListener, scope: Scope) {
    let api_app = Arc::clone(&app);
    let api = tower::service_fn(move |request| {
        let app = Arc::clone(&api_app);
        async move { Ok::<_, Infallible>(answer(&app, request, scope).await) }
    });
    // Operators' tools must not be able to hurt the traffic beside them.
    let api = ServiceBuilder::new().load_shed().concurrency_limit(MAX_CONCURRENT).service(api);
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let probed = Arc::clone(&app);
        let Ok(place) = Arc::clone(&connections).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        liveness::configure(&stream, TIME_LIMIT);
        let stream = ClientStream::new(Socket::from(stream), TIME_LIMIT);
        let api = api.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let (mut api, probed) = (api.clone(), Arc::clone(&probed));
            async move {
                // Before any limit, and without a key, as on the clients' listener.
                if let Some(response) = probe(&probed, &request) {
                    return Ok(response);
                }
                let answer = async { api.ready().await?.call(request).await };
                let outcome = tokio::time::timeout(TIME_LIMIT, answer).await;
                Ok::<_, Infallible>(match outcome {
                    Ok(Ok(response)) => response,
                    Ok(Err(_)) => error(StatusCode::SERVICE_UNAVAILABLE, "too many admin requests at once"),
                    Err(_) => error(StatusCode::GATEWAY_TIMEOUT, "the admin request took too long"),
                })
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(TIME_LIMIT)
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            // Whoever asks nothing more, or takes nothing, gives the place back.
            if let Err(error) = connection.await {
                tracing::debug!(%error, "admin connection ended");
            }
            drop(place);
        });
    }
}

/// Whether the process runs, and whether it can serve: asked here, clients who take all connections of theirs do not make it look dead.
fn probe(app: &App, request: &Request<Incoming>) -> Option<Response<RelayBody>> {
    let endpoint = app.routes.find(request.uri().path());
    let is_probe = matches!(endpoint, Endpoint::Live | Endpoint::Ready);
    if !is_probe || !Routes::takes(endpoint, request.method()) {
        return None;
    }
    answers::answer(app, endpoint, request.uri().path()).ok()
}

async fn answer(app: &Arc<App>, request: Request<Incoming>, scope: Scope) -> Response<RelayBody> {
    let (head, body) = request.into_parts();
    let path = head.uri.path();
    if let (Scope::Admin, Err(reason)) = (scope, app.keys.authorize_admin(&head.headers)) {
        let mut response = error(StatusCode::UNAUTHORIZED, &reason.to_string());
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        return response;
    }
    match (&head.method, path) {
        (&Method::GET, "/metrics") => {
            let app = Arc::clone(app);
            // A thousand workers' series take a while, and this thread accepts and probes.
            match tokio::task::spawn_blocking(move || app.metrics.render(&app)).await {
                Ok(text) => respond(StatusCode::OK, "text/plain; version=0.0.4", text),
                Err(reason) => error(StatusCode::INTERNAL_SERVER_ERROR, &reason.to_string()),
            }
        }
        _ if scope == Scope::MetricsOnly => {
            error(StatusCode::NOT_FOUND, "this listener serves GET /metrics, /livez and /readyz")
        }
        (&Method::GET, "/workers") => json_response(StatusCode::OK, &workers(app)),
        (&Method::POST, "/workers") => match read(app, body).await {
            Ok(body) => add_worker(app, &body).await,
            Err(response) => response,
        },
        (&Method::DELETE, path) if path.starts_with("/workers/") => {
            remove_worker(app, path.trim_start_matches("/workers/")).await
        }
        (&Method::POST, path) if path.starts_with("/workers/") => {
            drain_worker(app, path.trim_start_matches("/workers/"))
        }
        (&Method::POST, "/explain") => match read(app, body).await {
            Ok(body) => explain(app, &head.headers, &body),
            Err(response) => response,
        },
        _ => error(
            StatusCode::NOT_FOUND,
            "the admin listener serves GET /metrics, /livez and /readyz, GET and POST /workers, DELETE /workers/ID, POST /workers/ID/drain, \
             POST /workers/ID/undrain and POST /explain",
        ),
    }
}

fn error(status: StatusCode, message: &str) -> Response<RelayBody> {
    respond(status, "application/json", error_body(message, "admin_error", None, None).to_vec())
}

async fn read(app: &App, body: Incoming) -> Result<Bytes, Response<RelayBody>> {
    let limit_bytes = app.settings.max_body_bytes;
    let whole = Limited::new(body, limit_bytes).collect().await;
    whole.map(http_body_util::Collected::to_bytes).map_err(|reason| {
        error(
            StatusCode::BAD_REQUEST,
            &format!("the body could not be read within {limit_bytes} bytes: {reason}"),
        )
    })
}

fn workers(app: &App) -> Value {
    let roster = app.fleet.roster();
    let workers: Vec<_> =
        roster.snapshot.workers().iter().map(|worker| worker_state(worker, app.now())).collect();
    json!({ "workers": workers })
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
        "requests_in_flight": load.requests,
        "prefilling": load.prefilling,
        "prefill_tokens": load.prefill_tokens,
        "context_tokens": load.context_tokens,
        "cache_trust": worker.reports.trust().label(),
        "kv_capacity_tokens": worker.reports.kv_capacity_tokens(),
        "reported": worker.reports.load(now).map(|report| json!({
            "running": report.running,
            "waiting": report.waiting,
            "waiting_uncached_tokens": report.waiting_uncached_tokens,
            "kv_used_tokens": report.kv_used_tokens,
            "kv_free_tokens": report.kv_free_tokens,
            "prefill_tokens_per_second": report.prefill_tokens_per_second,
            "decode_tokens_per_second": report.decode_tokens_per_second,
            "age_ms": report.age_ms,
            "router_rank": report.place.rank,
            "routers": report.place.count,
        })),
    })
}

/// Takes `ID/drain` and `ID/undrain`. A worker that is drained has no requests in flight any more.
fn drain_worker(app: &App, path: &str) -> Response<RelayBody> {
    let Some((id, change)) =
        path.rsplit_once('/').filter(|(_, change)| ["drain", "undrain"].contains(change))
    else {
        return error(StatusCode::NOT_FOUND, "POST /workers/ID/drain or /workers/ID/undrain");
    };
    let roster = app.fleet.roster();
    let Some(worker) = roster.snapshot.find(id) else {
        let known: Vec<_> = roster.snapshot.workers().iter().map(|worker| worker.id().as_str()).collect();
        return error(StatusCode::NOT_FOUND, &format!("no worker {id:?}; there are {}", known.join(", ")));
    };
    if change == "drain" {
        worker.drain();
    } else {
        worker.undrain();
    }
    tracing::info!(worker = id, change, "an operator changed a worker");
    json_response(StatusCode::OK, &worker_state(worker, app.now()))
}

/// Takes `{"url": "…", "id": "…", "role": "generate"}`; the id may be left out, and the role, which may be `prefill`.
async fn add_worker(app: &Arc<App>, body: &[u8]) -> Response<RelayBody> {
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
    change(app, StatusCode::CREATED, move |specs| {
        let (letter, parse): (_, fn(&str, &str) -> _) = match new.role {
            NewRole::Generate => ("w", parse_worker),
            NewRole::Prefill => ("p", parse_prefill_worker),
        };
        let is_free = |id: &String| !specs.iter().any(|spec| spec.id.as_str() == id);
        let free = || (0..).map(|n| format!("{letter}{n}")).find(is_free);
        let id = new.id.clone().or_else(free).unwrap_or_default();
        let spec: WorkerSpec = parse(&format!("{id}={}", new.url), &id).map_err(ChangeError::Address)?;
        if specs.iter().any(|known| known.id == spec.id) {
            return Err(ChangeError::Known(spec.id));
        }
        let added = json!({ "id": spec.id.as_str(), "address": spec.address });
        specs.push(spec);
        Ok(added)
    })
    .await
}

async fn remove_worker(app: &Arc<App>, id: &str) -> Response<RelayBody> {
    let gone = id.to_owned();
    change(app, StatusCode::OK, move |specs| {
        let before = specs.len();
        specs.retain(|spec| spec.id.as_str() != gone);
        if specs.len() == before {
            let known = specs.iter().map(|spec| spec.id.as_str()).collect::<Vec<_>>().join(", ");
            return Err(ChangeError::Unknown { id: gone, known });
        }
        Ok(json!({ "id": gone, "removed": true }))
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
    #[error("no worker {id:?}; there are {known}")]
    Unknown { id: String, known: String },
    #[error(transparent)]
    Fleet(#[from] FleetError),
}

/// Edits the fleet; `edit` gives what to answer.
async fn change(
    app: &Arc<App>,
    done: StatusCode,
    edit: impl FnOnce(&mut Vec<WorkerSpec>) -> Result<Value, ChangeError> + Send + 'static,
) -> Response<RelayBody> {
    let app = Arc::clone(app);
    // An embedded worker loads its model.
    let outcome = tokio::task::spawn_blocking(move || app.fleet.update(&app.decider, edit)).await;
    match outcome {
        Ok(Ok(answer)) => json_response(done, &answer),
        Ok(Err(reason)) => {
            let status = match reason {
                ChangeError::Known(_) => StatusCode::CONFLICT,
                ChangeError::Unknown { .. } => StatusCode::NOT_FOUND,
                ChangeError::Address(_) | ChangeError::Fleet(_) => StatusCode::BAD_REQUEST,
            };
            error(status, &reason.to_string())
        }
        Err(reason) => error(StatusCode::INTERNAL_SERVER_ERROR, &reason.to_string()),
    }
}

fn explain(app: &App, headers: &HeaderMap, body: &[u8]) -> Response<RelayBody> {
    let reading = match app.parser.read(headers, body, &app.ratios) {
        Ok(reading) => reading,
        Err(reason) => return reason.response(),
    };
    if let Err(reason) = check_model(app, &reading) {
        return reason.response();
    }
    let roster = app.fleet.roster();
    let (view, now) = (reading.view(), app.now());
    let explain = |leg| app.decider.explain(&roster.snapshot, &RequestView { leg, ..view }, now);
    let among = Among::Untried(&[]);
    let may_choose = app.settings.prefill_protocol.generates_alone();
    let splits = roster.snapshot.has_prefill()
        && (!may_choose || app.decider.splits(&roster.snapshot, &view, among, now));
    let leg = if splits { Leg::Decode } else { Leg::Whole };
    let (explanation, prefill) = match explain(leg)
        .and_then(|first| Ok((first, splits.then(|| explain(Leg::Prefill)).transpose()?)))
    {
        Ok(explained) => explained,
        Err(reason) => return crate::error::RequestError::from(reason).response(),
    };
    let mut told = explained(&explanation, &reading);
    told["model"] = reading.model.as_deref().into();
    told["prompt_bytes"] = reading.prompt_bytes.into();
    told["prompt_tokens_estimated"] = reading.prompt_tokens.into();
    told["later_turns_expected"] = explanation.later_turns.into();
    if let Some(prefill) = prefill {
        told["prefill"] = explained(&prefill, &reading);
    }
    if roster.snapshot.has_prefill()
        && may_choose
        && let Some(costs) = app.decider.split_costs(&roster.snapshot, &view, among, now)
    {
        let (prefill_s, decode_s) = costs.apart_s.unzip();
        let SplitCosts { new_tokens, whole_s, .. } = costs;
        told["split"] = json!({
            "new_tokens": new_tokens,
            "whole_s": whole_s,
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "pays": costs.pays(),
        });
    }
    json_response(StatusCode::OK, &told)
}

/// Who would get a request, or a leg of one, and why.
fn explained(explanation: &Explanation, reading: &Reading) -> Value {
    let candidates: Vec<_> = explanation
        .candidates
        .iter()
        .map(|(worker, candidate, cost)| {
            json!({
                "worker": worker.id().as_str(),
                "cost": cost,
                "hit_tokens": candidate.hit_tokens,
                "uncached_tokens": reading.prompt_tokens.saturating_sub(candidate.hit_tokens as usize),
                "queued_prefill_tokens": candidate.load.prefill_tokens,
                "requests_in_flight": candidate.load.requests,
                "decoding": candidate.load.decoding(),
            })
        })
        .collect();
    let (picked, chosen, cost) = &explanation.candidates[explanation.picked];
    let why = format!(
        "{}: {} costs {cost:.1}, the least of {} candidates, with {} of about {} prompt tokens expected in its cache, {} \
         prefill tokens queued and {} requests in flight",
        explanation.policy,
        picked.id(),
        candidates.len(),
        chosen.hit_tokens,
        reading.prompt_tokens,
        chosen.load.prefill_tokens,
        chosen.load.requests,
    );
    json!({
        "policy": explanation.policy,
        "worker": picked.id().as_str(),
        "why": why,
        "candidates": candidates,
    })
}
