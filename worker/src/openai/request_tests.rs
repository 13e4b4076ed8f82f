//! What a request may say, and what is said about the rest.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::openai::prompt::Prompt;

fn parse(kind: Kind, body: &Value) -> Result<GenerationRequest, RequestError> {
    GenerationRequest::parse(kind, body.to_string().as_bytes())
}

fn chat(extra: &Value) -> Result<GenerationRequest, RequestError> {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    parse(Kind::Chat, &body)
}

#[test]
fn reads_every_parameter() {
    let request = chat(&json!({"model": "m", "temperature": 0.5, "min_p": 0.1, "frequency_penalty": 0.25,
        "presence_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"7": -100, "8": 0.5}, "min_tokens": 3,
        "stop_token_ids": [4, 5], "priority": -2, "top_k": 5, "top_p": 0.9, "seed": -1, "stop": ["a"],
        "max_tokens": 7, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "n": 3,
        "logprobs": true, "top_logprobs": 2, "response_format": {"type": "text"}, "user": "u"}))
    .unwrap();
    assert_eq!(
        request.params,
        SamplingParams {
            temperature: 0.5,
            top_k: Some(5),
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.5,
            frequency_penalty: 0.25,
            presence_penalty: -0.5,
            logit_bias: vec![(7, -100.0), (8, 0.5)],
            min_tokens: 3,
            withheld_tokens: Vec::new(),
            logprobs: Some(2),
            seed: u64::MAX,
        }
    );
    assert_eq!((request.max_tokens, request.ignore_eos), (Some(7), true));
    assert_eq!((request.choices, request.stop_tokens, request.priority), (3, vec![4, 5], -2));
    assert_eq!((request.streaming, request.stop), (Streaming::WithUsage, vec!["a".to_owned()]));
}

#[test]
fn a_cache_salt_is_a_text_with_something_in_it() {
    let salt = |given: Value| chat(&json!({"cache_salt": given})).map(|request| request.cache_salt);
    assert_eq!(salt(json!("s")).unwrap().as_deref(), Some("s"));
    assert_eq!(salt(Value::Null).unwrap(), None);
    for (wrong, said) in [(json!(""), "at least one character"), (json!(5), "a string")] {
        let error = salt(wrong).unwrap_err().to_string();
        assert!(error.contains("cache_salt") && error.contains(said), "{error}");
    }
}

#[test]
fn constraints_under_sglangs_names_are_refused() {
    for (name, value) in [
        ("regex", json!("a+")),
        ("json_schema", json!("{}")),
        ("ebnf", json!("root ::= 'a'")),
        ("structural_tag", json!({})),
        ("return_tokens_as_token_ids", json!(true)),
    ] {
        let error = chat(&json!({name: value})).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("not supported"), "{error}");
    }
    assert!(chat(&json!({"return_tokens_as_token_ids": false, "regex": null})).is_ok());
}

#[test]
fn max_completion_tokens_wins() {
    let request = chat(&json!({"max_tokens": 7, "max_completion_tokens": 9})).unwrap();
    assert_eq!(request.max_tokens, Some(9));
}

