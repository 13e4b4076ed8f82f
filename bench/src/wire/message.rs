//! One HTTP/1 message, read from bytes in any cut: a request as a mock sees it, a response as the generator does.
//!
//! Knows framing and nothing else: the start line, the length, the chunks. It keeps no body; whoever feeds it is handed
//! the pieces. Small on purpose, since every nanosecond here is one that the core of a load generator does not have.
//! Next on the path: [`super::socket`].

/// Largest head that is read.
const HEAD_LIMIT_BYTES: usize = 64 << 10;

/// Which of the two messages of an exchange it is: they differ in what a missing length means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Without a length there is no body.
    Request,
    /// Without a length the body ends with the connection, if the head says so; else its end could not be told from a
    /// broken connection.
    Response,
}

/// How far a message is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are to come.
    Partial,
    /// This was all of it.
    Complete,
}

/// What is wrong with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A head without an end.
    #[error("head of more than {HEAD_LIMIT_BYTES} bytes")]
    HeadTooLarge,
    /// Not a request line or status line.
    #[error("start line that is not one of HTTP/1")]
    StartLine,
    /// Not a number, or given with a transfer encoding.
    #[error("content-length that is none")]
    ContentLength,
    /// A response that says nothing of where it ends.
    #[error("response with neither content-length nor chunks nor connection: close")]
    NoLength,
    /// Not `SIZE CR LF DATA CR LF`.
    #[error("chunk that is not framed as one")]
    Chunk,
    /// Bytes after the end: nothing is pipelined here.
    #[error("bytes after the end of the message")]
    Trailing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Head,
    Body { left_bytes: u64 },
    Chunked(Chunked),
    UntilClose,
    Done,
}

/// Where in a chunked body the reader stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunked {
    Size { bytes: u64, has_digit: bool, in_extension: bool },
    Data { left_bytes: u64 },
    DataEnd,
    Trailer { line_bytes: usize },
}

const CHUNK_SIZE: Chunked = Chunked::Size { bytes: 0, has_digit: false, in_extension: false };

/// The first line of a message.
#[derive(Debug, Default)]
pub struct StartLine(Vec<u8>);

impl StartLine {
    /// The status of a response; 0 when it is none.
    pub fn status(&self) -> u16 {
        let digits = self.0.get(9..12).unwrap_or_default();
        std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).unwrap_or(0)
    }

    /// The path of a request, without its query.
    pub fn path(&self) -> &[u8] {
        let target = self.0.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
        target.split(|byte| *byte == b'?').next().unwrap_or_default()
    }
}

/// Reads one message after the other from one connection.
#[derive(Debug)]
pub struct MessageReader {
    side: Side,
    phase: Phase,
    /// The beginning of a head that came in pieces.
    partial_head: Vec<u8>,
    /// The last head and the phase that followed it. Most heads of a connection are the same, and comparing them takes a
    /// tenth of the time of reading them.
    known_head: (Vec<u8>, Phase),
    start_line: StartLine,
    closes: bool,
}

impl MessageReader {
    /// A reader at the beginning of its first message.
    pub fn new(side: Side) -> Self {
        Self {
            side,
            phase: Phase::Head,
            partial_head: Vec::new(),
            known_head: (Vec::new(), Phase::Head),
            start_line: StartLine::default(),
            closes: false,
        }
    }

    /// Gets ready for the next message.
    pub fn reset(&mut self) {
        self.phase = Phase::Head;
        self.partial_head.clear();
    }

    /// Whether nothing of the message has come yet.
    pub fn is_untouched(&self) -> bool {
        self.phase == Phase::Head && self.partial_head.is_empty()
    }

    /// Whether the message ends where the connection does.
    pub fn ends_with_connection(&self) -> bool {
        self.phase == Phase::UntilClose
    }

