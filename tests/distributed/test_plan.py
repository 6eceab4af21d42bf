"""What the planner says is what ranks do: bytes to the byte, parameters, states and kept memory too."""

import pytest

from hyper_parallel.plan import Model, MoELayer, Request, make_plans, plan, read_cluster, read_config
from hyper_parallel.plan.layer import kept_bytes
from hyper_parallel.plan.model import grouped_attention
from tests.distributed import plan_cases as cases

TOKENS = 224  # of one coordinate: every choice of 2 of 8 experts 8 times, and once in each share of 8
MESHES = [(4, 1), (1, 4), (2, 2), (2, 1), (1, 2)]
ITEMSIZE = {"float32": "fp32", "bfloat16": "bf16"}


def model(shared=False):
    attention = grouped_attention(cases.DIM, 2, 2, 3, False, False, "", False)
    return Model(
        "test",
        cases.DIM,
        cases.HIDDEN,
        cases.NUM_EXPERTS,
        cases.TOP_K,
        num_moe_layers=cases.NUM_LAYERS,
        num_dense_layers=0,
        attention=attention,
        vocab_size=16,
        shared_hidden_dim=cases.HIDDEN if shared else 0,
    )


def styles_on(ep, tp):
    """The styles that a mesh allows."""
    found = ["ExpertTensorParallel", "SplitExpertTensorParallel", "DedupExpertTensorParallel"]
    return found + ["ExpertParallel"] * (tp == 1) + ["TensorParallel"] * (ep == 1)


ALL = [(style, ep, tp) for ep, tp in MESHES for style in styles_on(ep, tp)]


