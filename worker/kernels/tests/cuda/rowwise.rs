//! Norms, rotary embedding and store, the gate, rows by number: against f64, at widths around the edges of warps.

use half::bf16;
use rand::RngExt;
use rand::rngs::StdRng;
use worker_kernels::cuda::launch;
use worker_kernels::cuda::params::{GatherParams, Paging, RmsNormParams, RopeStoreParams, SiluMulParams};

use crate::machine::{Buffer, POISON, Run, launch as run_launch, rng};

fn floats(rng: &mut StdRng, count: usize) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(-2.0f32..2.0)).collect()
}

fn brains(rng: &mut StdRng, count: usize) -> Vec<bf16> {
    floats(rng, count).into_iter().map(bf16::from_f32).collect()
}

/// As near as bf16 allows.
fn assert_near(got: &[bf16], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let (got, tolerance) = (got.to_f64(), want.abs() / 250.0 + 1e-5);
        assert!((got - want).abs() <= tolerance, "{what}: number {index} is {got}, not {want}");
    }
}

#[test]
fn rms_norm_takes_an_addend_in_and_normalises() {
    for (number, width) in [8, 64, 248, 256, 264, 2040, 2048, 2056, 5120].into_iter().enumerate() {
        for with_addend in [true, false] {
            let mut rng = rng(number as u64);
            let (rows, eps) = (3, 1e-2);
            let x: Vec<f32> = (0..rows)
                .flat_map(|row| floats(&mut rng, width).into_iter().map(move |x| x * 0.1 * (1 + row) as f32))
                .collect();
            let (addend, weight) = (brains(&mut rng, rows * width), floats(&mut rng, width));
            let sums: Vec<f32> = x
                .iter()
                .zip(&addend)
                .map(|(x, addend)| if with_addend { x + addend.to_f32() } else { *x })
                .collect();
            let (device_x, device_addend) = (Buffer::of(&x), Buffer::of_bf16(&addend));
            let (device_weight, out) = (Buffer::of(&weight), Buffer::poisoned::<u16>(rows * width));
            let params = RmsNormParams {
                x: device_x.address(),
                addend: if with_addend { device_addend.address() } else { 0 },
                weight: device_weight.address(),
                out: out.address(),
                width: width as u32,
                eps,
            };
            run_launch(launch::rms_norm(rows, width).unwrap(), &params, Run::number(number)).unwrap();
            assert_eq!(device_x.read::<f32>(), sums);
            let want: Vec<f64> = sums
                .chunks(width)
                .flat_map(|row| {
                    let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                    let scale = 1.0 / (squares / width as f64 + f64::from(eps)).sqrt();
                    row.iter().zip(&weight).map(move |(x, weight)| f64::from(*x) * scale * f64::from(*weight))
                })
                .collect();
            assert_near(&out.read_bf16(), &want, &format!("width {width}"));
        }
    }
}

/// A model's heads, and which of the kernel's steps are asked for.
#[derive(Clone, Copy, Debug)]
struct RopeCase {
    head_dim: usize,
    heads: usize,
    kv_heads: usize,
    block_tokens: usize,
    rows: usize,
    norm: bool,
    turn: bool,
    store: bool,
    positions: bool,
}

const EVERYTHING: RopeCase = RopeCase {
    head_dim: 64,
    heads: 3,
    kv_heads: 2,
    block_tokens: 4,
    rows: 7,
    norm: true,
    turn: true,
    store: true,
    positions: true,
};

#[test]
fn rope_store_does_each_of_its_steps_alone_and_together() {
    let cases = [
        EVERYTHING,
        RopeCase { head_dim: 128, ..EVERYTHING },
        RopeCase { head_dim: 256, ..EVERYTHING },
        RopeCase { head_dim: 128, norm: false, ..EVERYTHING },
        RopeCase { head_dim: 128, heads: 16, kv_heads: 8, rows: 3, ..EVERYTHING },
        RopeCase { turn: false, ..EVERYTHING },
        RopeCase { store: false, ..EVERYTHING },
        RopeCase { positions: false, rows: 1, ..EVERYTHING },
        RopeCase { head_dim: 256, heads: 1, kv_heads: 1, block_tokens: 1, ..EVERYTHING },
        RopeCase { rows: 33, block_tokens: 64, ..EVERYTHING },
        RopeCase { heads: 14, kv_heads: 5, ..EVERYTHING },
    ];
    for (number, case) in cases.into_iter().enumerate() {
        check_rope(case, number);
    }
}

