// The products of a mixture of experts: every pair's row times its expert's matrix, out = x · w[expert]ᵀ, by mma.sync for sm_80 and
// later.
//
// Algorithm: grouped products (MegaBlocks, Gale et al. 2022). A block computes MOE_TILE_PAIRS places by TILE_OUTPUTS outputs of one
// expert, over the inputs in steps of TILE_INPUTS which cp.async copies two ahead into a ring of three stages. Sums are f32. The
// first product of an expert takes rows by the pairs' numbers (order, top_k), the second by place. Which expert a tile has is read on
// the device (moe_group.cu): no host waits for it.
//
// Shapes: x [rows or places, inputs] bf16; w [experts, outputs, inputs] bf16; out [places, outputs] bf16; inputs and outputs
// multiples of 8. Grid: one block for each (tile that there may be, TILE_OUTPUTS outputs), outputs fastest, so that blocks at one
// time share rows of x.
//
//   places × outputs × inputs of a step   warps   of a warp   stages   shared memory
//             64 × 128 × 64                 4      32 × 64       3        72 KiB
//
// FLOPs: 2 · inputs · outputs a pair. Bytes, at least: w of every expert that has pairs, once for each of its tiles; 2 · (inputs +
// outputs) a pair. With fewer pairs an expert than about 200 (an H200: 800 TFLOP/s at 4.3 TB/s, 2 FLOPs a byte and pair), as in
// decoding, it is bound by memory.
#include "moe.cuh"
#include "paged.cuh"

struct MoeGemmParams {
    const bf16 *x, *w;
    bf16* out;
    const u32* order; // or null: x is in the order of places
    const MoeTile* tiles;
    const u32* tile_count;
    u32 inputs, outputs, top_k;
};

static constexpr int TILE_OUTPUTS = 128, TILE_INPUTS = 64, STAGES = 3, GEMM_THREADS = 128;
static constexpr int X_TILE = MOE_TILE_PAIRS * TILE_INPUTS, STAGE = X_TILE + TILE_OUTPUTS * TILE_INPUTS; // numbers
static constexpr int CHUNKS = TILE_INPUTS / 8, ROWS_AT_ONCE = GEMM_THREADS / CHUNKS;                   // 16-byte chunks of a row
static constexpr int X_COPIES = MOE_TILE_PAIRS / ROWS_AT_ONCE, W_COPIES = TILE_OUTPUTS / ROWS_AT_ONCE;
static constexpr int GEMM_SHARED_BYTES = STAGES * STAGE * 2;

// What one thread copies: the same chunk of every ROWS_AT_ONCE-th row.
struct Sources {
    const bf16* x[X_COPIES]; // null beyond the tile's end
    const bf16* w;
    u32 row, chunk, outputs_left;
};

DEVICE Sources sources(const MoeGemmParams& p, const MoeTile& tile, u32 first_output) {
    Sources s;
    s.row = thread_index() / CHUNKS;
    s.chunk = thread_index() % CHUNKS;
    s.outputs_left = p.outputs - first_output;
    s.w = p.w + ((u64)tile.expert * p.outputs + first_output + s.row) * p.inputs + s.chunk * 8;
    UNROLL
    for (int i = 0; i < X_COPIES; i++) {
        const u32 place = tile.first + i * ROWS_AT_ONCE + s.row;
        s.x[i] = nullptr;
        if (place < tile.end) s.x[i] = p.x + (u64)(p.order ? p.order[place] / p.top_k : place) * p.inputs + s.chunk * 8;
    }
    return s;
}

// Copies inputs [first, first + TILE_INPUTS), in one group; what is beyond the tile's rows, the outputs or the inputs becomes zero.
DEVICE void copy_step(bf16* stage, const MoeGemmParams& p, const Sources& s, u32 first) {
    const bool column = first + s.chunk * 8 < p.inputs;
    UNROLL
    for (int i = 0; i < X_COPIES; i++) {
        const bool valid = column && s.x[i];
        cp_async_16(stage + swizzled<TILE_INPUTS>(i * ROWS_AT_ONCE + s.row, s.chunk), valid ? s.x[i] + first : p.x, valid);
    }
    UNROLL
    for (int i = 0; i < W_COPIES; i++) {
        const bool valid = column && i * ROWS_AT_ONCE + s.row < s.outputs_left;
        const bf16* from = valid ? s.w + (u64)(i * ROWS_AT_ONCE) * p.inputs + first : p.w;
        cp_async_16(stage + X_TILE + swizzled<TILE_INPUTS>(i * ROWS_AT_ONCE + s.row, s.chunk), from, valid);
    }
    cp_async_commit();
}

