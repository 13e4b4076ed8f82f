// Causal attention of many new rows over paged keys and values, by wgmma and TMA, for sm_90a: attention_prefill.cu for Hopper.
//
// Algorithm: FlashAttention-3 (Shah et al. 2024): of a block's three warpgroups two compute 64 rows each; of the third, one warp copies
// queries and keys and one values. Copies are whole KV blocks that the tensor memory accelerator takes from the pool by the block table,
// two tiles of keys and two of values ahead. A computing warpgroup starts the scores of a tile, then the values of the tile before it, and
// turns the first half of the scores into weights while the values are added; the two take turns in starting products, so that one's
// exponentials run under the other's products. What a row sees, which tiles are visited and what is kept of a row are
// attention_prefill.cu's, as are the parts of this file that it has in common with it.
//
// Shapes: as in attention_prefill.cu, KV blocks of 8 tokens or more. Grid: as many blocks as the GPU has
// multiprocessors, or work if there is less; the list of (tile, head) is dealt out to them in rounds, every second one backwards, since
// longest come first.
//
//   head_dim   rows × keys of a tile   threads   registers of copying and computing threads   shared memory
//       64           128 × 128          384                    24, 240                            96 KiB
//      128           128 × 128          384                    24, 240                           192 KiB
//      256           128 × 64           384                    24, 240                           192 KiB (queries once, the others' twice)
//
// FLOPs and Bytes: those of attention_prefill.cu.
#define BODIES_ONLY
#include "attention_prefill.cu"

struct PrefillWgmmaParams {
    TensorMap q;            // [rows, q_stride], boxes of 128 rows and 64 columns
    TensorMap keys, values; // the pool as [rows, head_dim], boxes of box_rows whole rows in groups of eight
    bf16* out;
    const float* sink_logits; // [heads], or null
    const PrefillTile* tiles;
    const Sequence* sequences;
    Paging paging;
    Visibility visibility;
    u32 heads, out_stride, box_rows; // the last is block_tokens, or a tile's keys if those are fewer
    u32 works, blocks;               // tiles times heads; blocks of the grid
    float score_scale;
    u32 reserved[12];
};

template <int HEAD_DIM_, int TILE_KEYS_, int QUERY_STAGES_> struct WgmmaShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, TILE_ROWS = 128, TILE_KEYS = TILE_KEYS_;
    static constexpr int BANDS = 1, CHUNKS = HEAD_DIM / 8; // as in PrefillShape
    static constexpr int COMPUTING = 256, THREADS = COMPUTING + 128;
    static constexpr int QUERY_TILE = TILE_ROWS * HEAD_DIM, TILE = TILE_KEYS * HEAD_DIM; // numbers; the second of keys or values
    // Rows lie in panels of 64 columns, what a swizzle goes over: all rows of queries in one panel and then in the next, of keys and values
    // each eight rows in all panels, so that one copy brings a whole KV block.
    static constexpr int PANELS = HEAD_DIM / 64, QUERY_PANEL = TILE_ROWS * 64, PANEL = 8 * 64, GROUP = 8 * HEAD_DIM;
    static constexpr int QUERY_STAGES = QUERY_STAGES_, STAGES = 2;
    static constexpr int TILES_BYTES = (QUERY_STAGES * QUERY_TILE + 2 * STAGES * TILE) * 2, SHARED_BYTES = TILES_BYTES + 128;
    DEVICE static u32 query_place(u32 row, u32 chunk) { return (chunk >> 3) * QUERY_PANEL + swizzled<64>(row, chunk & 7); }
    DEVICE static u32 value_place(u32 row, u32 chunk) {
        return (row >> 3) * GROUP + (chunk >> 3) * PANEL + swizzled<64>(row & 7, chunk & 7);
    }
};

// Stages of tiles: full when what was asked for is there, empty when its readers are done with it.
template <int TILE_, int STAGES_> struct Staged {
    static constexpr int TILE = TILE_, STAGES = STAGES_;
    bf16* tiles;
    u64 *full, *empty;
    DEVICE bf16* at(u32 stage) const { return tiles + stage * TILE; }
};
template <class S> struct WgmmaShared {
    Staged<S::QUERY_TILE, S::QUERY_STAGES> queries;
    Staged<S::TILE, S::STAGES> keys, values;
    DEVICE WgmmaShared(unsigned char* shared) {
        u64* barriers = (u64*)(shared + S::TILES_BYTES);
        queries = {(bf16*)shared, barriers, barriers + 2};
        keys = {queries.tiles + S::QUERY_STAGES * S::QUERY_TILE, barriers + 4, barriers + 6};
        values = {keys.tiles + S::STAGES * S::TILE, barriers + 8, barriers + 10};
    }
};

