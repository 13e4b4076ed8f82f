// Causal attention of many new rows over paged keys and values, by wgmma and TMA, for sm_90a: attention_prefill.cu for Hopper.
//
// Algorithm: FlashAttention-3 (Shah et al. 2024): of a block's three warpgroups one warp copies and two compute 64 rows each. Copies
// are whole KV blocks that the tensor memory accelerator takes from the pool by the block table, two tiles of keys and two of values
// ahead. A computing warpgroup starts the scores of a tile, then the values of the tile before it, and turns the scores into weights
// while the values are added; the two take turns in starting products, so that one's exponentials run under the other's products.
// What a row sees, which tiles are visited and what is kept of a row are attention_prefill.cu's, as are the parts of this file that it
// has in common with it.
//
// Shapes: as in attention_prefill.cu, head_dim 64 and 128, KV blocks of 8 tokens or more. Grid: as many blocks as the GPU has
// multiprocessors, or work if there is less; the list of (tile, head) is dealt out to them in rounds, every second one backwards, since
// longest come first.
//
//   head_dim   rows × keys of a tile   threads   registers of copying and computing threads   shared memory
//       64           128 × 128          384                    24, 240                            80 KiB
//      128           128 × 128          384                    24, 240                           160 KiB
//
// FLOPs and Bytes: those of attention_prefill.cu.
#define BODIES_ONLY
#include "attention_prefill.cu"

struct PrefillWgmmaParams {
    TensorMap q;            // [rows, q_stride], boxes of 128 rows and 64 columns
    TensorMap keys, values; // the pool as [rows, head_dim], boxes of box_rows rows and 64 columns
    bf16* out;
    const float* sink_logits; // [heads], or null
    const PrefillTile* tiles;
    const Sequence* sequences;
    Paging paging;
    Visibility visibility;
    u32 heads, out_stride, box_rows; // the last is block_tokens, or 128 if that is less
    u32 works, blocks;               // tiles times heads; blocks of the grid
    float score_scale;
    u32 reserved[12];
};

template <int HEAD_DIM_> struct WgmmaShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, TILE_ROWS = 128, TILE_KEYS = 128;
    static constexpr int BANDS = 1, CHUNKS = HEAD_DIM / 8; // as in PrefillShape
    static constexpr int COMPUTING = 256, THREADS = COMPUTING + 128;
    static constexpr int PANELS = HEAD_DIM / 64; // of 64 columns, one behind another: what a swizzle goes over
    static constexpr int PANEL = 128 * 64, TILE = PANELS * PANEL; // numbers, of queries, keys or values
    static constexpr int STAGES = 2, SHARED_BYTES = (1 + 2 * STAGES) * TILE * 2 + 128;
    static_assert(TILE_ROWS == TILE_KEYS, "a tile of queries is as large as one of keys");
    DEVICE static u32 query_place(u32 row, u32 chunk) { return (chunk >> 3) * PANEL + swizzled<64>(row, chunk & 7); }
};

// Full: what was asked for is there. Empty: its readers are done with it.
struct WgmmaBarriers { u64 queries_full, queries_empty, keys_full[2], keys_empty[2], values_full[2], values_empty[2]; };

template <class S> struct WgmmaShared {
    bf16 *queries, *keys, *values;
    WgmmaBarriers* barriers;
    DEVICE WgmmaShared(unsigned char* shared)
        : queries((bf16*)shared), keys(queries + S::TILE), values(keys + S::STAGES * S::TILE),
          barriers((WgmmaBarriers*)(values + S::STAGES * S::TILE)) {}
};

