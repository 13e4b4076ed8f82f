// A driver and a cuBLASLt for a machine without a GPU: what is asked of a stream waits in a queue until somebody synchronises, and
// then runs on this CPU, kernels through cu/host. Refuses what the real ones would: calls without a context, memory that is not
// theirs, more shared memory than was asked for, layouts that do not fit. Built by tests/cuda/fake.rs; the environment makes of it
// machines on which something is missing, and names the libraries of kernels (FAKE_LIBRARIES).
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

typedef uint32_t u32;
typedef uint64_t u64;
typedef int Status;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500, LAUNCH_FAILED = 719 };

struct HostLaunch { // as in cu/host/machine.h
    const char* kernel;
    const void* params;
    u64 params_bytes;
    const u32* blocks;
    u64 block_count;
    u64 seed;
    u32 grid, threads, shared_bytes, copy_mode;
    u64* copied_bytes;
};
typedef int (*LaunchKernel)(const HostLaunch*, char*, u64);
struct Kernel { std::string name; LaunchKernel launch; u64 params_bytes; u32 most_shared_bytes; };

static std::vector<void*> libraries;
static std::map<std::string, Kernel> kernels;
static std::map<u64, size_t> allocations;
typedef std::function<bool()> Work;
static std::deque<Work> queue;
typedef std::deque<Work> Graph;
static Graph* recording = nullptr; // takes the launches of a stream that records
static std::map<u64, size_t> pinned;
static size_t allocated = 0, most_bytes = size_t(1) << 30;
static u64 launches = 0, waits = 0, uploads = 0;
static int the_context, the_stream, the_pool;
static thread_local void* current = nullptr;
static bool broken = false;

static bool ours(u64 address, size_t bytes) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return false;
    auto found = std::prev(after);
    return address + bytes <= found->first + found->second;
}
static int setting(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}
static int devices() { return setting("FAKE_DEVICES", 1); }
#define NEED_CONTEXT if (current != &the_context) return INVALID_CONTEXT

extern "C" {
// For the tests: how much is still allocated.
u64 fake_allocated() { return allocated; }
// And how often somebody waited, and copied from the host.
u64 fake_waits() { return waits; }
u64 fake_uploads() { return uploads; }

Status cuInit(u32) { return setting("FAKE_INIT_STATUS", 0); }
Status cuDriverGetVersion(int* version) { return *version = setting("FAKE_VERSION", 13000), 0; }
Status cuGetErrorString(int status, const char** text) {
    *text = status == OUT_OF_MEMORY ? "out of memory" : status == LAUNCH_FAILED ? "unspecified launch failure" : "unknown error";
    return 0;
}
Status cuDeviceGetCount(int* count) { return *count = devices(), 0; }
Status cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < devices() ? 0 : INVALID_VALUE; }
Status cuDeviceGetName(char* name, int length, int) { return snprintf(name, length, "Fake GPU"), 0; }
Status cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 75: return *value = setting("FAKE_CAPABILITY_MAJOR", 9), 0;
    case 76: return *value = 0, 0;
    case 16: return *value = 3, 0; // multiprocessors
    case 115: return *value = 1, 0; // memory pools
    default: return INVALID_VALUE;
    }
}
Status cuDeviceGetDefaultMemPool(void** pool, int) { return *pool = &the_pool, 0; }
Status cuMemPoolSetAttribute(void* pool, int attribute, const u64* value) {
    return pool == &the_pool && attribute == 4 && *value == ~u64(0) ? 0 : INVALID_VALUE;
}
Status cuDevicePrimaryCtxRetain(void** context, int) { return *context = &the_context, 0; }
Status cuDevicePrimaryCtxRelease_v2(int) { return 0; }
Status cuCtxGetCurrent(void** context) { return *context = current, 0; }
Status cuCtxSetCurrent(void* context) { return current = context, 0; }
Status cuMemGetInfo_v2(size_t* free, size_t* total) {
    NEED_CONTEXT;
    return *total = most_bytes, *free = most_bytes - allocated, 0;
}
Status cuStreamCreate(void** stream, u32) {
    NEED_CONTEXT;
    return *stream = &the_stream, 0;
}
Status cuStreamDestroy_v2(void* stream) { return stream == &the_stream ? 0 : INVALID_VALUE; }
Status cuStreamSynchronize(void*) {
    NEED_CONTEXT;
    if (recording) return INVALID_VALUE; // as the real one refuses to wait then
    waits++;
    while (!queue.empty()) {
        auto work = std::move(queue.front());
        queue.pop_front();
        if (!broken && !work()) broken = true;
    }
    return broken ? LAUNCH_FAILED : 0;
}

