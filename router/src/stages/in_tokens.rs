//! Asks engines what has to be known before the rest of an answer is asked for: the tokens of a chat, whether a template goes on with a message, whether a chat is
//! what a request in Anthropic's words asks, and who knows a response's message in progress.
//!
//! What they say is [`tokens`](crate::openai::continuation::tokens)'; here is who is asked, and for how long. Used by
//! [`continuing`](super::continuing).

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::ACCEPT_ENCODING;
use http::uri::PathAndQuery;
use http_body_util::{BodyExt, Limited};
use rand::seq::SliceRandom;
use router_core::{Among, Decider, Worker, WorkerSlot};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::parse::Reading;
use crate::app::App;
use crate::fleet::Upstream;
use crate::openai::continuation::given::Given;
use crate::openai::continuation::messages::request::{self as messages, Form};
use crate::openai::continuation::responses::request as responses;
use crate::openai::continuation::seam::Seam;
use crate::openai::continuation::tokens::{
    InTokens, MARKS, Marks, Next, Teller, Tokens, chat_question, marks_question, rest_behind_the_opening,
    text_question, written,
};
use crate::openai::members::{Members, Others};
use crate::payload::Payload;
use crate::probes::ask;
use crate::templates::Messages;
use crate::transport::WorkerRequest;

/// How many engines are asked, one after the other.
const MOST_ASKED: usize = 3;
/// And of how many they are drawn.
const MOST_DRAWN: usize = 8;
/// How long one has for all that it is asked: some milliseconds are needed.
pub(super) const ASKED_FOR: Duration = Duration::from_secs(5);
/// And all of them together, where it is asked how messages are written: the stream stands still meanwhile, and most go on.
pub(super) const MESSAGES_ASKED_FOR: Duration = Duration::from_secs(1);
/// How many tokens at the end of a text are compared: a template may end a turn with one that texts end with as well, such as a line's end.
const COMPARED_TOKENS: usize = 3;
/// Of an answer: a million tokens and more.
const MOST_BYTES: usize = 16 << 20;
/// Of a request in Anthropic's words, which is read whole for this: the longest contexts have some 4 MB.
const MOST_PARSED_BYTES: usize = 16 << 20;

/// Models whose answers stand behind a mark, or in a format of their own, by what they are called in their configurations (SGLang 0.5.23,
/// `parser/reasoning_parser.py`).
const BEHIND_A_MARK: [&str; 7] =
    ["gpt_oss", "kimi_k3", "cohere", "muse", "inkling", "deepseek_v4", "apertus"];

/// A mark of OpenAI's open models, which is one token of theirs.
const HARMONY: &str = "<|channel|>";
/// The version of vLLM that has been seen to go on with messages of responses.
const GOES_ON_SINCE: (u32, u32) = (0, 32);

const MODEL_INFO: PathAndQuery = PathAndQuery::from_static("/model_info");
const TOKENIZE: PathAndQuery = PathAndQuery::from_static("/tokenize");
const VERSION: PathAndQuery = PathAndQuery::from_static("/version");
const COUNT_TOKENS: PathAndQuery = PathAndQuery::from_static("/v1/messages/count_tokens");
const COMPLETIONS: PathAndQuery = PathAndQuery::from_static("/v1/completions");

