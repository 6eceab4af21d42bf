"""How cost grows with experts, tokens and ranks."""

import time
from dataclasses import replace

import numpy as np

from hyper_parallel.core.expert_parallel.exchange.rows import expert_major_order, inverse_order, splits_by_rank
from tests.benchmark import torch_cases
from tests.benchmark.settings import Work
from tests.harness.mesh_of_tuples import MeshOfTuples
from tests.harness.pool import RankPool

__all__ = ["host_arithmetic", "mesh_set_up", "layers"]

NUM_REPETITIONS = 3


def host_arithmetic():
    """Milliseconds that one rank's host spends on the indices of one call: splits, order and its inverse.

    (experts, ranks of ep, rows received, ms): each of the three is varied alone.
    """
    varied = [(experts, 8, 65536) for experts in (8, 32, 128, 512)]
    varied += [(512, ranks, 65536) for ranks in (2, 32, 256)]
    varied += [(128, 8, rows) for rows in (4096, 16384, 262144)]
    varied += [(4096, 4096, 65536)]
    return [(*sizes, 1e3 * min(_host_seconds(*sizes) for _ in range(NUM_REPETITIONS))) for sizes in varied]


def _host_seconds(num_experts, num_ranks, num_rows):
    # One count per rank and expert of this rank, which are as many as there are experts.
    counts = np.bincount(np.random.default_rng(0).integers(0, num_experts, num_rows), minlength=num_experts)
    began = time.process_time()
    splits_by_rank(counts, num_ranks)
    inverse_order(expert_major_order(counts.reshape(num_ranks, -1)))
    return time.process_time() - began


def mesh_set_up():
    """Milliseconds to build the meshes of 4,096 ranks as each of them sees it, and to slice them: (shape, one, all)."""
    found = []
    for shape, names in (((64, 64), ("ep", "tp")), ((16, 16, 16), ("dp", "ep", "tp"))):
        ranks = np.arange(4096).reshape(shape)
        began = time.process_time()
        for rank in range(4096):
            MeshOfTuples("cpu", ranks, names, rank)["ep", "tp"]["ep"].get_group()
        took = 1e3 * (time.process_time() - began)
        found.append((shape, took / 4096, took))
    return found


def layers(plan):
    """Processor milliseconds per rank of forward and backward, (what, ours, floor), as one size grows.

    ``experts``: the same rows among more and more experts. ``tokens``: 16 experts. ``ranks``: ep = ranks, the same
    tokens on each.
    """

    def work(ep=1, num_tokens=plan.growth_shape.num_tokens, num_experts=16):
        shape = replace(plan.growth_shape, num_tokens=num_tokens, num_experts=num_experts)
        return Work("experts", "float32", ep, 1, shape)

    by_experts = {size: work(num_experts=size) for size in plan.growing_experts}
    by_tokens = {size: work(num_tokens=size) for size in plan.growing_tokens}
    with RankPool("torch", 1) as pool:
        found = {"experts": _measured(pool, by_experts), "tokens": _measured(pool, by_tokens), "ranks": []}
    tokens_each = plan.growth_shape.num_tokens // 4
    for ranks in plan.growing_ranks:
        with RankPool("torch", ranks, collective_limit_s=120) as pool:
            found["ranks"] += _measured(pool, {ranks: work(ranks, tokens_each * ranks)})
    return found


def _measured(pool, works):
    arguments = {"works": tuple(works.values()), "num_repetitions": NUM_REPETITIONS}
    per_rank = np.array(pool.run(torch_cases.processor_times, time_limit_s=300, **arguments))
    return [(size, *(1e3 * times).tolist()) for size, times in zip(works, per_rank.mean(0))]
