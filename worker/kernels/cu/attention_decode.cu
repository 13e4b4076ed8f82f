// Attention of single new rows over paged keys and values, split over the context.
//
// Algorithm: Flash-Decoding (Dao, Haziza, Massa & Sizov 2023) with packed groups: 16 of the query heads that share a KV head are the rows
// of one mma tile, and one block has all of them, so that keys and values are read once for each KV head. A block takes one chunk of a
// sequence's context, in teams of 1, 2 or 4 warps: the fewest that have a warp for each 16 heads. Each warp copies every WARPS-th tile of
// KEYS positions into a ring of STAGES tiles of its own, with cp.async, and adds up its team's tiles, one of each ring, for 16 heads of
// its own; a warp for which no heads are left only copies. So a group of any size has the same bytes under way. A warp waits for the
// others of its team once in TEAM tiles, and for other teams only at the end, where the teams' sums are put together in shared memory. A
// chunk that is its sequence's only one writes the row; others write a part, which attention_combine.cu adds up. How chunks are cut plan.rs
// says. What was stored before this step is copied while the kernels before, which store the new rows, still run.
//
// A group of more than 16 · WARPS heads (64; 32 at head_dim 256) has one block for each so many, and each of them reads the chunk's keys
// and values. They are neighbours in the grid, which starts in its order, so that those after the first find in the cache what it reads
// from memory.
//
// Shapes: q [rows, q_stride] with head h at column h · head_dim; out likewise; partial_sums [slots, heads, head_dim] and partial_logs
// [slots, heads] in f32 (of each part: its rows divided by their total, and the total's base-2 logarithm, scale included); pool as in
// paged.cuh. Grid: one block for each (chunk, KV head, 16 · WARPS heads of its group), heads fastest.
//
//   head_dim   warps   keys of a tile   stages   shared memory
//       64       4          16            4          64 KiB
//      128       4          16            3          96 KiB
//      256       2          16            3          96 KiB
//
// Bytes: 4 · kv_heads · head_dim for each position of context, once for each 16 · WARPS heads of a group. FLOPs: 4 · heads · head_dim
// for each: heads / kv_heads a byte, so bound by memory.
#include "paged.cuh"

struct DecodeChunk { u32 sequence, begin, end, slot; }; // positions [begin, end); WHOLE or the slot of its part
static constexpr u32 WHOLE = 0xffffffffu;

struct DecodeParams {
    const bf16 *q, *keys, *values;
    bf16* out;
    float *partial_sums, *partial_logs;
    const float* sink_logits; // [heads], or null
    const DecodeChunk* chunks;
    const Sequence* sequences;
    Paging paging;
    Visibility visibility;
    u32 heads, q_stride, out_stride;
    float score_scale;
    u32 begins_early, reserved; // whether the step writes no keys and values that it reads here, but for each row's own
};

template <int HEAD_DIM_, int WARPS_, int STAGES_> struct DecodeShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WARPS, KEYS = 16, CHUNKS = HEAD_DIM / 8;
    static constexpr int HEADS = 16 * WARPS;          // that a block has room for
    static constexpr int TILE = KEYS * HEAD_DIM;      // numbers of a tile of keys or of values
    static constexpr int RING = STAGES * 2 * TILE;    // numbers of a warp's ring
    static constexpr int SHARED_BYTES = WARPS * RING * 2;
    // At the end the rings hold, for each warp, 16 rows of sums and their highest scores and totals. Rows are eight numbers apart in the
    // banks, so that the pairs which half a warp stores, of four rows, lie in different ones.
    static constexpr int PART_ROW = HEAD_DIM + 8, HIGHEST = 16 * PART_ROW, TOTALS = HIGHEST + 16, PARTS = TOTALS + 16; // in f32
    static_assert(PARTS * 4 <= RING * 2, "the parts lie in the ring");
};

