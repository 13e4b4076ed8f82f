// Who touched which four bytes of shared memory, and whether another thread's access was ordered after it.
//
// Ordered are: accesses of one thread; accesses before and after a barrier; within a warp, before and after a warp_barrier. A copy
// in flight is a write that lasts until its thread waits for it. Whatever else meets at one place, one of them writing, is an error,
// in whichever order the fibers happened to run. Knows cells and threads, not memory. Used by machine.h.
#pragma once

namespace host {

[[noreturn]] void fail_now(const char* format, ...);

// A thread at one moment: how many barriers and warp barriers it has passed. What a whole warp does at once has no thread.
struct Who {
    u32 thread, warp, barriers, warp_barriers;
    static constexpr u32 WHOLE_WARP = ~0u - 1;
};

struct Access {
    static constexpr u32 NOBODY = ~0u;
    u32 thread = NOBODY, warp = 0, barriers = 0, warp_barriers = 0;

    bool unordered_with(const Who& who) const {
        if (thread == NOBODY || barriers != who.barriers) return false;
        if (warp != who.warp) return true;
        return warp_barriers == who.warp_barriers && (thread != who.thread || thread == Who::WHOLE_WARP);
    }
    bool stale_at(const Who& who) const { return thread == NOBODY || barriers != who.barriers; }
    void set(const Who& who) {
        thread = who.thread, warp = who.warp, barriers = who.barriers, warp_barriers = who.warp_barriers;
    }
};

struct Cell {
    Access write;
    Access read, other_read;      // two readers suffice: whoever writes unordered differs from one of them
    u32 copying = Access::NOBODY; // the thread whose copy is in flight
    bool added = false;           // the last write was an atomic addition
};

struct Shadow {
    std::vector<Cell> cells;

    void reset(size_t bytes) { cells.assign((bytes + 3) / 4, Cell()); }

    template <class F> void each(size_t place, size_t bytes, F visit) {
        for (size_t cell = place / 4; cell <= (place + bytes - 1) / 4; cell++) visit(cells[cell]);
    }
    void read(size_t place, size_t bytes, const Who& who) {
        each(place, bytes, [&](Cell& cell) {
            if (cell.copying != Access::NOBODY)
                fail_now("reads shared memory at %zu before thread %u has waited for its copy there", place, cell.copying);
            if (cell.write.thread == Access::NOBODY) fail_now("reads shared memory at %zu, which nobody wrote", place);
            if (cell.write.unordered_with(who))
                fail_now("reads shared memory at %zu, which thread %u writes, with no barrier between", place, cell.write.thread);
            note_read(cell, who);
        });
    }
    void write(size_t place, size_t bytes, const Who& who) {
        each(place, bytes, [&](Cell& cell) {
            refuse_unordered(cell, place, who, cell.write.unordered_with(who));
            cell.write.set(who);
            cell.added = false;
        });
    }
    // Atomic additions are ordered among themselves, and with nothing else.
    void add(size_t place, size_t bytes, const Who& who) {
        each(place, bytes, [&](Cell& cell) {
            if (cell.write.thread == Access::NOBODY) fail_now("adds to shared memory at %zu, which nobody wrote", place);
            refuse_unordered(cell, place, who, !cell.added && cell.write.unordered_with(who));
            cell.write.set(who);
            cell.added = true;
        });
    }
    void begin_copy(size_t place, const Who& who) {
        each(place, 16, [&](Cell& cell) {
            refuse_unordered(cell, place, who, cell.write.unordered_with(who));
            cell.copying = who.thread;
        });
    }
    void end_copy(size_t place, const Who& who) {
        each(place, 16, [&](Cell& cell) {
            cell.copying = Access::NOBODY;
            cell.write.set(who);
            cell.added = false;
        });
    }

private:
    // Keeps, of the readers since the last barrier, two of different warps; with one warp only, two that read last.
    static void note_read(Cell& cell, const Who& who) {
        Access &a = cell.read, &b = cell.other_read;
        if (a.stale_at(who)) { b = Access(); return a.set(who); }
        if (a.thread == who.thread && a.warp == who.warp) return a.set(who);
        if (b.stale_at(who)) return b.set(who);
        if (b.thread == who.thread && b.warp == who.warp) return b.set(who);
        if (a.warp != b.warp) return;
        if (who.warp != a.warp || b.warp_barriers != who.warp_barriers) return b.set(who);
        if (a.warp_barriers != who.warp_barriers) a.set(who);
    }
    static void refuse_unordered(const Cell& cell, size_t place, const Who& who, bool unordered_write) {
        if (cell.copying != Access::NOBODY)
            fail_now("writes shared memory at %zu under a copy of thread %u", place, cell.copying);
        if (unordered_write)
            fail_now("writes shared memory at %zu, which thread %u writes too, with no barrier between", place, cell.write.thread);
        for (const Access* read : {&cell.read, &cell.other_read})
            if (read->unordered_with(who))
                fail_now("writes shared memory at %zu, which thread %u reads, with no barrier between", place, read->thread);
    }
};

} // namespace host
