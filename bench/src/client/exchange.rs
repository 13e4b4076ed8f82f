//! One request and its measured answer.

use std::fmt::Write;
use std::io::IoSlice;
use std::time::Instant;

use bytes::Bytes;

use super::connections::Connection;
use super::{Client, RequestError, WHOLE_ANSWER_LIMIT_BYTES};
use crate::args::Api;
use crate::body::Streaming;
use crate::chunk::Chunk;
use crate::record::Response;
use crate::sse::{Event, SseParser};
use crate::wire::message::{Progress, StartLine};
use crate::wire::socket::ReadError;

/// How much of an error's body is quoted when it has no message.
const QUOTED_CHARS: usize = 200;

/// A request to be sent.
#[derive(Debug)]
pub struct Call {
    /// The endpoint.
    pub api: Api,
    /// The body.
    pub body: Bytes,
    /// Whether the body asks for a stream.
    pub streaming: Streaming,
    /// The number in `x-session-id`, if that is to be sent.
    pub session: Option<usize>,
}

/// What came of it.
#[derive(Debug)]
pub struct Exchange {
    /// Just before the POST, connecting included.
    pub start: Instant,
    /// What was measured, as far as it came.
    pub response: Response,
    /// Why it failed.
    pub failure: Option<RequestError>,
}

impl Client {
    /// Sends a generation request and measures its answer.
    pub async fn generate(&self, call: Call) -> Exchange {
        let mut meter = Meter::new(Instant::now());
        let answer = tokio::time::timeout(self.timeout, self.drive(call, &mut meter)).await;
        let failure = match answer {
            Ok(outcome) => outcome.err(),
            Err(_) => Some(RequestError::TimedOut(self.timeout)),
        };
        Exchange { start: meter.start, response: meter.into_response(), failure }
    }

    async fn drive(&self, call: Call, meter: &mut Meter) -> Result<(), RequestError> {
        let head = match call.api {
            Api::Chat => &self.chat_head,
            Api::Completions => &self.completion_head,
        };
        let mut own = String::with_capacity(64);
        if let Some(session) = call.session {
            write!(own, "x-session-id: bench-{session}\r\n").expect("writing to a string cannot fail");
        }
        write!(own, "content-length: {}\r\n\r\n", call.body.len()).expect("writing to a string cannot fail");
        let mut connection = self.connections.take().await?;
        let pieces = [IoSlice::new(head), IoSlice::new(own.as_bytes()), IoSlice::new(&call.body)];
        connection.send(pieces).await.map_err(RequestError::NotSent)?;
        let whole = match read_answer(&mut connection, call.streaming, meter).await? {
            Body::Whole(body) => body,
            Body::Cut => return Ok(()),
            Body::Stream => {
                self.connections.give_back(connection);
                return Ok(());
            }
        };
        let status = connection.status();
        self.connections.give_back(connection);
        if status == 200 {
            meter.read_whole(&whole, Instant::now())
        } else {
            Err(status_error(status, &whole))
        }
    }
}

/// What was read.
enum Body {
    /// A good stream to its end.
    Stream,
    /// A good stream that was cut off when all that was asked for had come.
    Cut,
    /// Anything else, to be looked at.
    Whole(Vec<u8>),
}

/// Reads to the end of the body, past `[DONE]`, so that the connection can be used again.
async fn read_answer(
    connection: &mut Connection,
    streaming: Streaming,
    meter: &mut Meter,
) -> Result<Body, RequestError> {
    let (mut parser, mut whole) = (SseParser::default(), Vec::new());
    let is_stream = |status: u16| status == 200 && streaming == Streaming::On;
    loop {
        let mut outcome = Ok(());
        let mut now = None; // one reading for all that came together
        let on_body = |line: &StartLine, piece: &[u8]| {
            if !is_stream(line.status()) {
                whole.extend_from_slice(piece);
                return;
            }
            let now = *now.get_or_insert_with(Instant::now);
            let fed = parser.feed(piece, |event| {
                if outcome.is_ok() {
                    outcome = meter.read_event(event, now);
                }
            });
            if let (Err(error), Ok(())) = (fed, &outcome) {
                outcome = Err(error.into());
            }
        };
        let progress = connection.read_some(on_body).await;
        outcome?;
        match progress {
            Ok(Progress::Partial) if whole.len() <= WHOLE_ANSWER_LIMIT_BYTES => {}
            Ok(Progress::Partial) => return Err(RequestError::AnswerTooLarge),
            Ok(Progress::Complete) => break,
            Err(_) if meter.is_done => return Ok(Body::Cut),
            Err(error) => return Err(read_error(error)),
        }
    }
    meter.read_headers(connection);
    if !is_stream(connection.status()) {
        return Ok(Body::Whole(whole));
    }
    let now = Instant::now();
    let mut outcome = Ok(());
    parser.finish(|event| outcome = meter.read_event(event, now));
    outcome?;
    meter.last.get_or_insert(now);
    if meter.is_done || meter.is_finished { Ok(Body::Stream) } else { Err(RequestError::Unfinished) }
}

/// Whether an answer failed before or after its first byte.
pub(super) fn read_error(error: ReadError) -> RequestError {
    match error {
        ReadError::Closed => RequestError::NoResponse(error),
        _ => RequestError::CutOff(error),
    }
}

