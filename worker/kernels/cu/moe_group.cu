// Brings the pairs of each expert together, and cuts them into tiles for the products.
//
// Algorithm: a stable counting sort (Seward 1954), a block for each expert. Every block counts all pairs in shared memory, which
// costs less than a second launch; its warps take one part of the pairs each, so that a pair's place depends on the pairs before it
// alone: results do not change from run to run. Nothing of it is told to the host: the products are launched for the most tiles there
// can be (pairs / MOE_TILE_PAIRS + experts), and those beyond tile_count end at once.
//
// Shapes: chosen [pairs], each below experts; order, places [pairs], one the inverse of the other; experts at most 1024.
// Grid: one block for each expert. Bytes: 8 · pairs for each block, from L2 but for the first; 8 · pairs written.
// FLOPs: none.
#include "moe.cuh"

struct MoeGroupParams {
    const u32* chosen;
    u32* order;  // which pair is at each place
    u32* places; // at which place each pair is
    MoeTile* tiles;
    u32* tile_count;
    u32 pairs, experts;
};

static constexpr u32 MOST_EXPERTS = 1024, GROUP_WARPS = 8, GROUP_THREADS = 32 * GROUP_WARPS;

DEVICE u32 tiles_of(u32 pairs) { return (pairs + MOE_TILE_PAIRS - 1) / MOE_TILE_PAIRS; }

DEVICE u32 sum_over_warp(u32 value) {
    UNROLL
    for (u32 mask = 16; mask; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

KERNEL(moe_group, MoeGroupParams, GROUP_THREADS, 4, (MOST_EXPERTS + GROUP_WARPS) * sizeof(u32)) {
    u32 *counts = (u32*)shared_memory(), *own_counts = counts + MOST_EXPERTS;
    const u32 expert = block_index(), lane = thread_index() & 31, warp = thread_index() >> 5;
    for (u32 e = thread_index(); e < p.experts; e += GROUP_THREADS) store_shared(counts + e, 0u);
    barrier();

    const u32 part = (p.pairs + GROUP_THREADS - 1) / GROUP_THREADS * 32, begin = warp * part;
    const u32 end = begin + part < p.pairs ? begin + part : p.pairs;
    u32 own = 0;
    for (u32 base = begin; base < end; base += 32) {
        const u32 pair = base + lane, e = pair < end ? p.chosen[pair] : MOST_EXPERTS;
        if (pair < end) add_shared(counts + e, 1u);
        own += count_bits(ballot(e == expert));
    }
    if (lane == 0) store_shared(own_counts + warp, own);
    barrier();

    // Each warp adds up for itself what the experts before this one have.
    u32 first = 0, tile = 0;
    for (u32 e = lane; e < expert; e += 32) {
        const u32 count = load_shared(counts + e);
        first += count;
        tile += tiles_of(count);
    }
    first = sum_over_warp(first);
    tile = sum_over_warp(tile);
    u32 place = first;
    for (u32 before = 0; before < warp; before++) place += load_shared(own_counts + before);

    for (u32 base = begin; base < end; base += 32) {
        const u32 pair = base + lane;
        const bool mine = pair < end && p.chosen[pair] == expert;
        const u32 all = ballot(mine);
        if (mine) {
            const u32 at = place + count_bits(all & ((1u << lane) - 1));
            p.order[at] = pair;
            p.places[pair] = at;
        }
        place += count_bits(all);
    }
    const u32 count = load_shared(counts + expert), past = first + count;
    for (u32 i = thread_index(); i < tiles_of(count); i += GROUP_THREADS) {
        const u32 from = first + i * MOE_TILE_PAIRS, to = from + MOE_TILE_PAIRS;
        p.tiles[tile + i] = MoeTile{expert, from, to < past ? to : past};
    }
    if (expert == p.experts - 1 && thread_index() == 0) *p.tile_count = tile + tiles_of(count);
}
