// Causal attention of many new rows over paged keys and values: flash-attention by mma.sync, for sm_80 and later.
//
// Algorithm: FlashAttention-2 (Dao 2023): a block keeps TILE_ROWS queries of one head in shared memory, goes over the keys in tiles of
// TILE_KEYS, and keeps for each row the highest score, the sum of weights and the weighted values, rescaled when the highest changes.
// Keys and values of the next tile are copied (cp.async) while this one is computed, in two stages. Scores and sums are f32,
// weights are rounded to bf16 for the second product. A query sees what paged.cuh says; tiles that no row sees are not visited.
// Softmax may count one more score for each head, which has no value (gpt-oss's learned sinks).
//
// Shapes: q [rows, q_stride] with head h at column h · head_dim; out likewise; pool as in paged.cuh; heads a multiple of kv_heads.
// Grid: one block for each (tile of the list, head), heads fastest, so that the heads which share keys run at the same time. The list
// comes from the host (plan.rs), longest tiles first; a ragged batch is one list.
//
//   head_dim   rows × keys of a tile   warps   rows of a warp   shared memory
//       64            128 × 64            4          32              48 KiB
//      128            128 × 32            4          32              64 KiB (64 keys would spill registers)
//      256             64 × 32            4          16              96 KiB
//
// FLOPs: 4 · head_dim for each (row, head, visible key); half of S² of them in a whole prompt of S. Bytes from memory, at least: q and
// out once, keys and values once for each row tile of a KV head (from L2 for the other heads of the group). A prompt of 8k at
// head_dim 128 has 2,048 FLOPs a byte: bound by the tensor cores.
#include "paged.cuh"

struct PrefillTile { u32 sequence, first_row; }; // first_row counts within the sequence

struct PrefillParams {
    const bf16 *q, *keys, *values;
    bf16* out;
    const float* sink_logits; // [heads], or null
    const PrefillTile* tiles;
    const Sequence* sequences;
    Paging paging;
    Visibility visibility;
    u32 heads, q_stride, out_stride; // strides in numbers
    float score_scale;
};

template <int HEAD_DIM_, int TILE_ROWS_, int TILE_KEYS_, int WARPS_> struct PrefillShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, TILE_ROWS = TILE_ROWS_, TILE_KEYS = TILE_KEYS_, WARPS = WARPS_;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int BANDS = TILE_ROWS / (16 * WARPS); // of 16 rows, for each warp
    static constexpr int CHUNKS = HEAD_DIM / 8;            // 16-byte chunks of a row
    static constexpr int KEY_TILE = TILE_KEYS * HEAD_DIM;  // numbers
    // Of keys or values, at once: rows that a warp and the block copy; and how often, for a tile.
    static constexpr int WARP_ROWS = 32 / CHUNKS, BLOCK_ROWS = THREADS / CHUNKS, COPIES = TILE_KEYS / BLOCK_ROWS;
    static_assert(WARP_ROWS * COPIES <= 32, "a lane looks up one row");
    static constexpr int SHARED_BYTES = (TILE_ROWS + 4 * TILE_KEYS) * HEAD_DIM * 2;
    // Where a chunk of a query lies, in numbers from the first one.
    DEVICE static u32 query_place(u32 row, u32 chunk) { return swizzled<HEAD_DIM>(row, chunk); }
};

// Of the tile that begins at `first`, where one of the positions lies that the lane's warp copies: a tile ahead, so that no copy waits for
// the table.
template <class S> DEVICE u32 look_up(const Paging& paging, const u32* table, u32 kv_head, u32 first, u32 end) {
    const u32 lane = thread_index() & 31, warp = thread_index() >> 5;
    const u32 position = first + lane / S::WARP_ROWS % S::COPIES * S::BLOCK_ROWS + warp * S::WARP_ROWS + lane % S::WARP_ROWS;
    return row_of_position(paging, table, kv_head, position < end ? position : first);
}

