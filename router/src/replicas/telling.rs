//! What this router does → all others.
//!
//! One task collects what requests say for a moment and encodes it once; each other router has a task with a connection, and a queue of frames
//! that is not endless. Who falls behind, or comes back, is told anew of all that is in flight: so nobody knows half of something.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use prost::Message as _;
use prost::encoding::{self, message};
use roundhouse_wire::replica as wire;
use router_core::telling::{Beginning, Found, Word};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{self, Receiver, Sender, UnboundedReceiver, UnboundedSender};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::handshake::{self, Begun, LENGTH_BYTES, MOST_BYTES, ReplicaError, Side, begin, framed};
use super::numbers::ByNumber;
use super::seal::Seals;
use super::{Replicas, Said, locked};
use crate::back_off::BackOff;
use crate::liveness;

/// How long words are collected: many in one frame, for one writing to each connection.
const COLLECTED_FOR: Duration = Duration::from_millis(1);
/// Of a frame's words, so that it stays below what one may have.
const FRAME_BYTES: usize = MOST_BYTES / 2;
/// Frames that may wait for one router; a quarter of a second's at the least.
const MOST_WAITING: usize = 256;
/// Of the words of a frame, and of what says that they are known.
const WORDS_TAG: u32 = 1;
const ARE_KNOWN_TAG: u32 = 2;
/// What stands before a word at most: its tag and its length.
const MOST_KEY_BYTES: usize = 11;
/// Who has nothing to say says so.
const SAYS_SO_EVERY: Duration = Duration::from_secs(1);
/// How long another router may take none of it.
const STALL: Duration = Duration::from_secs(5);
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(5);
/// Until an address at which the router itself listens is tried again: another one may have it then.
const ITSELF_PAUSE: Duration = Duration::from_secs(60);

/// A connection that wants to be told all that is in flight, and then what comes.
pub(super) type Joining = UnboundedSender<Sender<Bytes>>;

/// Begins to pass on what requests say. Whoever joins is told too.
pub(super) fn start(replicas: Arc<Replicas>) -> Joining {
    let (joining, joined) = mpsc::unbounded_channel();
    tokio::spawn(pass_on(replicas, joined));
    joining
}

/// Where others are told: by address, the task that does it, and who wants it done.
#[derive(Default)]
pub(super) struct Ways(BTreeMap<String, Way>);

struct Way {
    is_connected: Arc<AtomicBool>,
    task: AbortHandle,
    /// The source that has found it; `None` if an operator has named it.
    source: Option<Arc<str>>,
}

impl Drop for Way {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Ways {
    /// Tells whoever listens at an address that an operator has named.
    pub(super) fn begin(&mut self, replicas: &Arc<Replicas>, address: &str, joining: &Joining) {
        self.add(replicas, (address, None), joining);
    }

    fn add(
        &mut self,
        replicas: &Arc<Replicas>,
        (address, source): (&str, Option<&Arc<str>>),
        joining: &Joining,
    ) {
        if self.0.contains_key(address) {
            return;
        }
        let is_connected = Arc::new(AtomicBool::new(false));
        let telling =
            tell(Arc::clone(replicas), address.to_owned(), Arc::clone(&is_connected), joining.clone());
        let task = tokio::spawn(telling).abort_handle();
        self.0.insert(address.to_owned(), Way { is_connected, task, source: source.cloned() });
    }

    /// Tells those that `source` has found now, in place of those that it had found before.
    pub(super) fn are(
        &mut self,
        replicas: &Arc<Replicas>,
        source: &Arc<str>,
        addresses: &BTreeSet<String>,
        joining: &Joining,
    ) {
        self.0.retain(|address, way| way.source.as_ref() != Some(source) || addresses.contains(address));
        for address in addresses {
            self.add(replicas, (address, Some(source)), joining);
        }
    }

    pub(super) fn connected(&self) -> usize {
        self.0.values().filter(|way| way.is_connected.load(Ordering::Relaxed)).count()
    }

