//! Any bytes as a worker's answer, in any pieces: no panic, the same answer wherever they are cut, no more of a body than its
//! head says, and what is a whole answer hyper reads as the same.

#![no_main]

use libfuzzer_sys::fuzz_target;

include!("pieces.rs");

fuzz_target!(|input: &[u8]| {
    let (reply, cut) = pieces(input);
    let lengths: Vec<_> = cut.iter().map(|piece| piece.len()).collect();
    router::transport::check_reply(reply, &lengths);
});