// Copies the keys and values of positions [first, first + TILE_KEYS), in one group; those from `end` on become zeros, since weights of
// zero times whatever lies there would not be zero if it were NaN. `pool_rows` is what look_up said of them.
template <class S> DEVICE void copy_tile(bf16* keys, bf16* values, const PrefillParams& p, u32 pool_rows, u32 first, u32 end) {
    const u32 own_row = thread_index() / S::CHUNKS, chunk = thread_index() % S::CHUNKS;
    UNROLL
    for (int i = 0; i < S::COPIES; i++) {
        const u32 row = i * S::BLOCK_ROWS + own_row, place = swizzled<S::HEAD_DIM>(row, chunk);
        const u64 offset = (u64)shuffle(pool_rows, i * S::WARP_ROWS + own_row % S::WARP_ROWS) * S::HEAD_DIM + chunk * 8;
        const bool valid = first + row < end;
        cp_async_16(keys + place, p.keys + offset, valid);
        cp_async_16(values + place, p.values + offset, valid);
    }
    cp_async_commit();
}

// Which key tiles a tile of rows needs: those that hold sinks, then those from the first row's window to the last row.
struct KeyTiles {
    u32 sink_tiles, first, count;
    DEVICE u32 at(u32 i) const { return i < sink_tiles ? i : first + (i - sink_tiles); }
};
template <int TILE_KEYS> DEVICE KeyTiles key_tiles(const Visibility& v, u32 first_position, u32 end) {
    u32 from = v.window && first_position + 1 > v.window ? first_position + 1 - v.window : 0;
    u32 first = from / TILE_KEYS, last = (end + TILE_KEYS - 1) / TILE_KEYS;
    u32 sinks = v.sink_tokens / TILE_KEYS + (v.sink_tokens % TILE_KEYS ? 1 : 0); // a sum may be beyond 32 bits
    u32 sink_tiles = sinks < first ? sinks : first;
    return {sink_tiles, first, sink_tiles + last - first};
}

// What a warp keeps of its rows. Lane l holds, of each band, rows l / 4 and l / 4 + 8, and two columns of every eight.
template <class S> struct Rows {
    float sums[S::BANDS][S::HEAD_DIM / 8][4];  // weighted values
    float highest[S::BANDS][2], total[S::BANDS][2]; // of scores; of weights, this lane's columns only

    DEVICE void clear() {
        UNROLL
        for (int band = 0; band < S::BANDS; band++) {
            highest[band][0] = highest[band][1] = -infinity();
            total[band][0] = total[band][1] = 0.f;
            UNROLL
            for (int d = 0; d < S::HEAD_DIM / 8; d++)
                UNROLL
                for (int e = 0; e < 4; e++) sums[band][d][e] = 0.f;
        }
    }
};

template <class S> using Scores = float[S::BANDS][S::TILE_KEYS / 8][4];
// bf16 in pairs: a product's result lies in the lanes as the next one's first operand must.
template <class S> using Weights = u32[S::BANDS][S::TILE_KEYS / 16][4];

template <class S> DEVICE void score(Scores<S>& scores, const bf16* queries, const bf16* keys, u32 warp_row, u32 lane) {
    UNROLL
    for (int band = 0; band < S::BANDS; band++)
        UNROLL
        for (int j = 0; j < S::TILE_KEYS / 8; j++)
            UNROLL
            for (int e = 0; e < 4; e++) scores[band][j][e] = 0.f;
    const u32 query_place = swizzled<S::HEAD_DIM>(warp_row + (lane & 15), lane >> 4);
    const u32 key_place = swizzled<S::HEAD_DIM>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    UNROLL
    for (int k = 0; k < S::HEAD_DIM / 16; k++) {
        u32 a[S::BANDS][4];
        UNROLL
        for (int band = 0; band < S::BANDS; band++)
            ldmatrix_x4(a[band], queries + along_row(query_place, k * 16) + band * 16 * S::HEAD_DIM);
        UNROLL
        for (int j = 0; j < S::TILE_KEYS / 16; j++) {
            u32 b[4];
            ldmatrix_x4(b, keys + along_row(key_place, k * 16) + j * 16 * S::HEAD_DIM);
            UNROLL
            for (int band = 0; band < S::BANDS; band++) {
                mma_bf16(scores[band][2 * j], a[band], b[0], b[1]);
                mma_bf16(scores[band][2 * j + 1], a[band], b[2], b[3]);
            }
        }
    }
}

