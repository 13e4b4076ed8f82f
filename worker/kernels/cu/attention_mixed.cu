// Prefill and decode of one step in one launch: the blocks of attention_prefill.cu, and among them those of attention_decode.cu.
//
// Algorithm: theirs, unchanged, so that a row has the bits that it has by those; that both kinds should run side by side is the idea of
// POD-Attention (Kamath et al. 2025). One launch in place of two lets decode blocks, which wait
// for memory, run beside prefill blocks, which wait for the tensor cores, and saves the pause in which the last of a first launch are
// alone. attention_combine.cu comes afterwards as after decode.
//
// Shapes: theirs. Grid: the blocks of both grids, each in its order, those of decode spread evenly among those of prefill, since blocks
// begin in the order of the grid, and decode behind prefill would begin when prefill ends. Threads: those of prefill; decode at
// head_dim 256 uses the first two warps. Shared memory: the more of both. Registers: likewise, which costs decode blocks occupancy; a
// step with only one kind has its own kernel. Bytes and FLOPs: those of both.
#define BODIES_ONLY
#include "attention_prefill.cu"
#include "attention_decode.cu"

struct MixedParams {
    PrefillParams prefill;
    DecodeParams decode;
    u32 prefill_blocks, decode_blocks;
};

template <class P, class D> DEVICE void mixed(const MixedParams& p) {
    static_assert(P::THREADS >= D::THREADS, "every thread of decode is there");
    // Decode blocks before this one, if they are spread evenly over the grid; it is one itself if there is one more before the next.
    const u64 blocks = (u64)p.prefill_blocks + p.decode_blocks, share = (u64)block_index() * p.decode_blocks;
    const u32 before = share / blocks;
    if (share - before * blocks + p.decode_blocks < blocks) {
        const u32 block = block_index() - before;
        return prefill<P>(p.prefill, block / p.prefill.heads, block % p.prefill.heads, shared_memory());
    }
    if (thread_index() >= D::THREADS) return barrier(); // the one of all threads that decode has
    decode<D>(p.decode, before, shared_memory());
}

template <class P, class D> static constexpr int mixed_shared_bytes = P::SHARED_BYTES > D::SHARED_BYTES ? P::SHARED_BYTES : D::SHARED_BYTES;

KERNEL(attention_mixed_64, MixedParams, Prefill64::THREADS, 2, (mixed_shared_bytes<Prefill64, Decode64>)) { mixed<Prefill64, Decode64>(p); }
KERNEL(attention_mixed_128, MixedParams, Prefill128::THREADS, 2, (mixed_shared_bytes<Prefill128, Decode128>)) { mixed<Prefill128, Decode128>(p); }
KERNEL(attention_mixed_256, MixedParams, Prefill256::THREADS, 2, (mixed_shared_bytes<Prefill256, Decode256>)) { mixed<Prefill256, Decode256>(p); }
