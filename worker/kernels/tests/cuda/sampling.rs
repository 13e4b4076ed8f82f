//! Adjusting logits and drawing tokens, against the rules of `worker_core::sampling` in f64.

use rand::RngExt;
use worker_kernels::Device;
use worker_kernels::cuda::params::{AdjustParams, Draw, LogitChange, Penalties, SampleParams};
use worker_kernels::cuda::{CudaKernels, Draws, launch};

use crate::device::has_gpu;
use crate::gpu::fake;
use crate::machine::{Buffer, Run, launch as run_launch, rng, runs_on_gpu};

/// SplitMix64 over seed and position, as `worker/src/backend/sample.rs` has it.
fn uniform(draw: &Draw) -> f64 {
    let mix = |state: u64| {
        let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (mix(mix(draw.seed) ^ draw.position) >> 11) as f64 / (1u64 << 53) as f64
}

/// Tokens that f64 would draw: one, or its neighbours too where the draw falls within rounding of their border.
fn reference(logits: &[f32], draw: &Draw) -> Vec<u32> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let best = logits.iter().position(|&logit| logit == highest).unwrap() as u32;
    if draw.temperature == 0.0 || draw.top_k == 1 {
        return vec![best];
    }
    let weight = |logit: f32| (f64::from(logit - highest) / f64::from(draw.temperature)).exp();
    let mut kept: Vec<(u32, f64)> = (0..).zip(logits).map(|(token, &logit)| (token, weight(logit))).collect();
    kept.retain(|(_, weight)| *weight >= f64::from(draw.min_p));
    let sort = |kept: &mut Vec<(u32, f64)>| kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if draw.top_k != 0 && (draw.top_k as usize) < kept.len() {
        sort(&mut kept);
        kept.truncate(draw.top_k as usize);
    }
    if draw.top_p < 1.0 {
        sort(&mut kept);
        let target = f64::from(draw.top_p) * kept.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut sum = 0.0;
        let reached = kept.iter().position(|(_, weight)| {
            sum += weight;
            sum >= target
        });
        kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    }
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    let (target, slack) = (uniform(draw) * total, total * 1e-6);
    let mut sum = 0.0;
    let mut tokens = Vec::new();
    for (token, weight) in kept {
        if sum <= target + slack && sum + weight > target - slack {
            tokens.push(token);
        }
        sum += weight;
    }
    tokens
}

fn sample(logits: &[f32], draws: &[Draw], run: Run) -> Vec<u32> {
    let vocab = logits.len() / draws.len();
    let (device_logits, device_draws) = (Buffer::of(logits), Buffer::of(draws));
    let tokens = Buffer::poisoned::<u32>(draws.len());
    let params = SampleParams {
        logits: device_logits.address(),
        draws: device_draws.address(),
        tokens: tokens.address(),
        vocab: vocab as u32,
        reserved: 0,
    };
    run_launch(launch::sample(draws.len(), vocab).unwrap(), &params, run).unwrap();
    tokens.read()
}

const PLAIN: Draw = Draw { seed: 1, position: 0, temperature: 1.0, top_p: 1.0, min_p: 0.0, top_k: 0 };

/// Parameters alone and together, each for several seeds.
fn draws() -> Vec<Draw> {
    let kinds = [
        PLAIN,
        Draw { temperature: 0.0, ..PLAIN },
        Draw { temperature: 0.3, ..PLAIN },
        Draw { temperature: 1e-4, ..PLAIN },
        Draw { top_k: 1, ..PLAIN },
        Draw { top_k: 2, ..PLAIN },
        Draw { top_k: 7, temperature: 3.0, ..PLAIN },
        Draw { top_k: 2500, ..PLAIN },
        Draw { top_k: 1_000_000, ..PLAIN },
        Draw { top_p: 0.9, ..PLAIN },
        Draw { top_p: 0.05, ..PLAIN },
        Draw { min_p: 0.2, ..PLAIN },
        Draw { min_p: 1.0, ..PLAIN },
        Draw { top_k: 20, top_p: 0.7, min_p: 0.05, temperature: 1.7, ..PLAIN },
        // More than have a weight at all, fewer than are kept by min-p, and as many.
        Draw { top_k: 40, top_p: 0.95, temperature: 1e-3, ..PLAIN },
        Draw { top_k: 500, min_p: 0.9, temperature: 2.0, ..PLAIN },
    ];
    kinds.iter().flat_map(|kind| (0..3).map(|i| Draw { seed: 99 + i, position: i * i, ..*kind })).collect()
}

