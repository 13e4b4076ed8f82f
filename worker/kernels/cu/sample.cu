// Draws a token from logits: greedy, or with temperature, min-p, top-k and top-p, seeded.
//
// Algorithm: a token's weight is e^((logit - highest) / temperature), at most 1, summed as a fixed-point number of 40 fractional bits:
// sums are exact, so that they depend on no order. Everything then is one question, asked at most three times: in an order of the
// candidates, which is the first one whose running sum (or count) passes a target? Top-k: the count, k - 1. Top-p (Holtzman et al.
// 2020): the sum, p of the total. The draw: the sum, a uniform number's part of the total. The order is that of weights (the
// lower token among equals) where top-k or top-p cut, and that of tokens elsewhere, as in worker/src/backend/sample.rs, whose seeding
// (SplitMix64 of seed and position) this shares too. The question is answered by radix search: a key of 54 bits, 9 at a time, with a
// histogram of sums over the 512 values of the digit.
//
// Shapes: logits [rows, vocab] f32, vocab below 2^24; draws [rows]; tokens [rows], NO_TOKEN where a logit is NaN or +inf (-inf is a
// token withheld). Grid: one block for each row. Bytes: 4 · vocab from memory, and up to 21 times more from the cache. FLOPs: 4 a
// logit and pass, an exponential among them.
#include "dev.cuh"

static constexpr u32 NO_TOKEN = 0xffffffffu;
static constexpr int DIGIT_BITS = 9, BINS = 1 << DIGIT_BITS, TOKEN_BITS = 24;
static constexpr u64 TOKEN_MASK = (1u << TOKEN_BITS) - 1;

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

struct Histogram { u64 bins[BINS], chosen_bin, sum_before, scratch[32][2]; };

struct Row {
    const float* logits;
    u32 vocab;
    float highest, temperature, min_p;
    u64 last_key; // candidates beyond it are cut off
};

// Ascending in the order of weights: the heavier first, then the lower token. Weights are at most 1: their top two bits say nothing.
DEVICE u64 key_by_weight(float weight, u32 token) { return (u64)(~float_to_bits(weight) & 0x3fffffffu) << TOKEN_BITS | token; }
DEVICE u64 fixed_point(float weight) { return (u64)(weight * 1099511627776.f); }

template <class Visit> DEVICE void each_candidate(const Row& row, Visit visit) {
    for (u32 token = thread_index(); token < row.vocab; token += block_threads()) {
        const float weight = exp2_approx(divide(row.logits[token] - row.highest, row.temperature) * LOG2_E);
        const u64 key = key_by_weight(weight, token);
        if (weight >= row.min_p && key <= row.last_key) visit(weight, key, token);
    }
}

struct Totals { u64 count, sum; };

DEVICE Totals totals(const Row& row, Histogram* shared) {
    Totals t = {0, 0};
    each_candidate(row, [&](float weight, u64, u32) { t.count++, t.sum += fixed_point(weight); });
    for (u32 mask = 16; mask; mask /= 2) t.count += shuffle_xor(t.count, mask), t.sum += shuffle_xor(t.sum, mask);
    if ((thread_index() & 31) == 0) {
        store_shared(&shared->scratch[thread_index() >> 5][0], t.count);
        store_shared(&shared->scratch[thread_index() >> 5][1], t.sum);
    }
    barrier();
    t = {0, 0};
    for (u32 warp = 0; warp < block_threads() / 32; warp++)
        t.count += load_shared(&shared->scratch[warp][0]), t.sum += load_shared(&shared->scratch[warp][1]);
    return t; // a search, with barriers of its own, comes before the next totals
}

// One warp: the first bin at which the running sum passes the target, and the sum before it.
DEVICE void choose_bin(Histogram* shared, u64 sum_before, u64 target) {
    constexpr int EACH = BINS / 32;
    const u32 lane = thread_index();
    u64 own = 0;
    for (int i = 0; i < EACH; i++) own += load_shared(&shared->bins[lane * EACH + i]);
    u64 running = own;
    for (u32 by = 1; by < 32; by *= 2) {
        const u64 below = shuffle_up(running, by);
        if (lane >= by) running += below;
    }
    running += sum_before;
    if (running <= target || running - own > target) return;
    running -= own;
    for (int i = 0; i < EACH; i++) {
        const u64 next = running + load_shared(&shared->bins[lane * EACH + i]);
        if (next > target) {
            store_shared(&shared->chosen_bin, (u64)(lane * EACH + i));
            store_shared(&shared->sum_before, running);
            return;
        }
        running = next;
    }
}

