// HCCL between processes of one host, through shared memory: what torch_npu's C++ ProcessGroupHCCL looks up by name.
//
// A communicator has one control block, mapped by all its ranks, and one outbox file per rank. A collective is
//     1. write what the others may need into the own outbox, and what is being called into the control block;
//     2. barrier; compare what all ranks called, so that a disagreement is the same error on every rank, after 4;
//     3. read the others' outboxes;
//     4. barrier, after which the outboxes may be overwritten.
// The bytes are there when the call returns. For the runtime's clocks (streams.c) it is launched on its stream, begins
// when the last rank is ready for it, and takes as long as its slowest link.
//
// A rank that waits longer than NPU_SIM_LIMIT_S (30) gets a time-out, and the communicator is broken from then on. The
// files lose their names once all ranks have opened them, or a rank has given up on that, so that nothing is left in
// /dev/shm whatever becomes of the processes later.

#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, E_PARAMETER = 1, E_MEMORY = 3, E_NOT_SUPPORTED = 5, E_SYSTEM = 8, E_TIMEOUT = 9 };
enum { MAX_RANKS = 64, NAME_BYTES = 128, ROOT_INFO_BYTES = 4108 };
enum { INT8, INT16, INT32, FLOAT16, FLOAT32, INT64, UINT64, UINT8, UINT16, UINT32, FLOAT64, BFLOAT16, NUM_TYPES };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM };

static const size_t SIZES[NUM_TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};

typedef struct {
    char verb[24];
    uint32_t type, reduction, root;
    uint64_t count;
} Call;

typedef struct {
    atomic_uint arrived, generation, broken;
    Call calls[MAX_RANKS];
    double ready[MAX_RANKS];                  // virtual time at which rank i's stream comes to the call
    uint32_t global_rank[MAX_RANKS];
    uint64_t sends[MAX_RANKS][MAX_RANKS];     // bytes that rank i sends to rank j in an all-to-all
    uint64_t expects[MAX_RANKS][MAX_RANKS];   // bytes that rank i expects from rank j
} Control;

typedef struct {
    char name[NAME_BYTES];
    uint32_t size, rank;
    Control *control;
    int outbox[MAX_RANKS];
} Communicator;

#define TRY(expression)                              \
    do {                                             \
        int error_ = (expression);                   \
        if (error_ != SUCCESS) return error_;        \
    } while (0)

static int fail(const Communicator *comm, int error, const char *format, ...) {
    char text[400];
    int start = snprintf(text, sizeof text, "hccl, rank %u of %u: ", comm->rank, comm->size);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + start, sizeof text - start, format, arguments);
    va_end(arguments);
    npu_sim_report(text);
    return error;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static double limit(void) {
    const char *value = getenv("NPU_SIM_LIMIT_S");
    return value ? atof(value) : 30;
}

// Meeting

static int barrier(Communicator *comm) {
    Control *control = comm->control;
    if (atomic_load(&control->broken)) return fail(comm, E_TIMEOUT, "the communicator broke in an earlier call");
    unsigned generation = atomic_load(&control->generation);
    if (atomic_fetch_add(&control->arrived, 1) + 1 == comm->size) {
        atomic_store(&control->arrived, 0);
        atomic_fetch_add(&control->generation, 1);
        return SUCCESS;
    }
    double deadline = seconds() + limit();
    for (int round = 0; atomic_load(&control->generation) == generation; round++) {
        if (round < 100) {
            sched_yield();
            continue;
        }
        nanosleep(&(struct timespec){0, 50000}, NULL);
        if (atomic_load(&control->broken) || seconds() > deadline) {
            atomic_store(&control->broken, 1);
            return fail(comm, E_TIMEOUT, "time-out: not all ranks came to %s", control->calls[comm->rank].verb);
        }
    }
    return SUCCESS;
}

// Return an error that all ranks find, once all have: what they compared may be overwritten then.
static int after_all(Communicator *comm, int error) {
    TRY(barrier(comm));
    return error;
}

// From this size on nothing is carried: for runs that only the clock is to see (hollow.py).
static size_t hollow_bytes = SIZE_MAX;
void npu_sim_set_hollow_bytes(size_t size) { hollow_bytes = size; }

static int write_outbox(Communicator *comm, uint64_t offset, const void *data, size_t size) {
    if (size >= hollow_bytes) return SUCCESS;
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(comm->outbox[comm->rank], (const char *)data + done, size - done, offset + done);
        if (n <= 0) return fail(comm, E_SYSTEM, "cannot write %zu bytes of shared memory", size);
        done += n;
    }
    return SUCCESS;
}

