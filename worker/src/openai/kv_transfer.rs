//! `kv_transfer_params`: how a request says that its prompt's KV goes to another worker, or comes from one, and how a reply says where it is. vLLM's
//! words (`NixlConnector`), so that routers which split requests for vLLM do for this worker; they pass on what they do not know.
//!
//! Next: [`transfer`](crate::transfer) does it.

use serde_json::{Value, json};

use super::fields::{Fields, must};
use crate::error::RequestError;

const NAME: &str = "kv_transfer_params";

/// What a request has to do with another worker.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum KvTransferParams {
    /// Nothing.
    #[default]
    None,
    /// Another worker will go on from its prompt.
    RemoteDecode,
    /// Another worker has computed its prompt; `None` if it cannot be read where the KV is.
    RemotePrefill(Option<Remote>),
}

/// Where a prompt's KV is, and what it is of.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Remote {
    /// The worker.
    #[serde(rename = "remote_host")]
    pub host: String,
    /// Its port.
    #[serde(rename = "remote_port")]
    pub port: u16,
    /// What it is to be asked for by.
    #[serde(rename = "remote_request_id")]
    pub ticket: String,
    /// Tokens whose KV is there: the prompt's but for the last.
    #[serde(rename = "remote_num_tokens")]
    pub tokens: usize,
    /// Of which model, and how it is laid out.
    #[serde(rename = "remote_kv_format")]
    pub format: String,
    /// A digest of the prompt's tokens.
    #[serde(rename = "remote_prompt_digest")]
    pub prompt: String,
}

impl Remote {
    /// As a reply says it; `engine` is the worker that does.
    #[must_use]
    pub fn params(&self, engine: &str) -> Value {
        let mut params = json!(self);
        params["remote_engine_id"] = engine.into();
        params["do_remote_prefill"] = true.into();
        params["do_remote_decode"] = false.into();
        params
    }
}

impl Fields {
    pub(super) fn kv_transfer_params(&self) -> Result<KvTransferParams, RequestError> {
        let Some(params) = self.get(NAME) else { return Ok(KvTransferParams::None) };
        if !params.is_object() {
            return Err(must(NAME, "an object", params));
        }
        let says = |name: &str| params.get(name) == Some(&Value::Bool(true));
        Ok(match (says("do_remote_decode"), says("do_remote_prefill")) {
            (true, true) => {
                let wanted = "an object with do_remote_decode or do_remote_prefill, and not both";
                return Err(must(NAME, wanted, params));
            }
            (true, false) => KvTransferParams::RemoteDecode,
            (false, true) => KvTransferParams::RemotePrefill(serde::Deserialize::deserialize(params).ok()),
            (false, false) => KvTransferParams::None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(params: &Value) -> Result<KvTransferParams, RequestError> {
        Fields::parse(json!({ NAME: params }).to_string().as_bytes())?.kv_transfer_params()
    }

    #[test]
    fn what_a_reply_says_a_request_can_say() {
        let remote = Remote {
            host: "10.0.0.5".to_owned(),
            port: 8001,
            ticket: "ab".to_owned(),
            tokens: 99,
            format: "f".to_owned(),
            prompt: "7".to_owned(),
        };
        let params = remote.params("roundhouse-1");
        assert_eq!(params["remote_host"], "10.0.0.5");
        assert_eq!(read(&params).unwrap(), KvTransferParams::RemotePrefill(Some(remote)));
    }

    #[test]
    fn what_others_say_is_read_as_far_as_it_is_understood() {
        let vllm = json!({"do_remote_prefill": true, "remote_block_ids": [[1]], "remote_host": "h", "remote_port": 5600});
        let cases = [
            (Value::Null, KvTransferParams::None),
            (json!({}), KvTransferParams::None),
            (json!({"do_remote_prefill": false, "do_remote_decode": true}), KvTransferParams::RemoteDecode),
            (vllm, KvTransferParams::RemotePrefill(None)),
        ];
        for (params, expected) in cases {
            assert_eq!(read(&params).unwrap(), expected, "{params}");
        }
        for wrong in [json!("x"), json!([1]), json!({"do_remote_prefill": true, "do_remote_decode": true})] {
            assert!(read(&wrong).unwrap_err().to_string().contains("kv_transfer_params must be an object"));
        }
    }
}
