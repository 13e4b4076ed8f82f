// One number out of many: over the lanes of a warp, and over the warps of a block. Every thread gets the result.
#pragma once
#include "dev.cuh"

struct Sum { DEVICE static float of(float a, float b) { return a + b; } };
struct Highest { DEVICE static float of(float a, float b) { return maximum(a, b); } };

// Over each LANES neighbours, a power of two. All lanes of the warp take part.
template <class Operation, u32 LANES = 32> DEVICE float over_warp(float value) {
    UNROLL
    for (u32 mask = LANES / 2; mask; mask /= 2) value = Operation::of(value, shuffle_xor(value, mask));
    return value;
}

// `scratch` has a number for each warp, at most 32. Warps are added up in order. The caller puts a barrier between two uses.
template <class Operation> DEVICE float over_block(float value, float* scratch) {
    value = over_warp<Operation>(value);
    if ((thread_index() & 31) == 0) store_shared(scratch + (thread_index() >> 5), value);
    barrier();
    float result = load_shared(scratch);
    for (u32 warp = 1; warp < block_threads() / 32; warp++) result = Operation::of(result, load_shared(scratch + warp));
    return result;
}