fn check_rope(case: RopeCase, number: usize) {
    let RopeCase { head_dim, heads, kv_heads, block_tokens, rows, .. } = case;
    let mut rng = rng(number as u64);
    let (all_heads, blocks) = (heads + 2 * kv_heads, rows.div_ceil(block_tokens) + 2);
    let stride = (all_heads + 1) * head_dim;
    let qkv: Vec<bf16> = (0..rows)
        .flat_map(|_| {
            [brains(&mut rng, all_heads * head_dim), vec![bf16::from_bits(POISON); head_dim]].concat()
        })
        .collect();
    let (query_norm, key_norm) = (floats(&mut rng, head_dim), floats(&mut rng, head_dim));
    let table_rows = rows + 5;
    let angles = floats(&mut rng, table_rows * head_dim);
    let positions: Vec<u32> = (0..rows).map(|_| rng.random_range(0..table_rows as u32)).collect();
    // In disorder, and the second row nowhere.
    let mut slots: Vec<u32> =
        (0..rows).map(|row| (row as u32 * 5 + 3) % (blocks * block_tokens) as u32).collect();
    slots.dedup();
    assert_eq!(slots.len(), rows);
    if rows > 1 {
        slots[1] = RopeStoreParams::NO_SLOT;
    }

    let device_qkv = Buffer::of_bf16(&qkv);
    let pool = blocks * kv_heads * block_tokens * head_dim;
    let (keys, values) = (Buffer::poisoned::<u16>(pool), Buffer::poisoned::<u16>(pool));
    let (device_query_norm, device_key_norm) = (Buffer::of(&query_norm), Buffer::of(&key_norm));
    let (device_angles, device_positions, device_slots) =
        (Buffer::of(&angles), Buffer::of(&positions), Buffer::of(&slots));
    let when = |asked: bool, buffer: &Buffer| if asked { buffer.address() } else { 0 };
    let eps = 1e-2;
    let params = RopeStoreParams {
        qkv: device_qkv.address(),
        keys: keys.address(),
        values: values.address(),
        query_norm: when(case.norm, &device_query_norm),
        key_norm: when(case.norm, &device_key_norm),
        angles: when(case.turn, &device_angles),
        positions: when(case.positions, &device_positions),
        slots: when(case.store, &device_slots),
        paging: Paging { block_tables: 0, kv_heads: kv_heads as u32, block_shift: block_tokens.ilog2() },
        rows: rows as u32,
        heads: heads as u32,
        qkv_stride: stride as u32,
        eps,
    };
    let launch = launch::rope_store(head_dim, rows, heads, kv_heads).unwrap();
    run_launch(launch, &params, Run::number(number)).unwrap();

    let (got, keys, values) = (device_qkv.read_bf16(), keys.read_bf16(), values.read_bf16());
    let mut stored = 0;
    for row in 0..rows {
        for head in 0..all_heads {
            let from = &qkv[row * stride + head * head_dim..][..head_dim];
            let angle_row = if case.positions { positions[row] as usize } else { row };
            let norm = if head < heads { &query_norm } else { &key_norm };
            let what = format!("{case:?}: row {row}, head {head}");
            let want = if head < heads + kv_heads {
                turned(case, from, norm, eps, &angles[angle_row * head_dim..][..head_dim])
            } else {
                from.iter().map(|x| x.to_f64()).collect()
            };
            let in_place = &got[row * stride + head * head_dim..][..head_dim];
            if head < heads || !case.store {
                assert_near(in_place, &want, &what);
                continue;
            }
            assert_eq!(in_place, from, "{what}: what is stored stays as it was");
            if slots[row] == RopeStoreParams::NO_SLOT {
                continue;
            }
            let (pool, kv_head) = if head < heads + kv_heads {
                (&keys, head - heads)
            } else {
                (&values, head - heads - kv_heads)
            };
            let (block, place) = (slots[row] as usize / block_tokens, slots[row] as usize % block_tokens);
            let at = ((block * kv_heads + kv_head) * block_tokens + place) * head_dim;
            assert_near(&pool[at..][..head_dim], &want, &what);
            stored += head_dim;
        }
        let rest = &got[row * stride + all_heads * head_dim..(row + 1) * stride];
        assert!(rest.iter().all(|x| x.to_bits() == POISON), "wrote beside row {row}");
    }
    let written = keys.iter().chain(&values).filter(|x| x.to_bits() != POISON).count();
    assert_eq!(written, stored, "{case:?}: numbers written to the pool");
}

