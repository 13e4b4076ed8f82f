//! `bench serve` from end to end against a mock server on loopback.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod mock;

use std::path::PathBuf;
use std::process::Command;

use bench::args::{Cli, ServeArgs};
use bench::record::RequestRecord;
use bench::report::Summary;
use clap::Parser;
use mock::{Mock, Reply, chunk};
use serde_json::Value;

const SMALL: &str = "--num-prompts 10 --random-input-len 4 --random-output-len 3 --random-range-ratio 1 \
                     --warmup-requests 0 --disable-tqdm";

fn args(mock: &Mock, flags: &str) -> ServeArgs {
    let url = mock.url();
    let words = ["bench", "serve", "--base-url", &url].into_iter().chain(flags.split_whitespace());
    let bench::args::Command::Serve(args) = Cli::try_parse_from(words).unwrap().command else {
        panic!("not serve")
    };
    *args
}

fn measure(mock: &Mock, flags: &str) -> (Summary, Vec<RequestRecord>) {
    bench::run::measure(&args(mock, flags)).unwrap()
}

fn three_words(_: usize) -> Reply {
    Reply::Stream(vec!["one", " two", " three"])
}

#[test]
fn counts_everything_of_a_run_that_succeeds() {
    let mock = Mock::start(three_words);
    let (summary, records) = measure(&mock, SMALL);
    let stats = &summary.statistics;
    assert_eq!((stats.completed_requests, stats.failed_requests), (10, 0));
    assert_eq!(
        (stats.output_tokens, stats.itl.count(), stats.tpot.count(), stats.ttft.count()),
        (30, 20, 10, 10)
    );
    let counts = stats.output_counts;
    assert_eq!(
        (counts.requested, counts.usage, counts.chunks, counts.retokenized),
        (Some(30), Some(30), 30, None)
    );
    assert_eq!((stats.cache.cached_tokens, stats.cache.prompt_tokens), (40, 80));
    assert_eq!(stats.cache.predicted_hit_tokens, Some(30));
    assert_eq!(stats.cache.requests_by_worker.values().copied().collect::<Vec<_>>(), [5, 5]);
    assert!(records.iter().all(|record| record.response.text == "one two three"));
    assert_eq!(summary.settings.model, "mock-model");
    let seen = mock.seen();
    assert!(
        seen.iter().all(|seen| seen.path == "/v1/chat/completions" && seen.body["model"] == "mock-model")
    );
    assert!(seen.iter().all(|seen| seen.body["stream_options"]["include_usage"] == true));
}

