//! What the GPU does at best: a copy within its memory, and a large product by cuBLASLt.

use std::cell::RefCell;

use worker_kernels::cuda::CudaKernels;
use worker_kernels::{Device, Dtype, Kernels, WeightView};

use crate::{Rates, Work};

/// Memory copied by the driver, read and written.
pub(crate) fn copy(rates: &mut Rates) {
    let bytes = rates.length(4 << 30);
    let (from, to) = (rates.empty(bytes), rates.empty(bytes));
    rates.measure(&format!("copy of {bytes} bytes"), Work::Bytes(2.0 * bytes as f64), || to.copy_from(&from));
}

/// bf16 by bf16, square.
pub(crate) fn product(rates: &mut Rates) {
    let side = rates.length(8192).next_multiple_of(8);
    let kernels =
        CudaKernels::on(rates.gpu.clone()).unwrap_or_else(|error| crate::refuse(&error.to_string()));
    let mut random = |count: usize| -> Vec<f32> { (0..count).map(|_| rates.next_float()).collect() };
    let (numbers, rows) = (random(side * side), random(side * side));
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let weight = |rows| WeightView::new(Dtype::F32, rows, side, &bytes[..4 * rows * side]).unwrap();
    let layer = kernels.linear(&[weight(side)], &[]).unwrap();
    let norm = kernels.vector(weight(1)).unwrap();
    let (mut stream, mut x, mut out) = (kernels.buffer(), kernels.buffer(), kernels.buffer());
    kernels.write(&rows, side, &mut stream).unwrap();
    // The norm is what makes bf16 of it.
    kernels.rms_norm(&stream, &norm, 1e-5, &mut x).unwrap();
    kernels.linear_into(&x, &layer, &mut out).unwrap();
    let out = RefCell::new(out);
    let flops = 2.0 * (side as f64).powi(3);
    rates.measure(&format!("product of {side} x {side} bf16 by cuBLASLt"), Work::Flops(flops), || {
        kernels.linear_into(&x, &layer, &mut out.borrow_mut()).unwrap();
        Ok(())
    });
}
