//! Generate and Abort, and all protocols on one port.

use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use roundhouse_wire::v1;
use roundhouse_wire::v1::generate_reply::Event;
use roundhouse_wire::v1::generate_request::Input;
use roundhouse_wire::v1::prompt::Content;
use serde_json::{Value, json};
use tonic::Code;
use worker::model::ModelSource;
use worker::{KvEventRecording, WorkerConfig};

use crate::harness::*;

/// Status, headers and body of an answer to an HTTP call.
fn answer(replies: Vec<v1::GenerateReply>) -> (u32, Vec<(String, String)>, String) {
    let mut replies = replies.into_iter().map(|reply| reply.event.unwrap());
    let Some(Event::Head(head)) = replies.next() else { panic!("a head comes first") };
    let header = |header: v1::Header| (header.name, String::from_utf8(header.value.into()).unwrap());
    let body = replies.flat_map(|event| match event {
        Event::Body(piece) => piece.to_vec(),
        other => panic!("{other:?} in a body"),
    });
    let body = String::from_utf8(body.collect()).unwrap();
    (head.status, head.headers.into_iter().map(header).collect(), body)
}

fn without_its_own(mut object: Value) -> Value {
    for key in ["id", "created"] {
        object.as_object_mut().unwrap().remove(key);
    }
    object
}

fn chat(extra: &Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_call_is_answered_as_over_http() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let path = "/v1/chat/completions";
    // Once beforehand, so that both find the same in the cache.
    served.http1("POST", path, &chat(&json!({}))).await;
    let (status, expected) = served.http1("POST", path, &chat(&json!({}))).await;
    assert_eq!(status, 200, "{expected}");
    let (status, headers, body) =
        answer(generate(&mut client, http_call("POST", path, &chat(&json!({})))).await);
    assert_eq!(status, 200);
    assert!(headers.contains(&("content-length".into(), body.len().to_string())), "{headers:?}");
    assert_eq!(
        without_its_own(serde_json::from_str(&body).unwrap()),
        without_its_own(expected),
        "the same but for its id"
    );
    let streamed = chat(&json!({"stream": true}));
    let replies = generate(&mut client, http_call("POST", path, &streamed)).await;
    assert!(replies.len() > 2, "it comes in pieces");
    let (status, headers, body) = answer(replies);
    assert_eq!(status, 200);
    assert!(headers.contains(&("content-type".into(), "text/event-stream; charset=utf-8".into())));
    assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
}

#[tokio::test]
async fn what_the_worker_refuses_it_refuses_in_its_own_words() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    for (method, path, body) in [
        ("POST", "/v1/chat/completions", chat(&json!({"temperature": 9}))),
        ("POST", "/v1/chat/completions", json!("not an object")),
        ("GET", "/v1/chat/completions", Value::Null),
        ("POST", "/nowhere", json!({})),
    ] {
        let expected = served.http1(method, path, &body).await;
        let (status, _, said) = answer(generate(&mut client, http_call(method, path, &body)).await);
        assert_eq!((status as u16, serde_json::from_str(&said).unwrap()), expected);
    }
}

#[tokio::test]
async fn a_call_that_is_none_is_named() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let header = |name: &str, value: &'static [u8]| v1::Header { name: name.into(), value: value.into() };
    let call = |method: &str, path: &str, headers: Vec<v1::Header>| v1::GenerateRequest {
        input: Some(Input::Http(v1::HttpCall {
            method: method.into(),
            path: path.into(),
            headers,
            ..Default::default()
        })),
        ..Default::default()
    };
    let no_prompt =
        v1::GenerateRequest { input: Some(Input::Prompt(v1::Prompt::default())), ..Default::default() };
    let mut zero = tokens("", vec![1], 0);
    let mut hot = tokens("", vec![1], 1);
    if let (Some(Input::Prompt(zero)), Some(Input::Prompt(hot))) = (&mut zero.input, &mut hot.input) {
        zero.max_tokens = Some(0);
        hot.sampling = Some(v1::Sampling { temperature: Some(-1.0), ..Default::default() });
    }
    for (request, expected) in [
        (v1::GenerateRequest::default(), "input is missing"),
        (call("G ET", "/health", vec![]), "method"),
        (call("GET", "health", vec![]), "path"),
        (call("GET", "/health", vec![header("a b", b"")]), "header"),
        (call("GET", "/health", vec![header("a", b"\n")]), "value"),
        (no_prompt, "no content"),
        (zero, "max_tokens"),
        (hot, "temperature"),
        (tokens("", vec![u32::MAX], 1), "vocabulary"),
        (tokens("", vec![], 1), "empty"),
        (tokens("", vec![1], u32::MAX), "context length"),
    ] {
        let status = in_time(client.generate(request)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(expected), "{status}");
    }
}

