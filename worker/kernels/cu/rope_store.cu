// What happens to queries, keys and values between their projection and attention, in one pass: QK-norm, rotary embedding, store.
//
// Algorithm: queries and keys are normalised head by head where there is a weight for it (Qwen3's QK-norm, as rms_norm.cu), then
// turned where there are angles: pairs (i, i + head_dim / 2) by the angle of their row (RoFormer, Su et al. 2021, in the order of
// Hugging Face's rotate_half). Queries are written back in place, keys and values to their slots of the pool. A row without a slot is
// not stored.
//
// Shapes: qkv [rows, qkv_stride] bf16, a row being heads queries, kv_heads keys, kv_heads values, each head_dim; angles [..,
// head_dim] f32, half cosines and then half sines, row positions[row] of it (or row itself); pool as in paged.cuh; slot = block ·
// block_tokens + place. Grid: one warp for each (row, head of all three kinds). Bytes: 4 a number of qkv. FLOPs: up to 10 a number.
#include "paged.cuh"
#include "reduce.cuh"

static constexpr u32 NO_SLOT = 0xffffffffu;

struct RopeStoreParams {
    bf16 *qkv, *keys, *values;
    const float *query_norm, *key_norm; // [head_dim], or null
    const float* angles;                // or null
    const u32* positions;               // [rows], or null
    const u32* slots;                   // [rows], or null
    Paging paging;                      // block_tables is not read
    u32 rows, heads, qkv_stride;
    float eps;
};

template <int HEAD_DIM> DEVICE void rope_store(const RopeStoreParams& p) {
    constexpr int PAIRS = HEAD_DIM / 64; // of a lane: numbers i and i + head_dim / 2
    struct alignas(2 * PAIRS) Numbers { bf16 at[PAIRS]; };
    const u32 lane = thread_index() & 31, all_heads = p.heads + 2 * p.paging.kv_heads;
    const u64 warp = (u64)block_index() * (block_threads() / 32) + (thread_index() >> 5);
    const u64 row = warp / all_heads;
    const u32 head = (u32)(warp % all_heads), column = lane * PAIRS;
    if (row >= p.rows) return;
    bf16* from = p.qkv + row * p.qkv_stride + (u64)head * HEAD_DIM;
    const bool is_query = head < p.heads, is_value = head >= p.heads + p.paging.kv_heads;
    Numbers low = *(const Numbers*)(from + column), high = *(const Numbers*)(from + HEAD_DIM / 2 + column);

    if (!is_value) {
        float x[PAIRS], y[PAIRS], squares = 0.f;
        UNROLL
        for (int i = 0; i < PAIRS; i++) {
            x[i] = bf16_to_float(low.at[i]), y[i] = bf16_to_float(high.at[i]);
            squares += x[i] * x[i] + y[i] * y[i];
        }
        const float* weight = is_query ? p.query_norm : p.key_norm;
        if (weight) {
            const float scale = divide(1.f, square_root(over_warp<Sum>(squares) / HEAD_DIM + p.eps));
            UNROLL
            for (int i = 0; i < PAIRS; i++) {
                x[i] = x[i] * scale * weight[column + i];
                y[i] = y[i] * scale * weight[HEAD_DIM / 2 + column + i];
            }
        }
        if (p.angles) {
            const float* angles = p.angles + (u64)(p.positions ? p.positions[row] : row) * HEAD_DIM;
            UNROLL
            for (int i = 0; i < PAIRS; i++) {
                const float cosine = angles[column + i], sine = angles[HEAD_DIM / 2 + column + i], a = x[i], b = y[i];
                x[i] = a * cosine - b * sine;
                y[i] = b * cosine + a * sine;
            }
        }
        UNROLL
        for (int i = 0; i < PAIRS; i++) low.at[i] = float_to_bf16(x[i]), high.at[i] = float_to_bf16(y[i]);
    }

    bf16* to = from;
    if (!is_query && p.slots) {
        const u32 slot = p.slots[row], mask = (1u << p.paging.block_shift) - 1;
        if (slot == NO_SLOT) return;
        const u32 kv_head = head - p.heads - (is_value ? p.paging.kv_heads : 0);
        to = (is_value ? p.values : p.keys) + slot_offset<HEAD_DIM>(p.paging, slot >> p.paging.block_shift, kv_head, slot & mask);
    }
    *(Numbers*)(to + column) = low;
    *(Numbers*)(to + HEAD_DIM / 2 + column) = high;
}

KERNEL(rope_store_64, RopeStoreParams, 128, 8, 0) { rope_store<64>(p); }
KERNEL(rope_store_128, RopeStoreParams, 128, 8, 0) { rope_store<128>(p); }
KERNEL(rope_store_256, RopeStoreParams, 128, 8, 0) { rope_store<256>(p); }
