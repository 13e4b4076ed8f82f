//! GGUF files: metadata and tensors of a model in one file, as llama.cpp writes them (ggml's `docs/gguf.md`, versions 2 and 3).
//!
//! Here is the container: header, metadata, where each tensor lies; every length is checked against the file before anything is
//! allocated for it. [`blocks`] undoes quantisation, [`describe`] and [`vocabulary`] say in Hugging Face's words what the metadata
//! say, so that everything after it takes a GGUF file for a model directory, [`weights`] finds tensors by those words.

mod blocks;
mod describe;
mod reader;
mod vocabulary;
pub(super) mod weights;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod writer;

use std::collections::HashMap;

use blocks::Format;
use reader::Reader;

/// Why a file is no GGUF that can be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GgufError {
    /// It does not begin as one.
    #[error("it is no GGUF file: it begins with {found:?} and not with \"GGUF\"")]
    Magic {
        /// Its first bytes.
        found: String,
    },
    /// It is of a version, or a byte order, that is not read.
    #[error("it is GGUF version {found}; supported: 2 and 3, little-endian")]
    Version {
        /// The version.
        found: u32,
    },
    /// It ends too soon.
    #[error("the file ends within {what}: {needed} bytes from byte {at} on, of {length}")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// How much is missing.
        needed: u64,
        /// Where it begins.
        at: usize,
        /// Length of the file.
        length: usize,
    },
    /// It contradicts itself.
    #[error("at byte {at}: {problem}")]
    Damaged {
        /// Where.
        at: usize,
        /// What is wrong.
        problem: String,
    },
    /// Metadata that are missing, of the wrong type, or ask for something that is not implemented.
    #[error("`{key}` is {found}; it must be {wanted}")]
    Metadata {
        /// The key.
        key: String,
        /// Its value, or that there is none.
        found: String,
        /// What would be right.
        wanted: String,
    },
    /// A tensor that cannot be used.
    #[error("tensor `{name}` {problem}")]
    Tensor {
        /// Its name in the file.
        name: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
}

/// A file, read but for its tensors' data.
pub(super) struct Gguf<'a> {
    metadata: HashMap<&'a str, Value<'a>>,
    tensors: HashMap<&'a str, Tensor<'a>>,
}

/// A value of the metadata.
#[derive(Clone, PartialEq, Debug)]
enum Value<'a> {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    Numbers(Numbers<'a>),
    Texts(Vec<&'a str>),
}

/// A list of numbers, as it lies in the file: what it would be as `f64` may be eight times as long.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Numbers<'a> {
    kind: u32,
    width: usize,
    bytes: &'a [u8],
}

impl Numbers<'_> {
    fn len(&self) -> usize {
        self.bytes.len() / self.width
    }

    fn get(&self, at: usize) -> Option<f64> {
        let bytes = self.bytes.chunks_exact(self.width).nth(at)?;
        Some(reader::number(self.kind, bytes))
    }

    fn iter(&self) -> impl Iterator<Item = f64> {
        self.bytes.chunks_exact(self.width).map(|bytes| reader::number(self.kind, bytes))
    }
}

/// A tensor: rows one behind another, the innermost dimension first.
#[derive(Clone, Debug)]
struct Tensor<'a> {
    /// How its numbers are stored, by GGUF's number for it.
    kind: u32,
    /// Columns, then rows if it has any.
    dimensions: Vec<usize>,
    /// Its data, where the format is known; otherwise nothing, since their length is not.
    bytes: &'a [u8],
}

/// Metadata and tensors together; a model has some hundreds of tensors and tens of keys.
const MAX_ENTRIES: u64 = 1 << 20;
const MAX_DIMENSIONS: u32 = 4;
/// Where `general.alignment` does not say otherwise.
const ALIGNMENT: u64 = 32;

impl<'a> Gguf<'a> {
    pub(super) fn parse(file: &'a [u8]) -> Result<Self, GgufError> {
        let mut reader = Reader::new(file);
        let magic = reader.take(4, "the magic number")?;
        if magic != b"GGUF" {
            return Err(GgufError::Magic { found: String::from_utf8_lossy(magic).into_owned() });
        }
        let version = reader.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { found: version });
        }
        let tensors = reader.count("the number of tensors", MAX_ENTRIES)?;
        let entries = reader.count("the number of metadata", MAX_ENTRIES)?;
        let mut metadata = HashMap::new();
        for _ in 0..entries {
            let (at, key) = (reader.at(), reader.text("a key")?);
            if metadata.insert(key, Value::read(&mut reader)?).is_some() {
                return Err(GgufError::Damaged { at, problem: format!("key `{key}` appears twice") });
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => ALIGNMENT,
            Some(Value::Unsigned(bytes)) if bytes.is_power_of_two() && *bytes <= 1 << 20 => *bytes,
            Some(other) => {
                return Err(wrong_key("general.alignment", Some(other), "a power of two up to 1 MiB"));
            }
        };
        let tensors = read_tensors(&mut reader, tensors, alignment as usize)?;
        Ok(Self { metadata, tensors })
    }
}

