//! One exchange with a worker: the request goes out, and so much of the answer is waited for as it takes to know that it is one. Until then nothing has
//! gone to the client, and another worker can be asked.
//!
//! Of a stream that is the first event of its answer, since engines send a stream's head at once, and some events behind it, and may still die before the
//! first token. What comes whole is waited for whole, unless it is long: half of a JSON document is of no use to anybody.
//!
//! Used by [`dispatch`](super::dispatch) and [`legs`](super::legs).

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, header};
use http_body::Body;
use http_body_util::BodyExt;
use router_core::Worker;
use tokio::time::{Instant, timeout_at};

use super::dispatch::Times;
use super::retries::Cause;
use crate::fleet::Upstream;
use crate::openai::bounds;
use crate::time_limits::TimeLimits;
use crate::transport::{TransportError, UpstreamBody, WorkerRequest};

/// A longer document goes on while it comes, and so does a stream with a longer opening: the router keeps no more than this of an answer.
const MOST_KEPT_BYTES: usize = 256 << 10;

/// A worker's answer, with the first piece of its body.
pub(super) type Answer = (Response<UpstreamBody>, Option<Bytes>);

/// Whether a request may leave a worker that stands still.
pub(super) type MayLeave<'a> = &'a (dyn Fn(&Worker) -> bool + Send + Sync);

/// Sends a request, and waits until the answer has begun in earnest.
///
/// # Errors
/// When none has begun in time, what came was none, or the worker stands still and the request may leave it.
pub(super) async fn exchange(
    upstream: Option<&Upstream>,
    (request, may_leave): (&WorkerRequest, MayLeave<'_>),
    times: Times,
) -> Result<Answer, TransportError> {
    let mut exchange = pin!(begun(upstream, request, times));
    let Some(upstream) = upstream.filter(|_| request.leaves.is_some()) else { return exchange.await };
    loop {
        tokio::select! {
            biased;
            answer = &mut exchange => return answer,
            () = upstream.stalls.next() => {
                if may_leave(&upstream.worker) {
                    return Err(TransportError::Stalled { silence: upstream.stalls.silence() });
                }
            }
        }
    }
}

/// The same, however long the worker stands still.
async fn begun(
    upstream: Option<&Upstream>,
    request: &WorkerRequest,
    (limits, deadline): Times,
) -> Result<Answer, TransportError> {
    let exchange = pin!(async {
        let upstream = upstream.ok_or(TransportError::Left)?;
        let response = match &request.gateway {
            Some(gateway) => gateway.send(request, upstream.transport.hand_over(request).await?).await?,
            None => upstream.transport.send(request).await?,
        };
        let answer = first_piece(response).await?;
        // Who sends in the router's place has passed it on.
        if request.gateway.is_none() && is_before_answer(&answer) {
            // Boxed, since it is rare, and a request's future should be small.
            return Box::pin(first_event(answer)).await;
        }
        Ok(answer)
    });
    let answer = within(limits, deadline, request.underway.as_deref(), exchange).await?;
    if request.gateway.is_some() {
        return Ok(answer);
    }
    if comes_whole(&answer) {
        // The same: most come in one piece.
        return Box::pin(whole(answer, (limits, deadline))).await;
    }
    Ok(as_refused(answer))
}

/// An answer whose first event says that the engine is full or has failed, as the answer with that status that it would be if it were no stream: SGLang
/// sends a stream's head before it knows (0.5.23, `entrypoints/openai/serving_base.py`).
fn as_refused((response, first): Answer) -> Answer {
    let told = first.as_ref().filter(|_| response.status().is_success());
    let Some((status, error)) = told.and_then(|first| bounds::refusal(first)) else {
        return (response, first);
    };
    if !is_event_stream(response.headers()) {
        return (response, first);
    }
    let (mut head, _) = response.into_parts();
    head.status = status;
    head.headers.remove(header::TRANSFER_ENCODING);
    head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    (Response::from_parts(head, UpstreamBody::Canned(VecDeque::new())), Some(Bytes::copy_from_slice(error)))
}

/// Runs an exchange within the limits of time, under one timer. One that was not underway when the first byte was due has been processed
/// nowhere.
async fn within<T>(
    limits: TimeLimits,
    deadline: Instant,
    underway: Option<&AtomicBool>,
    exchange: Pin<&mut impl Future<Output = Result<T, TransportError>>>,
) -> Result<T, TransportError> {
    let first_byte = limits.first_byte.map(|limit| (Instant::now() + limit, limit));
    let first_byte = first_byte.filter(|(end, _)| *end < deadline);
    let end = first_byte.map_or(deadline, |(end, _)| end);
    timeout_at(end, exchange).await.unwrap_or_else(|_| {
        Err(match first_byte {
            Some((_, limit)) if underway.is_some_and(|underway| !underway.load(Ordering::Relaxed)) => {
                TransportError::NotSent { limit }
            }
            Some((_, limit)) => TransportError::FirstByte { limit },
            None => TransportError::Total { limit: limits.total },
        })
    })
}

async fn first_piece(response: Response<UpstreamBody>) -> Result<Answer, TransportError> {
    let (head, mut body) = response.into_parts();
    let mut first = None;
    while first.is_none() {
        let Some(frame) = body.frame().await else { break };
        first = frame?.into_data().ok().filter(|data| !data.is_empty());
    }
    Ok((Response::from_parts(head, body), first))
}

/// Whether an answer is a stream, as its head goes, and nothing of what it is to say has come.
pub(super) fn is_before_answer((response, first): &Answer) -> bool {
    let has_come = |first: &Bytes| !is_event_stream(response.headers()) || bounds::has_answer(first);
    response.status().is_success() && is_stream(response.headers()) && !first.as_ref().is_some_and(has_come)
}

/// A stream's beginning up to its first event that is more than an opening.
async fn first_event((response, first): Answer) -> Result<Answer, TransportError> {
    let (head, mut body) = response.into_parts();
    let mut kept = BytesMut::from(first.unwrap_or_default());
    while !bounds::has_answer(&kept) && kept.len() < MOST_KEPT_BYTES {
        match body.frame().await {
            Some(frame) => kept.extend_from_slice(&frame?.into_data().unwrap_or_default()),
            // A stream that ends so is no answer to anything that was asked for.
            None => return Err(TransportError::Unfinished),
        }
    }
    Ok((Response::from_parts(head, body), Some(kept.freeze())))
}

/// Whether there is more to come of a document that is kept until all of it is there.
fn comes_whole((response, first): &Answer) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
    let length = response.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    first.is_some()
        && !response.body().is_end_stream()
        && kind.eq_ignore_ascii_case("application/json")
        // Of a failure its status says enough.
        && Cause::of_status(response.status()).is_none()
        && length.is_none_or(|length| length <= MOST_KEPT_BYTES)
}

