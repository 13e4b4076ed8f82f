//! Stage 1: a request and what it is for. Where it came from, and in which version of HTTP, is the listener's business.
//!
//! Next: [`admit`](super::admit).

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use http::{HeaderValue, Request, Response};

use super::dispatch::{REQUEST_ID, dispatch};
use super::keep_alive;
use super::parse::{Parsed, RequestBody, Understanding};
use super::pick::check_model;
use super::record::Recorder;
use super::relay::{RelayBody, relay};
use crate::answers;
use crate::app::App;
use crate::error::RequestError;
use crate::keys::Grant;
use crate::routes::{Endpoint, Routes};

/// One request, from its head to the head of its answer.
pub async fn serve<B: RequestBody>(app: &Arc<App>, mut request: Request<B>) -> Response<RelayBody> {
    let id = request.headers_mut().entry(REQUEST_ID).or_insert_with(random_id).clone();
    let mut grant = None;
    let mut response = answer(app, request, &id, &mut grant).await;
    response.headers_mut().entry(REQUEST_ID).or_insert(id);
    if let Some(grant) = grant {
        app.allowances.tell(&grant, app.now(), response.headers_mut());
    }
    response
}

async fn answer<B: RequestBody>(
    app: &Arc<App>,
    mut request: Request<B>,
    id: &HeaderValue,
    grant: &mut Option<Grant>,
) -> Response<RelayBody> {
    let endpoint = app.routes.find(request.uri().path());
    let understanding = endpoint.understanding();
    let mut recorder = Recorder::new(app, endpoint, request.method().clone(), id.clone());
    if let Err(error) = allowed(app, (endpoint, &mut request), &mut recorder, grant) {
        recorder.fail(&error);
        return error.response_at(endpoint);
    }
    if understanding.is_some() {
        recorder.trace(&mut request);
    }
    let outcome = match understanding {
        _ if !Routes::takes(endpoint, request.method()) => Err(wrong_method(endpoint, &request)),
        Some(understanding) => {
            let parsed = unless_cut_off(app, pin!(understood(app, request, understanding))).await;
            match parsed {
                Ok(parsed) => {
                    if let Err(error) = recorder.has_read(&parsed) {
                        let error = RequestError::from(error);
                        recorder.fail(&error);
                        return error.response_at(endpoint);
                    }
                    if let Some(every) = app.settings.stream_keep_alive.limit()
                        && keep_alive::is_for(&parsed, endpoint).await
                    {
                        return keep_alive::answer(app, parsed, recorder, every).await;
                    }
                    let dispatched = unless_cut_off(app, pin!(dispatch(app, parsed, &mut recorder))).await;
                    match dispatched {
                        Ok(dispatched) => return relay(app, dispatched, recorder),
                        Err(error) => Err(error),
                    }
                }
                Err(error) => Err(error),
            }
        }
        None => answers::answer(app, endpoint, request.uri().path()),
    };
    match outcome {
        Ok(response) => {
            recorder.served(response.status());
            response
        }
        Err(error) => {
            recorder.fail(&error);
            error.response_at(endpoint)
        }
    }
}

/// Whether whoever sends the request may come in, and ask for more; `known` becomes what its key allows, if it counts for that.
fn allowed<B>(
    app: &App,
    (endpoint, request): (Endpoint, &mut Request<B>),
    recorder: &mut Recorder,
    known: &mut Option<Grant>,
) -> Result<(), RequestError> {
    let Some(grant) = app.keys.authorize(endpoint, request.headers_mut())? else { return Ok(()) };
    if endpoint.understanding().is_some() && Routes::takes(endpoint, request.method()) {
        *known = Some(grant);
        recorder.allow(app.allowances.ask(&grant, app.now())?);
    }
    request.extensions_mut().insert(grant);
    Ok(())
}

/// A request that has been admitted and read.
async fn understood<B: RequestBody>(
    app: &App,
    request: Request<B>,
    understanding: Understanding,
) -> Result<Parsed, RequestError> {
    let admitted = app.admission.admit(request).await?;
    let parsed =
        app.parser.parse(admitted, understanding, (&app.ratios, |model: &str| app.serves(model))).await?;
    check_model(app, &parsed.reading)?;
    Ok(parsed)
}

/// Does `work`, unless the router has to end before it has. By reference: a future that is given by value is kept twice, and copied.
pub(super) async fn unless_cut_off<T>(
    app: &App,
    mut work: Pin<&mut impl Future<Output = Result<T, RequestError>>>,
) -> Result<T, RequestError> {
    poll_fn(|cx| match app.cuts_off() {
        true => Poll::Ready(Err(RequestError::ShuttingDown)),
        false => work.as_mut().poll(cx),
    })
    .await
}

/// 32 hexadecimal digits.
fn random_id() -> HeaderValue {
    let bytes: [u8; 16] = rand::random();
    let digits =
        bytes.map(|byte| [byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
    HeaderValue::from_bytes(digits.as_flattened()).expect("digits are a value")
}

fn wrong_method<B>(endpoint: Endpoint, request: &Request<B>) -> RequestError {
    let path = request.uri().path().to_owned();
    if endpoint == Endpoint::Unknown {
        return RequestError::NotFound { path };
    }
    RequestError::MethodNotAllowed { path, method: request.method().to_string(), allowed: endpoint.method() }
}