static int read_outbox(Communicator *comm, uint32_t rank, uint64_t offset, void *data, size_t size) {
    if (size >= hollow_bytes) return SUCCESS;
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(comm->outbox[rank], (char *)data + done, size - done, offset + done);
        if (n == 0 && hollow_bytes < SIZE_MAX) return SUCCESS;  // a piece of what was not carried
        if (n <= 0) return fail(comm, E_SYSTEM, "rank %u left fewer than %zu bytes", rank, size);
        done += n;
    }
    return SUCCESS;
}

// Steps 1 and 2 of every collective; `size` bytes of `data` go into the outbox.
static int announce(Communicator *comm, const char *verb, uint64_t count, int type, int reduction, uint32_t root,
                    const void *data, size_t size, void *stream) {
    if (type < 0 || type >= NUM_TYPES) return fail(comm, E_NOT_SUPPORTED, "%s of type %d", verb, type);
    Call *call = &comm->control->calls[comm->rank];
    memset(call, 0, sizeof *call);
    *call = (Call){.type = type, .reduction = reduction, .root = root, .count = count};
    snprintf(call->verb, sizeof call->verb, "%s", verb);
    comm->control->ready[comm->rank] = npu_sim_ready_time(stream);
    TRY(write_outbox(comm, 0, data, size));
    TRY(barrier(comm));
    const Call *calls = comm->control->calls;
    for (uint32_t r = 1; r < comm->size; r++)
        if (memcmp(&calls[r], &calls[0], sizeof(Call)))
            return after_all(comm, fail(comm, E_PARAMETER,
                                        "ranks differ: rank 0 calls %s (count %lu, type %u), rank %u %s (%lu, %u)",
                                        calls[0].verb, (unsigned long)calls[0].count, calls[0].type, r, calls[r].verb,
                                        (unsigned long)calls[r].count, calls[r].type));
    return SUCCESS;
}

// Links and time

static double latency_ns, pair_rate = 1, rank_rate = 1, between_hosts_rate = 1;  // bytes per ns
static uint32_t ranks_per_host = MAX_RANKS;

void npu_sim_set_link_costs(double latency, double pair, double rank, double between_hosts, uint32_t per_host) {
    latency_ns = latency;
    pair_rate = pair;
    rank_rate = rank;
    between_hosts_rate = between_hosts;
    ranks_per_host = per_host;
}

static double larger(double a, double b) { return a > b ? a : b; }
static uint32_t host_of(const Communicator *comm, uint32_t rank) {
    return comm->control->global_rank[rank] / ranks_per_host;
}

// How long rank `r` sends (or receives) what `bytes(r, peer)` says: within a host every pair has a link of its own, and
// a rank can keep so many of them busy; all that leaves the host goes through the rank's one network link.
static double link_time(const Communicator *comm, uint32_t r,
                        uint64_t (*bytes)(const Communicator *, uint32_t, uint32_t)) {
    double slowest_pair = 0, inside = 0, outside = 0;
    for (uint32_t peer = 0; peer < comm->size; peer++) {
        if (peer == r) continue;
        double sent = bytes(comm, r, peer);
        if (host_of(comm, r) == host_of(comm, peer)) {
            slowest_pair = larger(slowest_pair, sent);
            inside += sent;
        } else {
            outside += sent;
        }
    }
    return larger(larger(slowest_pair / pair_rate, inside / rank_rate), outside / between_hosts_rate);
}

static uint64_t sent(const Communicator *comm, uint32_t from, uint32_t to) { return comm->control->sends[from][to]; }
static uint64_t received(const Communicator *comm, uint32_t to, uint32_t from) { return sent(comm, from, to); }

// Every rank sends as much to every other: all collectives but the all-to-all, by direct exchange.
static void all_send(Communicator *comm, uint64_t bytes) {
    for (uint32_t to = 0; to < comm->size; to++) comm->control->sends[comm->rank][to] = bytes;
}

