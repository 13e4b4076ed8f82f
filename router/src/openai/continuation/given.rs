//! What of an answer has gone to the client.
//!
//! Nearly all events of a stream differ from the one before in their text alone, so that an event costs two comparisons, and is read as JSON
//! only where they fail. What is compared lies side by side: an event comes when a stream's memory has left the caches, and each line of it costs more
//! than the comparison.

use memchr::memchr;

use super::Kind;
use super::event::{Piece, Said, ThoughtNames, read};
use super::messages::event::Blocks;
use super::responses::items::Items;

/// A longer answer is not gone on with: what is kept of all streams is not bounded otherwise.
const MOST_TEXT_BYTES: usize = 1 << 20;

/// What has been given so far.
#[derive(Debug)]
pub struct Given {
    kind: Kind,
    /// As it stands in JSON, between quotes.
    text: Vec<u8>,
    thought: Thought,
    pieces: usize,
    id: Option<Box<str>>,
    has_begun: bool,
    /// Of an answer in Anthropic's words.
    blocks: Blocks,
    /// Of a response.
    items: Option<Box<Items>>,
    /// What stands before and after the text of the last event.
    around: Option<Around>,
    state: State,
}

/// What came before the answer, where the engine tells the two apart.
#[derive(Default, Debug)]
struct Thought {
    /// As it stands in JSON, between quotes.
    text: Vec<u8>,
    names: ThoughtNames,
    pieces: usize,
    is_over: bool,
}

/// Which of the two a piece is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    Thought,
    Answer,
}

/// The engine says so.
#[derive(PartialEq, Eq)]
struct EngineFailed;

#[derive(Debug)]
struct Around {
    part: Part,
    /// Length of what stands before.
    before_bytes: usize,
    /// Its end, in which are the choice's number and the name of what the text is. Before that are names of the whole answer.
    before: [u8; 40],
    after_bytes: usize,
    after: [u8; 120],
}

impl Around {
    /// `None` where it is too short or too long.
    fn of(part: Part, before: &[u8], after: &[u8]) -> Option<Self> {
        let mut padded = [0; 120];
        padded.get_mut(..after.len())?.copy_from_slice(after);
        Some(Self {
            part,
            before_bytes: before.len(),
            before: *before.last_chunk()?,
            after_bytes: after.len(),
            after: padded,
        })
    }

    /// What stands in a line between the two.
    fn between<'a>(&self, line: &'a [u8]) -> Option<&'a [u8]> {
        let (before, rest) = line.split_at_checked(self.before_bytes)?;
        let text = rest.strip_suffix(&self.after[..self.after_bytes])?;
        before.ends_with(&self.before).then_some(text)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Going,
    /// All of its text is there.
    Ended,
    /// It says something that nobody else could go on with.
    Lost,
}

