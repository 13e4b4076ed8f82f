//! Finds the usage in a reply without parsing the reply: engines put it last. In the words of OpenAI's completions and responses, of Anthropic's messages, and of
//! SGLang's own.

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
/// What the usage is a member of a reply by; in SGLang's own words.
const KEYS: [&[u8]; 2] = [b"\"usage\":", b"\"meta_info\":"];
static LAST_KEYS: LazyLock<[FinderRev<'static>; 2]> = LazyLock::new(|| KEYS.map(FinderRev::new));

/// In whose words a reply tells its usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Words {
    /// OpenAI's and Anthropic's.
    Usage,
    /// SGLang's `/generate`.
    MetaInfo,
}

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
    pub fn usage(&self, words: Words) -> Option<ReportedUsage> {
        let (key, last_key) = (KEYS[words as usize], &LAST_KEYS[words as usize]);
        // More than is promised may be left of what came before; how much depends on where the pieces were cut.
        let tail = &self.tail[self.tail.len().saturating_sub(TAIL_BYTES)..];
        let (mut before, mut generated) = (tail.len(), None);
        while let Some(at) = last_key.rfind(&tail[..before]) {
            let from = &tail[at + key.len()..];
            let usage = match words {
                Words::Usage => read_usage(from, &mut generated),
                // Of several prompts each tells its own, and nobody that of all.
                Words::MetaInfo => return read_meta_info(from),
            };
            if usage.is_some() {
                return usage;
            }
            before = at;
        }
        None
    }
}

/// In the words of completions, and of responses and messages. Some say both.
#[derive(serde::Deserialize)]
struct WireUsage<'a> {
    prompt_tokens: Option<u32>,
    input_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    output_tokens: Option<u32>,
    #[serde(borrow, default)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input_tokens_details: Option<&'a RawValue>,
    /// Anthropic's: beside `input_tokens`, and not part of them.
    cache_read_input_tokens: Option<u32>,
    cache_creation_input_tokens: Option<u32>,
}

#[derive(serde::Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

/// What is told last counts: the end of a message may tell what was `generated` alone, and its beginning the prompt.
fn read_usage(from: &[u8], generated: &mut Option<u32>) -> Option<ReportedUsage> {
    let usage: WireUsage<'_> = serde_json::Deserializer::from_slice(from).into_iter().next()?.ok()?;
    let details = usage.prompt_tokens_details.or(usage.input_tokens_details);
    let details = details.and_then(|raw| serde_json::from_str::<Details>(raw.get()).ok());
    let beside = [usage.cache_read_input_tokens, usage.cache_creation_input_tokens].into_iter().flatten();
    *generated = generated.or(usage.completion_tokens).or(usage.output_tokens);
    let prompt_tokens =
        usage.prompt_tokens.or_else(|| Some(beside.fold(usage.input_tokens?, u32::saturating_add)))?;
    // Nothing at all is what some say who have not counted.
    (prompt_tokens > 0 || generated.is_some_and(|tokens| tokens > 0)).then_some(ReportedUsage {
        prompt_tokens,
        completion_tokens: generated.unwrap_or(0),
        cached_tokens: details.and_then(|details| details.cached_tokens).or(usage.cache_read_input_tokens),
    })
}

/// What SGLang says behind a text, if that is all of the reply: nothing follows but the end of the object.
fn read_meta_info(from: &[u8]) -> Option<ReportedUsage> {
    #[derive(serde::Deserialize)]
    struct Wire {
        prompt_tokens: u32,
        #[serde(default)]
        completion_tokens: u32,
        cached_tokens: Option<u32>,
    }
    let mut read = serde_json::Deserializer::from_slice(from).into_iter::<Wire>();
    let Wire { prompt_tokens, completion_tokens, cached_tokens } = read.next()?.ok()?;
    let behind = from[read.byte_offset()..].trim_ascii_start().strip_prefix(b"}")?.trim_ascii_start();
    let is_all = behind.is_empty() || behind.starts_with(b"data:");
    is_all.then_some(ReportedUsage { prompt_tokens, completion_tokens, cached_tokens })
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
        tail.usage(Words::Usage)
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
    fn other_words_for_the_same() {
        let messages = r#"event: message_delta
data: {"type":"message_delta","usage":{"input_tokens":4,"output_tokens":3,"cache_read_input_tokens":6,"cache_creation_input_tokens":2}}

event: message_stop
data: {"type":"message_stop"}

"#;
        let responses = r#"{"type":"response.completed","response":{"usage":{"input_tokens":12,"input_tokens_details":{"cached_tokens":6},
            "output_tokens":3,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":15},"user":null}}"#;
        let expected = ReportedUsage { prompt_tokens: 12, completion_tokens: 3, cached_tokens: Some(6) };
        assert_eq!(usage_of(messages, 7), Some(expected));
        let apart = r#"data: {"message":{"usage":{"input_tokens":6,"cache_read_input_tokens":6,"output_tokens":1}}}

data: {"type":"message_delta","usage":{"output_tokens":3}}

"#;
        assert_eq!(usage_of(apart, 7), Some(expected));
        assert_eq!(usage_of(r#"{"usage":{"input_tokens":0,"output_tokens":0}}"#, 7), None);
        assert_eq!(usage_of(responses, 7), Some(expected));
    }

    #[test]
    fn sglangs_own_words_tell_it_of_one_prompt() {
        let of = |reply: &str| {
            let mut tail = ReplyTail::default();
            tail.push(reply.as_bytes());
            tail.usage(Words::MetaInfo)
        };
        let meta = r#"{"id":"x","finish_reason":{"type":"length","length":3},"prompt_tokens":12,"completion_tokens":3,"cached_tokens":6}"#;
        let expected = ReportedUsage { prompt_tokens: 12, completion_tokens: 3, cached_tokens: Some(6) };
        let one = format!(r#"{{"text":"a","output_ids":[1],"meta_info":{meta}}}"#);
        assert_eq!(of(&one), Some(expected));
        assert_eq!(of(&format!("data: {one}\n\ndata: [DONE]\n\n")), Some(expected));
        for many in [
            format!("[{one},{one}]"),
            format!(r#"data: {{"text":"a","meta_info":{meta},"index":0}}"#),
            "{\"meta_info\":{}}".to_owned(),
        ] {
            assert_eq!(of(&many), None, "{many}");
        }
    }

    #[test]
    fn details_may_be_missing_or_null() {
        let plain = r#"{"id": 1, "usage": {"prompt_tokens": 5, "prompt_tokens_details": null}, "kv": {}}"#;
        let expected = ReportedUsage { prompt_tokens: 5, completion_tokens: 0, cached_tokens: None };
        assert_eq!(usage_of(plain, 1_000), Some(expected));
    }
}
