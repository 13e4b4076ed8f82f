//! What engines must be told so that one computes a prompt and another generates from it, and what they answer: the words of vLLM's KV connectors
//! and of SGLang. Facts: `kv_transfer_params` as vLLM's NixlConnector reads and writes them, `bootstrap_*` as SGLang's `GenerateReqInput` does.
//!
//! Pure: bodies in, bodies out. Next: [`legs`](crate::stages::legs), which sends them.

use router_core::{DpRank, ToldBy, WorkerSpec};
use serde_json::value::RawValue;

use crate::openai::members::Members;
use crate::openai::usage::{ReplyTail, ReportedUsage, Words};
use crate::payload::Payload;
use crate::transport::RANK_FIELDS;

/// How engines hand prompts over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum PrefillProtocol {
    /// One after the other: the prefill worker's answer says where the KV is, and the other one is told. An engine that generates can compute
    /// prompts as well.
    Vllm,
    /// Both at once, who meet by a number. An engine that generates cannot compute prompts.
    Sglang,
}

/// Where SGLang's prefill engines are asked for what they have computed, unless told otherwise.
const BOOTSTRAP_PORT: u16 = 8_998;

/// What vLLM's prefill leg is asked besides one token: that not as a stream, and to keep the KV for another engine.
const TO_PREFILL: &str = r#""stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
/// What of the client's gives way to that, or makes no sense with one token.
const NOT_TO_PREFILL: [&str; 8] = [
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "kv_transfer_params",
    "best_of",
];
const RESPONSES: &str = "/v1/responses";

/// Where SGLang's legs meet.
const BOOTSTRAP: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];
/// Which data-parallel rank of SGLang's prefill engine has the prompt.
const PREFILL_RANK: &str = "disagg_prefill_dp_rank";

const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";
/// What engines that hand prompts over are told by whoever splits requests, and by nobody else.
const OF_THE_SPLIT: [&str; 4] = [KV_TRANSFER_PARAMS, BOOTSTRAP[0], BOOTSTRAP[1], BOOTSTRAP[2]];
/// What vLLM takes further arguments from, the same one among them (its source, 0.32).
const FURTHER_ARGUMENTS: &str = "vllm_xargs";
/// And where these come to in the end, which a request for tokens (`/inference/v1/generate`) has as it is.
const SAMPLING: &str = "sampling_params";

/// The body without what a client says of where KV is, if it says anything: made up, it takes an engine down (seen with vLLM 0.32), or has it
/// connect to wherever the client likes.
#[must_use]
pub fn without_the_clients(body: &Members) -> Option<Payload> {
    let mut left_out = OF_THE_SPLIT.to_vec();
    if body.may_say(FURTHER_ARGUMENTS, KV_TRANSFER_PARAMS) {
        left_out.push(FURTHER_ARGUMENTS);
    }
    if body.has_within(SAMPLING, KV_TRANSFER_PARAMS) {
        left_out.push(SAMPLING);
    }
    let says = left_out.len() > OF_THE_SPLIT.len() || OF_THE_SPLIT.iter().any(|name| body.has(name));
    says.then(|| body.with("", &left_out))
}

