// dev.cuh for a CPU: runs a kernel as it stands, and refuses what a GPU would let pass.
//
// A CUDA thread is a fiber; 32 of them meet at each warp-wide instruction, all of a block at each barrier, some of its warps at a named
// one. Warps go in a seeded random order, each as far as it can, so that what is missing an order shows as one. Checked on the way:
// alignment and bounds of shared memory, collectives that not all lanes reach, barriers that not all threads reach, named barriers
// whose warps disagree, copies left uncommitted, and (shadow.h) every access to shared memory against those of other threads. Copies
// land late, early or by chance. Knows no kernel: they register themselves, and host_launch below, the only way in, takes them by
// name. Caller: tests/cuda.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int32_t i32;

#define DEVICE inline
#define UNROLL
#define KERNEL(NAME, PARAMS, THREADS, BLOCKS, SHARED_BYTES)                                              \
    static void NAME(const PARAMS& p);                                                                   \
    static void NAME##_entry(const void* params) { NAME(*(const PARAMS*)params); }                       \
    static const host::Entry NAME##_registered(#NAME, NAME##_entry, sizeof(PARAMS), THREADS, SHARED_BYTES); \
    static void NAME(const PARAMS& p)
#define KERNEL_AHEAD(...) KERNEL(__VA_ARGS__)

struct bf16 { u16 bits; };
struct alignas(16) Chunk16 { u32 words[4]; };
struct alignas(8) Chunk8 { u32 words[2]; };

#include "fibers.h"
#include "shadow.h"
#include "machine.h"
#include "tensor_copies.h"
#include "collectives.h"
#include "products.h"

// --- where a thread is
DEVICE u32 thread_index() { return host::machine.current->index; }
DEVICE u32 block_index() { return host::machine.block; }
DEVICE u32 block_threads() { return (u32)host::machine.lanes.size(); }

// --- waiting for others
DEVICE void let_next_begin() {}
DEVICE void wait_for_before() {} // kernels run one behind another here
DEVICE void barrier() { host::machine.stop(host::State::AtBarrier); }
template <int ID, int THREADS> DEVICE void named_barrier() {
    const u32 operands[2] = {ID, THREADS};
    host::collective(host::Op::NamedBarrier, operands, nullptr);
}
DEVICE void warp_barrier() { host::collective(host::Op::Barrier, nullptr, nullptr); }

// --- shared memory
DEVICE unsigned char* shared_memory() { return host::machine.shared.data(); }
template <class T> DEVICE T load_shared(const T* from) {
    host::machine.check(from, sizeof(T), alignof(T), "a load");
    host::machine.shadow.read(host::machine.place(from), sizeof(T), host::machine.who());
    return *from;
}
template <class T> DEVICE void store_shared(T* to, T value) {
    host::machine.check(to, sizeof(T), alignof(T), "a store");
    host::machine.shadow.write(host::machine.place(to), sizeof(T), host::machine.who());
    *to = value;
}
DEVICE u32 add_shared(u32* to, u32 value) {
    host::machine.check(to, 4, 4, "an atomic addition");
    host::machine.shadow.add(host::machine.place(to), 4, host::machine.who());
    const u32 before = *to;
    *to += value;
    return before;
}
DEVICE void ldmatrix_x4(u32 (&to)[4], const bf16* row) {
    host::read_matrix_row(row);
    host::collective(host::Op::LoadMatrix, row, to);
}
DEVICE void ldmatrix_x4_trans(u32 (&to)[4], const bf16* row) {
    host::read_matrix_row(row);
    host::collective(host::Op::LoadMatrixTransposed, row, to);
}
DEVICE void mma_bf16(float (&sum)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    const u32 operands[6] = {a[0], a[1], a[2], a[3], b_low, b_high};
    host::collective(host::Op::Multiply, operands, sum);
}

// --- asynchronous copies
DEVICE void cp_async_16(void* to, const void* from, bool valid) {
    host::machine.check(to, 16, 16, "cp.async");
    if (valid && (uintptr_t)from % 16) host::machine.fail("cp.async from an address that is no multiple of 16");
    host::machine.copy(to, from, valid);
}
DEVICE void cp_async_commit() { host::machine.current->copies.commit(); }
template <int LEFT> DEVICE void cp_async_wait() { host::machine.land(LEFT); }