/// Text, tokens and end of an answer to a prompt.
fn spoken(replies: Vec<v1::GenerateReply>) -> (String, Vec<u32>, v1::Finished) {
    let (mut text, mut ids, mut end) = (String::new(), Vec::new(), None);
    for reply in replies {
        assert!(end.is_none(), "nothing comes after the end");
        match reply.event.unwrap() {
            Event::Token(token) => {
                text += &token.text;
                ids.push(token.id);
            }
            Event::Finished(finished) => end = Some(finished),
            other => panic!("{other:?}"),
        }
    }
    (text, ids, end.unwrap())
}

#[tokio::test]
async fn a_prompt_is_answered_by_tokens() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let text = "Once upon a time there was a little engine that";
    let completion = json!({"prompt": text, "temperature": 0, "max_tokens": 9, "ignore_eos": true});
    let expected = served.http1("POST", "/v1/completions", &completion).await.1;
    let (_, tokenized) = served.http1("POST", "/tokenize", &json!({"prompt": text})).await;
    let ids: Vec<u32> = serde_json::from_value(tokenized["tokens"].clone()).unwrap();
    let mut as_text = tokens("", Vec::new(), 9);
    if let Some(Input::Prompt(prompt)) = &mut as_text.input {
        prompt.content = Some(Content::Text(text.into()));
    }
    for request in [as_text, tokens("", ids.clone(), 9)] {
        let (said, drawn, end) = spoken(generate(&mut client, request).await);
        assert_eq!(said, expected["choices"][0]["text"], "the same as over HTTP");
        assert_eq!(drawn.len(), 9);
        assert_eq!(end.reason(), v1::FinishReason::Length);
        let usage = end.usage.unwrap();
        assert_eq!((usage.prompt_tokens as usize, usage.completion_tokens), (ids.len(), 9));
    }
}

#[tokio::test]
async fn logprobs_and_choices_are_those_of_http() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let prompt: Vec<u32> = (300..340).collect();
    let body = json!({"prompt": prompt, "temperature": 0.9, "seed": 7, "max_tokens": 5, "ignore_eos": true,
                      "logprobs": 2, "n": 3});
    let expected = served.http1("POST", "/v1/completions", &body).await.1;
    let mut request = tokens("", prompt, 5);
    if let Some(Input::Prompt(prompt)) = &mut request.input {
        (prompt.logprobs, prompt.choices) = (Some(2), Some(3));
        prompt.sampling = Some(v1::Sampling { temperature: Some(0.9), seed: Some(7), ..Default::default() });
    }
    let replies = generate(&mut client, request).await;
    for choice in 0..3 {
        let of = |reply: &&v1::GenerateReply| match &reply.event {
            Some(Event::Token(token)) => token.choice == choice,
            Some(Event::Finished(finished)) => finished.choice == choice,
            _ => false,
        };
        let replies: Vec<_> = replies.iter().filter(of).cloned().collect();
        let mut scores = Vec::new();
        for reply in &replies {
            let Some(Event::Token(token)) = &reply.event else { continue };
            let found = token.logprobs.as_ref().unwrap();
            assert_eq!(found.top.len(), 2);
            assert!(found.top[0].logprob >= found.top[1].logprob && found.top[0].logprob >= found.drawn);
            scores.push(found.drawn);
        }
        let (said, _, end) = spoken(replies);
        let expected = &expected["choices"][choice as usize];
        assert_eq!(said, expected["text"]);
        let known: Vec<f32> = serde_json::from_value(expected["logprobs"]["token_logprobs"].clone()).unwrap();
        assert_eq!(scores, known);
        assert_eq!(end.usage.unwrap().completion_tokens, 5);
    }
    let status = |change: fn(&mut v1::Prompt)| {
        let (mut client, mut request) = (client.clone(), tokens("", vec![1], 1));
        if let Some(Input::Prompt(prompt)) = &mut request.input {
            change(prompt);
        }
        async move { in_time(client.generate(request)).await.unwrap_err() }
    };
    for (refused, expected) in [
        (status(|prompt| prompt.logprobs = Some(21)).await, "logprobs must be from 0 to 20, not 21"),
        (status(|prompt| prompt.choices = Some(0)).await, "choices must be from 1 to 128, not 0"),
    ] {
        assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, expected));
    }
}