    /// The value of a header of the message, the first of that name.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let mut lines = Lines(&self.known_head.0);
        lines.find_map(|line| {
            let (found, value) = line.split_at_checked(name.len())?;
            let value = value.strip_prefix(b":")?;
            found.eq_ignore_ascii_case(name.as_bytes()).then_some(value.trim_ascii())
        })
    }

    /// Whether the other side said that it closes the connection after this message.
    pub fn closes(&self) -> bool {
        self.closes
    }

    /// The first line of the message; empty before it is read.
    pub fn start_line(&self) -> &StartLine {
        &self.start_line
    }

    /// Reads the next bytes and hands on the pieces of the body among them, each with the start line.
    ///
    /// # Errors
    /// [`Malformed`], after which the connection is of no use.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        mut on_body: impl FnMut(&StartLine, &[u8]),
    ) -> Result<Progress, Malformed> {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = match self.phase {
                Phase::Head => self.read_head(rest)?,
                Phase::Body { left_bytes } => {
                    let (piece, after) = split(rest, left_bytes);
                    on_body(&self.start_line, piece);
                    let left_bytes = left_bytes - piece.len() as u64;
                    self.phase = if left_bytes == 0 { Phase::Done } else { Phase::Body { left_bytes } };
                    after
                }
                Phase::Chunked(chunked) => self.read_chunked(chunked, rest, &mut on_body)?,
                Phase::UntilClose => {
                    on_body(&self.start_line, rest);
                    &[]
                }
                Phase::Done => return Err(Malformed::Trailing),
            };
        }
        Ok(if self.phase == Phase::Done { Progress::Complete } else { Progress::Partial })
    }

    fn read_head<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let (known, phase) = &self.known_head;
        if self.partial_head.is_empty() && !known.is_empty() && bytes.starts_with(known) {
            self.phase = *phase;
            return Ok(&bytes[known.len()..]);
        }
        if self.partial_head.is_empty()
            && let Some(end) = head_end(bytes, 0)
        {
            self.parse_head(&bytes[..end])?;
            return Ok(&bytes[end..]);
        }
        let before = self.partial_head.len();
        self.partial_head.extend_from_slice(bytes);
        let Some(end) = head_end(&self.partial_head, before.saturating_sub(3)) else {
            return if self.partial_head.len() > HEAD_LIMIT_BYTES {
                Err(Malformed::HeadTooLarge)
            } else {
                Ok(&[])
            };
        };
        let head = std::mem::take(&mut self.partial_head);
        self.parse_head(&head[..end])?;
        Ok(&bytes[end - before..])
    }

    fn parse_head(&mut self, head: &[u8]) -> Result<(), Malformed> {
        let mut lines = Lines(head);
        let start = lines.next().ok_or(Malformed::StartLine)?;
        let version = match self.side {
            Side::Request => start.rsplit(|byte| *byte == b' ').next(),
            Side::Response => start.get(..8),
        };
        self.closes = match version {
            Some(b"HTTP/1.1") => false,
            Some(b"HTTP/1.0") => true,
            _ => return Err(Malformed::StartLine),
        };
        self.start_line.0.clear();
        self.start_line.0.extend_from_slice(start);
        let (mut length, mut is_chunked) = (None, false);
        for line in lines {
            // The length of a name decides first: most headers are passed over with one comparison.
            match memchr::memchr(b':', line) {
                Some(14) if line[..14].eq_ignore_ascii_case(b"content-length") => {
                    length = Some(parse_length(line[15..].trim_ascii())?);
                }
                Some(17) if line[..17].eq_ignore_ascii_case(b"transfer-encoding") => {
                    is_chunked = line[18..].trim_ascii().eq_ignore_ascii_case(b"chunked");
                }
                Some(10) if line[..10].eq_ignore_ascii_case(b"connection") => {
                    let value = line[11..].trim_ascii();
                    self.closes = value.eq_ignore_ascii_case(b"close")
                        || (self.closes && !value.eq_ignore_ascii_case(b"keep-alive"));
                }
                _ => {}
            }
        }
        self.phase = match (is_chunked, length, self.side) {
            (true, Some(_), _) => return Err(Malformed::ContentLength),
            (true, None, _) => Phase::Chunked(CHUNK_SIZE),
            (false, Some(0), _) | (false, None, Side::Request) => Phase::Done,
            (false, Some(left_bytes), _) => Phase::Body { left_bytes },
            (false, None, Side::Response) if self.is_interim() => Phase::Head,
            (false, None, Side::Response) if self.start_line.status() == 204 => Phase::Done,
            (false, None, Side::Response) if self.closes => Phase::UntilClose,
            (false, None, Side::Response) => return Err(Malformed::NoLength),
        };
        self.known_head.0.clear();
        self.known_head.0.extend_from_slice(head);
        self.known_head.1 = self.phase;
        Ok(())
    }

    /// Whether the head is one of those before the real one, such as `100 Continue`.
    fn is_interim(&self) -> bool {
        (100..200).contains(&self.start_line.status())
    }

    fn read_chunked<'a>(
        &mut self,
        chunked: Chunked,
        bytes: &'a [u8],
        on_body: &mut impl FnMut(&StartLine, &[u8]),
    ) -> Result<&'a [u8], Malformed> {
        let (phase, rest) = match chunked {
            Chunked::Data { left_bytes } => {
                let (piece, rest) = split(bytes, left_bytes);
                on_body(&self.start_line, piece);
                let left_bytes = left_bytes - piece.len() as u64;
                let next = if left_bytes == 0 { Chunked::DataEnd } else { Chunked::Data { left_bytes } };
                (Phase::Chunked(next), rest)
            }
            _ => (chunk_framing(chunked, bytes[0])?, &bytes[1..]),
        };
        self.phase = phase;
        Ok(rest)
    }
}