// Takes out what rows do not see; only for tiles where that is anything.
template <class S>
DEVICE void mask(Scores<S>& scores, const Visibility& v, u32 first_key, u32 warp_position, u32 lane) {
    bool all_before = first_key + S::TILE_KEYS <= warp_position + 1;
    // A window of which this sum is beyond 32 bits is masked key by key.
    bool all_in_window = v.window == 0 || first_key + v.window > warp_position + S::BANDS * 16 - 1;
    if (all_before && all_in_window) return;
    const u32 window = v.window ? v.window : 0xffffffffu, first = first_key + (lane & 3) * 2;
    UNROLL
    for (int band = 0; band < S::BANDS; band++)
        UNROLL
        for (int r = 0; r < 2; r++) {
            const u32 position = warp_position + band * 16 + (lane >> 2) + r * 8;
            UNROLL
            for (int j = 0; j < S::TILE_KEYS / 8; j++)
                UNROLL
                for (int e = 0; e < 2; e++) {
                    // `sees`, in few registers: a key that comes later is 2^31 and more before, since all positions are below that (plan.rs).
                    const u32 key = first + j * 8 + e, before = position - key;
                    if ((before >= window && key >= v.sink_tokens) || (i32)before < 0) scores[band][j][2 * r + e] = -infinity();
                }
        }
}

template <class S> using Rescale = float[S::BANDS][2];

// Turns scores into weights, and says by what the sums of before have to be rescaled.
template <class S> DEVICE void weigh(Scores<S>& scores, Rescale<S>& rescale, Rows<S>& rows, float scale_log2) {
    UNROLL
    for (int band = 0; band < S::BANDS; band++)
        UNROLL
        for (int r = 0; r < 2; r++) {
            float highest = rows.highest[band][r];
            UNROLL
            for (int j = 0; j < S::TILE_KEYS / 8; j++)
                highest = maximum(highest, maximum(scores[band][j][2 * r], scores[band][j][2 * r + 1]));
            highest = maximum(highest, shuffle_xor(highest, 1));
            highest = maximum(highest, shuffle_xor(highest, 2));
            // A row that has seen nothing yet: -inf less -inf would be no number.
            float base = highest == -infinity() ? 0.f : highest * scale_log2, total = 0.f;
            // Of the difference: exactly 1 where the highest stays, and what was summed before is not worn away tile by tile.
            rescale[band][r] = highest == -infinity() ? 1.f : exp2_approx((rows.highest[band][r] - highest) * scale_log2);
            rows.highest[band][r] = highest;
            UNROLL
            for (int j = 0; j < S::TILE_KEYS / 8; j++) {
                float low = exp2_approx(scores[band][j][2 * r] * scale_log2 - base);
                float high = exp2_approx(scores[band][j][2 * r + 1] * scale_log2 - base);
                total += low + high;
                scores[band][j][2 * r] = low;
                scores[band][j][2 * r + 1] = high;
            }
            rows.total[band][r] = rows.total[band][r] * rescale[band][r] + total;
        }
}

template <class S> DEVICE void round_weights(Weights<S>& weights, const Scores<S>& scores) {
    UNROLL
    for (int band = 0; band < S::BANDS; band++)
        UNROLL
        for (int j = 0; j < S::TILE_KEYS / 8; j++)
            UNROLL
            for (int r = 0; r < 2; r++)
                weights[band][j / 2][j % 2 * 2 + r] = pack_bf16(scores[band][j][2 * r], scores[band][j][2 * r + 1]);
}