// The last step: nobody returns before all have read, and the runtime learns what happened on the stream.
static int finish(Communicator *comm, void *stream, const Run *runs, size_t num_reads, size_t num_writes) {
    double ready = 0, duration = 0;
    for (uint32_t r = 0; r < comm->size; r++) {
        ready = larger(ready, comm->control->ready[r]);
        duration = larger(duration, larger(link_time(comm, r, sent), link_time(comm, r, received)));
    }
    const char *verb = comm->control->calls[comm->rank].verb;
    int error = npu_sim_launch(verb, COLLECTIVE, stream, runs, num_reads, num_writes, ready, latency_ns + duration);
    TRY(barrier(comm));
    return error == OK ? SUCCESS : E_PARAMETER;
}

// Adding up

static float widen(uint16_t bits, int type) {
    if (type == FLOAT16) {
        _Float16 half;
        memcpy(&half, &bits, sizeof half);
        return half;
    }
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t narrow(float value, int type) {
    uint16_t bits;
    if (type == FLOAT16) {
        _Float16 half = value;
        memcpy(&bits, &half, sizeof bits);
        return bits;
    }
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value) return 0x7fc0;
    return (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;  // to nearest, ties to even
}

#define COMBINE(a, b)                                  \
    (reduction == SUM       ? (a) + (b)                \
     : reduction == PRODUCT ? (a) * (b)                \
     : reduction == MAXIMUM ? ((a) > (b) ? (a) : (b))  \
                            : ((a) < (b) ? (a) : (b)))

#define REDUCE_AS(TYPE)                                                                                      \
    do {                                                                                                     \
        for (size_t i = 0; i < count; i++) ((TYPE *)sum)[i] = COMBINE(((TYPE *)sum)[i], ((TYPE *)term)[i]); \
        return SUCCESS;                                                                                      \
    } while (0)

static int reduce(void *sum, const void *term, size_t count, int type, int reduction) {
    switch (type) {
        case INT8: REDUCE_AS(int8_t);
        case INT16: REDUCE_AS(int16_t);
        case INT32: REDUCE_AS(int32_t);
        case INT64: REDUCE_AS(int64_t);
        case FLOAT32: REDUCE_AS(float);
        case FLOAT16:
        case BFLOAT16:
            for (size_t i = 0; i < count; i++) {
                float a = widen(((uint16_t *)sum)[i], type), b = widen(((const uint16_t *)term)[i], type);
                ((uint16_t *)sum)[i] = narrow(COMBINE(a, b), type);
            }
            return SUCCESS;
    }
    return E_NOT_SUPPORTED;
}

// Part [offset, offset + count) of all outboxes, combined in rank order: the same result on every rank.
static int reduce_outboxes(Communicator *comm, void *out, size_t offset, size_t count, int type, int reduction) {
    size_t size = count * SIZES[type];
    TRY(read_outbox(comm, 0, offset * SIZES[type], out, size));
    if (size >= hollow_bytes) return SUCCESS;
    void *term = malloc(size + 1);
    if (!term) return E_MEMORY;
    int error = SUCCESS;
    for (uint32_t r = 1; r < comm->size && error == SUCCESS; r++) {
        error = read_outbox(comm, r, offset * SIZES[type], term, size);
        if (error == SUCCESS) error = reduce(out, term, count, type, reduction);
    }
    free(term);
    if (error == E_NOT_SUPPORTED) fail(comm, error, "no reduction of type %d", type);
    return error;
}

// Communicators

int HcclGetRootInfo(char *root_info) {
    static atomic_uint serial;
    memset(root_info, 0, ROOT_INFO_BYTES);
    snprintf(root_info, NAME_BYTES, "npu-sim-%d-%u-%.0f", getpid(), atomic_fetch_add(&serial, 1), seconds() * 1e6);
    return SUCCESS;
}

static int open_shared(const char *id, const char *what, uint32_t rank, size_t size) {
    char path[300];
    snprintf(path, sizeof path, "/dev/shm/%s-%s-%u", id, what, rank);
    int file = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0 && size && ftruncate(file, size)) return -1;
    return file;
}

static void unlink_shared(const char *id, const char *what, uint32_t rank) {
    char path[300];
    snprintf(path, sizeof path, "/dev/shm/%s-%s-%u", id, what, rank);
    unlink(path);
}

