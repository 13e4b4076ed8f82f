// RMSNorm of the residual stream, which may take a layer's output in first.
//
// Algorithm: x += addend (where there is one, x is written back); out = x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), in
// Hugging Face's order: normalise, then weigh. The stream is f32, what the products read and write is bf16. A thread adds its own
// squares in order, then lanes, then warps: the same sum for a row whatever else is in the batch.
//
// Shapes: x [rows, width] f32; addend, out [rows, width] bf16; weight [width] f32; width a multiple of 8.
// Grid: one block for each row. Bytes: 6 a number (12 with an addend); of rows of more than 4,096 the rest is read a second time, from the
// cache. FLOPs: 4 a number.
#include "reduce.cuh"

struct RmsNormParams {
    float* x;
    const bf16* addend; // or null
    const float* weight;
    bf16* out;
    u32 width;
    float eps;
};

// Not by load_global_16: the stream is written here, and read again.
struct Floats8 { Chunk16 halves[2]; };
DEVICE Floats8 load_8(const float* from) { return {{*(const Chunk16*)from, *(const Chunk16*)(from + 4)}}; }
DEVICE float number(const Floats8& v, int i) { return bits_to_float(v.halves[i / 4].words[i % 4]); }

// Eight numbers of a row, the addend taken in.
DEVICE Floats8 take_in(const RmsNormParams& p, float* row, u64 first, u32 i) {
    Floats8 x = load_8(row + i);
    if (p.addend) {
        const Chunk16 addend = load_global_16(p.addend + first + i);
        UNROLL
        for (int pair = 0; pair < 4; pair++) {
            u32* to = &x.halves[pair / 2].words[pair % 2 * 2];
            to[0] = float_to_bits(bits_to_float(to[0]) + bf16_low(addend.words[pair]));
            to[1] = float_to_bits(bits_to_float(to[1]) + bf16_high(addend.words[pair]));
        }
        store_global_16(row + i, x.halves[0]);
        store_global_16(row + i + 4, x.halves[1]);
    }
    return x;
}
DEVICE float with_squares(float squares, const Floats8& x) {
    UNROLL
    for (int e = 0; e < 8; e++) squares += number(x, e) * number(x, e);
    return squares;
}
DEVICE Chunk16 weighed(const Floats8& x, float scale, const Floats8& weight) {
    Chunk16 out;
    UNROLL
    for (int pair = 0; pair < 4; pair++)
        out.words[pair] = pack_bf16(number(x, 2 * pair) * scale * number(weight, 2 * pair),
                                    number(x, 2 * pair + 1) * scale * number(weight, 2 * pair + 1));
    return out;
}

// Of a row, what a thread keeps from the first pass for the second: its first numbers, and their weights.
static constexpr u32 KEPT = 2;

KERNEL_AHEAD(rms_norm, RmsNormParams, 256, 4, 32 * sizeof(float)) {
    float* row = p.x + (u64)block_index() * p.width;
    const u64 first = (u64)block_index() * p.width;
    const u32 own = thread_index() * 8, stride = block_threads() * 8;
    let_next_begin();
    Floats8 weights[KEPT], kept[KEPT];
    UNROLL
    for (u32 k = 0; k < KEPT; k++)
        if (own + k * stride < p.width) weights[k] = load_8(p.weight + own + k * stride);
    wait_for_before();
    float squares = 0.f;
    UNROLL
    for (u32 k = 0; k < KEPT; k++)
        if (own + k * stride < p.width) {
            kept[k] = take_in(p, row, first, own + k * stride);
            squares = with_squares(squares, kept[k]);
        }
    for (u32 i = own + KEPT * stride; i < p.width; i += stride) squares = with_squares(squares, take_in(p, row, first, i));
    squares = over_block<Sum>(squares, (float*)shared_memory());
    const float scale = divide(1.f, square_root(divide(squares, (float)p.width) + p.eps));
    UNROLL
    for (u32 k = 0; k < KEPT; k++)
        if (own + k * stride < p.width) store_global_16(p.out + first + own + k * stride, weighed(kept[k], scale, weights[k]));
    for (u32 i = own + KEPT * stride; i < p.width; i += stride)
        store_global_16(p.out + first + i, weighed(load_8(row + i), scale, load_8(p.weight + i)));
}