template <class S> DEVICE void rescale_sums(Rows<S>& rows, const Rescale<S>& rescale) {
    bool changes = false;
    UNROLL
    for (int band = 0; band < S::BANDS; band++) changes = changes || rescale[band][0] != 1.f || rescale[band][1] != 1.f;
    if (ballot(changes) == 0) return; // most tiles, once a row has seen many
    UNROLL
    for (int band = 0; band < S::BANDS; band++)
        UNROLL
        for (int d = 0; d < S::HEAD_DIM / 8; d++)
            UNROLL
            for (int e = 0; e < 4; e++) rows.sums[band][d][e] *= rescale[band][e >> 1];
}

template <class S> DEVICE void add_values(Rows<S>& rows, const Weights<S>& weights, const bf16* values, u32 lane) {
    const u32 value_place = swizzled<S::HEAD_DIM>(lane & 15, lane >> 4);
    UNROLL
    for (int k = 0; k < S::TILE_KEYS / 16; k++) {
        UNROLL
        for (int d = 0; d < S::HEAD_DIM / 16; d++) {
            u32 b[4];
            ldmatrix_x4_trans(b, values + along_row(value_place, d * 16) + k * 16 * S::HEAD_DIM);
            UNROLL
            for (int band = 0; band < S::BANDS; band++) {
                mma_bf16(rows.sums[band][2 * d], weights[band][k], b[0], b[1]);
                mma_bf16(rows.sums[band][2 * d + 1], weights[band][k], b[2], b[3]);
            }
        }
    }
}

// Divides by the total and puts a warp's rows where its queries were, which no other warp reads.
template <class S>
DEVICE void finish(Rows<S>& rows, bf16* staged, const float* sink_logit, float scale_log2, u32 warp_row, u32 lane) {
    UNROLL
    for (int band = 0; band < S::BANDS; band++)
        UNROLL
        for (int r = 0; r < 2; r++) {
            float total = rows.total[band][r];
            total += shuffle_xor(total, 1);
            total += shuffle_xor(total, 2);
            if (sink_logit) total += exp2_approx(*sink_logit * LOG2_E - rows.highest[band][r] * scale_log2);
            float scale = divide(1.f, total);
            u32 row = warp_row + band * 16 + (lane >> 2) + r * 8;
            UNROLL
            for (int d = 0; d < S::HEAD_DIM / 8; d++) {
                u32* to = (u32*)(staged + S::query_place(row, d) + (lane & 3) * 2);
                store_shared(to, pack_bf16(rows.sums[band][d][2 * r] * scale, rows.sums[band][d][2 * r + 1] * scale));
            }
        }
}

// A warp's rows, of which the sequence has the first `tile_rows` of the tile only.
template <class S>
DEVICE void store_rows(bf16* out, u32 out_stride, const bf16* staged, u64 first_row, u32 tile_rows, u32 warp_row, u32 head, u32 lane) {
    UNROLL
    for (int i = 0; i < S::BANDS * 16 * S::CHUNKS / 32; i++) {
        u32 index = i * 32 + lane, row = warp_row + index / S::CHUNKS, chunk = index % S::CHUNKS;
        Chunk16 numbers = load_shared((const Chunk16*)(staged + S::query_place(row, chunk)));
        if (row < tile_rows) store_global_16(out + (first_row + row) * out_stride + head * S::HEAD_DIM + chunk * 8, numbers);
    }
}