/// Of all that wait the lowest number goes first, whichever way it came. Who went when is read off what entered the cache.
#[tokio::test]
async fn priorities_mean_the_same_over_grpc_and_http() {
    let mut config = WorkerConfig::new(ModelSource::Builtin);
    config.kv_events = KvEventRecording::On;
    config.max_running = Some(1);
    let served = serve_with(config).await;
    let mut client = served.client().await;
    let mut events = client.kv_events(v1::KvEventsRequest::default()).await.unwrap().into_inner();
    let mut first = client.generate(tokens("first", vec![1, 2, 3], 8_000)).await.unwrap().into_inner();
    in_time(first.message()).await.unwrap().unwrap();
    let prompt = |number: u32| (300 + 40 * number..340 + 40 * number).collect::<Vec<u32>>();
    let typed = |id: &str, number, priority| {
        let mut request = tokens(id, prompt(number), 2);
        if let Some(Input::Prompt(prompt)) = &mut request.input {
            prompt.priority = priority;
        }
        request
    };
    let http = |id: &'static str, number, priority: i32| {
        let body = json!({"prompt": prompt(number), "max_tokens": 2, "priority": priority});
        let mut request = http_call("POST", "/v1/completions", &body);
        request.request_id = id.into();
        request
    };
    let mut waiting = Vec::new();
    for request in
        [typed("typed 5", 0, 5), http("http 3", 1, 3), typed("typed -5", 2, -5), http("http -3", 3, -3)]
    {
        waiting.push(client.generate(request).await.unwrap().into_inner());
    }
    let mut load = client.load(v1::LoadRequest::default()).await.unwrap().into_inner();
    while in_time(load.message()).await.unwrap().unwrap().waiting_requests < 4 {}
    drop(first);
    let mut order: Vec<String> = Vec::new();
    while order.len() < 4 {
        for event in in_time(events.message()).await.unwrap().unwrap().events {
            let Some(v1::kv_event::Event::Stored(stored)) = event.event else { continue };
            if stored.request_id != "first" && !order.contains(&stored.request_id) {
                order.push(stored.request_id);
            }
        }
    }
    assert_eq!(order, ["typed -5", "http -3", "http 3", "typed 5"]);
    for stream in waiting {
        all(stream).await;
    }
}

#[tokio::test]
async fn whoever_drops_the_stream_aborts() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    for request in [
        tokens("", vec![1, 2, 3], 400),
        http_call(
            "POST",
            "/v1/completions",
            &json!({"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}),
        ),
    ] {
        let mut stream = client.generate(request).await.unwrap().into_inner();
        in_time(stream.message()).await.unwrap().unwrap();
        drop(stream);
        idle(&mut client).await;
    }
    // Not streamed: nothing has come yet when it is dropped, and the call itself has been answered at most by headers.
    let whole = json!({"prompt": "a", "max_tokens": 400, "ignore_eos": true});
    let stream = client.generate(http_call("POST", "/v1/completions", &whole)).await.unwrap();
    let mut load = client.load(v1::LoadRequest::default()).await.unwrap().into_inner();
    while in_time(load.message()).await.unwrap().unwrap().running_requests == 0 {}
    drop(stream);
    idle(&mut client).await;
    let (_, metrics) = served.http1("GET", "/metrics", &Value::Null).await;
    let aborted =
        metrics.as_str().unwrap().lines().find(|line| line.contains("\"abort\"")).map(str::to_owned);
    assert!(aborted.is_some_and(|line| line.ends_with(" 3")), "{metrics}");
}

/// Waits until nothing runs.
async fn idle(client: &mut Client) {
    let mut load = client.load(v1::LoadRequest::default()).await.unwrap().into_inner();
    while in_time(load.message()).await.unwrap().unwrap().running_requests > 0 {}
}

#[tokio::test]
async fn abort_ends_a_generation_by_its_id() {
    let served = serve_worker().await;
    let mut client = served.client().await;
    let mut by_header = http_call(
        "POST",
        "/v1/completions",
        &json!({"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}),
    );
    if let Some(Input::Http(call)) = &mut by_header.input {
        call.headers = vec![v1::Header { name: "x-request-id".into(), value: "r".into() }];
    }
    for request in [tokens("r", vec![1, 2, 3], 400), by_header] {
        let mut stream = client.generate(request).await.unwrap().into_inner();
        in_time(stream.message()).await.unwrap().unwrap();
        let abort = |id: &str| v1::AbortRequest { request_id: id.into() };
        assert_eq!(client.abort(abort("another")).await.unwrap().into_inner().aborted, 0);
        assert_eq!(client.abort(abort("r")).await.unwrap().into_inner().aborted, 1);
        let status = loop {
            match in_time(stream.message()).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended well"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::Cancelled, "{status}");
        idle(&mut client).await;
        assert_eq!(client.abort(abort("r")).await.unwrap().into_inner().aborted, 0);
    }
}

#[tokio::test]
async fn all_protocols_share_a_port() {
    let served = serve_worker().await;
    assert_eq!(served.http1("GET", "/health", &Value::Null).await, (200, json!("ok\n")));
    let info = served.client().await.info(v1::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.model.as_str(), info.block_tokens), ("builtin", 16));
    assert!(info.kv_blocks > 0 && info.context_tokens > 0);
    // HTTP/2 without gRPC.
    let stream = tokio::net::TcpStream::connect(served.address).await.unwrap();
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let request =
        http::Request::get(format!("http://{}/health", served.address)).body(String::new()).unwrap();
    let response = in_time(sender.send_request(request)).await.unwrap();
    assert_eq!(in_time(response.into_body().collect()).await.unwrap().to_bytes(), "ok\n");
}
