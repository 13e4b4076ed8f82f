//! Stage 3: read the body while it arrives, within limits, and of it what routing needs. The body itself stays as it came, but for the name of a model that
//! stands for another ([`aliases`](crate::aliases)).
//!
//! Knows neither JSON nor forms; [`scan`](crate::openai::scan), [`members`](crate::openai::members) and [`form`](crate::openai::form) do. Next: [`pick`](super::pick).

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderName};
use http_body::Body;
use roundhouse_types::BlockHash;
use router_core::Precedence;
use router_core::prefix::blocks::Opening;
use router_core::request::{Answer, Leg, RequestView};
use router_core::token_ratio::TokenRatios;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;
use xxhash_rust::xxh3::xxh3_64;

use super::admit::Admitted;
use crate::aliases::Aliases;
use crate::body_memory::{BodyMemory, BodyShare};
use crate::error::RequestError;
use crate::keys::Grant;
use crate::openai::conversation;
use crate::openai::form::FormScanner;
use crate::openai::members::Members;
use crate::openai::scan::{BodyError, BodyScanner, Name, ScanConfig, Scanned};
use crate::payload::{Payload, PayloadBuilder};
use crate::precedence::PrecedenceHeaders;
use crate::routes::Work;
use crate::transport::Gateway;
use crate::turns;

/// Whether a body that is not JSON is an error, or passes as it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Understanding {
    /// Chat and completions: JSON, or an error.
    Required,
    /// Every other endpoint: what can be read of it is used, and a form is read as well.
    BestEffort,
}

/// A request's body as it arrives.
pub trait RequestBody:
    Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Unpin
{
}

impl<B> RequestBody for B where
    B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Unpin
{
}

/// What was read of a request.
#[derive(Debug, Default)]
pub struct Reading {
    /// The model asked for, or meant by what is asked for.
    pub model: Option<Name>,
    /// Whether the body was understood, so that one that names no model does name none.
    pub extent: Extent,
    /// Hash of what names the session.
    pub session: Option<u64>,
    /// Chained hashes of the prompt's full blocks.
    pub blocks: Vec<BlockHash>,
    /// Which of them are of tools and instructions.
    pub opening: Opening,
    /// Length of the prompt in template order.
    pub prompt_bytes: usize,
    /// The same in tokens, by what is known of the model's tokenizer, unless they have been counted.
    pub prompt_tokens: usize,
    /// Tokens of a prompt that came as their ids: it tells nothing of a tokenizer.
    pub token_ids: Option<usize>,
    /// Whether its first token will be seen.
    pub answer: Answer,
    /// How important it is, and whose.
    pub precedence: Precedence,
}

/// How much of a body was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Extent {
    /// It is in no language that is known here.
    #[default]
    Nothing,
    /// All that matters.
    Whole,
}

/// A request that has been read.
pub struct Parsed {
    /// Head.
    pub head: Parts,
    /// Body, as it came, but for a name that stands for a model.
    pub body: Payload,
    /// What was read of it.
    pub reading: Reading,
    /// The memory of its body.
    pub share: BodyShare,
    /// Its place among the requests in flight.
    pub permit: OwnedSemaphorePermit,
}

/// Bounds of a body.
#[derive(Clone, Debug)]
pub struct BodyLimits {
    /// Length.
    pub max_bytes: usize,
    /// Of all bodies together.
    pub memory: Arc<BodyMemory>,
    /// Time for it to arrive.
    pub timeout: Duration,
}

/// Reads requests.
pub struct Parser {
    scan: ScanConfig,
    aliases: Aliases,
    session_header: HeaderName,
    precedence: PrecedenceHeaders,
    limits: BodyLimits,
}

impl Reading {
    /// What does not generate text has no answer that takes time, and what computes nothing has no prompt: a worker that has cut a text into tokens holds
    /// nothing of it in its cache.
    fn is_for(&mut self, work: Work) {
        if work != Work::Text {
            self.answer = Answer::Nothing;
        }
        if work == Work::Nothing {
            self.blocks.clear();
            (self.opening, self.prompt_bytes, self.prompt_tokens) = (Opening::default(), 0, 0);
            self.token_ids = None;
        }
    }

