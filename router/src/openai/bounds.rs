//! Where in a stream the answer begins, and where it ends.
//!
//! Engines write the first events of OpenAI's responses API when they have read the request, long before they compute it: no token has been
//! seen then, and nothing is lost if another worker begins anew. Or their first word is that there will be no answer. And they say when there is no more to
//! come, each API by another event. Nothing else is known here of what events say. Used by the stages.

use http::StatusCode;
use memchr::memrchr2;
use serde::Deserialize;

/// Events that tell of the request and not of the answer: OpenAI's responses, and Anthropic's messages.
const OPENINGS: [&[u8]; 5] =
    [b"response.created", b"response.queued", b"response.in_progress", b"message_start", b"ping"];
/// Events behind which nothing comes, of the same two.
const LAST: [&[u8]; 5] =
    [b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b"error"];
/// What the last event of all others says.
const DONE: &[u8] = b"[DONE]";
/// The names of fields, of which only one tells something (HTML Living Standard, 9.2.6).
const NO_DATA: [&[u8]; 4] = [b":", EVENT, b"id:", b"retry:"];
const EVENT: &[u8] = b"event:";
const DATA: &[u8] = b"data:";
/// Of such a name, so that a line of that length is known.
const LONGEST_FIELD_BYTES: usize = 6;

/// Whether a stream that begins so has come to its answer: an event that is no opening, as far as its name goes, or what is no event.
#[must_use]
pub fn has_answer(beginning: &[u8]) -> bool {
    // Nearly all streams are like that.
    if beginning.starts_with(DATA) {
        return true;
    }
    let mut is_opening = false;
    for line in beginning.split_inclusive(|byte| *byte == b'\n') {
        let text = line.trim_ascii_end();
        if text.is_empty() {
            is_opening = false;
        } else if let Some(name) = text.strip_prefix(EVENT) {
            is_opening = OPENINGS.contains(&name.trim_ascii());
        } else if NO_DATA.iter().all(|field| !text.starts_with(field)) {
            let is_data = text.starts_with(DATA);
            let is_known = is_data || line.ends_with(b"\n") || text.len() >= LONGEST_FIELD_BYTES;
            if is_known && !(is_opening && is_data) {
                return true;
            }
        }
    }
    false
}

/// What a stream that begins so says in place of an answer: that the engine has too much to do, or has failed; the status, and the error as JSON.
#[must_use]
pub fn refusal(beginning: &[u8]) -> Option<(StatusCode, &[u8])> {
    #[derive(Deserialize)]
    struct Refusal {
        error: Error,
    }
    #[derive(Deserialize)]
    struct Error {
        code: Option<u16>,
        #[serde(rename = "type")]
        kind: Option<String>,
    }
    let line = match beginning.strip_prefix(DATA) {
        // Nearly all answers begin otherwise.
        Some(data) if !data.trim_ascii_start().starts_with(b"{\"error\"") => return None,
        Some(data) => data.split(|byte| *byte == b'\n').next().unwrap_or_default(),
        None => named_error(beginning)?,
    };
    let line = line.trim_ascii();
    let Refusal { error: Error { code, kind } } = serde_json::from_slice(line).ok()?;
    let status = match (code, kind.as_deref()) {
        (Some(code), _) => StatusCode::from_u16(code).ok()?,
        // In Anthropic's words, as SGLang and vLLM say them.
        (None, Some("overloaded_error")) => StatusCode::SERVICE_UNAVAILABLE,
        (None, Some("rate_limit_error")) => StatusCode::TOO_MANY_REQUESTS,
        (None, Some("api_error" | "internal_error")) => StatusCode::INTERNAL_SERVER_ERROR,
        (None, _) => return None,
    };
    (status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()).then_some((status, line))
}

/// The data of an error, if that is the first event that is no opening, where events have names.
fn named_error(beginning: &[u8]) -> Option<&[u8]> {
    let mut name: &[u8] = b"";
    for line in beginning.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end) {
        if let Some(named) = line.strip_prefix(EVENT) {
            name = named.trim_ascii();
        } else if let Some(data) = line.strip_prefix(DATA)
            && !OPENINGS.contains(&name)
        {
            return (name == b"error").then_some(data);
        }
    }
    None
}

