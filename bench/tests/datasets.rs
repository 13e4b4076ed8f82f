//! Datasets: determined by the seed, and of the lengths that were asked for.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::path::PathBuf;

use bench::args::{Cli, Command, ServeArgs};
use bench::dataset::{self, Content, Dataset};
use bench::tokens::TokenCounter;
use clap::Parser;

fn args(flags: &str) -> ServeArgs {
    let words = ["bench", "serve"].into_iter().chain(flags.split_whitespace());
    let Command::Serve(args) = Cli::try_parse_from(words).unwrap().command else { panic!("not serve") };
    args.validate().unwrap();
    *args
}

fn load(flags: &str, counter: &TokenCounter) -> Dataset {
    dataset::load(&args(flags), counter).unwrap()
}

fn built_in_tokenizer() -> TokenCounter {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../worker/models/builtin");
    TokenCounter::load(Some(&directory)).unwrap()
}

fn texts(dataset: &Dataset) -> Vec<(&str, u64)> {
    let turns = dataset.conversations.iter().flat_map(|conversation| &conversation.turns);
    turns
        .map(|turn| match &turn.content {
            Content::Text(passage) => (passage.text.as_str(), passage.tokens),
            Content::Made(_) | Content::Body(..) => panic!("a made dataset has plain texts"),
        })
        .collect()
}

/// A file that is removed with the value.
struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str, content: &str) -> Self {
        let path = std::env::temp_dir().join(format!("bench-datasets-{}-{name}", std::process::id()));
        std::fs::File::create(&path).unwrap().write_all(content.as_bytes()).unwrap();
        Self(path)
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn the_seed_determines_every_made_dataset() {
    let counter = TokenCounter::Approximate;
    for flags in [
        "--dataset-name random --num-prompts 20",
        "--dataset-name shared-prefix --gsp-num-groups 3 --gsp-prompts-per-group 4 --gsp-num-turns 2",
        "--dataset-name multi-turn --num-prompts 5 --multi-turn-system-len 9",
    ] {
        let of = |seed| load(&format!("{flags} --seed {seed}"), &counter);
        assert_eq!(of(1), of(1), "{flags}");
        assert_ne!(of(1), of(2), "{flags}");
    }
}

#[test]
fn random_lengths_are_exact_by_the_models_tokenizer_and_within_the_range() {
    let counter = built_in_tokenizer();
    let flags = "--num-prompts 40 --random-input-len 200 --random-output-len 50 --random-range-ratio 0.5";
    let dataset = load(flags, &counter);
    for (text, tokens) in texts(&dataset) {
        assert_eq!(counter.count(text).unwrap(), tokens);
        assert!((100..=200).contains(&tokens), "{tokens}");
    }
    for conversation in &dataset.conversations {
        assert!((25..=50).contains(&conversation.turns[0].output_tokens.unwrap()));
    }
    let equal = load("--num-prompts 5 --random-input-len 333 --random-range-ratio 1", &counter);
    assert!(texts(&equal).iter().all(|(_, tokens)| *tokens == 333));
}

#[test]
fn shared_prefixes_are_shared_within_their_group_only_and_counted_exactly() {
    let counter = built_in_tokenizer();
    let flags = "--dataset-name generated-shared-prefix --gsp-num-groups 3 --gsp-prompts-per-group 4 \
                 --gsp-system-prompt-len 100 --gsp-question-len 20 --gsp-output-len 7 --gsp-ordered";
    let dataset = load(flags, &counter);
    let texts = texts(&dataset);
    assert_eq!(texts.len(), 12);
    let prefix = |index: usize| texts[index].0.split_once("\n\n").unwrap().0;
    for (index, (text, tokens)) in texts.iter().enumerate() {
        assert_eq!(counter.count(text).unwrap(), *tokens);
        assert_eq!(counter.count(prefix(index)).unwrap(), 100);
        for other in 0..texts.len() {
            assert_eq!(prefix(index) == prefix(other), index / 4 == other / 4, "{index} and {other}");
        }
    }
    let shuffled = load(&flags.replace("--gsp-ordered", "--num-prompts 5"), &counter);
    assert_eq!(shuffled.conversations.len(), 5);
    let too_many = dataset::load(&args(&format!("{flags} --num-prompts 13")), &counter).unwrap_err();
    assert!(too_many.to_string().contains("12"), "{too_many}");
}

#[test]
fn conversations_have_their_turns_and_lengths() {
    let counter = built_in_tokenizer();
    let flags = "--dataset-name multi-turn --num-prompts 3 --multi-turn-num-turns 5 --multi-turn-system-len 30 \
                 --multi-turn-question-len 11 --multi-turn-output-len 6";
    let dataset = load(flags, &counter);
    assert_eq!(dataset.conversations.len(), 3);
    for conversation in &dataset.conversations {
        assert_eq!(conversation.turns.len(), 5);
        assert_eq!(conversation.input_tokens(), 30 + 5 * 11);
    }
}

#[test]
fn sharegpt_takes_first_exchanges_within_the_bounds() {
    let long = "x".repeat(4 * 1500);
    let entry = |prompt: &str, answer: &str| {
        serde_json::json!({"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer},
                           {"from": "human", "value": "later"}]})
    };
    let lone = serde_json::json!({"id": "1", "conversations": [{"from": "human", "value": "nobody answers this one"}]});
    let middle = "q\u{e9} \"quoted\" prompt of some length";
    let entries =
        [entry(middle, "an answer of thirty-two bytes ..."), entry(&long, &long), entry("hi", "x"), lone];
    let file = TestFile::new("sharegpt.json", &serde_json::json!(entries).to_string());
    let flags = format!("--dataset-name sharegpt --dataset-path {}", file.0.display());
    let load = |more: &str| load(&format!("{flags} {more}"), &TokenCounter::Approximate);
    assert_eq!(texts(&load("")).len(), 2);
    let pruned = load("--sharegpt-prune --num-prompts 4");
    assert_eq!(texts(&pruned), [(middle, middle.len().div_ceil(4) as u64)]);
    assert!(pruned.notes.iter().any(|note| note.contains("1 usable")), "{:?}", pruned.notes);
    let fixed = load("--sharegpt-output-len 64 --sharegpt-context-len 100");
    assert_eq!(fixed.conversations.iter().map(|c| c.turns[0].output_tokens).collect::<Vec<_>>(), [Some(64)]);
}