static void open_libraries() {
    const char* named = getenv("FAKE_LIBRARIES");
    std::string list = named ? named : "";
    for (size_t begin = 0, end; begin < list.size(); begin = end + 1) {
        end = std::min(list.find(':', begin), list.size());
        if (void* library = dlopen(list.substr(begin, end - begin).c_str(), RTLD_NOW)) libraries.push_back(library);
    }
}
// --- graphs, which hold launches only, and events
Status cuStreamBeginCapture_v2(void*, int) {
    NEED_CONTEXT;
    if (recording) return INVALID_VALUE;
    return recording = new Graph, 0;
}
Status cuStreamEndCapture(void*, void** graph) {
    NEED_CONTEXT;
    if (!recording) return INVALID_VALUE;
    *graph = recording; // of nothing, too
    return recording = nullptr, 0;
}
Status cuGraphInstantiateWithFlags(void** executable, void* graph, u64 flags) {
    return *executable = new Graph(*(Graph*)graph), flags ? INVALID_VALUE : 0;
}
Status cuGraphLaunch(void* executable, void* stream) {
    NEED_CONTEXT;
    if (recording || stream != &the_stream) return INVALID_VALUE;
    for (const Work& work : *(Graph*)executable) queue.push_back(work);
    return 0;
}
Status cuGraphExecDestroy(void* executable) { return delete (Graph*)executable, 0; }
Status cuGraphDestroy(void* graph) { return delete (Graph*)graph, 0; }

struct Event { std::chrono::steady_clock::time_point time; bool recorded = false; };
Status cuEventCreate(void** event, u32 flags) { return *event = new Event, flags ? INVALID_VALUE : 0; }
Status cuEventRecord(void* event, void* stream) {
    NEED_CONTEXT;
    if (stream != &the_stream || recording) return INVALID_VALUE;
    queue.push_back([=] { return *(Event*)event = {std::chrono::steady_clock::now(), true}, true; });
    return 0;
}
Status cuEventSynchronize(void*) { return cuStreamSynchronize(&the_stream); }
Status cuEventElapsedTime_v2(float* milliseconds, void* begin, void* end) {
    auto from = (Event*)begin, to = (Event*)end;
    *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return from->recorded && to->recorded ? 0 : INVALID_VALUE;
}
Status cuEventDestroy_v2(void* event) { return delete (Event*)event, 0; }

