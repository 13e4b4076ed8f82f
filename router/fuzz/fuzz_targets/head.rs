//! Any bytes in any pieces: the guard does not panic, its verdict does not depend on the pieces, and what it lets pass hyper
//! reads as the same requests.

#![no_main]

#[path = "../../tests/guard/agreement.rs"]
mod agreement;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| {
    let (bytes, cuts) = input;
    let lengths: Vec<_> = cuts.iter().map(|length| usize::from(*length)).collect();
    agreement::check(&bytes, &lengths);
});
