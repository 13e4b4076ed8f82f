//! Why a model cannot be loaded. All of it is the fault of the files, or of who named them.

use std::path::PathBuf;

use worker_kernels::KernelError;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The directory is not there, or is no directory.
    #[error(
        "{path} is not a model directory: give `builtin`, a directory with config.json and safetensors, or a .gguf file"
    )]
    NoDirectory {
        /// What was named.
        path: PathBuf,
    },
    /// A file that every model has is missing or unreadable.
    #[error("cannot read {path}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A JSON file does not parse, or a key has the wrong type.
    #[error("{file} is not what was expected")]
    Json {
        /// Which file.
        file: &'static str,
        /// Where it is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A key of `config.json` asks for something that is not implemented, or makes no sense.
    #[error("config.json: `{key}` is {found}; supported: {supported}")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What would be right.
        supported: &'static str,
    },
    /// A weight file is damaged or no safetensors.
    #[error("{file} is not a safetensors file")]
    Safetensors {
        /// Which file.
        file: String,
        /// What is wrong with it.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// A GGUF file cannot be used.
    #[error("{file} cannot be used")]
    Gguf {
        /// Which file.
        file: String,
        /// What is wrong with it.
        #[source]
        source: super::gguf::GgufError,
    },
    /// The configuration asks for a tensor that no weight file has.
    #[error("tensor `{name}` is in no weight file")]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("tensor `{name}` has shape {found:?}, config.json asks for {expected:?}")]
    TensorShape {
        /// Its name.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor's numbers are of an unsupported kind.
    #[error("tensor `{name}` is stored as {found}; supported: BF16, F16, F32")]
    TensorDtype {
        /// Its name.
        name: String,
        /// Its dtype.
        found: String,
    },
    /// The device could not take the weights.
    #[error("weights cannot be placed")]
    Kernel(#[from] KernelError),
}
