//! Address arithmetic at real sizes: 128k positions, 64 heads, 500,000 blocks.
//!
//! Pools of 16 GB each are address space only; memory stands behind what is touched. Of large grids some blocks run.

use half::bf16;
use worker_kernels::Span;
use worker_kernels::cuda::launch;
use worker_kernels::cuda::params::{
    DecodeParams, Paging, PrefillParams, RopeStoreParams, SiluMulParams, Visibility,
};
use worker_kernels::cuda::plan::AttentionPlan;

use crate::machine::{Buffer, Run, launch_blocks};

const HEADS: usize = 64;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const BLOCK_TOKENS: usize = 16;
const BLOCKS: usize = 500_000;
const POSITIONS: usize = 131_072;
const QKV: usize = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
const RUN: Run = Run { copies: crate::machine::CopyMode::Late, seed: 9 };

fn pool() -> Buffer {
    Buffer::zeroed(BLOCKS * KV_HEADS * BLOCK_TOKENS * HEAD_DIM * 2)
}

fn numbers(value: f32) -> Vec<u16> {
    vec![bf16::from_f32(value).to_bits(); HEAD_DIM]
}

/// Bytes from the pool's beginning to a position of a head.
fn offset(block: u32, kv_head: usize, place: usize) -> usize {
    ((block as usize * KV_HEADS + kv_head) * BLOCK_TOKENS + place) * HEAD_DIM * 2
}

fn paging(block_tables: &Buffer) -> Paging {
    Paging {
        block_tables: block_tables.address(),
        kv_heads: KV_HEADS as u32,
        block_shift: BLOCK_TOKENS.ilog2(),
    }
}

#[test]
fn the_last_row_of_128k_finds_its_values_at_the_end_of_the_pool() {
    let table: Vec<u32> =
        (0..(POSITIONS / BLOCK_TOKENS) as u32).map(|block| BLOCKS as u32 - 1 - block).collect();
    let (keys, values) = (pool(), pool());
    let visibility = Visibility { window: 40, sink_tokens: 1 };
    // The window's values are 2, the sink's 10; keys are zero, so that all weigh the same.
    for position in POSITIONS - 60..POSITIONS {
        let at = offset(table[position / BLOCK_TOKENS], KV_HEADS - 1, position % BLOCK_TOKENS);
        values.write(at, &numbers(2.0));
    }
    values.write(offset(table[0], KV_HEADS - 1, 0), &numbers(10.0));
    let want = (40.0 * 2.0 + 10.0) / 41.0;

    let decode_span =
        Span { first_row: POSITIONS - 1, rows: 1, context_tokens: POSITIONS - 1, blocks: &table };
    let prefill_span = Span { first_row: 0, rows: POSITIONS, context_tokens: 0, blocks: &table };
    let q = Buffer::zeroed(POSITIONS * QKV * 2);
    let out = Buffer::zeroed(POSITIONS * HEADS * HEAD_DIM * 2);
    let check = |what: &str| {
        let at = ((POSITIONS - 1) * HEADS + HEADS - 1) * HEAD_DIM * 2;
        for number in out.read_at::<u16>(at, HEAD_DIM) {
            let number = bf16::from_bits(number).to_f32();
            assert!((number - want).abs() < 0.02, "{what}: {number} is not {want}");
        }
        out.write(at, &numbers(0.0));
    };

    let plan = AttentionPlan::new(&[prefill_span], HEAD_DIM, visibility).unwrap();
    let (block_tables, tiles, sequences) =
        (Buffer::of(&plan.block_tables), Buffer::of(&plan.tiles), Buffer::of(&plan.sequences));
    let params = PrefillParams {
        q: q.address(),
        keys: keys.address(),
        values: values.address(),
        out: out.address(),
        sink_logits: 0,
        tiles: tiles.address(),
        sequences: sequences.address(),
        paging: paging(&block_tables),
        visibility,
        heads: HEADS as u32,
        q_stride: QKV as u32,
        out_stride: (HEADS * HEAD_DIM) as u32,
        score_scale: 1.0,
    };
    let prefill = launch::prefill(HEAD_DIM, plan.tiles.len(), HEADS).unwrap();
    launch_blocks(prefill, &params, RUN, &[HEADS as u32 - 1]).unwrap();
    check("prefill");

    let plan = AttentionPlan::new(&[decode_span], HEAD_DIM, visibility).unwrap();
    let mut whole = plan.chunks[1];
    whole.slot = worker_kernels::cuda::params::DecodeChunk::WHOLE;
    let (chunks, sequences) = (Buffer::of(&[whole]), Buffer::of(&plan.sequences));
    let params = DecodeParams {
        q: q.address(),
        keys: keys.address(),
        values: values.address(),
        out: out.address(),
        partial_sums: 0,
        partial_logs: 0,
        sink_logits: 0,
        chunks: chunks.address(),
        sequences: sequences.address(),
        paging: paging(&block_tables),
        visibility: Visibility { window: 40, sink_tokens: 0 },
        heads: HEADS as u32,
        q_stride: QKV as u32,
        out_stride: (HEADS * HEAD_DIM) as u32,
        score_scale: 1.0,
    };
    let decode = launch::decode(HEAD_DIM, 1, HEADS, KV_HEADS).unwrap();
    launch_blocks(decode, &params, RUN, &[KV_HEADS as u32 - 1]).unwrap();
    let at = ((POSITIONS - 1) * HEADS + HEADS - 1) * HEAD_DIM * 2;
    assert_eq!(out.read_at::<u16>(at, HEAD_DIM), numbers(2.0));
}

