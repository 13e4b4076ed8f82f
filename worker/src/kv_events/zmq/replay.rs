//! One peer of the ROUTER socket: says from which sequence number on it wants batches again, and gets those that are kept.

use std::io;
use std::sync::Arc;

use roundhouse_zmtp::{self as zmtp, Socket, Traffic};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::payload::payload;
use crate::kv_events::{KvLog, Since};

/// What peers send is sequence numbers.
const MOST_BYTES: usize = 64 << 10;
/// In place of a sequence number: nothing comes after.
const END: [u8; 8] = [0xff; 8];

/// Serves a peer until it leaves.
pub(super) async fn serve(mut stream: TcpStream, log: Arc<KvLog>, topic: Arc<[u8]>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut inbox = zmtp::handshake(&mut stream, Socket::Router).await?;
    let (mut reading, mut writing) = stream.into_split();
    loop {
        match inbox.receive(&mut reading, MOST_BYTES).await? {
            Traffic::Command(name, data) if name == b"PING" => {
                let pong = zmtp::command("PONG", data.get(2..).unwrap_or_default());
                writing.write_all(&pong).await?;
            }
            Traffic::Command(..) => {}
            Traffic::Message(frames) => {
                let (envelope, start) = asked(&frames)?;
                replay(&mut writing, envelope, start, &log, &topic).await?;
            }
        }
    }
}

/// The frames that answers begin with, for those who put an empty one in front as REQ does, and the first batch wanted.
fn asked(frames: &[Vec<u8>]) -> io::Result<(&[Vec<u8>], u64)> {
    let read = frames
        .split_last()
        .and_then(|(last, envelope)| Some((envelope, u64::from_be_bytes(last.as_slice().try_into().ok()?))));
    read.ok_or_else(|| zmtp::wrong("asked for a replay, but not with a sequence number of 8 bytes"))
}

async fn replay(
    writing: &mut (impl AsyncWriteExt + Unpin),
    envelope: &[Vec<u8>],
    start: u64,
    log: &KvLog,
    topic: &[u8],
) -> io::Result<()> {
    let envelope: Vec<&[u8]> = envelope.iter().map(Vec::as_slice).collect();
    let answer = |rest: [&[u8]; 3]| zmtp::message(&[&envelope[..], &rest[..]].concat());
    // What happens meanwhile comes by the other socket: without an end here a busy worker would never be done.
    let end = *log.next_sequence().borrow();
    let mut cursor = start;
    while cursor < end {
        match log.since(cursor) {
            Since::Gone { oldest } => cursor = oldest,
            Since::Kept(batches) => {
                for batch in &batches {
                    writing
                        .write_all(&answer([topic, &batch.sequence.to_be_bytes(), &payload(batch)]))
                        .await?;
                }
                cursor += batches.len() as u64;
            }
        }
    }
    writing.write_all(&answer([b"", &END, b""])).await
}
