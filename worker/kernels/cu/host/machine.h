// The machine: lanes, warps and blocks, and the launch that runs them. Knows fibers and shadow, not what instructions compute.
// Next: collectives.h computes what the lanes of a warp do together, tensor_copies.h and products.h what Hopper does besides.
#pragma once

namespace host {

enum class State { Running, AtCollective, AtBarrier, AtNamedBarrier, AtMbarrier, Done };
enum class Op {
    None, Barrier, NamedBarrier, NamedArrival, Registers, ProductFence, ProductCommit, ProductWait, Product, LoadMatrix,
    LoadMatrixTransposed, Multiply, Shuffle, ShuffleXor, ShuffleUp, Ballot
};
// Where shared memory begins in descriptors and addresses of 32 bits.
static constexpr u32 SHARED_BASE = 1024;
enum CopyMode : u32 { LATE, EARLY, RANDOM };

struct Copy { void* to; const void* from; bool valid, landed; };

// One thread's copies, in groups: a wait lands the oldest.
struct Copies {
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
    void commit() { groups.push_back(std::move(open)); open.clear(); }
    void clear() { open.clear(); groups.clear(); }
};

struct Lane {
    Fiber fiber;
    State state;
    u32 index;
    Op op;
    const void* operands;
    void* result;
    Copies copies;
    size_t awaited; // the mbarrier's place
    u32 parity;     // of the phase that is waited for there
};

// The warps that came to a barrier of some of the block's, those of them that wait there, and the threads it is for.
struct NamedBarrier {
    std::vector<u32> warps, waiting;
    u32 threads;
    Clock clock;
};

// SplitMix64 (Steele, Lea & Flood 2014).
struct Random {
    u64 state;
    u64 next() {
        u64 z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
};

// Kernels enter themselves before anything runs.
struct Entry {
    const char* name;
    void (*run)(const void*);
    size_t params_bytes;
    u32 threads, shared_bytes;
    const Entry* next;
    static inline const Entry* first = nullptr;
    Entry(const char* name, void (*run)(const void*), size_t params_bytes, u32 threads, u32 shared_bytes)
        : name(name), run(run), params_bytes(params_bytes), threads(threads), shared_bytes(shared_bytes), next(first) {
        first = this;
    }
};

// Shared memory that begins at a multiple of 1024.
struct Shared {
    char* memory = nullptr;
    size_t bytes = 0;
    void resize(size_t to) {
        free(memory);
        memory = (char*)aligned_alloc(1024, (to + 1024) & ~size_t(1023));
        bytes = to;
    }
    unsigned char* data() { return (unsigned char*)memory; }
    // Two bf16 NaNs, or one f32 NaN.
    void poison() { for (size_t i = 0; i + 4 <= bytes; i += 4) memcpy(memory + i, "\xff\x7f\xff\x7f", 4); }
};

void run_collective(Lane* warp);

// A barrier in shared memory that counts arrivals and bytes. Its phases have a clock, which waiting threads learn.
struct Mbarrier {
    u32 actor, arrivals, pending, phase;
    int64_t bytes; // expected and not here, or here and not yet expected
    u32 set_up_by; // and not fenced: nobody else's copies may name it
    Clock clock;
};

// A box that the tensor memory accelerator brings, of rows of 128 bytes; those beyond the tensor are null.
struct TensorCopy {
    size_t to, barrier;
    std::vector<const void*> rows;
    u32 thread;
};

struct TensorCopies {
    std::map<size_t, Mbarrier> barriers; // by place
    std::vector<TensorCopy> in_flight;

    void clear() { barriers.clear(), in_flight.clear(); }
    void land_some(); // by chance, or none
    bool land_one();  // false when none is in flight
};

// A wgmma instruction as a lane gives it; of all but the registers the lanes say the same.
struct Product {
    float* sum;
    const u32* a_registers; // or null: a lies in shared memory
    u64 a, b;
    u32 columns, add;
};

// What a warp has started and not waited for, a group behind another, and what it has started since the last group's end.
struct Products {
    typedef std::vector<Product> Lanes;
    std::vector<std::vector<Lanes>> groups;
    std::vector<Lanes> open;
    bool fenced = false;
    bool ended() const { return groups.empty() && open.empty(); }
};

struct Machine {
    std::vector<Lane> lanes;
    Lane* current = nullptr;
    void* scheduler = nullptr;
    const Entry* entry = nullptr;
    const void* params = nullptr;
    u32 block = 0;
    Shared shared;
    Shadow shadow;
    NamedBarrier named_barriers[16]; // 0 is the whole block's, which nobody names
    TensorCopies tensor_copies;
    std::vector<Products> products;  // [warps]
    u64 copied_bytes = 0;            // that copies to shared memory have read of global memory in this launch
    CopyMode copy_mode = LATE;
    Random random{0};
    bool failed = false;
    char error[400];

