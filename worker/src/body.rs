//! The body of a worker's response: whole, or a stream of server-sent events that ends with the generation.
//!
//! Knows no HTTP statuses and no engine. Next: hyper writes it to a socket, or the router relays it.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// What [`Worker::handle`](crate::Worker::handle) answers with. Dropping it cancels the generation behind it.
pub struct WorkerBody {
    content: Content,
}

enum Content {
    Whole(Option<Bytes>),
    Stream(Box<dyn ChunkSource>),
}

/// Yields the chunks of a streamed body, each ready to be written as it is; `None` ends the body.
pub(crate) trait ChunkSource: Send + Unpin {
    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

impl WorkerBody {
    /// A body that is complete already.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self { content: Content::Whole(Some(bytes.into())) }
    }

    pub(crate) fn stream(source: impl ChunkSource + 'static) -> Self {
        Self { content: Content::Stream(Box::new(source)) }
    }
}

impl Body for WorkerBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.content {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Stream(source) => {
                source.poll_chunk(context).map(|chunk| chunk.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(bytes) if bytes.as_ref().is_none_or(Bytes::is_empty))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Content::Stream(_) => SizeHint::default(),
        }
    }
}

impl std::fmt::Debug for WorkerBody {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.content {
            Content::Whole(_) => formatter.write_str("WorkerBody::Whole"),
            Content::Stream(_) => formatter.write_str("WorkerBody::Stream"),
        }
    }
}
