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

fn is_hop_by_hop(name: &HeaderName) -> bool {
    [
        header::CONNECTION,
        header::TRANSFER_ENCODING,
        header::TE,
        header::TRAILER,
        header::UPGRADE,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
    ]
    .contains(name)
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
            ("authorization", "Bearer k"),
            ("x-custom", "kept"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        strip(&mut headers);
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "x-custom"]);
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
