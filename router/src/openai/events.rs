//! Where the events of a stream end, so that a client gets whole ones only: if the worker dies in the middle of one, the half of it
//! would stand before the error event, and clients fail at that half.
//!
//! Workers write whole events at a time, nearly always, and then nothing is copied and nothing waits. Knows nothing of what an event
//! says. Used by [`relay`](crate::stages::relay).

use bytes::Bytes;
use memchr::memrchr2;

/// So much without the end of an event is no stream of events, whatever its head said: it goes on as it is.
const LARGEST_EVENT: usize = 256 << 10;

/// A stream of server-sent events on its way, in whole events.
#[derive(Debug, Default)]
pub struct WholeEvents {
    /// The beginning of an event whose end has not come.
    begun: Bytes,
    /// What has gone on ends in a carriage return: a line feed that follows belongs to it.
    after_cr: bool,
}

impl WholeEvents {
    /// Takes the next piece, and gives what can go on: nothing, if no event ends in it.
    pub fn pass(&mut self, piece: Bytes) -> Bytes {
        let mut whole = self.with_begun(piece);
        let mut end = end_of_last_event(&whole);
        if end == 0 && self.after_cr && whole.first() == Some(&b'\n') {
            end = 1;
        }
        if let Some(last) = whole[..end].last() {
            self.after_cr = *last == b'\r';
        }
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

/// How many bytes the whole events take that `bytes` begins with. An event ends with an empty line, and a line with LF, CRLF or CR, not
/// necessarily each with the same one (HTML Living Standard, 9.2.5).
fn end_of_last_event(bytes: &[u8]) -> usize {
    let mut before = bytes.len();
    while let Some(last) = memrchr2(b'\n', b'\r', &bytes[..before]) {
        let line_end = if bytes[..=last].ends_with(b"\r\n") { last - 1 } else { last };
        if matches!(bytes[..line_end].last(), Some(b'\n' | b'\r')) {
            return last + 1;
        }
        before = line_end;
    }
    0
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
            ends in prop::collection::vec(0usize..3, 40),
        ) {
            // CR and LF would be one end, not two.
            let end_of = |at: usize| ["\n", "\r\n", "\r"][ends[at]];
            let blank = |at: usize| match [end_of(2 * at), end_of(2 * at + 1)] {
                ["\r", "\n"] => "\r\r".to_owned(),
                two => two.concat(),
            };
            let event = |(at, size): (usize, &usize)| format!("data: {}{}", "x".repeat(*size), blank(at));
            let whole: String = sizes.iter().enumerate().map(event).collect();
            let half = "y".repeat(left);
            let (gone, rest) = passed(format!("{whole}{half}").as_bytes(), cut);
            prop_assert_eq!(gone, whole.into_bytes());
            prop_assert_eq!(rest, half.into_bytes());
        }
    }

    #[test]
    fn lines_alone_end_no_event() {
        for end in ["\n", "\r\n", "\r"] {
            let lines = format!("event: x{end}data: y{end}");
            let (gone, rest) = passed(lines.as_bytes(), 3);
            assert_eq!((gone.len(), rest), (0, lines.clone().into_bytes()));
        }
        let mut events = WholeEvents::default();
        assert_eq!(events.pass(Bytes::from_static(b"data: x\r\n\r")), "data: x\r\n\r");
        assert_eq!(events.pass(Bytes::from_static(b"\ndata: y")), "\n", "the rest of the end of a line");
        assert_eq!(events.rest(), "data: y");
    }

    #[test]
    fn what_is_no_stream_of_events_goes_on_all_the_same() {
        let (gone, rest) = passed(&vec![b'x'; 3 * LARGEST_EVENT], 10_000);
        assert!(gone.len() > 2 * LARGEST_EVENT && rest.len() <= LARGEST_EVENT);
        assert_eq!(gone.len() + rest.len(), 3 * LARGEST_EVENT);
    }
}
