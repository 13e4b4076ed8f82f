//! Stage 1: a request and what it is for. Where it came from, and in which version of HTTP, is the listener's business.
//!
//! Next: [`admit`](super::admit).

use std::sync::Arc;

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;

use super::dispatch::{REQUEST_ID, dispatch};
use super::parse::Understanding;
use super::record::Recorder;
use super::relay::{RelayBody, relay};
use crate::answers;
use crate::app::App;
use crate::error::RequestError;
use crate::routes::Routes;

/// One request, from its head to the head of its answer.
pub async fn serve(app: &Arc<App>, mut request: Request<Incoming>) -> Response<RelayBody> {
    let endpoint = app.routes.find(request.uri().path());
    let understanding = endpoint.understanding();
    if !request.headers().contains_key(REQUEST_ID) {
        let id = format!("{:032x}", rand::random::<u128>());
        request.headers_mut().extend(HeaderValue::try_from(id).ok().map(|id| (REQUEST_ID, id)));
    }
    let id = request.headers().get(REQUEST_ID).cloned();
    let mut recorder = Recorder::new(app, endpoint, request.method().clone(), id);
    if let Err(error) = app.keys.authorize(endpoint, request.headers_mut()) {
        let error = RequestError::from(error);
        recorder.fail(&error);
        return error.response();
    }
    let outcome = match understanding {
        _ if !Routes::takes(endpoint, request.method()) => Err(wrong_method(endpoint, &request)),
        Some(understanding) => match forward(app, request, understanding, &mut recorder).await {
            Ok(dispatched) => return relay(app, dispatched, recorder),
            Err(error) => Err(error),
        },
        None => answers::answer(app, endpoint, request.uri().path()),
    };
    match outcome {
        Ok(response) => {
            recorder.served(response.status());
            response
        }
        Err(error) => {
            recorder.fail(&error);
            error.response()
        }
    }
}

/// The middle of the path. What is left after it is to relay the answer, and to record.
async fn forward(
    app: &Arc<App>,
    request: Request<Incoming>,
    understanding: Understanding,
    recorder: &mut Recorder,
) -> Result<super::dispatch::Dispatched, RequestError> {
    let admitted = app.admission.admit(request).await?;
    let parsed = app.parser.parse(admitted, understanding, &app.ratios).await?;
    dispatch(app, parsed, recorder).await
}

fn wrong_method(endpoint: crate::routes::Endpoint, request: &Request<Incoming>) -> RequestError {
    let path = request.uri().path().to_owned();
    if endpoint == crate::routes::Endpoint::Unknown {
        return RequestError::NotFound { path };
    }
    RequestError::MethodNotAllowed { path, method: request.method().to_string(), allowed: endpoint.method() }
}