    /// What a policy may see of it.
    #[must_use]
    pub fn view(&self) -> RequestView<'_> {
        RequestView {
            model: self.model.as_deref(),
            session: self.session,
            blocks: &self.blocks,
            opening: self.opening,
            block_tokens: None,
            prompt_bytes: self.prompt_bytes,
            prompt_tokens: self.prompt_tokens,
            answer: self.answer,
            may_wait_since: None,
            leg: Leg::Whole,
            precedence: self.precedence,
        }
    }
}

impl Parser {
    /// A parser of bodies within `limits`.
    #[must_use]
    pub fn new(
        (scan, aliases): (ScanConfig, Aliases),
        session_header: HeaderName,
        precedence: PrecedenceHeaders,
        limits: BodyLimits,
    ) -> Self {
        Self { scan, aliases, session_header, precedence, limits }
    }

    /// Names that stand for models.
    #[must_use]
    pub fn aliases(&self) -> &Aliases {
        &self.aliases
    }

    /// Reads an admitted request, for a model that `is_served` if a name stands for several. Where it stands for one, the body has that one's name.
    ///
    /// # Errors
    /// When its body is too large, too slow or broken, or must be understood and is not a JSON object, or a header says what is no priority.
    pub async fn parse<B>(
        &self,
        admitted: Admitted<B>,
        understanding: Understanding,
        (ratios, is_served): (&TokenRatios, impl Fn(&str) -> bool),
    ) -> Result<Parsed, RequestError>
    where
        B: RequestBody,
    {
        let Admitted { head, body, permit } = admitted;
        let mut share = self.limits.memory.share(body.size_hint().lower());
        let form = match understanding {
            Understanding::Required => None,
            // Boxed, since it is rare, and what reads a body should be small.
            Understanding::BestEffort => FormScanner::of(&head.headers).map(Box::new),
        };
        let received = self.receive(body, (understanding, form), (&head, is_served), &mut share);
        let (mut body, scanned) = received.await?;
        let scanned = match scanned {
            Err(error)
                if understanding == Understanding::Required
                    || matches!(error, BodyError::TooManyMembers { .. })
                    || is_json_otherwise(&head.headers, &body) =>
            {
                return Err(error.into());
            }
            scanned => scanned.ok(),
        };
        if let Some(Scanned { model: Some(model), is_meant: true, .. }) = &scanned
            && let Some(members) = Box::pin(Members::of(&body)).await
        {
            body = members.with_text("model", model);
        }
        let mut reading = self.reading((&head.headers, head.extensions.get()), scanned, ratios)?;
        if understanding == Understanding::BestEffort {
            reading.is_for(Work::at(head.uri.path()));
        }
        Ok(Parsed { head, body, reading, share, permit })
    }

    /// Reads a body that is there as a whole, for a model that `is_served`.
    ///
    /// # Errors
    /// When it is not a JSON object, or a header says what is no priority.
    pub fn read(
        &self,
        headers: &HeaderMap,
        body: &Bytes,
        (ratios, is_served): (&TokenRatios, impl Fn(&str) -> bool),
    ) -> Result<Reading, RequestError> {
        let mut scanner = BodyScanner::new(self.scan);
        scanner.push(body)?;
        let payload = Payload::from(body.clone());
        let scanned = scanner.finish_for(self.meant(headers, &payload, is_served))?;
        self.reading((headers, None), Some(scanned), ratios)
    }

