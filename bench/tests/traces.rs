//! Recorded traces: when requests came, how long they were, and which blocks of their prompts were equal.
//!
//! The published files are not in the repository. Tests that need one look for it in `$ROUNDHOUSE_SHARED/data/traces`, or in
//! `shared/data/traces` beside the repository, and say so when it is not there.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use bench::args::{Cli, Command, ServeArgs};
use bench::dataset::{self, Content, Conversation, Dataset};
use bench::tokens::TokenCounter;
use clap::Parser;

fn args(name: &str, path: &str, more: &str) -> ServeArgs {
    let words = ["bench", "serve", "--dataset-name", name, "--dataset-path", path];
    let words = words.into_iter().chain(more.split_whitespace());
    let Command::Serve(args) = Cli::try_parse_from(words).unwrap().command else { panic!("not serve") };
    args.validate().unwrap();
    *args
}

/// Loads a file with this content, which is removed again.
fn load(name: &str, content: &str, more: &str, counter: &TokenCounter) -> anyhow::Result<Dataset> {
    static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("bench-traces-{}-{number}", std::process::id()));
    std::fs::write(&path, content).unwrap();
    let dataset = dataset::load(&args(name, path.to_str().unwrap(), more), counter);
    std::fs::remove_file(&path).unwrap();
    dataset
}

fn built_in_tokenizer() -> TokenCounter {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../worker/models/builtin");
    TokenCounter::load(Some(&directory)).unwrap()
}

/// The prompts as they would be sent.
fn texts(dataset: &Dataset) -> Vec<String> {
    let turns = dataset.conversations.iter().flat_map(|conversation| &conversation.turns);
    turns.map(|turn| dataset.text(&turn.content).unwrap().into_owned()).collect()
}

fn output_tokens(dataset: &Dataset) -> Vec<u64> {
    dataset.conversations.iter().map(|conversation| conversation.turns[0].output_tokens.unwrap()).collect()
}

fn published(file: &str) -> Option<String> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    let shared = std::env::var_os("ROUNDHOUSE_SHARED").map_or_else(beside, PathBuf::from);
    let path = shared.join("data/traces").join(file);
    if path.exists() {
        return Some(path.to_str().unwrap().to_owned());
    }
    eprintln!("skipped: {} is not there (ROUNDHOUSE_SHARED names the folder)", path.display());
    None
}

const TRACE: &str = r#"
{"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 700, "output_length": 6, "hash_ids": [0, 3]}
{"timestamp": 4500, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]}
"#;

#[test]
fn equal_ids_give_equal_token_blocks_and_lengths_are_honoured() {
    for counter in [built_in_tokenizer(), TokenCounter::Approximate] {
        let dataset = load("trace", TRACE, "", &counter).unwrap();
        let texts = texts(&dataset);
        let tokens = |text: &str| match counter {
            TokenCounter::Exact(_) => counter.count(text).unwrap(),
            TokenCounter::Approximate => text.split(' ').count() as u64,
        };
        assert_eq!(texts.iter().map(|text| tokens(text)).collect::<Vec<_>>(), [1030, 700, 1024]);
        // A word is a token here, so that blocks can be compared by their words.
        let words: Vec<Vec<_>> = texts.iter().map(|text| text.split(' ').collect()).collect();
        assert_eq!(words[0][..512], words[1][..512], "id 0");
        assert_eq!(words[0][..1024], words[2][..1024], "ids 0 and 1");
        assert_ne!(words[0][512..700], words[1][512..700], "ids 1 and 3");
        assert_eq!(output_tokens(&dataset), [5, 6, 1], "nothing can be asked for no tokens");
    }
}

#[test]
fn times_count_from_the_first_request_and_the_first_requests_can_be_taken() {
    let counter = TokenCounter::Approximate;
    let all = load("trace", TRACE, "", &counter).unwrap();
    assert_eq!(all.arrivals, [0, 0, 3500].map(Duration::from_millis));
    let two = load("trace", TRACE, "--num-prompts 2", &counter).unwrap();
    assert_eq!((two.conversations.len(), two.arrivals.len()), (2, 2));
    let short = load("trace", TRACE, "--trace-context-len 1024 --num-prompts 9", &counter).unwrap();
    assert_eq!(short.conversations.iter().map(Conversation::input_tokens).collect::<Vec<_>>(), [700, 1024]);
    assert_eq!(short.arrivals, [0, 3500].map(Duration::from_millis));
    for part in ["1 requests were dropped", "2 usable requests, 9 were asked for"] {
        assert!(short.notes.iter().any(|note| note.contains(part)), "{:?}", short.notes);
    }
}

