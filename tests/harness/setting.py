"""What the cases share: meshes of any size inside the running ranks, experts with a problem's weights, and sabotage."""

from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.exchange import rows
from hyper_parallel.platform import get_platform

HIDDEN_DIM = {"w1": 1, "w2": 2, "w3": 1}


def whole_mesh(platform, world_size, ep, tp, device_type="cpu"):
    """All ranks as (dp, ep, tp): a mesh smaller than the world is a slice, with replicas along dp."""
    return _whole_mesh(platform, device_type, (world_size // (ep * tp), ep, tp))


@cache
def _whole_mesh(platform, device_type, shape):
    hp.set_platform(platform)
    return hp.init_device_mesh(device_type, shape, mesh_dim_names=("dp", "ep", "tp"))


def mesh_for(context, style, ep, tp):
    """The mesh that a style wants, ep x tp ranks large."""
    return _mesh_of(context, ep, tp)[style.mesh_dim_names]


def coordinates(context, ep, tp):
    """(ep, tp) of this rank."""
    mesh = _mesh_of(context, ep, tp)
    return mesh.get_local_rank("ep"), mesh.get_local_rank("tp")


def _mesh_of(context, ep, tp):
    return whole_mesh(context.platform, context.world_size, ep, tp, context.framework.device_type)


def make_experts(context, problem, dtype=None):
    """GroupedExperts with the problem's weights, in the adapter's float type."""
    hp.set_platform(context.platform)
    num_experts, hidden_dim, dim = problem.w1.shape
    experts = hp.GroupedExperts(dim, hidden_dim, num_experts)
    fill(context, experts, problem)
    return to_dtype(context, experts, dtype or context.framework.dtype)


def fill(context, experts, problem):
    for name in ("w1", "w2", "w3"):
        context.framework.set_parameter(experts, name, getattr(problem, name))


def to_dtype(context, module, dtype):
    if context.platform == "torch":
        import torch

        module.to(context.framework.device_type, getattr(torch, dtype))
    elif dtype != "float32":
        for parameter in module.trainable_params():
            parameter.set_dtype(context.framework.dtype_object(dtype))
    # Weights filled in float32 are exact: every number of a problem is a float32 number.
    return module


def local_part(array, name, ep, tp, ep_rank, tp_rank):
    """The part of a whole weight, or of its gradient, that belongs on the rank."""
    array = np.split(array, ep, axis=0)[ep_rank]
    return np.split(array, tp, axis=HIDDEN_DIM[name])[tp_rank]


@contextmanager
def sabotage(context, *kinds):
    """Break the library in a known way, to show that a test would see it."""
    platform = get_platform_class(context.platform)
    breaks = {
        "drop_tp_sum": lambda: mock.patch.object(platform, "reduce_from_group", lambda self, x, *_: x),
        "drop_gradient_sum": lambda: mock.patch.object(platform, "copy_to_group", lambda self, x, *_: x),
        "keep_rank_major": lambda: mock.patch.object(rows, "expert_major_order", _rank_major),
        "swap_splits": lambda: mock.patch.object(platform, "all_to_all_rows", _swapped(platform.all_to_all_rows)),
    }
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(breaks[kind]())
        yield


def get_platform_class(name):
    hp.set_platform(name)
    return type(get_platform())


def _rank_major(recv_counts_PL):
    return np.arange(np.sum(recv_counts_PL))


def _swapped(all_to_all_rows):
    return lambda self, x, send, recv, group, name: all_to_all_rows(self, x, recv, send, group, name)
