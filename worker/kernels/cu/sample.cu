// Draws a token from logits: greedy, or with temperature, min-p, top-k and top-p, seeded.
//
// Algorithm: a token's weight is e^((logit - highest) / temperature), at most 1, summed as a fixed-point number of 40 fractional bits:
// sums are exact, so that they depend on no order. Everything then is one question, asked at most three times: in an order of the
// candidates, which is the first one whose running sum (or count) passes a target? Top-k: the count, k - 1. Top-p (Holtzman et al.
// 2020): the sum, p of the total. The draw: the sum, a uniform number's part of the total. The order is that of weights (the
// lower token among equals) where top-k or top-p cut, and that of tokens elsewhere, as in worker/src/backend/sample.rs, whose seeding
// (SplitMix64 of seed and position) this shares too.
//
// The row is read twice. First each thread finds the best token it has, and each warp the highest logit of each of its tiles of 512
// tokens. Then weights are summed, the last tiles first, since the cache may still have them, without those that are too light to count.
// In the order of tokens each warp has summed a part of the row; the part in which the target is passed is divided again, until 32 tokens
// are left. In the order of weights all that is as heavy as the threads' best tokens of rank k + 1, or 384, goes to a list as it passes,
// so that no fewer are there, and hardly more: sorted and summed up, the list answers every question. With top-k it is all that is needed,
// and only tiles that have a token for it are read again. Where it does not reach (a flat row's top-p, logits that are equal by the
// thousand, a large k) candidates.cuh searches.
//
// Shapes: logits [rows, vocab] f32, vocab below 2^24; draws [rows]; tokens [rows], NO_TOKEN where a logit is NaN or +inf (-inf is a
// token withheld). Grid: one block for each row. Bytes: 4 · vocab from memory, and as much again, a part of it from the cache, or, with
// top-k, a tile for each of k; 13 times as much at most for each of three searches. FLOPs: 4 a logit and reading, an exponential among
// them in the second.
#include "candidates.cuh"
#include "reduce.cuh"

static constexpr u32 NO_TOKEN = 0xffffffffu;
static constexpr int EACH = 16;                              // loads of a lane under way at once: 64 KiB of a multiprocessor's two blocks
static constexpr u32 TILE = 32 * EACH, TOPS = 2 * BINS * 32; // tokens of a warp's tile, and tiles whose highest logit is kept
static constexpr u32 RANKED = 384;                           // of the threads' 512 best tokens; 700 are as heavy, in no order of logits

struct Draw {
    u64 seed, position;
    float temperature, top_p, min_p;
    u32 top_k; // 0 keeps all
};

struct SampleParams {
    const float* logits;
    const Draw* draws;
    u32* tokens;
    u32 vocab;
};

// Highest logits of tiles, in room of the search's sums. A warp's tile has this place.
DEVICE float* tops(Shared* shared) { return (float*)shared->low; }
DEVICE u32 place_of_tile(u32 tile) { return tile * WARPS + (thread_index() >> 5); }

// Of what a thread has of a row: the highest logit and the lowest token that has it, as one number that is higher for what is better, 0
// for nothing; all ones where a logit is NaN or +inf. Keeps the tops.
DEVICE u64 own_best(const float* logits, u32 vocab, Shared* shared) {
    const Range own = Range{0, vocab}.of_warp(thread_index() >> 5);
    const u32 begin = own.begin + (thread_index() & 31);
    float best = -infinity();
    u32 token = begin;
    bool broken = false;
    for (u32 tile = 0; own.begin + tile * TILE < own.end; tile++) {
        const u32 first = begin + tile * TILE;
        float numbers[EACH], top = -infinity();
        load_tile(numbers, logits, own, first, -infinity());
        UNROLL
        for (int e = 0; e < EACH; e++) {
            if (!(numbers[e] < infinity())) broken = true;
            top = maximum(top, numbers[e]);
        }
        if (top > best) {
            best = top;
            UNROLL
            for (int e = EACH - 1; e >= 0; e--)
                if (numbers[e] == top) token = first + e * 32;
        }
        top = over_warp<Highest>(top);
        if ((thread_index() & 31) == 0 && place_of_tile(tile) < TOPS) store_shared(&tops(shared)[place_of_tile(tile)], top);
    }
    const u32 bits = float_to_bits(best + 0.f); // -0 becomes 0
    const u32 ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return broken ? ~0ull : begin < own.end ? (u64)ascending << 32 | (0xffffffffu - token) : 0;
}