#[test]
fn tokens_are_those_that_f64_draws() {
    for (number, vocab) in [1, 2, 31, 511, 512, 513, 3000, 9001].into_iter().enumerate() {
        let mut rng = rng(number as u64);
        let draws = draws();
        let logits: Vec<f32> = (0..vocab * draws.len()).map(|_| rng.random_range(-4.0f32..4.0)).collect();
        let tokens = sample(&logits, &draws, Run::number(number));
        for ((row, draw), token) in logits.chunks(vocab).zip(&draws).zip(tokens) {
            let want = reference(row, draw);
            assert!(want.contains(&token), "{vocab} tokens, {draw:?}: drew {token}, not one of {want:?}");
        }
    }
}

/// Logits in steps, so that whole stretches of tokens have none that is heavy: they count where all do, and only there.
#[test]
fn stretches_of_light_tokens_count_as_far_as_they_weigh() {
    let vocab = 12_000;
    let kinds = [
        PLAIN,
        Draw { top_k: 3, ..PLAIN },
        Draw { top_k: 40, top_p: 0.9, ..PLAIN },
        Draw { top_k: 300, min_p: 0.9, ..PLAIN },
        Draw { top_k: 10_000, top_p: 0.999, ..PLAIN },
        Draw { top_k: 11_000, min_p: 1e-3, ..PLAIN },
        Draw { top_p: 0.05, ..PLAIN },
        Draw { top_p: 0.99, ..PLAIN },
        Draw { min_p: 0.01, temperature: 1.5, ..PLAIN },
        Draw { min_p: 0.99, ..PLAIN },
        Draw { temperature: 0.1, ..PLAIN },
        Draw { temperature: 0.01, top_k: 2000, top_p: 0.99, ..PLAIN },
    ];
    let draws = kinds.map(|kind| Draw { position: 7, ..kind });
    for (number, below) in
        [[4.0, 9.0, 0.0, 40.0, 7.0, 8.0], [0.0, 0.0, 5.0, 0.0, 0.0, 0.0]].iter().enumerate()
    {
        let mut rng = rng(5 + number as u64);
        let logits: Vec<f32> =
            (0..vocab).map(|token| rng.random_range(0.0f32..1.0) - below[token * 6 / vocab]).collect();
        let rows: Vec<f32> = draws.iter().flat_map(|_| logits.clone()).collect();
        let tokens = sample(&rows, &draws, Run::number(number));
        for (draw, token) in draws.iter().zip(tokens) {
            let want = reference(&logits, draw);
            assert!(want.contains(&token), "{below:?}, {draw:?}: drew {token}, not one of {want:?}");
        }
    }
}

/// Equal weights: the lower token first, in every cut; few, and more than the kernel's list holds.
#[test]
fn equal_logits_are_told_apart_by_token() {
    for (seed, vocab) in [700, 9000, 700, 9000].into_iter().enumerate() {
        let logits: Vec<f32> = (0..vocab).map(|token| if token % 3 == 0 { 2.0 } else { -1.0 }).collect();
        let seed = seed as u64;
        for draw in [
            Draw { seed, top_k: 5, ..PLAIN },
            Draw { seed, top_k: 2700, ..PLAIN },
            Draw { seed, top_k: 3001, ..PLAIN },
            Draw { seed, top_p: 0.6, ..PLAIN },
            Draw { seed, top_p: 0.02, ..PLAIN },
            Draw { seed, temperature: 0.0, ..PLAIN },
            Draw { seed, min_p: 0.5, ..PLAIN },
        ] {
            let token = sample(&logits, &[draw], Run::number(seed as usize))[0];
            let want = reference(&logits, &draw);
            assert!(want.contains(&token), "{vocab} tokens, {draw:?}: drew {token}, not one of {want:?}");
        }
    }
}