/// QK-norm and rotation of one head in f64, as far as asked for.
fn turned(case: RopeCase, from: &[bf16], norm: &[f32], eps: f32, angles: &[f32]) -> Vec<f64> {
    let mut x: Vec<f64> = from.iter().map(|x| x.to_f64()).collect();
    if case.norm {
        let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(eps)).sqrt();
        x.iter_mut().zip(norm).for_each(|(x, weight)| *x *= scale * f64::from(*weight));
    }
    if case.turn {
        let half = x.len() / 2;
        for i in 0..half {
            let (a, b, cosine, sine) = (x[i], x[half + i], f64::from(angles[i]), f64::from(angles[half + i]));
            (x[i], x[half + i]) = (a * cosine - b * sine, b * cosine + a * sine);
        }
    }
    x
}

#[test]
fn silu_mul_agrees_with_its_definition() {
    for (number, (rows, width)) in [(1, 8), (3, 24), (5, 2048), (2, 2056), (300, 8)].into_iter().enumerate() {
        let mut rng = rng(number as u64);
        let mut gate_up = brains(&mut rng, rows * 2 * width);
        // What would overflow if e^x were computed of the wrong sign.
        gate_up[0] = bf16::from_f32(-200.0);
        gate_up[1] = bf16::from_f32(200.0);
        let (from, out) = (Buffer::of_bf16(&gate_up), Buffer::poisoned::<u16>(rows * width));
        let params = SiluMulParams {
            gate_up: from.address(),
            out: out.address(),
            rows: rows as u32,
            width: width as u32,
        };
        run_launch(launch::silu_mul(rows, width).unwrap(), &params, Run::number(number)).unwrap();
        let want: Vec<f64> = gate_up
            .chunks(2 * width)
            .flat_map(|row| {
                let (gate, up) = row.split_at(width);
                gate.iter()
                    .zip(up)
                    .map(|(gate, up)| gate.to_f64() / (1.0 + (-gate.to_f64()).exp()) * up.to_f64())
            })
            .collect();
        assert_near(&out.read_bf16(), &want, &format!("{rows} rows of {width}"));
    }
}

#[test]
fn rows_are_gathered_bit_for_bit() {
    for (number, width) in [8, 1016, 1024, 1032, 5120].into_iter().enumerate() {
        let mut rng = rng(number as u64);
        let (table, stream) = (brains(&mut rng, 9 * width), floats(&mut rng, 9 * width));
        let indices: Vec<u32> = vec![8, 0, 3, 3];
        let picked = |from: &dyn Fn(usize) -> f32| -> Vec<f32> {
            indices
                .iter()
                .flat_map(|&row| (0..width).map(move |i| row as usize * width + i))
                .map(from)
                .collect()
        };
        let (device_indices, run) = (Buffer::of(&indices), Run::number(number));
        let gather = |from: &Buffer, launch| {
            let out = Buffer::poisoned::<f32>(indices.len() * width);
            let params = GatherParams {
                from: from.address(),
                indices: device_indices.address(),
                out: out.address(),
                width: width as u32,
                reserved: 0,
            };
            run_launch(launch, &params, run).unwrap();
            out.read::<f32>()
        };
        let embedded = gather(&Buffer::of_bf16(&table), launch::embed(4).unwrap());
        assert_eq!(embedded, picked(&|i| table[i].to_f32()));
        let selected = gather(&Buffer::of(&stream), launch::select_rows(4).unwrap());
        assert_eq!(selected, picked(&|i| stream[i]));
    }
}
