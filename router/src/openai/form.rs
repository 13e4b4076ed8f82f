//! Reads the model's name of a form, as audio comes in (`multipart/form-data`, RFC 7578), while it arrives. Keeps the beginnings of parts
//! and the one short value, nothing of a file.
//!
//! Lenient: what is no form names no model, and whether a form makes sense is for the engine to say. Next: the stage
//! [`parse`](crate::stages::parse).

use http::{HeaderMap, header};
use memchr::memmem::{self, Finder};

use super::scan::{MAX_FIELD_BYTES, Name};

/// No boundary is longer (RFC 2046, section 5.1.1).
const MAX_BOUNDARY_BYTES: usize = 70;
/// What ends the headers of a part.
const BLANK_LINE: &[u8] = b"\r\n\r\n";

/// Reads a form that comes in pieces. Where it is cut makes no difference to what is read.
pub struct FormScanner {
    /// What stands between two parts: a line end, two hyphens, the boundary.
    delimiter: Finder<'static>,
    state: State,
    /// What may be the beginning of what is looked for; of headers and of the value all that has come.
    held: Vec<u8>,
    model: Option<Name>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// In front of the first part, or in one that is not wanted.
    Skipping,
    Headers,
    Value,
    /// Nothing that comes now matters.
    Done,
}

impl FormScanner {
    /// A scanner at the beginning of a body with these headers, if that is a form.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let (essence, parameters) = kind.split_once(';')?;
        if !essence.trim().eq_ignore_ascii_case("multipart/form-data") {
            return None;
        }
        let boundary = parameter(parameters, "boundary")?;
        if boundary.is_empty() || boundary.len() > MAX_BOUNDARY_BYTES {
            return None;
        }
        let delimiter = Finder::new(format!("\r\n--{boundary}").as_bytes()).into_owned();
        // The first delimiter may stand at the very beginning.
        Some(Self { delimiter, state: State::Skipping, held: b"\r\n".to_vec(), model: None })
    }

    /// Reads the next piece.
    pub fn push(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while !rest.is_empty() && self.state != State::Done {
            let used = match self.state {
                State::Skipping => self.skip(rest),
                _ => self.collect(rest),
            };
            rest = &rest[used..];
        }
    }

    /// The body has ended: the model that it names.
    #[must_use]
    pub fn finish(self) -> Option<Name> {
        self.model
    }

    /// Looks for the next part. Returns how much of `piece` has been used.
    fn skip(&mut self, piece: &[u8]) -> usize {
        let length = self.delimiter.needle().len();
        // Over the cut first.
        let held = self.held.len();
        let joined = piece.len().min(length - 1);
        self.held.extend_from_slice(&piece[..joined]);
        if let Some(at) = self.delimiter.find(&self.held) {
            self.enter(State::Headers);
            return at + length - held;
        }
        if joined < piece.len() {
            if let Some(at) = self.delimiter.find(piece) {
                self.enter(State::Headers);
                return at + length;
            }
            self.held.clear();
            self.held.extend_from_slice(&piece[piece.len() - joined..]);
        }
        let surplus = self.held.len().saturating_sub(length - 1);
        self.held.drain(..surplus);
        piece.len()
    }

    /// Takes in headers, or the value, up to what ends them. Returns how much of `piece` has been used.
    fn collect(&mut self, piece: &[u8]) -> usize {
        let before = self.held.len();
        let end = if self.state == State::Headers { BLANK_LINE } else { self.delimiter.needle() };
        let most = (MAX_FIELD_BYTES + end.len()).saturating_sub(before).min(piece.len());
        self.held.extend_from_slice(&piece[..most]);
        if self.state == State::Headers && self.held.starts_with(b"--") {
            // That was the last delimiter.
            self.enter(State::Done);
            return most;
        }
        let Some(at) = memmem::find(&self.held, end) else {
            if most < piece.len() {
                self.enter(State::Done);
            }
            return most;
        };
        let used = at + end.len() - before;
        if self.state == State::Headers {
            let names_model = name_of(&self.held[..at]).is_some_and(|name| name == "model");
            self.enter(if names_model { State::Value } else { State::Skipping });
        } else {
            let value = std::str::from_utf8(&self.held[..at]).ok();
            self.model = value.filter(|value| !value.is_empty()).map(Name::from);
            self.enter(State::Done);
        }
        used
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.held.clear();
    }
}

