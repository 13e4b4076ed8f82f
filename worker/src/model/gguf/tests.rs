//! Files that say what directories say, and files that are broken.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use roundhouse_text::{SpecialTokenPolicy, Tokenizer};

use super::writer::Writer;
use super::*;
use crate::model::rope::{Rope, RopeScaling};
use crate::model::tensors::Tensors;
use crate::model::{Model, ModelConfig, ModelFiles, ModelSource};

/// A file that is gone at the end of the test.
struct File(PathBuf);

impl File {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("roundhouse-{name}-{}.gguf", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn files(&self) -> ModelFiles {
        ModelFiles::open(&ModelSource::Gguf(self.0.clone())).unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn fixture(name: &str) -> ModelFiles {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    ModelFiles::open(&ModelSource::Directory(directory)).unwrap()
}

/// A vocabulary that no fixture needs but every file has.
fn with_tokens(mut writer: Writer) -> Writer {
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", "gpt-2");
    writer.texts("tokenizer.ggml.tokens", &["a", "b", "<|im_end|>"]);
    writer.texts("tokenizer.ggml.merges", &[]);
    writer.list("tokenizer.ggml.token_type", 5, &[1i32, 1, 3].map(|kind| kind.to_le_bytes().to_vec()));
    writer
}

/// The built-in model as llama.cpp's converter would write it.
fn builtin() -> Writer {
    let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
    let mut writer = Writer::of_model(&files);
    let tokenizer: serde_json::Value = serde_json::from_str(files.tokenizer.as_deref().unwrap()).unwrap();
    let config: serde_json::Value = serde_json::from_str(files.tokenizer_config.as_deref().unwrap()).unwrap();
    let mut tokens: Vec<_> = tokenizer["model"]["vocab"].as_object().unwrap().iter().collect();
    tokens.sort_by_key(|(_, id)| id.as_u64());
    let tokens: Vec<&str> = tokens.into_iter().map(|(token, _)| token.as_str()).collect();
    let special = tokenizer["added_tokens"].as_array().unwrap();
    let kind = |id: usize| if special.iter().any(|token| token["id"] == id) { 3i32 } else { 1 };
    let kinds: Vec<_> = (0..tokens.len()).map(|id| kind(id).to_le_bytes().to_vec()).collect();
    let merge = |merge: &serde_json::Value| match merge {
        serde_json::Value::String(merge) => merge.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    let merges: Vec<String> = tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", "smollm");
    writer.texts("tokenizer.ggml.tokens", &tokens);
    writer.list("tokenizer.ggml.token_type", 5, &kinds);
    writer.texts("tokenizer.ggml.merges", &merges.iter().map(String::as_str).collect::<Vec<_>>());
    writer.whole("tokenizer.ggml.bos_token_id", 0);
    writer.whole("tokenizer.ggml.eos_token_id", 2);
    writer.text("tokenizer.chat_template", config["chat_template"].as_str().unwrap());
    writer
}

/// Tensors by Hugging Face's names are the same in both, bit for bit.
fn assert_same_weights(theirs: &ModelFiles, ours: &ModelFiles) {
    let names = safetensors::SafeTensors::deserialize(theirs.weights[0].bytes()).unwrap();
    let (expected, found) = (Tensors::open(theirs).unwrap(), Tensors::open(ours).unwrap());
    for (name, tensor) in names.tensors() {
        let [expected, found] = [&expected, &found].map(|tensors| match tensor.shape() {
            [rows, columns] => tensors.matrix(&name, *rows, *columns).unwrap(),
            [len] => tensors.vector(&name, *len).unwrap(),
            other => panic!("{name} has shape {other:?}"),
        });
        assert!(expected.is_same_as(&found), "{name}");
    }
}

#[test]
fn a_file_says_what_the_directory_said() {
    for name in ["tiny-llama", "tiny-qwen2", "tiny-qwen3"] {
        let directory = fixture(name);
        let file = File::new(name, &with_tokens(Writer::of_model(&directory)).finish());
        let ours = file.files();
        assert_same_weights(&directory, &ours);
        let mut expected = ModelConfig::from_files(&directory).unwrap();
        let found = ModelConfig::from_files(&ours).unwrap();
        expected.eos_tokens = vec![2];
        if name == "tiny-llama" {
            // It is stretched from a context that no real model has; the next test has one that is.
            expected.rope.scaling = RopeScaling::None;
        }
        assert_eq!(found, expected);
        Model::load(&ours).unwrap();
    }
}

#[test]
fn llama_3s_stretching_is_found_again() {
    let scaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192.0,
    };
    let theta = 500_000.0;
    let frequencies = |scaling| Rope { theta, scaling }.frequencies(16);
    let divisors: Vec<f32> = frequencies(RopeScaling::None)
        .iter()
        .zip(frequencies(scaling))
        .map(|(plain, stretched)| plain / stretched)
        .collect();
    let write = |divisors: &[f32]| {
        let mut writer = with_tokens(Writer::of_model(&fixture("tiny-llama")));
        let bytes = divisors.iter().flat_map(|divisor| divisor.to_le_bytes()).collect();
        writer.tensor("rope_freqs.weight", &[8], 0, bytes);
        writer.finish()
    };
    let file = File::new("stretched", &write(&divisors));
    assert_eq!(ModelConfig::from_files(&file.files()).unwrap().rope, Rope { theta, scaling });
    let other: Vec<f32> = divisors.iter().map(|divisor| divisor * divisor).collect();
    let bytes = write(&other);
    let error = Gguf::parse(&bytes).unwrap().config().unwrap_err().to_string();
    assert!(error.contains("rope_freqs.weight") && error.contains("Llama 3.1"), "{error}");
}

#[test]
fn the_builtin_model_is_the_same_as_a_file() {
    let theirs = ModelFiles::open(&ModelSource::Builtin).unwrap();
    let file = File::new("builtin", &builtin().finish());
    let ours = file.files();
    assert_same_weights(&theirs, &ours);
    assert_eq!(ours.name, file.0.file_stem().unwrap().to_str().unwrap());
    let mut expected = ModelConfig::from_files(&theirs).unwrap();
    // `<|endoftext|>` ends an answer as well, wherever it comes from.
    expected.eos_tokens = vec![0, 2];
    assert_eq!(ModelConfig::from_files(&ours).unwrap(), expected);
    let [expected, found] = [&theirs, &ours]
        .map(|files| Tokenizer::from_json(files.tokenizer.as_deref().unwrap().as_bytes()).unwrap());
    for text in [
        "Hello, world!  It's 1813.\n\n",
        "<|im_start|>user\nZwölf\u{301} 中文<|im_end|>",
        "\t tabs\r\n 12345",
    ] {
        let tokens = found.encode(text, SpecialTokenPolicy::Add).unwrap();
        assert_eq!(tokens, expected.encode(text, SpecialTokenPolicy::Add).unwrap(), "{text:?}");
        assert_eq!(found.decode_verbatim(&tokens).unwrap(), text);
    }
    let config = |files: &ModelFiles| -> serde_json::Value {
        serde_json::from_str(files.tokenizer_config.as_deref().unwrap()).unwrap()
    };
    for key in ["chat_template", "bos_token", "eos_token"] {
        assert_eq!(config(&ours)[key], config(&theirs)[key]);
    }
}

/// What SentencePiece does: merges the two neighbours that make the token with the highest score, the leftmost among equals.
fn merged(text: &str, scores: &HashMap<&str, f64>) -> Vec<String> {
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let pairs = parts.windows(2).enumerate();
        let known = pairs.filter_map(|(at, pair)| Some((at, *scores.get(pair.concat().as_str())?)));
        let best = known.reduce(|best, next| if next.1 > best.1 { next } else { best });
        let Some((at, _)) = best else { return parts };
        let right = parts.remove(at + 1);
        parts[at].push_str(&right);
    }
}

#[test]
fn sentence_piece_vocabularies_merge_by_score() {
    let mut tokens = vec!["<unk>", "<s>", "</s>", "<0xE2>", "<0x82>", "<0xAC>"];
    let pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab", "cc", "ca"];
    tokens.extend(pieces);
    let scores: HashMap<&str, f64> =
        [("ab", -3.0), ("bc", -1.0), ("▁a", -2.0), ("abc", -5.0), ("▁ab", -4.0), ("cc", -6.0), ("ca", -2.5)]
            .into();
    let mut writer = Writer::of_model(&fixture("tiny-llama"));
    writer.text("tokenizer.ggml.model", "llama");
    writer.texts("tokenizer.ggml.tokens", &tokens);
    let score = |token: &&str| (scores.get(token).copied().unwrap_or(-100.0) as f32).to_le_bytes().to_vec();
    writer.list("tokenizer.ggml.scores", 6, &tokens.iter().map(score).collect::<Vec<_>>());
    let kind = |at: usize| [2i32, 3, 3, 6, 6, 6].get(at).copied().unwrap_or(1).to_le_bytes().to_vec();
    writer.list("tokenizer.ggml.token_type", 5, &(0..tokens.len()).map(kind).collect::<Vec<_>>());
    for (key, id) in [("unknown", 0), ("bos", 1), ("eos", 2)] {
        writer.whole(&format!("tokenizer.ggml.{key}_token_id"), id);
    }
    let bytes = writer.finish();
    let gguf = Gguf::parse(&bytes).unwrap();
    let tokenizer = Tokenizer::from_json(gguf.tokenizer().unwrap().as_bytes()).unwrap();
    for text in ["abc", "aabbcc", "a b c", "abcabcab", "cab bca", "ccc a"] {
        let found = tokenizer.encode(text, SpecialTokenPolicy::Add).unwrap();
        let spelled: Vec<&str> = found[1..].iter().map(|id| tokens[*id as usize]).collect();
        assert_eq!(found[0], 1, "a text begins with <s>");
        assert_eq!(spelled, merged(&format!("▁{}", text.replace(' ', "▁")), &scores), "{text}");
        assert_eq!(tokenizer.decode(&found).unwrap(), text);
    }
    let euro = tokenizer.encode("a€", SpecialTokenPolicy::Omit).unwrap();
    assert_eq!(euro[1..], [3, 4, 5]);
    assert_eq!(tokenizer.decode(&euro).unwrap(), "a€");
    assert_eq!(tokenizer.token_bytes(4), Some(vec![0x82]));
    assert!(gguf.generation_config().unwrap().contains("[2]"));
}

#[test]
fn what_is_not_implemented_is_refused_by_key() {
    let refused = |change: &dyn Fn(&mut Writer), reason: &str| {
        let mut writer = Writer::of_model(&fixture("tiny-llama"));
        change(&mut writer);
        let bytes = writer.finish();
        let outcome = Gguf::parse(&bytes).and_then(|gguf| {
            gguf.config()?;
            gguf.tokenizer()?;
            gguf.generation_config()?;
            gguf.tokenizer_config()
        });
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(reason), "{error} should say {reason}");
    };
    refused(&|writer| writer.whole("llama.expert_count", 8), "mixtures of experts");
    refused(&|writer| writer.whole("llama.attention.sliding_window", 64), "llama.attention.sliding_window");
    refused(&|writer| writer.whole("llama.rope.dimension_count", 8), "16, the width of a head");
    refused(&|writer| writer.text("llama.rope.scaling.type", "yarn"), "none or linear");
    refused(&|writer| writer.whole("split.count", 3), "llama-gguf-split");
    refused(&|writer| writer.whole("general.alignment", 24), "power of two");
    refused(&|writer| writer.whole("llama.block_count", 1), "twice");
    refused(&|_| {}, "tokenizer.ggml.model` is missing");
    refused(&|writer| writer.text("tokenizer.ggml.model", "bert"), "gpt2 or llama");
    refused(
        &|writer| {
            writer.text("tokenizer.ggml.model", "gpt2");
            writer.text("tokenizer.ggml.pre", "tekken");
        },
        "gpt-2, smollm, llama-bpe, qwen2",
    );
    refused(
        &|writer| {
            *writer = with_tokens(writer.clone());
            writer.whole("tokenizer.ggml.eos_token_id", 3);
        },
        "below 3",
    );
    let mut writer = Writer::default();
    writer.text("general.architecture", "mamba");
    assert!(Gguf::parse(&writer.finish()).unwrap().config().unwrap_err().to_string().contains("qwen3"));
}

#[test]
fn a_format_that_cannot_be_read_is_named_with_those_that_can() {
    let mut writer = Writer::of_model(&fixture("tiny-llama"));
    writer.tensor("blk.9.attn_v.weight", &[256, 1], 13, vec![0; 176]);
    let bytes = writer.finish();
    let gguf = Gguf::parse(&bytes).unwrap();
    let error = gguf.widened("model.layers.9.self_attn.v_proj.weight").err().unwrap().to_string();
    assert!(error.contains("Q5_K") && error.contains("Q4_K, Q6_K"), "{error}");
    assert!(gguf.widened("model.layers.10.self_attn.v_proj.weight").unwrap().is_none());
    assert!(gguf.widened("no.such.name").unwrap().is_none());
}

#[test]
fn quantised_rows_of_queries_come_back_in_order_too() {
    // One head of four rows; each row is one block of Q8_0 with its own number in it.
    let mut writer = Writer::default();
    writer.text("general.architecture", "llama");
    writer.whole("llama.attention.head_count", 1);
    writer.whole("llama.embedding_length", 32);
    let row = |number: u8| [&half::f16::ONE.to_le_bytes()[..], &[number; 32]].concat();
    writer.tensor("blk.0.attn_q.weight", &[32, 4], 8, [0, 2, 1, 3].map(row).concat());
    let bytes = writer.finish();
    let gguf = Gguf::parse(&bytes).unwrap();
    let tensor = gguf.widened("model.layers.0.self_attn.q_proj.weight").unwrap().unwrap();
    assert_eq!(tensor.shape, [4, 32]);
    let numbers: Vec<f32> =
        tensor.bytes.as_chunks::<2>().0.iter().map(|raw| half::bf16::from_le_bytes(*raw).to_f32()).collect();
    let expected: Vec<f32> = [0.0, 1.0, 2.0, 3.0].into_iter().flat_map(|number| [number; 32]).collect();
    assert_eq!(numbers, expected);
}

/// Whatever the bytes are, reading everything of them ends in a result.
fn read_all(bytes: &[u8]) -> Result<(), GgufError> {
    let gguf = Gguf::parse(bytes)?;
    let layers = [gguf.config(), gguf.generation_config(), gguf.tokenizer(), gguf.tokenizer_config()];
    for name in ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"] {
        gguf.widened(name)?;
    }
    layers.into_iter().collect::<Result<Vec<_>, _>>().map(drop)
}

