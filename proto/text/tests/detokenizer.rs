//! The detokenizer against decoding everything at once, with both families of decoders.
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use proptest::prelude::*;
use roundhouse_text::{Detokenizer, SpecialTokenPolicy, Tokenizer};
use serde_json::{Map, Value, json};

/// GPT-2's printable stand-ins for bytes.
fn byte_level_alphabet() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    (0..256u32)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap()
        })
        .collect()
}

/// Bytes, a few merged words, and a special token: as GPT-2, Llama 3 and Qwen decode.
fn byte_level() -> Tokenizer {
    let mut vocab = Map::new();
    for character in byte_level_alphabet() {
        vocab.insert(character.to_string(), json!(vocab.len()));
    }
    for word in ["he", "llo", "Ġw", "Ã©", "ðŁ", "ðŁĺ"] {
        vocab.insert(word.to_owned(), json!(vocab.len()));
    }
    let special = vocab.len();
    tokenizer(json!({
        "added_tokens": [added(special, "<|end|>")],
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["h", "e"]]},
    }))
}

/// Pieces with `▁` and single bytes as a fallback: as Llama 2 and Mistral decode.
fn sentence_piece() -> Tokenizer {
    let mut vocab = Map::new();
    for piece in ["<unk>", "▁", "▁he", "llo", "▁wor", "ld", ".", "é", "日", "▁▁"] {
        vocab.insert(piece.to_owned(), json!(vocab.len()));
    }
    for byte in [0xe2u8, 0x82, 0xac, 0x41, 0xf0, 0x9f, 0x98, 0x80] {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    let special = vocab.len();
    tokenizer(json!({
        "added_tokens": [added(special, "</s>")],
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": vocab, "merges": []},
    }))
}

fn added(id: usize, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": true})
}

fn tokenizer(mut parts: Value) -> Tokenizer {
    for (key, value) in
        [("version", json!("1.0")), ("normalizer", Value::Null), ("post_processor", Value::Null)]
    {
        parts[key] = value;
    }
    Tokenizer::from_json(parts.to_string().as_bytes()).unwrap()
}

fn pieces(tokenizer: &Tokenizer, tokens: &[u32], stops: &[String]) -> (Vec<String>, bool) {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), stops.to_vec());
    let mut pieces = Vec::new();
    for &token in tokens {
        let piece = detokenizer.push(token).unwrap();
        pieces.push(piece.text);
        if piece.stopped {
            return (pieces, true);
        }
    }
    let last = detokenizer.finish().unwrap();
    pieces.push(last.text);
    (pieces, last.stopped)
}

fn cut(text: &str, stops: &[String]) -> (String, bool) {
    let found =
        stops.iter().filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)));
    found.min().map_or((text.to_owned(), false), |(_, start)| (text[..start].to_owned(), true))
}

#[test]
fn an_emoji_of_four_tokens_comes_out_whole() {
    let tokenizer = byte_level();
    let tokens = tokenizer.encode("a😀b", SpecialTokenPolicy::Omit).unwrap();
    assert_eq!(tokens.len(), 6);
    let (pieces, _) = pieces(&tokenizer, &tokens, &[]);
    assert_eq!(pieces, ["a", "", "", "", "😀", "b", ""]);
}

#[test]
fn an_unfinished_character_comes_out_at_the_end() {
    let tokenizer = byte_level();
    let mut tokens = tokenizer.encode("a😀", SpecialTokenPolicy::Omit).unwrap();
    tokens.pop();
    let (pieces, _) = pieces(&tokenizer, &tokens, &[]);
    assert_eq!(pieces.concat(), tokenizer.decode(&tokens).unwrap());
}

#[test]
fn a_stop_string_across_tokens_never_shows() {
    let tokenizer = byte_level();
    let tokens = tokenizer.encode("hello STOP world", SpecialTokenPolicy::Omit).unwrap();
    let (pieces, stopped) = pieces(&tokenizer, &tokens, &[" STOP".to_owned()]);
    assert!(stopped);
    assert_eq!(pieces.concat(), "hello");
}

#[test]
fn spaces_between_pieces_survive_a_special_token() {
    let tokenizer = sentence_piece();
    let id = |token| tokenizer.token_to_id(token).unwrap();
    let tokens = [id("▁he"), id("llo"), id("</s>"), id("▁wor"), id("ld")];
    let (pieces, _) = pieces(&tokenizer, &tokens, &[]);
    assert_eq!(pieces, ["he", "llo", "", " wor", "ld", ""]);
}

#[test]
fn a_run_of_bytes_goes_on_across_a_special_token() {
    // The decoder never sees the special token, and judges the two bytes, no UTF-8 together, as one run.
    let tokenizer = sentence_piece();
    let tokens = ["<0x41>", "</s>", "<0xE2>", "."].map(|token| tokenizer.token_to_id(token).unwrap());
    assert_eq!(pieces(&tokenizer, &tokens, &[]).0, ["", "", "", "\u{fffd}\u{fffd}.", ""]);
}

#[test]
fn special_tokens_are_added_on_demand_only() {
    let tokenizer = byte_level();
    let encoded = tokenizer.encode("<|end|>hi", SpecialTokenPolicy::Omit).unwrap();
    assert_eq!(encoded[0], tokenizer.token_to_id("<|end|>").unwrap());
    assert_eq!(tokenizer.decode(&encoded).unwrap(), "hi");
    assert_eq!(tokenizer.vocab_size(), 263);
    assert!(Tokenizer::from_json(b"{}").is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn byte_level_pieces_are_the_decoded_whole(tokens in prop::collection::vec(0u32..263, 0..40)) {
        let tokenizer = byte_level();
        prop_assert_eq!(pieces(&tokenizer, &tokens, &[]).0.concat(), tokenizer.decode(&tokens).unwrap());
    }

    #[test]
    fn sentence_pieces_are_the_decoded_whole(tokens in prop::collection::vec(0u32..19, 0..40)) {
        let tokenizer = sentence_piece();
        prop_assert_eq!(pieces(&tokenizer, &tokens, &[]).0.concat(), tokenizer.decode(&tokens).unwrap());
    }

    #[test]
    fn stop_strings_cut_exactly(
        text in "[abc é😀]{0,24}",
        stops in prop::collection::vec("[ab é😀]{1,3}", 0..3),
    ) {
        let tokenizer = byte_level();
        let tokens = tokenizer.encode(&text, SpecialTokenPolicy::Omit).unwrap();
        let (pieces, stopped) = pieces(&tokenizer, &tokens, &stops);
        prop_assert_eq!((pieces.concat(), stopped), cut(&text, &stops));
    }
}
