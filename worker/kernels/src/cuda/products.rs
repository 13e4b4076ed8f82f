//! Dense products: of few rows by a kernel of ours, of more by cuBLASLt.
//!
//! Caller: [`super::kernels`], which has compared shapes. Next: [`super::launch`], [`super::blas`].

use super::blas::{Output, Product};
use super::buffer::{CudaBuffer, CudaLinear};
use super::kernels::CudaKernels;
use super::launch;
use super::params::{FewRowsResult, LinearFewRowsParams};
use crate::KernelError;

impl CudaKernels {
    /// Whether a product of so many rows is ours.
    pub(super) fn multiplies_few(rows: usize, w: &CudaLinear) -> bool {
        rows <= launch::MOST_FEW_ROWS && w.inputs.is_multiple_of(8) && w.outputs.is_multiple_of(8)
    }

    /// Starts a product of few rows of `x`. Widths and rows fit together.
    pub(super) fn multiply_few(
        &self,
        x: &CudaBuffer,
        w: &CudaLinear,
        out: &CudaBuffer,
        result: FewRowsResult,
    ) -> Result<(), KernelError> {
        let params = LinearFewRowsParams {
            x: x.address(),
            w: w.weights.address(),
            bias: w.bias.as_ref().map_or(0, |bias| bias.f32.address()),
            out: out.address(),
            rows: x.rows() as u32,
            inputs: w.inputs as u32,
            outputs: out.width() as u32,
            result: result as u32,
        };
        let launch = launch::linear_few_rows(x.rows(), out.width(), result)?;
        // SAFETY: the callers have compared widths and rows, and buffers are as large as these say.
        Ok(unsafe { self.gpu.launch(launch, &params) }?)
    }

    /// Starts a product of all rows of `x`. Widths and rows fit together.
    pub(super) fn multiply(
        &self,
        x: &CudaBuffer,
        w: &CudaLinear,
        out: &CudaBuffer,
        output: Output,
    ) -> Result<(), KernelError> {
        if Self::multiplies_few(x.rows(), w) {
            let result = match output {
                Output::Bf16 => FewRowsResult::ReplaceBf16,
                Output::F32 => FewRowsResult::ReplaceF32,
                Output::AddToF32 => FewRowsResult::AddToF32,
            };
            return self.multiply_few(x, w, out, result);
        }
        let bias = w.bias.as_ref().map_or(0, |bias| match output {
            Output::Bf16 => bias.bf16.address(),
            Output::F32 | Output::AddToF32 => bias.f32.address(),
        });
        let product = Product {
            x: x.address(),
            w: w.weights.address(),
            bias,
            out: out.address(),
            rows: x.rows(),
            inputs: w.inputs,
            outputs: w.outputs,
            output,
        };
        // SAFETY: the callers have compared widths and rows, and buffers are as large as these say.
        Ok(unsafe { self.blas.multiply(product) }?)
    }
}