// Goes round one or two stages: which one is next, and the parity of its barriers' phase.
template <int STAGES> struct Ring {
    u32 index = 0, parity = 0;
    DEVICE void advance() {
        if (STAGES > 1) index ^= 1;
        parity ^= index ^ 1;
    }
};

// Which of the list a block does in a round; none behind its end, nor in any later round.
DEVICE u32 index_in_round(const PrefillWgmmaParams& p, u32 round) {
    return round * p.blocks + (round & 1 ? p.blocks - 1 - block_index() : block_index());
}

// One of the list.
struct Work {
    const u32* table;
    u32 head, kv_head, tile_rows, first_position, end;
    u64 first_row;
    KeyTiles keys;
};
template <class S> DEVICE Work work_at(const PrefillWgmmaParams& p, u32 index) {
    const PrefillTile tile = p.tiles[index / p.heads];
    const Sequence sequence = p.sequences[tile.sequence];
    Work work;
    work.table = p.paging.block_tables + sequence.table_start;
    work.head = index % p.heads;
    work.kv_head = work.head / (p.heads / p.paging.kv_heads);
    const u32 rows_left = sequence.rows - tile.first_row;
    work.tile_rows = rows_left < S::TILE_ROWS ? rows_left : S::TILE_ROWS;
    work.first_position = sequence.context_tokens + tile.first_row;
    work.end = work.first_position + work.tile_rows;
    work.first_row = sequence.first_row + tile.first_row;
    work.keys = key_tiles<S::TILE_KEYS>(p.visibility, work.first_position, work.end);
    return work;
}

// --- the warps that copy

// Of the tile that begins at `first`: in which row of the pool the lane's box begins; behind the end, that of the last box again, since
// all boxes are expected: such keys nobody sees, and such values are cleared.
template <class S> DEVICE u32 box_row(const PrefillWgmmaParams& p, const Work& work, u32 first, u32 lane) {
    const u32 position = first + lane * p.box_rows, last = (work.end - 1) & ~(p.box_rows - 1);
    return row_of_position(p.paging, work.table, work.kv_head, position < last ? position : last);
}

// The stage is the warp's to fill, with so many bytes.
DEVICE void begin_copies(u64* full, u64* empty, u32 parity, u32 bytes, u32 lane) {
    mbarrier_wait(empty, parity ^ 1);
    if (lane == 0) mbarrier_expect(full, bytes);
    warp_barrier();
}

// The tiles of keys or values that a work needs.
template <class S>
DEVICE void copy_tiles(const PrefillWgmmaParams& p, const Work& work, const TensorMap* map, const Staged<S::TILE, S::STAGES>& to,
                       Ring<S::STAGES>& ring, u32 lane) {
    u32 next = box_row<S>(p, work, work.keys.at(0) * S::TILE_KEYS, lane);
    for (u32 i = 0; i < work.keys.count; i++, ring.advance()) {
        const u32 row = next; // looked up a tile ahead, so that no copy waits for the table
        if (i + 1 < work.keys.count) next = box_row<S>(p, work, work.keys.at(i + 1) * S::TILE_KEYS, lane);
        begin_copies(to.full + ring.index, to.empty + ring.index, ring.parity, S::TILE * 2, lane);
        const u32 first = lane * p.box_rows;
        if (first < S::TILE_KEYS) tensor_copy_groups(to.at(ring.index) + first * S::HEAD_DIM, map, row >> 3, to.full + ring.index);
    }
}

template <class S>
DEVICE void copy_queries(const PrefillWgmmaParams& p, const Work& work, const Staged<S::QUERY_TILE, S::QUERY_STAGES>& to,
                         Ring<S::QUERY_STAGES>& ring, u32 lane) {
    begin_copies(to.full + ring.index, to.empty + ring.index, ring.parity, S::QUERY_TILE * 2, lane);
    if (lane < S::PANELS)
        tensor_copy(to.at(ring.index) + lane * S::QUERY_PANEL, &p.q, work.head * S::HEAD_DIM + lane * 64, work.first_row,
                    to.full + ring.index);
    ring.advance();
}

