//! The tensors of a model, found by name over all of its weight files, with their shapes checked.

use std::collections::HashMap;

use safetensors::{Dtype as StoredDtype, SafeTensors};
use worker_kernels::{Dtype, WeightView};

use super::{ModelError, ModelFiles};

/// The opened weight files of a model.
pub(super) struct Tensors<'a> {
    files: Vec<SafeTensors<'a>>,
    /// Which file has a tensor.
    places: HashMap<String, usize>,
}

impl<'a> Tensors<'a> {
    pub(super) fn open(files: &'a ModelFiles) -> Result<Self, ModelError> {
        let mut opened = Self { files: Vec::new(), places: HashMap::new() };
        for file in &files.weights {
            let tensors = SafeTensors::deserialize(file.bytes())
                .map_err(|source| ModelError::Safetensors { file: file.name.clone(), source })?;
            let place = opened.files.len();
            opened.places.extend(tensors.names().into_iter().map(|name| (name.to_owned(), place)));
            opened.files.push(tensors);
        }
        Ok(opened)
    }

    /// The matrix `name`, which must be `[rows, columns]`.
    pub(super) fn matrix(
        &self,
        name: &str,
        rows: usize,
        columns: usize,
    ) -> Result<WeightView<'_>, ModelError> {
        self.view(name, &[rows, columns])
    }

    /// The vector `name`, which must be `[len]`.
    pub(super) fn vector(&self, name: &str, len: usize) -> Result<WeightView<'_>, ModelError> {
        self.view(name, &[len])
    }

    fn view(&self, name: &str, expected: &[usize]) -> Result<WeightView<'_>, ModelError> {
        let missing = || ModelError::MissingTensor { name: name.to_owned() };
        let place = *self.places.get(name).ok_or_else(missing)?;
        let tensor = self.files[place].tensor(name).map_err(|_| missing())?;
        if tensor.shape() != expected {
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                expected: expected.to_vec(),
                found: tensor.shape().to_vec(),
            });
        }
        let dtype = match tensor.dtype() {
            StoredDtype::BF16 => Dtype::Bf16,
            StoredDtype::F16 => Dtype::F16,
            StoredDtype::F32 => Dtype::F32,
            other => {
                return Err(ModelError::TensorDtype { name: name.to_owned(), found: format!("{other:?}") });
            }
        };
        let (rows, columns) = match expected {
            [rows, columns] => (*rows, *columns),
            _ => (1, expected.iter().product()),
        };
        Ok(WeightView::new(dtype, rows, columns, tensor.data())?)
    }
}