Status cuModuleUnload(void*) { return 0; }
Status cuModuleLoadData(void** module, const void* image) {
    NEED_CONTEXT;
    const bool known = !memcmp(image, "\x7f" "ELF", 4) || !memcmp(image, "//", 2);
    return *module = (void*)image, known ? 0 : INVALID_VALUE;
}
Status cuModuleGetFunction(void** function, void* module, const char* name) {
    NEED_CONTEXT;
    (void)module;
    if (libraries.empty()) open_libraries();
    for (void* library : libraries) {
        auto params_bytes = (u64(*)(const char*))dlsym(library, "host_params_bytes");
        if (u64 bytes = params_bytes(name)) {
            kernels[name] = {name, (LaunchKernel)dlsym(library, "host_launch"), bytes, 48 << 10};
            return *function = &kernels[name], 0;
        }
    }
    return NOT_FOUND;
}
Status cuFuncSetAttribute(void* function, int attribute, int value) {
    NEED_CONTEXT;
    if (attribute == 9) return value < 0 || value > 100 ? INVALID_VALUE : 0; // of a multiprocessor's memory, in percent
    if (attribute != 8 || value > 227 << 10) return INVALID_VALUE;
    return ((Kernel*)function)->most_shared_bytes = value, 0;
}
struct LaunchAttribute { int id; char pad[4]; int value[16]; };
struct LaunchConfig { u32 grid, y, z, threads, thread_y, thread_z, shared_bytes; void* stream; LaunchAttribute* attributes; u32 count; };
Status cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void** extra) {
    NEED_CONTEXT;
    auto kernel = (Kernel*)function;
    const auto [grid, y, z, threads, thread_y, thread_z, shared_bytes, stream, attributes, count] = *config;
    if (!grid || y * z * thread_y * thread_z != 1 || threads > 1024 || shared_bytes > kernel->most_shared_bytes || extra ||
        stream != &the_stream)
        return INVALID_VALUE;
    // Overlapping with the kernel before, which GPUs have from 9.0 on. (Here kernels run one behind another all the same.)
    const int major = setting("FAKE_CAPABILITY_MAJOR", 9);
    if (count && setting("FAKE_KEEPS_APART", 0)) return INVALID_VALUE;
    if (count > 1 || (count && (attributes->id != 6 || attributes->value[0] != 1 || major < 9 || major == 11))) return INVALID_VALUE;
    // Aligned as a GPU's constant memory, in which maps of tensors lie.
    std::shared_ptr<void> copy(aligned_alloc(64, (kernel->params_bytes + 63) / 64 * 64), free);
    memcpy(copy.get(), params[0], kernel->params_bytes);
    u64 seed = ++launches;
    (recording ? *recording : queue).push_back([=] {
        char error[512];
        HostLaunch launch = {kernel->name.c_str(), copy.get(), kernel->params_bytes, nullptr, 0, seed, grid, threads, shared_bytes, u32(seed % 3), nullptr};
        const char* fails = getenv("FAKE_FAILS");
        if (fails && kernel->name.find(fails) == 0) return fprintf(stderr, "fake GPU: %s fails, as it was told to\n", fails), false;
        if (!kernel->launch(&launch, error, sizeof error)) return true;
        fprintf(stderr, "fake GPU: %s\n", error);
        return false;
    });
    return 0;
}

Status cuMemAlloc_v2(u64* address, size_t bytes) {
    NEED_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (allocated + bytes > most_bytes) return OUT_OF_MEMORY;
    size_t whole = (bytes + 255) / 256 * 256;
    auto memory = (uint16_t*)aligned_alloc(256, whole);
    for (size_t i = 0; i < whole / 2; i++) memory[i] = 0x7fff; // NaN
    allocations[(u64)memory] = bytes;
    allocated += bytes;
    return *address = (u64)memory, 0;
}
static bool release(u64 address) {
    auto found = allocations.find(address);
    if (found == allocations.end()) return false;
    allocated -= found->second;
    allocations.erase(found);
    free((void*)address);
    return true;
}
Status cuMemFree_v2(u64 address) {
    NEED_CONTEXT;
    cuStreamSynchronize(&the_stream); // as the real one waits
    return release(address) ? 0 : INVALID_VALUE;
}
#ifndef ANCIENT
Status cuMemAllocAsync(u64* address, size_t bytes, void*) { return cuMemAlloc_v2(address, bytes); }
#endif
Status cuMemFreeAsync(u64 address, void*) {
    NEED_CONTEXT;
    if (!ours(address, 1)) return INVALID_VALUE;
    queue.push_back([=] { return release(address); });
    return 0;
}
Status cuMemHostAlloc(void** memory, size_t bytes, u32 flags) {
    NEED_CONTEXT;
    if (!bytes || flags) return INVALID_VALUE;
    *memory = malloc(bytes);
    return pinned[(u64)*memory] = bytes, 0;
}
Status cuMemFreeHost(void* memory) {
    NEED_CONTEXT;
    cuStreamSynchronize(&the_stream); // as the real one waits
    if (!pinned.erase((u64)memory)) return INVALID_VALUE;
    return free(memory), 0;
}
Status cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void*) {
    NEED_CONTEXT;
    if (!ours(to, bytes) || recording) return INVALID_VALUE;
    uploads++;
    // Pageable memory is read late too: a real one reads it before it returns mostly, and promises nothing.
    queue.push_back([=] { return memcpy((void*)to, from, bytes), true; });
    return 0;
}
Status cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void* stream) {
    NEED_CONTEXT;
    if (!ours(to, bytes) || !ours(from, bytes) || stream != &the_stream) return INVALID_VALUE;
    (recording ? *recording : queue).push_back([=] { return memcpy((void*)to, (void*)from, bytes), true; });
    return 0;
}
Status cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, void*) {
    NEED_CONTEXT;
    if (!ours(from, bytes) || recording) return INVALID_VALUE;
    queue.push_back([=] { return memcpy(to, (void*)from, bytes), true; });
    return 0;
}

