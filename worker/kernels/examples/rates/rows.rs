//! What goes row by row: norm, rotary embedding and store, gate, embedding, experts, sampling.

use worker_kernels::cuda::moe::{self, MoeGemmParams, MoeGroupParams, MoeTile};
use worker_kernels::cuda::params::{
    Draw, FewRowsResult, GatherParams, LinearFewRowsParams, Paging, RmsNormParams, RopeStoreParams,
    SampleParams, SiluMulParams,
};
use worker_kernels::cuda::{Memory, launch};

use crate::{Rates, Work};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const BLOCK_TOKENS: usize = 16;
const ROWS: usize = 16_384;

pub(crate) fn rms_norm(rates: &mut Rates) {
    let (rows, width) = (rates.length(ROWS), rates.length(4096).next_multiple_of(8));
    let (x, weight) = (rates.random_f32(rows * width), rates.random_f32(width));
    let out = rates.empty(rows * width * 2);
    let params = RmsNormParams {
        x: x.address(),
        addend: 0,
        weight: weight.address(),
        out: out.address(),
        width: width as u32,
        eps: 1e-5,
    };
    let launch = launch::rms_norm(rows, width).unwrap();
    let work = Work::Bytes(6.0 * (rows * width) as f64);
    rates.measure(&format!("rms_norm of {rows} x {width}"), work, || rates.launch(launch, &params));
}

/// QK-norm, rotary embedding and store in one.
pub(crate) fn rope_store(rates: &mut Rates) {
    let (rows, head_dim) = (rates.length(ROWS), 128);
    let width = (HEADS + 2 * KV_HEADS) * head_dim;
    let (qkv, angles) = (rates.random_bf16(rows * width), rates.random_f32(rows * head_dim));
    let pool_bytes = rows.next_multiple_of(BLOCK_TOKENS) * KV_HEADS * head_dim * 2;
    let (keys, values) = (rates.empty(pool_bytes), rates.empty(pool_bytes));
    let norm = rates.random_f32(head_dim);
    let slots = rates.upload(&(0..rows as u32).collect::<Vec<u32>>());
    let params = RopeStoreParams {
        qkv: qkv.address(),
        keys: keys.address(),
        values: values.address(),
        query_norm: norm.address(),
        key_norm: norm.address(),
        angles: angles.address(),
        slots: slots.address(),
        paging: Paging { block_tables: 0, kv_heads: KV_HEADS as u32, block_shift: BLOCK_TOKENS.ilog2() },
        rows: rows as u32,
        heads: HEADS as u32,
        qkv_stride: width as u32,
        eps: 1e-5,
        ..Default::default()
    };
    let launch = launch::rope_store(head_dim, rows, HEADS, KV_HEADS).unwrap();
    let work = Work::Bytes((4 * rows * width + 4 * rows * head_dim) as f64);
    let what = format!("QK-norm, rope and store of {rows} rows, head_dim {head_dim}");
    rates.measure(&what, work, || rates.launch(launch, &params));
}

pub(crate) fn silu_mul(rates: &mut Rates) {
    let (rows, width) = (rates.length(ROWS), rates.length(12_288).next_multiple_of(8));
    let (gate_up, out) = (rates.random_bf16(2 * rows * width), rates.empty(rows * width * 2));
    let params = SiluMulParams {
        gate_up: gate_up.address(),
        out: out.address(),
        rows: rows as u32,
        width: width as u32,
    };
    let launch = launch::silu_mul(rows, width).unwrap();
    let work = Work::Bytes(6.0 * (rows * width) as f64);
    rates.measure(&format!("silu_mul of {rows} x {width}"), work, || rates.launch(launch, &params));
}

/// Products of few rows, in the shapes of Llama-3.1-8B's layers. Each shape's matrices are so many that none is in the cache when it is read again.
pub(crate) fn linear_few_rows(rates: &mut Rates) {
    let shapes = [
        ("qkv", 4096, 6144, FewRowsResult::ReplaceBf16),
        ("output", 4096, 4096, FewRowsResult::AddToF32),
        ("gate and up", 4096, 14_336, FewRowsResult::GatedBf16),
        ("down", 14_336, 4096, FewRowsResult::AddToF32),
    ];
    for (name, inputs, outputs, result) in shapes {
        let (inputs, outputs) =
            (rates.length(inputs).next_multiple_of(8), rates.length(outputs).next_multiple_of(8));
        let of_an_output = if result == FewRowsResult::GatedBf16 { 2 } else { 1 };
        let numbers = inputs * outputs * of_an_output;
        let some = rates.random_bf16(numbers);
        let matrices: Vec<_> = (0..(1usize << 28).div_ceil(numbers).min(8))
            .map(|_| {
                let matrix = rates.empty(2 * numbers);
                matrix.copy_from(&some).unwrap();
                matrix
            })
            .collect();
        let (x, out) = (rates.random_bf16(16 * inputs), rates.empty(16 * outputs * 4));
        for rows in [1, 8, 16] {
            let launch = launch::linear_few_rows(rows, outputs, result).unwrap();
            let params = |matrix: &Memory| LinearFewRowsParams {
                x: x.address(),
                w: matrix.address(),
                bias: 0,
                out: out.address(),
                rows: rows as u32,
                inputs: inputs as u32,
                outputs: outputs as u32,
                result: result as u32,
            };
            let work = Work::Bytes((2 * numbers * matrices.len()) as f64);
            let what = format!("{} products of {rows} rows, {name}: {inputs} to {outputs}", matrices.len());
            rates.measure(&what, work, || {
                matrices.iter().try_for_each(|matrix| rates.launch(launch, &params(matrix)))
            });
        }
    }
}