enum class Order { Weights, Tokens };
enum class Measure { Count, Sum };

// The key of the first candidate at which the running measure passes the target, which is below the total.
template <Order ORDER, Measure MEASURE> DEVICE u64 find(const Row& row, Histogram* shared, u64 target) {
    u64 prefix = 0, sum_before = 0;
    for (int shift = (ORDER == Order::Weights ? 5 : 2) * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        for (u32 bin = thread_index(); bin < BINS; bin += block_threads()) store_shared(&shared->bins[bin], (u64)0);
        barrier();
        each_candidate(row, [&](float weight, u64 by_weight, u32 token) {
            const u64 key = ORDER == Order::Weights ? by_weight : token;
            if (key >> shift >> DIGIT_BITS == prefix)
                add_shared(&shared->bins[key >> shift & (BINS - 1)], MEASURE == Measure::Count ? 1 : fixed_point(weight));
        });
        barrier();
        if (thread_index() < 32) choose_bin(shared, sum_before, target);
        barrier();
        prefix = prefix << DIGIT_BITS | load_shared(&shared->chosen_bin);
        sum_before = load_shared(&shared->sum_before);
    }
    return prefix;
}

// The highest logit and the lowest token that has it, as one number that is higher for what is better; all ones for a logit that is
// NaN or +inf.
DEVICE u64 best_of(const float* logits, u32 vocab, Histogram* shared) {
    u64 best = 0;
    for (u32 token = thread_index(); token < vocab; token += block_threads()) {
        const u32 bits = float_to_bits(logits[token] + 0.f); // -0 becomes 0
        const u32 ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
        const bool number = logits[token] < infinity();
        const u64 key = number ? (u64)ascending << 32 | (0xffffffffu - token) : ~0ull;
        best = key > best ? key : best;
    }
    for (u32 mask = 16; mask; mask /= 2) {
        const u64 other = shuffle_xor(best, mask);
        best = other > best ? other : best;
    }
    if ((thread_index() & 31) == 0) store_shared(&shared->scratch[thread_index() >> 5][0], best);
    barrier();
    for (u32 warp = 0; warp < block_threads() / 32; warp++) {
        const u64 other = load_shared(&shared->scratch[warp][0]);
        best = other > best ? other : best;
    }
    barrier();
    return best;
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

DEVICE u32 draw_from(Row& row, const Draw& draw, Histogram* shared) {
    Totals t = totals(row, shared);
    bool sorted = false;
    if (draw.top_k != 0 && draw.top_k < t.count) {
        row.last_key = find<Order::Weights, Measure::Count>(row, shared, draw.top_k - 1);
        sorted = true;
        t = totals(row, shared);
    }
    if (draw.top_p < 1.f) {
        row.last_key = find<Order::Weights, Measure::Sum>(row, shared, ceiling((double)draw.top_p * (double)t.sum) - 1);
        sorted = true;
        t = totals(row, shared);
    }
    const u64 target = uniform_part(t.sum, draw.seed, draw.position);
    if (sorted) return (u32)(find<Order::Weights, Measure::Sum>(row, shared, target) & TOKEN_MASK);
    return (u32)find<Order::Tokens, Measure::Sum>(row, shared, target);
}

KERNEL(sample, SampleParams, 512, 1, sizeof(Histogram)) {
    Histogram* shared = (Histogram*)shared_memory();
    const float* logits = p.logits + (u64)block_index() * p.vocab;
    const Draw draw = p.draws[block_index()];
    const u64 best = best_of(logits, p.vocab, shared);
    const u32 best_token = 0xffffffffu - (u32)best;
    u32 token = best == ~0ull ? NO_TOKEN : best_token;
    const float highest = token == NO_TOKEN ? 0.f : logits[token];
    if (token != NO_TOKEN && draw.temperature > 0.f && draw.top_k != 1 && highest > -infinity()) {
        Row row = {logits, p.vocab, highest, draw.temperature, draw.min_p, ~0ull};
        token = draw_from(row, draw, shared);
    }
    if (thread_index() == 0) p.tokens[block_index()] = token;
}
