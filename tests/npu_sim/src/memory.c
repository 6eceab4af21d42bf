// Memory of the device, and pinned memory of the host. Both are host memory here: a "device pointer" is a host pointer.

#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ALIGNMENT = 512, HOST_TO_HOST = 0, HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };

static const size_t MEMORY_PER_DEVICE = (size_t)8 << 30;

static int allocate(void **pointer, size_t size) {
    if (posix_memalign(pointer, ALIGNMENT, size ? size : 1)) return OUT_OF_MEMORY;
    track(*pointer, size, 0);
    return OK;
}

int aclrtMalloc(void **pointer, size_t size, int policy) { return allocate(pointer, size); }
int aclrtMallocAlign32(void **pointer, size_t size, int policy) { return allocate(pointer, size); }

// CANN does not wait for the device here either.
int aclrtFree(void *pointer) {
    int error = untrack(pointer, "aclrtFree");
    free(pointer);
    return error;
}

// Whole pages, which pinned.c can protect. Their size is kept in a page of its own in front.
int aclrtMallocHost(void **pointer, size_t size) {
    size_t front = page_aligned(sizeof(size_t)), whole = front + page_aligned(size);
    char *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    *(size_t *)memory = whole;
    *pointer = memory + front;
    track(*pointer, size, 1);
    return OK;
}

int aclrtFreeHost(void *pointer) {
    int error = untrack(pointer, "aclrtFreeHost");
    lock();
    forget_guards(pointer);
    unlock();
    char *memory = (char *)pointer - page_aligned(sizeof(size_t));
    munmap(memory, *(size_t *)memory);
    return error;
}

// Copies

static const char *copy_name(int kind) {
    switch (kind) {
        case HOST_TO_DEVICE: return "copy from host to device";
        case DEVICE_TO_HOST: return "copy from device to host";
        case DEVICE_TO_DEVICE: return "copy on the device";
    }
    return "copy on the host";
}

// The bytes go at once. Guards are of other copies of the same memory, which are no concern of this instruction.
static void move(void *target, const void *source, size_t size) {
    lock();
    lift_guards(target);
    lift_guards(source);
    memmove(target, source, size);
    restore_guards();
    unlock();
}

int aclrtMemcpyAsync(void *target, size_t capacity, const void *source, size_t size, int kind, void *stream) {
    if (size > capacity) return SIZE_TOO_SMALL;
    move(target, source, size);
    Run runs[] = {{(uintptr_t)source, size}, {(uintptr_t)target, size}};
    return npu_sim_launch(copy_name(kind), COPY, stream, runs, 1, 1, 0, copy_cost(size));
}

// The host does it itself, and has waited when it returns.
int aclrtMemcpy(void *target, size_t capacity, const void *source, size_t size, int kind) {
    if (size > capacity) return SIZE_TOO_SMALL;
    move(target, source, size);
    lock();
    Launch launch = host_launch(copy_name(kind));
    int read = touch(launch, &host.clock, (uintptr_t)source, size, 0, 0);
    int written = touch(launch, &host.clock, (uintptr_t)target, size, 1, 0);
    unlock();
    return read ? read : written;
}

int aclrtMemsetAsync(void *target, size_t capacity, int32_t value, size_t size, void *stream) {
    if (size > capacity) return SIZE_TOO_SMALL;
    memset(target, value, size);
    Run runs[] = {{(uintptr_t)target, size}};
    return npu_sim_launch("memset", COPY, stream, runs, 0, 1, 0, copy_cost(size));
}

int aclrtMemset(void *target, size_t capacity, int32_t value, size_t size) {
    if (size > capacity) return SIZE_TOO_SMALL;
    memset(target, value, size);
    lock();
    int error = touch(host_launch("memset"), &host.clock, (uintptr_t)target, size, 1, 0);
    unlock();
    return error;
}

int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = MEMORY_PER_DEVICE;
    return OK;
}
