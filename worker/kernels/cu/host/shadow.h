// Who touched which four bytes of shared memory, and whether another thread's access was ordered after it.
//
// Ordered are: accesses of one thread; what the warps that meet at a barrier did before it and what they do after it, and so on from
// barrier to barrier; within a warp, before and after a warp_barrier. A copy in flight is a write that lasts until its thread waits
// for it. Whatever else meets at one place, one of them writing, is an error, in whichever order the fibers happened to run. Knows
// cells and threads, not memory. Used by machine.h.
#pragma once

namespace host {

[[noreturn]] void fail_now(const char* format, ...);

// What a whole warp does at once has no thread, and no thread does what a copy of the tensor memory accelerator writes: its actor is the
// mbarrier that tells of it.
struct Who {
    u32 thread, warp;
    static constexpr u32 WHOLE_WARP = ~0u - 1, NO_THREAD = ~0u - 2;
};

// How many phases of each actor are over for somebody. Actors are the warps and, behind them, the mbarriers of the block, for which copies
// write.
typedef std::vector<u32> Clock;

// Which phases of the actors are over for which actor (vector clocks: Fidge 1988, Mattern 1989). A warp's phase ends at every barrier of
// any kind; an mbarrier's own with each that is complete.
struct Phases {
    static constexpr u32 MBARRIERS = 16;
    u32 warps = 0;
    std::vector<Clock> known; // [actors]: of itself all but the current one

    void reset(u32 count) { warps = count, known.assign(count + MBARRIERS, Clock(count + MBARRIERS, 0)); }
    u32 current(u32 actor) const { return known[actor][actor]; }
    bool over(u32 actor, u32 phase, u32 for_warp) const { return phase < known[for_warp][actor]; }
    void end(u32 actor) { known[actor][actor]++; }
    // What an actor knows, and has done so far, goes into a clock, from which others learn it.
    void release(u32 actor, Clock& into) {
        end(actor);
        into.resize(known[actor].size());
        for (size_t of = 0; of < into.size(); of++) into[of] = std::max(into[of], known[actor][of]);
    }
    void acquire(u32 actor, const Clock& from) {
        for (size_t of = 0; of < from.size(); of++) known[actor][of] = std::max(known[actor][of], from[of]);
    }
    void meet(const std::vector<u32>& members) {
        Clock latest;
        for (u32 member : members) release(member, latest);
        for (u32 member : members) acquire(member, latest);
    }
};

struct Access {
    static constexpr u32 NOBODY = ~0u;
    u32 thread = NOBODY, phase = 0;
};

struct Cell {
    Access write;
    u32 writer = 0;               // the actor that wrote
    u32 copying = Access::NOBODY; // the thread whose copy is in flight
    bool added = false;           // the last write was an atomic addition
    u32 unfenced = Access::NOBODY; // the thread that wrote it, and has not fenced it for copies and products
};

struct Shadow {
    Phases phases;
    std::vector<Cell> cells;
    std::vector<Access> reads; // [cells, warps]: each warp's latest; of one thread, or of more than one in that phase
    bool fences = false;       // whether the block has copies and products that see only what is fenced
    std::vector<std::vector<size_t>> unfenced; // of each thread

    void reset(size_t bytes, u32 warps) {
        phases.reset(warps);
        fences = false;
        unfenced.assign(warps * 32, {});
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
            note_write(index, who);
        });
    }
    void fence(u32 thread) {
        for (size_t index : unfenced[thread])
            if (cells[index].unfenced == thread) cells[index].unfenced = Access::NOBODY;
        unfenced[thread].clear();
    }
    // Before what a copy or a product does.
    void check_fenced(size_t place, size_t bytes) {
        each(place, bytes, [&](size_t index) {
            if (cells[index].unfenced != Access::NOBODY)
                fail_now("a copy or product at %zu of shared memory, which thread %u wrote and did not fence", place, cells[index].unfenced);
        });
    }
    // Atomic additions are ordered among themselves, and with nothing else.
    void add(size_t place, size_t bytes, const Who& who) {
        each(place, bytes, [&](size_t index) {
            Cell& cell = cells[index];
            if (cell.write.thread == Access::NOBODY) fail_now("adds to shared memory at %zu, which nobody wrote", place);
            refuse_unordered(index, place, who, !cell.added && unordered(cell.write, cell.writer, who));
            note_write(index, who);
            cell.added = true;
        });
    }
    void begin_copy(size_t place, const Who& who, size_t bytes = 16) {
        each(place, bytes, [&](size_t index) {
            refuse_unordered(index, place, who, unordered(cells[index].write, cells[index].writer, who));
            cells[index].copying = who.thread;
        });
    }
    void end_copy(size_t place, const Who& who, size_t bytes = 16) {
        each(place, bytes, [&](size_t index) {
            cells[index].copying = Access::NOBODY;
            note_write(index, who);
        });
    }

private:
    bool unordered(const Access& access, u32 warp, const Who& who) const {
        if (access.thread == Access::NOBODY || phases.over(warp, access.phase, who.warp)) return false;
        return warp != who.warp || access.thread != who.thread || access.thread == Who::WHOLE_WARP;
    }
    void note_write(size_t index, const Who& who) {
        cells[index].write = {who.thread, phases.current(who.warp)};
        cells[index].writer = who.warp;
        cells[index].added = false;
        if (!fences || who.thread == Who::NO_THREAD) return;
        cells[index].unfenced = who.thread;
        unfenced[who.thread].push_back(index);
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