template <class S> DEVICE void copy_queries_and_keys(const PrefillWgmmaParams& p, const WgmmaShared<S>& shared) {
    const u32 lane = thread_index() & 31;
    Ring<S::QUERY_STAGES> queries;
    Ring<S::STAGES> keys;
    for (u32 round = 0; index_in_round(p, round) < p.works; round++) {
        const Work work = work_at<S>(p, index_in_round(p, round));
        copy_queries<S>(p, work, shared.queries, queries, lane);
        copy_tiles<S>(p, work, &p.keys, shared.keys, keys, lane);
    }
}

template <class S> DEVICE void copy_values(const PrefillWgmmaParams& p, const WgmmaShared<S>& shared) {
    Ring<S::STAGES> values;
    for (u32 round = 0; index_in_round(p, round) < p.works; round++)
        copy_tiles<S>(p, work_at<S>(p, index_in_round(p, round)), &p.values, shared.values, values, thread_index() & 31);
}

// --- the warps that compute

// Between the two warpgroups that compute: each starts its products in turn.
DEVICE void wait_for_turn(u32 group) {
    if (group == 0) named_barrier<1, 256>(); else named_barrier<2, 256>();
}
DEVICE void pass_turn(u32 group) {
    if (group == 0) named_barrier_arrive<2, 256>(); else named_barrier_arrive<1, 256>();
}

// The warp has read what lies there for the last time.
DEVICE void release(u64* empty, u32 lane) {
    if (lane == 0) mbarrier_arrive(empty);
}

// Starts scores = queries · keys, for the 64 rows of a warpgroup.
template <class S> DEVICE void start_scores(Scores<S>& scores, u64 queries, u64 keys) {
    wgmma_fence();
    UNROLL
    for (int k = 0; k < S::HEAD_DIM / 16; k++)
        wgmma_shared(scores[0], further(queries, k / 4 * S::QUERY_PANEL + k % 4 * 16), further(keys, k / 4 * S::PANEL + k % 4 * 16), k > 0);
    wgmma_commit();
}

// Starts sums += weights · values.
template <class S> DEVICE void start_values(Rows<S>& rows, const Weights<S>& weights, u64 values) {
    wgmma_fence();
    UNROLL
    for (int k = 0; k < S::TILE_KEYS / 16; k++) wgmma_registers(rows.sums[0], weights[0][k], further(values, k * 2 * S::GROUP));
    wgmma_commit();
}

// Of the last tile, what was brought behind its keys: weights of zero times NaN would not be zero.
template <class S> DEVICE void clear_tail(bf16* values, u32 keys) {
    for (u32 i = keys * S::CHUNKS + thread_index(); i < S::TILE_KEYS * S::CHUNKS; i += S::COMPUTING)
        store_shared((Chunk16*)(values + S::value_place(i / S::CHUNKS, i % S::CHUNKS)), Chunk16{});
    proxy_fence();
    named_barrier<3, 256>();
}

// From which of a work's tiles on scores have to be masked.
template <class S> DEVICE u32 masked_from(const Visibility& v, u32 warp_position) {
    return v.window ? 0 : (warp_position + 1) / S::TILE_KEYS;
}

// How far a score may be above what its row's weights are relative to, in powers of two, before that is raised and the sums are rescaled
// (FlashAttention-4, Zadouri et al. 2026): weights of 256 are as exact as weights of one.
static constexpr float SLACK = 8.f;

