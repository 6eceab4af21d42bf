// Host memory that a copy on a stream still needs. The program touches it by plain instructions, which no call tells us
// of, so its pages are protected until the host has waited for the copy: not to be read or written while a copy writes
// them, not to be written while one reads them. An instruction that touches them is noted as a conflict, and goes on.

#define _GNU_SOURCE
#include "sim.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_GUARDS = 4096 };

typedef struct {
    char *begin;
    size_t bytes;
    Launch launch;
    int writes;
} Guard;

static Guard guards[MAX_GUARDS];
static size_t num_guards;
static struct sigaction before;
static volatile sig_atomic_t unraised;

size_t page_aligned(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE);
    return (bytes + page) / page * page;
}

static int protection_of(const char *begin) {
    int protection = PROT_READ | PROT_WRITE;
    for (size_t i = 0; i < num_guards; i++)
        if (guards[i].begin == begin) protection &= guards[i].writes ? PROT_NONE : PROT_READ;
    return protection;
}

static void protect(char *begin, size_t bytes) { mprotect(begin, page_aligned(bytes), protection_of(begin)); }

static void remove_guard(size_t i) { guards[i] = guards[--num_guards]; }

// While this runs the faulting thread holds no lock of ours: our own copies lift the protection first (memory.c).
static void on_fault(int signal, siginfo_t *info, void *context) {
    char *address = info->si_addr;
    for (size_t i = 0; i < num_guards; i++) {
        Guard guard = guards[i];
        if (address < guard.begin || address >= guard.begin + page_aligned(guard.bytes)) continue;
        conflict("nothing orders the host, which touches pinned memory at %p, and %s on stream %u, which %s it",
                 (void *)address, operation_name(guard.launch.operation), guard.launch.stream,
                 guard.writes ? "writes" : "reads");
        unraised = 1;
        forget_guards(guard.begin);
        return;
    }
    sigaction(SIGSEGV, &before, NULL);  // not ours: it faults again, for the handler that was there
}

static void install_handler(void) {
    // On the thread's own stack: the small one that Python sets aside for faults does not hold what a report needs.
    struct sigaction now, ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, NULL, &now);
    if (now.sa_sigaction == on_fault) return;
    before = now;
    sigaction(SIGSEGV, &ours, NULL);
}

// Whether a conflict was noted that no call has reported yet.
int take_unraised(void) {
    int found = unraised;
    unraised = 0;
    return found;
}

void guard(void *pointer, size_t bytes, Launch launch, int writes) {
    if (num_guards == MAX_GUARDS) return;
    install_handler();
    guards[num_guards++] = (Guard){pointer, bytes, launch, writes};
    protect(pointer, bytes);
}

// The host has learned something: lift the guards of what has finished.
void release_guards(void) {
    for (size_t i = num_guards; i-- > 0;) {
        Guard guard = guards[i];
        if (!finished(&host.clock, guard.launch)) continue;
        remove_guard(i);
        protect(guard.begin, guard.bytes);
    }
}

// A copy of this runtime is about to touch the memory of the block that holds `pointer`.
void lift_guards(const void *pointer) {
    for (size_t i = 0; i < num_guards; i++) {
        const char *begin = guards[i].begin, *address = pointer;
        if (begin <= address && address < begin + guards[i].bytes)
            mprotect(guards[i].begin, page_aligned(guards[i].bytes), PROT_READ | PROT_WRITE);
    }
}

void restore_guards(void) {
    for (size_t i = 0; i < num_guards; i++) protect(guards[i].begin, guards[i].bytes);
}

void forget_guards(const void *pointer) {
    for (size_t i = num_guards; i-- > 0;) {
        Guard guard = guards[i];
        if (guard.begin != pointer) continue;
        remove_guard(i);
        protect(guard.begin, guard.bytes);
    }
}