def planned(ranks, style, ep, tp, shared=False, dtype="fp32", recompute="none", sequence_parallel=False):
    tokens, more = TOKENS * (ranks // tp), {"dtype": dtype, "sequence_parallel": sequence_parallel}
    request = Request(model(shared), read_cluster("cpu"), ranks, tokens, TOKENS, **more)
    return plan(request, ep, tp, style, recompute)


def expected(one):
    """The plan's bytes as the case reports them: rows, and everything else, by axis and direction."""
    found = {}
    for axis in ("ep", "tp"):
        for name, size in one.traffic[axis].items():
            if name in ("inside", "between") or not size:
                continue
            when, what = name.split("_")
            key = axis, "rows" if what == "rows" else "other", "backward" if when == "recompute" else when
            found[key] = found.get(key, 0) + size
    return found


def total(found):
    """Bytes by axis and direction, rows or not."""
    summed = {}
    for (axis, _, when), size in found.items():
        summed[axis, when] = summed.get((axis, when), 0) + size
    return {key: size for key, size in summed.items() if size}


OVER_TP = [case for case in ALL if case[2] > 1]


@pytest.mark.parametrize(
    "style,ep,tp,shared,sequence_parallel",
    [(*case, False, False) for case in ALL]
    + [(*case, True, False) for case in OVER_TP]
    + [(*case, shared, True) for case in OVER_TP for shared in (False, True)],
)
def test_bytes_on_four_ranks(torch_pool, style, ep, tp, shared, sequence_parallel):
    one = planned(4, style, ep, tp, shared, sequence_parallel=sequence_parallel)
    arguments = {"style": style, "ep": ep, "tp": tp, "shared": shared, "sequence_parallel": sequence_parallel}
    for found in torch_pool.run(cases.handed_over, num_tokens=TOKENS, **arguments):
        assert total(found) == total(expected(one))
        for when in ("forward", "backward"):
            assert found.get(("ep", "rows", when), 0) == one.traffic["ep"][f"{when}_rows"]


@pytest.mark.parametrize("style", ["ExpertTensorParallel", "SplitExpertTensorParallel", "DedupExpertTensorParallel"])
def test_bytes_in_bfloat16(torch_pool, style):
    one = planned(4, style, 2, 2, dtype="bf16")
    arguments = {"style": style, "ep": 2, "tp": 2, "dtype": "bfloat16"}
    for found in torch_pool.run(cases.handed_over, num_tokens=TOKENS, **arguments):
        assert total(found) == total(expected(one))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("style", ["ExpertTensorParallel", "SplitExpertTensorParallel", "DedupExpertTensorParallel"])
def test_recompute_repeats_all_but_the_last_sum(torch_pool, style, shared, sequence_parallel):
    one = planned(4, style, 2, 2, shared, recompute="moe", sequence_parallel=sequence_parallel)
    arguments = {"style": style, "ep": 2, "tp": 2, "shared": shared, "recompute": True}
    arguments["sequence_parallel"] = sequence_parallel
    for found in torch_pool.run(cases.handed_over, num_tokens=TOKENS, **arguments):
        assert total(found) == total(expected(one))


@pytest.mark.parametrize("style,ep,tp", [(style, 2, 2) for style in styles_on(2, 2)] + [("ExpertParallel", 4, 1)])
def test_what_mindspore_sends(mindspore_pool, style, ep, tp):
    """Its all-to-alls on CPU are point-to-point messages: all of it but what stays on the rank."""
    one = planned(4, style, ep, tp)
    of_sums = {("tp", when): one.traffic["tp"].get(f"{when}_sums", 0) for when in ("forward", "backward")}
    if style == "SplitExpertTensorParallel":
        of_sums = {}
    else:
        of_sums["tp", "backward"] += one.traffic["tp"].get("backward_scores", 0)
    for found in mindspore_pool.run(cases.handed_over, num_tokens=TOKENS, style=style, ep=ep, tp=tp):
        for key, size in total(expected(one)).items():
            whole = of_sums.get(key, 0)
            degree = {"ep": ep, "tp": tp}[key[0]]
            assert total(found)[key] == whole + (size - whole) * (degree - 1) // degree


@pytest.mark.parametrize("other", [{"style": "SplitExpertTensorParallel"}, {"sequence_parallel": True}])
def test_other_bytes_are_seen(torch_pool, other):
    """Negative control: another style's plan does not describe what this one hands over."""
    one = planned(4, "ExpertTensorParallel", 2, 2)
    arguments = {"style": "ExpertTensorParallel", "ep": 2, "tp": 2, **other}
    found = torch_pool.run(cases.handed_over, num_tokens=TOKENS, **arguments)[0]
    assert total(found) != total(expected(one))


SIZES = {
    "dim": 8,
    "hidden_dim": 12,
    "num_experts": 4,
    "top_k": 2,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 20,
}


@pytest.mark.parametrize(
    "dtype,optimizer", [("float32", "adamw"), ("bfloat16", "adamw-plain"), ("float32", "momentum")]
)
@pytest.mark.parametrize(
    "style,ep,tp", [("ExpertTensorParallel", 2, 2), ("ExpertParallel", 4, 1), ("ExpertParallel", 2, 1)]
)
def test_parameters_and_states(torch_pool, style, ep, tp, dtype, optimizer):
    config = {
        "model_type": "mixtral",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 20,
        "n_shared_experts": 2,
    }
    request = Request(read_config(config), read_cluster("cpu"), 4, 64, 16, ITEMSIZE[dtype], optimizer)
    one = plan(request, ep, tp, style, "none")
    arguments = {"style": style, "ep": ep, "tp": tp, "dtype": dtype, "optimizer": optimizer, "shared": 2, **SIZES}
    for found in torch_pool.run(cases.states_of_a_model, **arguments):
        assert found == {name: getattr(one.memory, name) for name in found}


@pytest.mark.parametrize(
    "style,ep,tp,shared,dtype,sequence_parallel",
    [(*case, True, "float32", False) for case in ALL]
    + [(style, 2, 2, False, "bfloat16", False) for style in styles_on(2, 2)]
    + [(*case, case[0] == "TensorParallel", "float32", True) for case in OVER_TP],
)
def test_kept_memory(torch_pool, style, ep, tp, shared, dtype, sequence_parallel):
    layer = MoELayer(
        style,
        ep,
        tp,
        num_tokens=TOKENS,
        num_experts=cases.NUM_EXPERTS,
        top_k=cases.TOP_K,
        dim=cases.DIM,
        hidden_dim=cases.HIDDEN,
        itemsize={"float32": 4, "bfloat16": 2}[dtype],
        shared_hidden_dim=cases.HIDDEN if shared else 0,
        sequence_parallel=sequence_parallel,
    )
    arguments = {"style": style, "ep": ep, "tp": tp, "shared": shared, "dtype": dtype}
    arguments["sequence_parallel"] = sequence_parallel
    for found in torch_pool.run(cases.kept, num_tokens=TOKENS, **arguments):
        assert found == kept_bytes(layer)


def test_every_legal_plan_is_a_case_above():
    request = Request(model(), read_cluster("cpu"), 4, TOKENS * 4, TOKENS, dtype="fp32")
    found = {(one.style, one.ep, one.tp) for one in make_plans(request)}
    assert found == set(ALL) | {(style, 1, 1) for style in styles_on(1, 1)}