// A warp's sums: lane l holds rows l / 4 and l / 4 + 8 of each band of 16, and two columns of every eight.
struct MoeSums { float sums[2][8][4]; };

DEVICE void multiply_step(MoeSums& s, const bf16* stage, u32 warp_row, u32 warp_output, u32 lane) {
    const u32 x_place = swizzled<TILE_INPUTS>(warp_row + (lane & 15), lane >> 4);
    const u32 w_place = swizzled<TILE_INPUTS>(warp_output + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    UNROLL
    for (int k = 0; k < TILE_INPUTS / 16; k++) {
        u32 a[2][4];
        UNROLL
        for (int band = 0; band < 2; band++) ldmatrix_x4(a[band], stage + along_row(x_place, k * 16) + band * 16 * TILE_INPUTS);
        UNROLL
        for (int j = 0; j < 4; j++) {
            u32 b[4];
            ldmatrix_x4(b, stage + X_TILE + along_row(w_place, k * 16) + j * 16 * TILE_INPUTS);
            UNROLL
            for (int band = 0; band < 2; band++) {
                mma_bf16(s.sums[band][2 * j], a[band], b[0], b[1]);
                mma_bf16(s.sums[band][2 * j + 1], a[band], b[2], b[3]);
            }
        }
    }
}

DEVICE void write_sums(const MoeSums& s, const MoeGemmParams& p, const MoeTile& tile, u32 warp_row, u32 first_output, u32 lane) {
    UNROLL
    for (int band = 0; band < 2; band++)
        UNROLL
        for (int r = 0; r < 2; r++) {
            const u32 place = tile.first + warp_row + band * 16 + (lane >> 2) + r * 8;
            if (place >= tile.end) continue;
            bf16* row = p.out + (u64)place * p.outputs;
            UNROLL
            for (int j = 0; j < 8; j++) {
                const u32 output = first_output + j * 8 + (lane & 3) * 2;
                if (output < p.outputs) *(u32*)(row + output) = pack_bf16(s.sums[band][j][2 * r], s.sums[band][j][2 * r + 1]);
            }
        }
}

KERNEL(moe_gemm, MoeGemmParams, GEMM_THREADS, 2, GEMM_SHARED_BYTES) {
    const u32 output_tiles = (p.outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, tile_index = block_index() / output_tiles;
    if (tile_index >= *p.tile_count) return;
    const MoeTile tile = p.tiles[tile_index];
    const u32 first_output = block_index() % output_tiles * TILE_OUTPUTS, steps = (p.inputs + TILE_INPUTS - 1) / TILE_INPUTS;
    const u32 lane = thread_index() & 31, warp = thread_index() >> 5, warp_row = (warp & 1) * 32, warp_output = (warp >> 1) * 64;
    bf16* ring = (bf16*)shared_memory();
    const Sources s = sources(p, tile, first_output);
    UNROLL
    for (int i = 0; i < STAGES - 1; i++) copy_step(ring + i * STAGE, p, s, i * TILE_INPUTS);
    MoeSums sums = {};
    for (u32 i = 0; i < steps; i++) {
        cp_async_wait<STAGES - 2>(); // this thread's part of step i is here
        barrier();                   // everybody's; and all are done with step i - 1, whose stage is filled next
        copy_step(ring + (i + STAGES - 1) % STAGES * STAGE, p, s, (i + STAGES - 1) * TILE_INPUTS);
        multiply_step(sums, ring + i % STAGES * STAGE, warp_row, warp_output, lane);
    }
    cp_async_wait<0>(); // of steps behind the last, which only fill with zeros
    write_sums(sums, p, tile, warp_row, first_output + warp_output, lane);
}
