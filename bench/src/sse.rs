//! Server-sent events, read incrementally: bytes in any cut, whole events out.
//!
//! Must not know JSON or HTTP. Follows the event stream format of the HTML standard: lines end in LF, CR LF or CR,
//! a leading byte order mark and comment lines are skipped, the `data` lines of one event are joined by LF, and an
//! event without data is dropped. [`crate::client`] feeds it and reads the events.

/// Most bytes that one event may take before the stream is called broken.
pub const EVENT_LIMIT_BYTES: usize = 16 << 20;

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// The `event:` field, empty when the server sent none.
    pub name: &'a [u8],
    /// The joined `data:` lines.
    pub data: &'a [u8],
}

/// The stream is not one that can be read on.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("an event is larger than {EVENT_LIMIT_BYTES} bytes")]
pub struct EventTooLarge;

/// What is left over between two feeds.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    data: Vec<u8>,
    name: Vec<u8>,
    has_data: bool,
    after_cr: bool,
    started: bool,
}

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

impl SseParser {
    /// Reads the next bytes and hands every event they complete to `on_event`.
    ///
    /// # Errors
    /// [`EventTooLarge`] when an unfinished event has outgrown its bound.
    pub fn feed(&mut self, bytes: &[u8], mut on_event: impl FnMut(Event<'_>)) -> Result<(), EventTooLarge> {
        let mut rest = bytes;
        if self.after_cr && !rest.is_empty() {
            // The LF of a CR LF that was cut in two ends no second line.
            self.after_cr = false;
            rest = rest.strip_prefix(b"\n").unwrap_or(rest);
        }
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            let (line, tail) = rest.split_at(end);
            self.end_line(line, &mut on_event);
            rest = match tail {
                [b'\r', b'\n', next @ ..] => next,
                [b'\r'] => {
                    self.after_cr = true;
                    &[]
                }
                _ => &tail[1..],
            };
        }
        self.line.extend_from_slice(rest);
        if self.line.len() + self.data.len() > EVENT_LIMIT_BYTES { Err(EventTooLarge) } else { Ok(()) }
    }

    /// Ends the stream. An event whose closing blank line never came is handed over all the same: some servers omit
    /// it after their last event.
    pub fn finish(&mut self, mut on_event: impl FnMut(Event<'_>)) {
        if !self.line.is_empty() {
            self.end_line(&[], &mut on_event);
        }
        self.dispatch(&mut on_event);
    }

    fn end_line(&mut self, tail: &[u8], on_event: &mut impl FnMut(Event<'_>)) {
        if self.line.is_empty() {
            self.read_line(tail, on_event);
            return;
        }
        let mut line = std::mem::take(&mut self.line);
        line.extend_from_slice(tail);
        self.read_line(&line, on_event);
        line.clear();
        self.line = line; // keeps its capacity for the next cut line
    }

    fn read_line(&mut self, line: &[u8], on_event: &mut impl FnMut(Event<'_>)) {
        let line = if self.started { line } else { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line) };
        self.started = true;
        if line.is_empty() {
            self.dispatch(on_event);
            return;
        }
        let colon = line.iter().position(|byte| *byte == b':');
        let (field, value) = match colon {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value);
                self.has_data = true;
            }
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            _ => {} // comments have an empty field; id and retry concern reconnecting clients only
        }
    }

    fn dispatch(&mut self, on_event: &mut impl FnMut(Event<'_>)) {
        if self.has_data {
            on_event(Event { name: &self.name, data: &self.data });
        }
        self.name.clear();
        self.data.clear();
        self.has_data = false;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Owned = (String, String);

    fn parse_in_pieces(stream: &[u8], cuts: &[usize]) -> Vec<Owned> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        let mut collect = |event: Event<'_>| {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            events.push((text(event.name), text(event.data)));
        };
        let mut from = 0;
        for cut in cuts.iter().copied().chain([stream.len()]) {
            parser.feed(&stream[from..cut], &mut collect).unwrap();
            from = cut;
        }
        parser.finish(&mut collect);
        events
    }

    fn data_of(stream: &str) -> Vec<String> {
        parse_in_pieces(stream.as_bytes(), &[]).into_iter().map(|(_, data)| data).collect()
    }

    #[test]
    fn reads_every_line_ending_and_joins_data_lines() {
        assert_eq!(
            data_of("data: a\n\ndata: b\r\n\r\ndata: c\r\rdata: d\ndata:e\n\n"),
            ["a", "b", "c", "d\ne"]
        );
    }

    #[test]
    fn skips_comments_unknown_fields_byte_order_mark_and_empty_events() {
        assert_eq!(
            data_of("\u{feff}data: a\n: ping\nid: 7\nretry: 9\n\n\n\nevent: x\n\n: only\n\ndata\n\n"),
            ["a", ""]
        );
    }

    #[test]
    fn keeps_the_name_for_its_own_event_only() {
        let events = parse_in_pieces(b"event: error\ndata: bad\n\ndata: next\n\n", &[]);
        assert_eq!(events, [("error".into(), "bad".into()), (String::new(), "next".into())]);
    }

    #[test]
    fn hands_over_a_last_event_without_its_blank_line() {
        assert_eq!(data_of("data: x\n\ndata: [DONE]"), ["x", "[DONE]"]);
        assert_eq!(data_of("data: [DONE]\n"), ["[DONE]"]);
    }

    #[test]
    fn removes_one_leading_space_only() {
        assert_eq!(data_of("data:  two: colons\n\n"), [" two: colons"]);
    }

    #[test]
    fn refuses_an_event_without_end() {
        let mut parser = SseParser::default();
        let block = vec![b'x'; EVENT_LIMIT_BYTES / 2 + 1];
        assert_eq!(parser.feed(&block, |_| ()), Ok(()));
        assert_eq!(parser.feed(&block, |_| ()), Err(EventTooLarge));
    }

    /// The standard's algorithm on the whole text at once.
    fn naive(stream: &str) -> Vec<Owned> {
        let text = stream.strip_prefix('\u{feff}').unwrap_or(stream);
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let (mut events, mut name, mut data) = (Vec::new(), String::new(), Vec::<String>::new());
        for line in text.split('\n').chain([""]) {
            if line.is_empty() {
                if !data.is_empty() {
                    events.push((name.clone(), data.join("\n")));
                }
                name.clear();
                data.clear();
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
            match field {
                "data" => data.push(value),
                "event" => name = value,
                _ => {}
            }
        }
        events
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_events_of_the_whole(
            parts in prop::collection::vec(
                prop::sample::select(vec![
                    "data", ":", " ", "\n", "\r", "\r\n", "event", "x", "{\"a\":1}", "é", "[DONE]", "\u{feff}",
                    "data: t\n\n", ": ping\n\n", "id: 3\r\n",
                ]),
                0..60,
            ),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        ) {
            let stream = parts.concat();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            prop_assert_eq!(parse_in_pieces(stream.as_bytes(), &cuts), naive(&stream));
        }
    }
}
