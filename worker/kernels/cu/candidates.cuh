// The candidates of a row of logits, their weights and order, and what is asked of them: how much there is, and where a running sum passes a
// target. What sample.cu is made of.
//
// A list in shared memory, of at most 2048 candidates, is sorted and summed up at once. More than that a radix search cuts down: a key has
// 54 bits, of which it takes 8 at a time, with sums over the 256 values of the digit, until what is left fits the list. Of atomic
// additions, of 32 bits, that takes at most two a candidate and digit, and no two lanes of a warp meet in a bank, whatever the logits: a
// lane has sums of its own. A warp that lists candidates adds once for all its lanes.
#pragma once
#include "dev.cuh"

static constexpr int THREADS = 512, WARPS = THREADS / 32;
static constexpr int DIGIT_BITS = 8, BINS = 1 << DIGIT_BITS, TOKEN_BITS = 24, LAST_SHIFT = 48; // of a key's 54 bits
static constexpr int LISTED = 2048;
static constexpr int KEYS = 8; // of a lane, made at once
static constexpr u64 TOKEN_MASK = (1u << TOKEN_BITS) - 1, NO_KEY = ~0ull, LAST_KEY = NO_KEY - 1;

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

    // A candidate of less weight is none, or counts as nothing.
    DEVICE float lightest() const { return maximum(min_p, 1.f / 1099511627776.f); }
    DEVICE float weight(float logit) const { return exp2_approx((logit - highest) * scale); }
    DEVICE u64 key(float logit, u32 token) const {
        const float weight = this->weight(logit);
        return weight >= min_p ? key_by_weight(weight, token) : NO_KEY;
    }
    DEVICE bool has(u64 key) const { return key >= first_key && key <= last_key; }
    DEVICE Range all() const { return {0, vocab}; }
};

// What a lane has of 32 · COUNT tokens, 32 from one to the next; `absent` where the range has no more. Behind a branch, so that the compiler
// has all loads under way before the first is used.
template <int COUNT> DEVICE void load_tile(float (&to)[COUNT], const float* logits, Range range, u32 first, float absent) {
    const float* from = logits + first;
    const u32 left = first < range.end ? range.end - first : 0;
    if (left > (COUNT - 1) * 32) {
        UNROLL
        for (int e = 0; e < COUNT; e++) to[e] = from[e * 32];
    } else {
        UNROLL
        for (int e = 0; e < COUNT; e++) to[e] = (u32)e * 32 < left ? from[e * 32] : absent;
    }
}

// Calls visit(key) in whole warps, with keys of a range that need not be the row's candidates: it asks `has`.
template <class Visit> DEVICE void each_key(const Row& row, Range range, Visit visit) {
    const Range own = range.of_warp(thread_index() >> 5);
    for (u32 first = own.begin + (thread_index() & 31), left = own.end - own.begin; left; first += 32 * KEYS) {
        float logits[KEYS];
        load_tile(logits, row.logits, own, first, 0.f);
        UNROLL
        for (int e = 0; e < KEYS; e++) visit(first + e * 32 < own.end ? row.key(logits[e], first + e * 32) : NO_KEY);
        left -= left < 32 * KEYS ? left : 32 * KEYS;
    }
}

struct Totals { u32 count; u64 sum; };

DEVICE Totals totals_of_warp(u32 count, u64 sum) {
    for (u32 mask = 16; mask; mask /= 2) count += shuffle_xor(count, mask), sum += shuffle_xor(sum, mask);
    return {count, sum};
}

// Of all threads; what each warp has of them stays in `of_warps`.
DEVICE Totals totals_of_block(Shared* shared, u32 count, u64 sum) {
    const Totals own = totals_of_warp(count, sum);
    const u32 lane = thread_index() & 31;
    barrier(); // all have read what the totals before left
    if (lane == 0) {
        store_shared(&shared->counts[thread_index() >> 5], own.count);
        store_shared(&shared->of_warps[thread_index() >> 5], own.sum);
    }
    barrier();
    return totals_of_warp(lane < WARPS ? load_shared(&shared->counts[lane]) : 0, lane < WARPS ? load_shared(&shared->of_warps[lane]) : 0);
}

// Of the row's candidates in a range.
DEVICE Totals totals(const Row& row, Shared* shared, Range range) {
    u32 count = 0;
    u64 sum = 0;
    each_key(row, range, [&](u64 key) {
        if (row.has(key)) count++, sum += fixed_point(weight_of(key));
    });
    return totals_of_block(shared, count, sum);
}

// The sum of a warp's lanes up to this one.
DEVICE u64 running_sum(u64 value) {
    for (u32 by = 1; by < 32; by *= 2) {
        const u64 below = shuffle_up(value, by);
        if ((thread_index() & 31) >= by) value += below;
    }
    return value;
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
    const u64 running = running_sum(row.has(key) ? fixed_point(weight_of(key)) : 0);
    return range.begin + count_bits(ballot(running <= target));
}

