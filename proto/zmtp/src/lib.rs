//! ZMTP 3.0 (RFC 23 of ZeroMQ), as much of it as the sockets need by which engines publish what happens in their caches: the greeting, the
//! NULL mechanism, messages in frames, and the commands that newer peers may send. Our worker is a PUB and a ROUTER, our router a SUB and a DEALER.

use std::io;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// What a greeting says: signature, version 3.0, mechanism, no server, filler.
const GREETING_BYTES: usize = 64;
const MECHANISM: [u8; 20] = *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// A peer that has not introduced itself by then does not speak ZMTP.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Room for a read, at least.
const READ_BYTES: usize = 8 << 10;
/// Properties of a peer are names of sockets.
const MAX_READY_BYTES: usize = 64 << 10;
/// Frames of one message that peers send.
const MAX_FRAMES: usize = 16;

/// Bits of a frame's first byte.
mod flag {
    pub(super) const MORE: u8 = 1;
    pub(super) const LONG: u8 = 2;
    pub(super) const COMMAND: u8 = 4;
}

/// What a socket is, and whom it talks to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Socket {
    /// Publishes to whoever has subscribed.
    Pub,
    /// Subscribes.
    Sub,
    /// Answers.
    Router,
    /// Asks.
    Dealer,
}

impl Socket {
    fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Pub => &["SUB", "XSUB"],
            Self::Sub => &["PUB", "XPUB"],
            Self::Router => &["DEALER", "REQ", "ROUTER"],
            Self::Dealer => &["ROUTER", "REP", "DEALER"],
        }
    }
}

/// What a peer sends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Traffic {
    /// A message's frames.
    Message(Vec<Vec<u8>>),
    /// A command's name and data.
    Command(Vec<u8>, Vec<u8>),
}

/// What has come over a connection and has not been taken yet.
#[derive(Default)]
pub struct Inbox(BytesMut);

impl Inbox {
    /// The next message or command, whose frames have no more than `most_bytes` together. May be dropped half way: nothing is lost.
    ///
    /// # Errors
    /// When the connection ends, or the peer says what makes no sense or is too long.
    pub async fn receive(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        most_bytes: usize,
    ) -> io::Result<Traffic> {
        loop {
            if let Some((traffic, len)) = parse(&self.0, most_bytes)? {
                self.0.advance(len);
                return Ok(traffic);
            }
            self.0.reserve(READ_BYTES);
            if stream.read_buf(&mut self.0).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Introduces ourselves as `socket`, and hears who is there.
///
/// # Errors
/// When the peer is none that fits, or says nothing for ten seconds.
pub async fn handshake(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    socket: Socket,
) -> io::Result<Inbox> {
    let introduce = async {
        stream.write_all(&greeting()).await?;
        let mut theirs = [0; GREETING_BYTES];
        stream.read_exact(&mut theirs).await?;
        check_greeting(&theirs)?;
        stream.write_all(&command("READY", &property("Socket-Type", socket.name()))).await?;
        let mut inbox = Inbox::default();
        match inbox.receive(stream, MAX_READY_BYTES).await? {
            Traffic::Command(name, data) if name == b"READY" => check_ready(&data, socket).map(|()| inbox),
            _ => Err(wrong("sent something else in place of READY")),
        }
    };
    tokio::time::timeout(HANDSHAKE_LIMIT, introduce).await.unwrap_or_else(|_| Err(wrong("says nothing")))
}

fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..32].copy_from_slice(&MECHANISM);
    greeting
}

fn check_greeting(greeting: &[u8; GREETING_BYTES]) -> io::Result<()> {
    if greeting[0] != 0xff || greeting[9] & 1 != 1 {
        return Err(wrong("does not speak ZMTP"));
    }
    if greeting[10] < 3 {
        return Err(wrong(format!("speaks ZMTP {}; 3 is needed", greeting[10])));
    }
    if greeting[12..32] != MECHANISM {
        return Err(wrong("wants a security mechanism; there is none here but NULL"));
    }
    Ok(())
}

/// Properties are a name after its length in a byte, and a value after its length in four.
fn check_ready(mut data: &[u8], socket: Socket) -> io::Result<()> {
    let cut = || wrong("sent a READY that is cut off");
    while let Some((name_bytes, rest)) = data.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(*name_bytes)).ok_or_else(cut)?;
        let (value_bytes, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
        let (value, rest) =
            rest.split_at_checked(u32::from_be_bytes(*value_bytes) as usize).ok_or_else(cut)?;
        data = rest;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            if socket.peers().iter().any(|peer| peer.as_bytes() == value) {
                return Ok(());
            }
            let value = String::from_utf8_lossy(value);
            return Err(wrong(format!("is a {value}; a {} talks to {:?}", socket.name(), socket.peers())));
        }
    }
    Err(wrong("does not say what it is"))
}