/// One byte of what stands between the data of two chunks.
fn chunk_framing(chunked: Chunked, byte: u8) -> Result<Phase, Malformed> {
    let next = match (chunked, byte) {
        (Chunked::Size { has_digit: true, bytes: 0, .. }, b'\n') => Chunked::Trailer { line_bytes: 0 },
        (Chunked::Size { has_digit: true, bytes, .. }, b'\n') => Chunked::Data { left_bytes: bytes },
        (Chunked::Size { has_digit: true, bytes, .. }, b';') => {
            Chunked::Size { bytes, has_digit: true, in_extension: true }
        }
        (Chunked::Size { has_digit: true, bytes, in_extension }, b'\r' | b' ') => {
            Chunked::Size { bytes, has_digit: true, in_extension }
        }
        (size @ Chunked::Size { in_extension: true, .. }, _) => size,
        (Chunked::Size { bytes, .. }, digit) => {
            let digit = (digit as char).to_digit(16).ok_or(Malformed::Chunk)?;
            let bytes = bytes.checked_mul(16).ok_or(Malformed::Chunk)? + u64::from(digit);
            Chunked::Size { bytes, has_digit: true, in_extension: false }
        }
        (Chunked::DataEnd, b'\r') => Chunked::DataEnd,
        (Chunked::DataEnd, b'\n') => CHUNK_SIZE,
        (Chunked::Trailer { line_bytes: 0 }, b'\n') => return Ok(Phase::Done),
        (Chunked::Trailer { .. }, b'\n') => Chunked::Trailer { line_bytes: 0 },
        (trailer @ Chunked::Trailer { .. }, b'\r') => trailer,
        (Chunked::Trailer { line_bytes }, _) => Chunked::Trailer { line_bytes: line_bytes + 1 },
        (Chunked::DataEnd | Chunked::Data { .. }, _) => return Err(Malformed::Chunk),
    };
    Ok(Phase::Chunked(next))
}

/// The position after the empty line, looked for from `from` on.
fn head_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while let Some(found) = memchr::memchr(b'\r', &bytes[at..]) {
        at += found;
        if bytes[at..].starts_with(b"\r\n\r\n") {
            return Some(at + 4);
        }
        at += 1;
    }
    None
}

fn split(bytes: &[u8], at: u64) -> (&[u8], &[u8]) {
    bytes.split_at(usize::try_from(at).map_or(bytes.len(), |at| at.min(bytes.len())))
}

fn parse_length(digits: &[u8]) -> Result<u64, Malformed> {
    let text = std::str::from_utf8(digits).map_err(|_| Malformed::ContentLength)?;
    text.parse().map_err(|_| Malformed::ContentLength)
}

/// The lines of a head without their ends; the empty one ends them.
struct Lines<'a>(&'a [u8]);

