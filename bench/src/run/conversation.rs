//! The turns of one conversation: each a request that carries what was really said before it.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use bytes::Bytes;
use indicatif::ProgressBar;

use crate::args::Api;
use crate::arrivals::split_delay;
use crate::body::{self, BodyWriter, Message};
use crate::client::Client;
use crate::client::exchange::Call;
use crate::dataset::{Content, Conversation, Dataset, Turn};
use crate::record::RequestRecord;

/// Everything that conversations share.
#[derive(Debug)]
pub struct Workload {
    /// The connections.
    pub client: Client,
    /// The bodies.
    pub writer: BodyWriter,
    /// The endpoint of made prompts; recorded bodies bring their own.
    pub api: Api,
    /// What to say.
    pub dataset: Dataset,
    /// Pause before each later turn.
    pub turn_delay: Duration,
    /// `--send-session-id`.
    pub sends_session_id: bool,
    /// One step a request.
    pub progress: ProgressBar,
}

/// Which conversation, and when it was to start. Offsets are from `run_start`.
#[derive(Debug, Clone, Copy)]
pub struct Due {
    /// Index in the dataset.
    pub index: usize,
    /// Zero of all offsets.
    pub run_start: Instant,
    /// Its place in the schedule.
    pub scheduled: Duration,
    /// When the concurrency limit last opened for the line it stood in.
    pub blocked_until: Duration,
}

impl Workload {
    /// Sends all turns, one after another. After a failure the later turns cannot be sent and fail with it.
    pub async fn converse(&self, due: Due) -> Vec<RequestRecord> {
        let conversation = &self.dataset.conversations[due.index];
        let mut history = History::new(self.api, conversation);
        let mut records: Vec<RequestRecord> = Vec::with_capacity(conversation.turns.len());
        let mut planned = due.scheduled;
        for (number, turn) in conversation.turns.iter().enumerate() {
            if number > 0 && !self.turn_delay.is_zero() {
                tokio::time::sleep_until((due.run_start + planned).into()).await;
            }
            let (mut record, said) = self.say(&history, turn, due).await;
            let delay = match number {
                0 => split_delay(due.scheduled, due.blocked_until, record.start),
                _ => split_delay(planned, Duration::ZERO, record.start),
            };
            (record.turn, record.queued, record.late) = (number, delay.queued, delay.late);
            self.progress.inc(1);
            planned = due.run_start.elapsed() + self.turn_delay;
            let failed = !record.is_success();
            if number + 1 < conversation.turns.len() {
                history.hear(said, &record);
            }
            records.push(record);
            if failed {
                records.extend(unsent(due.index, number + 1, conversation.turns.len()));
                break;
            }
        }
        records
    }

    /// Sends a turn; what came of it, and the words of the turn.
    async fn say<'a>(
        &'a self,
        history: &History<'a>,
        turn: &'a Turn,
        due: Due,
    ) -> (RequestRecord, Option<Cow<'a, str>>) {
        let said = self.dataset.text(&turn.content);
        let (api, body) = history.body(&self.writer, turn, said.as_deref(), turn.output_tokens);
        let asked_for = match &turn.content {
            Content::Body(body, _) => body::output_length(body),
            Content::Text(_) | Content::Made(_) => turn.output_tokens,
        };
        let session = self.sends_session_id.then_some(due.index);
        let call = Call { api, body, streaming: self.writer.streaming(), session };
        let exchange = self.client.generate(call).await;
        let record = RequestRecord {
            session: due.index,
            start: exchange.start - due.run_start,
            response: exchange.response,
            requested_output_tokens: self.writer.requested_output_tokens(asked_for),
            failure: exchange.failure.map(|error| with_causes(&error)),
            dataset_input_tokens: history.tokens() + turn.content.tokens(),
            ..RequestRecord::default()
        };
        (record, said)
    }
}

/// Records of the turns from `first` on, which were never sent.
fn unsent(session: usize, first: usize, turns: usize) -> impl Iterator<Item = RequestRecord> {
    (first..turns).map(move |turn| RequestRecord {
        session,
        turn,
        failure: Some("not sent: an earlier turn of the conversation failed".to_owned()),
        ..RequestRecord::default()
    })
}

/// An error and what caused it, in one line.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// What was said so far, in the shape of the endpoint.
enum History<'a> {
    Chat { messages: Vec<Message<'a>>, tokens: u64 },
    Completions { text: String, tokens: u64 },
}

impl<'a> History<'a> {
    fn new(api: Api, conversation: &'a Conversation) -> Self {
        let system = conversation.system.as_ref();
        let tokens = system.map_or(0, |system| system.tokens);
        match api {
            Api::Chat => {
                let message = |text: &'a str| Message { role: "system", content: Cow::Borrowed(text) };
                Self::Chat {
                    messages: system.map(|system| message(&system.text)).into_iter().collect(),
                    tokens,
                }
            }
            Api::Completions => {
                Self::Completions { text: system.map_or_else(String::new, |s| s.text.clone()), tokens }
            }
        }
    }