fn completion(extra: &Value) -> Result<GenerationRequest, RequestError> {
    let mut body = json!({"prompt": "x"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    parse(Kind::Completion, &body)
}

#[test]
fn prompts_in_all_their_forms() {
    let prompts = |prompt: Value| completion(&json!({"prompt": prompt})).map(|request| request.input);
    let text = |text: &str| Prompt::Text(text.to_owned());
    let several = |prompts: &[Prompt]| Input::Prompts(prompts.to_vec());
    assert_eq!(prompts(json!("a")).unwrap(), several(&[text("a")]));
    assert_eq!(prompts(json!(["a"])).unwrap(), several(&[text("a")]));
    assert_eq!(prompts(json!(["a", "b"])).unwrap(), several(&[text("a"), text("b")]));
    assert_eq!(prompts(json!([1, 2])).unwrap(), several(&[Prompt::Tokens(vec![1, 2])]));
    assert_eq!(prompts(json!([[1, 2]])).unwrap(), several(&[Prompt::Tokens(vec![1, 2])]));
    let mixed = several(&[Prompt::Tokens(vec![1, 2]), text("b"), Prompt::Tokens(vec![3])]);
    assert_eq!(prompts(json!([[1, 2], "b", [3]])).unwrap(), mixed);
    for bad in
        [json!([]), json!([[]]), json!(["a", 1]), json!(5), json!([-1]), json!([1.5]), json!({}), Value::Null]
    {
        let error = prompts(bad.clone()).unwrap_err().to_string();
        assert!(error.contains("a list of token ids"), "{bad}: {error}");
    }
}

#[test]
fn log_probabilities_are_asked_for_in_two_ways() {
    let chats = |extra: Value| chat(&extra).unwrap().params.logprobs;
    assert_eq!(chats(json!({"logprobs": true, "top_logprobs": 20})), Some(20));
    assert_eq!(chats(json!({"logprobs": true})), Some(0));
    assert_eq!(chats(json!({"logprobs": false, "top_logprobs": 0})), None);
    let completions = |extra: Value| completion(&extra).unwrap().params.logprobs;
    assert_eq!(completions(json!({"logprobs": 5})), Some(5));
    assert_eq!(completions(json!({"logprobs": 0})), Some(0));
    assert_eq!(completions(json!({"logprobs": null})), None);
    for (extra, parameter) in [
        (json!({"logprobs": true}), "logprobs = true"),
        (json!({"logprobs": 21}), "logprobs = 21"),
        (json!({"top_logprobs": 2}), "top_logprobs = 2"),
        (json!({"logprobs": 2, "echo": true}), "echo"),
    ] {
        let error = completion(&extra).unwrap_err().to_string();
        assert!(error.contains(parameter.split(' ').next().unwrap()), "{extra}: {error}");
    }
}

#[test]
fn tokens_beyond_the_vocabulary_are_named() {
    for (extra, parameter) in [
        (json!({"stop_token_ids": [1, 50]}), "stop_token_ids"),
        (json!({"logit_bias": {"50": 1}}), "logit_bias"),
    ] {
        let request = chat(&extra).unwrap();
        assert!(request.check_vocabulary(51).is_ok());
        let error = request.check_vocabulary(50).unwrap_err().to_string();
        assert!(error.contains(parameter) && error.contains("token 50"), "{error}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    for (extra, parameter) in [
        (json!({"temperature": 3}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"n": 0}), "n"),
        (json!({"n": 129}), "n"),
        (json!({"n": 2, "best_of": 3}), "best_of"),
        (json!({"logprobs": 5}), "logprobs"),
        (json!({"top_logprobs": 5}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"min_p": 1.1}), "min_p"),
        (json!({"frequency_penalty": 2.5}), "frequency_penalty"),
        (json!({"presence_penalty": "x"}), "presence_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"min_tokens": 8, "max_tokens": 7}), "min_tokens"),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"stop_token_ids": ["a"]}), "stop_token_ids"),
        (json!({"stop_token_ids": vec![0; 129]}), "stop_token_ids"),
        (json!({"priority": 1.5}), "priority"),
        (json!({"echo": true}), "echo"),
        (json!({"tools": 5}), "tools"),
        (json!({"add_generation_prompt": 1}), "add_generation_prompt"),
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"continue_final_message": true, "add_generation_prompt": false}), "continue_final_message"),
        (json!({"bad_words": ["a"]}), "bad_words"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"stop": [1]}), "stop"),
        (json!({"stop": vec!["x"; 17]}), "stop"),
        (json!({"seed": "s"}), "seed"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"content": "x"}]}), "messages"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages"),
        (json!({"messages": ["x"]}), "messages"),
        (json!({"model": 5}), "model"),
    ] {
        let error = chat(&extra).unwrap_err();
        let RequestError::Parameter { parameter: named, message } = &error else {
            panic!("{extra}: {error:?}")
        };
        assert_eq!(*named, parameter, "{message}");
        assert!(message.contains(parameter), "{message}");
    }
}

proptest! {
    #[test]
    fn never_panics(body in prop::collection::vec(any::<u8>(), 0..200), chat in any::<bool>()) {
        let kind = if chat { Kind::Chat } else { Kind::Completion };
        let _ = GenerationRequest::parse(kind, &body);
    }
}
