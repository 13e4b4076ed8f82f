//! Finds the usage in a reply without parsing the reply: engines put it last.

use std::sync::LazyLock;

use memchr::memmem::FinderRev;
use serde_json::value::RawValue;

/// Token counts, as an engine reports them at the end of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReportedUsage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Tokens of the prompt that were found in the prefix cache, if it says so.
    pub cached_tokens: Option<u32>,
}

/// How much of a reply's end is kept; a usage object is a few hundred bytes.
const TAIL_BYTES: usize = 4_096;
const KEY: &[u8] = b"\"usage\":";
static LAST_KEY: LazyLock<FinderRev<'static>> = LazyLock::new(|| FinderRev::new(KEY));

/// The end of a reply, as it went by.
#[derive(Debug, Default)]
pub struct ReplyTail {
    tail: Vec<u8>,
}

impl ReplyTail {
    /// Takes note of the next piece of the reply.
    pub fn push(&mut self, piece: &[u8]) {
        let piece = &piece[piece.len().saturating_sub(TAIL_BYTES)..];
        if self.tail.len() + piece.len() > 2 * TAIL_BYTES {
            let surplus = self.tail.len().min(self.tail.len() + piece.len() - TAIL_BYTES);
            self.tail.drain(..surplus);
        }
        self.tail.extend_from_slice(piece);
    }

    /// The last usage in what was seen; `None` if the engine reported none.
    #[must_use]
    pub fn usage(&self) -> Option<ReportedUsage> {
        // More than is promised may be left of what came before; how much depends on where the pieces were cut.
        let tail = &self.tail[self.tail.len().saturating_sub(TAIL_BYTES)..];
        let mut before = tail.len();
        while let Some(at) = LAST_KEY.rfind(&tail[..before]) {
            if let Some(usage) = read_usage(&tail[at + KEY.len()..]) {
                return Some(usage);
            }
            before = at;
        }
        None
    }
}

#[derive(serde::Deserialize)]
struct WireUsage<'a> {
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    #[serde(borrow, default)]
    prompt_tokens_details: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

fn read_usage(from: &[u8]) -> Option<ReportedUsage> {
    let usage: WireUsage<'_> = serde_json::Deserializer::from_slice(from).into_iter().next()?.ok()?;
    let details = usage.prompt_tokens_details.and_then(|raw| serde_json::from_str::<Details>(raw.get()).ok());
    Some(ReportedUsage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: details.and_then(|details| details.cached_tokens),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"usage\\\": b\"}}],\"usage\":null}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":3,\"total_tokens\":15,\
        \"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\ndata: [DONE]\n\n";

    fn usage_of(reply: &str, cut: usize) -> Option<ReportedUsage> {
        let mut tail = ReplyTail::default();
        reply.as_bytes().chunks(cut).for_each(|piece| tail.push(piece));
        tail.usage()
    }

    proptest! {
        #[test]
        fn finds_the_usage_however_the_stream_is_cut(cut in 1usize..400, before in 0usize..20_000) {
            let reply = "x".repeat(before) + STREAM;
            let expected = ReportedUsage { prompt_tokens: 12, completion_tokens: 3, cached_tokens: Some(8) };
            prop_assert_eq!(usage_of(&reply, cut), Some(expected));
        }
    }

    #[test]
    fn a_usage_too_far_from_the_end_is_not_seen_however_the_reply_is_cut() {
        let reply = format!("{STREAM}{}", "x".repeat(TAIL_BYTES));
        for cut in [1, 999, TAIL_BYTES - 1, TAIL_BYTES, 100_000] {
            assert_eq!(usage_of(&reply, cut), None, "cut every {cut} bytes");
        }
    }

    #[test]
    fn no_usage_is_none() {
        assert_eq!(usage_of("data: {\"usage\":null}\n\ndata: [DONE]\n\n", 7), None);
        assert_eq!(usage_of("", 7), None);
    }

    #[test]
    fn details_may_be_missing_or_null() {
        let plain = r#"{"id": 1, "usage": {"prompt_tokens": 5, "prompt_tokens_details": null}, "kv": {}}"#;
        let expected = ReportedUsage { prompt_tokens: 5, completion_tokens: 0, cached_tokens: None };
        assert_eq!(usage_of(plain, 1_000), Some(expected));
    }
}
