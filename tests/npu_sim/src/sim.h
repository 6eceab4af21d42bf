// What the files of the simulated runtime share. Prototypes are our own; no CANN header is used.
//
// Work is done when it is launched, so its results are always there. What a device would have made of the same calls is
// kept beside it: a vector clock per stream says which launches are ordered (streams.c), every byte remembers who
// touched it last (accesses.c, pinned.c), and a second clock adds up what the work would have cost (clock.c).

#pragma once
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID_DEVICE = 107001, NO_CONTEXT = 107002, SIZE_TOO_SMALL = 107003, OUT_OF_MEMORY = 207001 };
enum { UNORDERED = 507901 };  // not CANN's: two operations touch the same bytes and nothing orders them
enum { MAX_STREAMS = 512, HOST = 0 };
enum { COMPUTE, COPY, COLLECTIVE };

// How many launches of each stream are known to have finished. Stream HOST is the program: what it did to memory.
typedef struct {
    uint32_t count[MAX_STREAMS];
} Clock;

// A launch: the `count`-th on its stream. `operation` finds its name (clock.c).
typedef struct {
    uint32_t stream, count, operation;
} Launch;

typedef struct {
    uint32_t id;
    Clock clock;
    double time;  // ns of virtual time at which all that was launched is done
} Stream;

typedef struct {
    uint64_t address, bytes;
} Run;

#pragma GCC visibility push(hidden)  // short names, which no other library is to find

// streams.c
extern Stream host;
void lock(void);
void unlock(void);
int finished(const Clock *clock, Launch launch);
void join(Clock *clock, const Clock *other);
Launch host_launch(const char *name);

// accesses.c: with MUST_EXIST memory that is not tracked is an error; UNCHECKED only notes the access
enum { MUST_EXIST = 1, UNCHECKED = 2 };
typedef struct Block Block;
void track(void *pointer, size_t bytes, int is_host_memory);
int untrack(void *pointer, const char *by);
int touch(Launch launch, const Clock *clock, uint64_t address, uint64_t bytes, int writes, int options);
int conflict(const char *format, ...) __attribute__((format(printf, 1, 2)));
size_t page_aligned(size_t bytes);

// pinned.c
void guard(void *pointer, size_t bytes, Launch launch, int writes);
void release_guards(void);
int take_unraised(void);
void lift_guards(const void *pointer);
void restore_guards(void);
void forget_guards(const void *pointer);

// clock.c
uint32_t note_operation(const char *name, uint32_t stream, int kind, double start, double end);
const char *operation_name(uint32_t operation);
double host_launch_cost(void);
double copy_cost(size_t bytes);

#pragma GCC visibility pop

// runtime.c: the text that torch_npu appends to the next error
void npu_sim_report(const char *text);

// streams.c, for runtime, Python and hccl.c: run `name` on `stream`, which reads the first `num_reads` runs and writes
// the `num_writes` after them, not before `not_before` and for `duration` ns of virtual time.
int npu_sim_launch(const char *name, int kind, void *stream, const Run *runs, size_t num_reads, size_t num_writes,
                   double not_before, double duration);
double npu_sim_ready_time(void *stream);