/// The first message or command of `bytes`, and how long it is; `None` if it is not all there.
fn parse(bytes: &[u8], most_bytes: usize) -> io::Result<Option<(Traffic, usize)>> {
    let (mut frames, mut room, mut rest) = (Vec::new(), most_bytes, bytes);
    loop {
        let Some((flags, after)) = rest.split_first() else { return Ok(None) };
        let head = match flags & flag::LONG {
            0 => after.split_first().map(|(len, after)| (u64::from(*len), after)),
            _ => after.split_first_chunk::<8>().map(|(len, after)| (u64::from_be_bytes(*len), after)),
        };
        let Some((len, after)) = head else { return Ok(None) };
        let len = usize::try_from(len).ok().filter(|len| *len <= room && frames.len() < MAX_FRAMES);
        let len = len.ok_or_else(|| wrong("sent a message that is too long"))?;
        room -= len;
        let Some((body, after)) = after.split_at_checked(len) else { return Ok(None) };
        rest = after;
        let taken = bytes.len() - rest.len();
        if flags & flag::COMMAND != 0 {
            let (name_bytes, body) =
                body.split_first().ok_or_else(|| wrong("sent a command without a name"))?;
            let split = body.split_at_checked(usize::from(*name_bytes));
            let (name, data) = split.ok_or_else(|| wrong("sent a command that is cut off"))?;
            return Ok(Some((Traffic::Command(name.to_vec(), data.to_vec()), taken)));
        }
        frames.push(body);
        if flags & flag::MORE == 0 {
            return Ok(Some((Traffic::Message(frames.into_iter().map(<[u8]>::to_vec).collect()), taken)));
        }
    }
}

/// A message as it goes over the wire.
#[must_use]
pub fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (at, body) in frames.iter().enumerate() {
        let more = if at + 1 < frames.len() { flag::MORE } else { 0 };
        frame(more, body, &mut out);
    }
    out
}

/// A command as it goes over the wire; its name has up to 255 bytes.
#[must_use]
pub fn command(name: &str, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    frame(flag::COMMAND, &[&[name.len() as u8][..], name.as_bytes(), data].concat(), &mut out);
    out
}

fn property(name: &str, value: &str) -> Vec<u8> {
    let value_bytes = u32::try_from(value.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[name.len() as u8][..], name.as_bytes(), &value_bytes, value.as_bytes()].concat()
}

fn frame(flags: u8, body: &[u8], out: &mut Vec<u8>) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend_from_slice(&[flags, len]),
        Err(_) => {
            out.push(flags | flag::LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// The error of a peer that does what it should not.
pub fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the peer {}", what.into()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 1..6),
        ) {
            let parts: Vec<_> = frames.iter().map(Vec::as_slice).collect();
            let bytes = message(&parts);
            for cut in 0..bytes.len() {
                prop_assert_eq!(parse(&bytes[..cut], 1 << 16).unwrap(), None);
            }
            let mut inbox = Inbox::default();
            let twice = [&bytes[..], &bytes].concat();
            let mut stream = &twice[..];
            for _ in 0..2 {
                let traffic = run(inbox.receive(&mut stream, 1 << 16)).unwrap();
                prop_assert_eq!(traffic, Traffic::Message(frames.clone()));
            }
            prop_assert!(run(inbox.receive(&mut stream, 1 << 16)).is_err());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse(&bytes, 1 << 16);
            let _ = check_ready(&bytes, Socket::Pub);
        }
    }

    #[test]
    fn frames_are_as_the_standard_says() {
        assert_eq!(message(&[b"", b"ab"]), [1, 0, 0, 2, b'a', b'b']);
        let long = message(&[&[7; 256]]);
        assert_eq!(&long[..10], [2, 0, 0, 0, 0, 0, 0, 1, 0, 7]);
        assert_eq!(command("PONG", b"x"), [4, 6, 4, b'P', b'O', b'N', b'G', b'x']);
    }

    #[test]
    fn long_messages_are_refused_before_there_is_memory_for_them() {
        let mut huge = vec![2];
        huge.extend(u64::MAX.to_be_bytes());
        let bytes = message(&[&[7; 300], &[7; 300]]);
        for (bytes, most) in [(&huge[..], 1 << 20), (&bytes[..], 599)] {
            let error = parse(bytes, most).unwrap_err().to_string();
            assert!(error.contains("too long"), "{error}");
        }
        assert!(parse(&bytes, 600).unwrap().is_some());
    }

    #[test]
    fn whoever_fits_may_stay_and_others_hear_why_not() {
        let meet = |ours: Socket, theirs: Vec<u8>| {
            run(async {
                let (mut here, mut there) = tokio::io::duplex(1 << 10);
                there.write_all(&theirs).await.unwrap();
                handshake(&mut here, ours).await.map(drop)
            })
        };
        let peer = |kind: &str| [&greeting()[..], &command("READY", &property("Socket-Type", kind))].concat();
        meet(Socket::Pub, peer("SUB")).unwrap();
        meet(Socket::Router, peer("DEALER")).unwrap();
        meet(Socket::Sub, peer("PUB")).unwrap();
        meet(Socket::Dealer, peer("ROUTER")).unwrap();
        let mut curve = peer("SUB");
        curve[12..17].copy_from_slice(b"CURVE");
        let mut old = peer("SUB");
        old[10] = 2;
        for (ours, theirs, expected) in [
            (Socket::Pub, peer("DEALER"), "a PUB talks to"),
            (Socket::Router, peer("SUB"), "a ROUTER talks to"),
            (
                Socket::Pub,
                b"GET / HTTP/1.1\r\nhost: a\r\nuser-agent: something that is not ZeroMQ\r\n\r\n".to_vec(),
                "ZMTP",
            ),
            (Socket::Pub, curve, "NULL"),
            (Socket::Pub, old, "3 is needed"),
            (Socket::Pub, [&greeting()[..], &message(&[b"x"])].concat(), "READY"),
            (Socket::Pub, [&greeting()[..], &command("READY", b"")].concat(), "what it is"),
            (Socket::Pub, [&greeting()[..], &command("READY", b"\x05ab")].concat(), "cut off"),
        ] {
            let error = meet(ours, theirs).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
