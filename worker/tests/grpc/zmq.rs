//! Cache events over ZeroMQ, byte by byte as a subscriber of vLLM's would send and read them.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use worker::kv_events::zmq::{Publisher, ZmqConfig};

use crate::harness::*;

/// One ZeroMQ connection.
struct Peer(TcpStream);

impl Peer {
    /// Connects as a socket of that kind.
    async fn connect(address: SocketAddr, kind: &str) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await.unwrap();
        let mut theirs = [0; 64];
        in_time(stream.read_exact(&mut theirs)).await.unwrap();
        assert_eq!((theirs[0], theirs[9], theirs[10], theirs[11]), (0xff, 0x7f, 3, 0));
        assert_eq!(&theirs[12..17], b"NULL\0");
        let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        ready.push(u8::try_from(kind.len()).unwrap());
        ready.extend(kind.as_bytes());
        stream.write_all(&[&[4, u8::try_from(ready.len()).unwrap()][..], &ready].concat()).await.unwrap();
        let mut peer = Self(stream);
        let (flags, ready) = peer.frame().await;
        assert_eq!(flags, 4);
        assert!(ready.starts_with(b"\x05READY\x0bSocket-Type"), "{ready:?}");
        peer
    }

    async fn frame(&mut self) -> (u8, Vec<u8>) {
        let flags = in_time(self.0.read_u8()).await.unwrap();
        let len = match flags & 2 {
            0 => u64::from(in_time(self.0.read_u8()).await.unwrap()),
            _ => in_time(self.0.read_u64()).await.unwrap(),
        };
        let mut body = vec![0; usize::try_from(len).unwrap()];
        in_time(self.0.read_exact(&mut body)).await.unwrap();
        (flags & !2, body)
    }

    async fn message(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.frame().await;
            frames.push(body);
            match flags {
                0 => return frames,
                1 => {}
                other => panic!("flags {other}"),
            }
        }
    }

    async fn send(&mut self, frames: &[(u8, &[u8])]) {
        for (flags, body) in frames {
            let len = u8::try_from(body.len()).unwrap();
            self.0.write_all(&[&[*flags, len][..], body].concat()).await.unwrap();
        }
    }

    /// Everything from `start` on, after which the end is marked.
    async fn replay(&mut self, start: u64) -> Vec<(u64, Value)> {
        self.send(&[(1, b""), (0, &start.to_be_bytes())]).await;
        let mut batches = Vec::new();
        loop {
            let frames = self.message().await;
            let [empty, topic, sequence, payload] = &frames[..] else { panic!("{frames:?}") };
            assert!(empty.is_empty());
            if sequence == &[0xff; 8] {
                assert!(topic.is_empty() && payload.is_empty());
                return batches;
            }
            assert_eq!(topic, b"kv@worker");
            let sequence = u64::from_be_bytes(sequence.as_slice().try_into().unwrap());
            batches.push((sequence, rmp_serde::from_slice(payload).unwrap()));
        }
    }
}

/// A worker that publishes; where its sockets are.
async fn publishing() -> (Served, SocketAddr, SocketAddr, tokio::task::JoinHandle<()>) {
    let served = serve_worker().await;
    let any = || "tcp://127.0.0.1:0".parse().unwrap();
    let config = ZmqConfig { publish: any(), replay: Some(any()), topic: "kv@worker".into() };
    let publisher = Publisher::bind(served.worker.kv_log().unwrap(), &config).await.unwrap();
    let (publish, replay) = publisher.addresses().unwrap();
    let task = tokio::spawn(publisher.run());
    (served, publish, replay.unwrap(), task)
}

/// Subscribes, and waits until that has been heard: a PONG comes after what was sent before its PING.
async fn subscribe(peer: &mut Peer, topic: &str) {
    peer.send(&[(0, &[&[1][..], topic.as_bytes()].concat())]).await;
    peer.send(&[(4, b"\x04PING\0\0here")]).await;
    assert_eq!(peer.frame().await, (4, b"\x04PONGhere".to_vec()));
}

#[tokio::test]
async fn subscribers_get_batches_of_their_topic_and_replays_of_what_they_missed() {
    let (served, publish, replay, publishing) = publishing().await;
    let mut client = served.client().await;
    generate(&mut client, tokens("early", (10..26).collect(), 2)).await;
    let mut subscriber = Peer::connect(publish, "SUB").await;
    let mut stranger = Peer::connect(publish, "SUB").await;
    subscribe(&mut subscriber, "kv@").await;
    subscribe(&mut stranger, "other").await;
    generate(&mut client, tokens("late", (30..46).collect(), 2)).await;
    let frames = subscriber.message().await;
    let [topic, sequence, payload] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!((topic.as_slice(), sequence.as_slice()), (&b"kv@worker"[..], &1u64.to_be_bytes()[..]));
    let batch: Value = rmp_serde::from_slice(payload).unwrap();
    assert!(batch[0].as_f64().unwrap() > 1e9, "seconds since 1970: {batch}");
    let event = &batch[1][0];
    assert_eq!(event["type"], "BlockStored", "{batch}");
    assert_eq!(event["token_ids"], json!((30..46).collect::<Vec<_>>()));
    assert_eq!((&event["block_size"], &event["parent_block_hash"]), (&json!(16), &Value::Null));
    assert_eq!(event["block_hashes"].as_array().unwrap().len(), 1);
    let mut asking = Peer::connect(replay, "DEALER").await;
    let replayed = asking.replay(0).await;
    assert_eq!(replayed.iter().map(|(sequence, _)| *sequence).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(replayed[1].1, batch);
    assert_eq!(asking.replay(1).await, replayed[1..]);
    assert_eq!(asking.replay(2).await, []);
    served.http1("POST", "/flush_cache", &json!({})).await;
    let frames = subscriber.message().await;
    let batch: Value = rmp_serde::from_slice(&frames[2]).unwrap();
    assert_eq!(batch[1], json!([{"type": "AllBlocksCleared"}]));
    // Nothing was of the stranger's topic: what comes first is the answer to this.
    stranger.send(&[(4, b"\x04PING\0\0last")]).await;
    assert_eq!(stranger.frame().await, (4, b"\x04PONGlast".to_vec()));
    publishing.abort();
}

#[tokio::test]
async fn who_does_not_speak_zmtp_is_cut_off() {
    let (_served, publish, replay, publishing) = publishing().await;
    for address in [publish, replay] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&[b'x'; 64]).await.unwrap();
        let mut all = Vec::new();
        // Their greeting, and then the end; a reset if it was in a hurry.
        let _ = in_time(stream.read_to_end(&mut all)).await;
        assert!(all.len() <= 64);
    }
    publishing.abort();
}
