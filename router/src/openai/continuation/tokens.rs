//! The rest of a chat's answer by way of tokens: an engine says which tokens the chat is written in, and those of what has been given follow.
//!
//! So a thought can be gone on with. Templates write messages, and no message ends within a thought; and what an engine tells of thoughts has left
//! out the marks around them. In tokens all of it can be put together again, and is asked for as a completion, which knows neither thoughts nor
//! calls of tools: a thought is asked for up to its end, and the answer behind it for itself; with tools in messages again, if the template
//! writes thoughts.
//!
//! So it is with vLLM. SGLang writes no message that has begun, but puts its text behind the opening of an answer, as it stands: there all that the model
//! has written goes on as a message, a thought as well. Used by `stages/in_tokens.rs`.

use std::fmt::Write as _;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use super::given::{Given, Part};
use super::request::{CONTINUE_FINAL_MESSAGE, LIMITS, left, limits};
use super::seam::Seam;
use crate::openai::members::{Members, Others};
use crate::payload::Payload;

/// What stands around a thought, where each of the two is one token: as most models write it, Seed-OSS, and `MiniMax` M3 (vLLM's
/// `reasoning/` and `parser/`).
pub const MARKS: [(&str, &str); 3] =
    [("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("<mm:think>", "</mm:think>")];

/// Members of a chat that a completion has as well, and that mean the same there.
const IN_COMPLETIONS: [&str; 17] = [
    "model",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "cache_salt",
    "priority",
];

/// Members of a chat that its tokens depend on, but for what is told to its template.
const IN_TOKENS: [&str; 3] = ["model", "messages", "tools"];

/// And to SGLang all that these depend on.
const TO_SGLANGS_TEMPLATE: [&str; 6] =
    ["model", "messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"];

/// What stands before an answer of ERNIE 4.5's, which its engine takes away: where it is one token, what is asked for in tokens is no answer as clients
/// know it (vLLM's `reasoning/ernie45_reasoning_parser.py`).
const BEFORE_ANSWERS: &str = "<response>";

/// A template that begins a thought does so with no more, at the end of the chat: the mark, and a line's end.
const OPENING_TOKENS: usize = 3;

/// What an engine says of a text or a chat.
#[derive(Deserialize, Debug)]
pub struct Tokens {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Tokens of a prompt and its answer together.
    #[serde(default)]
    pub max_model_len: Option<u64>,
}

/// The tokens around a thought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    begin: u32,
    end: u32,
}

impl Marks {
    /// From the tokens of what is [asked](marks_question) for them; `None` if the model has other ones, or what stands before answers as well.
    #[must_use]
    pub fn of(tokens: &[u32]) -> Option<Self> {
        match *tokens {
            [begin, end, again, and_again, _, _, ..]
                if begin != end && (begin, end) == (again, and_again) =>
            {
                Some(Self { begin, end })
            }
            _ => None,
        }
    }

    /// Which of the two comes last.
    fn last(self, tokens: &[u32]) -> Option<(usize, u32)> {
        let is_mark = |(_, token): &(usize, u32)| [self.begin, self.end].contains(token);
        tokens.iter().copied().enumerate().rev().find(is_mark)
    }
}

/// What is asked for next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// The rest of a thought, up to its end.
    Thought,
    /// The answer, or the rest of it.
    Answer,
    /// The same, in which tools may be called.
    AnswerOrCalls,
}

impl Next {
    /// What of the answer to `body` is to follow on `given`; `None` if that cannot be told.
    #[must_use]
    pub fn after(given: &Given, body: &Members) -> Option<Self> {
        let has_tools = body.has("tools");
        let answers = given.thought_is_over() && !given.text().is_empty();
        // What is no text has tokens that stand for something else.
        let says_text_alone =
            body.parsed("messages").is_some_and(|messages: Vec<_>| is_text_alone(&messages));
        match given.thought() {
            // What is told of a chat's tokens is another chat's then.
            _ if !says_text_alone || body.has("add_special_tokens") => None,
            // A call may end a thought without its mark, and where nothing is said of the answer no token shows that the template goes on.
            Some(_) if has_tools => answers.then_some(Self::AnswerOrCalls),
            // Its mark is asked for beside no others.
            Some(_) if !given.thought_is_over() => (!body.has("stop_token_ids")).then_some(Self::Thought),
            None if has_tools => None,
            _ => Some(Self::Answer),
        }
    }
}

/// Of a message what it says, as it stands: chats may be long.
#[derive(Deserialize)]
struct Message {
    content: Option<Box<RawValue>>,
    /// vLLM's `/tokenize` passes it over, and its chat does not.
    reasoning_content: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct ContentPart<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
}

