// The instructions the kernels are written in: all inline PTX of this directory, and nothing else from CUDA.
//
// Everything here exists twice: below for the GPU (sm_80 and later), and in host/shim.h for a CPU, where tests run the same
// kernels. Kernels include this file, use no other CUDA name, and keep to the rules that let the host see their mistakes:
// shared memory is dynamic only, and is touched by ldmatrix, cp.async and the functions named *_shared, never by a plain pointer.
#pragma once
#ifdef HOST_SHIM
#include "host/shim.h"
#else

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
// A kernel takes one struct by value. THREADS is the most a block has, BLOCKS how many of them should fit on a multiprocessor at once,
// SHARED_BYTES the shared memory of each, which NAME_shared_bytes tells build_cubins.py. A kernel's blocks may start while the one before
// it in the stream still runs, and wait for its end before all else; KERNEL_AHEAD is for one that waits by itself, having begun with what
// was there before the last copy to or from the host: each kernel lets the next begin before it has waited itself, so that several may be under way.
#define KERNEL_AHEAD(NAME, PARAMS, THREADS, BLOCKS, SHARED_BYTES) \
    extern "C" __device__ u32 NAME##_shared_bytes = SHARED_BYTES; \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ PARAMS p)
#define KERNEL(NAME, PARAMS, THREADS, BLOCKS, SHARED_BYTES) \
    DEVICE void NAME##_body(const PARAMS& p); \
    KERNEL_AHEAD(NAME, PARAMS, THREADS, BLOCKS, SHARED_BYTES) { \
        let_next_begin(); \
        wait_for_before(); \
        NAME##_body(p); \
    } \
    DEVICE void NAME##_body(const PARAMS& p)

struct bf16 { u16 bits; };
struct alignas(16) Chunk16 { u32 words[4]; }; // what one thread moves at once: 16 bytes
struct alignas(8) Chunk8 { u32 words[2]; };   // or 8

// --- where a thread is
DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 block_threads() { return blockDim.x; }

// --- waiting for others
// Blocks of the next kernel may start as soon as all of this one's have said so.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel before has ended, and what it wrote is there.
DEVICE void wait_for_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void barrier() { __syncthreads(); }
// Of so many threads, whole warps of the block, whose lanes come together and name the same one of 1 to 15. A constant, since a block
// with a number that the compiler does not know is given all sixteen.
template <int ID, int THREADS> DEVICE void named_barrier() { asm volatile("bar.sync %0, %1;" :: "n"(ID), "n"(THREADS) : "memory"); }
DEVICE void warp_barrier() { __syncwarp(); }

// --- shared memory
DEVICE unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    return dynamic_shared;
}
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
template <class T> DEVICE T load_shared(const T* from) { return *from; }
template <class T> DEVICE void store_shared(T* to, T value) { *to = value; }
// What was there before. 32 bits only: of 64 the machine makes a loop of compare-and-swap.
DEVICE u32 add_shared(u32* to, u32 value) { return atomicAdd(to, value); }

// Four 8x8 matrices of 16-bit numbers: lane l names row l % 8 of matrix l / 8, and gets two numbers of row l / 4 of each.
DEVICE void ldmatrix_x4(u32 (&to)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
// The same, each matrix transposed.
DEVICE void ldmatrix_x4_trans(u32 (&to)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
// sum += a · b, with a [16, 16] row-major, b [16, 8] column-major, sum [16, 8] in f32.
DEVICE void mma_bf16(float (&sum)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

// --- asynchronous copies to shared memory, in groups; invalid ones fill with zeros and read nothing
DEVICE void cp_async_16(void* to, const void* from, bool valid) {
    u32 bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most LEFT of this thread's groups are under way.
template <int LEFT> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// --- sm_90a only: products of a warpgroup, the tensor memory accelerator, and barriers in shared memory that count

// A tensor in global memory as the driver describes it (cuTensorMapEncodeTiled), and the box that one copy takes of it.
struct alignas(64) TensorMap { u64 opaque[16]; };

// Warps of a named barrier who only say that they have come. THREADS counts them and those who wait.
template <int ID, int THREADS> DEVICE void named_barrier_arrive() { asm volatile("bar.arrive %0, %1;" :: "n"(ID), "n"(THREADS) : "memory"); }

// Registers of each thread of the warpgroup from here on, all of whose warps come here.
template <int REGISTERS> DEVICE void give_registers_back() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
template <int REGISTERS> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }

// A phase ends with the last of `arrivals`, when all bytes that were expected in it have come.
DEVICE void mbarrier_init(u64* at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(at)), "r"(arrivals) : "memory");
}
// By the thread that has set barriers up, before a barrier of the block: copies may name them then.
DEVICE void mbarrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u64* at) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(shared_address(at)) : "memory");
}
// Arrives, and has the phase wait for so many bytes.
DEVICE void mbarrier_expect(u64* at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(at)), "r"(bytes) : "memory");
}
// Until the phase of this parity is over: the first is 0, and the one before it counts as over.
DEVICE void mbarrier_wait(u64* at, u32 parity) {
    asm volatile("{\n\t.reg .pred over;\n"
                 "AGAIN:\n\t"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [%0], %1;\n\t"
                 "@!over bra AGAIN;\n\t}" :: "r"(shared_address(at)), "r"(parity) : "memory");
}

