//! The rest of an answer, from another worker, made to follow on its beginning: one name, one opening, one usage.

use std::ops::Range;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::Kind;
use super::event::{Piece, Said, ThoughtNames, read};
use super::given::{Given, Part};

/// Changes events of the rest.
#[derive(Debug)]
pub struct Seam {
    id: Option<Box<str>>,
    /// In whose words the rest comes.
    kind: Kind,
    /// The client knows who speaks.
    has_begun: bool,
    /// Tokens that were given before, and are now part of the prompt.
    tokens: u64,
    /// Of them those of a thought, with those that follow.
    thought_tokens: u64,
    /// Tokens of the prompt that was asked first, if they have been counted.
    prompt_tokens: Option<u64>,
    /// Of a chat that is gone on with as a completion.
    completion: Option<Completion>,
    /// What ends the thought in the text that comes, and the names of its pieces.
    thoughts_end: Option<(Box<str>, ThoughtNames)>,
}

/// What a completion is of a chat.
#[derive(Debug)]
struct Completion {
    part: Part,
    /// Of pieces of a thought.
    names: ThoughtNames,
    /// The token behind which the thought is over, and something else is to be asked for.
    end: Option<u32>,
    /// Tokens that it may have yet.
    left: u64,
}

/// What of the rest goes to the client.
#[derive(PartialEq, Eq, Debug)]
pub struct Passed {
    /// Whole events.
    pub events: Bytes,
    /// A thought is over, and with it what was asked for.
    pub thought_is_over: bool,
}

impl Seam {
    /// After what has been `given`, in the same words.
    #[must_use]
    pub fn after(given: &Given) -> Self {
        Self {
            kind: given.kind(),
            id: given.id().map(Box::from),
            has_begun: given.has_begun(),
            tokens: given.pieces() as u64,
            thought_tokens: given.thought_pieces() as u64,
            prompt_tokens: None,
            completion: None,
            thoughts_end: None,
        }
    }

    /// What comes first is the rest of the thought that was `given`, up to that mark.
    pub(super) fn expect_thoughts_end(&mut self, mark: &str, given: &Given) {
        self.thoughts_end = Some((mark.into(), given.thought_names()));
    }

    /// The same, where the prompt has that many tokens.
    pub(super) fn in_messages(given: &Given, prompt_tokens: u64) -> Self {
        Self { prompt_tokens: Some(prompt_tokens), ..Self::after(given) }
    }

    /// A part of a chat's answer that comes as a completion, up to a token if it is a thought.
    pub(super) fn in_tokens(
        given: &Given,
        (part, end): (Part, Option<u32>),
        (prompt_tokens, left): (u64, u64),
    ) -> Self {
        let names = given.thought_names();
        let completion = Completion { part, names, end, left };
        Self {
            kind: Kind::Completions,
            completion: Some(completion),
            ..Self::in_messages(given, prompt_tokens)
        }
    }

    /// Whole events, as they are to go to the client.
    pub fn pass(&mut self, events: &Bytes) -> Passed {
        let mut out = Vec::with_capacity(events.len());
        let mut leaves_out = false;
        for line in events.split_inclusive(|byte| *byte == b'\n') {
            let text = line.trim_ascii_end();
            if text.is_empty() {
                // The empty line after an event that is left out goes with it.
                if !std::mem::take(&mut leaves_out) {
                    out.extend_from_slice(line);
                }
                continue;
            }
            match read(text, self.kind) {
                Some(Said::Piece(_)) if self.completion.is_some() => match self.as_chat(text) {
                    Some(Told { event, thought_is_over }) => {
                        let event = event.map(|event| format!("data: {event}\n"));
                        leaves_out = event.is_none();
                        out.extend_from_slice(event.unwrap_or_default().as_bytes());
                        if thought_is_over {
                            out.extend_from_slice(if leaves_out { b"" } else { b"\n" });
                            return Passed { events: out.into(), thought_is_over };
                        }
                    }
                    None => leaves_out = true,
                },
                Some(Said::Piece(piece))
                    if self.thoughts_end.is_some() && piece.text.is_some_and(|text| !text.is_empty()) =>
                {
                    match self.as_thought(text) {
                        Some(events) => {
                            out.extend_from_slice(events.join("\n").as_bytes());
                            leaves_out = events.is_empty();
                        }
                        None => leaves_out = true,
                    }
                }
                Some(Said::Piece(piece)) => match self.changed(&piece) {
                    Some(changes) => {
                        splice(text, changes, &mut out);
                        out.extend_from_slice(&line[text.len()..]);
                    }
                    None => leaves_out = true,
                },
                _ => out.extend_from_slice(line),
            }
        }
        Passed { events: out.into(), thought_is_over: false }
    }