/// The API refuses some of these; a kernel that looked for what is not there would return whatever lies there.
#[test]
fn parameters_at_and_beyond_their_ends_draw_the_most_probable_token() {
    for vocab in [3, 600, 5000] {
        let mut rng = rng(vocab as u64);
        let mut logits: Vec<f32> = (0..vocab).map(|_| rng.random_range(-4.0f32..4.0)).collect();
        logits[vocab * 2 / 3] = 5.0;
        let draws = [
            Draw { top_p: 0.0, ..PLAIN },
            Draw { top_p: -1.0, ..PLAIN },
            Draw { top_p: f32::MIN_POSITIVE, top_k: 2, ..PLAIN },
            Draw { min_p: 1.5, ..PLAIN },
            Draw { min_p: f32::NAN, top_p: 0.5, ..PLAIN },
            Draw { temperature: 1e-40, ..PLAIN },
            Draw { temperature: 1e-40, top_k: 2, ..PLAIN },
        ];
        let rows: Vec<f32> = draws.iter().flat_map(|_| logits.clone()).collect();
        assert_eq!(sample(&rows, &draws, Run::number(vocab)), [vocab as u32 * 2 / 3; 7], "{vocab} tokens");
    }
}

#[test]
fn broken_logits_draw_no_token_and_withheld_ones_are_never_drawn() {
    let mut logits = vec![0.5f32; 600];
    logits[70] = f32::NEG_INFINITY;
    let draws: Vec<Draw> = (0..8).map(|seed| Draw { seed, ..PLAIN }).collect();
    let rows: Vec<f32> = draws.iter().flat_map(|_| logits.clone()).collect();
    assert!(sample(&rows, &draws, Run::number(0)).iter().all(|&token| token < 600 && token != 70));
    for broken in [f32::NAN, f32::INFINITY, -f32::NAN] {
        for at in [0, 70, 599] {
            let mut logits = logits.clone();
            logits[at] = broken;
            assert_eq!(sample(&logits, &[PLAIN], Run::number(1)), [SampleParams::NO_TOKEN]);
        }
    }
}

#[test]
fn zeros_of_both_signs_are_one_number() {
    let draw = Draw { temperature: 0.0, ..PLAIN };
    assert_eq!(sample(&[-1.0, -0.0, 0.0], &[draw], Run::number(0)), [1]);
    assert_eq!(sample(&[-3.0, -2.0, -2.5], &[draw], Run::number(0)), [1]);
}

#[test]
fn logits_change_in_order_bias_penalties_withheld() {
    let (rows, vocab) = (3, 150);
    let mut rng = rng(3);
    let logits: Vec<f32> = (0..rows * vocab).map(|_| rng.random_range(-4.0f32..4.0)).collect();
    let penalties: Vec<Penalties> = (0..rows)
        .map(|row| Penalties {
            repetition: 1.0 + row as f32 * 0.3,
            frequency: 0.25 * row as f32,
            presence: 0.5,
        })
        .collect();
    let changes: Vec<LogitChange> = (0..rows as u32)
        .flat_map(|row| (0..vocab as u32).step_by(1 + row as usize).map(move |token| (row, token)))
        .map(|(row, token)| LogitChange {
            row,
            token,
            bias: if token % 4 == 0 { rng.random_range(-3.0..3.0) } else { 0.0 },
            seen: (token % 5) as i32 - 1,
            withheld: u32::from(token % 11 == 0),
        })
        .collect();
    let (device_logits, device_changes, device_penalties) =
        (Buffer::of(&logits), Buffer::of(&changes), Buffer::of(&penalties));
    let params = AdjustParams {
        logits: device_logits.address(),
        changes: device_changes.address(),
        penalties: device_penalties.address(),
        count: changes.len() as u32,
        vocab: vocab as u32,
    };
    run_launch(launch::adjust_logits(changes.len()).unwrap(), &params, Run::number(0)).unwrap();

    let mut want: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for change in &changes {
        let (logit, penalty) =
            (&mut want[change.row as usize * vocab + change.token as usize], penalties[change.row as usize]);
        *logit += f64::from(change.bias);
        if change.seen >= 0 {
            *logit *= if *logit > 0.0 {
                1.0 / f64::from(penalty.repetition)
            } else {
                f64::from(penalty.repetition)
            };
            *logit -= f64::from(penalty.frequency) * f64::from(change.seen);
            *logit -= if change.seen > 0 { f64::from(penalty.presence) } else { 0.0 };
        }
        if change.withheld == 1 {
            *logit = f64::NEG_INFINITY;
        }
    }
    for (index, (got, want)) in device_logits.read::<f32>().into_iter().zip(want).enumerate() {
        assert!(
            f64::from(got) == want || (f64::from(got) - want).abs() < 1e-5,
            "logit {index} is {got}, not {want}"
        );
    }
}