/// Whether the last of some whole events says that nothing follows.
#[must_use]
pub fn is_last(events: &[u8]) -> bool {
    let mut events = events.trim_ascii_end();
    while let Some(comment) = memrchr2(b'\n', b'\r', events).filter(|end| events[end + 1..].starts_with(b":"))
    {
        events = events[..comment].trim_ascii_end();
    }
    if let Some(before) = events.strip_suffix(DONE) {
        return before.trim_ascii_end().ends_with(DATA);
    }
    // Where events have names all have one; nearly all streams have none.
    !events.starts_with(DATA) && {
        let lines = events.rsplit(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
        let mut last = lines.take_while(|line| !line.is_empty());
        last.any(|line| line.strip_prefix(EVENT).is_some_and(|name| LAST.contains(&name.trim_ascii())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESPONSES: &str = "event: response.created\ndata: {\"type\":\"response.created\"}\n\n\
        event: response.in_progress\r\ndata: {}\r\n\r\n: still here\n\n";
    const MESSAGES: &str = "event:message_start\ndata: {\"message\":{}}\n\nevent: ping\ndata: {}\n\n";

    #[test]
    fn an_engine_that_is_full_says_so_in_place_of_an_answer() {
        // As SGLang 0.5.23 writes it.
        let full = br#"data: {"error": {"object": "error", "message": "The request queue is full.", "type": "SERVICE_UNAVAILABLE", "param": null, "code": 503}}"#;
        let (status, error) = refusal(&[&full[..], b"\n\ndata: [DONE]\n\n"].concat())
            .map(|(status, error)| (status, error.to_vec()))
            .unwrap();
        assert_eq!((status, &error[..]), (StatusCode::SERVICE_UNAVAILABLE, &full[6..]));
        assert_eq!(refusal(br#"data:{"error":{"code":429}}"#).unwrap().0, StatusCode::TOO_MANY_REQUESTS);
        let overloaded =
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";
        for opening in ["", MESSAGES, ": there\n\n"] {
            let (status, error) = refusal([opening, overloaded].concat().as_bytes())
                .map(|(status, error)| (status, error.to_vec()))
                .unwrap();
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            assert!(error.starts_with(b"{\"type\":\"error\""));
        }
        let wrong = overloaded.replace("overloaded_error", "invalid_request_error");
        let begun = format!("event: content_block_start\ndata: {{}}\n\n{overloaded}");
        for other in [wrong, begun] {
            assert_eq!(refusal(other.as_bytes()), None, "{other}");
        }
        for other in [
            &br#"data: {"error":{"code":400}}"#[..],
            br#"data: {"error":{"code":"busy"}}"#,
            br#"data: {"error":null,"choices":[]}"#,
            br#"data: {"id":"a","error":{"code":503}}"#,
            br#"data: {"error":{"code":5"#,
            br#"{"error":{"code":503}}"#,
        ] {
            assert_eq!(refusal(other), None, "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn the_answer_begins_with_its_first_event() {
        for opening in [RESPONSES, MESSAGES, ": ping\n\n", "id: 1\nretry: 5\n\n", ""] {
            for first in ["data: {\"choices\":[]}\n\n", "event: response.output_item.added\ndata: {}\n\n"] {
                let whole = format!("{opening}{first}");
                let begins = (0..=whole.len()).find(|end| has_answer(&whole.as_bytes()[..*end])).unwrap();
                let data = opening.len() + first.find("data:").unwrap();
                assert_eq!(begins, data + DATA.len(), "{whole}");
            }
        }
    }

    #[test]
    fn what_is_no_event_is_no_opening() {
        for beginning in
            ["{\"a\":1}", "text\n", "hi\n", "event: error\ndata: {}\n\n", "event: response.failed\ndata: {"]
        {
            assert!(has_answer(beginning.as_bytes()), "{beginning}");
        }
        for beginning in
            ["", "\n", "da", "event: response.completed\n", "event: message_start\ndata: {\"a\": 1}"]
        {
            assert!(!has_answer(beginning.as_bytes()), "{beginning}");
        }
    }

    #[test]
    fn the_last_event_says_so() {
        for last in [
            "data: [DONE]\n\n",
            "data:[DONE]\r\n\r\n",
            "data: {\"a\":1}\n\ndata: [DONE]\n\n",
            "event: ping\ndata: {}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
            "event: response.completed\r\ndata: {}\r\n\r\n",
            "event: error\ndata: {}\n\n",
            ": ping\n\nevent: message_stop\ndata: {}\n\n: ping\n\n",
            "data: [DONE]\n\n: x\n\n",
        ] {
            assert!(is_last(last.as_bytes()), "{last}");
        }
        for other in [
            "",
            "data: \"[DONE]\n\n",
            "data: {\"a\":\"[DONE]\"}\n\n",
            "event: message_stop\ndata: {}\n\nevent: ping\ndata: {}\n\n",
            "data: {\"event\": \"event: message_stop\"}\n\n",
            "event: response.created\ndata: {}\n\n",
        ] {
            assert!(!is_last(other.as_bytes()), "{other}");
        }
    }
}