/// The same answer with all of its body in one piece, if that is not too long.
async fn whole((response, first): Answer, (limits, deadline): Times) -> Result<Answer, TransportError> {
    let (head, mut body) = response.into_parts();
    let mut kept = BytesMut::from(first.unwrap_or_default());
    while kept.len() < MOST_KEPT_BYTES && !body.is_end_stream() {
        let idle_end = Instant::now() + limits.idle;
        let Ok(frame) = timeout_at(idle_end.min(deadline), body.frame()).await else {
            return Err(match idle_end < deadline {
                true => TransportError::Idle { limit: limits.idle },
                false => TransportError::Total { limit: limits.total },
            });
        };
        match frame {
            // Trailers of a document say nothing to anybody.
            Some(frame) => kept.extend_from_slice(&frame?.into_data().unwrap_or_default()),
            None => break,
        }
    }
    Ok((Response::from_parts(head, body), Some(kept.freeze())))
}

/// Whether a reply is a stream of server-sent events.
pub(super) fn is_stream(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// Whether it is such a stream as it is: what is compressed cannot be read, and nothing of ours can be put between its bytes.
pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(header::CONTENT_ENCODING);
    is_stream(headers) && codings.iter().all(|coding| coding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_first_byte_that_is_late_is_no_answer_only_if_the_request_had_set_out() {
        let limit = Duration::from_millis(1);
        let limits = TimeLimits { first_byte: Some(limit), total: limit * 100_000, idle: limit };
        let deadline = Instant::now() + limits.total;
        let (before, after) = (AtomicBool::new(false), AtomicBool::new(true));
        let never = std::future::pending::<Result<(), TransportError>>;
        let late = within(limits, deadline, Some(&before), pin!(never())).await;
        assert!(matches!(late, Err(TransportError::NotSent { .. })), "another worker may be asked");
        let late = within(limits, deadline, Some(&after), pin!(never())).await;
        assert!(matches!(late, Err(TransportError::FirstByte { .. })));
    }
}