    // --- what fibers call
    void stop(State state) {
        current->state = state;
        host_change_stack(&current->fiber.top, scheduler);
    }
    Who who() const { return {current->index, current->index / 32}; }
    size_t place(const void* pointer) { return (const char*)pointer - shared.memory; }
    void check(const void* pointer, size_t bytes, size_t alignment, const char* what) {
        auto at = (const char*)pointer;
        if (at < shared.memory || at + bytes > shared.memory + shared.bytes)
            fail("%s outside of the %zu bytes of shared memory, at %td", what, shared.bytes, at - shared.memory);
        if ((uintptr_t)pointer % alignment) fail("%s at %zu of shared memory, no multiple of %zu", what, place(pointer), alignment);
    }
    void copy(void* to, const void* from, bool valid) {
        shadow.begin_copy(place(to), who());
        if (valid) copied_bytes += 16;
        Copy copy{to, from, valid, copy_mode == EARLY || (copy_mode == RANDOM && (random.next() & 1))};
        if (copy.landed) move(copy);
        current->copies.open.push_back(copy);
    }
    void land(size_t left) {
        auto& groups = current->copies.groups;
        while (groups.size() > left) {
            for (auto& copy : groups.front()) {
                if (!copy.landed) move(copy);
                shadow.end_copy(place(copy.to), who());
            }
            groups.erase(groups.begin());
        }
    }

    // Notes the first thing that went wrong and ends the launch.
    [[noreturn]] void fail(const char* format, ...) {
        va_list arguments;
        va_start(arguments, format);
        fail_with(format, arguments);
    }
    [[noreturn]] void fail_with(const char* format, va_list arguments) {
        if (!failed) {
            int used = snprintf(error, sizeof error, "block %u, thread %u ", block, current->index);
            vsnprintf(error + used, sizeof error - used, format, arguments);
        }
        failed = true;
        stop(State::Done);
        abort(); // nobody goes on with a fiber that failed
    }

