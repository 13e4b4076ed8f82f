// What a row's experts gave, weighed and added to the residual stream.
//
// Algorithm: the gated sum of Shazeer et al. 2017, slot by slot, in the order of moe_route.cu: the same sum for a row whatever else
// is in the batch.
//
// Shapes: from [places, width] bf16; weights [rows, top_k] f32; places [rows · top_k]; out [rows, width] f32, added to; width a
// multiple of 8. Grid: a thread for each 8 numbers of out. Bytes: 2 · top_k + 8 a number of out. FLOPs: 2 · top_k.
#include "dev.cuh"

struct MoeSumParams {
    const bf16* from;
    const float* weights;
    const u32* places;
    float* out;
    u32 rows, width, top_k;
};

KERNEL(moe_sum, MoeSumParams, 256, 4, 0) {
    const u64 index = ((u64)block_index() * block_threads() + thread_index()) * 8;
    const u64 row = index / p.width, column = index % p.width;
    if (row >= p.rows) return;
    float sums[8] = {};
    for (u32 slot = 0; slot < p.top_k; slot++) {
        const u64 pair = row * p.top_k + slot;
        const float weight = p.weights[pair];
        const Chunk16 numbers = load_global_16(p.from + (u64)p.places[pair] * p.width + column);
        UNROLL
        for (int i = 0; i < 4; i++) {
            sums[2 * i] += weight * bf16_low(numbers.words[i]);
            sums[2 * i + 1] += weight * bf16_high(numbers.words[i]);
        }
    }
    UNROLL
    for (int half = 0; half < 2; half++) {
        Chunk16 stream = *(const Chunk16*)(p.out + index + 4 * half); // not by load_global_16: it is written here
        UNROLL
        for (int i = 0; i < 4; i++) stream.words[i] = float_to_bits(bits_to_float(stream.words[i]) + sums[4 * half + i]);
        store_global_16(p.out + index + 4 * half, stream);
    }
}
