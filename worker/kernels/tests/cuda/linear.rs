//! Products of few rows: every kind of result against f64, at widths around the edges of steps and tiles.

use half::bf16;
use rand::RngExt;
use rand::rngs::StdRng;
use worker_kernels::cuda::launch;
use worker_kernels::cuda::params::{FewRowsResult, LinearFewRowsParams};

use crate::machine::{Buffer, Run, launch as run_launch, rng};

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    inputs: usize,
    outputs: usize,
    result: FewRowsResult,
    bias: bool,
}

impl Case {
    fn gated(self) -> bool {
        self.result == FewRowsResult::GatedBf16
    }

    fn w_rows(self) -> usize {
        if self.gated() { 2 * self.outputs } else { self.outputs }
    }
}

/// What a product is of, and what it is added to.
struct Operands {
    x: Vec<bf16>,
    w: Vec<bf16>,
    bias: Vec<f32>,
    before: Vec<f32>,
}

impl Operands {
    fn of(case: Case, seed: u64) -> Self {
        let rng = &mut rng(seed);
        let brains = |rng: &mut StdRng, count| {
            (0..count).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect()
        };
        let floats = |rng: &mut StdRng, count| (0..count).map(|_| rng.random_range(-1.0..1.0)).collect();
        Self {
            x: brains(rng, case.rows * case.inputs),
            w: brains(rng, case.w_rows() * case.inputs),
            bias: floats(rng, case.w_rows()),
            before: floats(rng, case.rows * case.outputs),
        }
    }

    /// Of one row of each.
    fn product(&self, case: Case, row: usize, w_row: usize) -> f64 {
        let (x, w) = (&self.x[row * case.inputs..][..case.inputs], &self.w[w_row * case.inputs..]);
        let sum: f64 = x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum();
        if case.bias { sum + f64::from(self.bias[w_row]) } else { sum }
    }

    fn want(&self, case: Case, row: usize, output: usize) -> f64 {
        let product = self.product(case, row, output);
        match case.result {
            FewRowsResult::GatedBf16 => {
                product / (1.0 + (-product).exp()) * self.product(case, row, case.outputs + output)
            }
            FewRowsResult::AddToF32 => f64::from(self.before[row * case.outputs + output]) + product,
            _ => product,
        }
    }

    /// What the kernel makes of them.
    fn run(&self, case: Case, run: Run) -> Vec<f32> {
        let (x, w, bias) = (Buffer::of_bf16(&self.x), Buffer::of_bf16(&self.w), Buffer::of(&self.bias));
        let numbers = case.rows * case.outputs;
        let is_f32 = [FewRowsResult::ReplaceF32, FewRowsResult::AddToF32].contains(&case.result);
        let out = match case.result {
            FewRowsResult::AddToF32 => Buffer::of(&self.before),
            FewRowsResult::ReplaceF32 => Buffer::poisoned::<f32>(numbers),
            _ => Buffer::poisoned::<u16>(numbers),
        };
        let params = LinearFewRowsParams {
            x: x.address(),
            w: w.address(),
            bias: if case.bias { bias.address() } else { 0 },
            out: out.address(),
            rows: case.rows as u32,
            inputs: case.inputs as u32,
            outputs: case.outputs as u32,
            result: case.result as u32,
        };
        run_launch(launch::linear_few_rows(case.rows, case.outputs, case.result).unwrap(), &params, run)
            .unwrap();
        if is_f32 { out.read::<f32>() } else { out.read_bf16().into_iter().map(bf16::to_f32).collect() }
    }
}

fn check(case: Case, number: usize) {
    let operands = Operands::of(case, number as u64);
    let got = operands.run(case, Run::number(number));
    assert_eq!(got.len(), case.rows * case.outputs);
    for (index, got) in got.into_iter().enumerate() {
        let want = operands.want(case, index / case.outputs, index % case.outputs);
        let tolerance = want.abs() / 250.0 + 1e-4;
        assert!((f64::from(got) - want).abs() <= tolerance, "{case:?}: number {index} is {got}, not {want}");
    }
}

const RESULTS: [FewRowsResult; 4] = [
    FewRowsResult::ReplaceBf16,
    FewRowsResult::ReplaceF32,
    FewRowsResult::AddToF32,
    FewRowsResult::GatedBf16,
];

#[test]
fn products_of_few_rows_are_right_at_every_edge() {
    let shapes = [
        (1, 8, 8),
        (1, 1288, 40),
        (3, 72, 24),
        (8, 256, 32),
        (8, 248, 16),
        (9, 264, 56),
        (16, 1024, 64),
        (16, 1544, 104),
        (12, 768, 8),
    ];
    for (number, (rows, inputs, outputs)) in shapes.into_iter().enumerate() {
        for (kind, result) in RESULTS.into_iter().enumerate() {
            for bias in [false, true] {
                check(Case { rows, inputs, outputs, result, bias }, number + kind);
            }
        }
    }
}

/// So that what a sequence is answered does not depend on who decodes beside it.
#[test]
fn a_row_s_bits_are_the_same_whatever_rows_are_beside_it() {
    for (kind, result) in RESULTS.into_iter().enumerate() {
        let case = |rows| Case { rows, inputs: 1096, outputs: 72, result, bias: true };
        let mut operands = Operands::of(case(16), kind as u64);
        let whole = operands.run(case(16), Run::number(kind));
        for rows in [12, 8, 7, 1] {
            operands.x.truncate(rows * 1096);
            operands.before.truncate(rows * 72);
            assert_eq!(
                operands.run(case(rows), Run::number(rows)),
                whole[..rows * 72],
                "{rows} rows, {result:?}"
            );
        }
    }
}

#[test]
fn more_rows_than_there_is_a_kernel_for_are_refused() {
    let error = launch::linear_few_rows(17, 8, FewRowsResult::ReplaceF32).unwrap_err().to_string();
    assert!(error.contains("at most 16 rows"), "{error}");
}
