"""MoE layers made and filled from Hugging Face folders, beside what transformers' own blocks computed."""

import contextlib
import dataclasses
import importlib
from pathlib import Path
from unittest import mock

import numpy as np

import hyper_parallel as hp
from hyper_parallel.checkpoint.rooms import room_of
from hyper_parallel.huggingface import families, load_moe, moe_from_config
from hyper_parallel.platform import get_platform
from tests.distributed.huggingface_moe_configs import LAYER
from tests.harness import oracle
from tests.harness.setting import coordinates, mesh_for, to_dtype, whole_mesh


def filled(context, folder, style="ExpertTensorParallel", shared=True, dtype="float32", lazily=False):
    """The layer of a folder, sharded over (2, 2) and then loaded."""
    hp.set_platform(context.platform)
    with _without_memory(context) if lazily else contextlib.nullcontext():
        moe = moe_from_config(Path(folder) / "config.json")
    if dtype != "float32":
        to_dtype(context, moe, dtype)
    style = getattr(hp, style)()
    style.apply(moe.experts, mesh_for(context, style, 2, 2))
    if moe.shared_experts is not None and shared:
        hp.TensorParallel().apply(moe.shared_experts, mesh_for(context, hp.TensorParallel(), 2, 2))
    if lazily and context.platform == "torch":
        moe.to_empty(device="cpu")
    load_moe(moe, folder, LAYER)
    return moe


def _without_memory(context):
    framework = importlib.import_module(context.platform)
    return framework.device("meta") if context.platform == "torch" else framework.nn.utils.no_init_parameters()


def errors(context, out, name, style="ExpertTensorParallel", shared=True, change=None):
    """Relative errors of output and all gradients; the two forms of the folder give the same bits."""
    changed = {} if change is None else {name.split()[0]: dataclasses.replace(_family(name), **change)}
    with mock.patch.dict(families.FAMILIES, changed):
        moe = filled(context, f"{out}/{name}/each", style, shared)
        if change is None:
            other = filled(context, f"{out}/{name}/fused", style, shared, lazily=True)
            assert _bits(moe) == _bits(other)
    return _compared(context, moe, np.load(f"{out}/{name}.npz"))


def _family(name):
    return families.FAMILIES[name.split()[0]]


def _bits(moe):
    return {name: value.read().tobytes() for name, value in room_of(moe).model_values(moe).items()}


def _compared(context, moe, expected):
    adapter, ep_rank = context.framework, coordinates(context, 2, 2)[0]
    target = adapter.tensor(expected["target"][ep_rank], "float32")

    def function(x):
        y = moe(x)
        return adapter.loss(y, target), y

    evaluation = adapter.value_and_gradients(function, [adapter.tensor(expected["x"][ep_rank], "float32")], moe)
    found = {
        "output": (evaluation.output, expected["y"][ep_rank]),
        "x": (evaluation.input_gradients[0], expected["x_gradient"][ep_rank]),
    }
    parameters, values = _parameters(moe), room_of(moe).model_values(moe)
    for name, gradient in evaluation.parameter_gradients.items():
        if not _over_ep(parameters[name]):
            group = whole_mesh(context.platform, context.world_size, 2, 2).get_group("ep")
            summed = get_platform(moe).sum_over_group(adapter.tensor(gradient, "float32"), group, "gradients")
            gradient = adapter.array(summed)
        (piece,) = values[name].pieces
        inside = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.shape))
        found[name] = gradient, expected[name][inside]
    assert set(found) == {"output", *expected.files} - {"y", "target", "x_gradient"}
    return {name: oracle.relative_error(*pair) for name, pair in found.items()}


def _parameters(moe):
    return dict(moe.named_parameters() if hasattr(moe, "named_parameters") else moe.parameters_and_names())


def _over_ep(parameter):
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and "ep" in mesh.mesh_dim_names


def narrowed(context, folder):
    """Whether weights read into bfloat16 are those that the framework makes of float32's, and how many differ."""
    wide, narrow = filled(context, folder), filled(context, folder, dtype="bfloat16")
    adapter, same, changed = context.framework, True, 0
    for name, parameter in adapter.parameters(narrow).items():
        if name not in ("expert_bias", "tokens_per_expert"):  # they keep their types
            exact = adapter.array(adapter.parameters(wide)[name])
            found = adapter.array(parameter)
            same &= bool(np.array_equal(found, _as_bfloat16(context, exact)))
            changed += int((found != exact).sum())
    return same, changed


def _as_bfloat16(context, array):
    tensor = context.framework.tensor(array, "float32")
    dtype = context.framework.dtype_object("bfloat16")
    return context.framework.array(tensor.to(dtype) if context.platform == "torch" else tensor.astype(dtype))
