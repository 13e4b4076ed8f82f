//! The worker over gRPC, as `proto/worker.proto` says. Served on the port of HTTP, by [`serve`](crate::serve).
//!
//! Knows no sockets. Whole HTTP requests go to [`Api::handle`], so that both ways answer alike; prompts go to the engine with
//! tokens in return. Next: [`generate`], [`reports`].

mod followers;
mod generate;
mod reports;
mod running;
mod told;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use roundhouse_wire::v1;
use roundhouse_wire::v1::generate_request::Input;
use roundhouse_wire::v1::worker_server::{self, WorkerServer};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use self::followers::Followers;
use self::running::Running;
use crate::api::{self, Api};
use crate::kv_events::KvLog;

/// Largest request body, of either way in.
pub(crate) const MAX_BODY_BYTES: usize = 64 << 20;
/// Largest message: a body, and what stands around it. A body that is too large by no more than that still gets its 413.
const MAX_MESSAGE_BYTES: usize = MAX_BODY_BYTES + (8 << 20);

/// Messages of a stream.
type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A worker as a gRPC service; clones are handles to the same one.
#[derive(Clone)]
pub struct GrpcWorker {
    api: Arc<Api>,
    running: Arc<Running>,
    followers: Arc<Followers>,
    /// Turns true when the worker drains; `None` for one that never does.
    draining: Option<watch::Receiver<bool>>,
}

impl GrpcWorker {
    pub(crate) fn new(api: Arc<Api>) -> Self {
        Self { api, running: Arc::default(), followers: Arc::default(), draining: None }
    }

    /// The same, but streams that would go on for ever end when `draining` turns true: whoever drains waits for all streams.
    #[must_use]
    pub fn until(self, draining: watch::Receiver<bool>) -> Self {
        Self { draining: Some(draining), ..self }
    }

    /// `replies` until the worker drains.
    fn followed<T: Send + 'static>(
        &self,
        replies: impl Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> Response<Replies<T>> {
        let draining = self.draining.clone();
        let drained = async move {
            let drains = match draining {
                Some(mut draining) => draining.wait_for(|draining| *draining).await.is_ok(),
                None => false,
            };
            if !drains {
                // Nobody can say so any more, and nobody waits for this stream.
                std::future::pending::<()>().await;
            }
        };
        Response::new(Box::pin(replies.take_until(drained)))
    }

    fn kv_log(&self) -> Result<&Arc<KvLog>, Status> {
        let log = self.api.kv_log.as_ref();
        log.ok_or_else(|| Status::failed_precondition("this worker records no cache events; see --kv-events"))
    }

    /// As what serves HTTP/2 requests for it.
    #[must_use]
    pub fn service(self) -> WorkerServer<Self> {
        WorkerServer::new(self).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }
}

#[tonic::async_trait]
impl worker_server::Worker for GrpcWorker {
    type GenerateStream = Replies<v1::GenerateReply>;
    type LoadStream = Replies<v1::LoadReport>;
    type KvEventsStream = Replies<v1::KvEventBatch>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let came_to = api::came_to(request.extensions());
        let v1::GenerateRequest { request_id, input } = request.into_inner();
        let replies = match input {
            Some(Input::Http(call)) => generate::over_http(self, (request_id, came_to), call)?,
            Some(Input::Prompt(prompt)) => generate::from_prompt(self, request_id, prompt).await?,
            None => return Err(Status::invalid_argument("input is missing; give http or prompt")),
        };
        Ok(Response::new(replies))
    }

    async fn abort(&self, request: Request<v1::AbortRequest>) -> Result<Response<v1::AbortReply>, Status> {
        let aborted = self.running.abort(&request.into_inner().request_id);
        Ok(Response::new(v1::AbortReply { aborted: u32::try_from(aborted).unwrap_or(u32::MAX) }))
    }

    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoReply>, Status> {
        let api = &self.api;
        Ok(Response::new(v1::InfoReply {
            name: "roundhouse-worker".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: api.model.clone(),
            backend: api.backend.clone(),
            context_tokens: api.context_tokens as u64,
            block_tokens: u32::try_from(api.block_tokens).unwrap_or(u32::MAX),
            kv_blocks: api.engine.stats().total_blocks as u64,
            instance: api.instance,
        }))
    }

    async fn load(&self, request: Request<v1::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let v1::LoadRequest { interval_ms, router } = request.into_inner();
        let interval = match interval_ms {
            None => reports::LOAD_INTERVAL,
            Some(millis @ 10..=60_000) => Duration::from_millis(millis.into()),
            Some(millis) => {
                let wrong = format!("interval_ms must be from 10 to 60000, not {millis}");
                return Err(Status::invalid_argument(wrong));
            }
        };
        let follower = router.map(|number| self.followers.enter(number));
        Ok(self.followed(reports::load(self.api.engine.load(), interval, follower)))
    }

    async fn kv_events(
        &self,
        request: Request<v1::KvEventsRequest>,
    ) -> Result<Response<Self::KvEventsStream>, Status> {
        let log = self.kv_log()?;
        let v1::KvEventsRequest { from_sequence, instance } = request.into_inner();
        let from = from_sequence.filter(|_| instance == Some(log.instance()));
        Ok(self.followed(reports::kv_events(Arc::clone(log), from)))
    }

    async fn tell(&self, request: Request<v1::TellRequest>) -> Result<Response<v1::TellReply>, Status> {
        self.kv_log()?.publish(told::events(request.into_inner())?);
        Ok(Response::new(v1::TellReply {}))
    }
}
