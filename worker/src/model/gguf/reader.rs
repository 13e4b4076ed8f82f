//! Little-endian values from a file, each checked against what is left of it.

use super::{GgufError, Numbers, Value};

/// A place in a file.
pub(super) struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a [u8]) -> Self {
        Self { file, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn file(&self) -> &'a [u8] {
        self.file
    }

    pub(super) fn take(&mut self, length: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        let end = usize::try_from(length).ok().and_then(|length| self.at.checked_add(length));
        let bytes = end.and_then(|end| self.file.get(self.at..end)).ok_or(GgufError::Truncated {
            what,
            needed: length,
            at: self.at,
            length: self.file.len(),
        })?;
        self.at += bytes.len();
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of things, of which `most` make sense.
    pub(super) fn count(&mut self, what: &'static str, most: u64) -> Result<usize, GgufError> {
        let (at, count) = (self.at, self.u64(what)?);
        if count > most {
            return Err(GgufError::Damaged { at, problem: format!("{what} is {count}; the most is {most}") });
        }
        Ok(count as usize)
    }

    pub(super) fn text(&mut self, what: &'static str) -> Result<&'a str, GgufError> {
        let length = self.u64(what)?;
        let at = self.at;
        std::str::from_utf8(self.take(length, what)?)
            .map_err(|_| GgufError::Damaged { at, problem: format!("{what} is not UTF-8") })
    }

    /// Several values of `width` bytes, all of which are there.
    fn values(&mut self, count: u64, width: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        self.take(count.saturating_mul(width), what)
    }
}

/// GGUF's numbers of types.
const TEXT: u32 = 8;
const LIST: u32 = 9;

impl<'a> Value<'a> {
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, GgufError> {
        match reader.u32("a value's type")? {
            TEXT => Ok(Self::Text(reader.text("a text")?)),
            LIST => Self::read_list(reader),
            kind => {
                let width = width(kind, reader)?;
                Ok(scalar(kind, reader.take(width, "a value")?))
            }
        }
    }

    fn read_list(reader: &mut Reader<'a>) -> Result<Self, GgufError> {
        let kind = reader.u32("a list's type")?;
        let (at, count) = (reader.at(), reader.u64("a list's length")?);
        if kind == TEXT {
            // Each takes eight bytes at least, so that this many are never allocated for a file that cannot have them.
            let most = (reader.file().len() - reader.at()) as u64 / 8;
            if count > most {
                let problem = format!("a list of {count} texts does not fit into what is left of the file");
                return Err(GgufError::Damaged { at, problem });
            }
            let texts = (0..count).map(|_| reader.text("a list of texts")).collect::<Result<_, _>>()?;
            return Ok(Self::Texts(texts));
        }
        let width = width(kind, reader)?;
        let bytes = reader.values(count, width, "a list")?;
        Ok(Self::Numbers(Numbers { kind, width: width as usize, bytes }))
    }
}

/// One number of a list.
pub(super) fn number(kind: u32, bytes: &[u8]) -> f64 {
    match scalar(kind, bytes) {
        Value::Unsigned(number) => number as f64,
        Value::Signed(number) => number as f64,
        Value::Float(number) => number,
        Value::Bool(switch) => f64::from(u8::from(switch)),
        Value::Text(_) | Value::Numbers(_) | Value::Texts(_) => unreachable!("a scalar is a number"),
    }
}

/// Bytes of a number of this type.
fn width(kind: u32, reader: &Reader<'_>) -> Result<u64, GgufError> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        LIST => {
            Err(GgufError::Damaged { at: reader.at(), problem: "a list of lists is not supported".into() })
        }
        other => {
            Err(GgufError::Damaged { at: reader.at(), problem: format!("{other} is no type of a value") })
        }
    }
}

/// A number of type `kind`, from as many bytes as [`width`] says.
fn scalar<'a>(kind: u32, bytes: &[u8]) -> Value<'a> {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(wide);
    match kind {
        1 => Value::Signed(i64::from(bits as i8)),
        3 => Value::Signed(i64::from(bits as i16)),
        5 => Value::Signed(i64::from(bits as i32)),
        6 => Value::Float(f64::from(f32::from_bits(bits as u32))),
        7 => Value::Bool(bits != 0),
        11 => Value::Signed(bits.cast_signed()),
        12 => Value::Float(f64::from_bits(bits)),
        _ => Value::Unsigned(bits),
    }
}
