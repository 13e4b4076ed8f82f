//! What a gateway says, as HTTP, and what it is told. Knows the protocol's words, and no order of them: see [`conversation`](super::conversation).
//!
//! The words are Envoy's external processing (ext_proc), and what the Gateway API Inference Extension adds to it, its endpoint picker protocol 1.0.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header, response,
};
use roundhouse_wire::gateway as wire;
use roundhouse_wire::gateway::processing_response::Response as Reply;
use roundhouse_wire::gateway::value::Kind;

use crate::hop_by_hop;
use crate::transport::Handover;

/// Where the request is to go: a header, and the same in the metadata that Envoy's load balancers read.
const DESTINATION: &str = "x-gateway-destination-endpoint";
const DESTINATION_NAMESPACE: &str = "envoy.lb";
/// Who has answered, where it was told of several: by the protocol, or as an attribute of Envoy's.
const SERVED: &str = "x-gateway-destination-endpoint-served";
const UPSTREAM_ADDRESS: &str = "upstream.address";
/// Where it may go.
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";

/// Which way a message's subject goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    ToWorker,
    ToClient,
}

/// What comes after a piece of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Follows {
    More,
    Nothing,
}

impl Follows {
    /// As the protocol has it.
    pub(super) fn of(end_of_stream: bool) -> Self {
        if end_of_stream { Self::Nothing } else { Self::More }
    }
}

/// The head of a client's request; `Err` says what is wrong with it.
pub(super) fn request_head(headers: &wire::HttpHeaders) -> Result<Request<()>, &'static str> {
    let mut request = Request::new(());
    let mut path = None;
    for (name, value) in pairs(headers) {
        match name {
            ":method" => {
                *request.method_mut() = Method::from_bytes(value).map_err(|_| "has a method that is none")?;
            }
            ":path" => path = Some(PathAndQuery::try_from(value).map_err(|_| "has a path that is none")?),
            _ if name.starts_with(':') => {}
            _ => {
                add(request.headers_mut(), name, value)?;
            }
        }
    }
    *request.uri_mut() = Uri::from(path.ok_or("has no path")?);
    Ok(request)
}

/// The head of a worker's answer; `Err` says what is wrong with it.
pub(super) fn response_head(headers: &wire::HttpHeaders) -> Result<Response<()>, &'static str> {
    let mut response = Response::new(());
    for (name, value) in pairs(headers) {
        if name == ":status" {
            *response.status_mut() =
                StatusCode::from_bytes(value).map_err(|_| "has a status that is none")?;
        } else if !name.starts_with(':') {
            add(response.headers_mut(), name, value)?;
        }
    }
    Ok(response)
}

fn pairs(headers: &wire::HttpHeaders) -> impl Iterator<Item = (&str, &[u8])> {
    let list = headers.headers.iter().flat_map(|map| &map.headers);
    list.map(|header| {
        let value = if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value };
        (header.key.as_str(), value)
    })
}

fn add(headers: &mut HeaderMap, name: &str, value: &[u8]) -> Result<(), &'static str> {
    let name = HeaderName::from_bytes(name.as_bytes()).ok();
    let (name, value) = name.zip(HeaderValue::from_bytes(value).ok()).ok_or("has a header that is none")?;
    headers.try_append(name, value).map(drop).map_err(|_| "has more headers than can be kept")
}

/// Which workers a gateway allows; `None` where it allows any. What is no address is nobody's.
pub(super) fn subset(metadata: Option<&wire::Metadata>) -> Option<HashSet<SocketAddr>> {
    let hint = metadata?.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET)?;
    Some(match &hint.kind {
        Some(Kind::ListValue(list)) => {
            list.values.iter().filter_map(text_of).filter_map(|place| place.parse().ok()).collect()
        }
        // As one text, some gateways have it.
        Some(Kind::StringValue(list)) => {
            list.split(',').filter_map(|place| place.trim().parse().ok()).collect()
        }
        _ => HashSet::new(),
    })
}

fn text_of(value: &wire::Value) -> Option<&str> {
    match &value.kind {
        Some(Kind::StringValue(text)) => Some(text),
        _ => None,
    }
}

