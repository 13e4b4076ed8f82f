//! Stage 3: read what routing needs. The body itself stays as it came.
//!
//! Next: [`pick`](super::pick).

use http::request::Parts;
use http::{HeaderMap, HeaderName};
use roundhouse_types::{BlockHash, ChainHasher};
use router_core::prefix::PromptHasher;
use router_core::request::RequestView;
use router_core::token_ratio::TokenRatios;
use tokio::sync::OwnedSemaphorePermit;
use xxhash_rust::xxh3::xxh3_64;

use super::admit::Admitted;
use crate::error::RequestError;
use crate::openai::request::{BodyError, RequestBody};
use crate::payload::Payload;

/// Whether a body that is not JSON is an error, or passes as it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Understanding {
    /// Chat and completions: JSON, or an error.
    Required,
    /// Every other endpoint: what can be read of it is used.
    BestEffort,
}

/// What was read of a request.
#[derive(Debug, Default)]
pub struct Reading {
    /// The model asked for.
    pub model: Option<String>,
    /// Hash of what names the session.
    pub session: Option<u64>,
    /// Chained hashes of the prompt's full blocks.
    pub blocks: Vec<BlockHash>,
    /// Length of the prompt in template order.
    pub prompt_bytes: usize,
    /// The same in tokens, by what is known of the model's tokenizer.
    pub prompt_tokens: usize,
}

/// A request that has been read.
pub struct Parsed {
    /// Head.
    pub head: Parts,
    /// Body, as it came.
    pub body: Payload,
    /// What was read of it.
    pub reading: Reading,
    /// Its place among the requests in flight.
    pub permit: OwnedSemaphorePermit,
}

/// Reads requests.
pub struct Parser {
    root: ChainHasher,
    session_header: HeaderName,
}

impl Reading {
    /// What a policy may see of it.
    #[must_use]
    pub fn view(&self) -> RequestView<'_> {
        RequestView {
            model: self.model.as_deref(),
            session: self.session,
            blocks: &self.blocks,
            prompt_bytes: self.prompt_bytes,
            prompt_tokens: self.prompt_tokens,
        }
    }
}

impl Parser {
    /// A parser whose block hashes are seeded with `seed`, so that nobody outside can aim for collisions.
    #[must_use]
    pub fn new(seed: u64, session_header: HeaderName) -> Self {
        Self { root: ChainHasher::new(seed), session_header }
    }

    /// Parses an admitted request.
    ///
    /// # Errors
    /// When its body must be understood and is not a JSON object.
    pub fn parse(
        &self,
        admitted: Admitted,
        understanding: Understanding,
        ratios: &TokenRatios,
    ) -> Result<Parsed, RequestError> {
        let Admitted { head, body, permit } = admitted;
        let reading = match self.read(&head.headers, &body.joined(), ratios) {
            Ok(reading) => reading,
            Err(_) if understanding == Understanding::BestEffort => Reading::default(),
            Err(error) => return Err(error),
        };
        Ok(Parsed { head, body, reading, permit })
    }

    /// Reads a body.
    ///
    /// # Errors
    /// When it is not a JSON object.
    pub fn read(
        &self,
        headers: &HeaderMap,
        body: &[u8],
        ratios: &TokenRatios,
    ) -> Result<Reading, RequestError> {
        let body = RequestBody::parse(body).map_err(|error| match error {
            BodyError::Syntax(error) => RequestError::BadJson(error),
            BodyError::NotAnObject { found } => RequestError::NotAnObject { found },
        })?;
        let salt = |text: &Option<std::borrow::Cow<'_, str>>| {
            text.as_deref().unwrap_or_default().as_bytes().to_vec()
        };
        let mut hasher =
            PromptHasher::new(self.root.salted(&salt(&body.model)).salted(&salt(&body.cache_salt)));
        body.hash_prompt(&mut hasher);
        let (blocks, prompt_bytes) = hasher.finish();
        let header = headers.get(&self.session_header).map(http::HeaderValue::as_bytes);
        let session = header.or(body.user.as_deref().map(str::as_bytes)).filter(|name| !name.is_empty());
        Ok(Reading {
            session: session.map(xxh3_64),
            blocks,
            prompt_bytes,
            prompt_tokens: ratios.tokens(body.model.as_deref(), prompt_bytes),
            model: body.model.map(std::borrow::Cow::into_owned),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str, headers: &HeaderMap) -> Reading {
        let parser = Parser::new(1, HeaderName::from_static("x-session-id"));
        parser.read(headers, body.as_bytes(), &TokenRatios::default()).unwrap()
    }

    #[test]
    fn the_session_is_the_header_or_else_the_user() {
        let mut headers = HeaderMap::new();
        let by_user = read(r#"{"user": "ann"}"#, &headers);
        assert_eq!(by_user.session, read(r#"{"user": "ann", "model": "m"}"#, &headers).session);
        headers.insert("x-session-id", "7".parse().unwrap());
        let by_header = read(r#"{"user": "ann"}"#, &headers);
        assert_ne!(by_header.session, by_user.session);
        assert_eq!(by_header.session, read("{}", &headers).session);
        assert_eq!(read("{}", &HeaderMap::new()).session, None);
    }

    #[test]
    fn models_and_salts_share_no_blocks() {
        let body = |extra: &str| format!(r#"{{{extra} "prompt": "{}"}}"#, "p".repeat(500));
        let blocks = |extra: &str| read(&body(extra), &HeaderMap::new()).blocks;
        let plain = blocks("");
        assert_eq!(plain.len(), 7);
        assert_ne!(plain[0], blocks(r#""model": "m","#)[0]);
        assert_ne!(plain[0], blocks(r#""cache_salt": "s","#)[0]);
        assert_eq!(plain, blocks(r#""temperature": 1,"#));
    }
}
