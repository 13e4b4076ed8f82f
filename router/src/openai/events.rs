//! Where the events of a stream end, so that a client gets whole ones only: if the worker dies in the middle of one, the half of it
//! would stand before the error event, and clients fail at that half.
//!
//! Workers write whole events at a time, nearly always, and then nothing is copied and nothing waits. Knows nothing of what an event
//! says. Used by [`relay`](crate::stages::relay).

use bytes::Bytes;
use memchr::memmem;

/// So much without the end of an event is no stream of events, whatever its head said: it goes on as it is.
const LARGEST_EVENT: usize = 256 << 10;

/// A stream of server-sent events on its way, in whole events.
#[derive(Debug, Default)]
pub struct WholeEvents {
    /// The beginning of an event whose end has not come.
    begun: Bytes,
}

impl WholeEvents {
    /// Takes the next piece, and gives what can go on: nothing, if no event ends in it.
    pub fn pass(&mut self, piece: Bytes) -> Bytes {
        let mut whole = self.with_begun(piece);
        let end = end_of_last_event(&whole);
        if whole.len() - end <= LARGEST_EVENT {
            self.begun = whole.split_off(end);
        }
        whole
    }

    /// What is left when the stream ends: as the worker ended it.
    pub fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.begun)
    }

    fn with_begun(&mut self, piece: Bytes) -> Bytes {
        if self.begun.is_empty() {
            return piece;
        }
        [self.rest(), piece].concat().into()
    }
}

/// How many bytes the whole events take that `bytes` begins with.
fn end_of_last_event(bytes: &[u8]) -> usize {
    if bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n") {
        return bytes.len();
    }
    let after = |blank: &[u8]| memmem::rfind(bytes, blank).map_or(0, |at| at + blank.len());
    after(b"\n\n").max(after(b"\r\n\r\n"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn passed(stream: &[u8], cut: usize) -> (Vec<u8>, Vec<u8>) {
        let mut events = WholeEvents::default();
        let pieces = stream.chunks(cut).map(Bytes::copy_from_slice);
        let gone: Vec<u8> = pieces.flat_map(|piece| events.pass(piece)).collect();
        (gone, events.rest().to_vec())
    }

    proptest! {
        #[test]
        fn whole_events_go_on_however_the_stream_is_cut(
            sizes in prop::collection::vec(0usize..40, 0..20),
            left in 0usize..30,
            cut in 1usize..200,
            crlf in any::<bool>(),
        ) {
            let blank = if crlf { "\r\n\r\n" } else { "\n\n" };
            let whole: String = sizes.iter().map(|size| format!("data: {}{blank}", "x".repeat(*size))).collect();
            let half = "y".repeat(left);
            let (gone, rest) = passed(format!("{whole}{half}").as_bytes(), cut);
            prop_assert_eq!(gone, whole.into_bytes());
            prop_assert_eq!(rest, half.into_bytes());
        }
    }

    #[test]
    fn what_is_no_stream_of_events_goes_on_all_the_same() {
        let (gone, rest) = passed(&vec![b'x'; 3 * LARGEST_EVENT], 10_000);
        assert!(gone.len() > 2 * LARGEST_EVENT && rest.len() <= LARGEST_EVENT);
        assert_eq!(gone.len() + rest.len(), 3 * LARGEST_EVENT);
    }
}