impl PrefillProtocol {
    /// Whether two engines can serve a request together that came to `path`: one prompt, and for vLLM one answer to it.
    #[must_use]
    pub fn can_split(self, path: &str, body: &Members) -> bool {
        let several = ["n", "best_of"].iter().any(|name| body.number(name).is_some_and(|number| number > 1));
        match self {
            Self::Vllm => {
                ["/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES].contains(&path)
                    && !(several || body.is_list_of_texts("prompt"))
            }
            Self::Sglang => {
                ["/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES, "/generate"]
                    .contains(&path)
            }
        }
    }

    /// Whether its engines can answer a request at all, of those that two of them serve together. SGLang 0.5.23 computes several answers to a prompt as
    /// requests of one room, of which none is ever met.
    #[must_use]
    pub fn can_answer(self, body: &Members) -> bool {
        let several = |number: Option<u64>| number.is_some_and(|number| number > 1);
        let sampling = || match body.parsed::<serde_json::Value>(SAMPLING) {
            Some(serde_json::Value::Array(each)) => each.iter().any(|one| several(one["n"].as_u64())),
            Some(of_all) => several(of_all["n"].as_u64()),
            None => false,
        };
        self == Self::Vllm || !(several(body.number("n")) || sampling())
    }

    /// Where one engine is told that the other one is, and their room, so that it answers all by itself: SGLang's own word for that (0.5.23,
    /// `disaggregation/utils.py`), which its probes use. `None` if an engine answers as it is.
    #[must_use]
    pub fn without_the_other(self) -> Option<(&'static str, u64)> {
        (self == Self::Sglang).then_some(("2.2.2.2", 0))
    }

    /// Whether a worker that generates serves a request by itself if there is nobody to compute the prompt.
    #[must_use]
    pub fn generates_alone(self) -> bool {
        self == Self::Vllm
    }
}

/// vLLM's prefill leg of a request that came to `path`.
#[must_use]
pub fn vllm_prefill(path: &str, body: &Members) -> Payload {
    let limit = if path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
    // Of two limits on the same the newer one counts.
    let newer = if body.has("max_completion_tokens") { r#","max_completion_tokens":1"# } else { "" };
    body.with(&format!(r#"{TO_PREFILL},"{limit}":1{newer}"#), &NOT_TO_PREFILL)
}

/// What vLLM's prefill worker has answered.
#[derive(Debug)]
pub struct Prefilled {
    /// What the other worker is to be told, as it stands; `None` if there is nothing to fetch, and it computes the prompt itself.
    pub transfer: Option<Box<RawValue>>,
    /// What the prompt was, and how much of it was cached.
    pub usage: Option<ReportedUsage>,
}

impl Prefilled {
    /// Reads an answer.
    #[must_use]
    pub fn read(reply: &[u8]) -> Self {
        #[derive(serde::Deserialize)]
        struct Reply {
            kv_transfer_params: Option<Box<RawValue>>,
        }
        let transfer = serde_json::from_slice::<Reply>(reply).ok().and_then(|reply| reply.kv_transfer_params);
        let mut tail = ReplyTail::default();
        tail.push(reply);
        Self { transfer: transfer.filter(|params| params.get() != "null"), usage: tail.usage(Words::Usage) }
    }
}

/// vLLM's decode leg: the client's own request, with the prefill worker's answer in it.
#[must_use]
pub fn vllm_decode(body: &Members, transfer: &RawValue) -> Payload {
    body.with(&format!(r#""kv_transfer_params":{transfer}"#), &["kv_transfer_params"])
}

/// SGLang's legs, the prefill worker's first: where that one is, and the number by which both know the request. The first is no stream, so that its answer
/// tells what was cached. Each is told its own data-parallel rank, if it is one, and the one that generates also which rank has the prompt: where it is
/// told, it does not ask.
#[must_use]
pub fn sglang_legs(
    body: &Members,
    (prefill, decode): (&WorkerSpec, &WorkerSpec),
    room: u64,
) -> (Payload, Payload) {
    let host = serde_json::Value::from(host_of(&prefill.address));
    let port = prefill.bootstrap_port.unwrap_or(BOOTSTRAP_PORT);
    let added = format!(r#""bootstrap_host":{host},"bootstrap_port":{port},"bootstrap_room":{room}"#);
    let whole = added.clone() + r#","stream":false"#;
    let streamed = ["stream", "stream_options"];
    if prefill.dp_rank.is_none() && decode.dp_rank.is_none() {
        let to_prefill = body.with(&whole, &[&BOOTSTRAP[..], &streamed].concat());
        return (to_prefill, body.with(&added, &BOOTSTRAP));
    }
    let without = [&BOOTSTRAP[..], &RANK_FIELDS, &[PREFILL_RANK]].concat();
    let own = |spec: &WorkerSpec| {
        spec.dp_rank.map(|DpRank { number, told_by }| match told_by {
            ToldBy::Field(name) => format!(r#","{name}":{number}"#),
            // A leg that went to another rank than the other one is told would never be met, so it is said where all paths read it.
            ToldBy::Header => format!(r#","{}":{number}"#, RANK_FIELDS[0]),
        })
    };
    let to_prefill = own(prefill).unwrap_or_default();
    let from = prefill.dp_rank.map(|rank| format!(r#","{PREFILL_RANK}":{}"#, rank.number));
    let to_decode = own(decode).unwrap_or_default() + &from.unwrap_or_default();
    let without_stream = [&without[..], &streamed].concat();
    (body.with(&(whole + &to_prefill), &without_stream), body.with(&(added + &to_decode), &without))
}

/// The host of a worker's address, as another engine would look it up.
fn host_of(address: &str) -> &str {
    let authority = address.split_once("://").map_or(address, |(_, rest)| rest);
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use router_core::WorkerId;
    use serde_json::{Value, json};

    use super::*;

    fn members(body: &Value) -> Members {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Members::of(&Payload::from(Bytes::from(body.to_string())))).unwrap()
    }

    fn read(body: &Payload) -> Value {
        serde_json::from_slice(&body.joined()).unwrap()
    }

    #[test]
    fn a_prefill_leg_asks_for_one_token_and_the_place_of_its_kv() {
        let params = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null
        });
        let path = "/v1/chat/completions";
        let body = json!({
            "model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 100, "min_tokens": 5,
            "stream_options": {"include_usage": true}, "temperature": 0, "kv_transfer_params": {"do_remote_prefill": true}
        });
        let expected = json!({
            "stream": false, "max_tokens": 1, "kv_transfer_params": params, "model": "m",
            "messages": [{"role": "user", "content": "x"}], "temperature": 0
        });
        assert_eq!(read(&vllm_prefill(path, &members(&body))), expected);
        let body = json!({"model": "m", "max_completion_tokens": 9});
        let expected = json!({
            "stream": false, "max_tokens": 1, "kv_transfer_params": params, "max_completion_tokens": 1, "model": "m"
        });
        assert_eq!(read(&vllm_prefill(path, &members(&body))), expected);
        let expected =
            json!({"stream": false, "max_output_tokens": 1, "kv_transfer_params": params, "input": "x"});
        assert_eq!(read(&vllm_prefill(RESPONSES, &members(&json!({"input": "x"})))), expected);
    }

    #[test]
    fn what_a_prefill_worker_answers_goes_on_as_it_stands() {
        let reply = br#"{"id":"a","kv_transfer_params": {"remote_block_ids": [[1, 2]], "x":18446744073709551615},"usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        let Prefilled { transfer, usage } = Prefilled::read(reply);
        assert_eq!(usage.map(|usage| (usage.prompt_tokens, usage.cached_tokens)), Some((7, Some(4))));
        let body = vllm_decode(&members(&json!({"model": "m", "stream": true})), &transfer.unwrap()).joined();
        let expected = br#"{"kv_transfer_params":{"remote_block_ids": [[1, 2]], "x":18446744073709551615},"model":"m","stream":true}"#;
        assert_eq!(&body[..], &expected[..]);
        for nothing in ["{}", r#"{"kv_transfer_params":null}"#, "no json", ""] {
            assert!(Prefilled::read(nothing.as_bytes()).transfer.is_none(), "{nothing}");
        }
    }

    #[test]
    fn what_a_client_says_of_where_kv_is_is_left_out() {
        let said =
            json!({"kv_transfer_params": {"do_remote_prefill": true}, "model": "m", "bootstrap_room": 1});
        let left = without_the_clients(&members(&said)).expect("something is left out");
        assert_eq!(read(&left), json!({"model": "m"}));
        let further = json!({"vllm_xargs": {"kv_transfer_params": "x"}, "model": "m"});
        assert_eq!(read(&without_the_clients(&members(&further)).unwrap()), json!({"model": "m"}));
        let sampling = json!({"sampling_params": {"extra_args": {"kv_transfer_params": {}}}, "model": "m"});
        assert_eq!(read(&without_the_clients(&members(&sampling)).unwrap()), json!({"model": "m"}));
        let escaped: String = "kv_transfer_params".bytes().map(|byte| format!("\\u{byte:04x}")).collect();
        for hidden in [
            format!(r#"{{"{escaped}":{{}},"model":"m"}}"#),
            format!(r#"{{"vllm_xargs":{{"{escaped}":1}},"model":"m"}}"#),
        ] {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let members = runtime.block_on(Members::of(&Payload::from(Bytes::from(hidden)))).unwrap();
            assert_eq!(read(&without_the_clients(&members).unwrap()), json!({"model": "m"}));
        }
        for nothing in [
            json!({"model": "m"}),
            json!({"kv_transfer_params": null}),
            json!({"vllm_xargs": {"a": 1}}),
            json!({"sampling_params": {"stop": ["\n"]}}),
        ] {
            assert!(without_the_clients(&members(&nothing)).is_none(), "{nothing}");
        }
    }

    #[test]
    fn both_of_sglangs_legs_know_the_room() {
        let sent = json!({"text": "x", "bootstrap_room": 1, "routed_dp_rank": 5, "stream": true});
        let [prefill, decode] = [spec("p1"), spec("d1")];
        let (one, other) = sglang_legs(&members(&sent), (&prefill, &decode), u64::MAX >> 1);
        let room = 9_223_372_036_854_775_807_u64;
        let mut expected = json!({
            "bootstrap_host": "p1", "bootstrap_port": 8998, "bootstrap_room": room, "text": "x", "routed_dp_rank": 5, "stream": true
        });
        assert_eq!(read(&other), expected);
        expected["stream"] = false.into();
        assert_eq!(read(&one), expected);
        for (address, host) in
            [("http://p1:8000", "p1"), ("https://10.0.0.1:443", "10.0.0.1"), ("http://[::1]:9", "::1")]
        {
            assert_eq!(host_of(address), host);
        }
    }

    fn spec(host: &str) -> WorkerSpec {
        WorkerSpec::new(WorkerId::new(host), format!("http://{host}:8000"))
    }

    #[test]
    fn sglangs_legs_are_told_their_ranks_and_where_the_prompt_is() {
        let rank = |host, number, told_by| WorkerSpec {
            dp_rank: Some(DpRank { number, told_by }),
            bootstrap_port: Some(7),
            ..spec(host)
        };
        let sent =
            json!({"text": "x", "routed_dp_rank": 5, "data_parallel_rank": 5, "disagg_prefill_dp_rank": 5});
        let legs = |prefill: &WorkerSpec, decode: &WorkerSpec| {
            let (one, other) = sglang_legs(&members(&sent), (prefill, decode), 9);
            let told = |body: &Payload| {
                let body = read(body);
                assert_eq!((&body["bootstrap_room"], &body["text"]), (&json!(9), &json!("x")));
                let names = ["routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"];
                names.map(|name| body.get(name).and_then(Value::as_u64))
            };
            (told(&one), told(&other))
        };
        let (prefill, decode) = (rank("p", 3, ToldBy::Header), rank("d", 1, ToldBy::Header));
        let told = ([Some(3), None, None], [Some(1), None, Some(3)]);
        assert_eq!(legs(&prefill, &decode), told);
        assert_eq!(legs(&prefill, &spec("d")), ([Some(3), None, None], [None, None, Some(3)]));
        assert_eq!(legs(&spec("p"), &decode), ([None; 3], [Some(1), None, None]));
        let older = rank("p", 3, ToldBy::Field("data_parallel_rank"));
        assert_eq!(legs(&older, &decode), ([None, Some(3), None], [Some(1), None, Some(3)]));
    }

    #[test]
    fn what_two_engines_cannot_serve_together_goes_to_one() {
        let chat = "/v1/chat/completions";
        for (body, vllm, sglang) in [
            (json!({"messages": []}), true, true),
            (json!({"messages": [], "n": 1}), true, true),
            (json!({"messages": [], "n": 2}), false, true),
            (json!({"prompt": ["a", "b"]}), false, true),
            (json!({"prompt": [[1, 2], [3]]}), false, true),
            (json!({"prompt": [1, 2]}), true, true),
            (json!({"messages": [], "kv_transfer_params": {}}), true, true),
        ] {
            let body = members(&body);
            assert_eq!(PrefillProtocol::Vllm.can_split(chat, &body), vllm, "{body:?}");
            assert_eq!(PrefillProtocol::Sglang.can_split(chat, &body), sglang, "{body:?}");
        }
        let body = members(&json!({}));
        for (path, vllm, sglang) in
            [("/v1/embeddings", false, false), ("/generate", false, true), ("/v1/responses", true, true)]
        {
            assert_eq!(PrefillProtocol::Vllm.can_split(path, &body), vllm, "{path}");
            assert_eq!(PrefillProtocol::Sglang.can_split(path, &body), sglang, "{path}");
        }
    }

    #[test]
    fn of_sglangs_engines_two_together_answer_once() {
        for (body, once) in [
            (json!({"messages": []}), true),
            (json!({"messages": [], "n": 1}), true),
            (json!({"messages": [], "n": 2}), false),
            (json!({"text": "a", "sampling_params": {"n": 2}}), false),
            (json!({"text": ["a", "b"], "sampling_params": [{"temperature": 0}, {"n": 3}]}), false),
            (json!({"text": ["a", "b"], "sampling_params": {"temperature": 0, "n": 1}}), true),
        ] {
            let members = members(&body);
            assert_eq!(PrefillProtocol::Sglang.can_answer(&members), once, "{body}");
            assert!(PrefillProtocol::Vllm.can_answer(&members), "one engine does it alone");
        }
    }
}
