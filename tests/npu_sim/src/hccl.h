// What the files of the simulated HCCL share.

#pragma once
#include "sim.h"

#include <stdatomic.h>

enum { SUCCESS = 0, E_PARAMETER = 1, E_MEMORY = 3, E_NOT_SUPPORTED = 5, E_SYSTEM = 8, E_TIMEOUT = 9 };
enum { MAX_RANKS = 64, NAME_BYTES = 128, ROOT_INFO_BYTES = 4108 };
enum { INT8, INT16, INT32, FLOAT16, FLOAT32, INT64, UINT64, UINT8, UINT16, UINT32, FLOAT64, BFLOAT16, NUM_TYPES };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM };

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

// hccl_links.c: how long the collective takes that the control block describes, in ns.
__attribute__((visibility("hidden"))) double duration_of(const Communicator *comm);

// hccl_reduce.c: `sum` combined with `term`, element by element.
__attribute__((visibility("hidden"))) int combine_terms(void *sum, const void *term, size_t count, int type,
                                                        int reduction);