// --- sm_90a only
struct alignas(64) TensorMap { u64 opaque[16]; };
DEVICE u32 shared_address(const void* pointer) { return (u32)(host::machine.place(pointer) + host::SHARED_BASE); }
template <int ID, int THREADS> DEVICE void named_barrier_arrive() {
    const u32 operands[2] = {ID, THREADS};
    host::collective(host::Op::NamedArrival, operands, nullptr);
}
template <int REGISTERS> DEVICE void give_registers_back() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what setmaxnreg takes");
    host::collective(host::Op::Registers, nullptr, nullptr);
}
template <int REGISTERS> DEVICE void take_registers() { give_registers_back<REGISTERS>(); }
DEVICE void mbarrier_init(u64* at, u32 arrivals) { host::set_up(at, arrivals); }
DEVICE void mbarrier_init_done() { host::set_up_done(); }
DEVICE void mbarrier_arrive(u64* at) { host::arrive_at(at, 0); }
DEVICE void mbarrier_expect(u64* at, u32 bytes) { host::arrive_at(at, bytes); }
DEVICE void mbarrier_wait(u64* at, u32 parity) { host::wait_at(at, parity); }
DEVICE void proxy_fence() { host::machine.shadow.fence(host::machine.current->index); }
DEVICE void tensor_copy(void* to, const TensorMap* map, u32 column, u32 row, u64* barrier) { host::copy_box(to, map, column, row, barrier); }
DEVICE void tensor_copy_groups(void* to, const TensorMap* map, u32 group, u64* barrier) { host::copy_groups(to, map, group, barrier); }
DEVICE void wgmma_fence() { host::collective(host::Op::ProductFence, nullptr, nullptr); }
DEVICE void wgmma_commit() { host::collective(host::Op::ProductCommit, nullptr, nullptr); }
template <int LEFT, int COLUMNS> DEVICE void wgmma_wait(float (&)[COLUMNS][4]) {
    const u32 left = LEFT;
    host::collective(host::Op::ProductWait, &left, nullptr);
}
template <int COLUMNS> DEVICE void wgmma_shared(float (&sum)[COLUMNS][4], u64 a, u64 b, bool add) {
    const host::Product product = {sum[0], nullptr, a, b, COLUMNS * 8, add};
    host::collective(host::Op::Product, &product, nullptr);
}
template <int COLUMNS> DEVICE void wgmma_registers(float (&sum)[COLUMNS][4], const u32 (&a)[4], u64 b) {
    const host::Product product = {sum[0], a, 0, b, COLUMNS * 8, true};
    host::collective(host::Op::Product, &product, nullptr);
}

// --- global memory
DEVICE Chunk16 load_global_16(const void* from) {
    if ((uintptr_t)from % 16) host::machine.fail("a load of 16 bytes from an address that is no multiple of 16");
    return *(const Chunk16*)from;
}
DEVICE Chunk16 load_common_16(const void* from) { return load_global_16(from); }
DEVICE u32 load_common(const u32* from) { return *from; }
DEVICE Chunk8 load_global_8(const void* from) {
    if ((uintptr_t)from % 8) host::machine.fail("a load of 8 bytes from an address that is no multiple of 8");
    return *(const Chunk8*)from;
}
DEVICE Chunk8 load_own_8(const void* from) { return load_global_8(from); }
DEVICE void store_global_16(void* to, Chunk16 c) {
    if ((uintptr_t)to % 16) host::machine.fail("a store of 16 bytes to an address that is no multiple of 16");
    *(Chunk16*)to = c;
}

// --- among the lanes of a warp
DEVICE u64 shuffle_xor(u64 value, u32 mask) {
    const u64 operands[2] = {value, mask};
    u64 result;
    host::collective(host::Op::ShuffleXor, operands, &result);
    return result;
}
DEVICE u32 shuffle_xor(u32 value, u32 mask) { return (u32)shuffle_xor((u64)value, mask); }
DEVICE float shuffle_xor(float value, u32 mask) {
    u32 bits;
    memcpy(&bits, &value, 4);
    bits = shuffle_xor(bits, mask);
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE u32 ballot(bool value) {
    u32 result;
    host::collective(host::Op::Ballot, &value, &result);
    return result;
}
DEVICE u32 shuffle(u32 value, u32 lane) {
    const u64 operands[2] = {value, lane};
    u64 result;
    host::collective(host::Op::Shuffle, operands, &result);
    return (u32)result;
}
DEVICE u64 shuffle_up(u64 value, u32 lanes) {
    const u64 operands[2] = {value, lanes};
    u64 result;
    host::collective(host::Op::ShuffleUp, operands, &result);
    return result;
}

// --- numbers
DEVICE float infinity() { return INFINITY; }
DEVICE float bits_to_float(u32 bits) { float number; memcpy(&number, &bits, 4); return number; }
DEVICE u32 float_to_bits(float number) { u32 bits; memcpy(&bits, &number, 4); return bits; }
DEVICE float exp2_approx(float x) { return exp2f(x); }
DEVICE float log2_approx(float x) { return log2f(x); }
DEVICE float square_root(float x) { return sqrtf(x); }
DEVICE float inverse_root_approx(float x) { return 1.f / sqrtf(x); }
DEVICE float divide(float x, float y) { return x / y; }
DEVICE float maximum(float x, float y) { return fmaxf(x, y); }
DEVICE u64 multiply_high(u64 x, u64 y) { return (u64)((unsigned __int128)x * y >> 64); }
DEVICE u64 ceiling(double x) { return (u64)std::ceil(x); }
DEVICE u32 count_bits(u32 bits) { return (u32)__builtin_popcount(bits); }
DEVICE u32 pack_bf16(float low, float high) { return host::round_bf16(low) | host::round_bf16(high) << 16; }