static int open_communicator(uint32_t size, const char *id, uint32_t rank, const char *name, void **out) {
    if (size > MAX_RANKS || rank >= size) return E_PARAMETER;
    Communicator *comm = calloc(1, sizeof *comm);
    if (!comm) return E_MEMORY;
    comm->size = size;
    comm->rank = rank;
    snprintf(comm->name, NAME_BYTES, "%s", name && *name ? name : id);
    int file = open_shared(id, "control", 0, sizeof(Control));
    if (file < 0) return fail(comm, E_SYSTEM, "cannot open shared memory");
    comm->control = mmap(NULL, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->control == MAP_FAILED) return fail(comm, E_SYSTEM, "cannot map shared memory");
    for (uint32_t r = 0; r < size; r++)
        if ((comm->outbox[r] = open_shared(id, "outbox", r, 0)) < 0) return fail(comm, E_SYSTEM, "no outbox %u", r);
    const char *global_rank = getenv("RANK");
    comm->control->global_rank[rank] = global_rank ? atoi(global_rank) : rank;
    snprintf(comm->control->calls[rank].verb, sizeof comm->control->calls[rank].verb, "the first meeting");
    int error = barrier(comm);
    for (uint32_t r = 0; r < size; r++) unlink_shared(id, "outbox", r);
    unlink_shared(id, "control", 0);
    *out = comm;
    return error;
}

int HcclCommInitRootInfo(uint32_t size, const char *root_info, uint32_t rank, void **comm) {
    return open_communicator(size, root_info, rank, NULL, comm);
}

// The config begins with 24 bytes about itself and two 32-bit options; the communicator's name follows them.
int HcclCommInitRootInfoConfig(uint32_t size, const char *root_info, uint32_t rank, const char *config, void **comm) {
    return open_communicator(size, root_info, rank, config + 32, comm);
}

int HcclCommDestroy(void *handle) {
    Communicator *comm = handle;
    for (uint32_t r = 0; r < comm->size; r++) close(comm->outbox[r]);
    munmap(comm->control, sizeof(Control));
    free(comm);
    return SUCCESS;
}

int HcclGetCommName(void *handle, char *name) {
    snprintf(name, NAME_BYTES, "%s", ((Communicator *)handle)->name);
    return SUCCESS;
}

int HcclGetRankSize(void *handle, uint32_t *size) {
    *size = ((Communicator *)handle)->size;
    return SUCCESS;
}

int HcclGetRankId(void *handle, uint32_t *rank) {
    *rank = ((Communicator *)handle)->rank;
    return SUCCESS;
}

int HcclGetCommAsyncError(void *handle, int *error) {
    *error = SUCCESS;
    return SUCCESS;
}

int HcclSetConfig(int option, int value) { return SUCCESS; }
uint32_t HcclGetCommConfigCapability(void) { return 12; }  // how many fields of the config are known

const char *HcclGetErrorString(int error) {
    switch (error) {
        case E_PARAMETER: return "[npu-sim] the ranks' arguments disagree";
        case E_TIMEOUT: return "[npu-sim] time-out";
        case E_NOT_SUPPORTED: return "[npu-sim] not simulated";
    }
    return "[npu-sim] system error";
}

// Collectives

#define RUN(pointer, size) {(uintptr_t)(pointer), size}

int HcclBarrier(void *comm, void *stream) {
    all_send(comm, 0);
    TRY(announce(comm, "barrier", 0, INT8, 0, 0, NULL, 0, stream));
    return finish(comm, stream, NULL, 0, 0);
}

int HcclAllReduce(void *in, void *out, uint64_t count, int type, int reduction, void *handle, void *stream) {
    Communicator *comm = handle;
    size_t size = count * SIZES[type];
    all_send(comm, 2 * size / comm->size);  // a reduce-scatter and an all-gather
    TRY(announce(comm, "all-reduce", count, type, reduction, 0, in, size, stream));
    TRY(reduce_outboxes(comm, out, 0, count, type, reduction));
    return finish(comm, stream, (Run[]){RUN(in, size), RUN(out, size)}, 1, 1);
}

// `count` is that of the output, in one rank's piece.
int HcclReduceScatter(void *in, void *out, uint64_t count, int type, int reduction, void *handle, void *stream) {
    Communicator *comm = handle;
    size_t size = count * SIZES[type], whole = comm->size * size;
    all_send(comm, size);
    TRY(announce(comm, "reduce-scatter", count, type, reduction, 0, in, whole, stream));
    TRY(reduce_outboxes(comm, out, comm->rank * count, count, type, reduction));
    return finish(comm, stream, (Run[]){RUN(in, whole), RUN(out, size)}, 1, 1);
}

