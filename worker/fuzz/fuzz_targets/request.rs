//! Any bytes as a request body: read and sound, or refused with a 400 that says why; never a panic.

#![no_main]

#[path = "../../tests/bad_input/check.rs"]
mod check;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| check::request(body));
