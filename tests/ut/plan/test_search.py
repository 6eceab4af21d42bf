"""The search: which plans are legal, how they are ordered, and how their costs depend on the layout."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hyper_parallel.plan import Request, make_plans, plan, read_cluster, read_config, read_load, search, zipf_load
from hyper_parallel.plan.clock import collective_seconds
from hyper_parallel.plan.imbalance import imbalance_of
from hyper_parallel.plan.layer import Collective
from hyper_parallel.plan.picture import pareto_front
from hyper_parallel.plan.traffic import on_links, strides

FAMILIES = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
MIXTRAL = read_config(FAMILIES["mixtral"]["config"])
DEEPSEEK = read_config(FAMILIES["deepseek_v3"]["config"])
A2 = read_cluster("atlas-a2")
REQUEST = Request(MIXTRAL, A2, 64, 2**20, 4096, zero=1)


def test_every_plan_is_legal_and_every_legal_mesh_is_there():
    plans = make_plans(REQUEST)
    meshes = {(one.dp, one.ep, one.tp) for one in plans}
    assert all(dp * ep * tp == 64 for dp, ep, tp in meshes)
    expected = {(ep, tp) for ep in (1, 2, 4, 8) for tp in (1, 2, 4, 8, 16, 32, 64) if ep * tp <= 64}
    assert {(ep, tp) for _, ep, tp in meshes} == expected
    assert all(one.tp == 1 for one in plans if one.style == "ExpertParallel")
    assert all(one.ep == 1 for one in plans if one.style == "TensorParallel")
    assert len(plans) == len({(one.ep, one.tp, one.style, one.recompute) for one in plans})


def test_what_fits_comes_first_and_fast_comes_before_slow():
    plans = make_plans(REQUEST)
    assert [one.fits for one in plans] == sorted((one.fits for one in plans), reverse=True)
    times = [one.time.total for one in plans if one.fits]
    assert times == sorted(times) and 0 < len(times) < len(plans)
    for one in plans:
        assert one.fits == (one.memory.total <= A2.memory_bytes)


def test_json_has_the_promised_keys():
    one = json.loads(json.dumps(make_plans(REQUEST)[0].as_dict()))
    assert {"dp", "ep", "tp", "style", "recompute", "fits", "memory", "traffic", "time"} <= set(one)
    memory = {"expert_parameters", "parameters", "gradients", "optimizer", "activations", "buffers", "total"}
    assert set(one["memory"]) == memory
    parts = sum(one["memory"][part] for part in memory - {"expert_parameters", "total"})
    assert one["memory"]["total"] == parts
    assert {"ep", "tp", "dp"} == set(one["traffic"])
    assert {"forward_rows", "backward_rows", "inside", "between"} <= set(one["traffic"]["ep"])
    spent = sum(one["time"][part] for part in ("experts", "elementwise", "dense", "ep", "tp", "dp"))
    assert one["time"]["total"] == pytest.approx(spent)


def test_rows_over_ep_by_hand():
    one = plan(REQUEST, 8, 2, "ExpertTensorParallel", "none")
    tokens = 2**20 // (4 * 8)
    assert one.traffic["ep"]["forward_rows"] == 32 * 2 * tokens * 2 * 4096 * 2  # layers, ways, T, K, D, b
    assert one.memory.expert_parameters == 32 * 3 * 4096 * 14336 // 2 * 2  # one expert per rank, half of it, bf16
    # Groups of 8 ranks, two apart: four in a host, so that 3 of 8 parts go inside and 4 of 8 between.
    assert one.traffic["ep"]["between"] / one.traffic["ep"]["inside"] == pytest.approx(4 / 3)


def test_zero_divides_what_it_says():
    stages = [plan(replace(REQUEST, zero=stage), 8, 1, "ExpertParallel", "none").memory for stage in range(4)]
    experts, rest = MIXTRAL.expert_parameters(8, 1), MIXTRAL.dense_parameters()
    assert stages[0].optimizer == 12 * (experts + rest)
    assert stages[1].optimizer == 12 * (-(-experts // 8) + -(-rest // 64))
    assert stages[1].gradients == stages[0].gradients == 2 * (experts + rest)
    assert stages[2].gradients == stages[3].parameters == 2 * (-(-experts // 8) + -(-rest // 64))
    assert stages[2].parameters == 2 * (experts + rest)


def test_recompute_trades_memory_for_time():
    none, moe, full = (plan(REQUEST, 8, 2, "ExpertTensorParallel", how) for how in ("none", "moe", "full"))
    assert none.memory.activations > moe.memory.activations > full.memory.activations
    assert none.time.total < moe.time.total < full.time.total
    assert moe.traffic["ep"]["recompute_rows"] == none.traffic["ep"]["forward_rows"]


def test_sequence_parallel_by_hand():
    """A gather and a reduce-scatter put on the links what one sum does; norms and logits are held for 1/tp of T."""
    whole, cut = (
        plan(replace(REQUEST, sequence_parallel=given), 8, 2, "ExpertTensorParallel", "none") for given in (False, True)
    )
    sizes = 32 * 8 * (2 + 4) * 2  # of each layer: integers for both ranks, half of which leave
    assert cut.traffic["tp"]["inside"] - whole.traffic["tp"]["inside"] == sizes // 2
    T, D, b, vocabulary, layers = 2**20 // (4 * 8), 4096, 2, 32000, 32
    outside = layers * 4 * D * b + 3 * D * b + vocabulary * (b + 4)
    assert whole.memory.activations - cut.memory.activations == T // 2 * outside - layers * T * D * b
    assert cut.as_dict()["sequence_parallel"] and not whole.as_dict()["sequence_parallel"]
    assert "sequence parallel" in cut.name and cut.time.dense < whole.time.dense
    assert plan(replace(REQUEST, sequence_parallel=True), 8, 1, "ExpertParallel", "none") == plan(
        REQUEST, 8, 1, "ExpertParallel", "none"
    )


def test_no_legal_plan_is_an_empty_list():
    assert make_plans(replace(REQUEST, tokens=2**20 + 1, ranks=63)) == []


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("ranks", 0, "ranks must be at least 1, got 0"),
        ("dtype", "int8", "dtype must be one of bf16, fp16, fp32, got 'int8'"),
        ("optimizer", "lion", "optimizer must be one of adamw"),
        ("recompute", "some", "recompute must be one of any, none, moe, full"),
        ("zero", 4, "zero must be one of 0, 1, 2, 3, got 4"),
    ],
)
def test_wrong_requests(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(REQUEST, **{field: value})


def test_a_load_must_fit_the_model_and_stand_alone():
    with pytest.raises(ValueError, match="load has 4 experts, the model 8"):
        replace(REQUEST, load=np.ones((32, 4)))
    with pytest.raises(ValueError, match="not both"):
        replace(REQUEST, load=np.ones((32, 8)), zipf=1.0)


def test_a_plan_that_cuts_sequences_says_so():
    small = replace(REQUEST, tokens=64 * 1024)
    assert "no whole sequences" in plan(small, 8, 1, "ExpertParallel", "none").notes[0]
    assert not plan(small, 8, 4, "ExpertTensorParallel", "none").notes


def test_16384_ranks():
    """Nothing grows with the number of ranks but the number of meshes: one cost is computed for each plan."""
    request = Request(DEEPSEEK, A2, 16384, 2**28, 4096, zipf=0.5)
    with mock.patch.object(search, "plan", wraps=search.plan) as costs:
        plans = make_plans(request)
    assert costs.call_count == len(plans) == 900
    assert {one.dp * one.ep * one.tp for one in plans} == {16384}
    assert max(one.dp for one in plans) == 16384 and max(one.ep for one in plans) == 256


def test_pareto_front():
    plans = make_plans(REQUEST)
    front = pareto_front(plans)
    for one in front:
        assert not any(other.time.total < one.time.total and other.memory.total < one.memory.total for other in plans)
    assert min(plans, key=lambda p: p.memory.total).memory.total == front[-1].memory.total


def test_uneven_load_costs_time_and_memory():
    load = np.ones((32, 8))
    load[:, 0] = 9  # expert 0 gets 9 of 16 rows
    even, uneven = (plan(replace(REQUEST, load=given), 8, 1, "ExpertParallel", "none") for given in (None, load))
    assert uneven.imbalance.time == uneven.imbalance.memory == pytest.approx(4.5)
    assert uneven.time.experts == pytest.approx(4.5 * even.time.experts, rel=1e-3)
    assert uneven.memory.activations > even.memory.activations
    assert uneven.memory.parameters == even.memory.parameters
    # tp evens it out: fewer, larger groups of experts.
    assert plan(replace(REQUEST, load=load), 4, 2, "ExpertTensorParallel", "none").imbalance.time == pytest.approx(2.5)


def test_layers_that_are_busy_elsewhere_cost_time_not_memory():
    load = np.ones((8, 8)) + 8 * np.eye(8)  # each layer has its own popular expert
    found = imbalance_of(load, 8)
    assert found.time == pytest.approx(4.5) and found.memory == pytest.approx(1.0)


def test_zipf():
    assert zipf_load(0, 8, 2) == pytest.approx(2 / 8)
    load = zipf_load(2.0, 16, 4)
    assert load.max() <= 1 + 1e-9 and load.sum(1) == pytest.approx(4.0)
    slow = [plan(replace(REQUEST, zipf=s), 8, 1, "ExpertParallel", "none").time.total for s in (0.0, 0.5, 1.0)]
    assert slow == sorted(slow) and slow[0] < slow[-1]
    with pytest.raises(ValueError, match="at least 0"):
        zipf_load(-1, 8, 2)


@pytest.mark.parametrize(
    "content", [[[1, 2], [3, 4]], {"layers.0": [1, 2], "layers.1": [3, 4]}, {"counts": [[1, 2], [3, 4]]}], ids=str
)
def test_forms_of_a_load(tmp_path, content):
    path = tmp_path / "load.json"
    path.write_text(json.dumps(content))
    assert read_load(path, 2).tolist() == read_load(content, 2).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("content", [[[1, 2, 3]], [[1, 2], [3]], [[0, 0]], [[-1, 2]]], ids=str)
def test_wrong_loads(content):
    with pytest.raises(ValueError, match="load"):
        read_load(content, 2)


def test_clusters():
    for name in ("atlas-a2", "atlas-a3", "cpu"):
        cluster = read_cluster(name)
        for figure in ("compute", "memory_bytes", "memory_bandwidth", "inside", "between", "efficiency"):
            assert cluster.sources[figure], f"{name}: {figure} has no source"
    fields = {**asdict(A2), "links": 3}
    with pytest.raises(ValueError, match="unknown links"):
        read_cluster(fields)
    del fields["links"], fields["inside"]
    with pytest.raises(ValueError, match="lacks inside"):
        read_cluster(fields)
    with pytest.raises(ValueError, match=r"neither a file nor one of atlas-a2, atlas-a3, cpu"):
        read_cluster("atlas-a9")


@pytest.mark.parametrize("ranks_per_host", [1, 2, 8, 64])
@pytest.mark.parametrize("ep,tp", [(8, 1), (8, 2), (4, 4), (2, 8), (1, 8), (8, 8)])
@pytest.mark.parametrize("axis", ["ep", "tp", "dp"])
def test_links_against_counted_ranks(axis, ep, tp, ranks_per_host):
    """An all-to-all of one unit to each rank of the group of rank 0, counted rank by rank."""
    sizes = {"dp": 64 // (ep * tp), "ep": ep, "tp": tp}
    size, stride = sizes[axis], strides(ep, tp)[axis]
    others = [stride * i for i in range(1, size)]
    inside = sum(rank < ranks_per_host for rank in others)
    one = Collective(axis, "forward", "all-to-all", "rows", 1000 * size, "")
    found = on_links(one, size, stride, replace(A2, ranks_per_host=ranks_per_host))
    assert found == {"inside": 1000 * inside, "between": 1000 * (len(others) - inside)}


def test_a_ring_inside_one_host_and_one_between_hosts():
    one = Collective("dp", "step", "all-reduce", "expert_gradients", 8000, "")
    assert on_links(one, 8, 1, A2) == {"inside": 2 * 7000, "between": 0}
    assert on_links(one, 8, 8, A2) == {"inside": 0, "between": 2 * 7000}
    assert on_links(one, 8, 2, A2) == {"inside": 2 * 6000, "between": 2 * 1000}  # 4 in a host, 2 hosts, a quarter each


def test_two_devices_with_a_link_of_their_own_use_no_other():
    one = Collective("tp", "forward", "all-to-all", "rows", 2 * 10**9, "")
    for size, links in ((2, 1), (4, 3), (8, 7)):
        expected = 2e9 * (size - 1) / size / (links * A2.inside.pair_bandwidth) + A2.inside.latency
        assert collective_seconds(one, size, 1, A2) == pytest.approx(expected)
    a3 = read_cluster("atlas-a3")  # one switch: a rank's whole bandwidth goes to any number of others
    assert collective_seconds(one, 2, 1, a3) == pytest.approx(1e9 / a3.inside.bandwidth + a3.inside.latency)