/// A file in the format of the published ones, and prompts of exactly so many tokens: four bytes each.
#[test]
fn sharegpt_is_pruned_at_its_bounds_and_read_as_published() {
    let text = |letter: &str, tokens: usize| letter.repeat(4 * tokens);
    let cases = [
        // Tokens of prompt and answer, kept with and without the switch.
        ((4, 4), true, true),
        ((3, 9), false, true),
        ((9, 3), false, true),
        ((1, 9), false, false),
        ((9, 1), false, false),
        ((1_024, 1_024), true, true),
        ((1_025, 9), false, true),
        ((1_024, 1_025), false, true),
        ((100, 1_948), true, true),
    ];
    let entry = |(number, ((prompt, answer), ..)): (usize, &((usize, usize), bool, bool))| {
        serde_json::json!({
            "id": format!("QWJhYvA_{number}"),
            "conversations": [
                {"from": "human", "value": text("q", *prompt), "markdown": null},
                {"from": "gpt", "value": text("a", *answer)},
                {"from": "human", "value": "and a later turn, which is not sent"},
            ],
        })
    };
    let mut entries: Vec<_> = cases.iter().enumerate().map(entry).collect();
    entries.push(serde_json::json!({"id": "empty_0", "conversations": []}));
    entries.push(serde_json::json!({"id": "old_0", "conversation": [
        {"from": "system", "value": "Sie \u{e4}hneln \"sich\"\n\u{1f600}"}, {"from": "gpt", "value": "an answer of seven tokens ..."}]}));
    let file = TestFile::new("published.json", &serde_json::to_string_pretty(&entries).unwrap());
    let flags = format!("--dataset-name sharegpt --dataset-path {}", file.0.display());
    for (switch, kept) in [
        ("--sharegpt-prune", cases.iter().filter(|case| case.1).collect::<Vec<_>>()),
        ("", cases.iter().filter(|case| case.2).collect()),
    ] {
        let dataset = load(&format!("{flags} {switch} --num-prompts 20"), &TokenCounter::Approximate);
        let mut lengths: Vec<_> = dataset
            .conversations
            .iter()
            .map(|one| {
                (one.turns.len(), one.input_tokens() as usize, one.turns[0].output_tokens.unwrap() as usize)
            })
            .collect();
        let mut expected: Vec<_> = kept.iter().map(|((prompt, answer), ..)| (1, *prompt, *answer)).collect();
        expected.push((1, 6, 8));
        lengths.sort_unstable();
        expected.sort_unstable();
        assert_eq!(lengths, expected, "{switch:?}");
        assert!(texts(&dataset).iter().any(|(text, _)| *text == "Sie \u{e4}hneln \"sich\"\n\u{1f600}"));
    }
    // A fixed output length is not an answer that is too short (vLLM's rule).
    let fixed =
        load(&format!("{flags} --sharegpt-prune --sharegpt-output-len 2"), &TokenCounter::Approximate);
    assert!(
        fixed.conversations.len() > 4
            && fixed.conversations.iter().all(|one| one.turns[0].output_tokens == Some(2))
    );
}

#[test]
fn bad_files_are_refused_with_the_place() {
    let refuse = |name: &str, content: &str| {
        let file = TestFile::new(&format!("bad-{name}"), content);
        let flags = format!("--dataset-name {name} --dataset-path {}", file.0.display());
        format!("{:#}", dataset::load(&args(&flags), &TokenCounter::Approximate).unwrap_err())
    };
    assert!(refuse("sharegpt", "{}").contains("JSON array"));
    assert!(refuse("sharegpt", "[]").contains("nothing to send"));
    assert!(refuse("openai", "{\"prompt\":\"a\"}\n\n{\"model\":\"x\"}\n").contains("line 3"));
    let missing = args("--dataset-name openai --dataset-path /nonexistent/file");
    let error = format!("{:#}", dataset::load(&missing, &TokenCounter::Approximate).unwrap_err());
    assert!(error.contains("/nonexistent/file"), "{error}");
}
