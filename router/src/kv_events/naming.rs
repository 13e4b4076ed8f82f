//! What a request is called by an engine's cache events: the session that it says it is of.
//!
//! vLLM reads that in a header, SGLang in a member of the body (`session_id`, since its pull request 37482 of September 2026). What a client says of its own
//! accord stays; where it says nothing the request's id is put there. Used by [`Follower`](super::Follower).

use std::sync::Arc;

use http::{HeaderName, HeaderValue, header};
use serde_json::Value;

use crate::openai::members::Members;
use crate::payload::Payload;
use crate::transport::WorkerRequest;

/// What vLLM's cache events repeat of a request.
const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
/// What SGLang's do.
const SESSION_MEMBER: &str = "session_id";
/// What SGLang refuses beside it: the request goes on with what an earlier one has left.
const OWN_SESSION: &str = "session_params";
/// Where SGLang takes it.
const WITH_SESSIONS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"];
/// Longer names are not kept.
const MOST_NAME_BYTES: usize = 256;

/// What a request is to say besides.
#[derive(Clone, Debug)]
pub enum ToSay {
    /// In the header [`SESSION_ID`].
    Header(HeaderValue),
    /// In this body.
    Body(Payload),
}

impl ToSay {
    /// Says it in `request`.
    pub fn say(self, request: &mut WorkerRequest) {
        match self {
            Self::Header(name) => drop(request.headers.insert(SESSION_ID, name)),
            Self::Body(body) => request.body = body,
        }
    }
}

/// The name of a request of that id at vLLM, and what it is to say; `None` if it has none.
pub(super) fn in_header(id: &HeaderValue, request: &WorkerRequest) -> Option<(Arc<str>, Option<ToSay>)> {
    let own = request.headers.get(SESSION_ID);
    let to_say = own.is_none().then(|| ToSay::Header(id.clone()));
    Some((own.unwrap_or(id).to_str().ok()?.into(), to_say))
}

/// The same at SGLang.
pub(super) async fn in_body(id: &HeaderValue, request: &WorkerRequest) -> Option<(Arc<str>, Option<ToSay>)> {
    let is_plain = request.gateway.is_none() && !request.headers.contains_key(header::CONTENT_ENCODING);
    if !is_plain || !WITH_SESSIONS.contains(&request.path.path()) {
        return None;
    }
    let body = Members::of(&request.body).await?;
    if body.has(OWN_SESSION) {
        return None;
    }
    if body.has(SESSION_MEMBER) {
        match body.parsed(SESSION_MEMBER)? {
            Value::Null => {}
            Value::String(own) if own.len() <= MOST_NAME_BYTES => return Some((own.into(), None)),
            _ => return None,
        }
    }
    let id = id.to_str().ok()?;
    let added = format!("\"{SESSION_MEMBER}\":{}", Value::from(id));
    Some((id.into(), Some(ToSay::Body(body.with(&added, &[SESSION_MEMBER])))))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Method;
    use http::uri::PathAndQuery;
    use serde_json::json;

    use super::*;

    fn request(path: &'static str, body: &Value) -> WorkerRequest {
        WorkerRequest {
            method: Method::POST,
            path: PathAndQuery::from_static(path),
            headers: http::HeaderMap::new(),
            body: Payload::from(Bytes::from(body.to_string())),
            underway: None,
            leaves: None,
            gateway: None,
        }
    }

    /// The name, and the body as it is sent, if it is changed.
    async fn named(request: &WorkerRequest) -> Option<(String, Option<Value>)> {
        let (name, to_say) = in_body(&HeaderValue::from_static("a\"b"), request).await?;
        let body = to_say.map(|to_say| match to_say {
            ToSay::Body(body) => serde_json::from_slice(&body.joined()).unwrap(),
            ToSay::Header(_) => panic!("in a header"),
        });
        Some((name.to_string(), body))
    }

    #[tokio::test]
    async fn a_request_is_named_in_its_body() {
        let chat = "/v1/chat/completions";
        let expected = json!({"session_id": "a\"b", "messages": []});
        for silent in [json!({"messages": []}), json!({"messages": [], "session_id": null})] {
            let told = named(&request(chat, &silent)).await;
            assert_eq!(told, Some(("a\"b".to_owned(), Some(expected.clone()))));
        }
        let own = named(&request(chat, &json!({"messages": [], "session_id": "s"}))).await;
        assert_eq!(own, Some(("s".to_owned(), None)), "as the client calls it");
    }

    #[tokio::test]
    async fn what_cannot_say_a_name_is_not_followed() {
        let chat = "/v1/chat/completions";
        for (path, body) in [
            (chat, json!({"session_params": {"id": "s"}})),
            (chat, json!({"session_id": ["s"]})),
            (chat, json!({"session_id": "s".repeat(MOST_NAME_BYTES + 1)})),
            (chat, json!([])),
            ("/v1/messages", json!({"messages": []})),
            ("/v1/embeddings", json!({"input": "a"})),
        ] {
            assert_eq!(named(&request(path, &body)).await, None, "{path} {body}");
        }
        let mut compressed = request(chat, &json!({"messages": []}));
        compressed.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        assert_eq!(named(&compressed).await, None);
    }

    #[test]
    fn a_client_names_its_session_to_vllm_itself() {
        let mut asked = request("/v1/completions", &json!({}));
        let id = HeaderValue::from_static("r");
        let (name, to_say) = in_header(&id, &asked).unwrap();
        assert!(&*name == "r" && matches!(to_say, Some(ToSay::Header(said)) if said == id));
        asked.headers.insert(SESSION_ID, HeaderValue::from_static("s"));
        let (name, to_say) = in_header(&id, &asked).unwrap();
        assert!(&*name == "s" && to_say.is_none());
    }
}
