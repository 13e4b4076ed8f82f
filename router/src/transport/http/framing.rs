//! Where an answer's body ends, and what of the bytes that come is body (RFC 9112, sections 6 and 7).

use bytes::{Buf, Bytes};

use crate::http1::{ChunkFault, Chunks, Part};

/// Whether a connection may carry another request after this answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeepAlive {
    /// The worker keeps it open.
    Yes,
    /// It closes it, or the body ends with it.
    No,
}

/// What is still to come of a body.
#[derive(Debug)]
pub(super) enum Framing {
    /// So many bytes, at least one.
    Length(u64),
    /// Chunks.
    Chunks(Box<Chunks>),
    /// Nothing, since what came after the last piece is no chunk.
    Faulty(ChunkFault),
    /// Everything until the connection ends.
    ToTheEnd,
    /// Nothing.
    Done,
}

/// Compares what kind of framing it is.
impl PartialEq for Framing {
    fn eq(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

impl Framing {
    /// A body of so many bytes.
    pub(super) fn length(bytes: u64) -> Self {
        if bytes == 0 { Self::Done } else { Self::Length(bytes) }
    }

    /// Takes the next piece of the body out of what has come; `None` if there is no more of it in there. With the last piece
    /// the framing is done, and what is left is not part of the answer.
    pub(super) fn next(&mut self, come: &mut Bytes) -> Result<Option<Bytes>, ChunkFault> {
        match self {
            Self::Done => Ok(None),
            Self::Faulty(fault) => Err(*fault),
            _ if come.is_empty() => Ok(None),
            Self::ToTheEnd => Ok(Some(std::mem::take(come))),
            Self::Length(left) => {
                let bytes = usize::try_from(*left).unwrap_or(usize::MAX).min(come.len());
                *left -= bytes as u64;
                if *left == 0 {
                    *self = Self::Done;
                }
                Ok(Some(come.split_to(bytes)))
            }
            Self::Chunks(_) => self.next_of_chunks(come),
        }
    }

    /// The data of what has come, if that is one whole chunk of this body and nothing has come before it that is still to be
    /// taken. If not, the body goes on with [`next`](Self::next).
    #[inline]
    pub(super) fn only_chunk<'a>(&self, come: &'a [u8]) -> Option<&'a [u8]> {
        if let Self::Chunks(chunks) = self { chunks.only_chunk(come) } else { None }
    }