// What threads wrote to shared memory is there for copies and products afterwards, which otherwise need not see it.
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies the map's box whose first number is at this column and row; what lies beyond the tensor becomes zeros. In shared memory, at a
// multiple of 1024, rows of 128 bytes have their chunks swapped as `swizzled<64>` says. All bytes of the box count at the barrier.
DEVICE void tensor_copy(void* to, const TensorMap* map, u32 column, u32 row, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// The same of a tensor whose boxes are groups of eight whole rows, from this group on: each row's numbers in panels of 64, all eight of one
// panel and then of the next.
DEVICE void tensor_copy_groups(void* to, const TensorMap* map, u32 group, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, %3}], [%4];"
                 :: "r"(shared_address(to)), "l"(map), "r"(0), "r"(group), "r"(shared_address(barrier)) : "memory");
}

// Products of a warpgroup run while its threads go on: a fence before each group of them, behind what threads did with their registers;
// the group's end; and a wait until at most LEFT groups are under way, before which nobody touches the registers that they use.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define SUMS4(j) "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
#define SUMS32 SUMS4(0), SUMS4(1), SUMS4(2), SUMS4(3), SUMS4(4), SUMS4(5), SUMS4(6), SUMS4(7)
#define SUMS64 SUMS32, SUMS4(8), SUMS4(9), SUMS4(10), SUMS4(11), SUMS4(12), SUMS4(13), SUMS4(14), SUMS4(15)
#define SUMS128 SUMS64, SUMS4(16), SUMS4(17), SUMS4(18), SUMS4(19), SUMS4(20), SUMS4(21), SUMS4(22), SUMS4(23), \
                SUMS4(24), SUMS4(25), SUMS4(26), SUMS4(27), SUMS4(28), SUMS4(29), SUMS4(30), SUMS4(31)
#define NAMES32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, " \
                "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES128 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
                 "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, " \
                 "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

template <int LEFT> DEVICE void wgmma_wait(float (&sum)[8][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : SUMS32 : "n"(LEFT) : "memory");
}
template <int LEFT> DEVICE void wgmma_wait(float (&sum)[16][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %64;" : SUMS64 : "n"(LEFT) : "memory");
}
template <int LEFT> DEVICE void wgmma_wait(float (&sum)[32][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %128;" : SUMS128 : "n"(LEFT) : "memory");
}

// sum = a · b, or sum += a · b where `add`: a [64, 16] and b [16, N] in shared memory, both along rows; sum [64, N] in f32, of which a
// warp has 16 rows and each lane what mma_bf16 gives it of every eight columns.
DEVICE void wgmma_shared(float (&sum)[8][4], u64 a, u64 b, bool add) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, %32, %33, add, 1, 1, 0, 0;\n\t}"
                 : SUMS32 : "l"(a), "l"(b), "r"((u32)add) : "memory");
}
DEVICE void wgmma_shared(float (&sum)[16][4], u64 a, u64 b, bool add) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64 "}, %64, %65, add, 1, 1, 0, 0;\n\t}"
                 : SUMS64 : "l"(a), "l"(b), "r"((u32)add) : "memory");
}
// sum += a · b, a in registers as mma_bf16 takes it of each warp's 16 rows, b across rows in shared memory.
DEVICE void wgmma_registers(float (&sum)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SUMS32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}
DEVICE void wgmma_registers(float (&sum)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUMS64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}
DEVICE void wgmma_registers(float (&sum)[32][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : SUMS128 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}

// --- global memory, 8 or 16 bytes at once
DEVICE Chunk16 load_global_16(const void* from) { // read-only while the kernel runs
    Chunk16 c;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.words[0]), "=r"(c.words[1]), "=r"(c.words[2]), "=r"(c.words[3]) : "l"(from));
    return c;
}
// The same, of what other threads read as well.
DEVICE Chunk16 load_common_16(const void* from) {
    Chunk16 c;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.words[0]), "=r"(c.words[1]), "=r"(c.words[2]), "=r"(c.words[3]) : "l"(from));
    return c;
}
DEVICE u32 load_common(const u32* from) {
    u32 word;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}