/// The field that a part with these headers is.
fn name_of(headers: &[u8]) -> Option<&str> {
    let mut lines = std::str::from_utf8(headers).ok()?.split("\r\n");
    let disposition = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    parameter(disposition, "name")
}

/// The value of a header's parameter, without its quotes.
fn parameter<'a>(mut rest: &'a str, name: &str) -> Option<&'a str> {
    loop {
        let mut is_quoted = false;
        let ends = |byte: u8| {
            is_quoted ^= byte == b'"';
            byte == b';' && !is_quoted
        };
        let end = rest.bytes().position(ends).unwrap_or(rest.len());
        if let Some((key, value)) = rest[..end].split_once('=')
            && key.trim().eq_ignore_ascii_case(name)
        {
            let value = value.trim();
            return Some(value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value));
        }
        rest = rest.get(end + 1..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanner(content_type: &str) -> Option<FormScanner> {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, content_type.parse().unwrap())]);
        FormScanner::of(&headers)
    }

    fn model(body: &[u8], cut: usize) -> Option<Name> {
        let mut scanner = scanner("multipart/form-data; boundary=\"a;b\"").unwrap();
        body.chunks(cut).for_each(|piece| scanner.push(piece));
        assert!(scanner.held.len() <= 2 * MAX_FIELD_BYTES, "{}", scanner.held.len());
        scanner.finish()
    }

    fn part(headers: &str, value: &[u8]) -> Vec<u8> {
        [b"--a;b\r\n", headers.as_bytes(), BLANK_LINE, value, b"\r\n"].concat()
    }

    fn file(bytes: usize) -> Vec<u8> {
        // Much that looks like the beginning of a delimiter, and of a field.
        let sound = b"\r\n--a;\r\n--\r\n\r\n\r\nname=\"model\"\r\n--a".repeat(bytes / 32);
        part("Content-Disposition: form-data; name=\"file\"; filename=\"x; name=model.wav\"", &sound)
    }

    #[test]
    fn finds_the_model_wherever_the_form_is_cut() {
        let named =
            part("content-type: text/plain\r\nContent-Disposition: form-data; name=\"model\"", b"m/1");
        let empty = part("content-disposition: form-data; name=prompt", b"");
        let orders = [
            [&named[..], &file(900), &empty].concat(),
            [&file(900)[..], &empty, &named].concat(),
            [b"a preamble\r\n", &empty[..], &named, &file(900)].concat(),
        ];
        for body in orders.map(|parts| [&parts[..], b"--a;b--\r\n"].concat()) {
            for cut in (1..120).chain([body.len()]) {
                assert_eq!(model(&body, cut).as_deref(), Some("m/1"), "cut at {cut}");
            }
        }
    }

    #[test]
    fn what_names_no_model_names_none() {
        let ended =
            [&file(64)[..], b"--a;b--\r\n", &part("content-disposition: x; name=model", b"m")].concat();
        let endless = part("content-disposition: form-data; name=model", &[b'x'; 3 * MAX_FIELD_BYTES]);
        let headers = part(&"x: y\r\n".repeat(2 * MAX_FIELD_BYTES), b"");
        let empty = part("content-disposition: form-data; name=model", b"");
        for body in [ended, endless, headers, empty, file(64), b"no form".to_vec(), Vec::new()] {
            for cut in [1, 7, 1_000, body.len().max(1)] {
                assert_eq!(model(&body, cut), None);
            }
        }
    }

    #[test]
    fn other_bodies_are_no_forms() {
        for kind in [
            "application/json",
            "multipart/form-data",
            "multipart/mixed; boundary=a",
            "multipart/form-data; boundary=",
        ] {
            assert!(scanner(kind).is_none(), "{kind}");
        }
        assert!(scanner(&format!("multipart/form-data; boundary={}", "x".repeat(71))).is_none());
        assert!(scanner("Multipart/Form-Data; charset=utf-8; Boundary=x").is_some());
    }
}
