//! Address arithmetic at real sizes: 128k positions, 64 heads, 500,000 blocks.
//!
//! Pools of 16 GB each are address space only; memory stands behind what is touched. Of large grids some blocks run.

use half::bf16;
use worker_kernels::cuda::launch;
use worker_kernels::cuda::moe::{self, MoeGemmParams, MoeSumParams, MoeTile};
use worker_kernels::cuda::params::{
    AdjustParams, CombineParams, DecodeChunk, DecodeParams, Draw, FewRowsResult, GatherParams,
    LinearFewRowsParams, LogitChange, Merge, MixedParams, Paging, Penalties, PrefillParams,
    PrefillWgmmaParams, RmsNormParams, RopeStoreParams, SampleParams, Sequence, SiluMulParams, Visibility,
};
use worker_kernels::cuda::plan::{AttentionPlan, Cut};
use worker_kernels::{KvLayout, Span};

use crate::machine::{Buffer, Run, launch_blocks, map};

const HEADS: usize = 64;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const BLOCK_TOKENS: usize = 16;
const BLOCKS: usize = 500_000;
const CUT: Cut = Cut { tile_rows: launch::WGMMA_TILE_ROWS, few_chunks: 1 };
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

    let plan = AttentionPlan::new(&[prefill_span], CUT, visibility).unwrap();
    let (block_tables, tiles, whole_prompt) =
        (Buffer::of(&plan.block_tables), Buffer::of(&plan.tiles), Buffer::of(&plan.sequences));
    let prefill_params = PrefillParams {
        q: q.address(),
        keys: keys.address(),
        values: values.address(),
        out: out.address(),
        sink_logits: 0,
        tiles: tiles.address(),
        sequences: whole_prompt.address(),
        paging: paging(&block_tables),
        visibility,
        heads: HEADS as u32,
        q_stride: QKV as u32,
        out_stride: (HEADS * HEAD_DIM) as u32,
        score_scale: 1.0,
    };
    let prefill = launch::prefill(HEAD_DIM, plan.tiles.len(), HEADS).unwrap();
    launch_blocks(prefill, &prefill_params, RUN, &[HEADS as u32 - 1]).unwrap();
    check("prefill");

    // Every work a block of its own.
    let by_wgmma = launch::prefill_wgmma(HEAD_DIM, plan.tiles.len(), HEADS, u32::MAX).unwrap();
    let layout = KvLayout {
        layers: 1,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        block_tokens: BLOCK_TOKENS,
        blocks: BLOCKS,
    };
    let works = (plan.tiles.len(), by_wgmma.grid);
    let params = PrefillWgmmaParams::new(&prefill_params, POSITIONS, layout, works, map).unwrap();
    launch_blocks(by_wgmma, &params, RUN, &[HEADS as u32 - 1]).unwrap();
    check("prefill by wgmma");

    let plan = AttentionPlan::new(&[decode_span], CUT, visibility).unwrap();
    let mut whole = plan.chunks[1];
    whole.slot = DecodeChunk::WHOLE;
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
        begins_early: 1,
        reserved: 0,
    };
    let decode = launch::decode(HEAD_DIM, 1, HEADS, KV_HEADS).unwrap();
    launch_blocks(decode, &params, RUN, &[KV_HEADS as u32 - 1]).unwrap();
    let at = ((POSITIONS - 1) * HEADS + HEADS - 1) * HEAD_DIM * 2;
    assert_eq!(out.read_at::<u16>(at, HEAD_DIM), numbers(2.0));
    out.write(at, &numbers(0.0));

    // As many blocks of decode as 262,144 sequences have: where a block stands among both kinds is beyond 32 bits.
    let chunks = Buffer::of(&vec![whole; 262_144 / KV_HEADS]);
    let decode = launch::decode(HEAD_DIM, 262_144 / KV_HEADS, HEADS, KV_HEADS).unwrap();
    let mixed = MixedParams {
        prefill: PrefillParams { sequences: whole_prompt.address(), ..prefill_params },
        decode: DecodeParams { chunks: chunks.address(), ..params },
        prefill_blocks: prefill.grid,
        decode_blocks: decode.grid,
    };
    let launch = launch::mixed(HEAD_DIM, prefill, decode).unwrap();
    // One in five prefills: the first of each.
    launch_blocks(launch, &mixed, RUN, &[5 * (HEADS as u32 - 1)]).unwrap();
    check("prefill beside decode");
    launch_blocks(launch, &mixed, RUN, &[launch.grid - 1]).unwrap();
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
    let launch = launch::rope_store(HEAD_DIM, POSITIONS, HEADS, KV_HEADS).unwrap();
    // The last row has the last 20 parts, 8 to a block.
    let blocks: Vec<u32> = (launch.grid - 3..launch.grid).collect();
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

