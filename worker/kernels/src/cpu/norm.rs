//! RMSNorm of rows and of heads, in one fixed order of summation.

use std::ops::Range;

use super::CpuKernels;
use super::activations::Activations;
use super::isa::Job;
use super::simd::{LANES, Simd};
use crate::KernelError;

/// Numbers that are worth a task of their own.
const TASK_NUMBERS: usize = 1 << 13;

/// `out = x / sqrt(mean(x²) + eps) · weight`.
pub(crate) fn rms_norm(
    kernels: &CpuKernels,
    x: &Activations,
    weight: &[f32],
    eps: f32,
    out: &mut Activations,
) -> Result<(), KernelError> {
    x.expect_width("rms_norm", weight.len())?;
    out.reset(x.rows(), x.width());
    let width = x.width();
    kernels.for_rows(out.numbers_mut(), width, TASK_NUMBERS, |first, rows| {
        rows.copy_from_slice(&x.numbers()[first * width..][..rows.len()]);
        kernels.isa().run(Normalise { rows, stride: width, weight, eps });
    });
    Ok(())
}

/// The same, in place, for each of the heads that lie in these columns; a head is as long as the weight.
pub(crate) fn head_norm(
    kernels: &CpuKernels,
    x: &mut Activations,
    columns: Range<usize>,
    weight: &[f32],
    eps: f32,
) {
    let width = x.width();
    kernels.for_rows(x.numbers_mut(), width, TASK_NUMBERS, |_, rows| {
        for row in rows.chunks_exact_mut(width.max(1)) {
            kernels.isa().run(Normalise {
                rows: &mut row[columns.clone()],
                stride: weight.len(),
                weight,
                eps,
            });
        }
    });
}

/// Normalises rows of `stride` numbers in place.
struct Normalise<'a> {
    rows: &'a mut [f32],
    stride: usize,
    weight: &'a [f32],
    eps: f32,
}

impl Job for Normalise<'_> {
    #[inline(always)]
    unsafe fn run<V: Simd>(self) {
        for row in self.rows.chunks_exact_mut(self.stride.max(1)) {
            // SAFETY: the caller vouches for the instructions.
            let squares = unsafe { sum_of_squares::<V>(row) };
            let scale = 1.0 / (squares / self.stride as f32 + self.eps).sqrt();
            for (x, weight) in row.iter_mut().zip(self.weight) {
                // Hugging Face's order: normalise, then weigh.
                *x = *x * scale * weight;
            }
        }
    }
}

/// # Safety
/// The machine has `V`'s instructions.
#[inline(always)]
unsafe fn sum_of_squares<V: Simd>(row: &[f32]) -> f32 {
    let (parts, rest) = row.as_chunks::<LANES>();
    let mut tail = [0.0; LANES];
    tail[..rest.len()].copy_from_slice(rest);
    // SAFETY: parts and tail have LANES numbers; the caller vouches for the instructions.
    unsafe {
        let mut sum = V::splat(0.0);
        for part in parts {
            let x = V::load(part.as_ptr());
            sum = x.mul_add(x, sum);
        }
        let x = V::load(tail.as_ptr());
        x.mul_add(x, sum).sum()
    }
}