/// Every row of the table once, in disorder.
pub(crate) fn embed(rates: &mut Rates) {
    let (rows, width) = (rates.length(ROWS * 4), rates.length(4096).next_multiple_of(8));
    let (table, out) = (rates.random_bf16(rows * width), rates.empty(rows * width * 4));
    // An odd factor visits every row of a power of two once.
    let indices: Vec<u32> = (0..rows).map(|row| (row * 48_271 % rows) as u32).collect();
    let indices = rates.upload(&indices);
    let params = GatherParams {
        from: table.address(),
        indices: indices.address(),
        out: out.address(),
        width: width as u32,
        reserved: 0,
    };
    let launch = launch::embed(rows).unwrap();
    let work = Work::Bytes(6.0 * (rows * width) as f64);
    rates.measure(&format!("embed {rows} rows of {width}"), work, || rates.launch(launch, &params));
}

/// The first product of a mixture of experts (Qwen3-30B-A3B's), rows spread evenly over them.
pub(crate) fn moe_gemm(rates: &mut Rates, rows: usize) {
    let rows = rates.length(rows);
    let (experts, top_k) = (rates.length(128).min(128), 8);
    let (inputs, outputs) = (rates.length(2048).next_multiple_of(8), rates.length(1536).next_multiple_of(8));
    let pairs = rows * top_k;
    let (x, w) = (rates.random_bf16(rows * inputs), rates.random_bf16(experts * outputs * inputs));
    let out = rates.empty(pairs * outputs * 2);
    let chosen: Vec<u32> = (0..pairs).map(|pair| (pair % experts) as u32).collect();
    let (chosen, order, places) = (rates.upload(&chosen), rates.empty(pairs * 4), rates.empty(pairs * 4));
    let tiles = rates.empty(moe::most_tiles(pairs, experts) * size_of::<MoeTile>());
    let tile_count = rates.empty(4);
    let group = MoeGroupParams {
        chosen: chosen.address(),
        order: order.address(),
        places: places.address(),
        tiles: tiles.address(),
        tile_count: tile_count.address(),
        pairs: pairs as u32,
        experts: experts as u32,
    };
    rates.launch(moe::group(pairs, experts).unwrap(), &group).unwrap();
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
    // See cu/moe_gemm.cu on what bounds it.
    let work = if pairs / experts < 200 {
        Work::Bytes(2.0 * (experts.min(pairs) * outputs * inputs + pairs * (inputs + outputs)) as f64)
    } else {
        Work::Flops(2.0 * (pairs * inputs * outputs) as f64)
    };
    let what = format!("moe_gemm of {rows} rows, {top_k} of {experts} experts, {inputs} to {outputs}");
    rates.measure(&what, work, || rates.launch(launch, &params));
}

/// Logits of 256 rows, which no cache holds.
pub(crate) fn sample(rates: &mut Rates) {
    let (rows, vocab) = (rates.length(256), rates.length(151_936));
    let (logits, tokens) = (rates.random_f32(rows * vocab), rates.empty(rows * 4));
    for (name, top_k, top_p) in [("plain", 0, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)] {
        let draw = Draw { seed: 1, position: 0, temperature: 0.1, top_p, min_p: 0.0, top_k };
        let draws = rates.upload(&vec![draw; rows]);
        let params = SampleParams {
            logits: logits.address(),
            draws: draws.address(),
            tokens: tokens.address(),
            vocab: vocab as u32,
            reserved: 0,
        };
        let launch = launch::sample(rows, vocab).unwrap();
        let what = format!("sample of {rows} x {vocab}, {name}");
        rates.measure(&what, Work::Bytes(4.0 * (rows * vocab) as f64), || rates.launch(launch, &params));
    }
}
