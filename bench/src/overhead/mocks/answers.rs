//! What a mock says: all of it put together once, so that an answer is one write.
//!
//! The small answers are those that routers ask for when they start: models, health, SGLang's and vLLM's server facts.

use serde_json::{Value, json};

/// The kinds of paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// Those that turn a prompt into tokens, which vLLM's router asks before it decides.
    Tokens(TokensShape),
    /// Everything else.
    Other,
}

/// Whose answer with tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokensShape {
    /// `/v1/chat/completions/render`
    Render,
    /// `/tokenize`
    Tokenize,
}

/// How much of a body is looked at for its system prompt. Every router tried keeps the messages near the beginning.
const LOOKED_AT_BYTES: usize = 512;

impl Endpoint {
    /// The kind of a path.
    pub fn of(path: &[u8]) -> Self {
        match path {
            b"/v1/chat/completions" => Self::Chat,
            b"/v1/completions" => Self::Completions,
            b"/v1/chat/completions/render" => Self::Tokens(TokensShape::Render),
            b"/tokenize" => Self::Tokens(TokensShape::Tokenize),
            _ => Self::Other,
        }
    }

    /// How much of a body has to be kept for the answer.
    pub fn looks_at_bytes(self) -> usize {
        match self {
            Self::Tokens(_) => usize::MAX,
            _ => LOOKED_AT_BYTES,
        }
    }
}

/// All answers, head included.
#[derive(Debug)]
pub struct Answers {
    /// Chat completions of some 300 bytes with usage, by [`size_class`] of the prompt's tokens.
    chat_completions: Vec<Vec<u8>>,
    /// The same for `/v1/completions`.
    text_completions: Vec<Vec<u8>>,
    /// 404.
    pub not_found: Vec<u8>,
    /// The head of a stream.
    pub stream_head: Vec<u8>,
    /// One event of a stream, in its HTTP chunk.
    pub chunk: Vec<u8>,
    /// `[DONE]` and the end of the body.
    pub stream_end: Vec<u8>,
    facts: Vec<(&'static str, Vec<u8>)>,
}

impl Answers {
    /// Writes them.
    pub fn new() -> Self {
        let chat = |usage: Value| {
            json!({
                "id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1_795_000_000, "model": "mock",
                "choices": [{"index": 0, "finish_reason": "stop", "message":
                    {"role": "assistant", "content": "Sixteen tokens that a mock has said so many times before, today."}}],
                "usage": usage,
            })
        };
        let text = |usage: Value| {
            json!({
                "id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_795_000_000, "model": "mock",
                "choices": [{"index": 0, "finish_reason": "stop", "text": " sixteen tokens, said before."}],
                "usage": usage,
            })
        };
        let event = json!({
            "id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1_795_000_000,
            "model": "mock", "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": null}],
        });
        Self {
            chat_completions: usages().map(|usage| whole("200 OK", &chat(usage))).collect(),
            text_completions: usages().map(|usage| whole("200 OK", &text(usage))).collect(),
            not_found: error(404),
            stream_head: b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n\
                           transfer-encoding: chunked\r\n\r\n"
                .to_vec(),
            chunk: http_chunk(&format!("data: {event}\n\n")),
            stream_end: [http_chunk("data: [DONE]\n\n"), b"0\r\n\r\n".to_vec()].concat(),
            facts: facts(),
        }
    }

    /// The completion of a chat in a body of that size.
    pub fn chat_completion(&self, body_bytes: usize) -> &[u8] {
        &self.chat_completions[size_class(body_bytes)]
    }

    /// The completion of a text in a body of that size.
    pub fn text_completion(&self, body_bytes: usize) -> &[u8] {
        &self.text_completions[size_class(body_bytes)]
    }

    /// The answer to a path that generates nothing, if a mock has one.
    pub fn of(&self, path: &[u8]) -> Option<&Vec<u8>> {
        self.facts.iter().find(|(known, _)| known.as_bytes() == path).map(|(_, answer)| answer)
    }
}

impl Default for Answers {
    fn default() -> Self {
        Self::new()
    }
}

