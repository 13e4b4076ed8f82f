//! Weights packed once at load, so that one kernel streams them for one row and for a thousand.
//!
//! A panel is [`LANES`] outputs wide and all inputs deep: `panel[input][lane]`, bf16 in pairs as [`Weight::place`] says. Numbers
//! stay bf16 where that loses nothing, else f32. Next: [`super::gemm`].

use half::bf16;
use rayon::prelude::*;

use super::aligned::AlignedBox;
use super::simd::{LANES, Weight};
use crate::{KernelError, WeightView};

/// A linear layer `[outputs, inputs]` in panels, with its bias if it has one.
#[derive(Debug)]
pub struct PackedLinear {
    pub(crate) panels: Panels,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    /// Padded with zeros to whole panels.
    pub(crate) bias: Option<AlignedBox<f32>>,
}

/// Panels `[outputs / LANES, inputs, LANES]`, padded with zeros.
#[derive(Debug)]
pub(crate) enum Panels {
    Bf16(AlignedBox<bf16>),
    F32(AlignedBox<f32>),
}

impl PackedLinear {
    /// Packs `parts`, stacked along their rows.
    pub(crate) fn pack(parts: &[WeightView<'_>], bias: &[WeightView<'_>]) -> Result<Self, KernelError> {
        let inputs = parts.first().map_or(0, WeightView::columns);
        if let Some(odd) = parts.iter().find(|part| part.columns() != inputs) {
            return Err(KernelError::Shape {
                operation: "linear",
                expected: format!("{inputs} columns in every part"),
                found: format!("{}", odd.columns()),
            });
        }
        let outputs = parts.iter().map(WeightView::rows).sum();
        let panels = if parts.iter().all(WeightView::is_bf16_exact) {
            Panels::Bf16(fill(parts, outputs, inputs, bf16::from_f32)?)
        } else {
            Panels::F32(fill(parts, outputs, inputs, |number| number)?)
        };
        Ok(Self { panels, outputs, inputs, bias: pack_bias(bias, outputs)? })
    }

    /// Outputs: the width of what the layer makes.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Inputs: the width of what the layer takes.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Memory that the weights take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::Bf16(panels) => size_of_val::<[bf16]>(panels),
            Panels::F32(panels) => size_of_val::<[f32]>(panels),
        }
    }

    /// Output `output`'s weights as a row: what an embedding table is asked for.
    pub(crate) fn read_row(&self, output: usize, row: &mut [f32]) {
        match &self.panels {
            Panels::Bf16(panels) => gather(panels, self.inputs, output, row, bf16::to_f32),
            Panels::F32(panels) => gather(panels, self.inputs, output, row, |number| number),
        }
    }
}

fn gather<T: Weight>(panels: &[T], inputs: usize, output: usize, row: &mut [f32], widen: impl Fn(T) -> f32) {
    let panel = &panels[output / LANES * inputs * LANES..][..inputs * LANES];
    let lane = panel.iter().skip(T::place(output % LANES)).step_by(LANES);
    for (to, from) in row.iter_mut().zip(lane) {
        *to = widen(*from);
    }
}

fn fill<T: Weight>(
    parts: &[WeightView<'_>],
    outputs: usize,
    inputs: usize,
    narrow: impl Fn(f32) -> T + Sync,
) -> Result<AlignedBox<T>, KernelError> {
    let mut panels = AlignedBox::zeroed(outputs.div_ceil(LANES) * LANES * inputs)?;
    panels.par_chunks_mut((inputs * LANES).max(1)).enumerate().for_each(|(index, panel)| {
        let mut row = vec![0.0; inputs];
        for lane in 0..LANES.min(outputs - index * LANES) {
            read_stacked(parts, index * LANES + lane, &mut row);
            for (to, from) in panel.iter_mut().skip(T::place(lane)).step_by(LANES).zip(&row) {
                *to = narrow(*from);
            }
        }
    });
    Ok(panels)
}

/// Row `row` of the parts as if they were one matrix.
fn read_stacked(parts: &[WeightView<'_>], mut row: usize, out: &mut [f32]) {
    for part in parts {
        if row < part.rows() {
            return part.read_row(row, out);
        }
        row -= part.rows();
    }
}

/// A bias is given in parts too, each a vector: those of q, k and v make that of their stacked projection.
fn pack_bias(parts: &[WeightView<'_>], outputs: usize) -> Result<Option<AlignedBox<f32>>, KernelError> {
    if parts.is_empty() {
        return Ok(None);
    }
    let found: usize = parts.iter().map(WeightView::columns).sum();
    if found != outputs || parts.iter().any(|part| part.rows() != 1) {
        return Err(KernelError::Shape {
            operation: "bias",
            expected: format!("vectors of {outputs} numbers together"),
            found: format!("{found}"),
        });
    }
    let mut bias = AlignedBox::zeroed(outputs.div_ceil(LANES) * LANES)?;
    let mut at = 0;
    for part in parts {
        part.read_row(0, &mut bias[at..at + part.columns()]);
        at += part.columns();
    }
    Ok(Some(bias))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    #[test]
    fn rows_come_back_from_their_panels() {
        let (outputs, inputs) = (37, 5);
        let numbers: Vec<f32> = (0..outputs * inputs).map(|i| i as f32 * 0.37).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let (top, bottom) = bytes.split_at(20 * inputs * 4);
        let top = WeightView::new(Dtype::F32, 20, inputs, top).unwrap();
        let bottom = WeightView::new(Dtype::F32, 17, inputs, bottom).unwrap();
        let packed = PackedLinear::pack(&[top, bottom], &[]).unwrap();
        assert!(matches!(packed.panels, Panels::F32(_)));
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            packed.read_row(output, &mut row);
            assert_eq!(row, numbers[output * inputs..][..inputs]);
        }
    }

    #[test]
    fn numbers_that_fit_bf16_take_half_the_memory() {
        let bytes: Vec<u8> = (0..64).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let packed = PackedLinear::pack(&[WeightView::new(Dtype::F32, 16, 4, &bytes).unwrap()], &[]).unwrap();
        assert!(matches!(packed.panels, Panels::Bf16(_)));
        assert_eq!(packed.bytes(), 128);
    }

    #[test]
    fn rows_of_bf16_come_back_from_their_pairs() {
        let (outputs, inputs) = (21, 3);
        let numbers: Vec<f32> = (0..outputs * inputs).map(|i| i as f32).collect();
        let bytes: Vec<u8> =
            numbers.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect();
        let weights = WeightView::new(Dtype::Bf16, outputs, inputs, &bytes).unwrap();
        let packed = PackedLinear::pack(&[weights], &[]).unwrap();
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            packed.read_row(output, &mut row);
            assert_eq!(row, numbers[output * inputs..][..inputs]);
        }
    }

    #[test]
    fn parts_and_bias_that_do_not_fit_are_refused() {
        let bytes = [0; 48];
        let two = WeightView::new(Dtype::F32, 6, 2, &bytes).unwrap();
        let three = WeightView::new(Dtype::F32, 4, 3, &bytes).unwrap();
        assert!(PackedLinear::pack(&[two, three], &[]).is_err());
        let bias = WeightView::new(Dtype::F32, 1, 12, &bytes).unwrap();
        assert!(PackedLinear::pack(&[two], &[bias]).is_err());
        assert!(PackedLinear::pack(&[two, two], &[bias]).is_ok());
    }
}
