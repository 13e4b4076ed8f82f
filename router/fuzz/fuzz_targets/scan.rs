//! The body scanner: it never panics, reads the same however a body is cut, and takes for JSON what serde_json does.

#![no_main]

use libfuzzer_sys::fuzz_target;
use router::openai::scan::{BodyError, BodyScanner, Problem, ScanConfig, Scanned, SyntaxError};
use router_core::PromptUse;
use serde::de::IgnoredAny;

include!("pieces.rs");

fn scan(pieces: &[&[u8]], prompt_use: PromptUse) -> Result<Scanned, BodyError> {
    let mut scanner = BodyScanner::new(ScanConfig { seed: 1, prompt_use });
    for piece in pieces {
        if let Err(error) = scanner.push(piece) {
            // Whoever pushes on regardless must get the same error, and no panic.
            assert_eq!(scanner.push(piece), Err(error));
            return Err(error);
        }
    }
    scanner.finish()
}

fuzz_target!(|input: &[u8]| {
    let (body, cut) = pieces(input);
    let whole = scan(&[body], PromptUse::Whole);
    assert_eq!(scan(&cut, PromptUse::Whole), whole);
    // serde_json does not check the encoding of strings that it skips.
    let is_json = std::str::from_utf8(body).is_ok() && serde_json::from_slice::<IgnoredAny>(body).is_ok();
    match &whole {
        Ok(_) | Err(BodyError::NotAnObject { .. } | BodyError::TooManyMembers { .. }) => assert!(is_json),
        Err(BodyError::Syntax(SyntaxError { problem: Problem::TooDeep(_), .. })) => {}
        Err(BodyError::Syntax(error)) => assert!(!is_json, "{error}"),
    }
    if let Ok(whole) = whole {
        let first = scan(&cut, PromptUse::FirstKib).expect("it depends on the body alone");
        let none = scan(&cut, PromptUse::None).expect("it depends on the body alone");
        assert_eq!([first.prompt.prompt_bytes, none.prompt.prompt_bytes], [whole.prompt.prompt_bytes; 2]);
        assert!(first.prompt.hashes.len() <= 16 && none.prompt.hashes.is_empty());
        assert!(whole.prompt.opening.covered_bytes(whole.prompt.hashes.len()) <= whole.prompt.prompt_bytes);
    }
});
