//! A connection of the generator: requests out, answers in, one after the other.
//!
//! Knows what a good answer is (200, a chat completion, or a stream that ends with `[DONE]`) and calls everything else an
//! error. Never sends a request twice. Next on the path: [`crate::wire`].

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use tokio::net::TcpStream;

use crate::sse::{EventTooLarge, SseParser};
use crate::wire::message::{MessageReader, Side, StartLine};
use crate::wire::socket::{ReadError, read_message, set_options, write_pieces};

/// Why a request counts as failed. The texts are what the report counts by, so they carry no addresses.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// No connection.
    #[error("connect failed: {}", .0.kind())]
    Connect(io::Error),
    /// The request could not be written.
    #[error("write failed: {}", .0.kind())]
    Write(io::Error),
    /// The answer could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Another status than 200.
    #[error("status {0}")]
    Status(u16),
    /// A body that is no chat completion.
    #[error("answer that is no chat completion")]
    Answer,
    /// Events without end.
    #[error(transparent)]
    Event(#[from] EventTooLarge),
    /// A stream that ended without `[DONE]`.
    #[error("stream without [DONE]")]
    NoDone,
    /// A stream with another number of chunks than the mock wrote.
    #[error("stream with {seen} chunks instead of {written}")]
    Chunks {
        /// Chunks that arrived.
        seen: u64,
        /// Chunks that the mock was to write.
        written: u64,
    },
}

/// One keep-alive connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    reader: MessageReader,
    body: Vec<u8>,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// [`ExchangeError::Connect`].
    pub async fn open(address: SocketAddr) -> Result<Self, ExchangeError> {
        let stream = TcpStream::connect(address).await.map_err(ExchangeError::Connect)?;
        set_options(&stream).map_err(ExchangeError::Connect)?;
        Ok(Self { stream, reader: MessageReader::new(Side::Response), body: Vec::new() })
    }

    /// Whether the other side is going to close it.
    pub fn closes(&self) -> bool {
        self.reader.closes()
    }

    /// Sends a request and reads its answer, which must be a chat completion.
    ///
    /// # Errors
    /// [`ExchangeError`]; the connection is of no use then, save after a status.
    pub async fn exchange(&mut self, pieces: [IoSlice<'_>; 4]) -> Result<(), ExchangeError> {
        self.send(pieces).await?;
        self.body.clear();
        let body = &mut self.body;
        read_message(&mut self.stream, &mut self.reader, |_, piece| body.extend_from_slice(piece)).await?;
        self.check_status()?;
        static COMPLETION: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"chat.completion\""));
        let body = &self.body;
        let is_completion = body.starts_with(b"{")
            && body.trim_ascii_end().ends_with(b"}")
            && COMPLETION.find(body).is_some();
        if is_completion { Ok(()) } else { Err(ExchangeError::Answer) }
    }

    /// Sends a request and reads its stream; `on_chunk` is called for each chunk, `[DONE]` not among them.
    ///
    /// # Errors
    /// [`ExchangeError`]. The count of chunks is the caller's to judge.
    pub async fn stream(
        &mut self,
        pieces: [IoSlice<'_>; 4],
        mut on_chunk: impl FnMut(),
    ) -> Result<(), ExchangeError> {
        self.send(pieces).await?;
        let (mut events, mut is_done, mut too_large) = (SseParser::default(), false, Ok(()));
        let on_body = |_: &StartLine, piece: &[u8]| {
            let fed = events.feed(piece, |event| match event.data {
                b"[DONE]" => is_done = true,
                _ => on_chunk(),
            });
            too_large = std::mem::replace(&mut too_large, Ok(())).and(fed);
        };
        read_message(&mut self.stream, &mut self.reader, on_body).await?;
        self.check_status()?;
        too_large?;
        if is_done { Ok(()) } else { Err(ExchangeError::NoDone) }
    }

    fn check_status(&self) -> Result<(), ExchangeError> {
        match self.reader.start_line().status() {
            200 => Ok(()),
            status => Err(ExchangeError::Status(status)),
        }
    }

    async fn send(&mut self, pieces: [IoSlice<'_>; 4]) -> Result<(), ExchangeError> {
        write_pieces(&mut self.stream, pieces).await.map_err(ExchangeError::Write)
    }
}