    pub(super) fn to_json(&self) -> Value {
        let way = |(address, way): (&String, &Way)| {
            json!({
                "address": address,
                "is_connected": way.is_connected.load(Ordering::Relaxed),
                "source": way.source.as_deref(),
            })
        };
        self.0.iter().map(way).collect()
    }
}

/// The address of a router that a source has found, which takes it for a worker that speaks HTTP.
pub(super) fn address_of(url: &str) -> String {
    url.strip_prefix("http://").unwrap_or(url).to_owned()
}

/// What passes on: all that is in flight, and the queues of those that are told.
#[derive(Default)]
struct Hub {
    in_flight: ByNumber<InFlight>,
    queues: Vec<Sender<Bytes>>,
}

/// What was told of a request, for whoever comes later.
struct InFlight {
    sent: Bytes,
    /// When that was told, or that it goes.
    since: Instant,
    goes: bool,
    begun: bool,
}

/// Passes on for ever.
async fn pass_on(replicas: Arc<Replicas>, mut joined: UnboundedReceiver<Sender<Bytes>>) {
    let mut hub = Hub::default();
    loop {
        tokio::select! {
            () = replicas.has_news.notified() => sleep(COLLECTED_FOR).await,
            Some(queue) = joined.recv() => hub.join(queue),
        }
        let said = std::mem::take(&mut *locked(&replicas.outbox));
        hub.pass_on(said);
    }
}

impl Hub {
    /// Tells a router that has just been connected all that is in flight.
    fn join(&mut self, queue: Sender<Bytes>) {
        let mut frames = Frames { are_known: true, ..Frames::default() };
        for (request, InFlight { sent, goes, begun, .. }) in &self.in_flight {
            frames.push(sent);
            // How long it took would be wrong for whoever hears it later.
            for word in [goes.then_some(Word::Goes), begun.then_some(Word::Begun(Beginning::Other))] {
                word.into_iter().for_each(|word| frames.push_word(*request, wire_word(word, None)));
            }
        }
        if frames.finish().into_iter().all(|frame| queue.try_send(frame).is_ok()) {
            self.queues.push(queue);
        }
    }

    fn pass_on(&mut self, said: Vec<(u64, Said)>) {
        let (mut frames, is_heard) = (Frames::default(), !self.queues.is_empty());
        let now = Instant::now();
        for (request, said) in said {
            match said {
                Said::Sent(sent) => {
                    if is_heard {
                        frames.push(&sent);
                    }
                    self.in_flight.insert(request, InFlight { sent, since: now, goes: false, begun: false });
                }
                Said::Word(word) => {
                    if is_heard {
                        let took = self.in_flight.get(&request).map(|known| now - known.since);
                        frames.push_word(request, wire_word(word, took));
                    }
                    self.remember(request, word, now);
                }
            }
        }
        for frame in frames.finish() {
            // Without its queue the connection ends, and begins anew.
            self.queues.retain(|queue| queue.try_send(frame.clone()).is_ok());
        }
    }

    /// Remembers what was said, as long as whoever comes later is to know it.
    fn remember(&mut self, request: u64, word: Word, now: Instant) {
        if word == Word::Over {
            self.in_flight.remove(&request);
        } else if let Some(known) = self.in_flight.get_mut(&request) {
            if word == Word::Goes {
                (known.goes, known.since) = (true, now);
            }
            known.begun |= matches!(word, Word::Begun(_));
        }
    }
}

/// As others are told; `took` is the time since the request was sent.
fn wire_word(word: Word, took: Option<Duration>) -> wire::word::Word {
    use wire::word::Word as Wire;
    match word {
        Word::Goes => Wire::Goes(wire::Goes {}),
        Word::Begun(beginning) => {
            let with = match beginning {
                Beginning::FirstToken => wire::Beginning::FirstToken,
                Beginning::WholeAnswer => wire::Beginning::WholeAnswer,
                Beginning::Other => wire::Beginning::Other,
            };
            let took_us = took.map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
            Wire::Begun(wire::Begun { with: with.into(), took_us })
        }
        Word::Failed => Wire::Failed(wire::Failed {}),
        Word::Found(Found { prompt_tokens, cached_tokens }) => {
            let (prompt_tokens, cached_tokens) = (prompt_tokens as u64, cached_tokens as u64);
            Wire::Found(wire::Found { prompt_tokens, cached_tokens })
        }
        Word::Over => Wire::Over(wire::Over {}),
    }
}

/// A word as it stands in a frame: one of the words of [`wire::Words`], whose encoding is that of all of them, one after the other.
pub(super) fn encoded(request: u64, word: wire::word::Word) -> Bytes {
    let word = wire::Word { request, word: Some(word) };
    let mut entry = Vec::with_capacity(word.encoded_len() + MOST_KEY_BYTES);
    message::encode(WORDS_TAG, &word, &mut entry);
    entry.into()
}

/// Words in frames, none of which is too long.
#[derive(Default)]
struct Frames {
    /// Whether all that is in them was told before.
    are_known: bool,
    done: Vec<Bytes>,
    /// With room for its length at the beginning.
    open: BytesMut,
}

impl Frames {
    fn push(&mut self, word: &Bytes) {
        self.open().extend_from_slice(word);
        self.close_if_long();
    }

    fn push_word(&mut self, request: u64, word: wire::word::Word) {
        let word = wire::Word { request, word: Some(word) };
        message::encode(WORDS_TAG, &word, self.open());
        self.close_if_long();
    }

    fn open(&mut self) -> &mut BytesMut {
        if self.open.is_empty() {
            self.open.put_u32_le(0);
            if self.are_known {
                encoding::bool::encode(ARE_KNOWN_TAG, &true, &mut self.open);
            }
        }
        &mut self.open
    }

    fn close_if_long(&mut self) {
        if self.open.len() >= FRAME_BYTES {
            self.close();
        }
    }

