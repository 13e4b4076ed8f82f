// What the kernels of a mixture of experts agree on: pairs and tiles.
//
// A pair is a row and one of its experts: number row · top_k + slot. moe_group.cu brings the pairs of an expert together; moe_gemm.cu
// multiplies them in tiles, none of which has pairs of two experts; moe_sum.cu puts a row's results together again.
#pragma once
#include "dev.cuh"

static constexpr u32 MOE_TILE_PAIRS = 64;

struct MoeTile { u32 expert, first, end; }; // places [first, end), at most MOE_TILE_PAIRS