int HcclAllGather(void *in, void *out, uint64_t count, int type, void *handle, void *stream) {
    Communicator *comm = handle;
    size_t size = count * SIZES[type];
    all_send(comm, size);
    TRY(announce(comm, "all-gather", count, type, 0, 0, in, size, stream));
    for (uint32_t r = 0; r < comm->size; r++) TRY(read_outbox(comm, r, 0, (char *)out + r * size, size));
    return finish(comm, stream, (Run[]){RUN(in, size), RUN(out, comm->size * size)}, 1, 1);
}

int HcclBroadcast(void *data, uint64_t count, int type, uint32_t root, void *handle, void *stream) {
    Communicator *comm = handle;
    size_t size = count * SIZES[type];
    all_send(comm, comm->rank == root ? size : 0);
    TRY(announce(comm, "broadcast", count, type, 0, root, data, comm->rank == root ? size : 0, stream));
    if (comm->rank != root) TRY(read_outbox(comm, root, 0, data, size));
    return finish(comm, stream, (Run[]){RUN(data, size)}, comm->rank == root, comm->rank != root);
}

int HcclScatter(void *in, void *out, uint64_t count, int type, uint32_t root, void *handle, void *stream) {
    Communicator *comm = handle;
    size_t size = count * SIZES[type], whole = comm->rank == root ? comm->size * size : 0;
    all_send(comm, comm->rank == root ? size : 0);
    TRY(announce(comm, "scatter", count, type, 0, root, in, whole, stream));
    TRY(read_outbox(comm, root, comm->rank * size, out, size));
    return finish(comm, stream, (Run[]){RUN(in, whole), RUN(out, size)}, 1, 1);
}

// Counts and offsets are in elements. The outbox holds the pieces without gaps, in the order of their targets.
int HcclAlltoAllV(const void *in, const uint64_t *in_counts, const uint64_t *in_offsets, int in_type, void *out,
                  const uint64_t *out_counts, const uint64_t *out_offsets, int out_type, void *handle, void *stream) {
    Communicator *comm = handle;
    Control *control = comm->control;
    if (in_type != out_type || in_type < 0 || in_type >= NUM_TYPES)
        return fail(comm, E_NOT_SUPPORTED, "all-to-all from type %d to type %d", in_type, out_type);
    size_t size = SIZES[in_type], offset = 0;
    Run runs[2 * MAX_RANKS];
    for (uint32_t r = 0; r < comm->size; r++) {
        const char *piece = (const char *)in + in_offsets[r] * size;
        control->sends[comm->rank][r] = in_counts[r] * size;
        control->expects[comm->rank][r] = out_counts[r] * size;
        runs[r] = (Run)RUN(piece, in_counts[r] * size);
        runs[comm->size + r] = (Run)RUN((char *)out + out_offsets[r] * size, out_counts[r] * size);
        TRY(write_outbox(comm, offset, piece, in_counts[r] * size));
        offset += in_counts[r] * size;
    }
    TRY(announce(comm, "all-to-all", 0, in_type, 0, 0, NULL, 0, stream));
    for (uint32_t from = 0; from < comm->size; from++)
        for (uint32_t to = 0; to < comm->size; to++)
            if (control->sends[from][to] != control->expects[to][from])
                return after_all(comm, fail(comm, E_PARAMETER, "rank %u sends %lu bytes to rank %u, which expects %lu",
                                            from, (unsigned long)control->sends[from][to], to,
                                            (unsigned long)control->expects[to][from]));
    for (uint32_t from = 0; from < comm->size; from++) {
        offset = 0;
        for (uint32_t to = 0; to < comm->rank; to++) offset += control->sends[from][to];
        TRY(read_outbox(comm, from, offset, (char *)out + out_offsets[from] * size, out_counts[from] * size));
    }
    return finish(comm, stream, runs, comm->size, comm->size);
}

int HcclAlltoAll(const void *in, uint64_t in_count, int in_type, void *out, uint64_t out_count, int out_type,
                 void *handle, void *stream) {
    uint64_t in_counts[MAX_RANKS], in_offsets[MAX_RANKS], out_counts[MAX_RANKS], out_offsets[MAX_RANKS];
    for (uint32_t r = 0; r < ((Communicator *)handle)->size; r++) {
        in_counts[r] = in_count;
        in_offsets[r] = r * in_count;
        out_counts[r] = out_count;
        out_offsets[r] = r * out_count;
    }
    return HcclAlltoAllV(in, in_counts, in_offsets, in_type, out, out_counts, out_offsets, out_type, handle, stream);
}