/// Which worker has answered, if the gateway tells.
pub(super) fn served_by(
    metadata: Option<&wire::Metadata>,
    attributes: &HashMap<String, wire::Struct>,
) -> Option<SocketAddr> {
    let by_protocol = metadata
        .and_then(|metadata| metadata.filter_metadata.get(DESTINATION_NAMESPACE))
        .and_then(|namespace| namespace.fields.get(SERVED));
    let by_attribute = || attributes.values().find_map(|told| told.fields.get(UPSTREAM_ADDRESS));
    by_protocol.or_else(by_attribute).and_then(text_of)?.parse().ok()
}

/// Tells a gateway where the request with these headers goes, and what is changed of them.
pub(super) fn send_to(headers: &HeaderMap, handover: &Handover) -> wire::ProcessingResponse {
    let places: Vec<_> = handover.to.iter().map(SocketAddr::to_string).collect();
    let destination = places.join(",");
    let mut mutation = changes(headers, &handover.headers);
    let length = HeaderValue::from(handover.body.len());
    if headers.get(header::CONTENT_LENGTH).is_some_and(|known| *known != length) {
        mutation.set_headers.push(set(&header::CONTENT_LENGTH, &length));
    }
    let to = HeaderValue::try_from(&destination).expect("an address is a value");
    mutation.set_headers.push(set(&HeaderName::from_static(DESTINATION), &to));
    let common = wire::CommonResponse {
        header_mutation: Some(mutation),
        body_mutation: None,
        // Routes may look at the destination.
        clear_route_cache: true,
    };
    let told = Reply::RequestHeaders(wire::HeadersResponse { response: Some(common) });
    let inner = [(DESTINATION.to_owned(), value(Kind::StringValue(destination)))];
    let inner = wire::Struct { fields: inner.into() };
    let outer = [(DESTINATION_NAMESPACE.to_owned(), value(Kind::StructValue(inner)))];
    wire::ProcessingResponse {
        response: Some(told),
        dynamic_metadata: Some(wire::Struct { fields: outer.into() }),
    }
}

fn value(kind: Kind) -> wire::Value {
    wire::Value { kind: Some(kind) }
}

/// What makes `after` of `before`, leaving alone what belongs to a connection.
fn changes(before: &HeaderMap, after: &HeaderMap) -> wire::HeaderMutation {
    let mut mutation = wire::HeaderMutation::default();
    for name in after.keys() {
        let (old, new) = (before.get_all(name), after.get_all(name));
        if old == new {
            continue;
        }
        // The first one takes the place of all, the others are added to it.
        for (at, value) in new.iter().enumerate() {
            let mut option = set(name, value);
            if at > 0 {
                option.append_action = wire::HeaderAppendAction::AppendIfExistsOrAdd.into();
            }
            mutation.set_headers.push(option);
        }
    }
    for (name, _) in hop_by_hop::end_to_end(before) {
        if !after.contains_key(name) && mutation.remove_headers.iter().all(|doomed| doomed != name.as_str()) {
            mutation.remove_headers.push(name.as_str().to_owned());
        }
    }
    mutation
}

fn set(name: &HeaderName, value: &HeaderValue) -> wire::HeaderValueOption {
    let raw_value = Bytes::copy_from_slice(value.as_bytes());
    wire::HeaderValueOption {
        header: Some(wire::HeaderValue { key: name.as_str().to_owned(), value: String::new(), raw_value }),
        append_action: wire::HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
    }
}

/// Lets the head of an answer pass, with the headers of `after` that `before` does not have.
pub(super) fn pass_head(before: &HeaderMap, after: &HeaderMap) -> wire::ProcessingResponse {
    let mutation = wire::HeaderMutation { remove_headers: Vec::new(), ..changes(before, after) };
    let common = wire::CommonResponse { header_mutation: Some(mutation), ..Default::default() };
    reply(Reply::ResponseHeaders(wire::HeadersResponse { response: Some(common) }))
}

