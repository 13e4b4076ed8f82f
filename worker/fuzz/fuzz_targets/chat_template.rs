//! Any messages, tools and variables: every template renders them or says why not; never a panic.

#![no_main]

#[path = "../../tests/bad_input/check.rs"]
mod check;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| check::chat_template(body));
