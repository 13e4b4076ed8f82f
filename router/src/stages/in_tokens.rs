//! Asks an engine for the tokens in which the rest of a chat's answer can be asked for.
//!
//! What they say is [`tokens`](crate::openai::continuation::tokens)'; here is who is asked, and for how long. Used by
//! [`continuing`](super::continuing).

use std::time::Duration;

use http::header::ACCEPT_ENCODING;
use http::uri::PathAndQuery;
use http_body_util::{BodyExt, Limited};
use router_core::{Among, Decider, Worker};
use tokio::time::timeout;

use super::parse::Reading;
use crate::app::App;
use crate::fleet::Upstream;
use crate::openai::continuation::given::Given;
use crate::openai::continuation::seam::Seam;
use crate::openai::continuation::tokens::{
    InTokens, MARKS, Marks, Next, Tokens, chat_question, text_question, written,
};
use crate::openai::members::Members;
use crate::payload::Payload;
use crate::transport::WorkerRequest;

/// Who says of their models that they are theirs, tells tokens as this asks for them.
pub(super) const TELL_TOKENS: &str = "vllm";

/// How many engines are asked, one after the other.
const MOST_ASKED: usize = 3;
/// How long one has for all that it is asked: some milliseconds are needed.
const ASKED_FOR: Duration = Duration::from_secs(5);
/// Of an answer: a million tokens and more.
const MOST_BYTES: usize = 16 << 20;

const TOKENIZE: PathAndQuery = PathAndQuery::from_static("/tokenize");
const COMPLETIONS: PathAndQuery = PathAndQuery::from_static("/v1/completions");

/// What is asked for the rest of `given`, and how that follows on it; `None` if nobody tells, or it cannot be told in tokens.
pub(super) async fn rest(
    app: &App,
    (request, body, given): (&WorkerRequest, &Members, &Given),
    (reading, among): (&Reading, Among<'_>),
) -> Option<(WorkerRequest, Seam)> {
    let next = Next::after(given, body)?;
    let roster = app.fleet.roster();
    let may = |worker: &Worker| match among {
        Among::Untried(tried) => !tried.contains(&worker.slot),
        _ => true,
    };
    let workers = Decider::least_busy(&roster.snapshot, &reading.view(), may, (MOST_ASKED, app.now()));
    for upstream in workers.iter().filter_map(|worker| roster.upstream(worker)) {
        let engine = Engine { upstream: &upstream, request };
        if let Ok(Some((path, body, seam))) = timeout(ASKED_FOR, engine.rest((given, next), body)).await {
            return Some((WorkerRequest { path, body, ..request.clone() }, seam));
        }
    }
    None
}

/// An engine that is asked on behalf of a request.
struct Engine<'a> {
    upstream: &'a Upstream,
    request: &'a WorkerRequest,
}

impl Engine<'_> {
    /// Where the rest is asked for and what with, and how it follows.
    async fn rest(
        &self,
        (given, next): (&Given, Next),
        body: &Members,
    ) -> Option<(PathAndQuery, Payload, Seam)> {
        let (marks, around) = match given.thought() {
            Some(_) => self.marks(body).await.map(|(marks, around)| (Some(marks), around))?,
            None => (None, MARKS[0]),
        };
        let text = written(given, around)?;
        let chat = self.ask(chat_question(body, None)?);
        let (chat, written) = tokio::join!(chat, self.ask(text_question(body, &text)));
        let in_tokens = InTokens { chat: &chat?, given: &written?.tokens, marks };
        if next == Next::AnswerOrCalls {
            let told = self.ask(chat_question(body, Some(given))?).await?;
            let (body, seam) = in_tokens.rest_in_messages(&told, given, body)?;
            return Some((self.request.path.clone(), body, seam));
        }
        let (body, seam) = in_tokens.rest((given, next), body)?;
        Some((COMPLETIONS, body, seam))
    }

    /// What the model has around its thoughts.
    async fn marks(&self, body: &Members) -> Option<(Marks, (&'static str, &'static str))> {
        for (begin, end) in MARKS {
            let told = self.ask(text_question(body, &format!("{begin}{end}"))).await?;
            if let Some(marks) = Marks::of(&told.tokens) {
                return Some((marks, (begin, end)));
            }
        }
        None
    }

    async fn ask(&self, body: Payload) -> Option<Tokens> {
        let mut question = WorkerRequest { path: TOKENIZE, body, ..self.request.clone() };
        question.headers.remove(ACCEPT_ENCODING);
        let response = self.upstream.transport.send(&question).await.ok()?;
        if !response.status().is_success() {
            return None;
        }
        let answer = Limited::new(response.into_body(), MOST_BYTES).collect().await.ok()?;
        serde_json::from_slice(&answer.to_bytes()).ok()
    }
}
