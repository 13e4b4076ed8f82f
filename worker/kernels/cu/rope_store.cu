// What happens to queries, keys and values between their projection and attention, in one pass: QK-norm, rotary embedding, store.
//
// Algorithm: queries and keys are normalised head by head where there is a weight for it (Qwen3's QK-norm, as rms_norm.cu), then
// turned where there are angles: pairs (i, i + head_dim / 2) by the angle of their row (RoFormer, Su et al. 2021, in the order of
// Hugging Face's rotate_half). Queries are written back in place, keys and values to their slots of the pool. A row without a slot is
// not stored.
//
// Shapes: qkv [rows, qkv_stride] bf16, a row being heads queries, kv_heads keys, kv_heads values, each head_dim; angles [..,
// head_dim] f32, half cosines and then half sines, row positions[row] of it (or row itself); pool as in paged.cuh; slot = block ·
// block_tokens + place. Rows begin at multiples of 16 bytes. Grid: head_dim / 8 lanes for each part, that is up to four heads of one kind
// in a row; a warp has several. A lane has four numbers of each half of each head, so that it has eight loads of 8 bytes under way at
// once, and reads its angles and weights, which are 4 bytes a number where heads are 2, once for four heads. Bytes: 4 a number of qkv,
// and 4 · head_dim for each row's angles. FLOPs: up to 10 a number.
#include "paged.cuh"
#include "reduce.cuh"

static constexpr u32 NO_SLOT = 0xffffffffu;
static constexpr u32 EACH = 4; // heads of a part, as in launch.rs

struct RopeStoreParams {
    bf16 *qkv, *keys, *values;
    const float *query_norm, *key_norm; // [head_dim], or both null
    const float* angles;                // or null
    const u32* positions;               // [rows], or null
    const u32* slots;                   // [rows], or null
    Paging paging;                      // block_tables is not read
    u32 rows, heads, qkv_stride;
    float eps;
};

// Heads of one kind in a row, from `first` on among its heads of all kinds. None beyond the last row.
struct Part {
    u32 row, first, first_of_kind, heads;
    bool is_query, is_value;

    DEVICE Part(const RopeStoreParams& p, u32 index) {
        const u32 kv_heads = p.paging.kv_heads, query_parts = (p.heads + EACH - 1) / EACH, kv_parts = (kv_heads + EACH - 1) / EACH;
        const u32 parts = query_parts + 2 * kv_parts, part = index % parts;
        row = index / parts;
        is_query = part < query_parts, is_value = part >= query_parts + kv_parts;
        first_of_kind = (is_query ? part : part - query_parts - (is_value ? kv_parts : 0)) * EACH;
        first = first_of_kind + (is_query ? 0 : p.heads) + (is_value ? kv_heads : 0);
        const u32 left = (is_query ? p.heads : kv_heads) - first_of_kind;
        heads = row < p.rows ? left < EACH ? left : EACH : 0;
    }
};

// Four numbers of f32 for the first half of what a lane has of a head, and four for the second.
struct Factors {
    Chunk16 low, high;

    DEVICE void load(const float* row, u32 half) { low = load_common_16(row), high = load_common_16(row + half); }
};

// What a lane has of a head: four numbers of its first half, and their partners of the second.
struct Pairs {
    float low[4], high[4];

    DEVICE Pairs(const Chunk8& from_low, const Chunk8& from_high) {
        UNROLL
        for (int i = 0; i < 4; i += 2) {
            low[i] = bf16_low(from_low.words[i / 2]), low[i + 1] = bf16_high(from_low.words[i / 2]);
            high[i] = bf16_low(from_high.words[i / 2]), high[i + 1] = bf16_high(from_high.words[i / 2]);
        }
    }
    DEVICE float squares() const {
        float of_low = 0.f, of_high = 0.f;
        UNROLL
        for (int i = 0; i < 4; i++) of_low += low[i] * low[i], of_high += high[i] * high[i];
        return of_low + of_high;
    }
    // Calls change(low, high, f, s) for each of the four.
    template <class Change> DEVICE void each(const Factors& factors, Change change) {
        UNROLL
        for (int i = 0; i < 4; i++) change(low[i], high[i], bits_to_float(factors.low.words[i]), bits_to_float(factors.high.words[i]));
    }
};

