//! A model: where it comes from, its files, its configuration, its weights and its forward pass.
//!
//! [`ModelSource`] → [`ModelFiles`] → [`ModelConfig`] and [`Weights`] → [`Model`], which a backend runs with
//! [`Transformer`]. Knows no scheduling, sampling or text.

pub mod config;
pub mod error;
pub mod files;
mod gguf;
pub mod rope;
mod tensors;
pub mod transformer;
pub mod weights;

use worker_kernels::CpuKernels;

pub use config::{Architecture, ModelConfig};
pub use error::ModelError;
pub use files::{ModelFiles, ModelSource};
pub use gguf::GgufError;
pub use transformer::{Transformer, Workspace};
pub use weights::Weights;

/// A loaded model, packed for the CPU. Immutable: several workers of a process share one.
pub struct Model {
    name: String,
    config: ModelConfig,
    weights: Weights<CpuKernels>,
}

impl Model {
    /// Opens and loads `source`.
    ///
    /// # Errors
    /// [`ModelError`], which names the file, key or tensor at fault.
    pub fn open(source: &ModelSource) -> Result<Self, ModelError> {
        Self::load(&ModelFiles::open(source)?)
    }

    /// Loads weights from files that are open already; they may be dropped afterwards.
    ///
    /// # Errors
    /// [`ModelError`], which names the key or tensor at fault.
    pub fn load(files: &ModelFiles) -> Result<Self, ModelError> {
        let config = ModelConfig::from_files(files)?;
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let weights = Weights::load(&CpuKernels::new("load", threads)?, &config, files)?;
        Ok(Self { name: files.name.clone(), config, weights })
    }

    /// The id it is served under: `builtin`, or the name of its directory or file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its shape and options.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its weights.
    #[must_use]
    pub fn weights(&self) -> &Weights<CpuKernels> {
        &self.weights
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("name", &self.name)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
