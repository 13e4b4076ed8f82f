// What happens to queries, keys and values between their projection and attention, in one pass: QK-norm, rotary embedding, store.
//
// Algorithm: queries and keys are normalised head by head where there is a weight for it (Qwen3's QK-norm, as rms_norm.cu), then
// turned where there are angles: pairs (i, i + head_dim / 2) by the angle of their row (RoFormer, Su et al. 2021, in the order of
// Hugging Face's rotate_half). Queries are written back in place, keys and values to their slots of the pool. A row without a slot is
// not stored.
//
// Shapes: qkv [rows, qkv_stride] bf16, a row being heads queries, kv_heads keys, kv_heads values, each head_dim; angles [..,
// head_dim] f32, half cosines and then half sines, row positions[row] of it (or row itself); pool as in paged.cuh; slot = block ·
// block_tokens + place. Rows begin at multiples of 16 bytes. Grid: head_dim / 16 lanes for each (row, head of all three kinds), so that
// a lane moves 16 bytes at once, and a warp has several heads. Bytes: 4 a number of qkv, and 4 · head_dim for each row's angles.
// FLOPs: up to 10 a number.
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

// Eight numbers of f32 for the first half of what a lane has of a head, and eight for the second.
struct Factors {
    Chunk16 low[2], high[2];

    DEVICE void load(const float* row, u32 half) {
        UNROLL
        for (int i = 0; i < 2; i++) low[i] = load_common_16(row + 4 * i), high[i] = load_common_16(row + half + 4 * i);
    }
};

// What a lane has of a head: eight numbers of its first half, and their partners of the second.
struct Pairs {
    float low[8], high[8];

    DEVICE Pairs(const Chunk16& from_low, const Chunk16& from_high) {
        UNROLL
        for (int i = 0; i < 8; i += 2) {
            low[i] = bf16_low(from_low.words[i / 2]), low[i + 1] = bf16_high(from_low.words[i / 2]);
            high[i] = bf16_low(from_high.words[i / 2]), high[i + 1] = bf16_high(from_high.words[i / 2]);
        }
    }
    DEVICE float squares() const {
        float of_low = 0.f, of_high = 0.f;
        UNROLL
        for (int i = 0; i < 8; i++) of_low += low[i] * low[i], of_high += high[i] * high[i];
        return of_low + of_high;
    }
    // Calls change(low, high, f, s) for each of the eight.
    template <class Change> DEVICE void each(const Factors& factors, Change change) {
        UNROLL
        for (int i = 0; i < 8; i++)
            change(low[i], high[i], bits_to_float(factors.low[i / 4].words[i % 4]), bits_to_float(factors.high[i / 4].words[i % 4]));
    }
};

DEVICE Chunk16 pack_eight(const float (&x)[8]) {
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

template <int HEAD_DIM> DEVICE void rope_store(const RopeStoreParams& p) {
    constexpr u32 LANES = HEAD_DIM / 16; // of a head
    const u32 all_heads = p.heads + 2 * p.paging.kv_heads, column = thread_index() % LANES * 8;
    const u32 index = block_index() * (block_threads() / LANES) + thread_index() / LANES; // 32 bits: launch.rs sees to it
    const u32 row = index / all_heads, head = index % all_heads;
    const bool is_there = row < p.rows, is_query = head < p.heads, is_value = head >= p.heads + p.paging.kv_heads;
    bf16* from = p.qkv + (u64)row * p.qkv_stride + head * HEAD_DIM + column;
    const float* weight = is_query ? p.query_norm : is_value ? nullptr : p.key_norm;
    Chunk16 low = {}, high = {};
    Factors angles;
    u32 slot = NO_SLOT;
    if (is_there) { // at once, so that nothing waits for a load that could have been under way; norms are few and in the cache
        low = *(const Chunk16*)from, high = *(const Chunk16*)(from + HEAD_DIM / 2);
        if (!is_query && p.slots) slot = load_common(p.slots + row);
        if (p.angles && !is_value) angles.load(p.angles + (u64)(p.positions ? p.positions[row] : row) * HEAD_DIM + column, HEAD_DIM / 2);
    }

    Pairs x(low, high);
    if (p.query_norm || p.key_norm) { // heads that have none take part as well: the sums are the warp's
        const float squares = over_warp<Sum, LANES>(x.squares());
        const float scale = divide(1.f, square_root(squares / HEAD_DIM + p.eps));
        if (weight) {
            Factors weights;
            weights.load(weight + column, HEAD_DIM / 2);
            x.each(weights, [&](float& a, float& b, float of_a, float of_b) {
                a = a * scale * of_a;
                b = b * scale * of_b;
            });
        }
    }
    if (!is_there) return;
    if (p.angles && !is_value)
        x.each(angles, [&](float& a, float& b, float cosine, float sine) {
            const float before = a;
            a = before * cosine - b * sine;
            b = b * cosine + before * sine;
        });
    if (!is_value) low = pack_eight(x.low), high = pack_eight(x.high);

    bf16* to = from;
    if (!is_query && p.slots) {
        if (slot == NO_SLOT) return;
        const u32 mask = (1u << p.paging.block_shift) - 1;
        const u32 kv_head = head - p.heads - (is_value ? p.paging.kv_heads : 0);
        to = (is_value ? p.values : p.keys) + column;
        to += (u64)pool_row(p.paging, slot >> p.paging.block_shift, kv_head, slot & mask) * HEAD_DIM;
    }
    *(Chunk16*)to = low;
    *(Chunk16*)(to + HEAD_DIM / 2) = high;
}

KERNEL(rope_store_64, RopeStoreParams, 128, 8, 0) { rope_store<64>(p); }
KERNEL(rope_store_128, RopeStoreParams, 128, 8, 0) { rope_store<128>(p); }
KERNEL(rope_store_256, RopeStoreParams, 128, 8, 0) { rope_store<256>(p); }
