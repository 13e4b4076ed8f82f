//! The tensors of a model, found by name over all of its weight files, with their shapes checked.

use std::borrow::Cow;
use std::collections::HashMap;

use safetensors::{Dtype as StoredDtype, SafeTensors};
use worker_kernels::{Dtype, WeightView};

use super::files::WeightFormat;
use super::gguf::Gguf;
use super::{ModelError, ModelFiles};

/// The opened weight files of a model.
pub(super) enum Tensors<'a> {
    /// Some safetensors files, and which of them has a tensor.
    Safetensors { files: Vec<SafeTensors<'a>>, places: HashMap<String, usize> },
    /// One GGUF file.
    Gguf { file: &'a str, tensors: Gguf<'a> },
}

/// A tensor: as it lies in its file, or widened from there.
pub(super) struct Stored<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl Stored<'_> {
    /// The numbers of a matrix, or of a vector as one row.
    pub(super) fn view(&self) -> Result<WeightView<'_>, ModelError> {
        let (rows, columns) = match self.shape[..] {
            [rows, columns] => (rows, columns),
            _ => (1, self.shape.iter().product()),
        };
        Ok(WeightView::new(self.dtype, rows, columns, &self.bytes)?)
    }
}

#[cfg(test)]
impl Stored<'_> {
    /// Whether both have the same numbers, stored alike.
    pub(super) fn is_same_as(&self, other: &Self) -> bool {
        (self.dtype, &self.shape, &self.bytes) == (other.dtype, &other.shape, &other.bytes)
    }
}

impl<'a> Tensors<'a> {
    pub(super) fn open(files: &'a ModelFiles) -> Result<Self, ModelError> {
        if let [file] = &files.weights[..]
            && file.format == WeightFormat::Gguf
        {
            let tensors = Gguf::parse(file.bytes())
                .map_err(|source| ModelError::Gguf { file: file.name.clone(), source })?;
            return Ok(Self::Gguf { file: &file.name, tensors });
        }
        let (mut opened, mut places) = (Vec::new(), HashMap::new());
        for file in &files.weights {
            let tensors = SafeTensors::deserialize(file.bytes())
                .map_err(|source| ModelError::Safetensors { file: file.name.clone(), source })?;
            places.extend(tensors.names().into_iter().map(|name| (name.to_owned(), opened.len())));
            opened.push(tensors);
        }
        Ok(Self::Safetensors { files: opened, places })
    }

    /// The matrix `name`, which must be `[rows, columns]`.
    pub(super) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Stored<'_>, ModelError> {
        self.expect(name, &[rows, columns])
    }

    /// The vector `name`, which must be `[len]`.
    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Stored<'_>, ModelError> {
        self.expect(name, &[len])
    }

    fn expect(&self, name: &str, expected: &[usize]) -> Result<Stored<'_>, ModelError> {
        let stored = match self {
            Self::Safetensors { files, places } => places.get(name).map(|place| stored(&files[*place], name)),
            Self::Gguf { file, tensors } => {
                let widened = tensors.widened(name);
                let widened =
                    widened.map_err(|source| ModelError::Gguf { file: (*file).to_owned(), source })?;
                widened.map(|tensor| {
                    Ok(Stored { dtype: tensor.dtype, shape: tensor.shape, bytes: tensor.bytes })
                })
            }
        };
        let stored = stored.ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })??;
        if stored.shape != expected {
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                expected: expected.to_vec(),
                found: stored.shape,
            });
        }
        Ok(stored)
    }
}

fn stored<'a>(file: &SafeTensors<'a>, name: &str) -> Result<Stored<'a>, ModelError> {
    let missing = |_| ModelError::MissingTensor { name: name.to_owned() };
    let tensor = file.tensor(name).map_err(missing)?;
    let dtype = match tensor.dtype() {
        StoredDtype::BF16 => Dtype::Bf16,
        StoredDtype::F16 => Dtype::F16,
        StoredDtype::F32 => Dtype::F32,
        other => {
            return Err(ModelError::TensorDtype { name: name.to_owned(), found: format!("{other:?}") });
        }
    };
    Ok(Stored { dtype, shape: tensor.shape().to_vec(), bytes: Cow::Borrowed(tensor.data()) })
}