    // --- what the launch calls
    void prepare(const Entry* kernel, u32 threads, size_t shared_bytes) {
        entry = kernel;
        failed = false;
        lanes.resize(threads);
        for (u32 i = 0; i < threads; i++) lanes[i].index = i;
        shared.resize(shared_bytes);
        copied_bytes = 0;
    }
    void run_block(u32 index, u64 seed) {
        block = index;
        random.state = seed;
        shared.poison();
        shadow.reset(shared.bytes, lanes.size() / 32);
        for (auto& barrier : named_barriers) barrier = {};
        tensor_copies.clear();
        products.assign(lanes.size() / 32, {});
        for (auto& lane : lanes) {
            lane.state = State::Running;
            lane.copies.clear();
            lane.fiber.prepare(begin);
        }
        while (!failed && round()) {}
    }

private:
    static void begin();
    void move(const Copy& copy) {
        if (copy.valid) memcpy(copy.to, copy.from, 16); else memset(copy.to, 0, 16);
    }
    // Every warp once, in random order; then, where nothing goes on, a copy lands, or, where all wait at the barrier, they pass it. False
    // when all are done.
    bool round() {
        tensor_copies.land_some();
        const std::vector<u32> order = any_order();
        for (u32 warp : order) {
            run_warp(&lanes[warp * 32]);
            if (failed) return false;
        }
        size_t done = 0;
        Lane* waiting = nullptr;
        for (auto& lane : lanes) {
            if (lane.state == State::Running) return true; // a named barrier or an mbarrier let it go after its turn
            if (lane.state == State::AtMbarrier) waiting = &lane;
            done += lane.state == State::Done;
        }
        if (tensor_copies.land_one()) return true;
        if (done == lanes.size() && all_ended()) return false;
        if (failed) return false;
        for (auto& barrier : named_barriers)
            if (!barrier.warps.empty()) {
                current = &lanes[barrier.warps[0] * 32];
                return refuse("a named barrier that not all its threads reach");
            }
        if (waiting) {
            current = waiting;
            return refuse("waits for a phase of an mbarrier that nobody ends");
        }
        if (done) return refuse("a barrier that not all threads reach");
        for (auto& lane : lanes) lane.state = State::Running;
        shadow.phases.meet(order);
        return true;
    }
    bool all_ended() {
        for (auto& barrier : named_barriers)
            if (!barrier.warps.empty()) return false;
        for (auto& of_warp : products)
            if (!of_warp.ended()) return refuse("ends with products that it never waited for");
        return true;
    }
    std::vector<u32> any_order() {
        const u32 warps = lanes.size() / 32;
        std::vector<u32> order(warps);
        for (u32 i = 0; i < warps; i++) {
            u32 at = random.next() % (i + 1);
            order[i] = order[at];
            order[at] = i;
        }
        return order;
    }
    // As far as it goes: to a barrier that others have to reach, or to the end.
    void run_warp(Lane* warp) {
        for (;;) {
            u32 waiting = 0, at_mbarrier = 0, first = random.next() % 32;
            for (u32 i = 0; i < 32; i++) {
                Lane& lane = warp[(first + i) % 32];
                if (lane.state == State::Running) {
                    current = &lane;
                    host_change_stack(&scheduler, lane.fiber.top);
                    if (failed) return;
                }
                waiting += lane.state == State::AtCollective;
                at_mbarrier += lane.state == State::AtMbarrier;
            }
            current = warp;
            if (!waiting || at_mbarrier) return; // those at an mbarrier come when its phase is over
            if (waiting != 32) { refuse("a warp-wide instruction that not all lanes reach"); return; }
            set(warp, State::Running);
            run_collective(warp);
            if (failed) return;
        }
    }
    static void set(Lane* warp, State state) {
        for (u32 i = 0; i < 32; i++) warp[i].state = state;
    }

public:
    // A warp has come to a named barrier, which it leaves, if it waits, with the last for whom that waits.
    void arrive(Lane* warp, bool waits) {
        const u32 id = ((const u32*)warp->operands)[0], threads = ((const u32*)warp->operands)[1], index = warp->index / 32;
        for (u32 i = 1; i < 32; i++)
            if (memcmp(warp[i].operands, warp->operands, 8)) return (void)refuse("lanes that meet at different named barriers");
        if (id == 0 || id > 15 || threads == 0 || threads % 32 || threads > lanes.size())
            return (void)refuse("a named barrier that is none of 1 to 15, or not of whole warps of the block");
        NamedBarrier& barrier = named_barriers[id];
        if (!barrier.warps.empty() && barrier.threads != threads)
            return (void)refuse("a named barrier for another number of threads than those have who wait there");
        if (std::find(barrier.warps.begin(), barrier.warps.end(), index) != barrier.warps.end())
            return (void)refuse("comes to a named barrier again before it was left");
        barrier.threads = threads;
        barrier.warps.push_back(index);
        shadow.phases.release(index, barrier.clock);
        if (waits) {
            barrier.waiting.push_back(index);
            set(warp, State::AtNamedBarrier);
        }
        if (barrier.warps.size() * 32 < threads) return;
        for (u32 member : barrier.waiting) {
            set(&lanes[member * 32], State::Running);
            shadow.phases.acquire(member, barrier.clock);
        }
        barrier = {};
    }
    // The same as `fail`, from outside of any fiber.
    bool refuse(const char* what) {
        if (!failed) snprintf(error, sizeof error, "block %u, warp %u: %s", block, current->index / 32, what);
        failed = true;
        return false;
    }
};

static Machine machine;

void fail_now(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    machine.fail_with(format, arguments);
}

void Machine::begin() {
    machine.entry->run(machine.params);
    auto& copies = machine.current->copies;
    if (!copies.open.empty()) machine.fail("ends with copies that it never committed");
    // What becomes of a write to shared memory whose block has ended nobody says.
    for (auto& group : copies.groups)
        if (!group.empty()) machine.fail("ends with copies that it never waited for");
    machine.stop(State::Done);
    abort();
}

} // namespace host

// A launch as tests/cuda describes it; `blocks` names those to run, none means all.
struct HostLaunch {
    const char* kernel;
    const void* params;
    u64 params_bytes;
    const u32* blocks;
    u64 block_count;
    u64 seed;
    u32 grid, threads, shared_bytes, copy_mode;
    u64* copied_bytes; // gets what cp.async read of global memory; null: nobody asks
};

// 0 for a kernel that is not here.
extern "C" __attribute__((visibility("default"))) u64 host_params_bytes(const char* kernel) {
    const host::Entry* entry = host::Entry::first;
    while (entry && strcmp(entry->name, kernel)) entry = entry->next;
    return entry ? entry->params_bytes : 0;
}

// 0, or 1 with the reason in `error`.
extern "C" __attribute__((visibility("default"))) int host_launch(const HostLaunch* launch, char* error, u64 error_bytes) {
    using namespace host;
    const Entry* entry = Entry::first;
    while (entry && strcmp(entry->name, launch->kernel)) entry = entry->next;
    if (!entry) return snprintf(error, error_bytes, "no kernel %s here", launch->kernel), 1;
    if (entry->params_bytes != launch->params_bytes)
        return snprintf(error, error_bytes, "%s takes %zu bytes of parameters, not %llu", entry->name, entry->params_bytes,
                        launch->params_bytes), 1;
    if (launch->threads % 32 || launch->threads == 0 || launch->threads > entry->threads)
        return snprintf(error, error_bytes, "%s runs with at most %u threads, in whole warps, not %u", entry->name, entry->threads,
                        launch->threads), 1;
    if (entry->shared_bytes != launch->shared_bytes)
        return snprintf(error, error_bytes, "%s needs %u bytes of shared memory, not %u", entry->name, entry->shared_bytes,
                        launch->shared_bytes), 1;
    machine.prepare(entry, launch->threads, launch->shared_bytes);
    machine.params = launch->params;
    machine.copy_mode = (CopyMode)launch->copy_mode;
    const u64 count = launch->block_count ? launch->block_count : launch->grid;
    for (u64 i = 0; i < count && !machine.failed; i++)
        machine.run_block(launch->block_count ? launch->blocks[i] : (u32)i, launch->seed + i);
    if (machine.failed) return snprintf(error, error_bytes, "%s: %s", entry->name, machine.error), 1;
    if (launch->copied_bytes) *launch->copied_bytes = machine.copied_bytes;
    return 0;
}