// Copies the keys and values of positions [first, first + KEYS) to a stage of the warp's ring, in one group; zeros from `end` on.
template <class S>
DEVICE void copy_tile(bf16* stage, const DecodeParams& p, const u32* table, u32 kv_head, u32 first, u32 end) {
    if (first < end) {
        const u32 lane = thread_index() & 31, own = first + lane % S::KEYS;
        // Each lane looks one position up, before any copy: the table's entries do not wait for each other.
        const u32 pool_rows = row_of_position(p.paging, table, kv_head, own < end ? own : first);
        UNROLL
        for (int i = 0; i < S::KEYS * S::CHUNKS / 32; i++) {
            const u32 index = i * 32 + lane, row = index / S::CHUNKS, chunk = index % S::CHUNKS;
            const u64 offset = (u64)shuffle(pool_rows, row) * S::HEAD_DIM + chunk * 8;
            const u32 place = swizzled<S::HEAD_DIM>(row, chunk);
            const bool valid = first + row < end;
            cp_async_16(stage + place, p.keys + offset, valid);
            cp_async_16(stage + S::TILE + place, p.values + offset, valid);
        }
    }
    cp_async_commit();
}

// What a warp keeps of the 16 rows: lane l holds rows l / 4 and l / 4 + 8, and two columns of every eight.
template <class S> struct Sums {
    float sums[S::HEAD_DIM / 8][4], highest[2], total[2];
};

template <class S> DEVICE void add_tile(Sums<S>& s, const u32 (&q)[S::HEAD_DIM / 16][4], const bf16* keys, const DecodeParams& p,
                                        u32 first, u32 end, u32 position) {
    const u32 lane = thread_index() & 31;
    const bf16* values = keys + S::TILE;
    float scores[2][4] = {};
    const u32 key_place = swizzled<S::HEAD_DIM>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    const u32 value_place = swizzled<S::HEAD_DIM>(lane & 15, lane >> 4);
    UNROLL
    for (int k = 0; k < S::HEAD_DIM / 16; k++) {
        u32 b[4];
        ldmatrix_x4(b, keys + along_row(key_place, k * 16));
        mma_bf16(scores[0], q[k], b[0], b[1]);
        mma_bf16(scores[1], q[k], b[2], b[3]);
    }
    const float scale_log2 = p.score_scale * LOG2_E;
    const Visibility& v = p.visibility;
    // No chunk ends after the row (plan.rs), so that a whole tile is seen but for a window.
    if (first + S::KEYS > end || (v.window != 0 && position - first >= v.window))
        UNROLL
        for (int j = 0; j < 2; j++)
            UNROLL
            for (int e = 0; e < 4; e++) {
                u32 key = first + j * 8 + (lane & 3) * 2 + (e & 1);
                if (key >= end || !sees(v, position, key)) scores[j][e] = -infinity();
            }
    UNROLL
    for (int r = 0; r < 2; r++) {
        float highest = maximum(maximum(scores[0][2 * r], scores[0][2 * r + 1]), maximum(scores[1][2 * r], scores[1][2 * r + 1]));
        highest = maximum(highest, shuffle_xor(highest, 1));
        highest = maximum(s.highest[r], maximum(highest, shuffle_xor(highest, 2)));
        float base = highest == -infinity() ? 0.f : highest * scale_log2, total = 0.f;
        // Of the difference: exactly 1 where the highest stays.
        float rescale = highest == -infinity() ? 1.f : exp2_approx((s.highest[r] - highest) * scale_log2);
        s.highest[r] = highest;
        UNROLL
        for (int j = 0; j < 2; j++)
            UNROLL
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                scores[j][e] = exp2_approx(scores[j][e] * scale_log2 - base);
                total += scores[j][e];
            }
        s.total[r] = s.total[r] * rescale + total;
        UNROLL
        for (int d = 0; d < S::HEAD_DIM / 8; d++) {
            s.sums[d][2 * r] *= rescale;
            s.sums[d][2 * r + 1] *= rescale;
        }
    }
    const u32 a[4] = {pack_bf16(scores[0][0], scores[0][1]), pack_bf16(scores[0][2], scores[0][3]),
                      pack_bf16(scores[1][0], scores[1][1]), pack_bf16(scores[1][2], scores[1][3])};
    UNROLL
    for (int d = 0; d < S::HEAD_DIM / 16; d++) {
        u32 b[4];
        ldmatrix_x4_trans(b, values + along_row(value_place, d * 16));
        mma_bf16(s.sums[2 * d], a, b[0], b[1]);
        mma_bf16(s.sums[2 * d + 1], a, b[2], b[3]);
    }
}

struct alignas(8) Pair { float low, high; };

