// RMSNorm of the residual stream, which may take a layer's output in first.
//
// Algorithm: x += addend (where there is one, x is written back); out = x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), in
// Hugging Face's order: normalise, then weigh. The stream is f32, what the products read and write is bf16. A thread adds its own
// squares in order, then lanes, then warps: the same sum for a row whatever else is in the batch.
//
// Shapes: x [rows, width] f32; addend, out [rows, width] bf16; weight [width] f32; width a multiple of 8.
// Grid: one block for each row. Bytes: 6 a number (12 with an addend); read a second time from the cache. FLOPs: 4 a number.
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

KERNEL(rms_norm, RmsNormParams, 256, 4, 32 * sizeof(float)) {
    float* row = p.x + (u64)block_index() * p.width;
    const u64 first = (u64)block_index() * p.width;
    float squares = 0.f;
    for (u32 i = thread_index() * 8; i < p.width; i += block_threads() * 8) {
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
        UNROLL
        for (int e = 0; e < 8; e++) squares += number(x, e) * number(x, e);
    }
    squares = over_block<Sum>(squares, (float*)shared_memory());
    const float scale = divide(1.f, square_root(divide(squares, (float)p.width) + p.eps));
    for (u32 i = thread_index() * 8; i < p.width; i += block_threads() * 8) {
        const Floats8 x = load_8(row + i), weight = load_8(p.weight + i);
        Chunk16 out;
        UNROLL
        for (int pair = 0; pair < 4; pair++)
            out.words[pair] = pack_bf16(number(x, 2 * pair) * scale * number(weight, 2 * pair),
                                        number(x, 2 * pair + 1) * scale * number(weight, 2 * pair + 1));
        store_global_16(p.out + first + i, out);
    }
}
