// Barriers in shared memory that count, and copies by the tensor memory accelerator that they tell of. PTX ISA, sections on mbarrier and
// cp.async.bulk.tensor; CUDA driver API, cuTensorMapEncodeTiled.
//
// A copy may land at any time between its start and the end of its phase. A map is what tests and the fake driver make of the arguments
// of cuTensorMapEncodeTiled: the struct below.
#pragma once

namespace host {

// A tensor of 16-bit numbers, swizzled by 128 bytes, of two dimensions or, as groups of eight rows in panels of 64 columns, of four; the
// rest of a TensorMap's 128 bytes is nothing.
struct HostMap {
    u64 magic, address, columns, rows, row_bytes;
    u32 box_columns, box_rows, dimensions;
    static constexpr u64 MAGIC = 0x70616d20726f6f48;
};

static Mbarrier& mbarrier_at(const void* at) {
    machine.check(at, 8, 8, "an mbarrier");
    auto found = machine.tensor_copies.barriers.find(machine.place(at));
    if (found == machine.tensor_copies.barriers.end()) machine.fail("an mbarrier that nobody set up");
    // To name it is to read what setting it up wrote.
    machine.shadow.read(machine.place(at), 8, machine.who());
    return found->second;
}

static void set_up(const void* at, u32 arrivals) {
    machine.check(at, 8, 8, "an mbarrier");
    auto& barriers = machine.tensor_copies.barriers;
    const u32 actor = machine.shadow.phases.warps + (u32)barriers.size();
    if (barriers.size() == Phases::MBARRIERS) machine.fail("more than %u mbarriers", Phases::MBARRIERS);
    if (arrivals == 0 || arrivals >= 1 << 20) machine.fail("an mbarrier for %u arrivals", arrivals);
    machine.shadow.write(machine.place(at), 8, machine.who());
    if (!barriers.emplace(machine.place(at), Mbarrier{actor, arrivals, arrivals, 0, 0, machine.current->index, {}}).second)
        machine.fail("an mbarrier that is set up twice");
    machine.shadow.fences = true;
}
static void set_up_done() {
    for (auto& [place, barrier] : machine.tensor_copies.barriers)
        if (barrier.set_up_by == machine.current->index) barrier.set_up_by = Access::NOBODY;
}

static bool is_over(const Mbarrier& barrier, u32 parity) { return (barrier.phase & 1) != parity; }

static void end_phase_if_complete(size_t place, Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
    machine.shadow.phases.release(barrier.actor, barrier.clock);
    for (auto& lane : machine.lanes)
        if (lane.state == State::AtMbarrier && lane.awaited == place && is_over(barrier, lane.parity)) {
            lane.state = State::Running;
            machine.shadow.phases.acquire(lane.index / 32, barrier.clock);
        }
}

static void arrive_at(const void* at, u32 bytes) {
    Mbarrier& barrier = mbarrier_at(at);
    if (!barrier.pending) machine.fail("one arrival more at an mbarrier than it has in a phase");
    machine.shadow.phases.release(machine.current->index / 32, barrier.clock);
    barrier.pending--;
    barrier.bytes += bytes;
    end_phase_if_complete(machine.place(at), barrier);
}

static void wait_at(const void* at, u32 parity) {
    Mbarrier& barrier = mbarrier_at(at);
    if (parity > 1) machine.fail("a parity of %u", parity);
    if (is_over(barrier, parity)) {
        machine.shadow.phases.acquire(machine.current->index / 32, barrier.clock);
        return;
    }
    machine.current->awaited = machine.place(at);
    machine.current->parity = parity;
    machine.stop(State::AtMbarrier);
}

static void land(const TensorCopy& copy) {
    Mbarrier& barrier = machine.tensor_copies.barriers.at(copy.barrier);
    for (size_t row = 0; row < copy.rows.size(); row++) {
        const size_t at = copy.to + row * 128;
        for (size_t chunk = 0; chunk < 8; chunk++) {
            char* to = machine.shared.memory + at + ((chunk ^ (at >> 7 & 7)) << 4);
            if (copy.rows[row]) memcpy(to, (const char*)copy.rows[row] + chunk * 16, 16); else memset(to, 0, 16);
        }
    }
    machine.shadow.end_copy(copy.to, {Who::NO_THREAD, barrier.actor}, copy.rows.size() * 128);
    barrier.bytes -= (int64_t)copy.rows.size() * 128;
    end_phase_if_complete(copy.barrier, barrier);
}

void TensorCopies::land_some() {
    if (machine.copy_mode != RANDOM) return;
    for (size_t i = in_flight.size(); i-- > 0;)
        if (machine.random.next() & 1) {
            const TensorCopy copy = in_flight[i];
            in_flight.erase(in_flight.begin() + (long)i);
            land(copy);
        }
}
bool TensorCopies::land_one() {
    if (in_flight.empty()) return false;
    const size_t i = machine.random.next() % in_flight.size();
    const TensorCopy copy = in_flight[i];
    in_flight.erase(in_flight.begin() + (long)i);
    land(copy);
    return true;
}

static HostMap map_at(const void* map_of_tensor, u32 dimensions) {
    if ((uintptr_t)map_of_tensor % 64) machine.fail("a tensor map at no multiple of 64");
    HostMap map;
    memcpy(&map, map_of_tensor, sizeof map);
    if (map.magic != HostMap::MAGIC) machine.fail("a tensor map that is none");
    if (map.dimensions != dimensions) machine.fail("a copy by %u dimensions of a tensor of %u", dimensions, map.dimensions);
    return map;
}

// Starts a copy of `rows`, of 128 bytes each; null ones are zeros.
static void start_copy(void* to, std::vector<const void*> rows, const void* at) {
    if (mbarrier_at(at).set_up_by != Access::NOBODY) machine.fail("a copy that names an mbarrier before its setting up was fenced");
    const size_t bytes = rows.size() * 128;
    machine.check(to, bytes, 1024, "a copy of a box");
    for (const void* row : rows) machine.copied_bytes += row ? 128 : 0;
    const TensorCopy copy{machine.place(to), machine.place(at), std::move(rows), machine.current->index};
    machine.shadow.check_fenced(copy.to, bytes);
    machine.shadow.begin_copy(copy.to, machine.who(), bytes);
    if (machine.copy_mode == EARLY) land(copy); else machine.tensor_copies.in_flight.push_back(copy);
}

static void copy_box(void* to, const void* map_of_tensor, u32 column, u32 row, const void* at) {
    const HostMap map = map_at(map_of_tensor, 2);
    std::vector<const void*> rows;
    for (u32 i = 0; i < map.box_rows; i++) {
        // Coordinates are signed.
        const int64_t from_row = (int64_t)(i32)row + i, from_column = (i32)column;
        const bool there = from_row >= 0 && (u64)from_row < map.rows && from_column >= 0 && (u64)from_column + 64 <= map.columns;
        if (!there && from_column < (int64_t)map.columns && from_column + 64 > (int64_t)map.columns && (u64)from_row < map.rows)
            machine.fail("a box that begins at column %u and ends beyond the tensor's %llu", column, map.columns);
        rows.push_back(there ? (const void*)(map.address + (u64)from_row * map.row_bytes + (u64)from_column * 2) : nullptr);
    }
    start_copy(to, std::move(rows), at);
}

static void copy_groups(void* to, const void* map_of_tensor, u32 group, const void* at) {
    const HostMap map = map_at(map_of_tensor, 4);
    std::vector<const void*> rows;
    for (u32 i = 0; i < map.box_rows; i += 8)
        for (u32 column = 0; column < map.columns; column += 64)
            for (int64_t row = (int64_t)(i32)group * 8 + i, end = row + 8; row < end; row++)
                rows.push_back(row >= 0 && (u64)row < map.rows ? (const void*)(map.address + (u64)row * map.row_bytes + column * 2) : nullptr);
    start_copy(to, std::move(rows), at);
}

} // namespace host
