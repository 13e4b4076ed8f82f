// Where the keys and values of a sequence lie: what prefill, decode and the store of new ones agree on.
//
// A layer's pool is [blocks, kv_heads, block_tokens, head_dim] in bf16, once for keys and once for values, so that the positions of a
// head in a block are neighbours. block_tokens is a power of two. Offsets of numbers are 64 bits wide: 500,000 blocks of 16 tokens, 8
// heads and 128 numbers are 8.2e9 numbers.
#pragma once
#include "dev.cuh"

// Rows of one sequence in the batch: row first_row + i has position context_tokens + i; its blocks begin at block_tables[table_start].
struct Sequence { u32 first_row, rows, context_tokens, table_start; };

struct Paging {
    const u32* block_tables;
    u32 kv_heads, block_shift; // block_tokens = 1 << block_shift
};

// The number of a slot's row of HEAD_DIM numbers in the pool. 32 bits: the host refuses pools of more rows (buffer.rs), which would be
// 1 TiB of keys and values a layer at head_dim 64.
DEVICE u32 pool_row(const Paging& paging, u32 block, u32 kv_head, u32 slot) {
    return ((block * paging.kv_heads + kv_head) << paging.block_shift) + slot;
}
// Of `position` of the sequence whose blocks begin at `table`.
DEVICE u32 row_of_position(const Paging& paging, const u32* table, u32 kv_head, u32 position) {
    return pool_row(paging, table[position >> paging.block_shift], kv_head, position & ((1u << paging.block_shift) - 1));
}

// Which positions a query at `position` sees: itself and those before it; with a window, the last `window` of them (itself counted)
// and the first `sink_tokens` (Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks").
struct Visibility { u32 window, sink_tokens; };

DEVICE bool sees(const Visibility& v, u32 position, u32 key) {
    // A difference, since key + window may be beyond 32 bits.
    return key <= position && (v.window == 0 || position - key < v.window || key < v.sink_tokens);
}

// Tiles of shared memory hold rows of HEAD_DIM numbers whose 16-byte chunks are swapped by the row, so that the eight rows which one
// ldmatrix reads at the same column lie in different banks. Returns the place of a chunk, in numbers.
template <int HEAD_DIM> DEVICE u32 swizzled(u32 row, u32 chunk) { return row * HEAD_DIM + ((chunk ^ (row & 7)) << 3); }
// From a place at column 0 or 8, the place `columns` further in its row, a multiple of 16. Only the chunks of the same 64 numbers are
// swapped, so that what is 64 further is a constant in the instruction that reads it.
DEVICE u32 along_row(u32 place, u32 columns) { return (place ^ (columns & 63)) + (columns & ~63u); }