fn is_text_alone(messages: &[Message]) -> bool {
    let is_plain = |content: &RawValue| match content.get().as_bytes() {
        [b'[', ..] => serde_json::from_str::<Vec<ContentPart<'_>>>(content.get())
            .is_ok_and(|parts| parts.iter().all(|part| part.kind == "text")),
        content => content.starts_with(b"\""),
    };
    let is_told = |message: &Message| {
        message.reasoning_content.is_none() && message.content.as_deref().is_none_or(is_plain)
    };
    messages.iter().all(is_told)
}

/// Whose `/tokenize` is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Teller {
    /// Is told what of a request its template depends on.
    Vllm,
    /// Writes a chat as for an answer where it is not told otherwise (0.5.23, `entrypoints/openai/serving_tokenize.py`).
    Sglang,
}

impl Teller {
    /// Who says of their models that they are theirs.
    pub const OWNERS: [&str; 2] = ["vllm", "sglang"];

    /// Of them, whose this is.
    #[must_use]
    pub fn owner(self) -> &'static str {
        Self::OWNERS[self as usize]
    }

    /// By the owner of an engine's models.
    #[must_use]
    pub fn of(owner: &str) -> Option<Self> {
        match owner {
            "vllm" => Some(Self::Vllm),
            "sglang" => Some(Self::Sglang),
            _ => None,
        }
    }
}

/// Asks whether the model has these marks around its thoughts: twice, since what is no mark is cut into several tokens, of which the first two would do as
/// well; and behind them what stands [before answers](BEFORE_ANSWERS).
#[must_use]
pub fn marks_question(body: &Members, (begin, end): (&str, &str)) -> Payload {
    text_question(body, &format!("{begin}{end}{begin}{end}{BEFORE_ANSWERS}"))
}

/// Asks for the tokens of a text.
#[must_use]
pub fn text_question(body: &Members, text: &str) -> Payload {
    let added = format!("\"prompt\":{},\"add_special_tokens\":false", Value::from(text));
    body.with_others(&added, Others::Only(&["model"]))
}

/// Asks for the tokens of a chat, with what has been `given` as the beginning of its next message, or with nothing but who is to speak; `None` if that
/// cannot be asked there.
#[must_use]
pub fn chat_question(teller: Teller, body: &Members, given: Option<&Given>) -> Option<Payload> {
    if teller == Teller::Sglang {
        // It begins each answer behind the template's own opening, and writes no thought of one that has begun.
        return given.is_none().then(|| body.with_others("", Others::Only(&TO_SGLANGS_TEMPLATE)));
    }
    let told = template_arguments(body)?;
    let Some(given) = given else {
        let added = format!("\"add_generation_prompt\":true{told}");
        return Some(body.with_others(&added, Others::Only(&IN_TOKENS)));
    };
    let added = format!("{CONTINUE_FINAL_MESSAGE}{told}");
    body.with_tail(("messages", b'[', &message(given)), &added, Others::Only(&IN_TOKENS))
}

/// What is told to the template, behind a comma. vLLM tells it of the effort as well when it is asked for an answer.
fn template_arguments(body: &Members) -> Option<String> {
    let mut arguments = match body.parsed("chat_template_kwargs") {
        None | Some(Value::Null) => serde_json::Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(_) => return None,
    };
    if let Some(Value::String(effort)) = body.parsed("reasoning_effort") {
        arguments.entry("enable_thinking").or_insert_with(|| (effort != "none").into());
        arguments.insert("reasoning_effort".into(), effort.into());
    }
    let told = || format!(",\"chat_template_kwargs\":{}", Value::from(arguments.clone()));
    Some(if arguments.is_empty() { String::new() } else { told() })
}

/// What has been given as a message, behind those of the chat. A thought has had two names.
pub(super) fn message(given: &Given) -> String {
    let text = given.text();
    let thought = given
        .thought()
        .map(|thought| format!("\"reasoning\":\"{thought}\",\"reasoning_content\":\"{thought}\","));
    let thought = thought.unwrap_or_default();
    format!(",{{\"role\":\"assistant\",{thought}\"content\":\"{text}\"}}")
}

/// What has been given as the model wrote it, but for the mark at its beginning.
#[must_use]
pub fn written(given: &Given, (_, end): (&str, &str)) -> Option<String> {
    let plain = |json: &str| serde_json::from_str::<String>(&format!("\"{json}\"")).ok();
    let text = plain(given.text())?;
    let Some(thought) = given.thought() else { return Some(text) };
    let thought = plain(thought)?;
    Some(match given.thought_is_over() {
        false => thought,
        // Engines take away the white space at a thought's end; nearly all models write one line's.
        true => format!("{}\n{end}{text}", thought.trim_end()),
    })
}

