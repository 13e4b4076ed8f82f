//! The messages of a gRPC answer: frames → messages of the call's kind, and the status at the end.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body;
use prost::Message;
use roundhouse_wire::v1::GenerateReply;
use roundhouse_wire::v1::generate_reply::Event;

use crate::grpc_messages::Messages;
use crate::transport::{Broken, TransportError};

/// Reads messages from a body, one after the other.
pub(super) struct Replies<B, M> {
    body: B,
    messages: Messages<M>,
    ended: End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Over,
}

impl<B: Body<Data = Bytes, Error = TransportError> + Unpin> Replies<B, GenerateReply> {
    /// The next event of a generation; `None` after the last, if the worker says that all went well.
    pub(super) fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Event, TransportError>>> {
        loop {
            match ready!(self.poll_next(cx)) {
                None => return Poll::Ready(None),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                // Of a kind that is not known here, from a newer worker: nothing to do with it.
                Some(Ok(reply)) => {
                    if let Some(event) = reply.event {
                        return Poll::Ready(Some(Ok(event)));
                    }
                }
            }
        }
    }
}

impl<B: Body<Data = Bytes, Error = TransportError> + Unpin, M: Message + Default> Replies<B, M> {
    pub(super) fn new(body: B) -> Self {
        Self { body, messages: Messages::default(), ended: End::Open }
    }

    /// Whether the end and its status have been read.
    pub(super) fn is_ended(&self) -> bool {
        self.ended == End::Over
    }

    /// The next message; `None` after the last, if the worker says that all went well.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<M, TransportError>>> {
        if self.is_ended() {
            return Poll::Ready(None);
        }
        loop {
            match self.messages.take_next() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(message))),
                Err(what) => return Poll::Ready(Some(Err(self.end_with(malformed(what))))),
            }
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Poll::Ready(Some(Err(self.end_with(error)))),
                None => {
                    let error = malformed("ends without a gRPC status");
                    return Poll::Ready(Some(Err(self.end_with(error))));
                }
            };
            match frame.into_data() {
                Ok(data) => self.messages.push(data),
                Err(other) => {
                    let Ok(trailers) = other.into_trailers() else { continue };
                    let whole = self.messages.ends_whole();
                    self.ended = End::Over;
                    let said = match check_status(&trailers) {
                        Ok(()) if !trailers.contains_key("grpc-status") => {
                            Err(malformed("ends without a gRPC status"))
                        }
                        Ok(()) if !whole => Err(malformed("ends within a message")),
                        said => said,
                    };
                    return Poll::Ready(said.err().map(Err));
                }
            }
        }
    }

    fn end_with(&mut self, error: TransportError) -> TransportError {
        self.ended = End::Over;
        error
    }
}

/// What a gRPC status among `headers` says, if there is one.
pub(super) fn check_status(headers: &HeaderMap) -> Result<(), TransportError> {
    match headers.get("grpc-status") {
        Some(status) if status != "0" => {
            let text =
                |name| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
            let code = text("grpc-status").unwrap_or_default();
            let message = text("grpc-message").unwrap_or_default();
            Err(TransportError::Broken(Broken::Grpc { code, message }))
        }
        _ => Ok(()),
    }
}

fn malformed(what: &'static str) -> TransportError {
    TransportError::Broken(Broken::Malformed(what))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use http_body::Frame;
    use http_body_util::StreamBody;
    use proptest::prelude::*;

    use super::*;

    type Frames = VecDeque<Result<Frame<Bytes>, TransportError>>;

    fn framed(event: Option<Event>) -> Vec<u8> {
        let message = GenerateReply { event }.encode_to_vec();
        [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), &message].concat()
    }

    fn body(pieces: &[&[u8]], trailers: &[(&'static str, &str)]) -> Frames {
        let mut headers = HeaderMap::new();
        for (name, value) in trailers {
            headers.insert(*name, value.parse().unwrap());
        }
        let data = pieces.iter().map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece))));
        data.chain([Ok(Frame::trailers(headers))]).collect()
    }

    /// All that comes, and how it ends.
    fn read(frames: Frames) -> (Vec<Event>, Option<TransportError>) {
        let mut replies = Replies::new(StreamBody::new(futures_util::stream::iter(frames)));
        let mut events = Vec::new();
        let mut cx = Context::from_waker(std::task::Waker::noop());
        loop {
            let Poll::Ready(next) = replies.poll_event(&mut cx) else { panic!("all is there") };
            match next {
                Some(Ok(event)) => events.push(event),
                Some(Err(error)) => return (events, Some(error)),
                None => return (events, None),
            }
        }
    }

    fn piece(text: &str) -> Event {
        Event::Body(Bytes::copy_from_slice(text.as_bytes()))
    }

    proptest! {
        #[test]
        fn where_messages_are_cut_makes_no_difference(
            texts in prop::collection::vec("[a-z]{0,40}", 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let bytes: Vec<u8> = texts.iter().flat_map(|text| framed(Some(piece(text)))).collect();
            let mut places: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            places.extend([0, bytes.len()]);
            places.sort_unstable();
            let pieces: Vec<_> = places.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            let (events, error) = read(body(&pieces, &[("grpc-status", "0")]));
            prop_assert!(error.is_none(), "{error:?}");
            prop_assert_eq!(events, texts.iter().map(|text| piece(text)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_end_but_a_good_one_is_an_error() {
        let whole = framed(Some(piece("a")));
        let fails = |frames, expected: &str| {
            let error = read(frames).1.expect("it is an error").to_string();
            assert!(error.contains(expected), "{error}");
        };
        fails(body(&[&whole], &[("grpc-status", "1"), ("grpc-message", "aborted")]), "status 1: aborted");
        fails(body(&[&whole], &[]), "without a gRPC status");
        fails(body(&[&whole[..4]], &[("grpc-status", "0")]), "within a message");
        fails(body(&[&whole[..7]], &[("grpc-status", "0")]), "within a message");
        fails(Frames::from([Ok(Frame::data(whole.clone().into()))]), "without a gRPC status");
        fails(Frames::from([Err(TransportError::Left)]), "left");
        fails(body(&[&[1, 0, 0, 0, 0]], &[]), "compressed");
        fails(body(&[&[0, 255, 0, 0, 0]], &[]), "too long");
        fails(body(&[&[0, 0, 0, 0, 1, 0xff]], &[]), "none");
    }

    #[test]
    fn messages_from_a_newer_worker_are_passed_over() {
        let pieces = [framed(None), framed(Some(piece("a")))].concat();
        let (events, error) = read(body(&[&pieces], &[("grpc-status", "0")]));
        assert_eq!((events, error.is_none()), (vec![piece("a")], true));
    }
}
