//! One subscriber of the PUB socket: gets every batch from its subscription on, as far as it keeps up.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use roundhouse_zmtp::{self as zmtp, Inbox, Socket, Traffic};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use super::payload::payload;
use crate::kv_events::{KvLog, Since};

/// What subscribers send is topics.
const MOST_BYTES: usize = 64 << 10;
/// Topics that one subscriber may name.
const MAX_SUBSCRIPTIONS: usize = 64;
/// PONGs that wait to be written.
const MAX_PONGS: usize = 16;

/// What a subscriber wants, as it says itself.
#[derive(Default)]
struct Wishes {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Beginnings of topics.
    subscriptions: Vec<Vec<u8>>,
    /// Answers to its PINGs.
    pongs: Vec<Vec<u8>>,
}

impl Wishes {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn include(&self, topic: &[u8]) -> bool {
        self.with(|state| state.subscriptions.iter().any(|begins| topic.starts_with(begins)))
    }
}

/// Serves a subscriber until it leaves.
pub(super) async fn serve(mut stream: TcpStream, log: Arc<KvLog>, topic: Arc<[u8]>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let inbox = zmtp::handshake(&mut stream, Socket::Pub).await?;
    let (reading, writing) = stream.into_split();
    let wishes = Wishes::default();
    tokio::select! {
        ended = listen((inbox, reading), &wishes) => ended,
        ended = tell(writing, &wishes, &log, &topic) => ended,
    }
}

/// Hears what the subscriber wants.
async fn listen((mut inbox, mut reading): (Inbox, OwnedReadHalf), wishes: &Wishes) -> io::Result<()> {
    loop {
        let (wanted, topic) = match inbox.receive(&mut reading, MOST_BYTES).await? {
            Traffic::Command(name, topic) if name == b"SUBSCRIBE" => (true, topic),
            Traffic::Command(name, topic) if name == b"CANCEL" => (false, topic),
            Traffic::Command(name, data) if name == b"PING" => {
                // After a time to live in two bytes comes what the answer is to repeat.
                let context = data.get(2..).unwrap_or_default();
                wishes.with(|state| {
                    if state.pongs.len() < MAX_PONGS {
                        state.pongs.push(zmtp::command("PONG", context));
                    }
                });
                wishes.changed.notify_one();
                continue;
            }
            Traffic::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
                Some((1, topic)) => (true, topic.to_vec()),
                Some((0, topic)) => (false, topic.to_vec()),
                _ => continue,
            },
            Traffic::Command(..) => continue,
        };
        wishes.with(|state| match state.subscriptions.iter().position(|known| *known == topic) {
            Some(at) if !wanted => drop(state.subscriptions.swap_remove(at)),
            None if wanted && state.subscriptions.len() < MAX_SUBSCRIPTIONS => {
                state.subscriptions.push(topic);
            }
            _ => {}
        });
        wishes.changed.notify_one();
    }
}

/// Tells what happens. Batches from before a subscription, and those that nobody keeps any more, are left out.
async fn tell(mut writing: OwnedWriteHalf, wishes: &Wishes, log: &KvLog, topic: &[u8]) -> io::Result<()> {
    let mut next = log.next_sequence();
    let mut cursor = *next.borrow_and_update();
    loop {
        let wanted = wishes.include(topic);
        for pong in wishes.with(|state| std::mem::take(&mut state.pongs)) {
            writing.write_all(&pong).await?;
        }
        match log.since(cursor) {
            Since::Gone { oldest } => cursor = oldest,
            Since::Kept(batches) if batches.is_empty() => tokio::select! {
                changed = next.changed() => changed.map_err(|_| io::ErrorKind::BrokenPipe)?,
                () = wishes.changed.notified() => {}
            },
            Since::Kept(batches) => {
                cursor += batches.len() as u64;
                for batch in batches.iter().filter(|_| wanted) {
                    let sequence = batch.sequence.to_be_bytes();
                    writing.write_all(&zmtp::message(&[topic, &sequence, &payload(batch)])).await?;
                }
            }
        }
    }
}