/// Bytes of a body that a mock takes for a token.
const BYTES_PER_TOKEN: usize = 4;
/// Classes between two powers of two: no prompt is said to be shorter than it is by more than an eighth.
const CLASSES: usize = 8;
/// Bodies of a gigabyte have as many tokens as a mock can say.
const OCTAVES: usize = 28;

/// Which usage a body of that size has.
fn size_class(body_bytes: usize) -> usize {
    let tokens = (body_bytes / BYTES_PER_TOKEN).max(CLASSES);
    let octave = (tokens.ilog2() - CLASSES.ilog2()) as usize;
    (octave * CLASSES + (tokens >> octave) - CLASSES).min(OCTAVES * CLASSES - 1)
}

/// The usages of all size classes.
fn usages() -> impl Iterator<Item = Value> {
    let tokens = (0..OCTAVES).flat_map(|octave| (CLASSES..2 * CLASSES).map(move |eighths| eighths << octave));
    tokens
        .map(|tokens| json!({"prompt_tokens": tokens, "completion_tokens": 16, "total_tokens": tokens + 16}))
}

/// An answer with this status and an error as OpenAI writes it.
pub fn error(status: u16) -> Vec<u8> {
    let line = format!("{status} {}", if status == 404 { "Not Found" } else { "Mock Error" });
    whole(&line, &json!({"error": {"message": "a mock said so", "type": "mock_error", "code": status}}))
}

/// A prompt's tokens in the words of the endpoint that was asked.
pub fn tokens(shape: TokensShape, ids: &[u32]) -> Vec<u8> {
    let body = match shape {
        TokensShape::Render => {
            json!({"request_id": "chatcmpl-0123456789abcdef", "token_ids": ids, "model": "mock",
                                      "sampling_params": {"max_tokens": 16, "temperature": 0.0}})
        }
        TokensShape::Tokenize => json!({"count": ids.len(), "max_model_len": 1_048_576, "tokens": ids,
                                        "token_strs": null}),
    };
    whole("200 OK", &body)
}

fn facts() -> Vec<(&'static str, Vec<u8>)> {
    let model = json!({"id": "mock", "object": "model", "created": 1_795_000_000, "owned_by": "mock", "root": "mock",
                       "max_model_len": 1_048_576});
    let server = json!({"model_path": "mock", "served_model_name": "mock", "tokenizer_path": "mock", "tp_size": 1,
                        "dp_size": 1, "version": "0", "max_total_num_tokens": 1_048_576, "load_format": "dummy"});
    let about_model = json!({"model_path": "mock", "tokenizer_path": "mock", "is_generation": true,
                             "served_model_name": "mock"});
    let load = json!([{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]);
    let answers = [
        ("/", json!({})),
        ("/health", json!({})),
        ("/health_generate", json!({})),
        ("/v1/models", json!({"object": "list", "data": [model]})),
        ("/get_server_info", server.clone()),
        ("/server_info", server),
        ("/get_model_info", about_model.clone()),
        ("/model_info", about_model),
        ("/get_load", load),
        ("/version", json!({"version": "0"})),
        ("/flush_cache", json!({})),
        ("/metrics", json!({})),
    ];
    answers.into_iter().map(|(path, body)| (path, whole("200 OK", &body))).collect()
}

fn whole(status: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn http_chunk(data: &str) -> Vec<u8> {
    format!("{:x}\r\n{data}\r\n", data.len()).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_about_a_quarter_of_its_bytes_in_tokens() {
        let answers = Answers::new();
        for body_bytes in [0, 1, 40, 1_024, 1_500, 16_384, 204_800, 64 << 20, usize::MAX] {
            let answer = String::from_utf8_lossy(answers.chat_completion(body_bytes));
            let (_, body) = answer.split_once("\r\n\r\n").unwrap();
            let answer: Value = serde_json::from_str(body).unwrap();
            let said = answer["usage"]["prompt_tokens"].as_u64().unwrap() as f64;
            let tokens = (body_bytes / BYTES_PER_TOKEN).clamp(8, 15 << 27) as f64;
            assert!((0.875..=1.0).contains(&(said / tokens)), "{body_bytes}: {said} of {tokens}");
        }
    }
}