    /// A completion's event as one of a chat.
    fn as_chat(&mut self, line: &[u8]) -> Option<Told> {
        let completion = self.completion.as_mut()?;
        let mut event: Value = serde_json::from_slice(line.strip_prefix(b"data:")?).ok()?;
        event.as_object()?;
        let mut choices = Vec::new();
        let mut thought_is_over = false;
        if let Some(choice) = event["choices"].get(0) {
            let end = completion.end.filter(|end| choice["stop_reason"] == *end);
            thought_is_over = end.is_some() && choice["finish_reason"] == "stop";
            let delta = completion.delta(choice["text"].as_str()?);
            if completion.part == Part::Thought && !delta.is_empty() {
                self.thought_tokens += 1;
                completion.left = completion.left.saturating_sub(1);
            }
            let mut finish = choice["finish_reason"].clone();
            if thought_is_over && completion.left <= 1 {
                // Its end was the last token that it might have: there is nothing else to be asked for.
                (finish, thought_is_over) = ("length".into(), false);
            } else if thought_is_over {
                finish.take();
            }
            if delta.is_empty() && finish.is_null() {
                return Some(Told { event: None, thought_is_over });
            }
            choices.push(json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}));
        }
        event["choices"] = choices.into();
        event["object"] = "chat.completion.chunk".into();
        if let Some(id) = &self.id {
            event["id"] = serde_json::from_str(id).ok()?;
        }
        if event["usage"].is_object()
            && let Some(whole) = self.usage(&event["usage"].to_string())
        {
            event["usage"] = serde_json::from_str(&whole).ok()?;
        }
        Some(Told { event: Some(event), thought_is_over })
    }

    /// An event whose text is a thought, up to its end: as many events as it takes to tell that, each with its line's end.
    fn as_thought(&mut self, line: &[u8]) -> Option<Vec<String>> {
        let (mark, names) = self.thoughts_end.clone()?;
        let mut event: Value = serde_json::from_slice(line.strip_prefix(b"data:")?).ok()?;
        if let Some(id) = &self.id {
            event["id"] = serde_json::from_str(id).ok()?;
        }
        if let Some(whole) = event["usage"].is_object().then(|| self.usage(&event["usage"].to_string())) {
            event["usage"] = serde_json::from_str(&whole?).ok()?;
        }
        let text = event["choices"][0]["delta"]["content"].take();
        let text = text.as_str()?;
        // The mark is one token, so that no piece has half of it.
        let (thought, answer) = match text.split_once(&*mark) {
            Some((thought, answer)) => {
                self.thoughts_end = None;
                (thought, answer)
            }
            None => (text, ""),
        };
        self.thought_tokens += u64::from(!thought.is_empty());
        let finish = event["choices"][0]["finish_reason"].take();
        let mut deltas = vec![names.delta(thought), answer_delta(answer)];
        deltas.retain(|delta| !delta.is_empty());
        if deltas.is_empty() && !finish.is_null() {
            deltas.push(Map::new());
        }
        let last = deltas.len().saturating_sub(1);
        let told = deltas.into_iter().enumerate().map(|(index, delta)| {
            let choice = &mut event["choices"][0];
            choice["delta"] = delta.into();
            choice["finish_reason"] = if index == last { finish.clone() } else { Value::Null };
            format!("data: {event}\n")
        });
        Some(told.collect())
    }

    /// What of an event is to be another; `None` if the client has it already.
    fn changed(&self, piece: &Piece<'_>) -> Option<Vec<(Range<usize>, String)>> {
        let mut changes = Vec::new();
        if let (Some(id), Some(first)) = (piece.id, &self.id) {
            changes.push((piece.place(id), first.to_string()));
        }
        let says_nothing = piece.text.is_none_or(str::is_empty) && piece.thought.is_none() && !piece.is_last;
        if says_nothing && piece.has_role && self.has_begun {
            return None;
        }
        if let Some(usage) = piece.usage
            && let Some(whole) = self.usage(usage)
        {
            changes.push((piece.place(usage), whole));
        }
        Some(changes)
    }

    /// The usage of the whole answer.
    fn usage(&self, rest: &str) -> Option<String> {
        let mut usage: Value = serde_json::from_str(rest).ok()?;
        usage.as_object()?;
        let of_the_rest = usage["prompt_tokens"].as_u64()?;
        let prompt_tokens = self.prompt_tokens.unwrap_or(of_the_rest.saturating_sub(self.tokens));
        usage["prompt_tokens"] = prompt_tokens.into();
        if let Some(generated) = usage["completion_tokens"].as_u64() {
            usage["completion_tokens"] = (generated + self.tokens).into();
            if usage["total_tokens"].is_u64() {
                usage["total_tokens"] = (prompt_tokens + generated + self.tokens).into();
            }
        }
        if self.thought_tokens > 0 {
            if !usage["completion_tokens_details"].is_object() {
                usage["completion_tokens_details"] = json!({});
            }
            usage["completion_tokens_details"]["reasoning_tokens"] = self.thought_tokens.into();
            // SGLang tells it twice.
            if usage["reasoning_tokens"].is_u64() {
                usage["reasoning_tokens"] = self.thought_tokens.into();
            }
        }
        if usage["prompt_tokens_details"].is_object()
            && let Some(cached) = usage["prompt_tokens_details"]["cached_tokens"].as_u64()
        {
            usage["prompt_tokens_details"]["cached_tokens"] = cached.min(prompt_tokens).into();
        }
        Some(usage.to_string())
    }
}