struct HostMap { u64 magic, address, columns, rows, row_bytes; u32 box_columns, box_rows, dimensions; }; // as in cu/host/tensor_copies.h
// What the driver refuses of a tensor, and what nobody here asks for.
static bool is_tensor(u32 rank, const u64* sizes, const u64* strides, const u32* box, const u32* steps) {
    if (box[0] != 64 || (rank != 2 && rank != 4)) return false;
    for (u32 i = 0; i < rank; i++)
        if (!sizes[i] || sizes[i] > u64(1) << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return false;
    for (u32 i = 0; i + 1 < rank; i++)
        if (strides[i] % 16 || strides[i] >= u64(1) << 40) return false;
    // Groups of eight rows, in panels of 64 columns.
    return rank == 2 || (sizes[0] == 64 && sizes[1] == 8 && strides[1] == 128 && strides[2] == 8 * strides[0] && box[1] == 8 && box[2] == sizes[2]);
}
Status cuTensorMapEncodeTiled(u64* map, int type, u32 rank, u64 address, const u64* sizes, const u64* strides, const u32* box,
                              const u32* steps, int interleave, int swizzle, int, int fill) {
    if ((u64)map % 64 || type != 9 || address % 16 || !is_tensor(rank, sizes, strides, box, steps) || interleave || swizzle != 3 || fill)
        return INVALID_VALUE;
    HostMap host = {0x70616d20726f6f48, address, sizes[0], sizes[1], strides[0], box[0], box[1], rank};
    if (rank == 4) {
        host.columns = 64 * sizes[2], host.rows = 8 * sizes[3];
        host.box_columns = 64 * box[2], host.box_rows = 8 * box[3];
    }
    if (!ours(address, (host.rows - 1) * host.row_bytes + host.columns * 2)) return INVALID_VALUE; // a real one would find out later
    return memset(map, 0, 128), memcpy(map, &host, sizeof host), 0;
}

// --- cuBLASLt: matrices by columns, bf16 operands, sums in f32
struct Layout { int type; u64 rows, columns; int64_t leading; };
struct Product { int transposed_a = 0, transposed_b = 0; u32 epilogue = 1; u64 bias = 0; };
enum { BLAS_INVALID = 7, BLAS_NOT_SUPPORTED = 15, F32 = 0, BF16 = 14 };
static const u64 COOKIE = 0xa190;

Status cublasLtCreate(void** handle) { return *handle = &the_stream, current == &the_context ? 0 : 1; }
Status cublasLtDestroy(void*) { return 0; }
Status cublasLtMatmulDescCreate(void** product, int compute, int scale) {
    return *product = new Product, compute == 68 && scale == F32 ? 0 : BLAS_NOT_SUPPORTED;
}
Status cublasLtMatmulDescSetAttribute(void* product, int attribute, const void* value, size_t bytes) {
    auto p = (Product*)product;
    if (attribute == 3 && bytes == 4) return memcpy(&p->transposed_a, value, 4), 0;
    if (attribute == 4 && bytes == 4) return memcpy(&p->transposed_b, value, 4), 0;
    if (attribute == 7 && bytes == 4) return memcpy(&p->epilogue, value, 4), 0;
    if (attribute == 8 && bytes == 8) return memcpy(&p->bias, value, 8), 0;
    return BLAS_INVALID;
}
Status cublasLtMatmulDescDestroy(void* product) { return delete (Product*)product, 0; }
Status cublasLtMatrixLayoutCreate(void** layout, int type, u64 rows, u64 columns, int64_t leading) {
    return *layout = new Layout{type, rows, columns, leading}, leading >= (int64_t)rows ? 0 : BLAS_INVALID;
}
Status cublasLtMatrixLayoutDestroy(void* layout) { return delete (Layout*)layout, 0; }
Status cublasLtMatmulPreferenceCreate(void** preference) { return *preference = &the_stream, 0; }
Status cublasLtMatmulPreferenceSetAttribute(void*, int attribute, const void*, size_t bytes) {
    return attribute == 1 && bytes == 8 ? 0 : BLAS_INVALID;
}
Status cublasLtMatmulPreferenceDestroy(void*) { return 0; }

struct Found { u64 algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; };
static bool fits(const Product* p, const Layout* a, const Layout* b, const Layout* d) {
    u64 m = p->transposed_a ? a->columns : a->rows, k = p->transposed_a ? a->rows : a->columns;
    u64 n = p->transposed_b ? b->rows : b->columns, other_k = p->transposed_b ? b->columns : b->rows;
    return a->type == BF16 && b->type == BF16 && (d->type == BF16 || d->type == F32) && k == other_k && d->rows == m && d->columns == n;
}
Status cublasLtMatmulAlgoGetHeuristic(void*, void* product, void* a, void* b, void* c, void* d, void*, int wanted, Found* found, int* count) {
    if (!fits((Product*)product, (Layout*)a, (Layout*)b, (Layout*)d) || memcmp(c, d, sizeof(Layout)) || wanted < 1) return BLAS_INVALID;
    *found = {{COOKIE}, 0, 0, 1.f, {}};
    return *count = 1, 0;
}
static float number(u64 at, int type, u64 index) {
    float f;
    if (type == F32) return memcpy(&f, (char*)at + 4 * index, 4), f;
    uint16_t half;
    memcpy(&half, (char*)at + 2 * index, 2);
    u32 bits = (u32)half << 16;
    return memcpy(&f, &bits, 4), f;
}
static void put(u64 at, int type, u64 index, float f) {
    if (type == F32) { memcpy((char*)at + 4 * index, &f, 4); return; }
    u32 bits;
    memcpy(&bits, &f, 4);
    uint16_t half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    memcpy((char*)at + 2 * index, &half, 2);
}
Status cublasLtMatmul(void*, void* product, const float* alpha, u64 a, void* a_layout, u64 b, void* b_layout, const float* beta, u64 c,
                      void*, u64 d, void* d_layout, const u64* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
    NEED_CONTEXT;
    Product p = *(Product*)product;
    Layout la = *(Layout*)a_layout, lb = *(Layout*)b_layout, ld = *(Layout*)d_layout;
    float by = *alpha, keep = *beta;
    auto bytes = [](const Layout& l) { return l.leading * l.columns * (l.type == F32 ? 4 : 2); };
    if (!fits(&p, &la, &lb, &ld) || algorithm[0] != COOKIE || c != d || stream != &the_stream || !ours((u64)workspace, workspace_bytes) ||
        !ours(a, bytes(la)) || !ours(b, bytes(lb)) || !ours(d, bytes(ld)) || (p.epilogue == 4 && !ours(p.bias, ld.rows * (ld.type == F32 ? 4 : 2))))
        return BLAS_INVALID;
    (recording ? *recording : queue).push_back([=] {
        const u64 inner = p.transposed_a ? la.rows : la.columns;
        for (u64 column = 0; column < ld.columns; column++)
            for (u64 row = 0; row < ld.rows; row++) {
                float sum = 0;
                for (u64 k = 0; k < inner; k++)
                    sum += number(a, la.type, p.transposed_a ? row * la.leading + k : k * la.leading + row) *
                           number(b, lb.type, p.transposed_b ? k * lb.leading + column : column * lb.leading + k);
                const u64 place = column * ld.leading + row;
                float result = by * sum + (keep != 0.f ? keep * number(d, ld.type, place) : 0.f);
                if (p.epilogue == 4) result += number(p.bias, ld.type, row);
                put(d, ld.type, place, result);
            }
        return true;
    });
    return 0;
}
}
