// Who touched which bytes last. Two launches that touch the same byte, one of them writing, must be ordered.
//
// Every block that the runtime hands out is cut into cells: stretches with the same history, which is the last launch
// that wrote it and those that have read it since. The caching allocator needs no words of its own here: when it gives
// memory out again, the next launch that writes it conflicts with a launch on another stream that nobody waited for.

#define _GNU_SOURCE
#include "sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Readers of one cell that are not ordered among themselves. With more, the first is forgotten.
enum { MAX_READERS = 6 };

typedef struct {
    uint64_t begin, end;
    Launch write;  // count 0 if nothing was written
    uint32_t num_reads;
    Launch reads[MAX_READERS];
} Cell;

struct Block {
    uint64_t begin, end;
    int is_host_memory;
    size_t num_cells, capacity;
    Cell *cells;
};

static Block *blocks;  // by address
static size_t num_blocks, block_capacity;

// Conflicts

static long num_conflicts;
static char last_conflict[512];

int conflict(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_conflict, sizeof last_conflict, format, arguments);
    va_end(arguments);
    num_conflicts++;
    npu_sim_report(last_conflict);
    return UNORDERED;
}

long npu_sim_conflicts(void) { return num_conflicts; }
const char *npu_sim_last_conflict(void) { return last_conflict; }
void npu_sim_forget_conflicts(void) { num_conflicts = 0; }

// Blocks

// The block that holds the address, or the place before which one would be put.
static size_t find_block(uint64_t address) {
    size_t low = 0, high = num_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static Block *block_of(uint64_t address) {
    size_t i = find_block(address);
    return i < num_blocks && blocks[i].begin <= address ? &blocks[i] : NULL;
}

static void *grown(void *array, size_t needed, size_t *capacity, size_t size) {
    if (needed <= *capacity) return array;
    *capacity = needed * 2 + 8;
    array = realloc(array, *capacity * size);
    if (!array) abort();
    return array;
}

void track(void *pointer, size_t bytes, int is_host_memory) {
    lock();
    uint64_t begin = (uintptr_t)pointer;
    size_t place = find_block(begin);
    blocks = grown(blocks, num_blocks + 1, &block_capacity, sizeof *blocks);
    memmove(blocks + place + 1, blocks + place, (num_blocks - place) * sizeof *blocks);
    num_blocks++;
    Block *block = &blocks[place];
    *block = (Block){.begin = begin, .end = begin + (bytes ? bytes : 1), .is_host_memory = is_host_memory};
    block->cells = grown(NULL, 1, &block->capacity, sizeof(Cell));
    block->cells[0] = (Cell){.begin = block->begin, .end = block->end};
    block->num_cells = 1;
    unlock();
}

// Memory goes back to the system: the host must know that every launch that touches it has finished.
int untrack(void *pointer, const char *by) {
    lock();
    Block *block = block_of((uintptr_t)pointer);
    int error = OK;
    if (block && block->begin == (uintptr_t)pointer) {
        error = touch(host_launch(by), &host.clock, block->begin, block->end - block->begin, 1, MUST_EXIST);
        free(block->cells);
        memmove(block, block + 1, (blocks + num_blocks - block - 1) * sizeof *block);
        num_blocks--;
    }
    unlock();
    return error;
}

// Cells

static size_t find_cell(const Block *block, uint64_t address) {
    size_t low = 0, high = block->num_cells;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (block->cells[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The index of the cell that begins at `address`, after cutting one in two if none does.
static size_t cut(Block *block, uint64_t address) {
    size_t i = find_cell(block, address);
    if (i == block->num_cells || block->cells[i].begin == address) return i;
    block->cells = grown(block->cells, block->num_cells + 1, &block->capacity, sizeof(Cell));
    memmove(block->cells + i + 1, block->cells + i, (block->num_cells - i) * sizeof(Cell));
    block->num_cells++;
    block->cells[i].end = block->cells[i + 1].begin = address;
    return i + 1;
}

static int unordered(const Cell *cell, Launch first, int first_writes, Launch second, int second_writes) {
    return conflict("nothing orders %s on stream %u, which %s %lu bytes at 0x%lx, and %s on stream %u, which %s them",
                    operation_name(first.operation), first.stream, first_writes ? "writes" : "reads",
                    (unsigned long)(cell->end - cell->begin), (unsigned long)cell->begin,
                    operation_name(second.operation), second.stream, second_writes ? "writes" : "reads");
}

static int check(const Cell *cell, Launch launch, const Clock *clock, int writes) {
    if (cell->write.count && !finished(clock, cell->write)) return unordered(cell, cell->write, 1, launch, writes);
    for (uint32_t i = 0; writes && i < cell->num_reads; i++)
        if (!finished(clock, cell->reads[i])) return unordered(cell, cell->reads[i], 0, launch, 1);
    return OK;
}

// Readers that have finished before this one need not be remembered: who waits for this one waits for them.
static void add_reader(Cell *cell, Launch launch, const Clock *clock) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < cell->num_reads; i++)
        if (!finished(clock, cell->reads[i])) cell->reads[kept++] = cell->reads[i];
    if (kept == MAX_READERS) memmove(cell->reads, cell->reads + 1, --kept * sizeof(Launch));
    cell->reads[kept] = launch;
    cell->num_reads = kept + 1;
}

static int missing(Launch launch, uint64_t address, uint64_t bytes, int writes) {
    return conflict("%s on stream %u %s %lu bytes at 0x%lx, which are not allocated", operation_name(launch.operation),
                    launch.stream, writes ? "writes" : "reads", (unsigned long)bytes, (unsigned long)address);
}

// Note that the launch, which comes after all that `clock` says is finished, reads or writes the bytes. Memory that is
// not tracked is the host's own, unless it must exist.
int touch(Launch launch, const Clock *clock, uint64_t address, uint64_t bytes, int writes, int options) {
    if (!bytes) return OK;
    Block *block = block_of(address);
    if (!block && !(options & MUST_EXIST)) return OK;
    if (!block || address + bytes > block->end)
        return options & UNCHECKED ? OK : missing(launch, address, bytes, writes);
    size_t first = cut(block, address), end = cut(block, address + bytes);
    int error = OK;
    for (size_t i = first; i < end; i++) {
        Cell *cell = &block->cells[i];
        if (error == OK && !(options & UNCHECKED)) error = check(cell, launch, clock, writes);
        if (!writes) add_reader(cell, launch, clock);
    }
    if (writes) {  // one history for all of it
        block->cells[first] = (Cell){.begin = address, .end = address + bytes, .write = launch};
        memmove(block->cells + first + 1, block->cells + end, (block->num_cells - end) * sizeof(Cell));
        block->num_cells -= end - first - 1;
    }
    if (block->is_host_memory && launch.stream != HOST)
        guard((void *)(uintptr_t)block->begin, block->end - block->begin, launch, writes);
    return error;
}
