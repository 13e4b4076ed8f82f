// Who touched which four bytes of shared memory, and whether another thread's access was ordered after it.
//
// Ordered are: accesses of one thread; what the warps that meet at a barrier did before it and what they do after it, and so on from
// barrier to barrier; within a warp, before and after a warp_barrier. A copy in flight is a write that lasts until its thread waits
// for it. Whatever else meets at one place, one of them writing, is an error, in whichever order the fibers happened to run. Knows
// cells and threads, not memory. Used by machine.h.
#pragma once

namespace host {

[[noreturn]] void fail_now(const char* format, ...);

// What a whole warp does at once has no thread.
struct Who {
    u32 thread, warp;
    static constexpr u32 WHOLE_WARP = ~0u - 1;
};

// Which phases of the warps are over for which warp. A phase ends at every barrier of any kind; those who meet there know from then
// on what any of them knew (vector clocks: Fidge 1988, Mattern 1989).
struct Phases {
    u32 warps = 0;
    std::vector<u32> known; // [warps, warps]: so many phases of the second are over for the first; of itself all but the current one

    void reset(u32 count) { warps = count, known.assign((size_t)count * count, 0); }
    u32 current(u32 warp) const { return known[warp * warps + warp]; }
    bool over(u32 warp, u32 phase, u32 for_warp) const { return phase < known[for_warp * warps + warp]; }
    void end(u32 warp) { known[warp * warps + warp]++; }
    void meet(const std::vector<u32>& members) {
        std::vector<u32> latest(warps, 0);
        for (u32 member : members) {
            end(member);
            for (u32 of = 0; of < warps; of++) latest[of] = std::max(latest[of], known[member * warps + of]);
        }
        for (u32 member : members) std::copy(latest.begin(), latest.end(), known.begin() + member * warps);
    }
};

struct Access {
    static constexpr u32 NOBODY = ~0u;
    u32 thread = NOBODY, phase = 0;
};

struct Cell {
    Access write;
    u32 writer = 0;               // the warp of who wrote
    u32 copying = Access::NOBODY; // the thread whose copy is in flight
    bool added = false;           // the last write was an atomic addition
};

struct Shadow {
    Phases phases;
    std::vector<Cell> cells;
    std::vector<Access> reads; // [cells, warps]: each warp's latest; of one thread, or of more than one in that phase

    void reset(size_t bytes, u32 warps) {
        phases.reset(warps);
        cells.assign((bytes + 3) / 4, Cell());
        reads.assign(cells.size() * warps, Access());
    }

    template <class F> void each(size_t place, size_t bytes, F visit) {
        for (size_t cell = place / 4; cell <= (place + bytes - 1) / 4; cell++) visit(cell);
    }
    void read(size_t place, size_t bytes, const Who& who) {
        each(place, bytes, [&](size_t index) {
            const Cell& cell = cells[index];
            if (cell.copying != Access::NOBODY)
                fail_now("reads shared memory at %zu before thread %u has waited for its copy there", place, cell.copying);
            if (cell.write.thread == Access::NOBODY) fail_now("reads shared memory at %zu, which nobody wrote", place);
            if (unordered(cell.write, cell.writer, who))
                fail_now("reads shared memory at %zu, which thread %u writes, with no barrier between", place, cell.write.thread);
            Access& own = reads[index * phases.warps + who.warp];
            const bool others = own.thread != Access::NOBODY && own.thread != who.thread && own.phase == phases.current(who.warp);
            own = {others ? Who::WHOLE_WARP : who.thread, phases.current(who.warp)};
        });
    }
    void write(size_t place, size_t bytes, const Who& who) {
        each(place, bytes, [&](size_t index) {
            refuse_unordered(index, place, who, unordered(cells[index].write, cells[index].writer, who));
            note_write(cells[index], who);
        });
    }
    // Atomic additions are ordered among themselves, and with nothing else.
    void add(size_t place, size_t bytes, const Who& who) {
        each(place, bytes, [&](size_t index) {
            Cell& cell = cells[index];
            if (cell.write.thread == Access::NOBODY) fail_now("adds to shared memory at %zu, which nobody wrote", place);
            refuse_unordered(index, place, who, !cell.added && unordered(cell.write, cell.writer, who));
            note_write(cell, who);
            cell.added = true;
        });
    }
    void begin_copy(size_t place, const Who& who) {
        each(place, 16, [&](size_t index) {
            refuse_unordered(index, place, who, unordered(cells[index].write, cells[index].writer, who));
            cells[index].copying = who.thread;
        });
    }
    void end_copy(size_t place, const Who& who) {
        each(place, 16, [&](size_t index) {
            cells[index].copying = Access::NOBODY;
            note_write(cells[index], who);
        });
    }

private:
    bool unordered(const Access& access, u32 warp, const Who& who) const {
        if (access.thread == Access::NOBODY || phases.over(warp, access.phase, who.warp)) return false;
        return warp != who.warp || access.thread != who.thread || access.thread == Who::WHOLE_WARP;
    }
    void note_write(Cell& cell, const Who& who) {
        cell.write = {who.thread, phases.current(who.warp)};
        cell.writer = who.warp;
        cell.added = false;
    }
    void refuse_unordered(size_t index, size_t place, const Who& who, bool unordered_write) const {
        const Cell& cell = cells[index];
        if (cell.copying != Access::NOBODY)
            fail_now("writes shared memory at %zu under a copy of thread %u", place, cell.copying);
        if (unordered_write)
            fail_now("writes shared memory at %zu, which thread %u writes too, with no barrier between", place, cell.write.thread);
        for (u32 warp = 0; warp < phases.warps; warp++)
            if (unordered(reads[index * phases.warps + warp], warp, who))
                fail_now("writes shared memory at %zu, which warp %u reads, with no barrier between", place, warp);
    }
};

} // namespace host