    fn close(&mut self) {
        let bytes = u32::try_from(self.open.len().saturating_sub(LENGTH_BYTES)).unwrap_or(u32::MAX);
        if let Some(length) = self.open.first_chunk_mut::<LENGTH_BYTES>() {
            *length = bytes.to_le_bytes();
            self.done.push(self.open.split().freeze());
        }
    }

    fn finish(mut self) -> Vec<Bytes> {
        self.close();
        self.done
    }
}

/// Tells the router at an address, for ever.
async fn tell(replicas: Arc<Replicas>, address: String, is_connected: Arc<AtomicBool>, joining: Joining) {
    let mut back_off = BackOff::between(FIRST_BACK_OFF, LONGEST_BACK_OFF);
    let mut complained = false;
    loop {
        let told = connected(&replicas, &address, &joining, |router| {
            is_connected.store(true, Ordering::Relaxed);
            back_off.begin_anew();
            complained = false;
            tracing::info!(address, router = format!("{router:016x}"), "another router is told of requests");
        });
        let Err(error) = told.await;
        is_connected.store(false, Ordering::Relaxed);
        if matches!(error, ReplicaError::Itself) {
            sleep(ITSELF_PAUSE).await;
            continue;
        }
        // Once, until it has worked again: routers that are away for long are no news.
        if !std::mem::replace(&mut complained, true) {
            tracing::warn!(address, %error, "another router is not told of requests; it is tried again");
        }
        sleep(back_off.pause()).await;
    }
}

/// Connects, and tells until that ends.
async fn connected(
    replicas: &Arc<Replicas>,
    address: &str,
    joining: &Joining,
    begun: impl FnOnce(u64),
) -> Result<std::convert::Infallible, ReplicaError> {
    let beginning = async {
        let mut stream = TcpStream::connect(address).await?;
        liveness::configure(&stream, STALL);
        let met =
            begin(&mut stream, &replicas.identity, Side::Connects, |router| replicas.meet(router)).await?;
        Ok::<_, ReplicaError>((stream, met))
    };
    let (mut stream, Begun { router, met: _met, mut seals }) =
        timeout(handshake::LIMIT, beginning).await.map_err(|_| ReplicaError::Late("its answer"))??;
    begun(router);
    let (queue, frames) = mpsc::channel(MOST_WAITING);
    joining.send(queue).map_err(|_| ReplicaError::Ended)?;
    let (mut reading, mut writing) = stream.split();
    let mut nothing = [0];
    tokio::select! {
        end = write_all(&mut writing, frames, &mut seals) => end,
        // It says nothing more, so this is its end.
        read = reading.read(&mut nothing) => { read?; Err(ReplicaError::Ended) }
    }
}

async fn write_all(
    stream: &mut (impl tokio::io::AsyncWrite + Unpin),
    mut frames: Receiver<Bytes>,
    seals: &mut Seals,
) -> Result<std::convert::Infallible, ReplicaError> {
    let nothing = framed(&wire::Words::default());
    loop {
        let frame = match timeout(SAYS_SO_EVERY, frames.recv()).await {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(ReplicaError::Slow),
            Err(_) => nothing.clone(),
        };
        let seal = seals.next(&frame[LENGTH_BYTES..]);
        let mut sealed = frame.chain(&seal[..]);
        timeout(STALL, stream.write_all_buf(&mut sealed)).await.map_err(|_| ReplicaError::Slow)??;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(queue: &mut Receiver<Bytes>) -> wire::Words {
        let frame = queue.try_recv().unwrap();
        wire::Words::decode(&frame[LENGTH_BYTES..]).unwrap()
    }

    #[test]
    fn who_joins_is_told_what_others_know_and_all_how_long_a_beginning_took() {
        let (mut hub, (queue, mut first)) = (Hub::default(), mpsc::channel(8));
        hub.join(queue);
        let sent = |request| encoded(request, wire::word::Word::Sent(wire::Sent::default()));
        hub.pass_on(vec![(7, Said::Sent(sent(7))), (8, Said::Sent(sent(8)))]);
        assert_eq!((words(&mut first).words.len(), hub.in_flight.len()), (2, 2));
        let (queue, mut second) = mpsc::channel(8);
        hub.join(queue);
        let joined = words(&mut second);
        assert_eq!((joined.words.len(), joined.are_known), (2, true));
        hub.pass_on(vec![(7, Said::Word(Word::Begun(Beginning::FirstToken))), (8, Said::Word(Word::Over))]);
        for queue in [&mut first, &mut second] {
            let told = words(queue);
            assert!(!told.are_known && told.words[1].word == Some(wire::word::Word::Over(wire::Over {})));
            let Some(wire::word::Word::Begun(begun)) = &told.words[0].word else { panic!("{told:?}") };
            assert!(begun.took_us.is_some_and(|took_us| took_us < 60_000_000), "{begun:?}");
        }
        assert_eq!(hub.in_flight.len(), 1);
    }
}
