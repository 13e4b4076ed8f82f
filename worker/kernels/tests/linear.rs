//! Linear layers against an f64 reference, on every kind of instructions this machine has.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use half::{bf16, f16};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use worker_kernels::cpu::{Activations, Isa};
use worker_kernels::{CpuKernels, Device, Dtype, Kernels, WeightView};

/// A layer and its input, as plain numbers.
#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    inputs: usize,
    outputs: usize,
    dtype: Dtype,
    x: Vec<f32>,
    /// Rounded to `dtype`.
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
}

fn case(seed: u64, (rows, inputs, outputs): (usize, usize, usize), dtype: Dtype, with_bias: bool) -> Case {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut numbers = |n: usize| (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect::<Vec<_>>();
    let round = |number: f32| match dtype {
        Dtype::Bf16 => bf16::from_f32(number).to_f32(),
        Dtype::F16 => f16::from_f32(number).to_f32(),
        Dtype::F32 => number,
    };
    Case {
        rows,
        inputs,
        outputs,
        dtype,
        x: numbers(rows * inputs),
        weights: numbers(outputs * inputs).into_iter().map(round).collect(),
        bias: with_bias.then(|| numbers(outputs)),
    }
}

fn bytes(dtype: Dtype, numbers: &[f32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|&number| match dtype {
            Dtype::Bf16 => bf16::from_f32(number).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(number).to_le_bytes().to_vec(),
            Dtype::F32 => number.to_le_bytes().to_vec(),
        })
        .collect()
}

/// `x · wᵀ + bias`, added to `start` if there is one.
fn run(kernels: &CpuKernels, case: &Case, start: Option<&[f32]>) -> Vec<f32> {
    let weights = bytes(case.dtype, &case.weights);
    let weights = WeightView::new(case.dtype, case.outputs, case.inputs, &weights).unwrap();
    let bias_bytes = case.bias.as_ref().map(|bias| bytes(Dtype::F32, bias));
    let bias: Vec<_> =
        bias_bytes.iter().map(|bytes| WeightView::new(Dtype::F32, 1, case.outputs, bytes).unwrap()).collect();
    let layer = kernels.linear(&[weights], &bias).unwrap();
    let (mut x, mut out) = (Activations::default(), Activations::default());
    kernels.write(&case.x, case.inputs, &mut x).unwrap();
    match start {
        None => kernels.linear_into(&x, &layer, &mut out).unwrap(),
        Some(start) => {
            kernels.write(start, case.outputs, &mut out).unwrap();
            kernels.linear_add(&x, &layer, &mut out).unwrap();
        }
    }
    out.numbers().to_vec()
}

fn reference(case: &Case) -> Vec<f64> {
    let mut out = Vec::with_capacity(case.rows * case.outputs);
    for row in case.x.chunks_exact(case.inputs) {
        for (output, weights) in case.weights.chunks_exact(case.inputs).enumerate() {
            let sum: f64 = row.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            out.push(sum + case.bias.as_ref().map_or(0.0, |bias| f64::from(bias[output])));
        }
    }
    out
}

fn kernels(isa: Isa, threads: usize) -> CpuKernels {
    CpuKernels::with_isa("test", threads, isa).unwrap()
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::Bf16), Just(Dtype::F16), Just(Dtype::F32)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn agrees_with_f64_on_ragged_sizes(
        seed: u64,
        shape in (1usize..70, 1usize..150, 1usize..150),
        dtype in dtype(),
        bias: bool,
    ) {
        let case = case(seed, shape, dtype, bias);
        let want = reference(&case);
        for isa in Isa::available() {
            let got = run(&kernels(isa, 2), &case, None);
            for (got, want) in got.iter().zip(&want) {
                let bound = 1e-6 * (case.inputs as f64 + 4.0);
                prop_assert!((f64::from(*got) - want).abs() < bound, "{isa:?}: {got} for {want}");
            }
            let start: Vec<f32> = (0..want.len()).map(|i| i as f32 * 0.01).collect();
            let added = run(&kernels(isa, 2), &case, Some(&start));
            for ((added, start), got) in added.iter().zip(&start).zip(&got) {
                prop_assert_eq!(*added, got + start);
            }
        }
    }

    #[test]
    fn a_row_gets_the_same_bits_in_any_company(
        seed: u64,
        shape in (2usize..200, 1usize..90, 1usize..200),
        dtype in dtype(),
        cut in 1usize..199,
    ) {
        let whole = case(seed, shape, dtype, true);
        let cut = cut.min(whole.rows - 1);
        for isa in Isa::available() {
            let one = kernels(isa, 1);
            let together = run(&one, &whole, None);
            let (top, bottom) = whole.x.split_at(cut * whole.inputs);
            let mut apart = run(&one, &Case { rows: cut, x: top.to_vec(), ..whole.clone() }, None);
            let rest = Case { rows: whole.rows - cut, x: bottom.to_vec(), ..whole.clone() };
            apart.extend(run(&one, &rest, None));
            prop_assert!(together == apart, "{isa:?}: cut at {cut}");
            let first = Case { rows: 1, x: whole.x[..whole.inputs].to_vec(), ..whole.clone() };
            prop_assert!(run(&one, &first, None) == together[..whole.outputs], "{isa:?}: first row alone");
        }
    }
}