// The best of all threads.
DEVICE u64 best_of(u64 best, Shared* shared) {
    for (u32 mask = 16; mask; mask /= 2) {
        const u64 other = shuffle_xor(best, mask);
        best = other > best ? other : best;
    }
    if ((thread_index() & 31) == 0) store_shared(&shared->of_warps[thread_index() >> 5], best);
    barrier();
    for (u32 warp = 0; warp < WARPS; warp++) {
        const u64 other = load_shared(&shared->of_warps[warp]);
        best = other > best ? other : best;
    }
    return best; // totals, with a barrier before they write, come next
}

// A weight that at least `rank` tokens have, or that of the lightest candidate: of the threads' best logits that which has this rank.
DEVICE float weight_of_rank(const Row& row, Shared* shared, u64 own, u32 rank) {
    store_shared(&shared->list[thread_index()], ~own);
    sort(shared, THREADS);
    const u32 ascending = ~load_shared(&shared->list[rank - 1]) >> 32;
    const float weight = row.weight(bits_to_float(ascending >> 31 ? ascending & 0x7fffffffu : ~ascending));
    return maximum(weight, row.lightest());
}

// Totals of the candidates of a weight that counts, as `totals` has them, of tiles that have any of at least `floor`. Those of at least
// `least` go to the list, where they find room, if `lists`.
DEVICE Totals survey(const Row& row, Shared* shared, float floor, bool lists, float least) {
    const Range own = row.all().of_warp(thread_index() >> 5);
    u64 sum = 0;
    u32 count = 0;
    barrier(); // all have read how many there were
    if (thread_index() == 0) store_shared(&shared->listed, 0u);
    barrier();
    // From the end on, which has just been read, and is in the cache if anything is.
    for (u32 tile = (own.end - own.begin + TILE - 1) / TILE; tile-- > 0;) {
        const u32 first = own.begin + tile * TILE + (thread_index() & 31), place = place_of_tile(tile);
        // Well below, since nobody says that the machine's exponential never falls.
        if (place < TOPS && row.weight(load_shared(&tops(shared)[place])) < floor * 0.999f) continue;
        float logits[EACH];
        load_tile(logits, row.logits, own, first, bits_to_float(0x7fffffff));
        u32 heavy = 0;
        UNROLL
        for (int e = 0; e < EACH; e++) {
            const float weight = row.weight(logits[e]); // of NaN, as there is none in the row, NaN: neither of these
            if (weight >= row.min_p) count++, sum += fixed_point(weight);
            if (weight >= least) heavy |= 1u << e;
        }
        while (lists && ballot(heavy != 0)) { // seldom
            const u32 token = first + count_bits((heavy & (0u - heavy)) - 1) * 32;
            append(shared, heavy != 0, heavy ? row.key(row.logits[token], token) : NO_KEY);
            heavy &= heavy - 1;
        }
    }
    return totals_of_block(shared, count, sum);
}

