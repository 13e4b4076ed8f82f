//! The tokens of a prompt, for routers that ask a worker for them.
//!
//! Four bytes of text are a token, so that equal beginnings have equal tokens, as with any tokenizer, and a prompt has as
//! many as it would have. Knows no model and no template.

use serde_json::Value;

/// Bytes of text that make a token.
const TOKEN_BYTES: usize = 4;
/// Size of the vocabulary that ids are taken from.
const VOCABULARY: u32 = 100_000;

/// The tokens of a request's messages, or of its prompt; nothing when the body has neither.
pub fn ids(body: &[u8]) -> Option<Vec<u32>> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let text = match (&body["messages"], &body["prompt"]) {
        (Value::Array(messages), _) => {
            messages.iter().filter_map(|message| message["content"].as_str()).collect::<String>()
        }
        (_, Value::String(prompt)) => prompt.clone(),
        _ => return None,
    };
    let id = |bytes: &[u8]| {
        let number = bytes.iter().fold(0_u32, |number, byte| number << 8 | u32::from(*byte));
        number.wrapping_mul(2_654_435_761) % VOCABULARY // Knuth's multiplier, so that ids use the whole vocabulary
    };
    Some(text.as_bytes().chunks(TOKEN_BYTES).map(id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_beginnings_have_equal_tokens() {
        let of = |user: &str| {
            let body = format!(
                r#"{{"messages":[{{"role":"system","content":"be kind "}},{{"content":"{user}"}}]}}"#
            );
            ids(body.as_bytes()).unwrap()
        };
        let (one, other) = (of("hello one"), of("hello two"));
        assert_eq!((one.len(), other.len()), (5, 5));
        assert_eq!(one[..3], other[..3]);
        assert_ne!(one[3..], other[3..]);
        assert_eq!(ids(br#"{"prompt":"be kind "}"#).unwrap(), one[..2]);
        assert_eq!((ids(b"{}"), ids(b"no json")), (None, None));
    }
}