/// The loop over inputs takes several in one turn; what is left over at its end, and how high the tiles are, changes nothing.
#[test]
fn turns_of_the_loop_over_inputs_change_no_bits() {
    for inputs in [1, 3, 4, 5, 7, 8, 319, 320, 641, 1_002] {
        let many = case(5, (31, inputs, 40), Dtype::Bf16, true);
        let want = reference(&many);
        for isa in Isa::available() {
            let one = kernels(isa, 1);
            let together = run(&one, &many, None);
            for (got, want) in together.iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() < 1e-6 * (inputs as f64 + 4.0), "{isa:?}, {inputs}");
            }
            for (row, together) in together.chunks_exact(many.outputs).enumerate() {
                let x = many.x[row * inputs..][..inputs].to_vec();
                let alone = run(&one, &Case { rows: 1, x, ..many.clone() }, None);
                assert!(alone == together, "{isa:?}, {inputs} inputs, row {row}");
            }
        }
    }
}

/// Large enough that it is cut into tasks for every number of threads.
#[test]
fn threads_do_not_change_bits() {
    for (shape, dtype) in
        [((100, 600, 1000), Dtype::Bf16), ((1, 900, 3000), Dtype::Bf16), ((7, 500, 999), Dtype::F32)]
    {
        let case = case(3, shape, dtype, true);
        for isa in Isa::available() {
            let one = run(&kernels(isa, 1), &case, None);
            for threads in [2, 3, 5] {
                assert!(
                    one == run(&kernels(isa, threads), &case, None),
                    "{isa:?}, {shape:?}, {threads} threads"
                );
            }
        }
    }
}

/// The lanes of both are summed in the same order and rounded in the same places.
#[test]
fn fused_instructions_agree_bit_for_bit() {
    let fused: Vec<Isa> = Isa::available().into_iter().filter(|&isa| isa != Isa::Portable).collect();
    let case = case(11, (40, 300, 170), Dtype::Bf16, true);
    let results: Vec<_> = fused.iter().map(|&isa| run(&kernels(isa, 1), &case, None)).collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{fused:?} differ");
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let kernels = kernels(Isa::detect(), 1);
    let weights = [0u8; 60];
    let layer = kernels.linear(&[WeightView::new(Dtype::F32, 3, 5, &weights).unwrap()], &[]).unwrap();
    let (mut x, mut out) = (Activations::default(), Activations::default());
    kernels.write(&[0.0; 8], 4, &mut x).unwrap();
    assert!(kernels.linear_into(&x, &layer, &mut out).is_err(), "rows of 4 for 5 inputs");
    kernels.write(&[0.0; 10], 5, &mut x).unwrap();
    kernels.write(&[0.0; 3], 3, &mut out).unwrap();
    assert!(kernels.linear_add(&x, &layer, &mut out).is_err(), "2 rows added to 1");
    assert!(kernels.embed(&layer, &[3], &mut out).is_err(), "token 3 of 3");
}