/// What SGLang is asked: the chat, with what has been `given` behind the opening of its answer, as the model wrote it, `around` its thought the marks. The
/// tokens of the chat, up to that opening, are `chat`. The rest is told without telling thoughts apart: what is left of one ends with its mark.
#[must_use]
pub fn rest_behind_the_opening(
    chat: &Tokens,
    given: &Given,
    (marks, around): (Option<Marks>, (&str, &str)),
    body: &Members,
) -> Option<(Payload, Seam)> {
    let plain = |json: &str| serde_json::from_str::<String>(&format!("\"{json}\"")).ok();
    let mut text = String::new();
    let mut seam = Seam::in_messages(given, chat.tokens.len() as u64);
    if let Some(thought) = given.thought() {
        text += begin(chat, marks).map_or("", |_| around.0);
        // SGLang tells it to the last space.
        text += &plain(thought)?;
        if given.thought_is_over() {
            text += around.1;
        } else {
            seam.expect_thoughts_end(around.1, given);
        }
    }
    text += &plain(given.text())?;
    let message = format!(",{{\"role\":\"assistant\",\"content\":{}}}", Value::from(text));
    let mut added = limits(given, body)?;
    added.push("\"continue_final_message\":true,\"separate_reasoning\":false".to_owned());
    let tail = ("messages", b'[', &*message);
    Some((body.with_tail(tail, &added.join(","), Others::Except(&LIMITS))?, seam))
}

/// The mark that a thought begins with, unless the chat ends with it.
fn begin(chat: &Tokens, marks: Option<Marks>) -> Option<u32> {
    let marks = marks?;
    // Elsewhere somebody talks of it.
    let (_, end) = chat.tokens.split_at(chat.tokens.len().saturating_sub(OPENING_TOKENS));
    let is_open = marks.last(end).is_some_and(|(_, mark)| mark == marks.begin);
    (!is_open).then_some(marks.begin)
}

/// A chat in tokens.
pub struct InTokens<'a> {
    /// Those of the chat, up to where the answer begins.
    pub chat: &'a Tokens,
    /// Those of what has been [written].
    pub given: &'a [u32],
    /// Those around a thought, if there is one.
    pub marks: Option<Marks>,
}

impl InTokens<'_> {
    /// What a completion is asked for, and how its answer follows on `given`; `None` if nothing more fits.
    #[must_use]
    pub fn rest(&self, (given, next): (&Given, Next), body: &Members) -> Option<(Payload, Seam)> {
        let begin = begin(self.chat, self.marks);
        let mut added = String::from("\"prompt\":[");
        let mut count = 0;
        for token in self.chat.tokens.iter().chain(&begin).chain(self.given) {
            write!(added, "{}{token}", if count > 0 { "," } else { "" }).ok()?;
            count += 1;
        }
        let room = self.chat.max_model_len?.checked_sub(count).filter(|room| *room > 0)?;
        let asked = LIMITS.iter().rev().find(|name| body.has(name));
        let most = match asked {
            Some(name) => left(given, body.number(name)?)?.min(room),
            None => room,
        };
        let end = self.marks.filter(|_| next == Next::Thought).map(|marks| marks.end);
        write!(added, "],\"add_special_tokens\":false,\"max_tokens\":{most}").ok()?;
        if let Some(end) = end {
            write!(added, ",\"stop_token_ids\":[{end}]").ok()?;
        }
        let part = if next == Next::Thought { Part::Thought } else { Part::Answer };
        let seam = Seam::in_tokens(given, (part, end), (self.chat.tokens.len() as u64, most));
        Some((body.with_others(&added, Others::Only(&IN_COMPLETIONS)), seam))
    }

    /// The request with what has been given as a message to be gone on with, if its template writes that as the model did: `told` are the tokens of
    /// that chat.
    #[must_use]
    pub fn rest_in_messages(&self, told: &Tokens, given: &Given, body: &Members) -> Option<(Payload, Seam)> {
        let marks = self.marks?;
        let expected =
            self.chat.tokens.len() + usize::from(begin(self.chat, self.marks).is_some()) + self.given.len();
        let (at, mark) = marks.last(&told.tokens)?;
        let (_, answer) = told.tokens.split_at(at + 1);
        let ends_alike = !answer.is_empty() && answer.last() == self.given.last();
        let is_alike = mark == marks.end && ends_alike && told.tokens.len().abs_diff(expected) <= 4;
        let mut added = limits(given, body)?;
        added.push(CONTINUE_FINAL_MESSAGE.to_owned());
        let tail = ("messages", b'[', &*message(given));
        let rest = is_alike.then(|| body.with_tail(tail, &added.join(","), Others::Except(&LIMITS)))?;
        Some((rest?, Seam::in_messages(given, self.chat.tokens.len() as u64)))
    }
}
