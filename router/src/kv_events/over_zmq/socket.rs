//! The two sockets towards an engine: one that hears what happens, and one that asks for what was missed.

use std::io;
use std::time::Duration;

use roundhouse_zmtp::{Inbox, Socket, Traffic, command, handshake, message, wrong};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::liveness;

/// How long it may take to connect and to introduce each other.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A batch has some 5 bytes a token and 10 a block.
const MOST_BYTES: usize = 16 << 20;
/// Of a PING, by the standard.
const MOST_CONTEXT: usize = 16;
/// In place of a sequence number: nothing comes after.
const END: [u8; 8] = [0xff; 8];

/// A numbered batch, in msgpack.
pub(super) type Numbered = (u64, Vec<u8>);

/// A connection to one of an engine's sockets.
pub(super) struct Line {
    stream: TcpStream,
    inbox: Inbox,
}

impl Line {
    async fn open((host, port): &(String, u16), socket: Socket) -> io::Result<Self> {
        let opening = async {
            let mut stream = TcpStream::connect((host.as_str(), *port)).await?;
            liveness::configure(&stream, liveness::WORKER_STALL);
            let inbox = handshake(&mut stream, socket).await?;
            Ok(Self { stream, inbox })
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
        let opened = timeout(CONNECT_LIMIT, opening).await.unwrap_or_else(|_| Err(late()));
        opened.map_err(|error| io::Error::new(error.kind(), format!("tcp://{host}:{port}: {error}")))
    }

    /// Hears all that is published under `topic`.
    pub(super) async fn subscribe(place: &(String, u16), topic: &str) -> io::Result<Self> {
        let mut line = Self::open(place, Socket::Sub).await?;
        line.stream.write_all(&message(&[&[&[1], topic.as_bytes()].concat()])).await?;
        Ok(line)
    }

    /// The next batch that is published. May be dropped half way: nothing is lost.
    pub(super) async fn next(&mut self) -> io::Result<Numbered> {
        loop {
            match self.receive().await? {
                Traffic::Message(frames) => return numbered(frames),
                Traffic::Command(name, data) if name == b"PING" => self.answer_ping(&data).await?,
                Traffic::Command(..) => {}
            }
        }
    }

    /// Asks for all batches from `start` on that the engine still has; they come with [`Line::replayed`].
    pub(super) async fn ask(place: &(String, u16), start: u64) -> io::Result<Self> {
        let mut line = Self::open(place, Socket::Dealer).await?;
        line.stream.write_all(&message(&[b"", &start.to_be_bytes()])).await?;
        Ok(line)
    }

    /// The next batch that was asked for; `None` after the last. May be dropped half way: nothing is lost.
    pub(super) async fn replayed(&mut self) -> io::Result<Option<Numbered>> {
        loop {
            match self.receive().await? {
                Traffic::Message(frames) if frames.iter().any(|frame| *frame == END) => return Ok(None),
                Traffic::Message(frames) => return numbered(frames).map(Some),
                Traffic::Command(name, data) if name == b"PING" => self.answer_ping(&data).await?,
                Traffic::Command(..) => {}
            }
        }
    }

    async fn receive(&mut self) -> io::Result<Traffic> {
        self.inbox.receive(&mut self.stream, MOST_BYTES).await
    }

    /// After a time to live in two bytes comes what the answer is to repeat.
    async fn answer_ping(&mut self, data: &[u8]) -> io::Result<()> {
        let context = data.get(2..).filter(|context| context.len() <= MOST_CONTEXT);
        self.stream.write_all(&command("PONG", context.unwrap_or_default())).await
    }
}

/// Number and batch are a message's last frames, whatever stands before them.
fn numbered(mut frames: Vec<Vec<u8>>) -> io::Result<Numbered> {
    let payload = frames.pop();
    let number = frames.pop().and_then(|frame| Some(u64::from_be_bytes(frame.try_into().ok()?)));
    // Nobody counts so far; the last number that there is stands for the end.
    number
        .filter(|number| *number <= u64::MAX / 2)
        .zip(payload)
        .ok_or_else(|| wrong("published what is no numbered batch"))
}