#[test]
fn the_last_of_a_million_pairs_meets_the_last_matrix_of_256_experts() {
    // DeepSeek-V3's first product for a prompt of 128k, with 4224 outputs in place of 4096: so out has more than 2^32 numbers, as w has.
    let (experts, inputs, outputs, top_k) = (256, 7168, 4224, 8);
    let pairs = POSITIONS * top_k;
    let (x, out) = (Buffer::zeroed(POSITIONS * inputs * 2), Buffer::zeroed(pairs * outputs * 2));
    let w = Buffer::zeroed(experts * outputs * inputs * 2);
    let (first, second) = (bf16::from_f32(3.0).to_bits(), bf16::from_f32(0.5).to_bits());
    x.write((POSITIONS * inputs - 1) * 2, &[first]);
    w.write((experts * outputs * inputs - 1) * 2, &[second]);
    let order = Buffer::zeroed(pairs * 4);
    order.write((pairs - 1) * 4, &[pairs as u32 - 1]);
    let most = moe::most_tiles(pairs, experts);
    let (tiles, tile_count) = (Buffer::zeroed(most * size_of::<MoeTile>()), Buffer::of(&[most as u32]));
    let tile = MoeTile { expert: experts as u32 - 1, first: pairs as u32 - 1, end: pairs as u32 };
    tiles.write((most - 1) * size_of::<MoeTile>(), &[tile]);
    let params = MoeGemmParams {
        x: x.address(),
        w: w.address(),
        out: out.address(),
        order: order.address(),
        tiles: tiles.address(),
        tile_count: tile_count.address(),
        inputs: inputs as u32,
        outputs: outputs as u32,
        top_k: top_k as u32,
        reserved: 0,
    };
    let launch = moe::multiply(pairs, experts, inputs, outputs).unwrap();
    launch_blocks(launch, &params, RUN, &[launch.grid - 1]).unwrap();
    let last = bf16::from_bits(out.read_at::<u16>((pairs * outputs - 1) * 2, 1)[0]);
    assert_eq!(last.to_f32(), 1.5);
}

#[test]
fn the_last_of_128k_rows_gets_its_sum() {
    let (width, top_k) = (7168, 8);
    let pairs = POSITIONS * top_k;
    let (from, out) = (Buffer::zeroed(pairs * width * 2), Buffer::zeroed(POSITIONS * width * 4));
    from.write((pairs * width - 1) * 2, &[bf16::from_f32(3.0).to_bits()]);
    out.write((POSITIONS * width - 1) * 4, &[1.0f32]);
    let (weights, places) = (Buffer::zeroed(pairs * 4), Buffer::zeroed(pairs * 4));
    weights.write((pairs - 1) * 4, &[2.0f32]);
    places.write((pairs - 1) * 4, &[pairs as u32 - 1]);
    let params = MoeSumParams {
        from: from.address(),
        weights: weights.address(),
        places: places.address(),
        out: out.address(),
        rows: POSITIONS as u32,
        width: width as u32,
        top_k: top_k as u32,
        reserved: 0,
    };
    let launch = moe::sum(POSITIONS, width).unwrap();
    launch_blocks(launch, &params, RUN, &[launch.grid - 1]).unwrap();
    assert_eq!(out.read_at::<f32>((POSITIONS * width - 1) * 4, 1), [7.0]);
}