    /// The next request.
    fn body(
        &self,
        writer: &BodyWriter,
        turn: &Turn,
        said: Option<&str>,
        output_tokens: Option<u64>,
    ) -> (Api, Bytes) {
        let said = said.unwrap_or_default();
        match (&turn.content, self) {
            (Content::Body(recorded, _), _) => {
                let api =
                    body::api_of(recorded).expect("the dataset refuses bodies without messages or prompt");
                (api, writer.recorded(recorded, output_tokens))
            }
            (_, Self::Chat { messages, .. }) => {
                let next = Message { role: "user", content: Cow::Borrowed(said) };
                let messages: Vec<_> = messages.iter().map(Message::borrowed).chain([next]).collect();
                (Api::Chat, writer.chat(&messages, output_tokens))
            }
            (_, Self::Completions { text, .. }) => {
                (Api::Completions, writer.completion(&follow(text, said), output_tokens))
            }
        }
    }

    /// Tokens of all that was said so far.
    fn tokens(&self) -> u64 {
        let (Self::Chat { tokens, .. } | Self::Completions { tokens, .. }) = self;
        *tokens
    }

    /// Takes in what was said and answered.
    fn hear(&mut self, said: Option<Cow<'a, str>>, record: &RequestRecord) {
        let (Self::Chat { tokens, .. } | Self::Completions { tokens, .. }) = self;
        *tokens = record.dataset_input_tokens + record.output_tokens();
        let Some(said) = said else { return };
        match self {
            Self::Chat { messages, .. } => {
                messages.push(Message { role: "user", content: said });
                messages
                    .push(Message { role: "assistant", content: Cow::Owned(record.response.text.clone()) });
            }
            Self::Completions { text, .. } => {
                *text = follow(text, &said).into_owned() + &record.response.text;
            }
        }
    }
}

/// A completion prompt that goes on after an empty line.
fn follow<'t>(before: &str, next: &'t str) -> Cow<'t, str> {
    if before.is_empty() { Cow::Borrowed(next) } else { Cow::Owned(format!("{before}\n\n{next}")) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::{Value, json};

    use super::*;
    use crate::args::{Cli, Command};
    use crate::dataset::Passage;
    use crate::record::{Response, Usage};

    fn passage(text: &str, tokens: u64) -> Passage {
        Passage { text: text.to_owned(), tokens }
    }

    fn conversation() -> Conversation {
        let turn = |text| Turn { content: Content::Text(passage(text, 2)), output_tokens: Some(5) };
        Conversation { system: Some(passage("sys", 1)), turns: vec![turn("q1"), turn("q2")] }
    }

    fn writer() -> BodyWriter {
        let Command::Serve(args) = Cli::try_parse_from(["bench", "serve"]).unwrap().command else {
            panic!("not serve")
        };
        BodyWriter::new(&args, "m")
    }

    fn answer(text: &str) -> RequestRecord {
        let usage = Some(Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: None });
        let response = Response { text: text.to_owned(), usage, ..Response::default() };
        RequestRecord { response, ..RequestRecord::default() }
    }

    fn bodies(api: Api) -> (Vec<Value>, Vec<u64>) {
        let conversation = conversation();
        let mut history = History::new(api, &conversation);
        let mut bodies = Vec::new();
        let mut tokens = Vec::new();
        for turn in &conversation.turns {
            let Content::Text(said) = &turn.content else { panic!("a text") };
            let (_, body) = history.body(&writer(), turn, Some(&said.text), turn.output_tokens);
            bodies.push(serde_json::from_slice(&body).unwrap());
            let mut answer = answer("a1");
            answer.dataset_input_tokens = history.tokens() + turn.content.tokens();
            tokens.push(answer.dataset_input_tokens);
            history.hear(Some(Cow::Borrowed(&said.text)), &answer);
        }
        (bodies, tokens)
    }

    #[test]
    fn later_turns_carry_the_real_replies() {
        let (bodies, tokens) = bodies(Api::Chat);
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        assert_eq!(bodies[0]["messages"], json!([message("system", "sys"), message("user", "q1")]));
        assert_eq!(
            bodies[1]["messages"],
            json!([
                message("system", "sys"),
                message("user", "q1"),
                message("assistant", "a1"),
                message("user", "q2")
            ])
        );
        assert_eq!(tokens, [1 + 2, 1 + 2 + 4 + 2]);
    }

    #[test]
    fn completions_carry_them_as_text() {
        let (bodies, _) = bodies(Api::Completions);
        assert_eq!(bodies[0]["prompt"], "sys\n\nq1");
        assert_eq!(bodies[1]["prompt"], "sys\n\nq1a1\n\nq2");
    }
}