// Writes a warp's sums to shared memory: 16 rows, then their highest scores (base 2, scaled), then their totals.
template <class S> DEVICE void put_parts(Sums<S>& s, float* parts, float scale_log2) {
    const u32 lane = thread_index() & 31;
    UNROLL
    for (int r = 0; r < 2; r++) {
        u32 row = (lane >> 2) + r * 8;
        float total = s.total[r];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        UNROLL
        for (int d = 0; d < S::HEAD_DIM / 8; d++)
            store_shared((Pair*)(parts + row * S::PART_ROW + d * 8 + (lane & 3) * 2), Pair{s.sums[d][2 * r], s.sums[d][2 * r + 1]});
        if ((lane & 3) == 0) {
            store_shared(parts + S::HIGHEST + row, s.highest[r] * scale_log2);
            store_shared(parts + S::TOTALS + row, total);
        }
    }
}

// What a block does: a chunk, for `heads` query heads of a KV head from `first_head` on.
struct DecodeWork { DecodeChunk chunk; u32 kv_head, first_head, heads; };

// Two numbers of one of the block's heads: the teams' parts added up, written as the row's result or as the chunk's part.
template <class S, int TEAM>
DEVICE void write_pair(const float* parts, const DecodeParams& p, const DecodeWork& work, u64 row, u32 block_head, u32 column) {
    const u32 head = work.first_head + block_head, tile_row = block_head % 16;
    parts += block_head / 16 * (S::RING / 2); // of the first team's warp with this head
    float highest = -infinity(), total = 0.f, low = 0.f, high = 0.f;
    UNROLL
    for (int warp = 0; warp < S::WARPS; warp += TEAM)
        highest = maximum(highest, load_shared(parts + warp * (S::RING / 2) + S::HIGHEST + tile_row));
    UNROLL
    for (int warp = 0; warp < S::WARPS; warp += TEAM) {
        const float* part = parts + warp * (S::RING / 2);
        // Every chunk has a position that the row sees (plan.rs), so that `highest` is a number.
        float scale = exp2_approx(load_shared(part + S::HIGHEST + tile_row) - highest);
        const Pair sums = load_shared((const Pair*)(part + tile_row * S::PART_ROW + column));
        total += scale * load_shared(part + S::TOTALS + tile_row);
        low += scale * sums.low;
        high += scale * sums.high;
    }
    if (work.chunk.slot == WHOLE) {
        if (p.sink_logits) total += exp2_approx(p.sink_logits[head] * LOG2_E - highest);
        *(u32*)(p.out + row * p.out_stride + head * S::HEAD_DIM + column) = pack_bf16(divide(low, total), divide(high, total));
        return;
    }
    u64 part = (u64)work.chunk.slot * p.heads + head;
    p.partial_sums[part * S::HEAD_DIM + column] = divide(low, total);
    p.partial_sums[part * S::HEAD_DIM + column + 1] = divide(high, total);
    if (column == 0) p.partial_logs[part] = highest + log2_approx(total);
}

// Waits for the other warps of the team.
template <class S, int TEAM> DEVICE void team_barrier(u32 team) {
    static_assert(TEAM == 1 || S::WARPS / TEAM <= 2, "a barrier for each team");
    if (TEAM == 1) warp_barrier();
    else if (S::WARPS == TEAM || team == 0) named_barrier<1, 32 * TEAM>();
    else named_barrier<2, 32 * TEAM>();
}