fn read_tensors<'a>(
    reader: &mut Reader<'a>,
    count: usize,
    alignment: usize,
) -> Result<HashMap<&'a str, Tensor<'a>>, GgufError> {
    let mut placed = Vec::new();
    for _ in 0..count {
        let name = reader.text("a tensor's name")?;
        let (dimensions, kind) = (read_dimensions(reader, name)?, reader.u32("a tensor's type")?);
        placed.push((name, dimensions, kind, reader.u64("a tensor's offset")?));
    }
    let start = reader.at().next_multiple_of(alignment).min(reader.file().len());
    let data = &reader.file()[start..];
    let mut tensors = HashMap::new();
    for (name, dimensions, kind, offset) in placed {
        let problem = |problem: String| GgufError::Tensor { name: name.to_owned(), problem };
        let rest = usize::try_from(offset).ok().and_then(|offset| data.get(offset..));
        let rest =
            rest.ok_or_else(|| problem(format!("begins at {offset} of {} bytes of data", data.len())))?;
        let bytes = match Format::from_kind(kind) {
            None => &[][..],
            Some(format) => {
                let length = format.bytes(&dimensions).map_err(problem)?;
                rest.get(..length).ok_or_else(|| {
                    problem(format!("needs {length} bytes, but the file has {} of them", rest.len()))
                })?
            }
        };
        if tensors.insert(name, Tensor { kind, dimensions, bytes }).is_some() {
            return Err(problem("appears twice".to_owned()));
        }
    }
    Ok(tensors)
}

fn read_dimensions(reader: &mut Reader<'_>, name: &str) -> Result<Vec<usize>, GgufError> {
    let count = reader.u32("a tensor's dimensions")?;
    if !(1..=MAX_DIMENSIONS).contains(&count) {
        let problem = format!("has {count} dimensions; it must have from 1 to {MAX_DIMENSIONS}");
        return Err(GgufError::Tensor { name: name.to_owned(), problem });
    }
    let mut dimensions = Vec::new();
    for _ in 0..count {
        let length = reader.u64("a tensor's dimensions")?;
        let fits = usize::try_from(length).ok().filter(|length| *length > 0);
        dimensions.push(fits.ok_or_else(|| GgufError::Tensor {
            name: name.to_owned(),
            problem: format!("has a dimension of {length}"),
        })?);
    }
    Ok(dimensions)
}

fn wrong_key(key: &str, found: Option<&Value<'_>>, wanted: impl Into<String>) -> GgufError {
    let found = match found {
        None => "missing".to_owned(),
        Some(Value::Unsigned(number)) => number.to_string(),
        Some(Value::Signed(number)) => number.to_string(),
        Some(Value::Float(number)) => number.to_string(),
        Some(Value::Bool(switch)) => switch.to_string(),
        Some(Value::Text(text)) => format!("{:?}", text.chars().take(100).collect::<String>()),
        Some(Value::Numbers(list)) => format!("a list of {} numbers", list.len()),
        Some(Value::Texts(list)) => format!("a list of {} texts", list.len()),
    };
    GgufError::Metadata { key: key.to_owned(), found, wanted: wanted.into() }
}

impl<'a> Gguf<'a> {
    fn text(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            other => Err(wrong_key(key, other, "a text")),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) => Ok(Some(*number)),
            Some(Value::Unsigned(number)) => Ok(Some(*number as f64)),
            Some(Value::Signed(number)) => Ok(Some(*number as f64)),
            other => Err(wrong_key(key, other, "a number")),
        }
    }

    fn whole(&self, key: &str) -> Result<Option<u64>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(number)) => Ok(Some(*number)),
            Some(Value::Signed(number)) if *number >= 0 => Ok(Some(number.cast_unsigned())),
            other => Err(wrong_key(key, other, "a whole number from 0 up")),
        }
    }

    fn switch(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(switch)) => Ok(Some(*switch)),
            other => Err(wrong_key(key, other, "true or false")),
        }
    }

    fn texts(&self, key: &str) -> Result<&[&'a str], GgufError> {
        match self.metadata.get(key) {
            Some(Value::Texts(texts)) => Ok(texts),
            // A list of nothing has whatever type the writer gave it.
            Some(Value::Numbers(none)) if none.len() == 0 => Ok(&[]),
            other => Err(wrong_key(key, other, "a list of texts")),
        }
    }

    fn numbers(&self, key: &str) -> Result<Option<Numbers<'a>>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Numbers(numbers)) => Ok(Some(*numbers)),
            other => Err(wrong_key(key, other, "a list of numbers")),
        }
    }
}