    /// What says which model is meant by a name, and by the hash of an end user: of a request's session, or of the conversation that it is of.
    fn meant<'a>(
        &'a self,
        headers: &'a HeaderMap,
        body: &'a Payload,
        is_served: impl Fn(&str) -> bool + 'a,
    ) -> impl FnOnce(&str, Option<u64>) -> Option<Name> + 'a {
        move |name, user| {
            let conversation = || self.session(headers, user).unwrap_or_else(|| conversation::of(body));
            self.aliases.meant(name, conversation, is_served).map(Name::from)
        }
    }

    /// Hash of what names the session.
    fn session(&self, headers: &HeaderMap, user: Option<u64>) -> Option<u64> {
        match headers.get(&self.session_header).map(http::HeaderValue::as_bytes) {
            Some(header) => Some(header).filter(|name| !name.is_empty()).map(xxh3_64),
            None => user,
        }
    }

    /// Takes the whole body in. One that must be understood and cannot be is read on and thrown away, so that the client
    /// hears of it on a connection that goes on.
    async fn receive<B>(
        &self,
        mut body: B,
        (understanding, mut form): (Understanding, Option<Box<FormScanner>>),
        (head, is_served): (&Parts, impl Fn(&str) -> bool),
        share: &mut BodyShare,
    ) -> Result<(Payload, Result<Scanned, BodyError>), RequestError>
    where
        B: RequestBody,
    {
        let limit_bytes = self.limits.max_bytes;
        if body.size_hint().lower() > limit_bytes as u64 {
            return Err(RequestError::BodyTooLarge { limit_bytes });
        }
        let mut scan = Ok(BodyScanner::new(self.scan));
        let mut payload = PayloadBuilder::in_chunks(share.chunks());
        let (mut came_bytes, mut turn_bytes, mut timer) = (0, 0, None);
        while let Some(piece) = next_piece(&mut body, &mut timer, self.limits.timeout).await? {
            came_bytes += piece.len();
            if came_bytes > limit_bytes {
                return Err(RequestError::BodyTooLarge { limit_bytes });
            }
            share.grow(piece.len())?;
            let most_bytes = turns::turn_bytes(came_bytes);
            for part in piece.chunks(most_bytes) {
                if let Some(form) = &mut form {
                    form.push(part);
                } else if let Ok(scanner) = &mut scan
                    && let Err(error) = scanner.push(part)
                {
                    scan = Err(error);
                }
                turn_bytes += part.len();
                if turn_bytes >= most_bytes {
                    turn_bytes = 0;
                    tokio::task::yield_now().await;
                }
            }
            match (&scan, understanding) {
                (Err(_), Understanding::Required) => {
                    payload = PayloadBuilder::in_chunks(share.chunks());
                    share.give_back();
                }
                _ => payload.push(piece),
            }
        }
        let payload = payload.finish();
        if !self.aliases.is_empty() {
            // Which conversation it is of may have to be looked for.
            tokio::task::yield_now().await;
        }
        let scanned = match (form, scan) {
            (Some(form), _) => Ok(Scanned { model: form.finish(), ..Scanned::default() }),
            // What a gateway sends is not changed here.
            (None, Ok(scanner)) if head.extensions.get::<Gateway>().is_some() => scanner.finish(),
            (None, Ok(scanner)) => scanner.finish_for(self.meant(&head.headers, &payload, is_served)),
            (None, Err(error)) => Err(error),
        };
        Ok((payload, scanned))
    }

    fn reading(
        &self,
        (headers, grant): (&HeaderMap, Option<&Grant>),
        scanned: Option<Scanned>,
        ratios: &TokenRatios,
    ) -> Result<Reading, RequestError> {
        let tier = scanned.as_ref().and_then(|scanned| scanned.priority);
        let precedence = self.precedence.precedence(headers, grant, tier)?;
        let extent = if scanned.is_some() { Extent::Whole } else { Extent::Nothing };
        let (model, user, (answer, token_ids), prompt) = scanned
            .map(|scanned| (scanned.model, scanned.user, (scanned.answer, scanned.token_ids), scanned.prompt))
            .unwrap_or_default();
        Ok(Reading {
            session: self.session(headers, user),
            extent,
            blocks: prompt.hashes,
            opening: prompt.opening,
            prompt_bytes: prompt.prompt_bytes,
            prompt_tokens: token_ids.unwrap_or_else(|| ratios.tokens(model.as_deref(), prompt.prompt_bytes)),
            token_ids,
            answer,
            model,
            precedence,
        })
    }
}

