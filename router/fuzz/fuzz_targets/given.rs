//! What a client has of a stream: no panic; it does not depend on cuts, and of events that are like the last one it is what reading each of them says.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use router::openai::continuation::Kind;
use router::openai::continuation::given::Given;
use router::openai::continuation::seam::Seam;
use router::openai::events::WholeEvents;

include!("pieces.rs");

fuzz_target!(|input: &[u8]| {
    let Some((first, rest)) = input.split_first() else { return };
    let kind = if first % 2 == 0 { Kind::Chat } else { Kind::Completions };
    // Engines end lines with line feeds; streams with others are not gone on with.
    let rest: Vec<u8> = rest.iter().copied().filter(|byte| *byte != b'\r').collect();
    let (stream, cut) = pieces(&rest);
    let (mut whole, mut events) = (Given::new(kind), WholeEvents::default());
    let passed = events.pass(Bytes::copy_from_slice(stream));
    let heard = whole.hear(&passed);

    let (mut in_pieces, mut events) = (Given::new(kind), WholeEvents::default());
    let (mut together, mut failed) = (Vec::new(), false);
    for piece in cut {
        let passed = events.pass(Bytes::copy_from_slice(piece));
        if !failed {
            let heard = in_pieces.hear(&passed);
            together.extend_from_slice(&passed[..heard]);
            failed = heard < passed.len();
        }
    }
    // An empty line more ends nothing.
    assert_eq!(together.trim_ascii_end(), passed[..heard].trim_ascii_end());
    assert_eq!((in_pieces.text(), in_pieces.pieces()), (whole.text(), whole.pieces()));
    assert_eq!((in_pieces.id(), in_pieces.can_go_on()), (whole.id(), whole.can_go_on()));
    assert_eq!((in_pieces.thought(), in_pieces.thought_is_over()), (whole.thought(), whole.thought_is_over()));

    if whole.can_go_on() {
        // Each line by itself, with nothing before it to be compared with.
        let (mut thought, mut text) = (String::new(), String::new());
        for line in passed[..heard].split_inclusive(|byte| *byte == b'\n') {
            let mut one = Given::new(kind);
            one.hear(line);
            if !one.can_go_on() {
                // What is no JSON but for its text looks like the one before.
                return;
            }
            thought += one.thought().unwrap_or_default();
            text += one.text();
        }
        assert_eq!((&*thought, &*text), (whole.thought().unwrap_or_default(), whole.text()));
    }
    // What follows on it is changed event by event.
    let (mut seam, after) = (Seam::after(&whole), Bytes::copy_from_slice(stream));
    let changed = seam.pass(&after).events;
    assert!(changed.is_empty() || !after.is_empty());
});