template <class S> DEVICE void prefill(const PrefillParams& p, u32 tile_index, u32 head, unsigned char* shared) {
    bf16 *queries = (bf16*)shared, *keys = queries + S::TILE_ROWS * S::HEAD_DIM, *values = keys + 2 * S::KEY_TILE;
    const u32 lane = thread_index() & 31, warp_row = (thread_index() >> 5) * S::BANDS * 16;
    const PrefillTile tile = p.tiles[tile_index];
    const Sequence sequence = p.sequences[tile.sequence];
    const u32* table = p.paging.block_tables + sequence.table_start;
    const u32 kv_head = head / (p.heads / p.paging.kv_heads);
    const u32 rows_left = sequence.rows - tile.first_row, tile_rows = rows_left < S::TILE_ROWS ? rows_left : S::TILE_ROWS;
    const u32 first_position = sequence.context_tokens + tile.first_row, end = first_position + tile_rows;
    const u64 first_row = sequence.first_row + tile.first_row;
    const KeyTiles tiles = key_tiles<S::TILE_KEYS>(p.visibility, first_position, end);
    const float scale_log2 = p.score_scale * LOG2_E;

    UNROLL
    for (int i = 0; i < S::TILE_ROWS * S::CHUNKS / S::THREADS; i++) {
        u32 index = i * S::THREADS + thread_index(), row = index / S::CHUNKS, chunk = index % S::CHUNKS;
        bool valid = row < tile_rows;
        const bf16* from = p.q + (first_row + (valid ? row : 0)) * p.q_stride + head * S::HEAD_DIM + chunk * 8;
        cp_async_16(queries + swizzled<S::HEAD_DIM>(row, chunk), from, valid);
    }
    u32 pool_rows = look_up<S>(p.paging, table, kv_head, tiles.at(0) * S::TILE_KEYS, end);
    copy_tile<S>(keys, values, p, pool_rows, tiles.at(0) * S::TILE_KEYS, end);
    if (tiles.count > 1) pool_rows = look_up<S>(p.paging, table, kv_head, tiles.at(1) * S::TILE_KEYS, end);

    Rows<S> rows;
    rows.clear();
    for (u32 i = 0; i < tiles.count; i++) {
        const u32 first_key = tiles.at(i) * S::TILE_KEYS, stage = i & 1;
        cp_async_wait<0>(); // this thread's part of the tile is here
        barrier();          // all of it; and all are done with the stage that is filled next
        if (i + 1 < tiles.count) {
            const u32 next = (stage ^ 1) * S::KEY_TILE;
            copy_tile<S>(keys + next, values + next, p, pool_rows, tiles.at(i + 1) * S::TILE_KEYS, end);
            if (i + 2 < tiles.count) pool_rows = look_up<S>(p.paging, table, kv_head, tiles.at(i + 2) * S::TILE_KEYS, end);
        }

        Scores<S> scores;
        score<S>(scores, queries, keys + stage * S::KEY_TILE, warp_row, lane);
        mask<S>(scores, p.visibility, first_key, first_position + warp_row, lane);
        Rescale<S> rescale;
        weigh<S>(scores, rescale, rows, scale_log2);
        Weights<S> weights;
        round_weights<S>(weights, scores);
        rescale_sums<S>(rows, rescale);
        add_values<S>(rows, weights, values + stage * S::KEY_TILE, lane);
    }

    warp_barrier(); // the warp has read its queries for the last time
    finish<S>(rows, queries, p.sink_logits ? p.sink_logits + head : nullptr, scale_log2, warp_row, lane);
    warp_barrier();
    store_rows<S>(p.out, p.out_stride, queries, first_row, tile_rows, warp_row, head, lane);
}

using Prefill64 = PrefillShape<64, 128, 64, 4>;
using Prefill128 = PrefillShape<128, 128, 32, 4>;
using Prefill256 = PrefillShape<256, 64, 32, 4>;

#ifndef BODIES_ONLY
KERNEL(attention_prefill_64, PrefillParams, Prefill64::THREADS, 2, Prefill64::SHARED_BYTES) {
    prefill<Prefill64>(p, block_index() / p.heads, block_index() % p.heads, shared_memory());
}
KERNEL(attention_prefill_128, PrefillParams, Prefill128::THREADS, 2, Prefill128::SHARED_BYTES) {
    prefill<Prefill128>(p, block_index() / p.heads, block_index() % p.heads, shared_memory());
}
KERNEL(attention_prefill_256, PrefillParams, Prefill256::THREADS, 2, Prefill256::SHARED_BYTES) {
    prefill<Prefill256>(p, block_index() / p.heads, block_index() % p.heads, shared_memory());
}
#endif
