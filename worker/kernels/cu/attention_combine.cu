// Adds up the parts that attention_decode.cu left of rows whose context was split.
//
// Algorithm: the second half of Flash-Decoding (Dao, Haziza, Massa & Sizov 2023): the parts' rows, each divided by its own total, are
// weighted by those totals; the highest logarithm is taken off first, so that nothing overflows. A learned sink (see
// attention_prefill.cu) joins the total here, once for the row. Parts are added in the order of their slots, which is that of their
// positions.
//
// Shapes: partial_sums [slots, heads, head_dim], partial_logs [slots, heads], f32; out [rows, out_stride], bf16.
// Grid: one block of head_dim / 2 threads for each (merge, head). Bytes: 4 · head_dim + 4 for each part and head, two times the logs.
// FLOPs: 4 a number of a part.
#include "dev.cuh"

struct Merge { u32 row, first_slot, slots; };

struct CombineParams {
    const float *partial_sums, *partial_logs;
    const float* sink_logits; // [heads], or null
    const Merge* merges;
    bf16* out;
    u32 heads, out_stride;
};

KERNEL(attention_combine, CombineParams, 128, 8, 0) {
    const u32 head = block_index() % p.heads, head_dim = 2 * block_threads(), column = 2 * thread_index();
    const Merge merge = p.merges[block_index() / p.heads];
    const u64 first = (u64)merge.first_slot * p.heads + head;

    float highest = -infinity();
    for (u32 i = 0; i < merge.slots; i++) highest = maximum(highest, p.partial_logs[first + (u64)i * p.heads]);
    float total = p.sink_logits ? exp2_approx(p.sink_logits[head] * LOG2_E - highest) : 0.f, low = 0.f, high = 0.f;
    for (u32 i = 0; i < merge.slots; i++) {
        const u64 part = first + (u64)i * p.heads;
        const float weight = exp2_approx(p.partial_logs[part] - highest);
        total += weight;
        low += weight * p.partial_sums[part * head_dim + column];
        high += weight * p.partial_sums[part * head_dim + column + 1];
    }
    *(u32*)(p.out + (u64)merge.row * p.out_stride + head * head_dim + column) = pack_bf16(divide(low, total), divide(high, total));
}
