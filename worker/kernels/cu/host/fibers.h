// Fibers: stacks of their own that one thread changes between. Knows nothing of CUDA. Used by machine.h.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#ifndef __x86_64__
#error "the host shim's change of stacks is written for x86-64"
#endif

namespace host {

// Pushes what the ABI says a callee keeps, changes stacks, pops the same from the other. About 2 ns.
extern "C" void host_change_stack(void** save, void* to);
asm(R"(
.text
.globl host_change_stack
.hidden host_change_stack
host_change_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

// A stack with an unmapped page below it, so that running over its end ends the process rather than a neighbour.
struct Fiber {
    static constexpr size_t STACK_BYTES = 64 << 10, PAGE = 4096;
    char* memory = nullptr;
    void* top = nullptr;

    void prepare(void (*entry)()) {
        if (!memory) {
            memory = (char*)mmap(nullptr, STACK_BYTES + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE)) abort();
        }
        void** sp = (void**)(memory + PAGE + STACK_BYTES);
        *--sp = nullptr;      // the entry never returns
        *--sp = (void*)entry; // where `ret` goes: at entry the stack is 8 off a multiple of 16, as after a call
        for (int i = 0; i < 6; i++) *--sp = nullptr;
        top = sp;
    }
};

} // namespace host