/// The next piece of a body.
pub(super) fn piece(direction: Direction, body: Bytes, follows: Follows) -> wire::ProcessingResponse {
    let streamed = wire::StreamedBodyResponse { body, end_of_stream: follows == Follows::Nothing };
    let mutation = wire::BodyMutation { streamed_response: Some(streamed) };
    let common = wire::CommonResponse { body_mutation: Some(mutation), ..Default::default() };
    let body = wire::BodyResponse { response: Some(common) };
    reply(match direction {
        Direction::ToWorker => Reply::RequestBody(body),
        Direction::ToClient => Reply::ResponseBody(body),
    })
}

/// Lets trailers pass.
pub(super) fn trailers(direction: Direction) -> wire::ProcessingResponse {
    reply(match direction {
        Direction::ToWorker => Reply::RequestTrailers(wire::TrailersResponse {}),
        Direction::ToClient => Reply::ResponseTrailers(wire::TrailersResponse {}),
    })
}

/// Has the gateway answer the client itself.
pub(super) fn answer(head: &response::Parts, body: Bytes) -> wire::ProcessingResponse {
    let headers = changes(&HeaderMap::new(), &hop_by_hop::end_to_end_map(&head.headers));
    reply(Reply::ImmediateResponse(wire::ImmediateResponse {
        status: Some(wire::HttpStatus { code: head.status.as_u16().into() }),
        headers: Some(headers),
        body,
        details: "answered_by_router".to_owned(),
    }))
}

