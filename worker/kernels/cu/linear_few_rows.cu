// out = x · wᵀ (+ bias) of at most 16 rows, as of a step that decodes: bound by reading w, by mma.sync for sm_80 and later.
//
// Algorithm: a product with the roles of its operands exchanged: 16 rows of w are the rows of an mma tile, and 8 rows of x its columns.
// Source: known as swap AB, in TensorRT-LLM for example. A block has 32 rows of w, over the inputs in steps of 256, which cp.async
// copies ahead into a ring; each of its eight warps adds up 32 inputs of every step, and at the end the eight sums are added in their
// order. Nothing of it depends on how many rows there are, so that a row's bits do not. Copies of w begin while the kernel before still
// computes x. Of a gated MLP a block has 16 rows of the gate and the same 16 of the up projection, and writes silu(gate) · up.
//
// Shapes: x [rows, inputs] bf16; w [outputs, inputs] bf16, or [2 · outputs, inputs], the gate before the up projection; bias f32, of w's rows;
// out [rows, outputs] in bf16 or f32; inputs and outputs multiples of 8. Grid: a block for each 32 outputs, or 16 of a gated MLP.
//
//   rows   stages   shared memory
//      8      4         80 KiB
//     16      4         96 KiB
//
// Bytes: 2 · inputs · outputs, and x once for each block, from the cache. FLOPs: 2 · inputs · outputs a row.
#include "gate.cuh"
#include "paged.cuh"

struct LinearFewRowsParams {
    const bf16 *x, *w;
    const float* bias; // or null
    void* out;
    u32 rows, inputs, outputs, result;
};
enum Result : u32 { REPLACE_BF16, REPLACE_F32, ADD_TO_F32, GATED_BF16 };

template <int ROWS_, int STAGES_> struct FewRowsShape {
    static constexpr int ROWS = ROWS_, STAGES = STAGES_, OUTPUTS = 32, STEP = 256, WARPS = 8, THREADS = 32 * WARPS;
    static constexpr int X_TILE = ROWS * STEP, STAGE = X_TILE + OUTPUTS * STEP; // numbers
    static constexpr int SHARED_BYTES = STAGES * STAGE * 2;
    // At the end: the warps' sums, [warps, ROWS, OUTPUTS] in f32. Rows are four numbers apart in the banks, so that what a warp stores at once,
    // eight outputs of four rows two apart, lies in different ones.
    static constexpr int SUMS_ROW = OUTPUTS + 4, SUMS = ROWS * SUMS_ROW;
    static_assert(WARPS * SUMS * 4 <= SHARED_BYTES, "the sums lie in the ring");
};

// The first of the block's outputs, and the row of w that is the tile's i-th; beyond the last output when it is none.
struct FewRowsTile {
    u32 first, half; // half of the tile, if that is the gate's
    bool gated;
    DEVICE u32 output(u32 i) const { return first + (gated && i >= half ? i - half : i); }
    DEVICE u64 w_row(u32 i, u32 outputs) const { return output(i) + (gated && i >= half ? (u64)outputs : 0); }
};
template <class S> DEVICE FewRowsTile few_rows_tile(const LinearFewRowsParams& p) {
    const bool gated = p.result == GATED_BF16;
    return {block_index() * (gated ? S::OUTPUTS / 2 : S::OUTPUTS), S::OUTPUTS / 2, gated};
}

// Copies inputs from `first` on: the lane's chunk of every eighth row from the warp's on. What is beyond inputs or outputs becomes zero.
template <class S> DEVICE void copy_w(bf16* stage, const LinearFewRowsParams& p, const FewRowsTile& tile, u32 first) {
    const u32 lane = thread_index() & 31, warp = thread_index() >> 5, column = first + lane * 8;
    UNROLL
    for (int i = 0; i < S::OUTPUTS / S::WARPS; i++) {
        const u32 row = i * S::WARPS + warp;
        const bool valid = column < p.inputs && tile.output(row) < p.outputs;
        const bf16* from = valid ? p.w + tile.w_row(row, p.outputs) * p.inputs + column : p.w;
        cp_async_16(stage + S::X_TILE + swizzled<S::STEP>(row, lane), from, valid);
    }
}
template <class S> DEVICE void copy_x(bf16* stage, const LinearFewRowsParams& p, u32 first) {
    const u32 lane = thread_index() & 31, warp = thread_index() >> 5, column = first + lane * 8;
    UNROLL
    for (int i = 0; i < S::ROWS / S::WARPS; i++) {
        const u32 row = i * S::WARPS + warp;
        const bool valid = column < p.inputs && row < p.rows;
        cp_async_16(stage + swizzled<S::STEP>(row, lane), valid ? p.x + (u64)row * p.inputs + column : p.x, valid);
    }
}

// A warp's: of each 16 outputs and 8 rows a lane holds outputs lane / 4 and that + 8, of rows (lane & 3) · 2 and the next.
template <class S> struct FewRowsSums { float sums[S::OUTPUTS / 16][S::ROWS / 8][4]; };

