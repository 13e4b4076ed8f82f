// Rows picked by number: tokens from the embedding table (bf16, widened to the f32 stream), and the rows of the stream that sample.
//
// Algorithm: a block copies a row, 16 bytes of what it writes a thread at a time. Source: the definition, out[i] = table[indices[i]], as `read_row` of
// worker/kernels/src/cpu/matrix.rs has it.
//
// Shapes: table [.., width] bf16 or x [.., width] f32; indices [rows]; out [rows, width] f32; width a multiple of 8.
// Grid: one block for each row. Bytes: 6 a number for embed, 8 for select_rows. FLOPs: none. The host has checked the indices.
#include "dev.cuh"

struct GatherParams {
    const void* from;
    const u32* indices;
    float* out;
    u32 width;
};

KERNEL(embed, GatherParams, 128, 8, 0) {
    const bf16* row = (const bf16*)p.from + (u64)p.indices[block_index()] * p.width;
    float* out = p.out + (u64)block_index() * p.width;
    // Four numbers, so that the lanes of a warp write one behind another.
    for (u32 i = thread_index() * 4; i < p.width; i += block_threads() * 4) {
        const Chunk8 numbers = load_global_8(row + i);
        Chunk16 wide;
        UNROLL
        for (int pair = 0; pair < 2; pair++) {
            wide.words[2 * pair] = float_to_bits(bf16_low(numbers.words[pair]));
            wide.words[2 * pair + 1] = float_to_bits(bf16_high(numbers.words[pair]));
        }
        store_global_16(out + i, wide);
    }
}

KERNEL(select_rows, GatherParams, 128, 8, 0) {
    const float* row = (const float*)p.from + (u64)p.indices[block_index()] * p.width;
    float* out = p.out + (u64)block_index() * p.width;
    for (u32 i = thread_index() * 4; i < p.width; i += block_threads() * 4) store_global_16(out + i, load_global_16(row + i));
}