#[test]
fn parts_beyond_the_first_4e9_numbers_are_written_and_added_up() {
    const SLOT: u32 = 600_000;
    let (slots, parts) = (SLOT as usize + 2, (SLOT as usize + 2) * HEADS);
    let (partial_sums, partial_logs) = (Buffer::zeroed(parts * HEAD_DIM * 4), Buffer::zeroed(parts * 4));
    let (keys, values) = (pool(), pool());
    let last_block = BLOCKS as u32 - 1;
    for place in 0..BLOCK_TOKENS {
        values.write(offset(last_block, KV_HEADS - 1, place), &numbers(2.0));
    }
    let (q, out) = (Buffer::zeroed(QKV * 2), Buffer::zeroed(POSITIONS * HEADS * HEAD_DIM * 2));
    let table = Buffer::of(&[last_block]);
    let sequence =
        Sequence { first_row: 0, rows: 1, context_tokens: BLOCK_TOKENS as u32 - 1, table_start: 0 };
    let chunk = DecodeChunk { sequence: 0, begin: 0, end: BLOCK_TOKENS as u32, slot: SLOT };
    let (sequences, chunks) = (Buffer::of(&[sequence]), Buffer::of(&[chunk]));
    let params = DecodeParams {
        q: q.address(),
        keys: keys.address(),
        values: values.address(),
        out: out.address(),
        partial_sums: partial_sums.address(),
        partial_logs: partial_logs.address(),
        chunks: chunks.address(),
        sequences: sequences.address(),
        paging: paging(&table),
        heads: HEADS as u32,
        q_stride: QKV as u32,
        out_stride: (HEADS * HEAD_DIM) as u32,
        score_scale: 1.0,
        begins_early: 1,
        reserved: 0,
        ..Default::default()
    };
    let decode = launch::decode(HEAD_DIM, 1, HEADS, KV_HEADS).unwrap();
    launch_blocks(decode, &params, RUN, &[KV_HEADS as u32 - 1]).unwrap();
    let part = (SLOT as usize + 1) * HEADS - 1;
    assert_eq!(partial_sums.read_at::<f32>(part * HEAD_DIM * 4, HEAD_DIM), [2.0; HEAD_DIM]);

    // A second part of the same weight, of fours.
    partial_sums.write((slots * HEADS - 1) * HEAD_DIM * 4, &[4.0f32; HEAD_DIM]);
    let log = partial_logs.read_at::<f32>(part * 4, 1);
    partial_logs.write((slots * HEADS - 1) * 4, &log);
    let merge = Merge { row: POSITIONS as u32 - 1, first_slot: SLOT, slots: 2 };
    let merges = Buffer::of(&[merge]);
    let params = CombineParams {
        partial_sums: partial_sums.address(),
        partial_logs: partial_logs.address(),
        sink_logits: 0,
        merges: merges.address(),
        out: out.address(),
        heads: HEADS as u32,
        out_stride: (HEADS * HEAD_DIM) as u32,
        head_dim: HEAD_DIM as u32,
        ..Default::default()
    };
    let combine = launch::combine(HEAD_DIM, 1, HEADS).unwrap();
    launch_blocks(combine, &params, RUN, &[HEADS as u32 - 1]).unwrap();
    let at = (POSITIONS * HEADS - 1) * HEAD_DIM * 2;
    assert_eq!(out.read_at::<u16>(at, HEAD_DIM), numbers(3.0));
}

#[test]
fn the_last_rows_of_tables_of_4e9_numbers_are_found() {
    let (rows, width) = (262_144, 16_384);
    let out = Buffer::zeroed(width * 4);
    let indices = Buffer::of(&[rows as u32 - 1]);
    let table = Buffer::zeroed(rows * width * 4);
    let params = GatherParams {
        from: table.address(),
        indices: indices.address(),
        out: out.address(),
        width: width as u32,
        reserved: 0,
    };
    // The same memory as bf16, and then as f32: the last of its numbers.
    table.write((rows * width - 1) * 2, &[bf16::from_f32(3.0).to_bits()]);
    launch_blocks(launch::embed(1).unwrap(), &params, RUN, &[]).unwrap();
    assert_eq!(out.read_at::<f32>((width - 1) * 4, 1), [3.0]);
    table.write((rows * width - 1) * 4, &[5.0f32]);
    launch_blocks(launch::select_rows(1).unwrap(), &params, RUN, &[]).unwrap();
    assert_eq!(out.read_at::<f32>((width - 1) * 4, 1), [5.0]);
}