#[test]
fn lines_that_are_no_requests_are_refused_with_their_number() {
    let refuse = |name: &str, content: &str| {
        format!("{:#}", load(name, content, "", &TokenCounter::Approximate).unwrap_err())
    };
    let missing = refuse("trace", "\n{\"timestamp\": 0, \"input_length\": 5}\n");
    assert!(missing.contains("line 2") && missing.contains("hash_ids"), "{missing}");
    let few =
        refuse("trace", r#"{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}"#);
    assert!(few.contains("2 blocks of 512 tokens") && few.contains("--trace-block-len"), "{few}");
    let header = refuse("azure", "time,in,out\n");
    assert!(header.contains("TIMESTAMP,ContextTokens,GeneratedTokens"), "{header}");
    let line = refuse("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,1\n");
    assert!(line.contains("line 2"), "{line}");
    for (line, part) in [
        (r#"{"timestamp": 1e300, "input_length": 5, "output_length": 1, "hash_ids": [0]}"#, "timestamp"),
        (
            r#"{"timestamp": 0, "input_length": 5, "output_length": 18446744073709551615, "hash_ids": [0]}"#,
            "output_length",
        ),
    ] {
        let error = refuse("trace", line);
        assert!(error.contains("line 1") && error.contains(part), "{error}");
    }
}

#[test]
fn azure_prompts_have_their_lengths_and_share_nothing() {
    let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,600,10\r\n\
               2023-11-16 18:17:04.0319600,600,8\r\n";
    let counter = built_in_tokenizer();
    let dataset = load("azure", csv, "", &counter).unwrap();
    let texts = texts(&dataset);
    assert!(texts.iter().all(|text| counter.count(text).unwrap() == 600));
    assert_ne!(texts[0][..20], texts[1][..20]);
    assert_eq!(dataset.arrivals, [Duration::ZERO, Duration::from_micros(52_000)]);
    assert_eq!(output_tokens(&dataset), [10, 8]);
}

#[test]
fn the_mooncake_conversation_trace_is_what_is_known_of_it() {
    let Some(path) = published("conversation_trace.jsonl") else { return };
    let counter = built_in_tokenizer();
    let dataset = dataset::load(&args("trace", &path, ""), &counter).unwrap();
    assert_eq!(dataset.conversations.len(), 12_031);
    assert_eq!(dataset.arrivals.last().unwrap().as_secs(), 3536);
    let (mut known, mut cached_tokens, mut input_tokens) = (HashSet::new(), 0, 0);
    for conversation in &dataset.conversations {
        let Content::Made(recipe) = &conversation.turns[0].content else { panic!("a trace has recipes") };
        let found = recipe.blocks.iter().take_while(|name| known.contains(*name)).count() as u64;
        cached_tokens += (found * 512).min(recipe.tokens - 1);
        input_tokens += recipe.tokens;
        known.extend(recipe.blocks.iter().copied());
    }
    assert_eq!(input_tokens / 12_031, 12_035);
    let hit_percent = 100.0 * cached_tokens as f64 / input_tokens as f64;
    assert!((hit_percent - 37.4).abs() < 0.1, "{hit_percent}");
    for conversation in dataset.conversations.iter().step_by(1000) {
        let text = dataset.text(&conversation.turns[0].content).unwrap();
        assert_eq!(counter.count(&text).unwrap(), conversation.input_tokens());
    }
}

#[test]
fn the_azure_traces_are_read_to_their_ends() {
    for file in ["AzureLLMInferenceTrace_code.csv", "AzureLLMInferenceTrace_conv.csv"] {
        let Some(path) = published(file) else { return };
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        let dataset = dataset::load(&args("azure", &path, ""), &TokenCounter::Approximate).unwrap();
        assert_eq!(dataset.conversations.len(), lines - 1, "all but the header");
        assert!(dataset.arrivals.is_sorted());
        let minutes = dataset.arrivals.last().unwrap().as_secs() / 60;
        assert!((57..=58).contains(&minutes), "{file} is of nearly an hour, not {minutes} minutes");
    }
}
