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
/// How long an engine may take for the next batch of a replay.
const REPLAY_LIMIT: Duration = Duration::from_secs(10);
/// A batch has some 5 bytes a token and 10 a block.
const MOST_BYTES: usize = 64 << 20;
/// vLLM keeps 10,000 batches, of some hundred bytes to some ten thousand.
const MOST_REPLAY_BYTES: usize = 512 << 20;
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

    /// All batches from `start` on that the engine still has.
    pub(super) async fn replay(place: &(String, u16), start: u64) -> io::Result<Vec<Numbered>> {
        let mut line = Self::open(place, Socket::Dealer).await?;
        line.stream.write_all(&message(&[b"", &start.to_be_bytes()])).await?;
        let (mut batches, mut room) = (Vec::new(), MOST_REPLAY_BYTES);
        let late = || io::Error::new(io::ErrorKind::TimedOut, "a replay does not go on");
        loop {
            let next = timeout(REPLAY_LIMIT, line.receive()).await.unwrap_or_else(|_| Err(late()));
            match next? {
                Traffic::Message(frames) if frames.iter().any(|frame| *frame == END) => return Ok(batches),
                Traffic::Message(frames) => {
                    let batch = numbered(frames)?;
                    room = room.checked_sub(batch.1.len()).ok_or_else(|| wrong("replays without an end"))?;
                    batches.push(batch);
                }
                Traffic::Command(name, data) if name == b"PING" => line.answer_ping(&data).await?,
                Traffic::Command(..) => {}
            }
        }
    }

    async fn receive(&mut self) -> io::Result<Traffic> {
        self.inbox.receive(&mut self.stream, MOST_BYTES).await
    }

    /// After a time to live in two bytes comes what the answer is to repeat.
    async fn answer_ping(&mut self, data: &[u8]) -> io::Result<()> {
        self.stream.write_all(&command("PONG", data.get(2..).unwrap_or_default())).await
    }
}

/// Number and batch are a message's last frames, whatever stands before them.
fn numbered(mut frames: Vec<Vec<u8>>) -> io::Result<Numbered> {
    let payload = frames.pop();
    let number = frames.pop().and_then(|frame| Some(u64::from_be_bytes(frame.try_into().ok()?)));
    // The last number that there is stands for the end, and none comes after it.
    number
        .filter(|number| *number < u64::MAX)
        .zip(payload)
        .ok_or_else(|| wrong("published what is no numbered batch"))
}