// Of what this thread alone reads, and may write afterwards.
DEVICE Chunk8 load_own_8(const void* from) {
    Chunk8 c;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(c.words[0]), "=r"(c.words[1]) : "l"(from) : "memory");
    return c;
}
DEVICE Chunk8 load_global_8(const void* from) {
    Chunk8 c;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(c.words[0]), "=r"(c.words[1]) : "l"(from));
    return c;
}
DEVICE void store_global_16(void* to, Chunk16 c) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(c.words[0]), "r"(c.words[1]), "r"(c.words[2]), "r"(c.words[3]) : "memory");
}

// --- among the lanes of a warp
DEVICE float shuffle_xor(float value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE u32 shuffle_xor(u32 value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE u64 shuffle_xor(u64 value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE u32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); } // bit l is lane l's
DEVICE u32 shuffle(u32 value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); } // that lane's
DEVICE u64 shuffle_up(u64 value, u32 lanes) { return __shfl_up_sync(0xffffffffu, value, lanes); }

// --- numbers
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 float_to_bits(float number) { return __float_as_uint(number); }
DEVICE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_approx(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float square_root(float x) { return __fsqrt_rn(x); }
DEVICE float inverse_root_approx(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float divide(float x, float y) { return __fdiv_rn(x, y); }
DEVICE float maximum(float x, float y) { return fmaxf(x, y); }
DEVICE u64 multiply_high(u64 x, u64 y) { return __umul64hi(x, y); }
DEVICE u64 ceiling(double x) { return __double2ull_ru(x); }
DEVICE u32 count_bits(u32 bits) { return __popc(bits); }
// Rounded to nearest even; `low` lies at the lower address.
DEVICE u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#endif

// --- the same on both machines
DEVICE float bf16_low(u32 both) { return bits_to_float(both << 16); }
DEVICE float bf16_high(u32 both) { return bits_to_float(both & 0xffff0000u); }
DEVICE float bf16_to_float(bf16 number) { return bits_to_float((u32)number.bits << 16); }
DEVICE bf16 float_to_bf16(float number) { return bf16{(u16)pack_bf16(number, 0.f)}; }

// Descriptors of operands in shared memory, in panels of rows of 64 numbers, swapped by the row as above; the next eight rows of a panel lie
// `group` numbers later. `at` is the first of the 16 numbers along which is summed: of rows that lie along it (K-major), a place within
// the first 128 bytes of a panel.
DEVICE u64 matrix_along_rows(const bf16* at, u32 group) {
    const u64 swapped_128 = 1;
    return swapped_128 << 62 | (u64)(group * 2 >> 4) << 32 | 1ull << 16 | (u64)(shared_address(at) & 0x3ffff) >> 4;
}
// Of rows across which is summed (MN-major): a row of a panel whose number is a multiple of 8. `panel` numbers later lie the next 64 columns.
DEVICE u64 matrix_across_rows(const bf16* at, u32 group, u32 panel) {
    const u64 swapped_128 = 1;
    return swapped_128 << 62 | (u64)(group * 2 >> 4) << 32 | (u64)(panel * 2 >> 4) << 16 | (u64)(shared_address(at) & 0x3ffff) >> 4;
}
// What lies so many numbers further, a multiple of eight. Shared memory ends before the place would need more bits than it has.
DEVICE u64 further(u64 matrix, u32 numbers) { return (matrix >> 32) << 32 | ((u32)matrix + numbers / 8); }

static constexpr float LOG2_E = 1.4426950408889634f;

