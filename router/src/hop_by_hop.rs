//! Headers that belong to one connection, and must not go on to the next (RFC 9110, section 7.6.1). Knows nothing of routing.

use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue};
use smallvec::SmallVec;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Removes the headers of the connection: the known ones, and those that `Connection` names.
pub fn strip(headers: &mut HeaderMap) {
    let mut doomed: SmallVec<[HeaderName; 4]> = SmallVec::new();
    // One walk over what is there, usually five headers or so, instead of a look for each that might be.
    for (name, value) in &*headers {
        if is_hop_by_hop(name) {
            doomed.push(name.clone());
        }
        if name == header::CONNECTION {
            doomed.extend(named_in(value));
        }
    }
    for name in doomed {
        headers.remove(name);
    }
}

/// The headers that go on: all but those of the connection, and those that the next connection has of its own (`host`, `content-length`,
/// `expect`). Nothing is copied.
pub fn end_to_end(headers: &HeaderMap) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
    let named: SmallVec<[HeaderName; 4]> =
        headers.get_all(header::CONNECTION).iter().flat_map(named_in).collect();
    headers.iter().filter(move |(name, _)| {
        !is_hop_by_hop(name) && !is_the_connections_own(name) && !named.contains(*name)
    })
}

#[inline]
fn is_the_connections_own(name: &HeaderName) -> bool {
    match name.as_str().len() {
        4 => name == header::HOST,
        6 => name == header::EXPECT,
        14 => name == header::CONTENT_LENGTH,
        _ => false,
    }
}

/// The same as a map.
#[must_use]
pub fn end_to_end_map(headers: &HeaderMap) -> HeaderMap {
    let mut map = HeaderMap::with_capacity(headers.len());
    for (name, value) in end_to_end(headers) {
        map.append(name, value.clone());
    }
    map
}

#[inline]
fn is_hop_by_hop(name: &HeaderName) -> bool {
    // Most names are of another length than all of these.
    match name.as_str().len() {
        2 => name == header::TE,
        7 => name == header::TRAILER || name == header::UPGRADE,
        10 => name == header::CONNECTION || *name == KEEP_ALIVE,
        16 => *name == PROXY_CONNECTION,
        17 => name == header::TRANSFER_ENCODING,
        18 => name == header::PROXY_AUTHENTICATE,
        19 => name == header::PROXY_AUTHORIZATION,
        _ => false,
    }
}

fn named_in(connection: &HeaderValue) -> impl Iterator<Item = HeaderName> + '_ {
    let names = connection.to_str().unwrap_or_default().split(',').map(str::trim);
    // The two that are on nearly every such header name no other.
    let names =
        names.filter(|name| !name.eq_ignore_ascii_case("keep-alive") && !name.eq_ignore_ascii_case("close"));
    names.filter_map(|name| HeaderName::try_from(name).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_the_connection_stay_behind() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Private"),
            ("connection", "x-other"),
            ("x-private", "1"),
            ("x-private", "2"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("proxy-connection", "close"),
            ("proxy-authorization", "Basic eDp5"),
            ("proxy-authenticate", "Basic"),
            ("trailer", "x-trailer"),
            ("upgrade", "websocket"),
            ("authorization", "Bearer k"),
            ("x-custom", "kept"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let requests = end_to_end_map(&headers);
        strip(&mut headers);
        assert_eq!(requests, headers);
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "x-custom"]);
        headers.insert(header::HOST, HeaderValue::from_static("a"));
        headers.insert(header::EXPECT, HeaderValue::from_static("100-continue"));
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("1"));
        assert_eq!(end_to_end_map(&headers), requests);
    }

    #[test]
    fn a_connection_header_that_is_no_list_of_names_does_no_harm() {
        let mut headers = HeaderMap::new();
        headers.insert("connection", HeaderValue::from_bytes(b"\xff, a b,,close").unwrap());
        headers.insert("x-kept", HeaderValue::from_static("1"));
        strip(&mut headers);
        assert_eq!(headers.len(), 1);
    }
}
