//! What a client is told that has sent no proper request, or has come when there is no room.
//!
//! These answers are bytes, not responses: no request exists that they could belong to, and HTTP/1's closing of the
//! connection is part of them. The statuses of requests are in [`error`](crate::error).

use http::StatusCode;

use super::guard::Violation;
use crate::error::error_body;

/// The status for a violation.
#[must_use]
pub fn status(violation: Violation) -> StatusCode {
    match violation {
        Violation::HeadTooLarge | Violation::TooManyFields => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        Violation::TargetTooLong => StatusCode::URI_TOO_LONG,
        Violation::Version | Violation::Http2Preface => StatusCode::HTTP_VERSION_NOT_SUPPORTED,
        Violation::UnknownCoding | Violation::Connect => StatusCode::NOT_IMPLEMENTED,
        Violation::HeadTimeout => StatusCode::REQUEST_TIMEOUT,
        _ => StatusCode::BAD_REQUEST,
    }
}

/// The whole answer to a violation; the connection is closed after it.
#[must_use]
pub fn answer(violation: Violation) -> Vec<u8> {
    let message = format!("malformed request: {violation}");
    bytes(status(violation), &error_body(&message, "invalid_request_error", None, Some("malformed_request")))
}

/// The whole answer to a connection for which there is no room.
#[must_use]
pub fn too_many_connections(limit: usize) -> Vec<u8> {
    let message = format!("the router has reached its limit of {limit} connections (--max-connections)");
    let body = error_body(&message, "service_unavailable_error", None, Some("too_many_connections"));
    bytes(StatusCode::SERVICE_UNAVAILABLE, &body)
}

fn bytes(status: StatusCode, body: &[u8]) -> Vec<u8> {
    let retry = if status == StatusCode::SERVICE_UNAVAILABLE { "retry-after: 1\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{retry}connection: close\r\n\r\n",
        status.as_str(),
        status.canonical_reason().unwrap_or_default(),
        body.len(),
    );
    [head.as_bytes(), body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_whole_responses_that_close() {
        let text = String::from_utf8(answer(Violation::LengthAndCoding)).unwrap();
        assert!(text.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{text}");
        assert!(text.contains("\r\nconnection: close\r\n"), "{text}");
        let (_, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(text.contains(&format!("\r\ncontent-length: {}\r\n", body.len())), "{text}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["code"], "malformed_request");
        assert!(String::from_utf8(too_many_connections(3)).unwrap().contains("retry-after: 1\r\n"));
    }
}