#[test]
fn tells_failures_of_every_kind_from_successes() {
    let mock = Mock::start(|number| match number {
        0 | 1 => three_words(number),
        2 | 3 => Reply::Status(500, r#"{"error":{"message":"engine died"}}"#),
        4 => Reply::Raw(vec![chunk("a"), "data: {\"error\":{\"message\":\"worker lost\"}}\n\n".to_owned()]),
        5 => Reply::Break(vec![chunk("a"), chunk("b")]),
        6 => Reply::Break(vec![]),
        7 => Reply::Raw(vec![chunk("a"), "data: {\"choices\": oops}\n\n".to_owned()]),
        8 => Reply::Raw(vec![chunk("a")]),
        _ => Reply::Raw(vec!["event: error\ndata: \"overloaded\"\n\n".to_owned()]),
    });
    let (summary, _) = measure(&mock, &format!("{SMALL} --max-concurrency 1"));
    let stats = &summary.statistics;
    assert_eq!((stats.completed_requests, stats.failed_requests), (2, 8));
    assert_eq!(stats.ttft.count(), 2, "a failed request has no part in the latencies");
    let count = |part: &str| {
        stats.failures.iter().filter(|(text, _)| text.contains(part)).map(|(_, count)| count).sum::<u64>()
    };
    assert_eq!(count("HTTP 500: engine died"), 2);
    assert_eq!(count("error in the stream: worker lost"), 1);
    assert_eq!((count("response cut off"), count("no response")), (1, 1), "{:?}", stats.failures);
    assert_eq!(count("malformed chunk"), 1);
    assert_eq!(count("ended without [DONE]"), 1);
    assert_eq!(count("overloaded"), 1);
}

#[test]
fn an_answer_that_never_ends_fails_at_the_time_limit() {
    let mock = Mock::start(|_| Reply::Hang(vec![chunk("a")]));
    let (summary, _) = measure(&mock, &format!("{SMALL} --timeout 0.2"));
    assert_eq!(summary.statistics.failures, [("no complete answer within 0.2 s".to_owned(), 10)]);
}

#[test]
fn a_stream_that_ends_well_without_text_is_a_success_without_ttft() {
    let mock = Mock::start(|_| Reply::Stream(vec![]));
    let (summary, _) = measure(&mock, SMALL);
    let stats = &summary.statistics;
    assert_eq!((stats.completed_requests, stats.empty_requests, stats.ttft.count()), (10, 10, 0));
}

#[test]
fn keeps_to_the_concurrency_limit_and_reaches_it() {
    // The mock answers four at a time only: with fewer in flight this would never end.
    let mock = Mock::in_groups_of(4, three_words);
    let flags = SMALL.replace("--num-prompts 10", "--num-prompts 12 --max-concurrency 4");
    let (summary, _) = measure(&mock, &flags);
    assert_eq!(summary.statistics.completed_requests, 12);
    assert_eq!(mock.most_in_flight(), 4);
    assert!(summary.statistics.queueing.max_ms() > 0.0, "later requests waited for the limit");
}

#[test]
fn one_connection_is_used_again_and_again() {
    let mock = Mock::start(three_words);
    measure(&mock, &format!("{SMALL} --max-concurrency 1"));
    assert_eq!(mock.connections(), 1, "the model list and ten requests");
}

#[test]
fn a_warm_up_is_over_when_all_of_it_is() {
    // None is broken off when the first has ended, which would cost its connection.
    let mock = Mock::in_groups_of(3, three_words);
    let flags = SMALL.replace("--warmup-requests 0", "--warmup-requests 3 --max-concurrency 3");
    let (summary, _) = measure(&mock, &flags.replace("--num-prompts 10", "--num-prompts 9"));
    assert_eq!(summary.statistics.completed_requests, 9);
    assert_eq!(mock.connections(), 3, "those of the warm-up serve the run");
}

#[test]
fn connections_that_the_server_closes_are_replaced() {
    let mock = Mock::without_keep_alive(three_words);
    let (summary, _) = measure(&mock, &format!("{SMALL} --max-concurrency 1"));
    assert_eq!((summary.statistics.completed_requests, mock.connections()), (10, 11));
}

#[test]
fn conversations_grow_with_the_real_replies_under_one_session_id() {
    let mock = Mock::start(three_words);
    let flags = "--dataset-name multi-turn --num-prompts 2 --multi-turn-num-turns 3 --multi-turn-question-len 5 \
                 --multi-turn-output-len 3 --warmup-requests 0 --disable-tqdm --send-session-id --max-concurrency 1";
    let (summary, records) = measure(&mock, flags);
    assert_eq!(summary.statistics.completed_requests, 6);
    let order: Vec<_> = records.iter().map(|record| (record.session, record.turn)).collect();
    assert_eq!(order, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
    let inputs: Vec<_> = records.iter().map(|record| record.dataset_input_tokens).collect();
    assert_eq!(inputs, [5, 13, 21, 5, 13, 21], "five words a turn and three tokens a reply");
    let seen = mock.seen();
    let third = seen[2].body["messages"].as_array().unwrap();
    assert_eq!(third.len(), 5);
    assert_eq!((&third[1]["role"], &third[1]["content"]), (&"assistant".into(), &"one two three".into()));
    assert_eq!(third[0], seen[0].body["messages"][0]);
    let sessions: Vec<_> = seen.iter().map(|seen| seen.session.clone().unwrap()).collect();
    assert_eq!(sessions, ["bench-0", "bench-0", "bench-0", "bench-1", "bench-1", "bench-1"]);
}

#[test]
fn a_failed_turn_fails_the_rest_of_its_conversation() {
    let mock =
        Mock::start(|number| if number == 1 { Reply::Status(503, "busy") } else { three_words(number) });
    let flags = "--dataset-name multi-turn --num-prompts 1 --multi-turn-num-turns 4 --warmup-requests 0 --disable-tqdm";
    let (summary, _) = measure(&mock, flags);
    let stats = &summary.statistics;
    assert_eq!((stats.completed_requests, stats.failed_requests, mock.seen().len()), (1, 3, 2));
    assert!(stats.failures[0].0.starts_with("not sent"), "{:?}", stats.failures);
}

#[test]
fn completions_and_whole_answers_are_understood() {
    let answer = r#"{"choices":[{"text":"all of it","finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":3}}"#;
    let mock = Mock::start(move |_| Reply::Raw(vec![answer.to_owned()]));
    let (summary, records) =
        measure(&mock, &format!("{SMALL} --backend vllm --disable-stream --header x-tenant:blue"));
    assert_eq!((summary.statistics.completed_requests, summary.statistics.output_tokens), (10, 30));
    assert!(records.iter().all(|record| record.response.ttft == Some(record.response.latency)));
    let seen = &mock.seen()[0];
    assert_eq!((seen.path.as_str(), seen.tenant.as_deref()), ("/v1/completions", Some("blue")));
    assert_eq!((&seen.body["stream"], seen.body.get("stream_options")), (&false.into(), None));
}

#[test]
fn a_poisson_run_sends_everything_and_never_early() {
    let mock = Mock::start(three_words);
    let (summary, records) = measure(&mock, &format!("{SMALL} --request-rate 500"));
    assert_eq!(summary.statistics.completed_requests, 10);
    let starts: Vec<_> = records.iter().map(|record| record.start).collect();
    assert!(starts.is_sorted());
    let again = measure(&mock, &format!("{SMALL} --request-rate 500")).1;
    let scheduled = |records: &[RequestRecord]| records.iter().map(|r| r.start - r.late).collect::<Vec<_>>();
    assert_eq!(scheduled(&records), scheduled(&again), "the schedule is the seed's");
}

#[test]
fn a_recorded_body_goes_to_the_endpoint_it_is_for() {
    let path = std::env::temp_dir().join(format!("bench-serve-{}.jsonl", std::process::id()));
    std::fs::write(&path, "{\"messages\":[],\"top_p\":0.5}\n{\"prompt\":\"p\",\"max_tokens\":2}\n").unwrap();
    let mock = Mock::start(three_words);
    let flags = format!(
        "--dataset-name openai --dataset-path {} --warmup-requests 0 --max-concurrency 1",
        path.display()
    );
    measure(&mock, &flags);
    std::fs::remove_file(&path).unwrap();
    let paths: Vec<_> = mock.seen().into_iter().map(|seen| (seen.path, seen.body["top_p"].clone())).collect();
    let expected =
        [("/v1/chat/completions".to_owned(), 0.5.into()), ("/v1/completions".to_owned(), Value::Null)];
    assert_eq!(paths, expected);
}

#[test]
fn retokenizes_answers_with_the_tokenizer() {
    let mock = Mock::start(three_words);
    let tokenizer = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../worker/models/builtin");
    let (summary, records) = measure(&mock, &format!("{SMALL} --tokenizer {}", tokenizer.display()));
    let counted: u64 = records.iter().map(|record| record.retokenized_tokens.unwrap()).sum();
    assert_eq!(summary.statistics.output_counts.retokenized, Some(counted));
    assert!(counted >= 30, "three words are at least three tokens");
    assert_eq!(summary.statistics.input_tokens, 40);
}

#[test]
fn the_program_prints_the_table_appends_a_json_line_and_exits_by_the_outcome() {
    let line_file = std::env::temp_dir().join(format!("bench-line-{}.jsonl", std::process::id()));
    let run = |mock: &Mock, flags: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
        command.args(["serve", "--base-url", &mock.url()]).args(flags.split_whitespace());
        command.arg("--output-file").arg(&line_file).output().unwrap()
    };
    let good = run(&Mock::start(three_words), &SMALL.replace("--warmup-requests 0", "--output-details"));
    let text = String::from_utf8(good.stdout).unwrap();
    assert!(good.status.success(), "{text}");
    assert!(text.contains("Warmup completed with 1 sequences."));
    assert!(text.contains("Successful requests:                     10        \n"), "{text}");
    let bad = run(&Mock::start(|_| Reply::Status(500, "no")), SMALL);
    assert_eq!(bad.status.code(), Some(1));
    assert!(String::from_utf8(bad.stdout).unwrap().contains("WARNING: 10 × HTTP 500: no"));
    let lines = std::fs::read_to_string(&line_file).unwrap();
    std::fs::remove_file(&line_file).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), &lines[0]["completed"], &lines[1]["failed"]), (2, &10.into(), &10.into()));
    assert_eq!(lines[0]["generated_texts"].as_array().unwrap().len(), 10);
}

#[test]
fn a_server_that_is_not_there_is_an_error_that_names_it() {
    // A port that was free a moment ago and that nothing listens on.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["serve", "--base-url", &format!("http://{free}")])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains(&free.to_string()) && error.contains("--model NAME"), "{error}");
}