// Adds the warp's 32 inputs of a step.
template <class S> DEVICE void add_step(FewRowsSums<S>& s, const bf16* stage, u32 warp, u32 lane) {
    u32 x[S::ROWS / 8][4]; // of 8 rows, four chunks of 8 inputs
    UNROLL
    for (int j = 0; j < S::ROWS / 8; j++)
        ldmatrix_x4(x[j], stage + along_row(swizzled<S::STEP>(j * 8 + (lane & 7), lane >> 3), warp * 32));
    const u32 w_place = swizzled<S::STEP>(lane & 15, lane >> 4);
    UNROLL
    for (int i = 0; i < S::OUTPUTS / 16; i++)
        UNROLL
        for (int k = 0; k < 2; k++) {
            u32 w[4];
            ldmatrix_x4(w, stage + S::X_TILE + i * 16 * S::STEP + along_row(w_place, warp * 32 + k * 16));
            UNROLL
            for (int j = 0; j < S::ROWS / 8; j++) mma_bf16(s.sums[i][j], w, x[j][2 * k], x[j][2 * k + 1]);
        }
}

template <class S> DEVICE void put_sums(const FewRowsSums<S>& s, float* to, u32 lane) {
    UNROLL
    for (int i = 0; i < S::OUTPUTS / 16; i++)
        UNROLL
        for (int j = 0; j < S::ROWS / 8; j++)
            UNROLL
            for (int e = 0; e < 4; e++) {
                const u32 row = j * 8 + (lane & 3) * 2 + (e & 1), output = i * 16 + (lane >> 2) + (e >> 1) * 8;
                store_shared(to + row * S::SUMS_ROW + output, s.sums[i][j][e]);
            }
}

// The sum of the warps' sums of one output, and its bias.
template <class S> DEVICE float all_of(const float* sums, const LinearFewRowsParams& p, u32 row, u32 in_tile, u64 w_row) {
    float sum = 0.f;
    UNROLL
    for (int warp = 0; warp < S::WARPS; warp++) sum += load_shared(sums + warp * S::SUMS + row * S::SUMS_ROW + in_tile);
    return p.bias ? sum + p.bias[w_row] : sum;
}

template <class S> DEVICE void write_outputs(const float* sums, const LinearFewRowsParams& p, const FewRowsTile& tile) {
    const u32 outputs = tile.gated ? tile.half : S::OUTPUTS;
    for (u32 i = thread_index(); i < S::ROWS * outputs; i += S::THREADS) {
        const u32 row = i / outputs, in_tile = i % outputs, output = tile.output(in_tile);
        if (row >= p.rows || output >= p.outputs) continue;
        const u64 place = (u64)row * p.outputs + output;
        const float sum = all_of<S>(sums, p, row, in_tile, output);
        if (p.result == REPLACE_BF16) ((bf16*)p.out)[place] = float_to_bf16(sum);
        if (p.result == REPLACE_F32) ((float*)p.out)[place] = sum;
        if (p.result == ADD_TO_F32) ((float*)p.out)[place] += sum;
        if (p.result == GATED_BF16) {
            const u32 up = in_tile + tile.half;
            ((bf16*)p.out)[place] = float_to_bf16(silu_mul_one(sum, all_of<S>(sums, p, row, up, tile.w_row(up, p.outputs))));
        }
    }
}

template <class S> DEVICE void linear_few_rows(const LinearFewRowsParams& p, unsigned char* shared) {
    const FewRowsTile tile = few_rows_tile<S>(p);
    const u32 steps = (p.inputs + S::STEP - 1) / S::STEP, lane = thread_index() & 31, warp = thread_index() >> 5;
    bf16* ring = (bf16*)shared;
    let_next_begin();
    UNROLL
    for (int i = 0; i < S::STAGES - 1; i++) copy_w<S>(ring + i * S::STAGE, p, tile, i * S::STEP);
    wait_for_before(); // x, and what is added to, is there from here on
    UNROLL
    for (int i = 0; i < S::STAGES - 1; i++) {
        copy_x<S>(ring + i * S::STAGE, p, i * S::STEP);
        cp_async_commit(); // with the first, all of w so far
    }
    FewRowsSums<S> sums = {};
    for (u32 i = 0; i < steps; i++) {
        cp_async_wait<S::STAGES - 2>(); // this thread's part of step i is here
        barrier();                      // everybody's; and all are done with step i - 1, whose stage is filled next
        const u32 next = i + S::STAGES - 1;
        bf16* stage = ring + next % S::STAGES * S::STAGE;
        copy_w<S>(stage, p, tile, next * S::STEP);
        copy_x<S>(stage, p, next * S::STEP);
        cp_async_commit();
        add_step<S>(sums, ring + i % S::STAGES * S::STAGE, warp, lane);
    }
    cp_async_wait<0>(); // of steps behind the last, which only fill with zeros
    barrier();
    float* all = (float*)shared;
    put_sums<S>(sums, all + warp * S::SUMS, lane);
    barrier();
    write_outputs<S>(all, p, tile);
}

using FewRows8 = FewRowsShape<8, 4>;
using FewRows16 = FewRowsShape<16, 4>;

KERNEL_AHEAD(linear_few_rows_8, LinearFewRowsParams, FewRows8::THREADS, 2, FewRows8::SHARED_BYTES) { linear_few_rows<FewRows8>(p, shared_memory()); }
KERNEL_AHEAD(linear_few_rows_16, LinearFewRowsParams, FewRows16::THREADS, 2, FewRows16::SHARED_BYTES) { linear_few_rows<FewRows16>(p, shared_memory()); }
