// Adds up the parts that attention_decode.cu left of rows whose context was split.
//
// Algorithm: the second half of Flash-Decoding (Dao, Haziza, Massa & Sizov 2023): the parts' rows, each divided by its own total, are
// weighted by those totals; the highest logarithm is taken off first, so that nothing overflows. A learned sink (see
// attention_prefill.cu) joins the total here, once for the row. A block's threads stand in GROUPS of head_dim / 4, which take every
// GROUPS-th part, so that a long context's parts do not wait for each other one by one; the groups' sums are added in their order. So
// the order of a row's additions follows from the number of its parts alone.
//
// Shapes: partial_sums [slots, heads, head_dim], partial_logs [slots, heads], f32; out [rows, out_stride], bf16.
// Grid: one block of 128 threads for each (merge, head). Bytes: 4 · head_dim + 4 for each part and head, and the logs once more for
// each group, from the cache. FLOPs: 4 a number of a part.
#include "reduce.cuh"

struct Merge { u32 row, first_slot, slots; };

struct CombineParams {
    const float *partial_sums, *partial_logs;
    const float* sink_logits; // [heads], or null
    const Merge* merges;
    bf16* out;
    u32 heads, out_stride, head_dim;
};

// Shared memory: a number for each warp, then each thread's sums, then the groups' totals.
static constexpr u32 COMBINE_THREADS = 128, SUMS = 32, TOTALS = SUMS + 4 * COMBINE_THREADS, COMBINE_FLOATS = TOTALS + COMBINE_THREADS;

KERNEL(attention_combine, CombineParams, COMBINE_THREADS, 8, COMBINE_FLOATS * sizeof(float)) {
    float* shared = (float*)shared_memory();
    const u32 head = block_index() % p.heads, lanes = p.head_dim / 4, groups = COMBINE_THREADS / lanes; // of a group; 8, 4 or 2
    const u32 group = thread_index() / lanes, column = thread_index() % lanes * 4;
    const Merge merge = p.merges[block_index() / p.heads];
    const u64 first = (u64)merge.first_slot * p.heads + head;

    float highest = -infinity();
    for (u32 i = thread_index(); i < merge.slots; i += COMBINE_THREADS) highest = maximum(highest, p.partial_logs[first + (u64)i * p.heads]);
    highest = over_block<Highest>(highest, shared);

    float sums[4] = {}, total = 0.f;
    for (u32 i = group; i < merge.slots; i += groups) {
        const u64 part = first + (u64)i * p.heads;
        const float weight = exp2_approx(p.partial_logs[part] - highest);
        const Chunk16 numbers = load_global_16(p.partial_sums + part * p.head_dim + column);
        total += weight;
        UNROLL
        for (int e = 0; e < 4; e++) sums[e] += weight * bits_to_float(numbers.words[e]);
    }
    UNROLL
    for (int e = 0; e < 4; e++) store_shared(shared + SUMS + 4 * thread_index() + e, sums[e]);
    if (column == 0) store_shared(shared + TOTALS + group, total);
    barrier();

    if (group != 0) return;
    if (p.sink_logits) total += exp2_approx(p.sink_logits[head] * LOG2_E - highest);
    for (u32 other = 1; other < groups; other++) {
        total += load_shared(shared + TOTALS + other);
        UNROLL
        for (int e = 0; e < 4; e++) sums[e] += load_shared(shared + SUMS + 4 * (other * lanes) + column + e);
    }
    u32* to = (u32*)(p.out + (u64)merge.row * p.out_stride + head * p.head_dim + column);
    to[0] = pack_bf16(divide(sums[0], total), divide(sums[1], total));
    to[1] = pack_bf16(divide(sums[2], total), divide(sums[3], total));
}
