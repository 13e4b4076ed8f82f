//! What of an answer has gone to the client.
//!
//! Nearly all events of a stream differ from the one before in their text alone, so that an event costs two comparisons, and is read as JSON
//! only where they fail. What is compared lies side by side: an event comes when a stream's memory has left the caches, and each line of it costs more
//! than the comparison.

use memchr::memchr;

use super::Kind;
use super::event::{Said, read};

/// A longer answer is not gone on with: what is kept of all streams is not bounded otherwise.
const MOST_TEXT_BYTES: usize = 1 << 20;

/// What has been given so far.
#[derive(Debug)]
pub struct Given {
    kind: Kind,
    /// As it stands in JSON, between quotes.
    text: Vec<u8>,
    pieces: usize,
    id: Option<Box<str>>,
    has_begun: bool,
    /// What stands before and after the text of the last event.
    around: Option<Around>,
    state: State,
}

/// The engine says so.
#[derive(PartialEq, Eq)]
struct EngineFailed;

#[derive(Debug)]
struct Around {
    /// Length of what stands before.
    before_bytes: usize,
    /// Its end, in which are the choice's number and the name of what the text is. Before that are names of the whole answer.
    before: [u8; 40],
    after_bytes: usize,
    after: [u8; 120],
}

impl Around {
    /// `None` where it is too short or too long.
    fn of(before: &[u8], after: &[u8]) -> Option<Self> {
        let mut padded = [0; 120];
        padded.get_mut(..after.len())?.copy_from_slice(after);
        Some(Self {
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
        let (text, state) = (Vec::new(), State::Going);
        Self { kind, text, pieces: 0, id: None, has_begun: false, around: None, state }
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

    /// Pieces of text: a token each, or more.
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
        let mut at = 0;
        while self.state != State::Lost && at < events.len() {
            let end = memchr(b'\n', &events[at..]).map_or(events.len(), |length| at + length + 1);
            if self.line(events[at..end].trim_ascii_end()) == Some(EngineFailed) {
                return at;
            }
            at = end;
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
        if let Some(text) = self.like_the_last(line) {
            self.text.extend_from_slice(text);
            self.pieces += usize::from(!text.is_empty());
            self.bound();
            return None;
        }
        match read(line, self.kind) {
            Some(Said::Error) => return Some(EngineFailed),
            Some(Said::Nothing) => {}
            Some(Said::Done) => self.state = State::Ended,
            Some(Said::Piece(piece)) => {
                self.has_begun = true;
                self.id = self.id.take().or_else(|| piece.id.map(Box::from));
                if piece.is_last {
                    self.state = State::Ended;
                }
                if let Some(text) = piece.text {
                    self.text.extend_from_slice(text.as_bytes());
                    self.pieces += usize::from(!text.is_empty());
                    let place = piece.place(text);
                    let is_plain = !piece.has_role && piece.usage.is_none();
                    let around = is_plain.then(|| Around::of(&line[..place.start], &line[place.end..]));
                    self.around = around.flatten();
                }
                self.bound();
            }
            None => self.lose(),
        }
        None
    }

    /// Behind the last text may come the usage. What says more is no answer that is known here: another choice's, or a failure.
    fn behind_the_end(&mut self, line: &[u8]) {
        let says_more = match read(line, self.kind) {
            Some(Said::Piece(piece)) => piece.text.is_some_and(|text| !text.is_empty()),
            Some(Said::Nothing | Said::Done) => false,
            Some(Said::Error) | None => true,
        };
        if says_more {
            self.lose();
        }
    }

    /// The text of a line that is like the last one but for it. Only a quote could end it before its end.
    fn like_the_last<'a>(&self, line: &'a [u8]) -> Option<&'a [u8]> {
        let text = self.around.as_ref()?.between(line)?;
        // The quote after a backslash would be the text's own.
        (memchr(b'"', text).is_none() && text.last() != Some(&b'\\') && std::str::from_utf8(text).is_ok())
            .then_some(text)
    }

    fn bound(&mut self) {
        if self.text.len() > MOST_TEXT_BYTES {
            self.lose();
        }
    }

    fn lose(&mut self) {
        self.state = State::Lost;
        (self.text, self.around) = (Vec::new(), None);
    }
}
