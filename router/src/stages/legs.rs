//! An attempt at two workers: one computes the prompt, and the other generates from it.
//!
//! What they are told is in [`disaggregation`](crate::disaggregation); whether it is worth it, the decider says. A failure of either is a failed attempt,
//! and the next one, if there is one, begins anew: what was computed is in a cache by then. Used by [`dispatch`](super::dispatch) only.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Response, header};
use http_body_util::BodyExt;
use router_core::{Among, Decided, Lease, Leg, RequestView, Worker};
use tokio::time::{Instant, timeout_at};

use super::dispatch::{Begun, Stopped, Times, answered, attempt, lost, may_leave, pick_in_turn};
use super::exchange::{Answer, MayLeave, exchange};
use super::parse::Reading;
use super::pick::{Picked, pick};
use super::record::{Expected, Recorder};
use super::retries::{Cause, Failed};
use crate::app::App;
use crate::disaggregation::{
    PrefillProtocol, Prefilled, sglang_legs, vllm_decode, vllm_prefill, without_the_clients,
};
use crate::error::RequestError;
use crate::kv_events::Followed;
use crate::openai::members::Members;
use crate::openai::usage::{ReplyTail, Words};
use crate::payload::Payload;
use crate::spans::AttemptSpan;
use crate::transport::{Broken, TransportError, UpstreamBody, WorkerRequest};

/// Largest answer of a prefill worker: one token, and the numbers of the blocks of a prompt of a million tokens.
const MOST_REPLY_BYTES: usize = 4 << 20;
/// How long an engine may take to end its answer once the other one has its KV.
const END_WITHIN: Duration = Duration::from_secs(10);

/// Takes out of a request what a client says of where KV is, where prompts are or may be handed over. Returns what it is made of then, if it is an object.
pub(super) async fn without_foreign_kv(app: &App, request: &mut WorkerRequest) -> Option<Members> {
    // Also while a source has found none of them.
    if app.settings.prefill.is_empty() && !app.has_prefill() {
        return None;
    }
    let body = Members::of(&request.body).await?;
    let Some(clean) = without_the_clients(&body) else { return Some(body) };
    request.body = clean;
    Members::of(&request.body).await
}

/// A request that two workers can serve together.
pub(super) struct Splitter {
    protocol: PrefillProtocol,
    body: Members,
}

/// A request as it came, and what was read of it.
type Asked<'a> = (&'a WorkerRequest, &'a Reading);

impl Splitter {
    /// Of a request that there are workers for which do nothing but compute prompts; `body` is what it is made of, if it is an object. An error if no two
    /// of the engines could answer it.
    pub(super) fn of(
        app: &App,
        request: &WorkerRequest,
        body: Option<Members>,
    ) -> Result<Option<Self>, RequestError> {
        // A body that is compressed cannot be added to.
        if !app.has_prefill() || request.headers.contains_key(header::CONTENT_ENCODING) {
            return Ok(None);
        }
        let protocol = app.settings.prefill_protocol;
        let Some(body) = body.filter(|body| protocol.can_split(request.path.path(), body)) else {
            return Ok(None);
        };
        if !protocol.can_answer(&body) {
            return Err(RequestError::AnsweredOnce);
        }
        Ok(Some(Self { protocol, body }))
    }

