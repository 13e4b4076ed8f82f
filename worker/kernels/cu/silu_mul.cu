// The gate of a gated MLP: out = silu(gate) · up (Shazeer 2020, "GLU Variants Improve Transformer").
//
// Algorithm: number by number, in f32, rounded once.
//
// Shapes: gate_up [rows, 2 · width] bf16, the gate before the up projection; out [rows, width] bf16; width a multiple of 8.
// Grid: a thread for each 8 numbers of out, 256 to a block. Bytes: 6 a number of out. FLOPs: 5.
#include "gate.cuh"

struct SiluMulParams {
    const bf16* gate_up;
    bf16* out;
    u32 rows, width;
};

KERNEL(silu_mul, SiluMulParams, 256, 4, 0) {
    const u64 index = ((u64)block_index() * block_threads() + thread_index()) * 8;
    const u64 row = index / p.width, column = index % p.width;
    if (row >= p.rows) return;
    const bf16* from = p.gate_up + row * 2 * p.width + column;
    const Chunk16 gate = load_global_16(from), up = load_global_16(from + p.width);
    Chunk16 out;
    UNROLL
    for (int i = 0; i < 4; i++)
        out.words[i] = pack_bf16(silu_mul_one(bf16_low(gate.words[i]), bf16_low(up.words[i])),
                                 silu_mul_one(bf16_high(gate.words[i]), bf16_high(up.words[i])));
    store_global_16(p.out + index, out);
}