DEVICE Chunk8 pack_four(const float (&x)[4]) { return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}; }

template <int HEAD_DIM> DEVICE void rope_store(const RopeStoreParams& p) {
    constexpr u32 LANES = HEAD_DIM / 8; // of a head
    const u32 column = thread_index() % LANES * 4;
    const Part part(p, block_index() * (block_threads() / LANES) + thread_index() / LANES); // 32 bits: launch.rs sees to it
    const bool is_changed = part.heads && !part.is_value, is_stored = part.heads && !part.is_query && p.slots;
    bf16* from = p.qkv + (u64)part.row * p.qkv_stride + part.first * HEAD_DIM + column;

    // All loads at once, so that nothing waits for one that could have been under way; first what others wait for.
    const u32 slot = is_stored ? load_common(p.slots + part.row) : 0;
    const u32 position = is_changed && p.positions ? load_common(p.positions + part.row) : part.row;
    Chunk8 low[EACH] = {}, high[EACH] = {};
    UNROLL
    for (u32 i = 0; i < EACH; i++)
        if (i < part.heads) {
            low[i] = load_own_8(from + i * HEAD_DIM);
            high[i] = load_own_8(from + i * HEAD_DIM + HEAD_DIM / 2);
        }
    Factors weights = {}, angles = {};
    if (is_changed) {
        if (p.query_norm) weights.load((part.is_query ? p.query_norm : p.key_norm) + column, HEAD_DIM / 2);
        if (p.angles) angles.load(p.angles + (u64)position * HEAD_DIM + column, HEAD_DIM / 2);
    }

    float scales[EACH];
    if (p.query_norm) { // values take part as well: the sums are the warp's
        UNROLL
        for (u32 i = 0; i < EACH; i++) scales[i] = over_warp<Sum, LANES>(Pairs(low[i], high[i]).squares());
        UNROLL
        for (u32 i = 0; i < EACH; i++) scales[i] = inverse_root_approx(scales[i] / HEAD_DIM + p.eps);
    }

    bf16* to = from;
    u32 from_head_to_head = HEAD_DIM;
    if (is_stored) {
        if (slot == NO_SLOT) return;
        const u32 mask = (1u << p.paging.block_shift) - 1;
        to = (part.is_value ? p.values : p.keys) + column;
        to += (u64)pool_row(p.paging, slot >> p.paging.block_shift, part.first_of_kind, slot & mask) * HEAD_DIM;
        from_head_to_head = HEAD_DIM << p.paging.block_shift;
    }
    UNROLL
    for (u32 i = 0; i < EACH; i++) {
        Pairs x(low[i], high[i]);
        if (p.query_norm)
            x.each(weights, [&](float& a, float& b, float of_a, float of_b) {
                a = a * scales[i] * of_a;
                b = b * scales[i] * of_b;
            });
        if (p.angles)
            x.each(angles, [&](float& a, float& b, float cosine, float sine) {
                const float before = a;
                a = before * cosine - b * sine;
                b = b * cosine + before * sine;
            });
        if (!part.is_value) low[i] = pack_four(x.low), high[i] = pack_four(x.high); // values stay bit for bit
        if (i >= part.heads) return;
        *(Chunk8*)to = low[i];
        *(Chunk8*)(to + HEAD_DIM / 2) = high[i];
        to += from_head_to_head;
    }
}

KERNEL(rope_store_64, RopeStoreParams, 128, 8, 0) { rope_store<64>(p); }
KERNEL(rope_store_128, RopeStoreParams, 128, 8, 0) { rope_store<128>(p); }
KERNEL(rope_store_256, RopeStoreParams, 128, 8, 0) { rope_store<256>(p); }