#[test]
fn a_truncated_file_is_an_error_wherever_it_ends() {
    let mut writer = with_tokens(Writer::default());
    writer.text("general.architecture", "llama");
    writer.tensor("token_embd.weight", &[32, 2], 8, vec![0; 68]);
    let whole = writer.finish();
    assert!(Gguf::parse(&whole).is_ok());
    // What follows the last tensor's data is padding.
    let end = whole.len().next_multiple_of(32) - 32 + 68 % 32;
    for length in 0..end {
        assert!(Gguf::parse(&whole[..length]).is_err(), "{length} of {end} bytes");
    }
    let short = File::new("short", &whole[..100]);
    let error = ModelFiles::open(&ModelSource::Gguf(short.0.clone())).unwrap_err();
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("ends within"), "{error:?}");
    assert!(Gguf::parse(b"PK\x03\x04").err().unwrap().to_string().contains("PK"));
    assert!(Gguf::parse(b"GGUF\0\0\0\x03").err().unwrap().to_string().contains("little-endian"));
}

#[test]
fn counts_that_a_file_cannot_have_are_refused_before_anything_is_allocated() {
    let head = |tensors: u64, entries: u64| {
        [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &entries.to_le_bytes()].concat()
    };
    assert!(Gguf::parse(&head(u64::MAX, 0)).is_err());
    assert!(Gguf::parse(&head(0, u64::MAX)).is_err());
    for (kind, count) in [(8u32, u64::MAX), (8, 1 << 40), (0, u64::MAX), (12, u64::MAX / 4), (9, 1)] {
        let list = [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &count.to_le_bytes()].concat();
        let file = [&head(0, 1)[..], &1u64.to_le_bytes(), b"k", &list].concat();
        assert!(Gguf::parse(&file).is_err(), "{count} of type {kind}");
    }
    let mut writer = Writer::default();
    writer.tensor("token_embd.weight", &[1 << 40, 1 << 40], 0, Vec::new());
    assert!(Gguf::parse(&writer.finish()).err().unwrap().to_string().contains("token_embd.weight"));
}

proptest! {
    #[test]
    fn garbage_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read_all(&bytes);
        let _ = read_all(&[&b"GGUF\x03\0\0\0"[..], &bytes].concat());
    }

    #[test]
    fn a_damaged_file_is_read_or_refused(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut writer = with_tokens(Writer::default());
        for (key, value) in [("block_count", 1), ("context_length", 64), ("embedding_length", 64),
                             ("feed_forward_length", 64), ("attention.head_count", 2)] {
            writer.whole(&format!("llama.{key}"), value);
        }
        writer.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
        writer.text("general.architecture", "llama");
        writer.tensor("token_embd.weight", &[64, 3], 2, vec![7; 2 * 3 * 18]);
        writer.tensor("blk.0.attn_q.weight", &[64, 64], 8, vec![7; 2 * 64 * 34]);
        writer.tensor("output_norm.weight", &[64], 0, vec![0; 256]);
        let mut bytes = writer.finish();
        prop_assert!(read_all(&bytes).is_ok());
        // Most of the file is data, where damage goes unnoticed: aim at what comes before.
        for (at, byte) in damage {
            let at = at.index(900.min(bytes.len()));
            bytes[at] = byte;
        }
        let _ = read_all(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        let _ = read_all(&bytes);
    }
}