// Does `work` in teams of TEAM warps.
template <class S, int TEAM> DEVICE void decode_in_teams(const DecodeParams& p, const DecodeWork& work, unsigned char* shared) {
    const u32 lane = thread_index() & 31, warp = thread_index() >> 5, team = warp / TEAM, first_of_team = team * TEAM;
    const u32 heads_before = (warp - first_of_team) * 16, heads = work.heads > heads_before ? work.heads - heads_before : 0;
    const bool computes = TEAM == 1 || heads > 0;
    const DecodeChunk chunk = work.chunk;
    const Sequence sequence = p.sequences[chunk.sequence];
    const u32* table = p.paging.block_tables + sequence.table_start;
    bf16 *rings = (bf16*)shared, *ring = rings + warp * S::RING;
    auto tile_begin = [&](u32 i, u32 of_warp) { return chunk.begin + (i * S::WARPS + of_warp) * S::KEYS; };

    UNROLL
    for (int i = 0; i < S::STAGES - 1; i++) {
        // The kernel before writes the row's own keys and values; tiles of earlier steps do not wait.
        if (!p.begins_early || tile_begin(i, warp) + S::KEYS > sequence.context_tokens) wait_for_before();
        copy_tile<S>(ring + i * 2 * S::TILE, p, table, work.kv_head, tile_begin(i, warp), chunk.end);
    }
    wait_for_before();

    u32 q[S::HEAD_DIM / 16][4];
    UNROLL
    for (int k = 0; k < S::HEAD_DIM / 16; k++)
        UNROLL
        for (int i = 0; i < 4; i++) {
            u32 row = (lane >> 2) + (i & 1) * 8, column = k * 16 + (lane & 3) * 2 + (i >> 1) * 8;
            const bf16* from = p.q + (u64)sequence.first_row * p.q_stride + (work.first_head + heads_before + row) * S::HEAD_DIM + column;
            q[k][i] = row < heads ? *(const u32*)from : 0;
        }

    Sums<S> sums = {};
    sums.highest[0] = sums.highest[1] = -infinity();
    // A team goes on as long as its first warp has a tile: all its warps meet at the barrier equally often.
    for (u32 i = 0; tile_begin(i, first_of_team) < chunk.end; i++) {
        cp_async_wait<S::STAGES - 2>(); // this lane's part of its warp's tile i is here
        team_barrier<S, TEAM>(team);    // every lane's of the team; and its tiles i - 1, whose stages are filled next, have been read
        u32 next = i + S::STAGES - 1;
        copy_tile<S>(ring + next % S::STAGES * 2 * S::TILE, p, table, work.kv_head, tile_begin(next, warp), chunk.end);
        if (computes)
            for (u32 from = first_of_team; from < first_of_team + TEAM && tile_begin(i, from) < chunk.end; from++)
                add_tile<S>(sums, q, rings + from * S::RING + i % S::STAGES * 2 * S::TILE, p, tile_begin(i, from), chunk.end,
                            sequence.context_tokens);
    }

    team_barrier<S, TEAM>(team); // the last tiles of the team's rings have been read
    float* parts = (float*)shared;
    if (computes) put_parts<S>(sums, parts + warp * (S::RING / 2), p.score_scale * LOG2_E);
    barrier();
    for (u32 i = thread_index(); i < work.heads * S::HEAD_DIM / 2; i += S::THREADS)
        write_pair<S, TEAM>(parts, p, work, sequence.first_row, i / (S::HEAD_DIM / 2), i % (S::HEAD_DIM / 2) * 2);
}

template <class S> DEVICE void decode(const DecodeParams& p, u32 block, unsigned char* shared) {
    static_assert(S::WARPS == 2 || S::WARPS == 4, "a block's heads are those of its largest team");
    const u32 group = p.heads / p.paging.kv_heads, blocks = (group + S::HEADS - 1) / S::HEADS; // of a chunk and KV head
    const u32 kv_head = block / blocks % p.paging.kv_heads, before = block % blocks * S::HEADS, left = group - before;
    const DecodeWork work = {p.chunks[block / (blocks * p.paging.kv_heads)], kv_head, kv_head * group + before,
                             left < S::HEADS ? left : S::HEADS};
    if (work.heads <= 16) decode_in_teams<S, 1>(p, work, shared);
    else if (work.heads <= 32) decode_in_teams<S, 2>(p, work, shared);
    else if constexpr (S::WARPS > 2) decode_in_teams<S, 4>(p, work, shared);
}

using Decode64 = DecodeShape<64, 4, 4>;
using Decode128 = DecodeShape<128, 4, 3>;
using Decode256 = DecodeShape<256, 2, 3>;

#ifndef BODIES_ONLY
KERNEL_AHEAD(attention_decode_64, DecodeParams, Decode64::THREADS, 3, Decode64::SHARED_BYTES) {
    let_next_begin();
    decode<Decode64>(p, block_index(), shared_memory());
}
KERNEL_AHEAD(attention_decode_128, DecodeParams, Decode128::THREADS, 2, Decode128::SHARED_BYTES) {
    let_next_begin();
    decode<Decode128>(p, block_index(), shared_memory());
}
KERNEL_AHEAD(attention_decode_256, DecodeParams, Decode256::THREADS, 2, Decode256::SHARED_BYTES) {
    let_next_begin();
    decode<Decode256>(p, block_index(), shared_memory());
}
#endif
