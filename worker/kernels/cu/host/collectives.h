// What the lanes of a warp compute together, once all 32 have come. PTX ISA, sections on ldmatrix, mma.m16n8k16 and shfl. Next:
// products.h is what they start together and wait for later.
#pragma once

namespace host {

static inline float widen(u16 bits) {
    u32 wide = (u32)bits << 16;
    float number;
    memcpy(&number, &wide, 4);
    return number;
}
// To nearest even; NaN stays NaN.
static inline u32 round_bf16(float number) {
    u32 bits;
    memcpy(&bits, &number, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline void collective(Op op, const void* operands, void* result) {
    Lane* lane = machine.current;
    lane->op = op;
    lane->operands = operands;
    lane->result = result;
    machine.stop(State::AtCollective);
}

// One row of a matrix that the whole warp reads.
static inline void read_matrix_row(const void* row) {
    machine.check(row, 16, 16, "ldmatrix");
    Who who = machine.who();
    who.thread = Who::WHOLE_WARP;
    machine.shadow.read(machine.place(row), 16, who);
}

static void load_matrix(Lane* warp, bool transposed) {
    u32 results[32][4];
    auto half = [&](int lane, int matrix, int which) -> u16& { return ((u16*)&results[lane][matrix])[which]; };
    for (int matrix = 0; matrix < 4; matrix++) {
        for (int row = 0; row < 8; row++) {
            auto numbers = (const u16*)warp[matrix * 8 + row].operands;
            for (int column = 0; column < 8; column++) {
                if (transposed) half(column * 4 + row / 2, matrix, row % 2) = numbers[column];
                else half(row * 4 + column / 2, matrix, column % 2) = numbers[column];
            }
        }
    }
    for (int lane = 0; lane < 32; lane++) memcpy(warp[lane].result, results[lane], 16);
}

static void multiply(Lane* warp) {
    float a[16][16], b[16][8], sum[16][8] = {};
    for (int lane = 0; lane < 32; lane++) {
        const int row = lane / 4, column = lane % 4 * 2;
        auto from = (const u16*)warp[lane].operands;
        for (int i = 0; i < 2; i++) {
            a[row][column + i] = widen(from[i]);
            a[row + 8][column + i] = widen(from[2 + i]);
            a[row][column + 8 + i] = widen(from[4 + i]);
            a[row + 8][column + 8 + i] = widen(from[6 + i]);
            b[column + i][row] = widen(from[8 + i]);
            b[column + 8 + i][row] = widen(from[10 + i]);
        }
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) sum[i][j] += a[i][k] * b[k][j];
    for (int lane = 0; lane < 32; lane++) {
        const int row = lane / 4, column = lane % 4 * 2;
        auto to = (float*)warp[lane].result;
        to[0] += sum[row][column];
        to[1] += sum[row][column + 1];
        to[2] += sum[row + 8][column];
        to[3] += sum[row + 8][column + 1];
    }
}

static void shuffle(Lane* warp, Op op) {
    u64 values[32];
    for (int lane = 0; lane < 32; lane++) values[lane] = ((const u64*)warp[lane].operands)[0];
    for (int lane = 0; lane < 32; lane++) {
        const int by = (int)((const u64*)warp[lane].operands)[1];
        int from = by; // of Op::Shuffle
        if (op == Op::ShuffleXor) from = lane ^ by;
        if (op == Op::ShuffleUp) from = lane >= by ? lane - by : lane;
        *(u64*)warp[lane].result = values[from % 32];
    }
}

static void ballot_of(Lane* warp) {
    u32 bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= (u32)(*(const bool*)warp[lane].operands) << lane;
    for (int lane = 0; lane < 32; lane++) memcpy(warp[lane].result, &bits, sizeof bits);
}

static void start_product(Lane* warp);
static void commit_products(Lane* warp);
static void wait_for_products(Lane* warp);

void run_collective(Lane* warp) {
    for (int lane = 1; lane < 32; lane++)
        if (warp[lane].op != warp[0].op) { machine.refuse("lanes that meet at different warp-wide instructions"); return; }
    switch (warp[0].op) {
    case Op::Barrier: machine.shadow.phases.end(warp->index / 32); break;
    case Op::NamedBarrier: machine.arrive(warp, true); break;
    case Op::NamedArrival: machine.arrive(warp, false); break;
    case Op::Registers: break;
    case Op::ProductFence: machine.products[warp->index / 32].fenced = true; break;
    case Op::ProductCommit: commit_products(warp); break;
    case Op::ProductWait: wait_for_products(warp); break;
    case Op::Product: start_product(warp); break;
    case Op::LoadMatrix: load_matrix(warp, false); break;
    case Op::LoadMatrixTransposed: load_matrix(warp, true); break;
    case Op::Multiply: multiply(warp); break;
    case Op::Shuffle:
    case Op::ShuffleXor:
    case Op::ShuffleUp: shuffle(warp, warp[0].op); break;
    case Op::Ballot: ballot_of(warp); break;
    case Op::None: break;
    }
}

} // namespace host
