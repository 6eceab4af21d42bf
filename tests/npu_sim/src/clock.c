// What was launched, and the virtual time at which it would run on a device. The rates are set from Python (costs.py);
// the durations of kernels come with their launches, those of collectives from hccl.c.

#include "sim.h"

#include <stdio.h>
#include <string.h>

enum { KEPT = 1 << 16, NAME_BYTES = 48 };

typedef struct {
    char name[NAME_BYTES];
    uint32_t stream, kind;
    double start, end;  // ns
} Operation;

static Operation operations[KEPT];  // the last ones
static uint32_t num_operations;
static double launch_ns, copy_bytes_per_ns = 1;

uint32_t note_operation(const char *name, uint32_t stream, int kind, double start, double end) {
    Operation *operation = &operations[num_operations % KEPT];
    *operation = (Operation){.stream = stream, .kind = kind, .start = start, .end = end};
    snprintf(operation->name, NAME_BYTES, "%s", name);
    return num_operations++;
}

const char *operation_name(uint32_t operation) {
    return num_operations - operation > KEPT ? "an operation of long ago" : operations[operation % KEPT].name;
}

double host_launch_cost(void) { return launch_ns; }
double copy_cost(size_t bytes) { return bytes / copy_bytes_per_ns; }

// For Python

void npu_sim_set_host_costs(double new_launch_ns, double new_copy_bytes_per_ns) {
    launch_ns = new_launch_ns;
    copy_bytes_per_ns = new_copy_bytes_per_ns;
}

uint32_t npu_sim_num_operations(void) { return num_operations; }

// The operations from number `first` on, at most `count`; how many of them there are and are still kept.
uint32_t npu_sim_operations(uint32_t first, Operation *out, uint32_t count) {
    lock();
    uint32_t found = 0;
    if (num_operations - first <= KEPT)
        for (; found < count && first + found < num_operations; found++)
            out[found] = operations[(first + found) % KEPT];
    unlock();
    return found;
}

double npu_sim_host_time(void) { return host.time; }
