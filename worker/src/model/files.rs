//! The files of a model, from a Hugging Face directory, a GGUF file or from this program.
//!
//! Knows what the files are called, not what is in them; a GGUF file says the same in its own way, which [`super::gguf`] knows. Next: [`super::config`] and [`super::weights`]; the tokenizer
//! takes its texts from here too.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use roundhouse_types::ChainHasher;
use worker_kernels::MappedFile;

use super::ModelError;
use super::gguf::{Gguf, GgufError};

/// Where a model comes from.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ModelSource {
    /// The small model compiled into the program.
    Builtin,
    /// A Hugging Face model directory.
    Directory(PathBuf),
    /// A GGUF file, as llama.cpp uses it.
    Gguf(PathBuf),
}

impl FromStr for ModelSource {
    type Err = Infallible;

    /// `builtin`, or a path, that of a file if it ends in `.gguf`; a directory of the former name is `./builtin`.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let path = PathBuf::from(text);
        let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        Ok(match text {
            BUILTIN => Self::Builtin,
            _ if is_gguf => Self::Gguf(path),
            _ => Self::Directory(path),
        })
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Builtin => f.write_str(BUILTIN),
            Self::Directory(path) | Self::Gguf(path) => path.display().fmt(f),
        }
    }
}

/// Name of the model in this program.
const BUILTIN: &str = "builtin";

/// A model's files: texts read, weights mapped.
#[derive(Debug)]
pub struct ModelFiles {
    /// The id it is served under: `builtin`, or the name of the directory or file.
    pub name: String,
    /// `config.json`.
    pub config: String,
    /// `generation_config.json`, if there is one.
    pub generation_config: Option<String>,
    /// `tokenizer.json`, if there is one.
    pub tokenizer: Option<String>,
    /// `tokenizer_config.json`, if there is one.
    pub tokenizer_config: Option<String>,
    /// `chat_template.jinja`, if there is one; otherwise the template may be in `tokenizer_config`.
    pub chat_template: Option<String>,
    /// Its weight files.
    pub(super) weights: Vec<WeightFile>,
}

/// A file of weights.
pub(super) struct WeightFile {
    pub(super) name: String,
    pub(super) format: WeightFormat,
    bytes: WeightBytes,
}

/// How a file names and stores its tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WeightFormat {
    Safetensors,
    Gguf,
}

enum WeightBytes {
    Compiled(&'static [u8]),
    Mapped(MappedFile),
}

impl WeightFile {
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.bytes {
            WeightBytes::Compiled(bytes) => bytes,
            WeightBytes::Mapped(file) => file,
        }
    }
}

impl fmt::Debug for WeightFile {
    /// Without the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.name, self.bytes().len())
    }
}

impl ModelFiles {
    /// Opens the files of `source`.
    ///
    /// # Errors
    /// [`ModelError`] when the directory, its `config.json` or its weights cannot be read.
    pub fn open(source: &ModelSource) -> Result<Self, ModelError> {
        match source {
            ModelSource::Builtin => Ok(Self::builtin()),
            ModelSource::Directory(path) => Self::directory(path),
            ModelSource::Gguf(path) => Self::gguf(path),
        }
    }

    fn builtin() -> Self {
        let text = |text: &str| Some(text.to_owned());
        Self {
            name: BUILTIN.to_owned(),
            config: include_str!("../../models/builtin/config.json").to_owned(),
            generation_config: text(include_str!("../../models/builtin/generation_config.json")),
            tokenizer: text(include_str!("../../models/builtin/tokenizer.json")),
            tokenizer_config: text(include_str!("../../models/builtin/tokenizer_config.json")),
            chat_template: None,
            weights: vec![WeightFile {
                name: SINGLE.to_owned(),
                format: WeightFormat::Safetensors,
                bytes: WeightBytes::Compiled(include_bytes!("../../models/builtin/model.safetensors")),
            }],
        }
    }

    fn directory(path: &Path) -> Result<Self, ModelError> {
        if !path.is_dir() {
            return Err(ModelError::NoDirectory { path: path.to_owned() });
        }
        // `.` and `..` have no name of their own.
        let full =
            path.canonicalize().map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        let name =
            full.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
        Ok(Self {
            name,
            config: read(&path.join("config.json"))?,
            generation_config: read_if_there(&path.join("generation_config.json"))?,
            tokenizer: read_if_there(&path.join("tokenizer.json"))?,
            tokenizer_config: read_if_there(&path.join("tokenizer_config.json"))?,
            chat_template: read_if_there(&path.join("chat_template.jinja"))?,
            weights: weight_files(path)?,
        })
    }
}