// Which of two stages, and the parity of its barriers' phase, for the tile of this number since the block began.
struct Stage {
    u32 index, parity;
    DEVICE explicit Stage(u32 number) : index(number & 1), parity(number >> 1 & 1) {}
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

// --- the warp that copies

// Of the tile that begins at `first`: in which row of the pool the lane's box begins; behind the end, that of the last box again, since
// all boxes are expected: such keys nobody sees, and such values are cleared.
template <class S> DEVICE u32 box_row(const PrefillWgmmaParams& p, const Work& work, u32 first, u32 lane) {
    const u32 position = first + lane / S::PANELS * p.box_rows, last = (work.end - 1) & ~(p.box_rows - 1);
    return row_of_position(p.paging, work.table, work.kv_head, position < last ? position : last);
}

// A tile of keys or values into a stage, once that is empty.
template <class S>
DEVICE void copy_boxes(bf16* stages, const TensorMap* map, u64* full, u64* empty, u32 number, u32 row, u32 box_rows, u32 lane) {
    const Stage stage(number);
    mbarrier_wait(empty + stage.index, stage.parity ^ 1);
    if (lane == 0) mbarrier_expect(full + stage.index, S::TILE * 2);
    warp_barrier();
    const u32 panel = lane % S::PANELS, first = lane / S::PANELS * box_rows;
    if (first < S::TILE_KEYS)
        tensor_copy(stages + stage.index * S::TILE + panel * S::PANEL + first * 64, map, panel * 64, row, full + stage.index);
}

template <class S> DEVICE void copy_all(const PrefillWgmmaParams& p, const WgmmaShared<S>& shared) {
    WgmmaBarriers& b = *shared.barriers;
    const u32 lane = thread_index() & 31;
    u32 number = 0;
    for (u32 round = 0; index_in_round(p, round) < p.works; round++) {
        const Work work = work_at<S>(p, index_in_round(p, round));
        u32 row = box_row<S>(p, work, work.keys.at(0) * S::TILE_KEYS, lane);
        copy_boxes<S>(shared.keys, &p.keys, b.keys_full, b.keys_empty, number, row, p.box_rows, lane);
        mbarrier_wait(&b.queries_empty, (round & 1) ^ 1); // later than keys are
        if (lane == 0) mbarrier_expect(&b.queries_full, S::TILE * 2);
        warp_barrier();
        if (lane < S::PANELS)
            tensor_copy(shared.queries + lane * S::PANEL, &p.q, work.head * S::HEAD_DIM + lane * 64, work.first_row, &b.queries_full);
        for (u32 i = 0; i < work.keys.count; i++, number++) {
            u32 next = row;
            if (i + 1 < work.keys.count) {
                next = box_row<S>(p, work, work.keys.at(i + 1) * S::TILE_KEYS, lane);
                copy_boxes<S>(shared.keys, &p.keys, b.keys_full, b.keys_empty, number + 1, next, p.box_rows, lane);
            }
            copy_boxes<S>(shared.values, &p.values, b.values_full, b.values_empty, number, row, p.box_rows, lane);
            row = next;
        }
    }
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
template <class S> DEVICE void start_scores(Scores<S>& scores, const bf16* queries, const bf16* keys) {
    wgmma_fence();
    UNROLL
    for (int k = 0; k < S::HEAD_DIM / 16; k++) {
        const u32 along = k / 4 * S::PANEL + k % 4 * 16;
        wgmma_shared(scores[0], matrix_along_rows(queries + along), matrix_along_rows(keys + along), k > 0);
    }
    wgmma_commit();
}

// Starts sums += weights · values.
template <class S> DEVICE void start_values(Rows<S>& rows, const Weights<S>& weights, const bf16* values) {
    wgmma_fence();
    UNROLL
    for (int k = 0; k < S::TILE_KEYS / 16; k++)
        wgmma_registers(rows.sums[0], weights[0][k], matrix_across_rows(values + k * 16 * 64, S::PANEL));
    wgmma_commit();
}

// Of the last tile, what was brought behind its keys: weights of zero times NaN would not be zero.
template <class S> DEVICE void clear_tail(bf16* values, u32 keys) {
    for (u32 i = keys * S::CHUNKS + thread_index(); i < S::TILE_KEYS * S::CHUNKS; i += S::COMPUTING)
        store_shared((Chunk16*)(values + S::query_place(i / S::CHUNKS, i % S::CHUNKS)), Chunk16{});
    proxy_fence();
    named_barrier<3, 256>();
}

template <class S> DEVICE void compute_all(const PrefillWgmmaParams& p, const WgmmaShared<S>& shared) {
    WgmmaBarriers& b = *shared.barriers;
    const u32 lane = thread_index() & 31, warp_row = (thread_index() >> 5) * 16, group = thread_index() >> 7;
    const bf16* queries = shared.queries + group * 64 * 64;
    const float scale_log2 = p.score_scale * LOG2_E;
    u32 number = 0;
    if (group == 1) pass_turn(group);
    for (u32 round = 0; index_in_round(p, round) < p.works; round++) {
        const Work work = work_at<S>(p, index_in_round(p, round));
        const bool last_work = index_in_round(p, round + 1) >= p.works;
        Rows<S> rows;
        rows.clear();
        Weights<S> weights;
        Rescale<S> rescale;
        mbarrier_wait(&b.queries_full, round & 1);
        {
            const Stage stage(number);
            Scores<S> scores;
            mbarrier_wait(b.keys_full + stage.index, stage.parity);
            wait_for_turn(group);
            start_scores<S>(scores, queries, shared.keys + stage.index * S::TILE);
            if (group == 0 || work.keys.count > 1 || !last_work) pass_turn(group);
            wgmma_wait<0>(scores[0]);
            release(b.keys_empty + stage.index, lane);
            mask<S>(scores, p.visibility, work.keys.at(0) * S::TILE_KEYS, work.first_position + warp_row, lane);
            weigh<S>(scores, rescale, rows, scale_log2); // and nothing is summed yet that would be rescaled
            round_weights<S>(weights, scores);
        }
        for (u32 i = 1; i < work.keys.count; i++) {
            const Stage before(number++), stage(number);
            Scores<S> scores;
            mbarrier_wait(b.keys_full + stage.index, stage.parity);
            wait_for_turn(group);
            start_scores<S>(scores, queries, shared.keys + stage.index * S::TILE);
            mbarrier_wait(b.values_full + before.index, before.parity);
            start_values<S>(rows, weights, shared.values + before.index * S::TILE);
            if (group == 0 || i + 1 < work.keys.count || !last_work) pass_turn(group);
            wgmma_wait<1>(scores[0]);
            release(b.keys_empty + stage.index, lane);
            mask<S>(scores, p.visibility, work.keys.at(i) * S::TILE_KEYS, work.first_position + warp_row, lane);
            weigh<S>(scores, rescale, rows, scale_log2);
            // Never: totals are not negative. But ptxas moves a wait ahead of arithmetic, and not ahead of a barrier that may be: without
            // this, weights would be computed when the values have been added, not meanwhile. build_cubins.py looks for it.
            if (ballot(rows.total[0][0] + rows.total[0][1] < 0.f)) named_barrier<6, 128>();
            wgmma_wait<0>(rows.sums[0]);
            release(b.values_empty + before.index, lane);
            round_weights<S>(weights, scores);
            rescale_sums<S>(rows, rescale);
        }
        const Stage stage(number++);
        bf16* values = shared.values + stage.index * S::TILE;
        mbarrier_wait(b.values_full + stage.index, stage.parity);
        const u32 keys = work.end - work.keys.at(work.keys.count - 1) * S::TILE_KEYS;
        if (keys < S::TILE_KEYS) clear_tail<S>(values, keys);
        start_values<S>(rows, weights, values);
        wgmma_wait<0>(rows.sums[0]);
        release(b.values_empty + stage.index, lane);

        // The warpgroup has read its queries for the last time.
        if (group == 0) named_barrier<4, 128>(); else named_barrier<5, 128>();
        finish<S>(rows, shared.queries, p.sink_logits ? p.sink_logits + work.head : nullptr, scale_log2, warp_row, lane);
        warp_barrier();
        store_rows<S>(p.out, p.out_stride, shared.queries, work.first_row, work.tile_rows, warp_row, work.head, lane);
        proxy_fence();
        warp_barrier();
        release(&b.queries_empty, lane);
    }
}

template <class S> DEVICE void prefill_wgmma(const PrefillWgmmaParams& p, unsigned char* memory) {
    const WgmmaShared<S> shared(memory);
    if (thread_index() == 0) {
        WgmmaBarriers& b = *shared.barriers;
        mbarrier_init(&b.queries_full, 1);
        mbarrier_init(&b.queries_empty, S::COMPUTING / 32);
        for (int stage = 0; stage < S::STAGES; stage++) {
            mbarrier_init(b.keys_full + stage, 1);
            mbarrier_init(b.values_full + stage, 1);
            mbarrier_init(b.keys_empty + stage, S::COMPUTING / 32);
            mbarrier_init(b.values_empty + stage, S::COMPUTING / 32);
        }
        mbarrier_init_done();
    }
    barrier();
    if (thread_index() >= S::COMPUTING) {
        give_registers_back<24>();
        if (thread_index() < S::COMPUTING + 32) copy_all<S>(p, shared);
    } else {
        take_registers<240>();
        compute_all<S>(p, shared);
    }
}

KERNEL(attention_prefill_wgmma_64, PrefillWgmmaParams, WgmmaShape<64>::THREADS, 1, WgmmaShape<64>::SHARED_BYTES) {
    prefill_wgmma<WgmmaShape<64>>(p, shared_memory());
}
KERNEL(attention_prefill_wgmma_128, PrefillWgmmaParams, WgmmaShape<128>::THREADS, 1, WgmmaShape<128>::SHARED_BYTES) {
    prefill_wgmma<WgmmaShape<128>>(p, shared_memory());
}
