//! Decode of groups that have more query heads than a tile of products has rows: teams of warps, and more blocks than one.
//!
//! Up to 32 heads are a team of two warps, up to 64 one of four, and 71 a block of 64 beside one of 7. A block of head dimension 256 has
//! two warps, and 33 heads are two of its blocks.

use half::bf16;

use super::launches::Device;
use super::{Case, Data, Launches, check_all, check_out, compute, compute_planned, cut_at};
use crate::machine::{Run, runs_on_gpu};

/// Every head dimension with groups of every kind.
fn shapes() -> impl Iterator<Item = (usize, usize)> {
    let groups = |head_dim: usize| -> &[usize] {
        if head_dim == 256 { &[17, 32, 33] } else { &[17, 24, 32, 33, 48, 64, 71] }
    };
    [64, 128, 256]
        .into_iter()
        .flat_map(move |head_dim| groups(head_dim).iter().map(move |&group| (head_dim, group)))
}

#[test]
fn decode_takes_ragged_batches_over_split_contexts() {
    check_all(shapes().map(|(head_dim, group)| {
        Case::new(head_dim, 2 * group, 2, &[(5, 1), (530, 1), (0, 1), (90, 0), (37, 1)])
    }));
}

/// Where warps of a team, and teams, run out of tiles: none may leave the others waiting, or add up what nobody copied.
#[test]
fn decode_agrees_where_teams_run_out_of_tiles() {
    let contexts =
        [0, 15, 16, 31, 32, 47, 48, 62, 63, 64, 80, 95, 96, 111, 127, 128, 191, 192, 208, 255, 256];
    for group in [17, 33] {
        check_all(contexts.iter().map(|&context| Case::new(64, group, 1, &[(context, 1)])));
        check_all([15, 16, 32, 63, 64, 100, 192].map(|context| Case::new(128, group, 1, &[(context, 1)])));
        check_all(
            [0, 15, 16, 31, 32, 48, 63, 64, 100].map(|context| Case::new(256, group, 1, &[(context, 1)])),
        );
    }
}

#[test]
fn decode_takes_blocks_of_every_size() {
    let sequences = [(50, 1), (20, 1)];
    for size in [1, 2, 8, 64, 256] {
        check_all(
            [(64, 33), (64, 17), (256, 17)]
                .map(|(head_dim, group)| Case::new(head_dim, 2 * group, 2, &sequences).with_blocks_of(size)),
        );
    }
}

#[test]
fn decode_sees_windows_and_sinks() {
    check_all(shapes().map(|(head_dim, group)| {
        Case::new(head_dim, group, 1, &[(600, 1), (20, 1)]).with_window(100, 3).with_learned_sinks()
    }));
    check_all([24, 48, 71].into_iter().flat_map(|group| {
        [
            Case::new(64, group, 1, &[(140, 1)]).with_window(1, 0),
            Case::new(64, group, 1, &[(140, 1)]).with_window(33, 0),
            Case::new(64, group, 1, &[(140, 1)]).with_window(u32::MAX - 100, 0),
            Case::new(64, group, 1, &[(140, 1)]).with_window(20, u32::MAX),
            Case::new(64, group, 1, &[(140, 1)]).with_learned_sinks(),
        ]
    }));
}

#[test]
fn decode_goes_beside_prefill_with_the_bits_it_has_alone() {
    for (head_dim, group) in shapes() {
        let case = Case::new(head_dim, group, 1, &[(70, 1), (3, 2), (530, 1)]).with_window(500, 2);
        check_all([case.clone()]);
        let apart = Case { launches: Launches::Separate, ..case.clone() };
        assert!(bits(&case, 1) == bits(&apart, 2), "{case:?}");
    }
}

/// The same bits whatever the order of warps and the landing of copies.
#[test]
fn no_order_of_events_changes_a_bit_of_what_decodes() {
    for (head_dim, group) in shapes() {
        let case = Case::new(head_dim, group, 1, &[(70, 1), (530, 1)]).with_window(500, 2);
        let want = bits(&case, 0);
        assert!((1..6).all(|run| bits(&case, run) == want), "{case:?}");
    }
}

fn bits(case: &Case, run: usize) -> Vec<u16> {
    let out = compute(case, &Data::new(case, 3), Run::number(run));
    out.into_iter().map(bf16::to_bits).collect()
}

/// The kernel does not rely on where the plan cuts.
#[test]
fn decode_takes_chunks_that_end_within_a_tile() {
    for (head_dim, group) in shapes() {
        let case = Case::new(head_dim, group, 1, &[(199, 1)]);
        let (data, run) = (Data::new(&case, 8), Run::number(group));
        let out = compute_planned(&case, &data, run, |plan| cut_at(plan, [13, 29, 100, 101, 200]));
        check_out(&case, &data, run, &out);
    }
}

/// What the file's opening says of bytes.
#[test]
fn decode_reads_keys_and_values_once_for_each_kv_head() {
    if runs_on_gpu() {
        return; // which counts no bytes
    }
    const KV_HEADS: usize = 2;
    for (head_dim, most) in [(64, 64), (128, 64), (256, 32)] {
        for context in [39, 600] {
            let bytes = |group: usize| {
                let case = Case::new(head_dim, KV_HEADS * group, KV_HEADS, &[(context, 1)]);
                let data = Data::new(&case, 6);
                let plan = data.plan(&case);
                Device::new(&case, &data, &plan).bytes_read(&case, &plan, Run::number(group)) as usize
            };
            let once = 4 * KV_HEADS * head_dim * (context + 1);
            for group in [1, 16, 17, 32, 33, 48, most].into_iter().filter(|&group| group <= most) {
                assert_eq!(bytes(group), once, "{group} heads of {head_dim}, {context} tokens of context");
            }
            assert_eq!(bytes(most + 1), 2 * once, "a group of more than a block's heads has two blocks");
        }
    }
}
