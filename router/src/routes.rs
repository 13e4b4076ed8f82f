//! What is served at which path: a longest-prefix table.

use http::Method;
use percent_encoding::percent_decode_str;
use radix_trie::{Trie, TrieCommon};

use crate::stages::parse::Understanding;

/// What a request is for; a label of the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// `POST /v1/chat/completions`.
    Chat,
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/messages`, Anthropic's API.
    Messages,
    /// `POST /v1/responses`.
    Responses,
    /// `POST /generate`, SGLang's own.
    Generate,
    /// Any other POST under `/v1/`, and what engines compute at paths of their own, such as `/rerank`: relayed as it came.
    Relayed,
    /// What changes an engine: one that is picked like any other would be changed, and the rest not.
    Administration,
    /// `GET /v1/models` and `GET /v1/models/ID`.
    Models,
    /// `GET /server_info` and `/get_server_info`.
    ServerInfo,
    /// `GET /get_model_info`.
    ModelInfo,
    /// `GET /livez`: the process runs.
    Live,
    /// `GET /readyz` and `/health`: it can serve.
    Ready,
    /// Nothing is there.
    Unknown,
}

impl Endpoint {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 13] = [
        Self::Chat,
        Self::Completions,
        Self::Messages,
        Self::Responses,
        Self::Generate,
        Self::Relayed,
        Self::Administration,
        Self::Models,
        Self::ServerInfo,
        Self::ModelInfo,
        Self::Live,
        Self::Ready,
        Self::Unknown,
    ];

    /// The label's value; the set is fixed, whatever clients ask for.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Messages => "messages",
            Self::Responses => "responses",
            Self::Generate => "generate",
            Self::Relayed => "relayed",
            Self::Administration => "administration",
            Self::Models => "models",
            Self::ServerInfo => "server_info",
            Self::ModelInfo => "model_info",
            Self::Live => "livez",
            Self::Ready => "readyz",
            Self::Unknown => "unknown",
        }
    }

    /// The method it takes.
    #[must_use]
    pub fn method(self) -> &'static str {
        match self {
            Self::Relayed | Self::Administration | Self::Unknown => "POST",
            endpoint if endpoint.is_generation() => "POST",
            _ => "GET",
        }
    }

    /// Whether an engine generates text for it, as far as the path tells.
    #[must_use]
    pub fn is_generation(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Messages | Self::Responses | Self::Generate)
    }

    /// Whether a request goes to a worker, and then how far its body must be understood.
    #[must_use]
    pub fn understanding(self) -> Option<Understanding> {
        match self {
            Self::Chat | Self::Completions => Some(Understanding::Required),
            Self::Messages | Self::Responses | Self::Generate | Self::Relayed => {
                Some(Understanding::BestEffort)
            }
            _ => None,
        }
    }
}

/// What vLLM and SGLang compute at paths outside of `/v1/`. Not what changes them (`/flush_cache`, `/sleep`, …), nor what one of them would
/// have to remember (`/open_session`).
const ENGINES_OWN: [&str; 14] = [
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/score",
    "/pooling",
    "/classify",
    "/encode",
    "/invocations",
    "/vertex_generate",
    "/parse_function_call",
    "/separate_reasoning",
];

/// A path with nothing encoded, no dots and no empty segments; `None` if it is so already.
fn plain(path: &str) -> Option<String> {
    let is_plain = !path.contains('%') && !path.contains("//") && !path.contains("/.");
    if is_plain {
        return None;
    }
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let mut segments = Vec::new();
    for segment in decoded.split('/').filter(|segment| !segment.is_empty()) {
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            _ => segments.push(segment),
        }
    }
    Some(format!("/{}", segments.join("/")))
}

/// What an engine does for a request, beside reading it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Computes a prompt, and generates text.
    Text,
    /// Computes prompts.
    Prompts,
    /// Nothing that takes a GPU.
    Nothing,
}

impl Work {
    /// At a path that is [`Endpoint::Relayed`], by its end: it is the same below `/v1/` and without it.
    #[must_use]
    pub fn at(path: &str) -> Self {
        match path.rsplit('/').next() {
            Some(
                "embeddings" | "embed" | "rerank" | "score" | "pooling" | "classify" | "encode"
                | "moderations",
            ) => Self::Prompts,
            Some(
                "tokenize"
                | "detokenize"
                | "count_tokens"
                | "input_tokens"
                | "render"
                | "parse_function_call"
                | "separate_reasoning",
            ) => Self::Nothing,
            _ => Self::Text,
        }
    }
}

/// The table.
pub struct Routes {
    table: Trie<String, Endpoint>,
}

impl Default for Routes {
    fn default() -> Self {
        let mut table = Trie::new();
        for (pattern, endpoint) in [
            ("/v1/", Endpoint::Relayed),
            ("/v1/chat/completions", Endpoint::Chat),
            ("/v1/completions", Endpoint::Completions),
            ("/v1/messages", Endpoint::Messages),
            ("/v1/responses", Endpoint::Responses),
            ("/generate", Endpoint::Generate),
            ("/v1/models", Endpoint::Models),
            ("/v1/models/", Endpoint::Models),
            ("/v1/load_lora_adapter", Endpoint::Administration),
            ("/v1/unload_lora_adapter", Endpoint::Administration),
            ("/server_info", Endpoint::ServerInfo),
            ("/get_server_info", Endpoint::ServerInfo),
            ("/get_model_info", Endpoint::ModelInfo),
            ("/livez", Endpoint::Live),
            ("/readyz", Endpoint::Ready),
            ("/health", Endpoint::Ready),
        ] {
            table.insert(pattern.to_owned(), endpoint);
        }
        for path in ENGINES_OWN {
            table.insert(path.to_owned(), Endpoint::Relayed);
        }
        Self { table }
    }
}

impl Routes {
    /// What is at `path`. A pattern that ends in `/` takes everything below it, any other itself alone.
    #[must_use]
    pub fn find(&self, path: &str) -> Endpoint {
        // Nearly every request is one of these, and a walk down the trie costs ten times the comparison.
        match path {
            "/v1/chat/completions" => return Endpoint::Chat,
            "/v1/completions" => return Endpoint::Completions,
            _ => {}
        }
        let found = self.look_up(path);
        if found != Endpoint::Relayed {
            return found;
        }
        // What engines, and what stands before them, take for another path would pass whatever is looked at there.
        match plain(path) {
            Some(meant) if self.look_up(&meant) != found => Endpoint::Unknown,
            _ => found,
        }
    }

    fn look_up(&self, path: &str) -> Endpoint {
        let mut asked = path;
        while let Some(entry) = self.table.get_ancestor(asked)
            && let (Some(pattern), Some(endpoint)) = (entry.key(), entry.value())
        {
            if pattern == path || pattern.ends_with('/') {
                return *endpoint;
            }
            // `/v1/completionsX` has met `/v1/completions`; what is above it may still take it.
            asked = &pattern[..pattern.len() - 1];
        }
        Endpoint::Unknown
    }

    /// Whether `endpoint` takes `method`.
    #[must_use]
    pub fn takes(endpoint: Endpoint, method: &Method) -> bool {
        method.as_str() == endpoint.method() || (endpoint.method() == "GET" && method == Method::HEAD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_listed_in_their_order() {
        assert!(Endpoint::ALL.iter().enumerate().all(|(at, endpoint)| *endpoint as usize == at));
    }

    #[test]
    fn tells_what_takes_an_engines_time() {
        for (path, expected) in [
            ("/v1/responses", Work::Text),
            ("/generate", Work::Text),
            ("/v1/embeddings", Work::Prompts),
            ("/v2/rerank", Work::Prompts),
            ("/tokenize", Work::Nothing),
            ("/v1/detokenize", Work::Nothing),
            ("/v1/messages/count_tokens", Work::Nothing),
            ("/v1/responses/input_tokens", Work::Nothing),
        ] {
            assert_eq!(Work::at(path), expected, "{path}");
        }
    }

    #[test]
    fn finds_the_longest_pattern_that_applies() {
        let routes = Routes::default();
        for (path, expected) in [
            ("/v1/chat/completions", Endpoint::Chat),
            ("/v1/completions", Endpoint::Completions),
            ("/v1/completionsX", Endpoint::Relayed),
            ("/v1/chat/completions/x", Endpoint::Relayed),
            ("/v1/embeddings", Endpoint::Relayed),
            ("/v1/models", Endpoint::Models),
            ("/v1/models/a/b", Endpoint::Models),
            ("/v1/messages", Endpoint::Messages),
            ("/v1/messages/count_tokens", Endpoint::Relayed),
            ("/v1/responses", Endpoint::Responses),
            ("/v1/responses/a/cancel", Endpoint::Relayed),
            ("/generate", Endpoint::Generate),
            ("/v1/generate", Endpoint::Relayed),
            ("/tokenize", Endpoint::Relayed),
            ("/detokenize", Endpoint::Relayed),
            ("/v1/%63hat/completions", Endpoint::Unknown),
            ("/v1/chat%2Fcompletions", Endpoint::Unknown),
            ("/v1//completions", Endpoint::Unknown),
            ("/v1/%6coad_lora_adapter", Endpoint::Unknown),
            ("/v1/./load_lora_adapter", Endpoint::Unknown),
            ("/v1/../flush_cache", Endpoint::Unknown),
            ("/v1/%2e%2e/sleep", Endpoint::Unknown),
            ("/v1/files/a%20name/content", Endpoint::Relayed),
            ("/v1/.well-known", Endpoint::Relayed),
            ("/rerank", Endpoint::Relayed),
            ("/v1/rerank", Endpoint::Relayed),
            ("/v2/rerank", Endpoint::Relayed),
            ("/score", Endpoint::Relayed),
            ("/pooling", Endpoint::Relayed),
            ("/classify", Endpoint::Relayed),
            ("/encode", Endpoint::Relayed),
            ("/inference/v1/generate", Endpoint::Relayed),
            ("/v2", Endpoint::Unknown),
            ("/flush_cache", Endpoint::Unknown),
            ("/v1/load_lora_adapter", Endpoint::Administration),
            ("/v1/unload_lora_adapter", Endpoint::Administration),
            ("/v1/load_lora_adapters", Endpoint::Relayed),
            ("/generate_health", Endpoint::Unknown),
            ("/health", Endpoint::Ready),
            ("/v1", Endpoint::Unknown),
            ("/", Endpoint::Unknown),
            ("", Endpoint::Unknown),
        ] {
            assert_eq!(routes.find(path), expected, "{path}");
        }
    }
}