// What the weights of this tile are relative to, times the scale, and by what the sums of before have to be rescaled.
template <class S>
DEVICE void raise(const Scores<S>& scores, Rows<S>& rows, float (&base)[2], Rescale<S>& rescale, float scale_log2) {
    float highest[2][4]; // four at once, since each maximum waits for the one before it
    UNROLL
    for (int j = 0; j < S::TILE_KEYS / 8; j++)
        UNROLL
        for (int r = 0; r < 2; r++) {
            const float pair = maximum(scores[0][j][2 * r], scores[0][j][2 * r + 1]);
            highest[r][j % 4] = j < 4 ? pair : maximum(highest[r][j % 4], pair);
        }
    UNROLL
    for (int r = 0; r < 2; r++) {
        float top = maximum(maximum(highest[r][0], highest[r][1]), maximum(highest[r][2], highest[r][3]));
        top = maximum(top, shuffle_xor(top, 1));
        top = maximum(top, shuffle_xor(top, 2));
        const float before = rows.highest[0][r];
        // Not of a row that has seen nothing yet and sees nothing here, of which the difference is no number.
        const bool raised = (top - before) * scale_log2 > SLACK;
        rescale[0][r] = raised ? exp2_approx((before - top) * scale_log2) : 1.f;
        rows.highest[0][r] = raised ? top : before;
        base[r] = rows.highest[0][r] == -infinity() ? 0.f : rows.highest[0][r] * scale_log2;
        rows.total[0][r] *= rescale[0][r];
    }
}

// Turns the scores of eight times FROM to TO keys into weights.
template <class S, int FROM, int TO>
DEVICE void weigh_keys(Scores<S>& scores, Rows<S>& rows, const float (&base)[2], float scale_log2) {
    UNROLL
    for (int j = FROM; j < TO; j++)
        UNROLL
        for (int r = 0; r < 2; r++) {
            scores[0][j][2 * r] = exp2_approx(scores[0][j][2 * r] * scale_log2 - base[r]);
            scores[0][j][2 * r + 1] = exp2_approx(scores[0][j][2 * r + 1] * scale_log2 - base[r]);
            rows.total[0][r] += scores[0][j][2 * r] + scores[0][j][2 * r + 1];
        }
}

template <class S> DEVICE void compute_all(const PrefillWgmmaParams& p, const WgmmaShared<S>& shared) {
    constexpr int ALL = S::TILE_KEYS / 8, FIRST = ALL / 2;
    const Staged<S::TILE, S::STAGES>&keys = shared.keys, &values = shared.values;
    // Of a lane, so that the compiler sees that all of a warp have the same.
    const u32 lane = thread_index() & 31, group = shuffle(thread_index() >> 7, 0), warp_row = (thread_index() >> 5) * 16;
    const float scale_log2 = p.score_scale * LOG2_E;
    const u64 all_keys = matrix_along_rows(keys.tiles, S::GROUP), all_values = matrix_across_rows(values.tiles, S::GROUP, S::PANEL);
    Ring<S::QUERY_STAGES> query;
    Ring<S::STAGES> key, value;
    if (group == 1) pass_turn(group);
    for (u32 round = 0; index_in_round(p, round) < p.works; round++) {
        const Work work = work_at<S>(p, index_in_round(p, round));
        const bool last_work = index_in_round(p, round + 1) >= p.works;
        const u32 masked = masked_from<S>(p.visibility, work.first_position + warp_row);
        bf16* staged = shared.queries.at(query.index);
        const u64 queries = matrix_along_rows(staged + group * 64 * 64, 8 * 64);
        Rows<S> rows;
        rows.clear();
        Weights<S> weights;
        Rescale<S> rescale;
        float base[2];
        mbarrier_wait(shared.queries.full + query.index, query.parity);
        {
            Scores<S> scores;
            mbarrier_wait(keys.full + key.index, key.parity);
            wait_for_turn(group);
            start_scores<S>(scores, queries, further(all_keys, key.index * S::TILE));
            if (group == 0 || work.keys.count > 1 || !last_work) pass_turn(group);
            wgmma_wait<0>(scores[0]);
            release(keys.empty + key.index, lane);
            key.advance();
            if (masked == 0) mask<S>(scores, p.visibility, work.keys.at(0) * S::TILE_KEYS, work.first_position + warp_row, lane);
            raise<S>(scores, rows, base, rescale, scale_log2); // and nothing is summed yet that would be rescaled
            weigh_keys<S, 0, ALL>(scores, rows, base, scale_log2);
            round_weights<S>(weights, scores);
        }
        for (u32 i = 1; i < work.keys.count; i++) {
            Scores<S> scores;
            mbarrier_wait(keys.full + key.index, key.parity);
            wait_for_turn(group);
            start_scores<S>(scores, queries, further(all_keys, key.index * S::TILE));
            mbarrier_wait(values.full + value.index, value.parity);
            start_values<S>(rows, weights, further(all_values, value.index * S::TILE));
            if (group == 0 || i + 1 < work.keys.count || !last_work) pass_turn(group);
            wgmma_wait<1>(scores[0]);
            release(keys.empty + key.index, lane);
            key.advance();
            if (i >= masked) mask<S>(scores, p.visibility, work.keys.at(i) * S::TILE_KEYS, work.first_position + warp_row, lane);
            raise<S>(scores, rows, base, rescale, scale_log2);
            weigh_keys<S, 0, FIRST>(scores, rows, base, scale_log2);
            // Never: totals are not negative. But ptxas moves a wait ahead of arithmetic, and not ahead of a barrier that may be: without
            // this, weights would be computed when the values have been added, not meanwhile. build_cubins.py looks for it.
            if (ballot(rows.total[0][0] + rows.total[0][1] < 0.f)) named_barrier<6, 128>();
            wgmma_wait<0>(rows.sums[0]);
            release(values.empty + value.index, lane);
            value.advance();
            weigh_keys<S, FIRST, ALL>(scores, rows, base, scale_log2);
            round_weights<S>(weights, scores);
            rescale_sums<S>(rows, rescale);
        }
        mbarrier_wait(values.full + value.index, value.parity);
        const u32 last_keys = work.end - work.keys.at(work.keys.count - 1) * S::TILE_KEYS;
        if (last_keys < S::TILE_KEYS) clear_tail<S>(values.at(value.index), last_keys);
        start_values<S>(rows, weights, further(all_values, value.index * S::TILE));
        wgmma_wait<0>(rows.sums[0]);
        release(values.empty + value.index, lane);
        value.advance();

        // The warpgroup has read its queries for the last time.
        if (group == 0) named_barrier<4, 128>(); else named_barrier<5, 128>();
        finish<S>(rows, staged, p.sink_logits ? p.sink_logits + work.head : nullptr, scale_log2, warp_row, lane);
        warp_barrier();
        store_rows<S>(p.out, p.out_stride, staged, work.first_row, work.tile_rows, warp_row, work.head, lane);
        proxy_fence();
        warp_barrier();
        release(shared.queries.empty + query.index, lane);
        query.advance();
    }
}