impl<'a> Iterator for Lines<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let end = memchr::memchr(b'\n', self.0)?;
        let (line, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        (!line.is_empty()).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds the stream in the pieces that the cuts make; the body and how it ended.
    fn read(side: Side, stream: &[u8], cuts: &[usize]) -> (Vec<u8>, Result<Progress, Malformed>) {
        let mut reader = MessageReader::new(side);
        let (mut body, mut from, mut last) = (Vec::new(), 0, Ok(Progress::Partial));
        for cut in cuts.iter().copied().chain([stream.len()]) {
            last = reader.feed(&stream[from..cut], |_, piece| body.extend_from_slice(piece));
            if last.is_err() {
                break;
            }
            from = cut;
        }
        (body, last)
    }

    fn of_response(text: &str) -> (String, Result<Progress, Malformed>) {
        let (body, end) = read(Side::Response, text.as_bytes(), &[]);
        (String::from_utf8(body).unwrap(), end)
    }

    #[test]
    fn reads_start_lines_and_lengths() {
        let mut reader = MessageReader::new(Side::Response);
        assert!(reader.is_untouched());
        let complete = reader.feed(b"HTTP/1.1 429 Too Many\r\nContent-Length:  3 \r\n\r\nabc", |_, _| {});
        assert_eq!(
            (complete, reader.start_line().status(), reader.closes()),
            (Ok(Progress::Complete), 429, false)
        );
        reader.reset();
        let closing =
            reader.feed(b"HTTP/1.1 200 OK\r\nconnection: Close\r\ncontent-length: 0\r\n\r\n", |_, _| {});
        assert_eq!((closing, reader.closes()), (Ok(Progress::Complete), true));

        let mut reader = MessageReader::new(Side::Request);
        assert_eq!(
            reader.feed(b"GET /health?x=1 HTTP/1.1\r\nhost: a\r\n\r\n", |_, _| {}),
            Ok(Progress::Complete)
        );
        assert_eq!(reader.start_line().path(), b"/health");
    }

    #[test]
    fn reads_chunks_with_extensions_and_trailers() {
        let text = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                    5;name=v\r\nhello\r\nA\r\n0123456789\r\n0\r\nx-end: 1\r\n\r\n";
        assert_eq!(of_response(text), ("hello0123456789".to_owned(), Ok(Progress::Complete)));
    }

    #[test]
    fn a_body_without_length_ends_with_a_connection_that_says_so() {
        let mut reader = MessageReader::new(Side::Response);
        let mut body = Vec::new();
        let head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\na";
        assert_eq!(reader.feed(head, |_, piece| body.extend_from_slice(piece)), Ok(Progress::Partial));
        assert_eq!(reader.feed(b"bc", |_, piece| body.extend_from_slice(piece)), Ok(Progress::Partial));
        assert_eq!((body.as_slice(), reader.ends_with_connection()), (&b"abc"[..], true));
    }

    #[test]
    fn passes_over_interim_responses_and_finds_headers_of_the_last() {
        let mut reader = MessageReader::new(Side::Response);
        let stream = b"HTTP/1.1 100 Continue\r\nx-a: 0\r\n\r\n\
                       HTTP/1.1 200 OK\r\nX-A:  one \r\nx-ab: 2\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(reader.feed(stream, |_, _| {}), Ok(Progress::Complete));
        assert_eq!(reader.start_line().status(), 200);
        assert_eq!((reader.header("x-a"), reader.header("x-ab")), (Some(&b"one"[..]), Some(&b"2"[..])));
        assert_eq!(reader.header("x"), None);
    }

    #[test]
    fn names_what_is_malformed() {
        let head = "HTTP/1.1 200 OK\r\n";
        for (rest, expected) in [
            ("\r\n", Malformed::NoLength),
            ("content-length: x\r\n\r\n", Malformed::ContentLength),
            ("content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", Malformed::ContentLength),
            ("content-length: 1\r\n\r\nab", Malformed::Trailing),
            ("transfer-encoding: chunked\r\n\r\nz\r\n", Malformed::Chunk),
            ("transfer-encoding: chunked\r\n\r\n\r\n", Malformed::Chunk),
            ("transfer-encoding: chunked\r\n\r\n1\r\nabc", Malformed::Chunk),
            ("transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n", Malformed::Chunk),
        ] {
            assert_eq!(of_response(&format!("{head}{rest}")).1, Err(expected), "{rest:?}");
        }
        assert_eq!(of_response("SSH-2.0-x y\r\n\r\n").1, Err(Malformed::StartLine));
    }

    #[test]
    fn a_head_that_was_seen_before_means_the_same_again() {
        let mut reader = MessageReader::new(Side::Response);
        for (text, status, body) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", 200, "abc"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nxyz", 200, "xyz"),
            ("HTTP/1.1 503 No\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno", 503, "no"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", 200, "abc"),
        ] {
            reader.reset();
            let mut seen = Vec::new();
            let end = reader.feed(text.as_bytes(), |_, piece| seen.extend_from_slice(piece));
            assert_eq!((end, reader.start_line().status()), (Ok(Progress::Complete), status));
            assert_eq!((seen.as_slice(), reader.closes()), (body.as_bytes(), status == 503));
        }
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_chunks_that_were_written(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..12),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let mut stream = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx: y\r\n\r\n".to_vec();
            for chunk in &chunks {
                stream.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                stream.extend_from_slice(chunk);
                stream.extend_from_slice(b"\r\n");
            }
            stream.extend_from_slice(b"0\r\n\r\n");
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            prop_assert_eq!(read(Side::Response, &stream, &cuts), (chunks.concat(), Ok(Progress::Complete)));
            // One byte less is not the whole.
            let short = &stream[..stream.len() - 1];
            cuts.retain(|cut| *cut <= short.len());
            prop_assert_eq!(read(Side::Response, short, &cuts).1, Ok(Progress::Partial));
        }

        #[test]
        fn any_cut_gives_the_body_of_a_length(
            body in prop::collection::vec(any::<u8>(), 0..200),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let mut stream = format!("POST /v1/x HTTP/1.1\r\ncontent-length: {}\r\n\r\n", body.len()).into_bytes();
            stream.extend_from_slice(&body);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            prop_assert_eq!(read(Side::Request, &stream, &cuts), (body, Ok(Progress::Complete)));
        }
    }
}
