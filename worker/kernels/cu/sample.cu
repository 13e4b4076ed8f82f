// Draws a token from logits: greedy, or with temperature, min-p, top-k and top-p, seeded.
//
// Algorithm: a token's weight is e^((logit - highest) / temperature), at most 1, summed as a fixed-point number of 40 fractional bits:
// sums are exact, so that they depend on no order. Everything then is one question, asked at most three times: in an order of the
// candidates, which is the first one whose running sum (or count) passes a target? Top-k: the count, k - 1. Top-p (Holtzman et al.
// 2020): the sum, p of the total. The draw: the sum, a uniform number's part of the total. The order is that of weights (the
// lower token among equals) where top-k or top-p cut, and that of tokens elsewhere, as in worker/src/backend/sample.rs, whose seeding
// (SplitMix64 of seed and position) this shares too.
//
// In the order of tokens each warp sums a part of the row; the part in which the target is passed is divided again, until 32 tokens are
// left. In the order of weights a radix search takes a key of 54 bits, 8 at a time, with sums over the 256 values of the digit. As
// soon as at most 2048 candidates are left, of a search or of a cut, they lie in a list in shared memory, and the rest is done there.
//
// Shapes: logits [rows, vocab] f32, vocab below 2^24; draws [rows]; tokens [rows], NO_TOKEN where a logit is NaN or +inf (-inf is a
// token withheld). Grid: one block for each row. Bytes: 4 · vocab from memory; from the cache as much again for a draw in the order of
// tokens (and a sixteenth), some four times for one with a cut, and at most 16 times for each of three searches, where logits are equal
// by the thousand. FLOPs: 4 a logit and reading, an exponential among them. Atomic additions: none in the order of tokens; elsewhere at
// most two a candidate and digit, of 32 bits, and no two lanes of a warp meet in a bank, whatever the logits: a lane has sums of its
// own. A warp that lists candidates adds once for all its lanes.
#include "dev.cuh"

static constexpr u32 NO_TOKEN = 0xffffffffu;
static constexpr int THREADS = 512, WARPS = THREADS / 32;
static constexpr int DIGIT_BITS = 8, BINS = 1 << DIGIT_BITS, TOKEN_BITS = 24, LAST_SHIFT = 48; // of a key's 54 bits
static constexpr int LISTED = 2048;
static constexpr int EACH = 8; // loads of a lane under way at once
static constexpr u64 TOKEN_MASK = (1u << TOKEN_BITS) - 1, NO_KEY = ~0ull, LAST_KEY = NO_KEY - 1;

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

struct Shared {
    u32 low[BINS][32], high[BINS][32]; // halves of each lane's sums
    u64 sums[BINS], list[LISTED];
    u64 chosen_bin, sum_before, of_warps[WARPS];
    u32 counts[WARPS], listed;
};

// Tokens, or places in the list: [begin, end).
struct Range {
    u32 begin, end;
    // Of the block's warps each has neighbours, 32 or a multiple of that.
    DEVICE Range of_warp(u32 warp) const {
        const u32 part = (end - begin + THREADS - 1) / THREADS * 32;
        const u32 from = begin + warp * part, to = from + part;
        return {from < end ? from : end, to < end ? to : end};
    }
};

// Ascending in the order of weights: the heavier first, then the lower token. Weights are at most 1: their top two bits say nothing.
DEVICE u64 key_by_weight(float weight, u32 token) { return (u64)(~float_to_bits(weight) & 0x3fffffffu) << TOKEN_BITS | token; }
DEVICE float weight_of(u64 key) { return bits_to_float(~(u32)(key >> TOKEN_BITS) & 0x3fffffffu); }
DEVICE u64 fixed_point(float weight) { return (u64)(weight * 1099511627776.f); }

struct Row {
    const float* logits;
    u32 vocab;
    float highest, scale, min_p;
    u64 first_key, last_key; // candidates elsewhere are cut off
    u32 listed;              // how many keys the list has, all candidates among them; 0 while they are to be found in the logits

    DEVICE u64 key(float logit, u32 token) const {
        const float weight = exp2_approx((logit - highest) * scale);
        return weight >= min_p ? key_by_weight(weight, token) : NO_KEY;
    }
    DEVICE bool has(u64 key) const { return key >= first_key && key <= last_key; }
    DEVICE Range all() const { return {0, listed ? listed : vocab}; }
};

