"""Styles that are told how the axes of the mesh are called."""

import os
from functools import cache
from unittest import mock

import numpy as np

import hyper_parallel as hp
from tests.distributed.error_cases import raised
from tests.distributed.variant_cases import DIM, evaluate, make_layer, tokens_for

STYLES = ("ExpertTensorParallel", "DedupExpertTensorParallel", "SplitExpertTensorParallel")


@cache
def _mesh(names):
    return hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _gradients(context, style, names, arguments):
    """Output and gradients of a layer on a mesh with these names, all of the MoE layer's styles on it."""
    ep, tp = names
    layer, mesh = make_layer(context, 2, num_shared_experts=1), _mesh(names)
    plan = {
        "": hp.MoESequenceParallel(input_layouts=hp.Shard(0), **arguments["tp"]),
        "experts": getattr(hp, style)(**arguments["ep"], **arguments["tp"]),
        "shared_experts": hp.TensorParallel(**arguments["tp"]),
    }
    hp.parallelize_module(layer, mesh, plan)
    found = evaluate(context, layer, tokens_for(10 * mesh.get_local_rank(ep) + mesh.get_local_rank(tp), 8))
    return [found.output, *found.input_gradients, *found.parameter_gradients.values()]


def same_numbers(context, names):
    """Whether each style gives the numbers that it gives on axes ep and tp, to the bit."""
    hp.set_platform(context.platform)
    arguments = {"ep": {"ep_axis": names[0]}, "tp": {"tp_axis": names[1]}}
    return [
        all(
            np.array_equal(*pair)
            for pair in zip(
                _gradients(context, style, ("ep", "tp"), {"ep": {}, "tp": {}}),
                _gradients(context, style, names, arguments),
                strict=True,
            )
        )
        for style in STYLES
    ]


def errors(context):
    """Errors by name: (kind, message)."""
    hp.set_platform(context.platform)
    mesh, style = _mesh(("ep", "etp")), hp.ExpertTensorParallel(tp_axis="etp")
    layer, words = make_layer(context, 2), []
    style.apply(layer.experts, mesh)
    x = context.framework.tensor(tokens_for(context.rank, 4))
    with mock.patch.dict(os.environ, HYPER_PARALLEL_DEBUG="1"):
        different = raised(layer, x)
    platform = type(hp.get_platform(layer))
    exchange = platform.all_to_all_rows

    def recording(self, x, send, recv, group, name):
        words.append(name)
        return exchange(self, x, send, recv, group, name)

    with mock.patch.object(platform, "all_to_all_rows", recording):
        layer(context.framework.tensor(tokens_for(mesh.get_local_rank("ep"), 4)))
    return {
        "names": raised(hp.ExpertTensorParallel().apply, hp.GroupedExperts(DIM, 8, 4), mesh),
        "divisible": raised(style.apply, hp.GroupedExperts(DIM, 3, 4), mesh),
        "one of them": raised(
            hp.ExpertParallel(ep_axis="tp").apply, hp.GroupedExperts(DIM, 8, 5), _mesh(("tp", "ep"))["tp"]
        ),
        "same": raised(lambda: hp.ExpertTensorParallel(tp_axis="ep")),
        "no name": raised(lambda: hp.TensorParallel(tp_axis=1)),
        "different": different,
        "words": words,
    }


def test_numbers_do_not_depend_on_names(pool):
    """The names exchanged are the hardest ones."""
    assert all(all(same) for same in pool.run(same_numbers, names=("tp", "ep")))


def test_errors_say_the_names_in_use(pool):
    for found in pool.run(errors):
        assert found.pop("words")[0].endswith("over ep")
        assert (
            "expects a 2-D mesh with names ('ep', 'tp'), got a 2-D mesh with names ('ep', 'etp')" in found["names"][1]
        )
        assert "hidden_dim (3) must be divisible by the etp degree (2)" in found["divisible"][1]
        assert "num_experts (5) must be divisible by the tp degree (2)" in found["one of them"][1]
        assert found["same"] == ("ValueError", "ExpertTensorParallel: ep_axis and tp_axis must differ, both are 'ep'")
        assert found["no name"][0] == "TypeError" and "tp_axis must be the name" in found["no name"][1]
        assert "all etp ranks of one ep coordinate must be given the same tokens" in found["different"][1]
        assert "those of etp coordinates [1] differ" in found["different"][1]