    /// Somebody must be left for each of these, for another attempt.
    pub(super) fn needs(&self) -> &'static [Leg] {
        if self.protocol.generates_alone() { &[Leg::Whole] } else { &[Leg::Prefill, Leg::Decode] }
    }

    /// Whether a worker that generates can compute the prompt as well.
    pub(super) fn can_do_without(&self) -> bool {
        self.protocol.generates_alone()
    }

    /// Whether the next attempt is at two workers. Once a prefill worker has failed, no other is asked where somebody can do without: few
    /// attempts are left, and all prefill workers may be like it.
    pub(super) fn splits(
        &self,
        app: &App,
        view: &RequestView<'_>,
        (among, prefill_fails): (Among<'_>, bool),
        now: Duration,
    ) -> bool {
        let pays = || app.decider.splits(&app.fleet.roster().snapshot, view, among, now);
        !self.protocol.generates_alone() || !prefill_fails && pays()
    }

    /// The attempt.
    pub(super) async fn attempt(
        &self,
        app: &Arc<App>,
        (asked, view): (Asked<'_>, &RequestView<'_>),
        among: Among<'_>,
        times: Times,
        recorder: &mut Recorder,
    ) -> Result<Begun, Stopped> {
        let prefill_view = RequestView { leg: Leg::Prefill, ..*view };
        let picked = pick_in_turn(app, &prefill_view, (among, app.now()), times, recorder).await?;
        app.metrics.splits.inc();
        match self.protocol {
            PrefillProtocol::Vllm => {
                self.one_by_one(app, (asked, view), (picked, among), times, recorder).await
            }
            PrefillProtocol::Sglang => {
                self.at_once(app, (asked, view), (picked, among), times, recorder).await
            }
        }
    }

    /// vLLM's way: what the first answers is told to the second.
    async fn one_by_one(
        &self,
        app: &App,
        (asked, view): (Asked<'_>, &RequestView<'_>),
        (picked, among): (Picked, Among<'_>),
        times: Times,
        recorder: &mut Recorder,
    ) -> Result<Begun, Stopped> {
        let (request, reading) = asked;
        let prefill_request = leg_of(request, vllm_prefill(request.path.path(), &self.body));
        let begun =
            attempt(app, (&prefill_request, reading), (picked, Leg::Prefill), times, recorder).await?;
        if !begun.response.status().is_success() {
            // What is wrong with the request is told by whoever reads it first.
            return Ok(begun);
        }
        let Begun { worker: prefill_worker, hit_tokens, lease, response, first, .. } = begun;
        let reply = match whole_reply(response.into_body(), first, times).await {
            Ok(reply) => reply,
            Err(source) => {
                recorder.prefill_broke(&prefill_worker, &source);
                return Err(broke(app, prefill_worker, source).into());
            }
        };
        let Prefilled { transfer, usage } = Prefilled::read(&reply);
        recorder.prefilled(usage, reading);
        drop(lease);
        let Some(transfer) = transfer else {
            let precedence = view.precedence.of_one_that_has_begun();
            let view = RequestView { may_wait_since: None, precedence, ..*view };
            let picked = pick_in_turn(app, &view, (among, app.now()), times, recorder).await?;
            return Ok(attempt(app, asked, (picked, Leg::Whole), times, recorder).await?);
        };
        // Never queued: the prefill worker keeps the KV for a while only.
        let decode_view = RequestView { leg: Leg::Decode, may_wait_since: None, ..*view };
        let picked = pick(app, &decode_view, among, app.now()).map_err(RequestError::from)?;
        let decode_request = WorkerRequest { body: vllm_decode(&self.body, &transfer), ..request.clone() };
        let begun = attempt(app, (&decode_request, reading), (picked, Leg::Decode), times, recorder).await?;
        Ok(Begun { prefill_worker: Some(prefill_worker), hit_tokens, ..begun })
    }

    /// SGLang's way: both are asked at once, and find each other.
    async fn at_once(
        &self,
        app: &Arc<App>,
        ((request, reading), view): (Asked<'_>, &RequestView<'_>),
        (prefill, among): (Picked, Among<'_>),
        times: Times,
        recorder: &mut Recorder,
    ) -> Result<Begun, Stopped> {
        let decode_view = RequestView { leg: Leg::Decode, may_wait_since: None, ..*view };
        let decode = match pick(app, &decode_view, among, app.now()) {
            Ok(decode) => decode,
            Err(error) => {
                take_back(app, reading, prefill.decided);
                return Err(RequestError::from(error).into());
            }
        };
        recorder.attempt(&prefill.decided, Leg::Prefill);
        let prefill_worker = Arc::clone(&prefill.decided.worker);
        let hit_tokens = prefill.decided.hit_tokens;
        // Anew for each attempt: an engine may still remember the last one's. 62 bits, since it is signed there, and counted on for a list of prompts.
        let room = rand::random::<u64>() >> 2;
        let specs = (&prefill_worker.spec, &decode.decided.worker.spec);
        let (prefill_body, decode_body) = sglang_legs(&self.body, specs, room);
        let mut decode_request = WorkerRequest { body: decode_body, ..request.clone() };
        let mut prefill_request = leg_of(request, prefill_body);
        let span = recorder.sends_apart(&mut prefill_request, &prefill.decided, Leg::Prefill);
        let follower = prefill.upstream.as_ref().and_then(|upstream| upstream.follower.as_ref());
        let followed = recorder.follow_apart(follower, &mut prefill_request, reading).await;
        let expected = Expected::of(recorder.endpoint(), reading, &prefill.decided);
        let hears = Hears { tail: ReplyTail::default(), words: recorder.words(), expected, followed };
        recorder.sends(&mut decode_request, &decode.decided, Leg::Decode);
        let mut prefilling =
            Prefilling::begin(app, (prefill, span, hears), (prefill_request, reading), times);
        let answer = {
            let (tried, model) = (decode_request.leaves.as_ref(), reading.model.as_deref());
            let may_leave = |worker: &Worker| may_leave(app, tried, model, worker);
            let asked = (&decode_request, &may_leave as MayLeave<'_>);
            let mut decoding = pin!(exchange(decode.upstream.as_deref(), asked, times));
            tokio::select! {
                biased;
                answer = &mut decoding => Ok(answer),
                failure = prefilling.failure() => Err(failure),
            }
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                // The other one would wait for it in vain.
                recorder.gives_up_attempt();
                take_back(app, reading, decode.decided);
                return prefilling.failed(reading, failure, recorder);
            }
        };
        recorder.attempt(&decode.decided, Leg::Decode);
        match answer {
            Ok(answer) => {
                let begun = answered(app, reading, (decode.decided, Leg::Decode), answer, recorder)?;
                // Of several prompts the first one's answer says nothing of the others.
                let within = if self.body.is_list_of_prompts() { times.0.total } else { END_WITHIN };
                tokio::spawn(prefilling.end(within));
                Ok(Begun { prefill_worker: Some(prefill_worker), hit_tokens, ..begun })
            }
            Err(error) => Err(Box::new(lost(app, reading, decode.decided, error, recorder)).into()),
        }
    }
}

/// SGLang's prefill leg, beside the other one.
struct Prefilling {
    app: Arc<App>,
    exchange: Pin<Box<dyn Future<Output = Result<Answer, TransportError>> + Send>>,
    /// Until it has been answered.
    decided: Option<Decided>,
    /// Once it has been answered well: who has, what is left of the answer, and of what it occupies.
    rest: Option<(Arc<Worker>, UpstreamBody, Lease)>,
    span: Option<AttemptSpan>,
    hears: Hears,
}

/// What is heard of the prompt in the answer.
struct Hears {
    tail: ReplyTail,
    words: Words,
    expected: Expected,
    followed: Option<Followed>,
}

impl Prefilling {
    fn begin(
        app: &Arc<App>,
        (picked, span, hears): (Picked, Option<AttemptSpan>, Hears),
        (request, reading): (WorkerRequest, &Reading),
        times: Times,
    ) -> Self {
        let Picked { decided, upstream } = picked;
        let may_leave = {
            let (app, tried, model) = (Arc::clone(app), request.leaves.clone(), reading.model.clone());
            move |worker: &Worker| may_leave(&app, tried.as_ref(), model.as_deref(), worker)
        };
        let exchange =
            Box::pin(async move { exchange(upstream.as_deref(), (&request, &may_leave), times).await });
        Self { app: Arc::clone(app), exchange, decided: Some(decided), rest: None, span, hears }
    }

    /// Waits until it has failed, which may be never.
    async fn failure(&mut self) -> Result<Answer, TransportError> {
        if self.rest.is_none() {
            match self.exchange.as_mut().await {
                Ok((response, first)) if response.status().is_success() => self.has_computed(response, first),
                failure => return failure,
            }
        }
        std::future::pending().await
    }

    fn has_computed(&mut self, response: Response<UpstreamBody>, first: Option<Bytes>) {
        let Some(Decided { worker, mut lease, trial, .. }) = self.decided.take() else { return };
        let now = self.app.now();
        self.app.metrics.first_token_late(self.app.decider.late_s(&lease, now));
        self.app.decider.first_token(&mut lease, now);
        self.app.metrics.attempt(&worker, response.status().into());
        worker.generates();
        // It ends: what is left of the answer says nothing.
        if let Some(mut span) = self.span.take() {
            span.answered(response.status());
        }
        trial.succeed(self.app.now());
        self.hears.tail.push(&first.unwrap_or_default());
        self.rest = Some((worker, response.into_body(), lease));
    }

    /// What its failure means for the request.
    fn failed(
        mut self,
        reading: &Reading,
        failure: Result<Answer, TransportError>,
        recorder: &mut Recorder,
    ) -> Result<Begun, Stopped> {
        let decided = self.decided.take().expect("it has not been answered well");
        if let Some(span) = &mut self.span {
            match &failure {
                Ok((response, _)) => span.answered(response.status()),
                Err(error) => span.failed(error),
            }
        }
        match failure {
            Ok(answer) => Ok(answered(&self.app, reading, (decided, Leg::Prefill), answer, recorder)?),
            Err(error) => Err(Box::new(lost(&self.app, reading, decided, error, recorder)).into()),
        }
    }

    /// Takes the rest of its answer, which says what was cached: an engine whose client leaves may give up what the other one still fetches.
    async fn end(mut self, within: Duration) {
        let all = async {
            if self.rest.is_none()
                && let Ok((response, first)) = self.exchange.as_mut().await
                && response.status().is_success()
            {
                self.has_computed(response, first);
            }
            let Self { app, hears: Hears { tail, words, expected, followed }, rest, .. } = &mut self;
            let Some((worker, body, _lease)) = rest else { return };
            while let Some(Ok(frame)) = body.frame().await {
                tail.push(frame.data_ref().map_or(&[], |piece| piece));
            }
            if let Some(usage) = tail.usage(*words) {
                expected.compare(app, worker, followed.as_mut(), &usage);
            }
        };
        // Late is late: the other one has begun, so it has what it needs, of one prompt.
        let _ = tokio::time::timeout(within, all).await;
    }
}

/// A worker that was picked computes nothing: what was entered for it is not there.
fn take_back(app: &App, reading: &Reading, decided: Decided) {
    let Decided { worker, mut lease, basis, .. } = decided;
    app.decider.take_back(&mut lease, &worker, &reading.blocks, basis);
}

/// The request as the worker that computes the prompt gets it. Its answer is read here, so it is not to be compressed, and goes by no gateway.
fn leg_of(request: &WorkerRequest, body: Payload) -> WorkerRequest {
    let mut request = WorkerRequest { body, gateway: None, ..request.clone() };
    request.headers.remove(header::ACCEPT_ENCODING);
    request
}

/// An answer to its end.
async fn whole_reply(
    mut body: UpstreamBody,
    first: Option<Bytes>,
    (limits, deadline): Times,
) -> Result<Bytes, TransportError> {
    let mut reply = BytesMut::from(&first.unwrap_or_default()[..]);
    let reading = async {
        while let Some(frame) = body.frame().await {
            let piece = frame?.into_data().unwrap_or_default();
            if reply.len() + piece.len() > MOST_REPLY_BYTES {
                return Err(TransportError::Broken(Broken::Malformed("is too long for a prefill")));
            }
            reply.extend_from_slice(&piece);
        }
        Ok(())
    };
    let end = deadline.min(Instant::now() + limits.idle);
    timeout_at(end, reading).await.unwrap_or(Err(TransportError::Idle { limit: limits.idle }))?;
    Ok(reply.freeze())
}

/// A worker's answer to the first leg broke off.
fn broke(app: &App, worker: Arc<Worker>, source: TransportError) -> Box<Failed> {
    let cause = Cause::of_error(&source);
    let in_flight = worker.rescue.note(app.now(), worker.load.own());
    let told = Err(RequestError::Worker { worker: worker.id().clone(), source });
    Box::new(Failed { worker, cause, in_flight, retry_after: None, told })
}