fn reply(response: Reply) -> wire::ProcessingResponse {
    wire::ProcessingResponse { response: Some(response), dynamic_metadata: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::Payload;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let mut map = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            map.append(name, value);
        });
        map
    }

    fn shown(pairs: &[(&str, &str)]) -> wire::HttpHeaders {
        let header = |(key, value): &(&str, &str)| wire::HeaderValue {
            key: (*key).to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value.as_bytes()),
        };
        let map = wire::HeaderMap { headers: pairs.iter().map(header).collect() };
        wire::HttpHeaders { headers: Some(map), end_of_stream: false }
    }

    #[test]
    fn heads_are_read_and_what_is_none_is_said() {
        let request = request_head(&shown(&[
            (":method", "POST"),
            (":path", "/v1/completions?a=b"),
            (":authority", "gateway"),
            ("x-many", "1"),
            ("x-many", "2"),
        ]));
        let request = request.unwrap();
        assert_eq!((request.method(), request.uri().path()), (&Method::POST, "/v1/completions"));
        assert_eq!(request.headers(), &headers(&[("x-many", "1"), ("x-many", "2")]));
        let mut old = shown(&[(":status", "")]);
        old.headers.as_mut().unwrap().headers[0].value = "429".to_owned();
        assert_eq!(response_head(&old).unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
        for (pairs, wrong) in [
            (&[(":method", "POST")][..], "has no path"),
            (&[(":method", " "), (":path", "/")], "has a method that is none"),
            (&[(":path", "\u{7f}")], "has a path that is none"),
            (&[(":path", "/"), ("a b", "")], "has a header that is none"),
        ] {
            assert_eq!(request_head(&shown(pairs)).unwrap_err(), wrong);
        }
        assert!(response_head(&shown(&[(":status", "20")])).is_err());
    }

    #[test]
    fn a_worker_gets_what_was_decided_and_nothing_of_what_was_taken_away() {
        let before = headers(&[
            ("authorization", "Bearer client"),
            ("connection", "keep-alive"),
            ("x-router-only", "1"),
            ("x-kept", "1"),
            ("x-many", "1"),
            ("content-length", "3"),
        ]);
        let after =
            headers(&[("authorization", "Bearer worker"), ("x-kept", "1"), ("x-many", "1"), ("x-many", "2")]);
        let body = Payload::from(Bytes::from_static(b"longer"));
        let handover = Handover { to: vec!["10.0.0.7:8000".parse().unwrap()], headers: after, body };
        let told = send_to(&before, &handover);
        let Some(Reply::RequestHeaders(reply)) = told.response else { panic!("{told:?}") };
        let common = reply.response.unwrap();
        assert!(common.clear_route_cache);
        let mutation = common.header_mutation.unwrap();
        let set: Vec<_> = mutation
            .set_headers
            .iter()
            .map(|option| {
                let header = option.header.as_ref().unwrap();
                (header.key.as_str(), std::str::from_utf8(&header.raw_value).unwrap(), option.append_action)
            })
            .collect();
        let expected = [
            ("authorization", "Bearer worker", 2),
            ("x-many", "1", 2),
            ("x-many", "2", 0),
            ("content-length", "6", 2),
            (DESTINATION, "10.0.0.7:8000", 2),
        ];
        assert_eq!(set, expected);
        assert_eq!(mutation.remove_headers, ["x-router-only"]);
        let metadata = told.dynamic_metadata.unwrap();
        let Some(Kind::StructValue(inner)) = &metadata.fields["envoy.lb"].kind else {
            panic!("{metadata:?}")
        };
        assert_eq!(inner.fields[DESTINATION].kind, Some(Kind::StringValue("10.0.0.7:8000".to_owned())));
    }

    #[test]
    fn a_subset_is_a_list_or_a_text_and_may_be_empty() {
        let hint = |kind| {
            let inner = wire::Struct { fields: [(SUBSET.to_owned(), value(kind))].into() };
            wire::Metadata { filter_metadata: [(SUBSET_NAMESPACE.to_owned(), inner)].into() }
        };
        let text = |text: &str| Kind::StringValue(text.to_owned());
        let both = HashSet::from(["10.0.0.1:1", "[2001:db8::1]:2"].map(|place| place.parse().unwrap()));
        let list = ["10.0.0.1:1", "[2001:DB8:0::1]:2", "a name"].map(|place| value(text(place)));
        let list = wire::ListValue { values: list.into() };
        assert_eq!(subset(Some(&hint(Kind::ListValue(list)))), Some(both.clone()));
        assert_eq!(subset(Some(&hint(text("10.0.0.1:1, [2001:db8::1]:2")))), Some(both));
        assert_eq!(subset(Some(&hint(text("")))), Some(HashSet::new()), "nobody, which is not anybody");
        assert_eq!(subset(Some(&wire::Metadata::default())), None);
        assert_eq!(subset(None), None);
    }

    #[test]
    fn headers_that_are_there_twice_stay_so() {
        let before = headers(&[("set-cookie", "a"), ("set-cookie", "b")]);
        let mut after = before.clone();
        after.insert("x-router-worker", HeaderValue::from_static("w0"));
        let Some(Reply::ResponseHeaders(reply)) = pass_head(&before, &after).response else {
            panic!("no head")
        };
        let mutation = reply.response.unwrap().header_mutation.unwrap();
        let names = |mutation: &wire::HeaderMutation| -> Vec<_> {
            let option =
                |option: &wire::HeaderValueOption| (option.header.clone().unwrap().key, option.append_action);
            mutation.set_headers.iter().map(option).collect()
        };
        assert_eq!(names(&mutation), [("x-router-worker".to_owned(), 2)]);
        let (head, ()) = {
            let mut response = Response::new(());
            *response.headers_mut() = before;
            response.into_parts()
        };
        let Some(Reply::ImmediateResponse(told)) = answer(&head, Bytes::new()).response else {
            panic!("no answer")
        };
        let twice = [("set-cookie".to_owned(), 2), ("set-cookie".to_owned(), 0)];
        assert_eq!(names(&told.headers.unwrap()), twice);
    }

    #[test]
    fn who_has_served_is_told_in_two_ways() {
        let one = |name: &str, place: &str| wire::Struct {
            fields: [(name.to_owned(), value(Kind::StringValue(place.to_owned())))].into(),
        };
        let metadata = wire::Metadata {
            filter_metadata: [(DESTINATION_NAMESPACE.to_owned(), one(SERVED, "10.0.0.7:8000"))].into(),
        };
        let attributes = HashMap::from([("ext_proc".to_owned(), one(UPSTREAM_ADDRESS, "10.0.0.8:8000"))]);
        let at = |place: &str| Some(place.parse().unwrap());
        assert_eq!(served_by(Some(&metadata), &attributes), at("10.0.0.7:8000"));
        assert_eq!(served_by(None, &attributes), at("10.0.0.8:8000"));
        assert_eq!(served_by(Some(&wire::Metadata::default()), &HashMap::new()), None);
    }
}