// SplitMix64 (Steele, Lea & Flood 2014).
DEVICE u64 mix(u64 state) {
    u64 z = state + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
// total · u, rounded down, for u in [0, 1) with 53 bits.
DEVICE u64 uniform_part(u64 total, u64 seed, u64 position) {
    const u64 u = mix(mix(seed) ^ position) >> 11;
    return multiply_high(total, u) << 11 | total * u >> 53;
}

// Of what has a sum, the part of it at which top-p is reached.
DEVICE u64 nucleus(const Draw& draw, u64 sum) {
    const u64 kept = ceiling((double)maximum(draw.top_p, 0.f) * (double)sum);
    return kept ? kept - 1 : 0;
}

// Top-k, top-p and the draw, from a list that has the heaviest candidates. NO_TOKEN where they are too few to tell.
DEVICE u32 draw_from_list(const Draw& draw, Shared* shared, u32 listed, bool by_count, u64 total) {
    const u64* sums = sort_and_sum(shared, listed);
    const u64 sum = load_shared(&sums[listed - 1]);
    u32 kept = listed;
    if (by_count && draw.top_k <= listed) kept = draw.top_k, total = load_shared(&sums[kept - 1]);
    else if (by_count && sum < total) return NO_TOKEN; // else what is not listed weighs nothing
    if (draw.top_p < 1.f) {
        const u64 target = nucleus(draw, total);
        if (target >= sum) return NO_TOKEN;
        total = load_shared(&sums[first_beyond(sums, kept, target)]);
    }
    return (u32)(load_shared(&shared->list[first_beyond(sums, kept, uniform_part(total, draw.seed, draw.position))]) & TOKEN_MASK);
}

// The same, whatever it takes: up to three searches. They are one loop, so that the search is there once: a multiprocessor keeps 128 KiB
// of instructions.
DEVICE u32 draw_by_search(Row& row, const Draw& draw, Shared* shared, bool by_count, u64 sum) {
    for (u32 question = by_count ? 0 : 1;; question++) {
        u64 target = draw.top_k - 1;
        if (question == 1) {
            if (!(draw.top_p < 1.f)) continue;
            target = nucleus(draw, sum);
        }
        if (question == 2) target = uniform_part(sum, draw.seed, draw.position);
        const Found found = find(row, shared, question == 0 ? Measure::Count : Measure::Sum, target);
        if (question == 2) return (u32)(found.key & TOKEN_MASK);
        row.last_key = found.key; // cuts off what comes after
        sum = question == 0 ? totals(row, shared, row.all()).sum : found.sum;
    }
}

DEVICE u32 draw_from(Row& row, const Draw& draw, Shared* shared, u64 own) {
    const bool cuts = draw.top_k != 0 || draw.top_p < 1.f;
    const u32 rank = draw.top_k != 0 && draw.top_k < RANKED ? draw.top_k + 1 : RANKED;
    const float least = cuts ? weight_of_rank(row, shared, own, rank) : infinity();
    // Where more than k are listed, nobody needs a total.
    for (bool whole = draw.top_k == 0;; whole = true) {
        Totals t = survey(row, shared, whole ? row.lightest() : least, cuts, least);
        const u32 listed = cuts ? load_shared(&shared->listed) : 0;
        if (!whole && (listed <= draw.top_k || listed > LISTED)) continue;
        if (!(row.min_p > 0.f)) t.count = row.vocab; // those that count as nothing too
        const bool by_count = draw.top_k != 0 && draw.top_k < t.count;
        if (!by_count && !(draw.top_p < 1.f)) return find_token(row, shared, uniform_part(t.sum, draw.seed, draw.position));
        const u32 token = listed <= LISTED ? draw_from_list(draw, shared, listed, by_count, t.sum) : NO_TOKEN;
        return token != NO_TOKEN ? token : draw_by_search(row, draw, shared, by_count, t.sum);
    }
}

KERNEL(sample, SampleParams, THREADS, 2, sizeof(Shared)) {
    Shared* shared = (Shared*)shared_memory();
    const float* logits = p.logits + (u64)block_index() * p.vocab;
    const Draw& draw = p.draws[block_index()];
    const u64 own = own_best(logits, p.vocab, shared);
    const u64 best = best_of(own, shared);
    const u32 greedy = best == ~0ull ? NO_TOKEN : 0xffffffffu - (u32)best;
    if (thread_index() == 0) p.tokens[block_index()] = greedy;
    const float highest = greedy == NO_TOKEN ? 0.f : logits[greedy];
    if (greedy == NO_TOKEN || !(draw.temperature > 0.f) || draw.top_k == 1 || !(highest > -infinity())) return;
    // A scale of infinity would make a number of none of the highest's 0, and a min-p beyond 1 leave no candidate.
    const float scale = divide(LOG2_E, maximum(draw.temperature, 1e-30f)), min_p = draw.min_p < 1.f ? draw.min_p : 1.f;
    Row row = {logits, p.vocab, highest, scale, min_p, 0, LAST_KEY};
    const u32 token = draw_from(row, draw, shared, own);
    if (thread_index() == 0) p.tokens[block_index()] = token;
}