/// What a completion's event says in a chat.
struct Told {
    /// `None` if nothing.
    event: Option<Value>,
    thought_is_over: bool,
}

impl Completion {
    /// A piece of text as a chat's event has it.
    fn delta(&self, text: &str) -> Map<String, Value> {
        match self.part {
            Part::Answer => answer_delta(text),
            Part::Thought => self.names.delta(text),
        }
    }
}

/// A piece of an answer as a chat's event has it; nothing, if it is empty.
fn answer_delta(text: &str) -> Map<String, Value> {
    let told = (!text.is_empty()).then(|| ("content".to_owned(), Value::from(text)));
    told.into_iter().collect()
}

impl ThoughtNames {
    /// The same of a thought.
    fn delta(self, text: &str) -> Map<String, Value> {
        let names = [("reasoning", self.short), ("reasoning_content", self.long)];
        let told = names.into_iter().filter(|(_, is_told)| *is_told && !text.is_empty());
        told.map(|(name, _)| (name.to_owned(), Value::from(text))).collect()
    }
}

fn splice(line: &[u8], mut changes: Vec<(Range<usize>, String)>, out: &mut Vec<u8>) {
    changes.sort_by_key(|(place, _)| place.start);
    let mut at = 0;
    for (place, new) in changes {
        out.extend_from_slice(&line[at..place.start]);
        out.extend_from_slice(new.as_bytes());
        at = place.end;
    }
    out.extend_from_slice(&line[at..]);
}