// Calls visit(key) in whole warps, with keys of a range that need not be the row's: it asks `has`.
template <class Visit> DEVICE void each_key(const Row& row, const Shared* shared, Range range, Visit visit) {
    const Range own = range.of_warp(thread_index() >> 5);
    for (u32 first = own.begin + (thread_index() & 31), left = own.end - own.begin; left; first += 32 * EACH) {
        u64 keys[EACH];
        if (row.listed) {
            UNROLL
            for (int e = 0; e < EACH; e++) keys[e] = first + e * 32 < own.end ? load_shared(&shared->list[first + e * 32]) : NO_KEY;
        } else {
            float logits[EACH];
            UNROLL
            for (int e = 0; e < EACH; e++) logits[e] = first + e * 32 < own.end ? row.logits[first + e * 32] : 0.f;
            UNROLL
            for (int e = 0; e < EACH; e++) keys[e] = first + e * 32 < own.end ? row.key(logits[e], first + e * 32) : NO_KEY;
        }
        UNROLL
        for (int e = 0; e < EACH; e++) visit(keys[e]);
        left -= left < 32 * EACH ? left : 32 * EACH;
    }
}

struct Totals { u32 count; u64 sum; };

// Of the row's candidates in a range; what each warp has of them stays in `of_warps`.
DEVICE Totals totals(const Row& row, Shared* shared, Range range) {
    u64 count = 0, sum = 0;
    each_key(row, shared, range, [&](u64 key) {
        if (row.has(key)) count++, sum += fixed_point(weight_of(key));
    });
    for (u32 mask = 16; mask; mask /= 2) count += shuffle_xor(count, mask), sum += shuffle_xor(sum, mask);
    barrier(); // all have read what the totals before left
    if ((thread_index() & 31) == 0) {
        store_shared(&shared->counts[thread_index() >> 5], (u32)count);
        store_shared(&shared->of_warps[thread_index() >> 5], sum);
    }
    barrier();
    Totals t = {0, 0};
    for (u32 warp = 0; warp < WARPS; warp++) t.count += load_shared(&shared->counts[warp]), t.sum += load_shared(&shared->of_warps[warp]);
    return t;
}

// The first token at which the running sum passes the target, which is below the total: that of the totals before, over all tokens.
DEVICE u32 find_token(const Row& row, Shared* shared, u64 target) {
    Range range = row.all();
    while (range.end - range.begin > 32) {
        u32 warp = 0;
        for (u64 sum; warp + 1 < WARPS && (sum = load_shared(&shared->of_warps[warp])) <= target; warp++) target -= sum;
        range = range.of_warp(warp);
        totals(row, shared, range);
    }
    const u32 lane = thread_index() & 31, token = range.begin + lane;
    const u64 key = token < range.end ? row.key(row.logits[token], token) : NO_KEY;
    u64 running = row.has(key) ? fixed_point(weight_of(key)) : 0;
    for (u32 by = 1; by < 32; by *= 2) {
        const u64 below = shuffle_up(running, by);
        if (lane >= by) running += below;
    }
    return range.begin + count_bits(ballot(running <= target));
}

// Puts the row's candidates into the list, where they find room.
DEVICE void list(Row& row, Shared* shared) {
    const u32 lane = thread_index() & 31;
    if (row.listed) return;
    if (thread_index() == 0) store_shared(&shared->listed, 0u);
    barrier();
    each_key(row, shared, row.all(), [&](u64 key) {
        const u32 lanes = ballot(row.has(key));
        if (!lanes) return;
        u32 at = lane == 0 ? add_shared(&shared->listed, count_bits(lanes)) : 0;
        at = shuffle(at, 0) + count_bits(lanes & ((1u << lane) - 1));
        if (row.has(key) && at < LISTED) store_shared(&shared->list[at], key);
    });
    barrier();
    const u32 listed = load_shared(&shared->listed);
    row.listed = listed <= LISTED ? listed : 0;
}

// Exact and in any order: the low halves wrap, and who sees one wrap carries.
DEVICE void add(Shared* shared, u32 bin, u64 value) {
    const u32 lane = thread_index() & 31, low = (u32)value;
    if (value == 0) return;
    const u32 before = add_shared(&shared->low[bin][lane], low);
    const u32 high = (u32)(value >> 32) + (before + low < before ? 1 : 0);
    if (high) add_shared(&shared->high[bin][lane], high);
}

// The first bin at which the running sum passes the target, and the sum before it.
DEVICE void choose_bin(Shared* shared, u64 sum_before, u64 target) {
    constexpr int OF_LANE = BINS / 32;
    const u32 lane = thread_index();
    if (thread_index() < BINS) {
        u64 sum = 0;
        for (u32 i = 0; i < 32; i++) {
            const u32 of = (thread_index() + i) & 31; // each lane of a warp another bank
            sum += load_shared(&shared->low[thread_index()][of]) + ((u64)load_shared(&shared->high[thread_index()][of]) << 32);
        }
        store_shared(&shared->sums[thread_index()], sum);
    }
    barrier();
    if (lane >= 32) return;
    u64 own = 0;
    for (int i = 0; i < OF_LANE; i++) own += load_shared(&shared->sums[lane * OF_LANE + i]);
    u64 running = own;
    for (u32 by = 1; by < 32; by *= 2) {
        const u64 below = shuffle_up(running, by);
        if (lane >= by) running += below;
    }
    running += sum_before;
    if (running <= target || running - own > target) return;
    running -= own;
    for (int i = 0; i < OF_LANE; i++) {
        const u64 next = running + load_shared(&shared->sums[lane * OF_LANE + i]);
        if (next > target) {
            store_shared(&shared->chosen_bin, (u64)(lane * OF_LANE + i));
            store_shared(&shared->sum_before, running);
            return;
        }
        running = next;
    }
}

