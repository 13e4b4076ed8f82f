//! Tokens back to text, one at a time, giving out only text that later tokens cannot change.
//!
//! Knows no requests or streams: whoever streams a generation owns one of these for it.

use roundhouse_types::TokenId;

use crate::stop_strings::StopStrings;
use crate::tokenizer::{ByteRun, Tokenizer, TokenizerError};

/// Turns one generation's tokens into text.
///
/// Held back are the bytes of an unfinished UTF-8 character, and text that may be the beginning of a stop string.
/// The pieces put together are the decoded whole, up to the first stop string.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    /// The last tokens given out, from a token with text of its own on, and then the tokens held back.
    window: Vec<TokenId>,
    /// The text of the tokens of `window` that are given out.
    given: String,
    /// How many tokens of `window` are given out.
    given_tokens: usize,
    /// The last tokens are single bytes whose text later ones may change.
    in_byte_run: bool,
    stops: StopStrings,
    /// Tokens to come before stop strings count.
    tokens_before_stops: u64,
    stopped: bool,
}

/// Text that is final.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// Comes after all pieces before; may be empty.
    pub text: String,
    /// A stop string was met right after `text`: nothing will follow.
    pub stopped: bool,
}

impl Detokenizer {
    /// Begins a text that ends before the first of `stops`; empty stop strings are ignored.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, stops: Vec<String>) -> Self {
        Self {
            tokenizer,
            window: Vec::new(),
            given: String::new(),
            given_tokens: 0,
            in_byte_run: false,
            stops: StopStrings::new(stops),
            tokens_before_stops: 0,
            stopped: false,
        }
    }

    /// The text of the first `tokens` is not searched for stop strings: the answer has to be longer.
    #[must_use]
    pub fn with_stops_after(mut self, tokens: u64) -> Self {
        self.tokens_before_stops = tokens;
        self
    }

    /// Adds a token and returns the text that became final by it. After a stop string every piece is empty.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn push(&mut self, token: TokenId) -> Result<Piece, TokenizerError> {
        if self.stopped {
            return Ok(Piece { text: String::new(), stopped: true });
        }
        self.window.push(token);
        let stops_count = self.tokens_before_stops == 0;
        self.tokens_before_stops = self.tokens_before_stops.saturating_sub(1);
        match self.tokenizer.effect_on_byte_run(token) {
            ByteRun::GoesOn => self.in_byte_run = true,
            ByteRun::Ends => self.in_byte_run = false,
            ByteRun::Unchanged => {}
        }
        if self.in_byte_run {
            return Ok(Piece::default());
        }
        let text = self.tokenizer.decode(&self.window)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(Piece::default());
        }
        let fresh = self.fresh(&text);
        self.advance()?;
        if !stops_count {
            return Ok(Piece { text: fresh, stopped: false });
        }
        Ok(self.release(&fresh))
    }

    /// Ends the text and returns what was held back: an unfinished character as U+FFFD, the beginning of a stop string that
    /// did not come as it is.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn finish(&mut self) -> Result<Piece, TokenizerError> {
        if self.stopped {
            return Ok(Piece { text: String::new(), stopped: true });
        }
        let text = self.tokenizer.decode(&self.window)?;
        let fresh = self.fresh(&text);
        let mut piece = self.release(&fresh);
        if !piece.stopped {
            piece.text.push_str(&self.stops.finish());
        }
        self.stopped = true;
        Ok(piece)
    }

    fn release(&mut self, fresh: &str) -> Piece {
        let released = self.stops.push(fresh);
        self.stopped = released.stopped;
        Piece { text: released.text, stopped: released.stopped }
    }

    /// What of the window's text is new.
    fn fresh(&self, text: &str) -> String {
        // A decoder that rewrites text it gave before can only be followed from where it rewrites.
        let same = self.given.bytes().zip(text.bytes()).take_while(|(given, now)| given == now).count();
        let boundary = (0..=same).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text[boundary..].to_owned()
    }

    /// Marks the whole window as given out, and drops the older half of it.
    ///
    /// Decoders treat the first token with text differently (they strip its space), so that the window must begin with one
    /// that is given out already.
    fn advance(&mut self) -> Result<(), TokenizerError> {
        let younger = self.tokenizer.decode(&self.window[self.given_tokens..])?;
        if !younger.is_empty() && !younger.starts_with(char::REPLACEMENT_CHARACTER) {
            self.window.drain(..self.given_tokens);
            self.given = younger;
        } else {
            self.given = self.tokenizer.decode(&self.window)?;
        }
        self.given_tokens = self.window.len();
        Ok(())
    }
}