impl Given {
    /// Nothing yet.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        let (text, thought, state) = (Vec::new(), Thought::default(), State::Going);
        let blocks = Blocks::default();
        let items = (kind == Kind::Responses).then(Box::default);
        Self {
            kind,
            text,
            thought,
            pieces: 0,
            id: None,
            has_begun: false,
            blocks,
            items,
            around: None,
            state,
        }
    }

    /// What follows is told in the words of `kind`.
    pub fn goes_on_as(&mut self, kind: Kind) {
        (self.kind, self.around) = (kind, None);
    }

    /// Of a response what it consists of.
    pub(super) fn items(&self) -> Option<&Items> {
        self.items.as_deref()
    }

    /// Its blocks.
    pub(super) fn blocks(&self) -> Blocks {
        self.blocks
    }

    /// Which endpoint's answer it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether there is more to come, and another worker can be asked for it.
    #[must_use]
    pub fn can_go_on(&self) -> bool {
        self.state == State::Going
    }

    /// Whether all of its text has come.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.state == State::Ended
    }

    /// The text, as it stands in JSON between quotes.
    #[must_use]
    pub fn text(&self) -> &str {
        // Pieces of what has been read as JSON are UTF-8, each of them.
        std::str::from_utf8(&self.text).unwrap_or_default()
    }

    /// Of a thought the text, as it stands in JSON between quotes; `None` if there is none.
    #[must_use]
    pub fn thought(&self) -> Option<&str> {
        std::str::from_utf8(&self.thought.text).ok().filter(|thought| !thought.is_empty())
    }

    /// Whether the thought has ended, if there was one.
    #[must_use]
    pub fn thought_is_over(&self) -> bool {
        self.thought.is_over
    }

    /// Pieces of the thought, as [`pieces`](Self::pieces).
    #[must_use]
    pub fn thought_pieces(&self) -> usize {
        self.thought.pieces
    }

    /// The names of its pieces.
    pub(super) fn thought_names(&self) -> ThoughtNames {
        self.thought.names
    }

    /// The thought is over, and nothing of the answer has come yet. A token says so.
    pub fn end_thought(&mut self) {
        self.thought.is_over = true;
        self.pieces += 1;
    }

    /// Pieces of text: a token each, or more; with the end of a thought.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Its name, with quotes.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// Whether the client has heard anything of it.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Takes note of whole events that are about to go to the client. Returns how many bytes are more of the answer: all of them, unless the
    /// engine says in place of the rest that it has failed.
    pub fn hear(&mut self, events: &[u8]) -> usize {
        let (mut at, mut event) = (0, 0);
        while self.state != State::Lost && at < events.len() {
            let end = memchr(b'\n', &events[at..]).map_or(events.len(), |length| at + length + 1);
            let line = events[at..end].trim_ascii_end();
            if self.line(line) == Some(EngineFailed) {
                // With its name, where events have names.
                return event;
            }
            at = end;
            event = if line.is_empty() { end } else { event };
        }
        events.len()
    }

    fn line(&mut self, line: &[u8]) -> Option<EngineFailed> {
        if line.is_empty() {
            return None;
        }
        if self.state == State::Ended {
            self.behind_the_end(line);
            return None;
        }
        if let Some((part, text)) = self.like_the_last(line) {
            self.add(part, text);
            return None;
        }
        let said = match &mut self.items {
            Some(items) => items.hear(line),
            None => read(line, self.kind),
        };
        match said {
            Some(Said::Error) => return Some(EngineFailed),
            Some(Said::Nothing) => {}
            Some(Said::Done) => self.state = State::Ended,
            Some(Said::Piece(piece)) => {
                self.has_begun = true;
                if let Some(block) = piece.block {
                    self.blocks.note(block);
                }
                self.id = self.id.take().or_else(|| piece.id.map(Box::from));
                // Events of a response are numbered.
                if self.items.is_none() {
                    self.around = around(&piece, line).or_else(|| self.around.take());
                }
                if let Some((thought, names)) = piece.thought {
                    self.thought.names = names;
                    self.add(Part::Thought, thought.as_bytes());
                }
                self.add(Part::Answer, piece.text.unwrap_or_default().as_bytes());
                if piece.is_last && self.state == State::Going {
                    self.state = State::Ended;
                }
            }
            None => self.lose(),
        }
        None
    }

    fn add(&mut self, part: Part, piece: &[u8]) {
        if piece.is_empty() {
            return;
        }
        match part {
            // One thought, and then the answer.
            Part::Thought if self.thought.is_over || !self.text.is_empty() => return self.lose(),
            Part::Thought => {
                self.thought.text.extend_from_slice(piece);
                self.thought.pieces += 1;
            }
            Part::Answer => {
                if !self.thought.text.is_empty() && !self.thought.is_over {
                    self.end_thought();
                }
                self.text.extend_from_slice(piece);
            }
        }
        self.pieces += 1;
        if self.text.len() + self.thought.text.len() > MOST_TEXT_BYTES {
            self.lose();
        }
    }

    /// Behind the last text may come the usage. What says more is no answer that is known here: another choice's, or a failure.
    fn behind_the_end(&mut self, line: &[u8]) {
        let says_more = match read(line, self.kind) {
            Some(Said::Piece(piece)) => {
                piece.thought.is_some() || piece.text.is_some_and(|text| !text.is_empty())
            }
            Some(Said::Nothing | Said::Done) => false,
            Some(Said::Error) | None => true,
        };
        if says_more {
            self.lose();
        }
    }

    /// The text of a line that is like the last one but for it. Only a quote could end it before its end.
    fn like_the_last<'a>(&self, line: &'a [u8]) -> Option<(Part, &'a [u8])> {
        let around = self.around.as_ref()?;
        let text = around.between(line)?;
        // The quote after a backslash would be the text's own.
        (memchr(b'"', text).is_none() && text.last() != Some(&b'\\') && std::str::from_utf8(text).is_ok())
            .then_some((around.part, text))
    }

    fn lose(&mut self) {
        self.state = State::Lost;
        (self.text, self.thought, self.around) = (Vec::new(), Thought::default(), None);
    }
}

/// What stands around the text of an event that has one; the next ones may be like it.
fn around(piece: &Piece<'_>, line: &[u8]) -> Option<Around> {
    let (part, text) = match (piece.thought, piece.text.filter(|text| !text.is_empty())) {
        (Some((thought, names)), None) if !(names.short && names.long) => (Part::Thought, thought),
        (None, Some(text)) => (Part::Answer, text),
        _ => return None,
    };
    let place = piece.place(text);
    let is_plain = !piece.has_role && piece.usage.is_none();
    is_plain.then(|| Around::of(part, &line[..place.start], &line[place.end..])).flatten()
}
