//! Norms, SiLU and row copies against f64, on every kind of instructions this machine has.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use worker_kernels::cpu::{Activations, Isa};
use worker_kernels::{CpuKernels, Device, Dtype, Kernels, WeightView};

fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-3.0f32..3.0)).collect()
}

fn buffer(kernels: &CpuKernels, numbers: &[f32], width: usize) -> Activations {
    let mut buffer = Activations::default();
    kernels.write(numbers, width, &mut buffer).unwrap();
    buffer
}

fn every_isa() -> impl Iterator<Item = CpuKernels> {
    Isa::available().into_iter().map(|isa| CpuKernels::with_isa("test", 2, isa).unwrap())
}

fn normed(row: &[f32], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
    row.iter().zip(weight).map(|(x, w)| f64::from(*x) / (mean + eps).sqrt() * f64::from(*w)).collect()
}

fn assert_near(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() <= 2e-6 * want.abs().max(1.0), "{got} for {want}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn norms_agree_with_f64(seed: u64, rows in 1usize..70, width in 1usize..1100) {
        let (x, weight) = (numbers(seed, rows * width), numbers(seed ^ 1, width));
        let want: Vec<f64> = x.chunks_exact(width).flat_map(|row| normed(row, &weight, 1e-5)).collect();
        for kernels in every_isa() {
            let mut out = Activations::default();
            kernels.rms_norm(&buffer(&kernels, &x, width), &weight, 1e-5, &mut out).unwrap();
            assert_near(out.numbers(), &want);
        }
    }

    #[test]
    fn silu_agrees_with_f64(seed: u64, rows in 1usize..9, width in 1usize..200, stretch in 1.0f32..40.0) {
        let x: Vec<f32> = numbers(seed, rows * 2 * width).into_iter().map(|x| x * stretch).collect();
        let silu = |x: f32| f64::from(x) / (1.0 + (-f64::from(x)).exp());
        let want: Vec<f64> = x
            .chunks_exact(2 * width)
            .flat_map(|row| (0..width).map(|i| silu(row[i]) * f64::from(row[width + i])).collect::<Vec<_>>())
            .collect();
        for kernels in every_isa() {
            let mut out = Activations::default();
            kernels.silu_mul(&buffer(&kernels, &x, 2 * width), &mut out).unwrap();
            assert_near(out.numbers(), &want);
        }
    }
}

#[test]
fn rows_are_embedded_and_selected_by_index() {
    let kernels = CpuKernels::new("test", 2).unwrap();
    let table = numbers(4, 40 * 7);
    let bytes: Vec<u8> = table.iter().flat_map(|number| number.to_le_bytes()).collect();
    let layer = kernels.linear(&[WeightView::new(Dtype::F32, 40, 7, &bytes).unwrap()], &[]).unwrap();
    let (mut x, mut out) = (Activations::default(), Activations::default());
    kernels.embed(&layer, &[39, 0, 17], &mut x).unwrap();
    kernels.select_rows(&x, &[2, 0], &mut out).unwrap();
    assert_eq!(out.numbers()[..7], table[17 * 7..][..7]);
    assert_eq!(out.numbers()[7..], table[39 * 7..][..7]);
    assert!(kernels.select_rows(&x, &[3], &mut out).is_err());
}
