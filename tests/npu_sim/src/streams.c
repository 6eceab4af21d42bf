// Streams and events, and which launches they order.
//
// Everything is launched by the program ("host"), in its order. A launch comes after what its stream did before, after
// what the host knew to be finished when it launched, and after the events that the stream was told to wait for. The
// host learns that work has finished by waiting for a stream, an event or the device, and by asking for an event that
// is done. Nothing else orders two launches: not the order of the calls, nor that this runtime runs them at once.

#define _GNU_SOURCE
#include "sim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAM_COMPLETE = 0, STREAM_NOT_READY = 1, EVENT_NOT_READY = 0, EVENT_COMPLETE = 1 };
// What a question costs the host, so that a loop that asks until the answer is yes comes to an end in virtual time.
static const double QUERY_NS = 1000;

typedef struct {
    int recorded;
    Clock clock;
    double time;
} Event;

Stream host;
static Stream default_stream = {.id = 1};
static Stream *streams[MAX_STREAMS] = {&host, &default_stream};
static uint32_t num_streams = 2;
static long waits;
// Threads that launch work are the host, together: the interpreter hands over between them. Others, such as the
// watchdog of a process group, only look, and what they see orders nothing.
static __thread int launches;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }

// Clocks

int finished(const Clock *clock, Launch launch) { return clock->count[launch.stream] >= launch.count; }

void join(Clock *clock, const Clock *other) {
    for (uint32_t s = 0; s < num_streams; s++)
        if (clock->count[s] < other->count[s]) clock->count[s] = other->count[s];
}

static Stream *resolve(void *stream) { return stream ? stream : &default_stream; }
static double later(double a, double b) { return a > b ? a : b; }

static void host_learns(const Clock *clock, double time) {
    join(&host.clock, clock);
    host.time = later(host.time, time);
    release_guards();
}

// Something that the host itself does to memory.
Launch host_launch(const char *name) {
    host.clock.count[HOST]++;
    return (Launch){HOST, host.clock.count[HOST], note_operation(name, HOST, COPY, host.time, host.time)};
}

int npu_sim_launch(const char *name, int kind, void *handle, const Run *runs, size_t num_reads, size_t num_writes,
                   double not_before, double duration) {
    lock();
    launches = 1;
    Stream *stream = resolve(handle);
    join(&stream->clock, &host.clock);
    stream->clock.count[stream->id]++;
    double start = later(later(stream->time, host.time), not_before);
    stream->time = start + duration;
    host.time += host_launch_cost();
    uint32_t operation = note_operation(name, stream->id, kind, start, stream->time);
    Launch launch = {stream->id, stream->clock.count[stream->id], operation};
    int error = OK;
    for (size_t i = 0; i < num_reads + num_writes; i++) {
        // The first conflict is enough.
        int options = (kind == COPY ? 0 : MUST_EXIST) | (error == OK ? 0 : UNCHECKED);
        int found = touch(launch, &stream->clock, runs[i].address, runs[i].bytes, i >= num_reads, options);
        if (error == OK) error = found;
    }
    if (take_unraised()) error = UNORDERED;
    unlock();
    return error;
}

double npu_sim_ready_time(void *stream) {
    lock();
    double time = later(resolve(stream)->time, host.time);
    unlock();
    return time;
}

// Streams

int aclrtCreateStream(void **stream) {
    lock();
    Stream *new = num_streams < MAX_STREAMS ? calloc(1, sizeof *new) : NULL;
    if (new) {
        new->id = num_streams;
        streams[num_streams++] = new;
    }
    unlock();
    *stream = new;
    return new ? OK : OUT_OF_MEMORY;
}

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { return aclrtCreateStream(stream); }

// Kept: memory may still remember its launches.
int aclrtDestroyStream(void *stream) { return OK; }
int aclrtDestroyStreamForce(void *stream) { return OK; }

int npu_sim_stream_id(void *stream) { return resolve(stream)->id; }

int aclrtSynchronizeStream(void *handle) {
    lock();
    waits++;
    host_learns(&resolve(handle)->clock, resolve(handle)->time);
    unlock();
    return OK;
}

int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t milliseconds) { return aclrtSynchronizeStream(stream); }

int aclrtSynchronizeDevice(void) {
    lock();
    waits++;
    for (uint32_t s = 1; s < num_streams; s++) host_learns(&streams[s]->clock, streams[s]->time);
    unlock();
    return OK;
}

int aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) { return aclrtSynchronizeDevice(); }

int aclrtStreamQuery(void *handle, int *status) {
    lock();
    Stream *stream = resolve(handle);
    if (launches) host.time += QUERY_NS;
    *status = stream->time <= host.time ? STREAM_COMPLETE : STREAM_NOT_READY;
    if (launches && *status == STREAM_COMPLETE) host_learns(&stream->clock, stream->time);
    unlock();
    return OK;
}

// How often the host has waited for the device: for a stream, an event or everything.
long npu_sim_stream_syncs(void) { return waits; }

// Events: what had to be finished when they were recorded, and the virtual time at which it is

int aclrtCreateEventWithFlag(void **event, uint32_t flags) {
    *event = calloc(1, sizeof(Event));
    return *event ? OK : OUT_OF_MEMORY;
}

int aclrtCreateEventExWithFlag(void **event, uint32_t flags) { return aclrtCreateEventWithFlag(event, flags); }

int aclrtDestroyEvent(void *event) {
    free(event);
    return OK;
}

int aclrtRecordEvent(void *handle, void *stream_handle) {
    lock();
    Stream *stream = resolve(stream_handle);
    Event *event = handle;
    join(&stream->clock, &host.clock);
    event->recorded = 1;
    event->clock = stream->clock;
    event->time = later(stream->time, host.time);
    unlock();
    return OK;
}

// An event that was never recorded holds up nothing.
int aclrtStreamWaitEvent(void *stream_handle, void *handle) {
    lock();
    Stream *stream = resolve(stream_handle);
    const Event *event = handle;
    if (event->recorded) {
        join(&stream->clock, &event->clock);
        stream->time = later(stream->time, event->time);
    }
    unlock();
    return OK;
}

int aclrtSynchronizeEvent(void *handle) {
    lock();
    const Event *event = handle;
    waits++;
    if (event->recorded) host_learns(&event->clock, event->time);
    unlock();
    return OK;
}

// Done or not by virtual time for the host, which may go by the answer (the allocator does when it gives memory out
// again); always done for those that only look, who would wait for a clock that they do not move.
int aclrtQueryEventStatus(void *handle, int *status) {
    lock();
    const Event *event = handle;
    *status = EVENT_COMPLETE;
    if (launches) {
        host.time += QUERY_NS;
        if (event->recorded && event->time > host.time)
            *status = EVENT_NOT_READY;
        else if (event->recorded)
            host_learns(&event->clock, event->time);
    }
    unlock();
    return OK;
}

int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    *milliseconds = (((const Event *)end)->time - ((const Event *)start)->time) / 1e6;
    return OK;
}