/// What is asked for the rest of `given`, how that follows on it, and of whose engines; `None` if nobody tells by `deadline`, or it cannot be told so.
pub(super) async fn rest(
    app: &App,
    asked: Asked<'_>,
    (reading, among): (&Reading, Among<'_>),
    deadline: Instant,
) -> Option<(WorkerRequest, Seam, Teller)> {
    let (request, body, given) = asked;
    let next = Next::after(given, body)?;
    for (upstream, teller) in engines(app, reading, among, &[Teller::Vllm, Teller::Sglang]) {
        let engine = Engine { upstream: &upstream, teller, request };
        let told = within(deadline, engine.rest((given, next), body)).await;
        if let Some((path, body, seam)) = told {
            return Some((WorkerRequest { path, body, ..request.clone() }, seam, teller));
        }
    }
    None
}

/// How the messages of a chat's model are written, as what has been `given` of this answer shows; and remembers it, if it shows it.
pub(super) async fn messages(
    app: &App,
    (request, body, given): Asked<'_>,
    (reading, among): (&Reading, Among<'_>),
    deadline: Instant,
) -> Messages {
    let deadline = deadline.min(Instant::now() + MESSAGES_ASKED_FOR);
    let (mut messages, mut is_sure) = (Messages::Untold, true);
    // Of the same model vLLM may end messages that SGLang goes on with.
    let vllms = engines(app, reading, among, &[Teller::Vllm]);
    for (upstream, teller) in vllms.into_iter().chain(engines(app, reading, among, &[Teller::Sglang])) {
        let engine = Engine { upstream: &upstream, teller, request };
        let told = async {
            match teller {
                Teller::Vllm => engine.messages(given, body).await,
                Teller::Sglang => engine.answers_stand_alone().await.map(|alone| match alone {
                    true => (Messages::GoOn, true),
                    false => (Messages::End, true),
                }),
            }
        };
        if let Some(told) = within(deadline, told).await {
            (messages, is_sure) = told;
            break;
        }
    }
    if is_sure {
        app.templates.note(reading.model.as_deref().unwrap_or_default(), messages, app.now());
    }
    messages
}

/// The chat that a request in Anthropic's words is.
pub(super) struct AsChat {
    /// What is asked for in it.
    pub body: Payload,
    /// By whose engines.
    pub teller: Teller,
    /// What ends its answer.
    pub stop_sequences: Vec<String>,
}

/// The chat that an engine makes of a request in Anthropic's words; `None` if no engine says by `deadline` that it is that.
pub(super) async fn as_chat(
    app: &App,
    (request, members, given): Asked<'_>,
    (reading, among, but): (&Reading, Among<'_>, Option<WorkerSlot>),
    deadline: Instant,
) -> Option<AsChat> {
    let body = request.body.clone();
    if body.len() > MOST_PARSED_BYTES {
        return None;
    }
    // Others of this thread do not wait for it.
    let body = tokio::task::spawn_blocking(move || serde_json::from_slice::<Value>(&body.joined()).ok());
    let body = Arc::new(body.await.ok()??);
    let mut engines = engines(app, reading, among, &[Teller::Vllm, Teller::Sglang]);
    engines.retain(|(upstream, _)| Some(upstream.worker.slot) != but);
    for (upstream, teller) in engines {
        // What is left of a thought's measure nobody else knows.
        if given.text().is_empty() && messages::counts_thoughts(&body, teller) {
            continue;
        }
        let engine = Engine { upstream: &upstream, teller, request };
        if let Some(chat) = within(deadline, engine.as_chat(&body, members)).await {
            let stop_sequences = messages::stop_sequences(&body);
            return Some(AsChat { body: chat, teller, stop_sequences });
        }
    }
    None
}

/// Engines of vLLM that know a message in progress, of some that are asked, but for one of them.
pub(super) async fn who_responds(
    app: &App,
    (request, ..): Asked<'_>,
    (reading, among, but): (&Reading, Among<'_>, Option<WorkerSlot>),
    deadline: Instant,
) -> Vec<(Arc<Upstream>, Teller)> {
    let mut who = Vec::new();
    for (upstream, teller) in engines(app, reading, among, &[Teller::Vllm]) {
        let engine = Engine { upstream: &upstream, teller, request };
        if Some(upstream.worker.slot) != but
            && within(deadline, engine.version()).await >= Some(GOES_ON_SINCE)
        {
            who.push((upstream, teller));
        }
    }
    who
}

/// Whether one of these engines goes on with the message that has been `given` of a response.
pub(super) async fn response_goes_on(
    (request, body, given): Asked<'_>,
    who: &[(Arc<Upstream>, Teller)],
    deadline: Instant,
) -> Messages {
    let chat = Payload::from(Bytes::from(responses::short_chat(body).to_string()));
    let Some(chat) = Members::of(&chat).await else { return Messages::Untold };
    for (upstream, teller) in who {
        let engine = Engine { upstream, teller: *teller, request };
        if let Some(told) = within(deadline, engine.response_goes_on(given, &chat)).await {
            return told;
        }
    }
    Messages::Untold
}

/// A request, what it is made of, and what has been given in answer.
pub(super) type Asked<'a> = (&'a WorkerRequest, &'a Members, &'a Given);

/// Who is asked, one after the other: any of those with little to do, since who has least is the same for all whose worker has died.
fn engines(
    app: &App,
    reading: &Reading,
    among: Among<'_>,
    tellers: &[Teller],
) -> Vec<(Arc<Upstream>, Teller)> {
    let roster = app.fleet.roster();
    let may = |worker: &Arc<Worker>| {
        let is_tried = matches!(among, Among::Untried(tried) if tried.contains(&worker.slot));
        let tells = |upstream: Arc<Upstream>| {
            upstream.owner(Teller::of).is_some_and(|teller| tellers.contains(&teller))
        };
        !is_tried && roster.upstream(worker).is_some_and(tells)
    };
    let most = (MOST_DRAWN, app.now());
    let mut workers = Decider::least_busy(&roster.snapshot, &reading.view(), may, most);
    workers.shuffle(&mut rand::rng());
    let upstreams = workers.iter().take(MOST_ASKED).filter_map(|worker| roster.upstream(worker));
    upstreams.filter_map(|upstream| upstream.owner(Teller::of).map(|teller| (upstream, teller))).collect()
}

/// What an engine counts of a request in Anthropic's words.
#[derive(Deserialize)]
struct Counted {
    input_tokens: usize,
}

/// What an engine says of itself.
#[derive(Deserialize)]
struct Version {
    version: String,
}

/// The first two numbers of a version.
fn numbers_of(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Whether a chat ends with a text. Its first token may be another one there, behind what is before it.
fn tokens_end_alike(chat: &[u32], text: &[u32]) -> bool {
    let count = COMPARED_TOKENS.min(text.len().saturating_sub(1)).max(1);
    text.len() >= count && chat.ends_with(&text[text.len() - count..])
}

/// What is told before `deadline`, and before one engine's time is over.
async fn within<T>(deadline: Instant, told: impl Future<Output = Option<T>>) -> Option<T> {
    timeout_at(deadline.min(Instant::now() + ASKED_FOR), told).await.ok().flatten()
}

/// An engine that is asked on behalf of a request.
struct Engine<'a> {
    upstream: &'a Upstream,
    teller: Teller,
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
        let chat = self.ask(chat_question(self.teller, body, None)?);
        if self.teller == Teller::Sglang {
            if self.answers_stand_alone().await == Some(false) {
                return None;
            }
            let (body, seam) = rest_behind_the_opening(&chat.await?, given, (marks, around), body)?;
            return Some((self.request.path.clone(), body, seam));
        }
        let text = written(given, around)?;
        let (chat, written) = tokio::join!(chat, self.ask(text_question(body, &text)));
        let in_tokens = InTokens { chat: &chat?, given: &written?.tokens, marks };
        if next == Next::AnswerOrCalls {
            let told = self.ask(chat_question(self.teller, body, Some(given))?).await?;
            let (body, seam) = in_tokens.rest_in_messages(&told, given, body)?;
            return Some((self.request.path.clone(), body, seam));
        }
        let (body, seam) = in_tokens.rest((given, next), body)?;
        Some((COMPLETIONS, body, seam))
    }

    /// Whether the chat with what has been given ends where that ends, and whether so much was given that another answer would show the same. Some templates leave out
    /// white space at its end.
    async fn messages(&self, given: &Given, body: &Members) -> Option<(Messages, bool)> {
        let text = written(given, MARKS[0])?;
        let told = self.ask(chat_question(self.teller, body, Some(given))?);
        let (told, written) = tokio::join!(told, self.ask(text_question(body, &text)));
        let (told, written) = (told?.tokens, written?.tokens);
        let mut ends_alike = tokens_end_alike(&told, &written);
        let trimmed = text.trim_end();
        if !ends_alike && trimmed.len() < text.len() && !trimmed.is_empty() {
            ends_alike = tokens_end_alike(&told, &self.ask(text_question(body, trimmed)).await?.tokens);
        }
        let messages = if ends_alike { Messages::GoOn } else { Messages::End };
        let is_sure = written.len() > COMPARED_TOKENS && !trimmed.is_empty();
        // One token may be another one behind a chat.
        let is_told = ends_alike || written.len() > 1 && !trimmed.is_empty();
        Some(if is_told { (messages, is_sure) } else { (Messages::Untold, false) })
    }

    /// Of SGLang, which puts what has been given right behind the opening of an answer: whether the model's answers stand there, with no mark before them
    /// that clients do not see.
    async fn answers_stand_alone(&self) -> Option<bool> {
        let told = ask(&*self.upstream.transport, MODEL_INFO).await?;
        let told: Value = serde_json::from_slice(&told).ok()?;
        let kind = told.get("model_type")?.as_str()?;
        Some(!BEHIND_A_MARK.iter().any(|marked| kind.starts_with(marked)))
    }

    /// What the model has around its thoughts.
    async fn marks(&self, body: &Members) -> Option<(Marks, (&'static str, &'static str))> {
        for (begin, end) in MARKS {
            let told = self.ask(marks_question(body, (begin, end))).await?;
            if let Some(marks) = Marks::of(&told.tokens) {
                return Some((marks, (begin, end)));
            }
        }
        None
    }

    /// The chat that this engine makes of `body`, which has these members: as many tokens as it counts.
    async fn as_chat(&self, body: &Arc<Value>, members: &Members) -> Option<Payload> {
        let ways: &[bool] = if messages::has_instructions_within(body) { &[false, true] } else { &[false] };
        let mut chats = Vec::new();
        for &merges_instructions in ways {
            let form = Form { teller: self.teller, merges_instructions };
            let body = Arc::clone(body);
            let chat = move || messages::as_chat(&body, form).map(|chat| chat.to_string());
            chats.push(Payload::from(Bytes::from(tokio::task::spawn_blocking(chat).await.ok()??)));
        }
        let counted = members.with_others("", Others::Only(&messages::IN_COUNT));
        let Counted { input_tokens } = self.ask_at(COUNT_TOKENS, counted).await?;
        for chat in chats {
            let question = chat_question(self.teller, &Members::of(&chat).await?, None)?;
            let told = self.ask(question).await;
            if told.is_some_and(|told| told.tokens.len() == input_tokens) {
                return Some(chat);
            }
        }
        None
    }

    /// Its version, as far as that is compared.
    async fn version(&self) -> Option<(u32, u32)> {
        let told = ask(&*self.upstream.transport, VERSION).await?;
        let Version { version } = serde_json::from_slice(&told).ok()?;
        numbers_of(&version)
    }

    /// Whether a template as that of `chat` goes on with the message that has been `given`; `None` if so little of it has that nothing shows.
    async fn response_goes_on(&self, given: &Given, chat: &Members) -> Option<Messages> {
        // What its models of this mark are asked is written by other code, which knows no message in progress.
        if self.ask(text_question(chat, HARMONY)).await?.tokens.len() == 1 {
            return Some(Messages::End);
        }
        if given.thought().is_none() {
            return self
                .messages(given, chat)
                .await
                .and_then(|(messages, is_sure)| is_sure.then_some(messages));
        }
        let (marks, around) = self.marks(chat).await?;
        let asked = chat_question(self.teller, chat, None)?;
        let with_given = chat_question(self.teller, chat, Some(given))?;
        let text = written(given, around)?;
        let (asked, told, text) =
            tokio::join!(self.ask(asked), self.ask(with_given), self.ask(text_question(chat, &text)));
        let in_tokens = InTokens { chat: &asked?, given: &text?.tokens, marks: Some(marks) };
        let goes_on = in_tokens.rest_in_messages(&told?, given, chat).is_some();
        Some(if goes_on { Messages::GoOn } else { Messages::End })
    }

    async fn ask(&self, body: Payload) -> Option<Tokens> {
        self.ask_at(TOKENIZE, body).await
    }

    async fn ask_at<T: DeserializeOwned>(&self, path: PathAndQuery, body: Payload) -> Option<T> {
        let mut question = WorkerRequest { path, body, ..self.request.clone() };
        question.headers.remove(ACCEPT_ENCODING);
        let response = self.upstream.transport.send(&question).await.ok()?;
        if !response.status().is_success() {
            return None;
        }
        let answer = Limited::new(response.into_body(), MOST_BYTES).collect().await.ok()?;
        serde_json::from_slice(&answer.to_bytes()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::{numbers_of, tokens_end_alike};

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (version, numbers) in [
            ("0.32.0", Some((0, 32))),
            ("0.32.1rc2.dev1+cpu", Some((0, 32))),
            ("1.100", Some((1, 100))),
            ("0", None),
            ("dev", None),
        ] {
            assert_eq!(numbers_of(version), numbers, "{version}");
        }
    }

    #[test]
    fn a_chat_ends_with_a_text_if_its_last_tokens_are_the_texts() {
        for (chat, text, is_alike) in [
            (&[9, 8, 1, 2, 3, 4][..], &[1, 2, 3, 4][..], true),
            // Its first token is another one behind a chat.
            (&[9, 8, 7, 2], &[1, 2], true),
            (&[9, 8, 7], &[7], true),
            (&[9, 8, 7], &[6], false),
            // The turn ends with what the text ends with as well.
            (&[9, 1, 2, 3, 5, 3], &[1, 2, 3], false),
            (&[9, 1, 2, 3, 4, 0], &[1, 2, 3, 4], false),
            (&[9], &[], false),
            (&[3], &[1, 2, 3], false),
        ] {
            assert_eq!(tokens_end_alike(chat, text), is_alike, "{chat:?} {text:?}");
        }
    }
}
