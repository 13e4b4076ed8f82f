//! Weights as they lie in a file, before a device packs them.

use half::{bf16, f16};

use crate::KernelError;

/// Number formats that weights are stored in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dtype {
    /// 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// 5 bits of exponent, 10 of mantissa.
    F16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Bytes of one number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A matrix `[rows, columns]` of little-endian numbers, row-major, without alignment.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    dtype: Dtype,
    rows: usize,
    columns: usize,
    bytes: &'a [u8],
}

impl<'a> WeightView<'a> {
    /// Views `bytes` as `[rows, columns]`; a vector is one row.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the bytes are more or fewer than the shape needs.
    pub fn new(dtype: Dtype, rows: usize, columns: usize, bytes: &'a [u8]) -> Result<Self, KernelError> {
        let expected = rows.checked_mul(columns).and_then(|count| count.checked_mul(dtype.bytes()));
        if expected != Some(bytes.len()) {
            return Err(KernelError::Shape {
                operation: "weight",
                expected: format!("{rows}×{columns} numbers of {} bytes", dtype.bytes()),
                found: format!("{} bytes", bytes.len()),
            });
        }
        Ok(Self { dtype, rows, columns, bytes })
    }

    /// Rows, the outputs of a linear layer.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, the inputs of a linear layer.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Writes row `row` to `out`, widened to f32.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let width = self.columns * self.dtype.bytes();
        let bytes = &self.bytes[row * width..(row + 1) * width];
        match self.dtype {
            Dtype::Bf16 => read_halves(bytes, out, |bits| bf16::from_bits(bits).to_f32()),
            Dtype::F16 => read_halves(bytes, out, |bits| f16::from_bits(bits).to_f32()),
            Dtype::F32 => {
                for (to, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *to = f32::from_le_bytes(*from);
                }
            }
        }
    }

    /// Appends all numbers, row by row, as bf16: those that are, as they are.
    pub(crate) fn append_bf16(&self, to: &mut Vec<u16>) {
        if self.dtype == Dtype::Bf16 {
            return to.extend(self.bytes.as_chunks::<2>().0.iter().map(|raw| u16::from_le_bytes(*raw)));
        }
        let mut numbers = vec![0.0; self.columns];
        for row in 0..self.rows {
            self.read_row(row, &mut numbers);
            to.extend(numbers.iter().map(|number| bf16::from_f32(*number).to_bits()));
        }
    }

    /// Whether every number survives being stored as bf16.
    pub(crate) fn is_bf16_exact(&self) -> bool {
        match self.dtype {
            Dtype::Bf16 => true,
            Dtype::F16 => self
                .bytes
                .as_chunks::<2>()
                .0
                .iter()
                .all(|raw| is_bf16(f16::from_bits(u16::from_le_bytes(*raw)).to_f32())),
            Dtype::F32 => self.bytes.as_chunks::<4>().0.iter().all(|raw| is_bf16(f32::from_le_bytes(*raw))),
        }
    }
}

fn is_bf16(number: f32) -> bool {
    number.to_bits() & 0xffff == 0
}

fn read_halves(bytes: &[u8], out: &mut [f32], widen: impl Fn(u16) -> f32) {
    for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *to = widen(u16::from_le_bytes(*from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32_bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn f32_that_bf16_cannot_hold_is_noticed() {
        let exact = f32_bytes(&[1.0, -0.5, 3.0, 0.0]);
        let inexact = f32_bytes(&[1.0, 1.001, 3.0, 0.0]);
        assert!(WeightView::new(Dtype::F32, 2, 2, &exact).unwrap().is_bf16_exact());
        assert!(!WeightView::new(Dtype::F32, 2, 2, &inexact).unwrap().is_bf16_exact());
    }

    #[test]
    fn rows_are_widened_from_every_dtype() {
        let mut row = [0.0; 2];
        let single = f32_bytes(&[9.0, 9.0, 1.5, -2.0]);
        WeightView::new(Dtype::F32, 2, 2, &single).unwrap().read_row(1, &mut row);
        assert_eq!(row, [1.5, -2.0]);
        let halves: Vec<u8> =
            [9.0f32, 9.0, 1.5, -2.0].iter().flat_map(|&n| f16::from_f32(n).to_le_bytes()).collect();
        WeightView::new(Dtype::F16, 2, 2, &halves).unwrap().read_row(1, &mut row);
        assert_eq!(row, [1.5, -2.0]);
        let brains: Vec<u8> =
            [9.0f32, 9.0, 1.5, -2.0].iter().flat_map(|&n| bf16::from_f32(n).to_le_bytes()).collect();
        WeightView::new(Dtype::Bf16, 2, 2, &brains).unwrap().read_row(1, &mut row);
        assert_eq!(row, [1.5, -2.0]);
    }

    #[test]
    fn bytes_that_do_not_fit_the_shape_are_refused() {
        let error = WeightView::new(Dtype::F32, 2, 3, &[0; 20]).unwrap_err();
        assert!(error.to_string().contains("20 bytes"), "{error}");
    }
}