#[test]
fn the_last_of_128k_rows_is_stored_in_the_last_block() {
    let (keys, values) = (pool(), pool());
    let qkv = Buffer::zeroed(POSITIONS * QKV * 2);
    let last = |head: usize| ((POSITIONS - 1) * QKV + head * HEAD_DIM) * 2;
    qkv.write(last(HEADS + KV_HEADS - 1), &numbers(3.0));
    qkv.write(last(HEADS + 2 * KV_HEADS - 1), &numbers(4.0));
    let slots = Buffer::zeroed(POSITIONS * 4);
    slots.write((POSITIONS - 1) * 4, &[(BLOCKS * BLOCK_TOKENS) as u32 - 1]);
    let params = RopeStoreParams {
        qkv: qkv.address(),
        keys: keys.address(),
        values: values.address(),
        slots: slots.address(),
        paging: Paging { block_tables: 0, kv_heads: KV_HEADS as u32, block_shift: BLOCK_TOKENS.ilog2() },
        rows: POSITIONS as u32,
        heads: HEADS as u32,
        qkv_stride: QKV as u32,
        ..Default::default()
    };
    let launch = launch::rope_store(HEAD_DIM, POSITIONS, HEADS + 2 * KV_HEADS).unwrap();
    // The last row's heads are the last 80 warps, four to a block.
    let blocks: Vec<u32> = (launch.grid - 20..launch.grid).collect();
    launch_blocks(launch, &params, RUN, &blocks).unwrap();
    let at = offset(BLOCKS as u32 - 1, KV_HEADS - 1, BLOCK_TOKENS - 1);
    assert_eq!(keys.read_at::<u16>(at, HEAD_DIM), numbers(3.0));
    assert_eq!(values.read_at::<u16>(at, HEAD_DIM), numbers(4.0));
}

#[test]
fn the_last_of_128k_rows_goes_through_the_gate() {
    let width = 28_672;
    let (gate_up, out) = (Buffer::zeroed(POSITIONS * 2 * width * 2), Buffer::zeroed(POSITIONS * width * 2));
    let one = bf16::from_f32(1.0).to_bits();
    gate_up.write((POSITIONS - 1) * 2 * width * 2, &vec![one; 2 * width]);
    let params = SiluMulParams {
        gate_up: gate_up.address(),
        out: out.address(),
        rows: POSITIONS as u32,
        width: width as u32,
    };
    let launch = launch::silu_mul(POSITIONS, width).unwrap();
    launch_blocks(launch, &params, RUN, &[launch.grid - 1]).unwrap();
    let last = out.read_at::<u16>((POSITIONS * width - 2048) * 2, 2048);
    let want = bf16::from_f32(1.0 / (1.0 + (-1.0f32).exp()));
    assert!(last.iter().all(|&number| bf16::from_bits(number) == want), "{:?}", &last[..8]);
}
