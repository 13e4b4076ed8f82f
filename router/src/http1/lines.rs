//! Puts lines together that were cut, and sees that they end in CR LF and hold no control characters.

use memchr::memchr;

/// What can be wrong with a line as such.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// All lines together are longer than allowed.
    TooLong,
    /// LF without CR.
    BareLf,
    /// CR without LF.
    BareCr,
    /// Any other control character but the tab.
    Control,
}

/// Reads lines, up to a number of bytes.
#[derive(Debug)]
pub(crate) struct Lines {
    /// The line so far, if its end has not come.
    cut: Vec<u8>,
    /// The line in `cut` has been given out.
    given: bool,
    seen_bytes: usize,
    max_bytes: usize,
}

impl Lines {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { cut: Vec::new(), given: false, seen_bytes: 0, max_bytes }
    }

    /// Begins again, with a full allowance.
    pub(crate) fn restart(&mut self, max_bytes: usize) {
        self.cut.clear();
        (self.given, self.seen_bytes, self.max_bytes) = (false, 0, max_bytes);
    }

    /// Bytes since the last start.
    pub(crate) fn seen_bytes(&self) -> usize {
        self.seen_bytes
    }

    /// How many of `bytes` it took, and the line, without its end, if it is whole.
    #[inline]
    pub(crate) fn read<'a>(&'a mut self, bytes: &'a [u8]) -> Result<(usize, Option<&'a [u8]>), Fault> {
        if self.given {
            self.cut.clear();
            self.given = false;
        }
        let end = memchr(b'\n', bytes);
        let taken = end.map_or(bytes.len(), |end| end + 1);
        let room = self.max_bytes - self.seen_bytes;
        if taken > room {
            // Faults within the allowance come first, so that the verdict does not depend on cuts.
            self.check(&bytes[..room])?;
            return Err(Fault::TooLong);
        }
        self.seen_bytes += taken;
        let Some(end) = end else {
            self.check(bytes)?;
            self.cut.extend_from_slice(bytes);
            return Ok((taken, None));
        };
        if self.cut.is_empty() {
            let line = &bytes[..end];
            return Ok((taken, Some(whole(line)?)));
        }
        self.check(&bytes[..end])?;
        self.cut.extend_from_slice(&bytes[..end]);
        self.given = true;
        Ok((taken, Some(whole(&self.cut)?)))
    }

    /// The next bytes of a line whose end is not among them.
    fn check(&self, part: &[u8]) -> Result<(), Fault> {
        if part.is_empty() {
            return Ok(());
        }
        if self.cut.last() == Some(&b'\r') {
            return Err(Fault::BareCr);
        }
        // A CR at the very end may have its LF to come.
        let inner = part.strip_suffix(b"\r").unwrap_or(part);
        if has_controls(inner) { Err(first_fault(inner)) } else { Ok(()) }
    }
}

/// A line without its CR.
#[inline]
fn whole(line: &[u8]) -> Result<&[u8], Fault> {
    let inner = line.strip_suffix(b"\r").unwrap_or(line);
    if has_controls(inner) {
        return Err(first_fault(inner));
    }
    if inner.len() == line.len() { Err(Fault::BareLf) } else { Ok(inner) }
}

/// Looks at every byte without a branch for each, so that many are looked at together.
#[inline]
fn has_controls(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |found, byte| found | u8::from(is_control(*byte))) != 0
}

/// How many control characters there are, line ends included.
#[inline]
pub(crate) fn count_controls(bytes: &[u8]) -> usize {
    // Sums that fit into a byte are added up many at a time.
    let few = |bytes: &[u8]| bytes.iter().fold(0_u8, |count, byte| count + u8::from(is_control(*byte)));
    bytes.chunks(128).map(|bytes| usize::from(few(bytes))).sum()
}

#[inline]
fn is_control(byte: u8) -> bool {
    (byte < b' ' && byte != b'\t') || byte == 0x7f
}

#[cold]
fn first_fault(bytes: &[u8]) -> Fault {
    match bytes.iter().find(|byte| is_control(**byte)) {
        Some(b'\r') => Fault::BareCr,
        _ => Fault::Control,
    }
}
