//! Prompts by wgmma: on the host's machine, and on a GPU that has it.

use half::bf16;
use worker_kernels::cuda::PrefillKernel;

use super::{Case, Data, check_all, check_out, check_rows, compute};
use crate::machine::{Run, gpu, on_a_real_gpu};

/// Whether it runs here.
fn runs_here() -> bool {
    gpu().is_none_or(|gpu| gpu.has_wgmma())
}

impl Case {
    fn by_wgmma(self) -> Self {
        Self { prefill: PrefillKernel::Wgmma, ..self }
    }
}

fn check_by_wgmma(cases: impl IntoIterator<Item = Case>) {
    if runs_here() {
        check_all(cases.into_iter().map(Case::by_wgmma));
    }
}

#[test]
fn prefill_agrees_around_the_edges_of_rows_and_keys() {
    let edges = [2, 15, 16, 17, 63, 64, 65, 127, 128, 129];
    check_by_wgmma(edges.iter().map(|&rows| Case::new(64, 1, 1, &[(0, rows)])));
    check_by_wgmma([126, 127, 129].map(|rows| Case::new(128, 1, 1, &[(3, rows)])));
    let contexts = [0, 1, 15, 63, 64, 100, 122, 123, 124, 127, 128, 250, 251];
    check_by_wgmma(contexts.iter().map(|&context| Case::new(128, 1, 1, &[(context, 5)])));
    // Tiles of 64 keys.
    check_by_wgmma([2, 63, 64, 65, 129].map(|rows| Case::new(256, 1, 1, &[(0, rows)])));
    check_by_wgmma([58, 59, 60, 123, 124].map(|context| Case::new(256, 1, 1, &[(context, 5)])));
}

#[test]
fn prefill_takes_ragged_batches_of_grouped_heads() {
    check_by_wgmma([
        Case::new(64, 6, 2, &[(0, 40), (37, 2), (5, 0), (64, 70)]),
        Case::new(128, 4, 2, &[(100, 3), (0, 33), (16, 16)]),
        Case::new(128, 3, 1, &[(0, 260), (300, 140), (7, 2)]),
        Case::new(64, 5, 5, &[(130, 129)]),
        Case::new(256, 3, 1, &[(70, 140), (7, 2)]),
    ]);
}

#[test]
fn prefill_takes_blocks_of_every_size_from_8_tokens() {
    for size in [8, 16, 32, 64, 128, 256, 512] {
        check_by_wgmma([
            Case::new(64, 2, 2, &[(70, 90), (0, 17)]).with_blocks_of(size),
            Case::new(128, 2, 1, &[(130, 131)]).with_blocks_of(size),
            Case::new(256, 1, 1, &[(90, 75)]).with_blocks_of(size),
        ]);
    }
}

#[test]
fn prefill_sees_windows_and_sinks() {
    check_by_wgmma([
        Case::new(64, 2, 1, &[(300, 140)]).with_window(1, 0),
        Case::new(64, 2, 1, &[(300, 140)]).with_window(17, 0),
        Case::new(64, 2, 1, &[(300, 140)]).with_window(128, 3),
        Case::new(64, 2, 1, &[(300, 140)]).with_window(129, 0),
        Case::new(64, 2, 1, &[(300, 20)]).with_window(u32::MAX, 0),
        Case::new(64, 2, 1, &[(300, 20)]).with_window(u32::MAX - 200, 0),
        Case::new(64, 2, 1, &[(300, 20)]).with_window(20, u32::MAX),
        Case::new(128, 2, 1, &[(500, 130), (0, 20)]).with_window(30, 5).with_learned_sinks(),
        Case::new(128, 4, 2, &[(90, 70)]).with_learned_sinks(),
        Case::new(256, 2, 1, &[(190, 70)]).with_window(100, 5).with_learned_sinks(),
    ]);
}

/// The same bits whatever the order of warps and the landing of copies and products.
#[test]
fn no_order_of_events_changes_a_bit_of_what_prefills() {
    if !runs_here() {
        return;
    }
    for head_dim in [64, 128, 256] {
        let case = Case::new(head_dim, 3, 1, &[(275, 170), (0, 40)]).with_window(300, 2).by_wgmma();
        let data = Data::new(&case, 77);
        let bits = |number| -> Vec<u16> {
            compute(&case, &data, Run::number(number)).into_iter().map(bf16::to_bits).collect()
        };
        let first = bits(0);
        assert!((1..8).all(|number| bits(number) == first), "{case:?}");
    }
}

/// Scores far beyond what e^x holds, and positions of one score, so high that a float rounds it.
#[test]
fn prefill_takes_scores_of_any_size() {
    if !runs_here() {
        return;
    }
    let case = Case::new(64, 1, 1, &[(140, 20)]).by_wgmma();
    let mut data = Data::new(&case, 4);
    for number in &mut data.q[..] {
        *number = bf16::from_f32(number.to_f32() * 1e4);
    }
    let out = compute(&case, &data, Run::number(0));
    assert!(out.chunks(data.out_stride).all(|row| row[..64].iter().all(|number| number.is_finite())));

    let case = Case::new(128, 1, 1, &[(700, 2)]).by_wgmma();
    let mut data = Data::new(&case, 6);
    for row in 0..2 {
        data.q[row * data.q_stride..][..128].fill(bf16::from_f32(300.0));
    }
    for position in 0..702 {
        let at = data.offset(&case, 0, 0, position);
        data.keys[at..][..128].fill(bf16::from_f32(301.0));
        data.values[at..][..128].fill(bf16::from_f32(if position < 350 { 1.0 } else { -1.0 }));
    }
    let run = Run::number(1);
    check_out(&case, &data, run, &compute(&case, &data, run));
}

/// Scores that grow from tile to tile, so much that what was summed before is rescaled; and that fall, so that it is not.
#[test]
fn prefill_rescales_what_it_has_summed_when_scores_have_grown() {
    if !runs_here() {
        return;
    }
    for head_dim in [64, 128, 256] {
        let case = Case::new(head_dim, 2, 1, &[(500, 70)]).by_wgmma();
        for (seed, grows) in [(8, true), (9, false)] {
            let mut data = Data::new(&case, seed);
            for position in 0..570 {
                let at = data.offset(&case, 0, 0, position);
                let factor = 1.0 + if grows { position } else { 570 - position } as f32 / 8.0;
                for key in &mut data.keys[at..][..head_dim] {
                    *key = bf16::from_f32(key.to_f32() * factor);
                }
            }
            let run = Run::number(head_dim + seed as usize);
            check_out(&case, &data, run, &compute(&case, &data, run));
        }
    }
}

/// On a GPU as much work as gives every multiprocessor several, each long.
#[test]
fn prefill_agrees_on_rows_of_long_sequences() {
    if !runs_here() {
        return;
    }
    let (heads, kv_heads, rows, context) =
        if on_a_real_gpu() { (16, 4, 4000, 6000) } else { (2, 1, 140, 600) };
    for head_dim in [64, 128, 256] {
        let case = Case::new(head_dim, heads, kv_heads, &[(0, rows), (context, rows / 2)]).by_wgmma();
        let (data, run) = (Data::new(&case, head_dim as u64), Run::number(head_dim));
        check_rows(&case, &data, run, &compute(&case, &data, run), 61);
    }
}
