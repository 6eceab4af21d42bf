"""The planner's memory against published figures, and its order of meshes against the committed benchmark."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from hyper_parallel.plan import OPTIMIZERS, read_cluster, read_config
from hyper_parallel.plan.clock import collective_seconds, elementwise_seconds, experts_seconds
from hyper_parallel.plan.layer import collectives
from hyper_parallel.plan.traffic import strides
from tests.benchmark.model import layer_of
from tests.benchmark.settings import Shape, Work

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
DEEPSEEK = read_config(FAMILIES["deepseek_v3"]["config"])
GIB = 2**30
BENCHMARK = json.loads((ROOT / "docs/benchmark/benchmark.json").read_text(encoding="utf-8"))


def stage():
    """Four MoE layers of DeepSeek-V3, without embedding and output: one of the stages 1 to 14 of 16."""
    model = replace(DEEPSEEK, num_moe_layers=4, num_dense_layers=0)
    outside = 2 * model.vocab_size * model.dim + model.final_norms
    return model, model.dense_parameters() - outside


def test_a_stage_of_deepseek_v3():
    """Zhang and Su 2025, arXiv 2502.07846: 86 GB for a stage of 4 MoE layers in bf16."""
    model, dense = stage()
    parameters = dense + model.shared_parameters() + model.expert_parameters()
    assert 2 * parameters / GIB == pytest.approx(86, abs=0.5)


def test_a_device_of_deepseek_v3():
    """The same: 11.64 GB per device with ep 8 and tp 2 of attention, experts not cut by tp.

    The paper does not say of each weight whether tp cuts it, so 1 %.
    """
    model, dense = stage()
    of_heads = model.num_layers * model.attention.head_parameters
    parameters = dense - of_heads // 2 + model.shared_parameters() + model.expert_parameters(ep=8)
    assert 2 * parameters / GIB == pytest.approx(11.64, rel=0.01)


def test_bytes_per_parameter_of_megatron():
    """18 without, 6 + 12 / d with its distributed optimizer (NVIDIA/Megatron-LM issue 654)."""
    optimizer = OPTIMIZERS["adamw-fp32-gradients"]
    assert 2 + optimizer.gradient_bytes(2) == 6
    assert optimizer.state_bytes(2) == 12


@pytest.mark.parametrize("family,billions", [("deepseek_v3", 671), ("mixtral", 46.7)])
def test_published_sizes(family, billions):
    """DeepSeek-V3's README_WEIGHTS; Mixtral 8x7B's release."""
    assert read_config(FAMILIES[family]["config"]).parameters() / 1e9 == pytest.approx(billions, rel=0.001)


def seconds(work):
    """Of one layer, forward and backward."""
    cluster, layer = read_cluster("cpu"), layer_of(work)
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    distance, degrees = strides(work.ep, work.tp), {"ep": work.ep, "tp": work.tp}
    links = sum(
        collective_seconds(one, degrees[one.axis], distance[one.axis], cluster)
        for one in collectives(layer, bare=work.layer == "experts", scores=work.layer == "moe")
    )
    products, between = experts_seconds(layer, cluster, dtype), elementwise_seconds(layer, cluster)
    return links + sum(products.values()) + sum(between.values())


@pytest.mark.parametrize("contender", ["floor", "ours"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", ["experts", "moe"])
def test_the_order_of_meshes_is_the_measured_one(layer, dtype, contender):
    """Two meshes whose times differ by less than 2 % are not told apart by the measurement."""
    measured = {
        tuple(work["mesh"]): work["milliseconds"][contender]["both"]
        for work in BENCHMARK["works"]
        if (work["layer"], work["dtype"]) == (layer, dtype)
    }
    predicted = {(ep, tp): seconds(Work(layer, dtype, ep, tp, Shape())) for ep, tp in measured}
    told_apart = [pair for pair in combinations(measured, 2) if abs(measured[pair[0]] / measured[pair[1]] - 1) > 0.02]
    assert len(told_apart) >= 2
    for a, b in told_apart:
        assert (predicted[a] < predicted[b]) == (measured[a] < measured[b]), (a, b)
