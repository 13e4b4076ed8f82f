//! The end of a reply: no panic, and the same usage however the reply is cut.

#![no_main]

use libfuzzer_sys::fuzz_target;
use router::openai::usage::ReplyTail;

include!("pieces.rs");

fuzz_target!(|input: &[u8]| {
    let (reply, cut) = pieces(input);
    let mut whole = ReplyTail::default();
    whole.push(reply);
    let mut tail = ReplyTail::default();
    cut.iter().for_each(|piece| tail.push(piece));
    assert_eq!(tail.usage(), whole.usage());
});
