//! How an answer that broke off in its stream is gone on with by another worker: what of it has gone to the client ([`given`]), what the next
//! worker is asked ([`request`], and [`tokens`] where it had a thought), and how its answer is made to follow on the first ([`seam`]).
//!
//! Knows OpenAI's chat and completions, Anthropic's [`messages`] as far as a chat can stand in for them, OpenAI's [`responses`], and of chat what vLLM, SGLang and our worker take (`continue_final_message`). Used by the relay, through
//! `stages/continuing.rs`.

pub mod given;
pub mod messages;
pub mod request;
pub mod responses;
pub mod seam;
pub mod tokens;

mod event;

/// Which endpoint's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`.
    Responses,
}

/// Whether one of these lines says that the answer is over.
#[must_use]
pub fn ends(lines: &[u8], kind: Kind) -> bool {
    lines.split(|byte| *byte == b'\n').any(|line| match event::read(line.trim_ascii_end(), kind) {
        Some(event::Said::Done) => true,
        Some(event::Said::Piece(piece)) => piece.is_last,
        _ => false,
    })
}

#[cfg(test)]
mod tests;
