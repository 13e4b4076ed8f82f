//! What the router answers itself: probes, model lists, who it is.

use std::collections::HashSet;
use std::sync::Arc;

use http::{HeaderValue, Response, StatusCode, header};
use router_core::{Role, Worker};
use serde_json::{Value, json};

use crate::app::App;
use crate::discovery::state::awaited;
use crate::error::{RequestError, error_body};
use crate::routes::Endpoint;
use crate::stages::relay::RelayBody;

/// Answers `endpoint`, which is none that goes to a worker.
///
/// # Errors
/// When nothing is served there.
pub fn answer(app: &App, endpoint: Endpoint, path: &str) -> Result<Response<RelayBody>, RequestError> {
    Ok(match endpoint {
        Endpoint::Live => text(StatusCode::OK, "ok\n"),
        Endpoint::Ready => ready(app),
        Endpoint::Models => models(app, path.strip_prefix("/v1/models/")),
        Endpoint::ServerInfo => json_response(StatusCode::OK, &server_info(app)),
        Endpoint::ModelInfo => json_response(StatusCode::OK, &model_info(app)),
        Endpoint::Administration => return Err(RequestError::NotRouted { path: path.to_owned() }),
        _ => return Err(RequestError::NotFound { path: path.to_owned() }),
    })
}

/// A JSON response.
#[must_use]
pub fn json_response(status: StatusCode, value: &Value) -> Response<RelayBody> {
    respond(status, "application/json", value.to_string().into_bytes())
}

/// A response with a whole body.
#[must_use]
pub fn respond(status: StatusCode, content_type: &'static str, body: Vec<u8>) -> Response<RelayBody> {
    let mut response = Response::new(RelayBody::full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn text(status: StatusCode, body: &str) -> Response<RelayBody> {
    respond(status, "text/plain; charset=utf-8", body.as_bytes().to_vec())
}

/// Whether requests can be served.
#[must_use]
pub fn is_ready(app: &App) -> bool {
    ready(app).status().is_success()
}

fn ready(app: &App) -> Response<RelayBody> {
    if app.is_draining() {
        return text(StatusCode::SERVICE_UNAVAILABLE, "draining\n");
    }
    if let Some(source) = awaited(&app.sources, app.now()) {
        let text = format!("the workers of {source} are not known yet\n");
        return self::text(StatusCode::SERVICE_UNAVAILABLE, &text);
    }
    let roster = app.fleet.roster();
    let has =
        |role| roster.snapshot.workers().iter().any(|worker| worker.spec.role == role && may_serve(worker));
    let needs_prefill = app.has_prefill() && !app.settings.prefill_protocol.generates_alone();
    match (has(Role::Generate), !needs_prefill || has(Role::Prefill)) {
        (true, true) => text(StatusCode::OK, "ok\n"),
        (true, false) => text(StatusCode::SERVICE_UNAVAILABLE, "no usable prefill worker\n"),
        (false, _) => text(StatusCode::SERVICE_UNAVAILABLE, "no usable worker\n"),
    }
}

/// Whether requests go there, or would if all others that are up were gone: then those that are down by their probes alone are most.
fn may_serve(worker: &Worker) -> bool {
    worker.is_usable() || worker.is_suspect()
}

/// The union of what workers list that may serve, and names that stand for some of it.
fn entries(app: &App) -> Vec<Value> {
    let roster = app.fleet.roster();
    let upstreams = roster.upstreams().filter(|upstream| may_serve(&upstream.worker));
    let mut entries = union(upstreams.map(|upstream| upstream.entries()));
    entries.extend(app.parser.aliases().entries(&entries));
    entries
}

/// The first entry of each id, in the order in which they are listed.
fn union(lists: impl Iterator<Item = Arc<[Value]>>) -> Vec<Value> {
    let (mut entries, mut ids) = (Vec::new(), HashSet::new());
    for list in lists {
        for entry in list.iter() {
            // Most workers list what others have listed: a copy is made only of what is new.
            if !ids.contains(&entry["id"]) {
                ids.insert(entry["id"].clone());
                entries.push(entry.clone());
            }
        }
    }
    entries
}

fn models(app: &App, id: Option<&str>) -> Response<RelayBody> {
    let entries = entries(app);
    let Some(id) = id else {
        return json_response(StatusCode::OK, &json!({ "object": "list", "data": entries }));
    };
    if let Some(entry) = entries.iter().find(|entry| entry["id"] == id) {
        return json_response(StatusCode::OK, entry);
    }
    let known: Vec<_> = entries.iter().filter_map(|entry| entry["id"].as_str()).collect();
    let message = format!("model {id:?} is not served here; known models: {}", known.join(", "));
    let body = error_body(&message, "invalid_request_error", Some("model"), Some("model_not_found"));
    respond(StatusCode::NOT_FOUND, "application/json", body.to_vec())
}

fn server_info(app: &App) -> Value {
    let workers: Vec<_> =
        app.fleet.roster().snapshot.workers().iter().map(|worker| worker_info(worker)).collect();
    json!({
        "name": "roundhouse-router",
        "version": env!("CARGO_PKG_VERSION"),
        "policy": app.decider.policy().name(),
        "uptime_s": app.started.elapsed().as_secs(),
        "requests_in_flight": app.admission.in_flight(),
        "requests_queued": app.admission.queued(),
        "workers": workers,
    })
}

/// What clients may know of a worker: not its address.
fn worker_info(worker: &router_core::Worker) -> Value {
    json!({
        "id": worker.id().as_str(),
        "usable": worker.is_usable(),
        "models": worker.models().unwrap_or_default().to_vec(),
        "requests_in_flight": worker.load.own(),
    })
}

fn model_info(app: &App) -> Value {
    let models: Vec<_> =
        entries(app).iter().filter_map(|entry| entry["id"].as_str().map(str::to_owned)).collect();
    json!({ "model_path": models.first(), "models": models, "is_generation": true })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By comparing each entry with all before it.
    fn naive(lists: &[Arc<[Value]>]) -> Vec<Value> {
        let mut entries: Vec<Value> = Vec::new();
        for entry in lists.iter().flat_map(|list| list.iter()) {
            if !entries.iter().any(|known| known["id"] == entry["id"]) {
                entries.push(entry.clone());
            }
        }
        entries
    }

    #[test]
    fn the_first_entry_of_each_id_is_listed_where_it_came() {
        let lists: [Arc<[Value]>; 4] = [
            [json!({"id": "base", "of": 1}), json!({"id": "lora-b", "of": 1})].into(),
            [].into(),
            [json!({"id": "lora-a", "of": 2}), json!({"id": "base", "of": 2}), json!({"id": 7})].into(),
            [
                json!({"of": 3}),
                json!("odd"),
                json!({"id": null}),
                json!({"id": 7, "of": 4}),
                json!({"id": "7"}),
            ]
            .into(),
        ];
        let entries = union(lists.iter().cloned());
        let expected = [
            json!({"id": "base", "of": 1}),
            json!({"id": "lora-b", "of": 1}),
            json!({"id": "lora-a", "of": 2}),
            json!({"id": 7}),
            json!({"of": 3}),
            json!({"id": "7"}),
        ];
        assert_eq!(entries, expected);
        assert_eq!(entries, naive(&lists));
    }
}
