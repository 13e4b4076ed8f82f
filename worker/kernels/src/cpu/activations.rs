//! Activations: f32 rows.

use crate::KernelError;

/// `[rows, width]` of f32, row-major. Keeps its memory when it shrinks.
#[derive(Clone, Debug, Default)]
pub struct Activations {
    numbers: Vec<f32>,
    width: usize,
}

impl Activations {
    /// Sets the shape. What the rows hold afterwards is unspecified.
    pub(crate) fn reset(&mut self, rows: usize, width: usize) {
        self.numbers.resize(rows * width, 0.0);
        self.width = width;
    }

    /// How many rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.numbers.len().checked_div(self.width).unwrap_or(0)
    }

    /// Numbers in a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows, one behind another.
    #[must_use]
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    pub(crate) fn numbers_mut(&mut self) -> &mut [f32] {
        &mut self.numbers
    }

    /// Row `row`.
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.numbers[row * self.width..(row + 1) * self.width]
    }

    /// Refuses a width other than `expected`.
    pub(crate) fn expect_width(&self, operation: &'static str, expected: usize) -> Result<(), KernelError> {
        if self.width == expected {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            expected: format!("rows of {expected}"),
            found: format!("rows of {}", self.width),
        })
    }
}
