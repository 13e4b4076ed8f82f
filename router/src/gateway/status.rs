//! How a gRPC call ends.

use http::{HeaderMap, HeaderName, HeaderValue};

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// gRPC's status codes, as far as they are used here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Code {
    Ok = 0,
    Cancelled = 1,
    InvalidArgument = 3,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
}

/// The trailers that say so, with a message for whoever reads logs.
pub(super) fn trailers(code: Code, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert(STATUS, HeaderValue::from(code as u16));
    if let Ok(message) = HeaderValue::from_str(&percent_encoded(message))
        && !message.is_empty()
    {
        trailers.insert(MESSAGE, message);
    }
    trailers
}

/// As gRPC has messages: what is not printable ASCII is escaped, and the percent sign.
fn percent_encoded(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_escaped() {
        let trailers = trailers(Code::Internal, "100 % é\n");
        assert_eq!(
            (&trailers[STATUS], &trailers[MESSAGE]),
            (&"13".parse().unwrap(), &"100 %25 %C3%A9%0A".parse().unwrap())
        );
        assert!(!super::trailers(Code::Ok, "").contains_key(MESSAGE));
    }
}
