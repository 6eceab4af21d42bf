"""Training that is interrupted by a checkpoint, on either framework, as cases for ranks."""

import importlib
import zlib

import numpy as np

import hyper_parallel as hp
from hyper_parallel import checkpoint
from hyper_parallel.platform import get_platform
from tests.harness.setting import whole_mesh

DIM, HIDDEN, EXPERTS, TOKENS = 8, 16, 4, 24


def _framework_model(context, dtype):
    kind = importlib.import_module(f"tests.distributed.checkpoint_{context.platform}")
    return kind, kind.model(DIM, HIDDEN, EXPERTS, dtype)


def made(context, style, ep, tp, dtype, seed=0):
    """A sharded model whose weights depend on their names and the seed alone, its mesh, and an AdamW."""
    hp.set_platform(context.platform)
    kind, model = _framework_model(context, dtype)
    for name, value in kind.room.model_values(model).items():
        rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        value.write((0.3 * rng.standard_normal(value.shape)).astype(value.read().dtype))
    mesh = whole_mesh(context.platform, context.world_size, ep, tp)
    experts = getattr(hp, style)()
    hp.parallelize_module(
        model, mesh["ep", "tp"], {"moe.experts": experts, "moe.shared_experts": hp.TensorParallel()}
    ) if style != "none" else None
    return kind, model, mesh, kind.adamw(model)


def train(context, kind, model, mesh, optimizer, steps):
    """Steps of training; tokens differ over ep, and gradients are summed over ep where it does not shard."""
    platform = get_platform(model)
    ep, rank = mesh.size(1), mesh.get_local_rank("ep")

    def reduced(parameter, gradient):
        axes = getattr(parameter, "device_mesh", None)
        over_ep = axes is not None and "ep" in axes.mesh_dim_names
        return gradient if over_ep or ep == 1 else platform.sum_over_group(gradient, mesh.get_group("ep"), "gradients")

    for step in steps:
        x = np.random.default_rng(step).standard_normal((TOKENS, DIM))
        kind.step(model, optimizer, np.split(x, ep)[rank], TOKENS, reduced)


def five_in_a_row(context, dtype, ep=2, tp=2):
    kind, model, mesh, optimizer = made(context, "ExpertTensorParallel", ep, tp, dtype)
    train(context, kind, model, mesh, optimizer, range(5))
    return kind.whole(model)


def three_and_save(context, folder, dtype, ep=2, tp=2, style="ExpertTensorParallel", asynchronous=False):
    kind, model, mesh, optimizer = made(context, style, ep, tp, dtype)
    train(context, kind, model, mesh, optimizer, range(3))
    saving = checkpoint.save(folder, model, optimizer, step=3, asynchronous=asynchronous)
    if asynchronous:
        train(context, kind, model, mesh, optimizer, range(3, 5))  # what is written was taken before
        saving.wait()


def load_and_two(context, folder, dtype, ep, tp, style="ExpertTensorParallel", with_optimizer=True):
    kind, model, mesh, optimizer = made(context, style, ep, tp, dtype, seed=1)
    step = checkpoint.load(folder, model, optimizer if with_optimizer else None)
    assert step == 3
    train(context, kind, model, mesh, optimizer, range(3, 5))
    return kind.whole(model)


def errors(context, folder, change):
    """The error on this rank, of a save or load that goes wrong on rank 2 alone, or on all."""
    kind, model, _, optimizer = made(context, "ExpertTensorParallel", 2, 2, "float32")
    before = kind.whole(model)
    try:
        if change == "one rank cannot write":
            if context.rank == 2:
                kind.room = _Broken(kind.room)
            _with_room(kind, lambda: checkpoint.save(folder, model, optimizer))
        elif change == "another mesh's arguments":
            checkpoint.save(folder, model, optimizer, step=context.rank)
        else:
            checkpoint.load(folder, model, optimizer)
    except checkpoint.CheckpointError as error:
        after = kind.whole(model)
        return str(error), all(np.array_equal(before[name], after[name]) for name in before)
    finally:
        kind.room = getattr(kind.room, "inner", kind.room)
    return None


class _Broken:
    """A room in which one value cannot be read."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def model_values(self, module):
        raise OSError("no space left")


def _with_room(kind, function):
    from unittest import mock

    from hyper_parallel.checkpoint import saving

    with mock.patch.object(saving, "room_of", lambda module: kind.room):
        function()


def random_numbers(context, folder):
    """What the generator gives after a save, and again after the load."""
    kind, model, _, _ = made(context, "ExpertTensorParallel", 2, 2, "float32")
    kind.draw(100 + context.rank)
    checkpoint.save(folder, model, random_state=True)
    first = kind.draw()
    second = kind.draw()
    checkpoint.load(folder, model, random_state=True)
    return first, kind.draw(), second