/// Of each file of weights so many pieces are read where models are told apart, evenly from its beginning to its end.
const DIGESTED_PIECES: usize = 256;
/// Each of so many bytes, at most.
const DIGESTED_BYTES: usize = 4 << 10;

impl ModelFiles {
    /// Tells models apart: over the configuration, and of the weights their files' lengths and parts of them. The same weights in other files are
    /// another model.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut chain = ChainHasher::new(0).salted(self.config.as_bytes());
        for file in &self.weights {
            let bytes = file.bytes();
            let last = bytes.len().saturating_sub(DIGESTED_BYTES);
            let pieces = (0..DIGESTED_PIECES).map(|piece| last * piece / (DIGESTED_PIECES - 1));
            chain = pieces.fold(chain.salted(&bytes.len().to_le_bytes()), |chain, from| {
                chain.salted(&bytes[from..bytes.len().min(from + DIGESTED_BYTES)])
            });
        }
        chain.current().0
    }

    fn gguf(path: &Path) -> Result<Self, ModelError> {
        let mapped =
            MappedFile::open(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        let (file, stem) = (path.display().to_string(), path.file_stem().unwrap_or_default());
        let name = stem.to_string_lossy().into_owned();
        let bytes = WeightBytes::Mapped(mapped);
        let weights = WeightFile { name: file.clone(), format: WeightFormat::Gguf, bytes };
        let described = Self::described_by_gguf(name, weights.bytes());
        let described = described.map_err(|source| ModelError::Gguf { file, source })?;
        Ok(Self { weights: vec![weights], ..described })
    }

    /// All but the weights.
    fn described_by_gguf(name: String, file: &[u8]) -> Result<Self, GgufError> {
        let gguf = Gguf::parse(file)?;
        Ok(Self {
            name,
            config: gguf.config()?,
            generation_config: Some(gguf.generation_config()?),
            tokenizer: Some(gguf.tokenizer()?),
            tokenizer_config: Some(gguf.tokenizer_config()?),
            chat_template: None,
            weights: Vec::new(),
        })
    }
}

/// Weights in one file.
const SINGLE: &str = "model.safetensors";
/// Names the files of weights in several.
const INDEX: &str = "model.safetensors.index.json";

#[derive(serde::Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

fn weight_files(directory: &Path) -> Result<Vec<WeightFile>, ModelError> {
    let names = match read_if_there(&directory.join(INDEX))? {
        None => BTreeSet::from([SINGLE.to_owned()]),
        Some(text) => {
            let index: Index =
                serde_json::from_str(&text).map_err(|source| ModelError::Json { file: INDEX, source })?;
            index.weight_map.into_values().collect()
        }
    };
    let open = |name: String| {
        let path = directory.join(&name);
        let file = MappedFile::open(&path).map_err(|source| ModelError::Read { path, source })?;
        Ok(WeightFile { name, format: WeightFormat::Safetensors, bytes: WeightBytes::Mapped(file) })
    };
    names.into_iter().map(open).collect()
}

fn read(path: &Path) -> Result<String, ModelError> {
    std::fs::read_to_string(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })
}

fn read_if_there(path: &Path) -> Result<Option<String>, ModelError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::Read { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtin_is_a_name_and_everything_else_a_path() {
        assert_eq!("builtin".parse(), Ok(ModelSource::Builtin));
        assert_eq!("models/x.Q4_1.GGUF".parse(), Ok(ModelSource::Gguf("models/x.Q4_1.GGUF".into())));
        assert_eq!("./builtin".parse(), Ok(ModelSource::Directory("./builtin".into())));
        assert_eq!(ModelSource::Builtin.to_string(), "builtin");
    }

    #[test]
    fn what_is_no_model_directory_is_said() {
        let missing = ModelFiles::open(&ModelSource::Directory("/no/such/place".into())).unwrap_err();
        assert!(missing.to_string().contains("/no/such/place is not a model directory"), "{missing}");
        let source = ModelSource::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        let empty = ModelFiles::open(&source).unwrap_err();
        assert!(empty.to_string().contains("config.json"), "{empty}");
    }

    #[test]
    fn a_directory_is_served_under_its_name() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama/.");
        let files = ModelFiles::open(&ModelSource::Directory(fixtures)).unwrap();
        assert_eq!(files.name, "tiny-llama");
        assert!(files.tokenizer.is_none());
    }
}
