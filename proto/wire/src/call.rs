//! A `Generate` call for a whole HTTP request, as it goes over the wire, with the body left where it is.
//!
//! A long prompt is not copied into a message, nor its headers into strings: everything before the body is written here,
//! and the body's own pieces follow.

use bytes::{BufMut, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

/// Where `Generate` is called.
pub const GENERATE_PATH: &str = "/roundhouse.worker.v1.Worker/Generate";

/// Where `Info` is called.
pub const INFO_PATH: &str = "/roundhouse.worker.v1.Worker/Info";
/// Where `Load` is called.
pub const LOAD_PATH: &str = "/roundhouse.worker.v1.Worker/Load";
/// Where `KvEvents` is called.
pub const KV_EVENTS_PATH: &str = "/roundhouse.worker.v1.Worker/KvEvents";
/// Where `Tell` is called.
pub const TELL_PATH: &str = "/roundhouse.worker.v1.Worker/Tell";

/// The flag that says whether a message is compressed, and its length.
pub const FRAME_BYTES: usize = 5;

/// Numbers of fields in `worker.proto`.
mod field {
    pub(super) const REQUEST_HTTP: u32 = 2;
    pub(super) const CALL_METHOD: u32 = 1;
    pub(super) const CALL_PATH: u32 = 2;
    pub(super) const CALL_HEADER: u32 = 3;
    pub(super) const CALL_BODY: u32 = 15;
    pub(super) const HEADER_NAME: u32 = 1;
    pub(super) const HEADER_VALUE: u32 = 2;
}

/// All that stands before the `body_bytes` bytes of the body in a framed `GenerateRequest` with such an `HttpCall`. `None` if
/// the message would be longer than a frame can say, 4 GiB.
pub fn frame_call<'a>(
    method: &str,
    path: &str,
    headers: impl Iterator<Item = (&'a str, &'a [u8])>,
    body_bytes: usize,
) -> Option<BytesMut> {
    let mut call = BytesMut::with_capacity(512);
    put(field::CALL_METHOD, method.as_bytes(), &mut call);
    put(field::CALL_PATH, path.as_bytes(), &mut call);
    for (name, value) in headers {
        let len = field_len(field::HEADER_NAME, name.len()) + field_len(field::HEADER_VALUE, value.len());
        put_head(field::CALL_HEADER, len, &mut call);
        put(field::HEADER_NAME, name.as_bytes(), &mut call);
        put(field::HEADER_VALUE, value, &mut call);
    }
    put_head(field::CALL_BODY, body_bytes, &mut call);
    let call_bytes = call.len() + body_bytes;
    let message_bytes = u32::try_from(field_len(field::REQUEST_HTTP, call_bytes)).ok()?;
    let mut framed = BytesMut::with_capacity(FRAME_BYTES + 16 + call.len());
    framed.put_u8(0);
    framed.put_u32(message_bytes);
    put_head(field::REQUEST_HTTP, call_bytes, &mut framed);
    framed.extend_from_slice(&call);
    Some(framed)
}

fn put(field: u32, bytes: &[u8], into: &mut BytesMut) {
    put_head(field, bytes.len(), into);
    into.extend_from_slice(bytes);
}

fn put_head(field: u32, len: usize, into: &mut BytesMut) {
    encode_key(field, WireType::LengthDelimited, into);
    encode_varint(len as u64, into);
}

fn field_len(field: u32, len: usize) -> usize {
    key_len(field) + encoded_len_varint(len as u64) + len
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::v1::{GenerateRequest, Header, HttpCall, generate_request::Input};

    proptest! {
        #[test]
        fn a_call_in_pieces_is_the_message(
            (method, path) in ("[A-Z]{0,7}", "/[a-z/]{0,200}"),
            headers in prop::collection::vec(("[a-z-]{0,20}", prop::collection::vec(any::<u8>(), 0..200)), 0..5),
            body in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let pairs = headers.iter().map(|(name, value)| (name.as_str(), value.as_slice()));
            let framed = [&frame_call(&method, &path, pairs, body.len()).unwrap()[..], &body].concat();
            let (frame, message) = framed.split_at(FRAME_BYTES);
            prop_assert_eq!(frame[0], 0);
            prop_assert_eq!(u32::from_be_bytes(frame[1..].try_into().unwrap()) as usize, message.len());
            let read = GenerateRequest::decode(message).unwrap();
            let headers = headers.into_iter().map(|(name, value)| Header { name, value: value.into() }).collect();
            let call = HttpCall { method, path, headers, body: body.into() };
            prop_assert_eq!(read, GenerateRequest { request_id: String::new(), input: Some(Input::Http(call)) });
        }
    }

    #[test]
    fn what_no_frame_can_hold_is_refused() {
        assert!(frame_call("POST", "/", std::iter::empty(), u32::MAX as usize).is_none());
    }
}