template <int WARPS, int TILE, int STAGES> DEVICE void set_up(const Staged<TILE, STAGES>& staged) {
    for (int stage = 0; stage < STAGES; stage++) {
        mbarrier_init(staged.full + stage, 1);
        mbarrier_init(staged.empty + stage, WARPS);
    }
}

template <class S> DEVICE void prefill_wgmma(const PrefillWgmmaParams& p, unsigned char* memory) {
    const WgmmaShared<S> shared(memory);
    if (thread_index() == 0) {
        set_up<S::COMPUTING / 32>(shared.queries);
        set_up<S::COMPUTING / 32>(shared.keys);
        set_up<S::COMPUTING / 32>(shared.values);
        mbarrier_init_done();
    }
    barrier();
    if (thread_index() >= S::COMPUTING) {
        give_registers_back<24>();
        const u32 warp = shuffle((thread_index() - S::COMPUTING) >> 5, 0);
        if (warp == 0) copy_queries_and_keys<S>(p, shared);
        if (warp == 1) copy_values<S>(p, shared);
    } else {
        take_registers<240>();
        compute_all<S>(p, shared);
    }
}

using Wgmma64 = WgmmaShape<64, 128, 2>;
using Wgmma128 = WgmmaShape<128, 128, 2>;
using Wgmma256 = WgmmaShape<256, 64, 1>;

KERNEL(attention_prefill_wgmma_64, PrefillWgmmaParams, Wgmma64::THREADS, 1, Wgmma64::SHARED_BYTES) {
    prefill_wgmma<Wgmma64>(p, shared_memory());
}
KERNEL(attention_prefill_wgmma_128, PrefillWgmmaParams, Wgmma128::THREADS, 1, Wgmma128::SHARED_BYTES) {
    prefill_wgmma<Wgmma128>(p, shared_memory());
}
KERNEL(attention_prefill_wgmma_256, PrefillWgmmaParams, Wgmma256::THREADS, 1, Wgmma256::SHARED_BYTES) {
    prefill_wgmma<Wgmma256>(p, shared_memory());
}