    fn next_of_chunks(&mut self, come: &mut Bytes) -> Result<Option<Bytes>, ChunkFault> {
        let Self::Chunks(chunks) = self else { return Ok(None) };
        let mut data = None;
        while !come.is_empty() {
            // After a piece, on to the next: whether it was the last is best known at once.
            if data.is_some() && chunks.is_at_data() {
                break;
            }
            let taken = match chunks.push(come) {
                Ok(taken) => taken,
                // What was sound is handed out, as it would be if it had come by itself.
                Err(fault) if data.is_some() => {
                    *self = Self::Faulty(fault);
                    break;
                }
                Err(fault) => return Err(fault),
            };
            match taken.part {
                Part::Data => data = Some(come.split_to(taken.bytes)),
                Part::Framing => come.advance(taken.bytes),
                Part::End => {
                    come.advance(taken.bytes);
                    *self = Self::Done;
                    break;
                }
            }
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The body in `bytes`, which come in pieces that are read in the shortest way, and what comes after it: a fault, or so many
    /// bytes; and whether it has ended.
    fn read(
        mut framing: Framing,
        bytes: &[u8],
        cuts: &[usize],
    ) -> (Vec<u8>, Result<(usize, bool), ChunkFault>) {
        let (mut body, mut rest, mut left) = (Vec::new(), bytes, 0);
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let (piece, later) = rest.split_at(cut.min(rest.len()));
            rest = later;
            if let Some(data) = framing.only_chunk(piece) {
                assert!(!data.is_empty());
                body.extend_from_slice(data);
                continue;
            }
            let mut piece = Bytes::copy_from_slice(piece);
            loop {
                match framing.next(&mut piece) {
                    Ok(Some(data)) => {
                        assert!(!data.is_empty());
                        body.extend_from_slice(&data);
                    }
                    Ok(None) => break,
                    Err(fault) => return (body, Err(fault)),
                }
            }
            left += piece.len();
        }
        (body, Ok((left, framing == Framing::Done)))
    }

    fn chunk(data: &[u8], extension: &str) -> Vec<u8> {
        [format!("{:x}{extension}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
    }

    fn chunked(pieces: &[Vec<u8>]) -> Vec<u8> {
        let pieces = pieces.iter().filter(|piece| !piece.is_empty());
        let chunks: Vec<u8> = pieces.flat_map(|piece| chunk(piece, ";ext=1")).collect();
        [&chunks[..], b"0\r\nx-trailer: 1\r\n\r\n"].concat()
    }

    proptest! {
        #[test]
        fn a_body_is_the_same_wherever_it_is_cut(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
            surplus in prop::collection::vec(any::<u8>(), 0..9),
            cuts in prop::collection::vec(0_usize..30, 0..40),
        ) {
            let body = pieces.concat();
            let bytes = [chunked(&pieces), surplus.clone()].concat();
            let framing = Framing::Chunks(Box::default());
            prop_assert_eq!(read(framing, &bytes, &cuts), (body.clone(), Ok((surplus.len(), true))));
            let bytes = [&body[..], &surplus].concat();
            let framing = Framing::length(body.len() as u64);
            prop_assert_eq!(read(framing, &bytes, &cuts), (body.clone(), Ok((surplus.len(), true))));
            prop_assert_eq!(read(Framing::ToTheEnd, &body, &cuts), (body, Ok((0, false))));
        }

        #[test]
        fn a_body_is_the_same_when_chunks_come_one_at_a_time_and_when_some_come_together(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..8),
            together in prop::collection::vec(any::<bool>(), 8),
        ) {
            let mut cuts = vec![0];
            for (piece, together) in pieces.iter().zip(together) {
                let length = chunk(piece, "").len();
                if together { *cuts.last_mut().unwrap() += length } else { cuts.push(length) }
            }
            let chunks: Vec<u8> = pieces.iter().flat_map(|piece| chunk(piece, "")).collect();
            let bytes = [&chunks[..], b"0\r\n\r\n"].concat();
            let made = read(Framing::Chunks(Box::default()), &bytes, &cuts);
            prop_assert_eq!(made, (pieces.concat(), Ok((0, true))));
        }

        #[test]
        fn any_bytes_are_judged_alike_wherever_they_are_cut(
            bytes in prop::collection::vec(prop::sample::select(b"0123fF\r\n;x: ".to_vec()), 0..80),
            cuts in prop::collection::vec(0_usize..30, 0..40),
        ) {
            let whole = read(Framing::Chunks(Box::default()), &bytes, &[]);
            prop_assert_eq!(read(Framing::Chunks(Box::default()), &bytes, &cuts), whole);
        }
    }

    #[test]
    fn what_comes_before_a_fault_is_handed_out_wherever_it_is_cut() {
        let bytes = b"3\r\nabcX";
        for cuts in [&[][..], &[6], &[1, 1, 1, 1, 1, 1, 1]] {
            let made = read(Framing::Chunks(Box::default()), bytes, cuts);
            assert_eq!(made, (b"abc".to_vec(), Err(ChunkFault::End)), "{cuts:?}");
        }
    }

    #[test]
    fn only_one_whole_chunk_that_is_not_the_last_is_taken_in_one_step() {
        let at_start = Framing::Chunks(Box::default());
        assert_eq!(at_start.only_chunk(b"a\r\n0123456789\r\n"), Some(&b"0123456789"[..]));
        assert_eq!(at_start.only_chunk(b"003\r\n\r\n\n\r\n"), Some(&b"\r\n\n"[..]));
        let others: [&[u8]; 11] = [
            b"",
            b"0\r\n\r\n",
            b"\r\nabc\r\n",
            b"3\r\nabc\r\n0",
            b"3\r\nabc\r",
            b"3\r\nabcd\r\n",
            b"3\nabc\r\n",
            b"3;x\r\nabc\r\n",
            b"2\r\n\r\n",
            b"fffffffffffffffff\r\nabc\r\n",
            b"00000000000000003\r\nabc\r\n",
        ];
        for other in others {
            assert_eq!(at_start.only_chunk(other), None, "{:?}", other.escape_ascii().to_string());
        }
        for begun in [&b"3"[..], b"9\r\n", b"3\r\nabc", b"0\r\n"] {
            let mut framing = Framing::Chunks(Box::default());
            framing.next(&mut Bytes::from_static(begun)).unwrap();
            assert_eq!(framing.only_chunk(b"3\r\nabc\r\n"), None, "{:?}", begun.escape_ascii().to_string());
        }
        assert_eq!(Framing::ToTheEnd.only_chunk(b"3\r\nabc\r\n"), None);
    }

    #[test]
    fn the_end_is_known_with_the_last_piece() {
        let mut framing = Framing::Chunks(Box::default());
        let mut come = Bytes::from_static(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
        assert_eq!(framing.next(&mut come), Ok(Some(Bytes::from_static(b"abc"))));
        assert_ne!(framing, Framing::Done);
        assert_eq!(framing.next(&mut come), Ok(Some(Bytes::from_static(b"de"))));
        assert_eq!(framing, Framing::Done);
    }
}
