// How long a collective takes: as long as its slowest link. The rates are set from Python (costs.py).

#include "hccl.h"

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

double duration_of(const Communicator *comm) {
    double longest = 0;
    for (uint32_t r = 0; r < comm->size; r++)
        longest = larger(longest, larger(link_time(comm, r, sent), link_time(comm, r, received)));
    return latency_ns + longest;
}