// Puts the keys of a warp's lanes that have one into the list, where they find room, and counts all.
DEVICE void append(Shared* shared, bool has, u64 key) {
    const u32 lane = thread_index() & 31, lanes = ballot(has);
    if (!lanes) return;
    u32 at = lane == 0 ? add_shared(&shared->listed, count_bits(lanes)) : 0;
    at = shuffle(at, 0) + count_bits(lanes & ((1u << lane) - 1));
    if (has && at < LISTED) store_shared(&shared->list[at], key);
}

// Puts the row's candidates into the list, where they find room; returns how many there are.
DEVICE u32 list(const Row& row, Shared* shared) {
    if (thread_index() == 0) store_shared(&shared->listed, 0u);
    barrier();
    each_key(row, row.all(), [&](u64 key) { append(shared, row.has(key), key); });
    barrier();
    return load_shared(&shared->listed);
}

// Sorts the first keys of the list, as many as a power of two, that the block has just written (Batcher 1968).
DEVICE void sort(Shared* shared, u32 size) {
    barrier();
    for (u32 run = 2; run <= size; run *= 2)
        for (u32 step = run / 2; step; step /= 2) {
            for (u32 pair = thread_index(); pair < size / 2; pair += THREADS) {
                const u32 at = 2 * pair - (pair & (step - 1));
                const u64 a = load_shared(&shared->list[at]), b = load_shared(&shared->list[at + step]);
                if ((at & run) == 0 ? a > b : a < b) store_shared(&shared->list[at], b), store_shared(&shared->list[at + step], a);
            }
            barrier();
        }
}

// Sorts the list, and sums it up: what there is up to each place, in room of the search's sums.
DEVICE u64* sort_and_sum(Shared* shared, u32 listed) {
    u32 size = 32;
    while (size < listed) size *= 2;
    for (u32 i = listed + thread_index(); i < size; i += THREADS) store_shared(&shared->list[i], NO_KEY);
    sort(shared, size);
    u64* sums = (u64*)shared->low;
    const u32 each = size > THREADS ? size / THREADS : 1, begin = thread_index() * each, end = begin < size ? begin + each : begin;
    u64 own = 0;
    for (u32 i = begin; i < end; i++) own += fixed_point(weight_of(load_shared(&shared->list[i])));
    u64 running = running_sum(own);
    if ((thread_index() & 31) == 31) store_shared(&shared->of_warps[thread_index() >> 5], running);
    barrier();
    for (u32 warp = 0; warp < thread_index() >> 5; warp++) running += load_shared(&shared->of_warps[warp]);
    running -= own;
    for (u32 i = begin; i < end; i++) {
        running += fixed_point(weight_of(load_shared(&shared->list[i])));
        store_shared(&sums[i], running);
    }
    barrier();
    return sums;
}

// The first of so many running sums that passes the target, which is below the last.
DEVICE u32 first_beyond(const u64* sums, u32 count, u64 target) {
    u32 begin = 0;
    for (u32 end = count - 1; begin < end;) {
        const u32 middle = (begin + end) / 2;
        if (load_shared(&sums[middle]) > target) end = middle;
        else begin = middle + 1;
    }
    return begin;
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
    u64 running = running_sum(own) + sum_before;
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
struct Found { u64 key, sum; };

// The first candidate, in the order of weights, at which the running measure passes the target, which is below the total: its key, and the
// sum (of Measure::Sum) up to it.
DEVICE Found find(Row row, Shared* shared, Measure measure, u64 target) {
    u64 sum_before = 0;
    for (int shift = LAST_SHIFT;; shift -= DIGIT_BITS) {
        barrier(); // all have read what was there
        for (u32 i = thread_index(); i < 2 * BINS * 32 / 4; i += THREADS) store_shared((Chunk16*)shared->low + i, Chunk16{});
        barrier();
        each_key(row, row.all(), [&](u64 key) {
            if (row.has(key)) add(shared, key >> shift & (BINS - 1), measure == Measure::Count ? 1 : fixed_point(weight_of(key)));
        });
        barrier();
        choose_bin(shared, sum_before, target);
        barrier();
        row.first_key |= load_shared(&shared->chosen_bin) << shift;
        row.last_key = row.first_key | ((1ull << shift) - 1); // what a cut left out comes after what is looked for
        sum_before = load_shared(&shared->sum_before);
        const u32 listed = list(row, shared);
        if (listed > LISTED) continue; // not of the last digit, nor the one before
        const u64* sums = sort_and_sum(shared, listed);
        const u32 at = measure == Measure::Count ? target - sum_before : first_beyond(sums, listed, target - sum_before);
        return {load_shared(&shared->list[at]), sum_before + load_shared(&sums[at])};
    }
}