#[test]
fn the_last_row_of_a_matrix_of_4e9_numbers_is_multiplied() {
    let (inputs, outputs) = (16_384, 300_000);
    let ones = vec![bf16::from_f32(1.0).to_bits(); inputs];
    let (x, w) = (Buffer::of(&ones), Buffer::zeroed(outputs * inputs * 2));
    w.write((outputs - 1) * inputs * 2, &ones);
    let out = Buffer::zeroed(outputs * 4);
    let params = LinearFewRowsParams {
        x: x.address(),
        w: w.address(),
        bias: 0,
        out: out.address(),
        rows: 1,
        inputs: inputs as u32,
        outputs: outputs as u32,
        result: FewRowsResult::ReplaceF32 as u32,
    };
    let launch = launch::linear_few_rows(1, outputs, FewRowsResult::ReplaceF32).unwrap();
    launch_blocks(launch, &params, RUN, &[launch.grid - 1]).unwrap();
    assert_eq!(out.read_at::<f32>((outputs - 2) * 4, 2), [0.0, 16_384.0]);
}

#[test]
fn the_last_of_262144_rows_is_normalised() {
    let (rows, width) = (262_144, 16_384);
    let (x, out) = (Buffer::zeroed(rows * width * 4), Buffer::zeroed(rows * width * 2));
    let weight = Buffer::of(&vec![1.0f32; width]);
    x.write((rows - 1) * width * 4, &vec![2.0f32; width]);
    let params = RmsNormParams {
        x: x.address(),
        addend: 0,
        weight: weight.address(),
        out: out.address(),
        width: width as u32,
        eps: 0.0,
    };
    let launch = launch::rms_norm(rows, width).unwrap();
    launch_blocks(launch, &params, RUN, &[launch.grid - 1]).unwrap();
    let one = bf16::from_f32(1.0).to_bits();
    assert!(out.read_at::<u16>((rows - 1) * width * 2, width).iter().all(|&number| number == one));
}

#[test]
fn the_last_of_32768_rows_of_logits_is_adjusted_and_gets_its_token() {
    let (rows, vocab) = (32_768, 151_936);
    let (logits, tokens) = (Buffer::zeroed(rows * vocab * 4), Buffer::zeroed(rows * 4));
    let (changes, penalties) =
        (Buffer::zeroed(size_of::<LogitChange>()), Buffer::zeroed(rows * size_of::<Penalties>()));
    let (row, token) = (rows as u32 - 1, vocab as u32 - 1);
    changes.write(0, &[LogitChange { row, token, bias: 1.0, seen: LogitChange::UNSEEN, withheld: 0 }]);
    let params = AdjustParams {
        logits: logits.address(),
        changes: changes.address(),
        penalties: penalties.address(),
        count: 1,
        vocab: vocab as u32,
    };
    launch_blocks(launch::adjust_logits(1).unwrap(), &params, RUN, &[]).unwrap();
    let draws = Buffer::zeroed(rows * size_of::<Draw>());
    let greedy = Draw { seed: 1, position: 0, temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0 };
    draws.write((rows - 1) * size_of::<Draw>(), &[greedy]);
    let params = SampleParams {
        logits: logits.address(),
        draws: draws.address(),
        tokens: tokens.address(),
        vocab: vocab as u32,
        reserved: 0,
    };
    let launch = launch::sample(rows, vocab).unwrap();
    launch_blocks(launch, &params, RUN, &[launch.grid - 1]).unwrap();
    assert_eq!(tokens.read_at::<u32>((rows - 1) * 4, 1), [vocab as u32 - 1]);
}