/// The error of a status, with the server's message.
pub(super) fn status_error(status: u16, body: &[u8]) -> RequestError {
    let said = Chunk::parse(body).ok().and_then(|answer| answer.error_message());
    let message = said.unwrap_or_else(|| String::from_utf8_lossy(body).chars().take(QUOTED_CHARS).collect());
    RequestError::Status { status, message }
}

/// Turns events and their times into a [`Response`].
#[derive(Debug)]
struct Meter {
    start: Instant,
    last: Option<Instant>,
    response: Response,
    is_finished: bool,
    is_done: bool,
}

impl Meter {
    fn new(start: Instant) -> Self {
        Self { start, last: None, response: Response::default(), is_finished: false, is_done: false }
    }

    fn read_headers(&mut self, connection: &Connection) {
        self.response.worker = connection.header("x-router-worker").map(str::to_owned);
        self.response.predicted_hit_tokens =
            connection.header("x-router-hit-tokens").and_then(|tokens| tokens.parse().ok());
    }

    fn read_event(&mut self, event: Event<'_>, now: Instant) -> Result<(), RequestError> {
        if event.data == b"[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        if event.name == b"error" {
            let said = Chunk::parse(event.data).ok().and_then(|chunk| chunk.error_message());
            let raw = || String::from_utf8_lossy(event.data).into_owned();
            return Err(RequestError::ErrorEvent(said.unwrap_or_else(raw)));
        }
        let chunk = Chunk::parse(event.data).map_err(RequestError::Malformed)?;
        if let Some(message) = chunk.error_message() {
            return Err(RequestError::ErrorEvent(message));
        }
        if self.read_chunk(&chunk) {
            self.tick(now);
        }
        Ok(())
    }

    fn read_whole(&mut self, body: &[u8], now: Instant) -> Result<(), RequestError> {
        let answer = Chunk::parse(body).map_err(RequestError::Malformed)?;
        if let Some(message) = answer.error_message() {
            return Err(RequestError::ErrorEvent(message));
        }
        if self.read_chunk(&answer) {
            self.tick(now);
        }
        self.last = Some(now);
        Ok(())
    }

    /// Takes text and counts; returns whether there was text.
    fn read_chunk(&mut self, chunk: &Chunk<'_>) -> bool {
        let length_before = self.response.text.len();
        chunk.texts().for_each(|text| self.response.text.push_str(text));
        self.is_finished |= chunk.is_finished();
        if let Some(usage) = chunk.usage {
            self.response.usage = Some(usage.into()); // the last one holds: some servers count along
        }
        self.response.text.len() > length_before
    }

    fn tick(&mut self, now: Instant) {
        match self.last {
            None => self.response.ttft = Some(now - self.start),
            Some(last) => self.response.itls.push(now - last),
        }
        self.response.chunks += 1;
        self.last = Some(now);
    }

    fn into_response(mut self) -> Response {
        self.response.latency = self.last.unwrap_or(self.start) - self.start;
        self.response
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn meter_after(events: &[(u64, &str)]) -> (Meter, Result<(), RequestError>) {
        let start = Instant::now();
        let mut meter = Meter::new(start);
        let mut outcome = Ok(());
        for (at_ms, data) in events {
            let now = start + Duration::from_millis(*at_ms);
            outcome = meter.read_event(Event { name: b"", data: data.as_bytes() }, now);
        }
        (meter, outcome)
    }

    #[test]
    fn times_chunks_with_text_and_no_others() {
        let (meter, outcome) = meter_after(&[
            (5, r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#),
            (10, r#"{"choices":[{"delta":{"content":"a"}}]}"#),
            (30, r#"{"choices":[{"delta":{"reasoning_content":"b"}}]}"#),
            (70, r#"{"choices":[{"delta":{"content":"c"},"finish_reason":"stop"}]}"#),
            (90, r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":3}}"#),
            (95, "[DONE]"),
        ]);
        outcome.unwrap();
        assert!(meter.is_done && meter.is_finished);
        let response = meter.into_response();
        let ms = Duration::from_millis;
        assert_eq!(response.ttft, Some(ms(10)));
        assert_eq!(response.itls, [ms(20), ms(40)]);
        assert_eq!((response.latency, response.chunks, response.text.as_str()), (ms(70), 3, "abc"));
        assert_eq!(response.usage.unwrap().completion_tokens, 3);
    }

    #[test]
    fn an_error_in_place_of_a_chunk_fails_with_its_message() {
        let (_, outcome) = meter_after(&[(1, r#"{"error":{"message":"worker lost"}}"#)]);
        assert_eq!(outcome.unwrap_err().to_string(), "error in the stream: worker lost");
        let (_, outcome) = meter_after(&[(1, "{oops")]);
        assert!(matches!(outcome, Err(RequestError::Malformed(_))));
        let mut meter = Meter::new(Instant::now());
        let event = Event { name: b"error", data: b"gone" };
        let error = meter.read_event(event, Instant::now()).unwrap_err();
        assert_eq!(error.to_string(), "error in the stream: gone");
    }

    #[test]
    fn a_status_quotes_the_message_or_the_body() {
        let text = |body: &str| status_error(503, body.as_bytes()).to_string();
        assert_eq!(text(r#"{"error":{"message":"no worker"}}"#), "HTTP 503: no worker");
        assert_eq!(text("<html>"), "HTTP 503: <html>");
        assert_eq!(text(&"x".repeat(500)).len(), "HTTP 503: ".len() + QUOTED_CHARS);
    }
}