#[test]
fn extreme_changes_leave_numbers_and_make_none() {
    let logits = [f32::MAX, f32::MIN, 0.0, f32::NAN];
    let device_logits = Buffer::of(&logits);
    let changes: Vec<LogitChange> = (0..4)
        .map(|token| LogitChange {
            row: 0,
            token,
            bias: if token == 0 { f32::MAX } else { -1.0 },
            seen: 2,
            withheld: 0,
        })
        .collect();
    let (changes, penalties) =
        (Buffer::of(&changes), Buffer::of(&[Penalties { repetition: 0.01, frequency: -2.0, presence: 0.0 }]));
    let params = AdjustParams {
        logits: device_logits.address(),
        changes: changes.address(),
        penalties: penalties.address(),
        count: 4,
        vocab: 4,
    };
    run_launch(launch::adjust_logits(4).unwrap(), &params, Run::number(0)).unwrap();
    let adjusted = device_logits.read::<f32>();
    assert!(adjusted[..3].iter().all(|logit| logit.is_finite()) && adjusted[3].is_nan(), "{adjusted:?}");
}

/// What serving calls: changes and draw of a step's rows, and the rows as they were for those who ask.
#[test]
fn a_steps_tokens_are_drawn_with_one_wait() {
    if !has_gpu("sampling::a_steps_tokens_are_drawn_with_one_wait") {
        return;
    }
    let waits = || if runs_on_gpu() { 0 } else { fake("waits") };
    let kernels = CudaKernels::open(0).unwrap();
    let vocab = 3001;
    let mut rng = rng(17);
    let mut rows: Vec<Vec<f32>> =
        (0..4).map(|_| (0..vocab).map(|_| rng.random_range(-4.0f32..4.0)).collect()).collect();
    rows[3][vocab - 1] = f32::NAN;
    let mut buffer = kernels.buffer();
    kernels.write(&rows.concat(), vocab, &mut buffer).unwrap();
    // The first row would draw its best, were that not withheld; the second one's best comes by a bias; the third is changed by nothing.
    let best =
        (0..vocab as u32).max_by(|&a, &b| rows[0][a as usize].total_cmp(&rows[0][b as usize])).unwrap();
    let change =
        |row, token, bias, withheld| LogitChange { row, token, bias, seen: LogitChange::UNSEEN, withheld };
    let draws = Draws {
        draws: [0.0, 0.0, 1.0, 1.0].map(|temperature| Draw { temperature, top_p: 0.8, ..PLAIN }).to_vec(),
        penalties: vec![Penalties { repetition: 1.0, frequency: 0.0, presence: 0.0 }; 4],
        changes: vec![
            change(0, best, 0.0, 1),
            change(1, 2999, 9.0, 0),
            // It stays none.
            change(3, vocab as u32 - 1, 1.0, 0),
        ],
    };
    let before = waits();
    let told = kernels.read_rows(&buffer, &[2, 0]).unwrap();
    let (read, tokens) = (waits(), kernels.draw(&mut buffer, &draws).unwrap());
    assert!(told == [&rows[2][..], &rows[0][..]].concat(), "as they were");
    rows[0][best as usize] = f32::NEG_INFINITY;
    assert_eq!(tokens[..2], [Some(reference(&rows[0], &draws.draws[0])[0]), Some(2999)]);
    assert!(reference(&rows[2], &draws.draws[2]).contains(&tokens[2].unwrap()) && tokens[3].is_none());
    if !runs_on_gpu() {
        assert_eq!([read - before, waits() - read], [1, 1]);
    }
    kernels.write(&[], vocab, &mut buffer).unwrap();
    assert_eq!(
        kernels.draw(&mut buffer, &Draws::default()).unwrap(),
        [],
        "a step without a row that samples"
    );
    assert!(kernels.draw(&mut buffer, &draws).unwrap_err().to_string().contains("0 of each"));
    kernels.write(&rows.concat(), vocab, &mut buffer).unwrap();
    for outside in [change(4, 0, 0.0, 0), change(0, 3001, 0.0, 0)] {
        let error =
            kernels.draw(&mut buffer, &Draws { changes: vec![outside], ..draws.clone() }).unwrap_err();
        assert!(error.to_string().contains("changes within [4, 3001]"), "{error}");
    }
    assert!(kernels.read_rows(&buffer, &[4]).unwrap_err().to_string().contains("rows below 4"));
}
