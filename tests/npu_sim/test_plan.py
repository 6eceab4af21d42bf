"""The planner's time of a MoE layer against the virtual clock, which runs the layer's real sequence of calls.

Both take the same rates (tests/npu_sim/costs.py, the preset atlas-a2). Compared is what the planner takes a layer to
do: products, passes over memory, collectives, and that nothing of these hides behind another.
"""

import itertools

import pytest

from hyper_parallel.plan.clock import collective_seconds, elementwise_seconds, experts_seconds
from hyper_parallel.plan.cluster import read_cluster
from hyper_parallel.plan.layer import MoELayer, collectives
from hyper_parallel.plan.traffic import strides
from tests.npu_sim import plan_cases

# Tokens of a coordinate, D, H, experts per rank, K: a rank's part of Mixtral 8x7B on ep 4, Qwen3-30B-A3B on ep 8 and
# DeepSeek-V3 on ep 16.
SHAPES = {
    "mixtral": (4096, 4096, 14336, 2, 2),
    "qwen3": (8192, 2048, 768, 16, 8),
    "deepseek": (4096, 7168, 2048, 16, 8),
}
ARRANGEMENTS = (
    ("ExpertTensorParallel", 2, 2),
    ("SplitExpertTensorParallel", 2, 2),
    ("ExpertTensorParallel", 4, 1),
)
TOLERANCE = 0.03


def predicted(style, ep, tp, sizes):
    """Seconds of one layer each way: all, exposed, and what the passes over memory take of it."""
    layer, cluster = MoELayer(style, ep, tp, **sizes, itemsize=2), read_cluster("atlas-a2")
    products, between = experts_seconds(layer, cluster, "bf16"), elementwise_seconds(layer, cluster)
    size, distance = {"ep": ep, "tp": tp}, strides(ep, tp)
    found = {}
    for when in plan_cases.PASSES:
        mine = [one for one in collectives(layer) if one.when == when]
        links = sum(collective_seconds(one, size[one.axis], distance[one.axis], cluster) for one in mine)
        found[when] = products[when] + between[when] + links, links, between[when]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layers_time_and_the_order_of_arrangements(npu_pool, shape):
    num_tokens, dim, hidden_dim, local, top_k = SHAPES[shape]
    totals = []
    for style, ep, tp in ARRANGEMENTS:
        sizes = {
            "num_tokens": num_tokens,
            "dim": dim,
            "hidden_dim": hidden_dim,
            "top_k": top_k,
            "num_experts": local * ep,
        }
        per_rank = npu_pool.run(plan_cases.layer_seconds, style=style, ep=ep, tp=tp, **sizes)
        expected = predicted(style, ep, tp, sizes)
        slowest = {when: [max(found[when][i] for found in per_rank) for i in (0, 1)] for when in expected}
        for when, (seconds, exposed, passes) in expected.items():
            assert [seconds, exposed] == pytest.approx(slowest[when], rel=TOLERANCE)
            # A planner that forgot the passes over memory would be seen.
            assert seconds - passes != pytest.approx(slowest[when][0], rel=TOLERANCE)
        totals.append(tuple(sum(times[when][0] for when in times) for times in (expected, slowest)))
    for (first, on_clock), (second, other) in itertools.combinations(totals, 2):
        if abs(on_clock - other) > 0.02 * other:
            assert (first < second) == (on_clock < other)
