//! The operators' listener: metrics, probes, the workers, and why a request would go where. Loopback unless told otherwise.

mod workers;

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
use router_core::{Among, Explained, Explanation, Leg, RequestView, SplitCosts};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower::{Service, ServiceBuilder, ServiceExt};

use self::workers::{add_worker, drain_worker, remove_worker, workers};
use crate::answers::{self, json_response, respond};
use crate::app::App;
use crate::error::error_body;
use crate::listener::client_stream::ClientStream;
use crate::listener::socket::Socket;
use crate::liveness;
use crate::routes::{Endpoint, Routes};
use crate::stages::parse::Reading;
use crate::stages::pick::check_model;
use crate::stages::relay::RelayBody;
use crate::why::why;

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
        (&Method::GET, "/replicas") => {
            let told =
                app.replicas.as_ref().map_or_else(|| json!({ "routers": 1 }), |replicas| replicas.to_json());
            json_response(StatusCode::OK, &told)
        }
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
            "the admin listener serves GET /metrics, /livez and /readyz, GET /replicas, GET and POST /workers, DELETE /workers/ID, POST /workers/ID/drain, \
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

fn explain(app: &App, headers: &HeaderMap, body: &Bytes) -> Response<RelayBody> {
    let reading = match app.parser.read(headers, body, (&app.ratios, |model: &str| app.serves(model))) {
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
    let splits =
        app.has_prefill() && (!may_choose || app.decider.splits(&roster.snapshot, &view, among, now));
    let leg = if splits { Leg::Decode } else { Leg::Whole };
    let (explanation, prefill) = match explain(leg)
        .and_then(|first| Ok((first, splits.then(|| explain(Leg::Prefill)).transpose()?)))
    {
        Ok(explained) => explained,
        Err(reason) => return crate::error::RequestError::from(reason).response(),
    };
    let mut told = explained(app, &explanation, &reading);
    told["model"] = reading.model.as_deref().into();
    told["prompt_bytes"] = reading.prompt_bytes.into();
    told["prompt_tokens_estimated"] = reading.prompt_tokens.into();
    told["priority"] = reading.precedence.priority.0.into();
    told["waits_for_spare_time"] = app.decider.waits_for_spare(&view).into();
    told["later_turns_expected"] = explanation.later_turns.into();
    told["answer_tokens_expected"] = explanation.answer_tokens.into();
    told["followers_expected"] = explanation.followers.requests.into();
    if let Some(prefill) = prefill {
        told["prefill"] = explained(app, &prefill, &reading);
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
fn explained(app: &App, explanation: &Explanation, reading: &Reading) -> Value {
    let expects = app.decider.reads_prefixes();
    let candidates: Vec<_> = explanation
        .candidates
        .iter()
        .map(|Explained { worker, candidate, adapter, cost }| {
            json!({
                "worker": worker.id().as_str(),
                "cost": cost,
                "first_token_in_s": expects.then_some(candidate.queued_s + candidate.own_s),
                "hit_tokens": candidate.hit_tokens,
                "uncached_tokens": reading.prompt_tokens.saturating_sub(candidate.hit_tokens as usize),
                "queued_prefill_tokens": candidate.load.prefill_tokens,
                "requests_in_flight": candidate.load.requests,
                "decoding": candidate.load.decoding(),
                "adapter_waits_for": adapter.waits_for,
            })
        })
        .collect();
    json!({
        "policy": explanation.policy,
        "worker": explanation.candidates[explanation.picked].worker.id().as_str(),
        "why": why(explanation, reading.prompt_tokens),
        "candidates": candidates,
    })
}
