// Which experts a row goes to, and how much each counts (Shazeer et al. 2017, "Outrageously Large Neural Networks").
//
// Algorithm: a warp for each row. Slot by slot the highest logit below the one before is found, so that nothing is kept but the last;
// equal logits go by the expert's number, and NaN comes last, so that every slot gets an expert. Weights are the softmax over all
// experts (Qwen3-MoE without norm_topk_prob), or over the chosen ones, which is the same divided by its sum (Qwen3-MoE, Mixtral,
// gpt-oss).
//
// Shapes: logits [rows, experts] f32; chosen, weights [rows, top_k], best first; top_k at most 32. Grid: 4 rows a block.
// Bytes: 4 · experts and 8 · top_k a row; the row comes from the cache after the first slot. FLOPs: 2 · top_k · experts
// comparisons a row, and an exponential for each slot. Bound by latency.
#include "reduce.cuh"

struct MoeRouteParams {
    const float* logits;
    u32* chosen;
    float* weights;
    u32 rows, experts, top_k;
    u32 among_chosen; // 1: weights of a row add up to one
};

// Higher is better, and no two are equal.
DEVICE u64 standing(float logit, u32 expert) {
    const u32 bits = float_to_bits(logit + 0.f); // one zero only
    const u32 ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)(logit == logit ? ascending : 0) << 32 | (0xffffffffu - expert);
}

KERNEL(moe_route, MoeRouteParams, 128, 8, 0) {
    const u32 row = block_index() * 4 + (thread_index() >> 5), lane = thread_index() & 31;
    if (row >= p.rows) return;
    const float* logits = p.logits + (u64)row * p.experts;
    u64 last = ~0ull;
    float highest = 0.f, weight_of_slot = 0.f, total = 0.f;
    u32 expert_of_slot = 0; // lane i keeps slot i
    for (u32 slot = 0; slot < p.top_k; slot++) {
        u64 best = 0;
        for (u32 expert = lane; expert < p.experts; expert += 32) {
            const u64 candidate = standing(logits[expert], expert);
            if (candidate < last && candidate > best) best = candidate;
        }
        UNROLL
        for (u32 mask = 16; mask; mask /= 2) {
            const u64 other = shuffle_xor(best, mask);
            best = other > best ? other : best;
        }
        last = best;
        const u32 expert = 0xffffffffu - (u32)best;
        const float logit = logits[expert];
        if (slot == 0) highest = logit;
        const float weight = exp2_approx((logit - highest) * LOG2_E);
        total += weight;
        if (lane == slot) weight_of_slot = weight, expert_of_slot = expert;
    }
    if (!p.among_chosen) {
        float sum = 0.f;
        for (u32 expert = lane; expert < p.experts; expert += 32) sum += exp2_approx((logits[expert] - highest) * LOG2_E);
        total = over_warp<Sum>(sum);
    }
    if (lane < p.top_k) {
        p.chosen[(u64)row * p.top_k + lane] = expert_of_slot;
        p.weights[(u64)row * p.top_k + lane] = divide(weight_of_slot, total);
    }
}
