//! The operations that need no sums: embedding, SiLU, selecting rows.

use super::CpuKernels;
use super::activations::Activations;
use super::isa::Job;
use super::matrix::PackedLinear;
use super::simd::{LANES, Simd};
use crate::KernelError;

/// Numbers that are worth a task of their own.
const TASK_NUMBERS: usize = 1 << 13;

/// `out[i] = table[tokens[i]]`.
pub(crate) fn embed(
    kernels: &CpuKernels,
    table: &PackedLinear,
    tokens: &[u32],
    out: &mut Activations,
) -> Result<(), KernelError> {
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= table.outputs) {
        return Err(KernelError::Shape {
            operation: "embed",
            expected: format!("tokens below {}", table.outputs),
            found: format!("{token}"),
        });
    }
    out.reset(tokens.len(), table.inputs);
    kernels.for_rows(out.numbers_mut(), table.inputs, TASK_NUMBERS, |first, rows| {
        for (row, &token) in rows.chunks_exact_mut(table.inputs).zip(&tokens[first..]) {
            table.read_row(token as usize, row);
        }
    });
    Ok(())
}

/// `out = silu(gate) · up`.
pub(crate) fn silu_mul(
    kernels: &CpuKernels,
    gate_up: &Activations,
    out: &mut Activations,
) -> Result<(), KernelError> {
    let width = gate_up.width() / 2;
    gate_up.expect_width("silu_mul", 2 * width)?;
    out.reset(gate_up.rows(), width);
    kernels.for_rows(out.numbers_mut(), width, TASK_NUMBERS, |first, rows| {
        for (i, out) in rows.chunks_exact_mut(width.max(1)).enumerate() {
            let (gate, up) = gate_up.row(first + i).split_at(width);
            kernels.isa().run(SiluMul { gate, up, out });
        }
    });
    Ok(())
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Job for SiluMul<'_> {
    #[inline(always)]
    unsafe fn run<V: Simd>(self) {
        let (gates, gate_rest) = self.gate.as_chunks::<LANES>();
        let (ups, up_rest) = self.up.as_chunks::<LANES>();
        let (outs, out_rest) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            // SAFETY: the caller vouches for the instructions.
            unsafe { silu_part::<V>(gate, up, out) };
        }
        let (mut gate, mut up, mut out) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        gate[..gate_rest.len()].copy_from_slice(gate_rest);
        up[..up_rest.len()].copy_from_slice(up_rest);
        // SAFETY: the caller vouches for the instructions.
        unsafe { silu_part::<V>(&gate, &up, &mut out) };
        out_rest.copy_from_slice(&out[..out_rest.len()]);
    }
}

/// # Safety
/// The machine has `V`'s instructions.
#[inline(always)]
unsafe fn silu_part<V: Simd>(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) {
    // SAFETY: the arrays have LANES numbers; the caller vouches for the instructions.
    unsafe {
        let x = V::load(gate.as_ptr());
        let one = V::splat(1.0);
        let silu = x.div(one.add(V::splat(0.0).sub(x).exp()));
        silu.mul(V::load(up.as_ptr())).store(out.as_mut_ptr());
    }
}

/// Copies chosen rows.
pub(crate) fn select_rows(x: &Activations, rows: &[usize], out: &mut Activations) -> Result<(), KernelError> {
    if let Some(row) = rows.iter().find(|&&row| row >= x.rows()) {
        return Err(KernelError::Shape {
            operation: "select_rows",
            expected: format!("rows below {}", x.rows()),
            found: format!("{row}"),
        });
    }
    let width = x.width();
    out.reset(rows.len(), width);
    for (to, &row) in out.numbers_mut().chunks_exact_mut(width.max(1)).zip(rows) {
        to.copy_from_slice(x.row(row));
    }
    Ok(())
}