enum class Measure { Count, Sum };

// The key of the first candidate, in the order of weights, at which the running measure passes the target, which is below the total.
DEVICE u64 find(Row row, Shared* shared, Measure measure, u64 target) {
    u64 sum_before = 0;
    for (int shift = LAST_SHIFT; shift >= 0; shift -= DIGIT_BITS) {
        for (u32 i = thread_index(); i < 2 * BINS * 32 / 4; i += THREADS) store_shared((Chunk16*)shared->low + i, Chunk16{});
        barrier();
        each_key(row, shared, row.all(), [&](u64 key) {
            if (row.has(key)) add(shared, key >> shift & (BINS - 1), measure == Measure::Count ? 1 : fixed_point(weight_of(key)));
        });
        barrier();
        choose_bin(shared, sum_before, target);
        barrier();
        row.first_key |= load_shared(&shared->chosen_bin) << shift;
        row.last_key = row.first_key | ((1ull << shift) - 1); // what a cut left out comes after what is looked for
        sum_before = load_shared(&shared->sum_before);
        if (shift) list(row, shared);
    }
    return row.first_key;
}

// The highest logit and the lowest token that has it, as one number that is higher for what is better; all ones for a logit that is
// NaN or +inf.
DEVICE u64 best_of(const float* logits, u32 vocab, Shared* shared) {
    u64 best = 0;
    for (u32 first = thread_index(); first < vocab; first += EACH * THREADS) {
        float numbers[EACH];
        UNROLL
        for (int e = 0; e < EACH; e++) numbers[e] = first + e * THREADS < vocab ? logits[first + e * THREADS] : -infinity();
        UNROLL
        for (int e = 0; e < EACH; e++) {
            const u32 bits = float_to_bits(numbers[e] + 0.f); // -0 becomes 0
            const u32 ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
            const bool number = numbers[e] < infinity();
            const u64 key = number ? (u64)ascending << 32 | (0xffffffffu - (first + e * THREADS)) : ~0ull;
            best = key > best ? key : best;
        }
    }
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

// Cuts off what comes after a key, and counts again.
DEVICE Totals cut(Row& row, Shared* shared, u64 last_key) {
    row.last_key = last_key;
    list(row, shared);
    return totals(row, shared, row.all());
}

// Top-k, top-p and the draw are one loop, so that the search is there once: a multiprocessor keeps 128 KiB of instructions.
DEVICE u32 draw_from(Row& row, const Draw& draw, Shared* shared) {
    Totals t = totals(row, shared, row.all());
    const bool by_count = draw.top_k != 0 && draw.top_k < t.count, by_sum = draw.top_p < 1.f;
    if (!by_count && !by_sum) return find_token(row, shared, uniform_part(t.sum, draw.seed, draw.position));
    for (u32 question = by_count ? 0 : 1;; question++) {
        u64 target = draw.top_k - 1;
        if (question == 1) {
            if (!by_sum) continue;
            const u64 kept = ceiling((double)maximum(draw.top_p, 0.f) * (double)t.sum);
            target = kept ? kept - 1 : 0;
        }
        if (question == 2) target = uniform_part(t.sum, draw.seed, draw.position);
        const u64 key = find(row, shared, question == 0 ? Measure::Count : Measure::Sum, target);
        if (question == 2) return (u32)(key & TOKEN_MASK);
        t = cut(row, shared, key);
    }
}

KERNEL(sample, SampleParams, THREADS, 1, sizeof(Shared)) {
    Shared* shared = (Shared*)shared_memory();
    const float* logits = p.logits + (u64)block_index() * p.vocab;
    const Draw draw = p.draws[block_index()];
    const u64 best = best_of(logits, p.vocab, shared);
    const u32 best_token = 0xffffffffu - (u32)best;
    u32 token = best == ~0ull ? NO_TOKEN : best_token;
    const float highest = token == NO_TOKEN ? 0.f : logits[token];
    if (token != NO_TOKEN && draw.temperature > 0.f && draw.top_k != 1 && highest > -infinity()) {
        // A scale of infinity would make a number of none of the highest's 0, and a min-p beyond 1 leave no candidate.
        const float scale = divide(LOG2_E, maximum(draw.temperature, 1e-30f)), min_p = draw.min_p < 1.f ? draw.min_p : 1.f;
        Row row = {logits, p.vocab, highest, scale, min_p, 0, LAST_KEY, 0};
        token = draw_from(row, draw, shared);
    }
    if (thread_index() == 0) p.tokens[block_index()] = token;
}