/// Whether a body that was not understood is JSON in another encoding, which engines read: with a byte order mark, or in two or four bytes a character. What
/// a client may not say would pass in it.
fn is_json_otherwise(headers: &HeaderMap, body: &Payload) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(|kind| kind.as_bytes().to_ascii_lowercase());
    let may_be_json = kind.is_none_or(|kind| memchr::memmem::find(&kind, b"json").is_some());
    let first: Vec<u8> = body.pieces().iter().flat_map(|piece| piece.iter().copied()).take(4).collect();
    may_be_json
        && (first.contains(&0)
            || [&b"\xef\xbb\xbf"[..], b"\xfe\xff", b"\xff\xfe"].iter().any(|mark| first.starts_with(mark)))
}

/// The next piece of `body`. The timer is started only if there is something to wait for, and not again after that.
async fn next_piece<B>(
    body: &mut B,
    timer: &mut Option<Pin<Box<Sleep>>>,
    limit: Duration,
) -> Result<Option<Bytes>, RequestError>
where
    B: RequestBody,
{
    loop {
        let frame = poll_fn(|cx| {
            if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) {
                return Poll::Ready(Ok(frame));
            }
            let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
            timer.as_mut().poll(cx).map(|()| Err(RequestError::BodyTimeout { limit }))
        });
        match frame.await? {
            None => return Ok(None),
            Some(Err(error)) => return Err(RequestError::BodyBroken(error.into())),
            Some(Ok(frame)) => {
                if let Ok(piece) = frame.into_data() {
                    return Ok(Some(piece));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::VecDeque;
    use std::convert::Infallible;
    use std::rc::Rc;
    use std::task::Context;

    use http::Request;
    use http_body::Frame;
    use router_core::PromptUse;

    use super::*;
    use crate::stages::admit::Admission;

    fn parser(max_bytes: usize, timeout: Duration) -> Parser {
        parser_with(&BodyMemory::new(usize::MAX, usize::MAX), max_bytes, timeout)
    }

    fn parser_with(memory: &Arc<BodyMemory>, max_bytes: usize, timeout: Duration) -> Parser {
        let scan = ScanConfig { seed: 1, prompt_use: PromptUse::Whole };
        let limits = BodyLimits { max_bytes, memory: Arc::clone(memory), timeout };
        let precedence = PrecedenceHeaders {
            priority: HeaderName::from_static("x-request-priority"),
            tenant: HeaderName::from_static("x-tenant-id"),
        };
        Parser::new((scan, Aliases::default()), HeaderName::from_static("x-session-id"), precedence, limits)
    }

    fn read(body: &str, headers: &HeaderMap) -> Reading {
        let parser = parser(0, Duration::ZERO);
        parser
            .read(headers, &Bytes::copy_from_slice(body.as_bytes()), (&TokenRatios::default(), |_| true))
            .unwrap()
    }

    /// A body of these pieces; `None` is one that never comes.
    struct Pieces(VecDeque<Option<Bytes>>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.pop_front() {
                Some(None) => {
                    self.0.push_front(None);
                    Poll::Pending
                }
                piece => Poll::Ready(piece.flatten().map(|piece| Ok(Frame::data(piece)))),
            }
        }
    }

    fn pieces(pieces: &[Option<&str>]) -> Pieces {
        Pieces(
            pieces.iter().map(|piece| piece.map(|piece| Bytes::copy_from_slice(piece.as_bytes()))).collect(),
        )
    }

    async fn parse(
        parser: &Parser,
        pieces_of_it: &[Option<&str>],
        understanding: Understanding,
    ) -> Result<Parsed, RequestError> {
        let admission = Admission::new(1, 0, Duration::ZERO);
        let admitted = admission.admit(Request::new(pieces(pieces_of_it))).await.unwrap();
        parser.parse(admitted, understanding, (&TokenRatios::default(), |_| true)).await
    }

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn thousands_of_members_are_refused_wherever_they_go() {
        let body = format!("{{{}\"model\":\"m\"}}", "\"\":0,".repeat(5_000));
        let parser = parser(1 << 20, MINUTE);
        for understanding in [Understanding::Required, Understanding::BestEffort] {
            let parsed = parse(&parser, &[Some(&body)], understanding).await;
            assert!(matches!(parsed, Err(RequestError::TooManyMembers { most: 4_096 })));
        }
    }

    #[tokio::test]
    async fn reads_a_body_while_it_comes() {
        let parser = parser(1_000, MINUTE);
        let parsed = parse(
            &parser,
            &[Some("{\"mod"), Some(""), Some("el\": \"m\", \"prompt\": \"a"), Some("bc\"}")],
            Understanding::Required,
        );
        let parsed = parsed.await.unwrap();
        assert_eq!(&parsed.body.joined()[..], b"{\"model\": \"m\", \"prompt\": \"abc\"}");
        assert_eq!((parsed.reading.model.as_deref(), parsed.reading.prompt_bytes), (Some("m"), 3));
    }

    #[tokio::test]
    async fn a_body_that_is_not_json_is_an_error_only_where_it_must_be_understood() {
        let (parser, pieces) = (parser(100, MINUTE), [Some("{\"a\": x"), Some("yz}")]);
        let relayed = parse(&parser, &pieces, Understanding::BestEffort).await.unwrap();
        assert_eq!(&relayed.body.joined()[..], b"{\"a\": xyz}");
        let refused = parse(&parser, &pieces, Understanding::Required).await;
        assert!(matches!(refused, Err(RequestError::BadJson(error)) if error.column == 7));
        let endless = "x".repeat(60);
        let refused = parse(&parser, &[Some(&endless), Some(&endless)], Understanding::Required).await;
        assert!(
            matches!(refused, Err(RequestError::BodyTooLarge { limit_bytes: 100 })),
            "thrown away, but counted"
        );
    }

    #[tokio::test]
    async fn what_computes_no_prompt_has_none_that_a_worker_holds_and_what_generates_nothing_no_answer() {
        let parser = parser(10_000, MINUTE);
        let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "a story ".repeat(100));
        let read = async |path: &str| {
            let mut request = Request::new(pieces(&[Some(&body)]));
            *request.uri_mut() = path.parse().unwrap();
            let admitted = Admission::new(1, 0, Duration::ZERO).admit(request).await.unwrap();
            let parsed =
                parser.parse(admitted, Understanding::BestEffort, (&TokenRatios::default(), |_| true)).await;
            let reading = parsed.unwrap().reading;
            (reading.blocks.len() > 1, reading.prompt_tokens > 100, reading.answer)
        };
        assert_eq!(read("/v1/responses").await, (true, true, Answer::Whole));
        assert_eq!(read("/v1/embeddings").await, (true, true, Answer::Nothing));
        assert_eq!(read("/tokenize").await, (false, false, Answer::Nothing));
    }

    #[tokio::test]
    async fn json_in_another_encoding_is_refused_wherever_it_goes() {
        let parser = parser(1_000, MINUTE);
        let text = r#"{"kv_transfer_params":{}}"#;
        let utf_16: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let marked = [b"\xef\xbb\xbf", text.as_bytes()].concat();
        for (body, kind, is_refused) in [
            (&utf_16, None, true),
            (&marked, Some("application/json"), true),
            (&utf_16, Some("audio/mpeg"), false),
            (&b"{broken".to_vec(), None, false),
        ] {
            let body = Pieces([Some(Bytes::from(body.clone()))].into());
            let mut request = Request::new(body);
            if let Some(kind) = kind {
                request.headers_mut().insert(CONTENT_TYPE, kind.parse().unwrap());
            }
            let admitted = Admission::new(1, 0, Duration::ZERO).admit(request).await.unwrap();
            let parsed =
                parser.parse(admitted, Understanding::BestEffort, (&TokenRatios::default(), |_| true)).await;
            assert_eq!(parsed.is_err(), is_refused, "{kind:?}");
        }
    }

    #[tokio::test]
    async fn a_form_names_its_model_and_passes_as_it_came() {
        let parser = parser(1_000, MINUTE);
        let form = "--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--\r\n";
        let (one, two) = form.split_at(50);
        let mut request = Request::new(pieces(&[Some(one), Some(two)]));
        let kind = "multipart/form-data; boundary=b".parse().unwrap();
        request.headers_mut().insert(http::header::CONTENT_TYPE, kind);
        let admitted = Admission::new(1, 0, Duration::ZERO).admit(request).await.unwrap();
        let parsed = parser
            .parse(admitted, Understanding::BestEffort, (&TokenRatios::default(), |_| true))
            .await
            .unwrap();
        assert_eq!(&parsed.body.joined()[..], form.as_bytes());
        assert_eq!(
            (parsed.reading.model.as_deref(), parsed.reading.extent),
            (Some("whisper"), Extent::Whole)
        );
    }

    #[tokio::test]
    async fn bodies_have_a_common_bound_that_those_thrown_away_do_not_count_for() {
        let memory = BodyMemory::new(50, 50);
        let parser = parser_with(&memory, 1_000, MINUTE);
        let forty = format!("{:40}", "{}");
        let first = parse(&parser, &[Some(&forty)], Understanding::Required).await.unwrap();
        let refused = parse(&parser, &[Some("{      "), Some("      }")], Understanding::Required).await;
        assert!(matches!(refused, Err(RequestError::BodyMemoryFull(full)) if full.limit_bytes == 50));
        assert_eq!(memory.held_bytes(), 40);
        let garbage = parse(&parser, &[Some("xxxxxxxx"), Some("xxxxxxxx")], Understanding::Required).await;
        assert!(matches!(garbage, Err(RequestError::BadJson(_))));
        drop(first);
        assert_eq!(memory.held_bytes(), 0);
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_given_up() {
        let parser = parser(100, Duration::from_millis(10));
        let refused = parse(&parser, &[Some("{"), None], Understanding::BestEffort).await;
        assert!(matches!(refused, Err(RequestError::BodyTimeout { .. })));
        let in_time = parse(&parser, &[Some("{}")], Understanding::BestEffort).await;
        assert!(in_time.is_ok());
    }

    #[tokio::test]
    async fn a_long_body_lets_others_have_their_turns() {
        let parser = parser(usize::MAX, MINUTE);
        let body = format!("{{\"prompt\": \"{}\"}}", "a".repeat(20 * turns::TURN_BYTES));
        let turns = Rc::new(Cell::new(0));
        let others = async {
            loop {
                turns.set(turns.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        let pieces = [Some(&*body)];
        tokio::select! {
            parsed = parse(&parser, &pieces, Understanding::Required) => assert!(parsed.is_ok()),
            () = others => {}
        }
        assert!(turns.get() >= 20, "{}", turns.get());
    }

    #[test]
    fn the_session_is_the_header_or_else_the_user() {
        let mut headers = HeaderMap::new();
        let by_user = read(r#"{"user": "ann"}"#, &headers);
        assert_eq!(by_user.session, read(r#"{"user": "ann", "model": "m"}"#, &headers).session);
        headers.insert("x-session-id", "7".parse().unwrap());
        let by_header = read(r#"{"user": "ann"}"#, &headers);
        assert_ne!(by_header.session, by_user.session);
        assert_eq!(by_header.session, read("{}", &headers).session);
        assert_eq!(read("{}", &HeaderMap::new()).session, None);
    }
}
