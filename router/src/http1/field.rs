//! A header line (RFC 9110, section 5; RFC 9112, section 5).

/// Why a line is no field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FieldFault {
    /// It begins with whitespace: the line before goes on in it.
    Folded,
    /// There is whitespace between name and colon.
    SpaceBeforeColon,
    /// The name is empty or has characters that no name has.
    Name,
}

/// A field's name, and its value with the whitespace around it.
#[inline]
pub(crate) fn field(line: &[u8]) -> Result<(&[u8], &[u8]), FieldFault> {
    let name_bytes = line.iter().position(|byte| !TOKEN[usize::from(*byte)]).unwrap_or(line.len());
    let (name, rest) = line.split_at(name_bytes);
    match rest {
        [b':', value @ ..] if !name.is_empty() => Ok((name, value)),
        [b' ' | b'\t', ..] if name.is_empty() => Err(FieldFault::Folded),
        [b' ' | b'\t', ..] if rest.trim_ascii_start().starts_with(b":") => Err(FieldFault::SpaceBeforeColon),
        _ => Err(FieldFault::Name),
    }
}

/// Whether each byte is a letter, a digit or among `others`.
pub(crate) const fn byte_table(others: &[u8]) -> [bool; 256] {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 128 {
        table[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut other = 0;
    while other < others.len() {
        table[others[other] as usize] = true;
        other += 1;
    }
    table
}

/// What names and methods are made of (RFC 9110, section 5.6.2).
pub(crate) const TOKEN: [bool; 256] = byte_table(b"!#$%&'*+-.^_`|~");
