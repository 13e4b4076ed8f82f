//! The warm-up: requests before the clock starts, like the first of the run and in other words, so that the run finds nothing of
//! them in the server's prefix cache.
//!
//! Next on the path: [`super::conversation`] sends what is measured.

use std::sync::Arc;

use bytes::Bytes;
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use tokio::task::JoinSet;

use super::conversation::{Workload, with_causes};
use crate::args::{Api, ServeArgs};
use crate::body::{Message, api_of};
use crate::client::exchange::Call;
use crate::dataset::prose::Prose;
use crate::dataset::{Content, Dataset};
use crate::tokens::TokenCounter;

/// Most output tokens of a warm-up request, as in SGLang.
const OUTPUT_TOKENS: u64 = 32;
/// The prompt is drawn from a stream of its own, which no dataset of the same seed draws from.
const STREAM: u64 = 0x7265_6865_6172_7361;

/// What is sent to warm a server up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rehearsal {
    api: Api,
    prompt: String,
    output_tokens: u64,
}

impl Rehearsal {
    /// A prompt as long as what the first conversation of `dataset` begins with, for the same endpoint.
    ///
    /// # Errors
    /// A vocabulary that cannot spell words.
    pub fn of(dataset: &Dataset, args: &ServeArgs, counter: &TokenCounter) -> anyhow::Result<Self> {
        let first = dataset.conversations.first();
        let turn = first.and_then(|conversation| conversation.turns.first());
        let system_tokens = first.and_then(|first| first.system.as_ref()).map_or(0, |system| system.tokens);
        let tokens = system_tokens + turn.map_or(0, |turn| turn.content.tokens());
        let recorded_api = turn.and_then(|turn| match &turn.content {
            Content::Body(body, _) => api_of(body),
            Content::Text(_) | Content::Made(_) => None,
        });
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(args.traffic.seed ^ STREAM);
        let asked_for = turn.and_then(|turn| turn.output_tokens).unwrap_or(OUTPUT_TOKENS);
        Ok(Self {
            api: recorded_api.unwrap_or(args.target.backend.api()),
            prompt: Prose::new(counter)?.passage(tokens.max(1), &mut rng)?.text,
            output_tokens: asked_for.min(OUTPUT_TOKENS),
        })
    }

    /// Sends it `count` times at once and waits for all answers; returns a failure if all failed.
    pub async fn send(&self, workload: &Arc<Workload>, count: u32) -> Option<String> {
        let (api, body, streaming) = (self.api, self.body(workload), workload.writer.streaming());
        let mut requests = JoinSet::new();
        for _ in 0..count {
            let (workload, call) =
                (Arc::clone(workload), Call { api, body: body.clone(), streaming, session: None });
            requests.spawn(async move { workload.client.generate(call).await.failure });
        }
        let failures = requests.join_all().await.into_iter();
        // Of all, the last; none if one of them is none.
        failures.map(|failure| failure.map(|error| with_causes(&error))).collect::<Option<Vec<_>>>()?.pop()
    }

    fn body(&self, workload: &Workload) -> Bytes {
        let output_tokens = Some(self.output_tokens);
        match self.api {
            Api::Chat => {
                let message = Message { role: "user", content: self.prompt.as_str().into() };
                workload.writer.chat(&[message], output_tokens)
            }
            Api::Completions => workload.writer.completion(&self.prompt, output_tokens),
        }
    }
}
