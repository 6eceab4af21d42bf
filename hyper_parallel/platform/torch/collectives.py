"""Collectives over a torch process group, each with its gradient.

Every tensor is made contiguous before a backend sees it: gradients of ``sum()`` have stride 0, slices have gaps.
"""

import atexit
import functools
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hyper_parallel.platform.operation import operation
from hyper_parallel.platform.torch import compat, host

__all__ = [
    "let_gloo_finish_before_exit",
    "CountsExchange",
    "all_gather_vector",
    "all_reduce",
    "named",
    "AllToAllRows",
    "CopyToGroup",
    "ReduceFromGroup",
    "SplitOverGroup",
    "GatherFromGroup",
    "GatherTokens",
    "ScatterTokens",
    "ops_to_save",
]

ops_to_save = [compat.ALL_TO_ALL]
"""Operators for the policy of torch's selective checkpointing: with their results kept, recomputation sends no tokens
again."""


# Long against the time that a thread waits for a crowded core.
SECONDS_FOR_GLOO = 0.2


@functools.cache
def let_gloo_finish_before_exit():
    """Have the program pause before Python shuts down; however often this is called, once.

    Gloo's threads outlive ``destroy_process_group`` where DTensor's caches keep the group. One that lets go of the last
    message only while Python shuts down aborts the rank ("terminate called without an active exception", pytorch
    #190489), and the launcher then ends the others.
    """
    atexit.register(time.sleep, SECONDS_FOR_GLOO)


@contextmanager
def named(name, group):
    """A block whose errors begin with what the collective is for."""
    with compat.profiled(name), operation(name, dist.get_process_group_ranks(group), dist.get_rank()):
        yield


class CountsExchange:
    """An all-to-all of equal chunks that runs while the host goes on; see ``Platform.start_counts_exchange``."""

    def __init__(self, counts, group, name, also):
        self._group, self._name, self._also = group, name, tuple(also)
        num_ranks = dist.get_world_size(group)
        splits = [len(counts) // num_ranks] * num_ranks
        with named(name, group):
            self._received = compat.all_to_all_single(counts.to(torch.int64).contiguous(), splits, splits, group)

    def wait(self):
        """What arrived, complete: HCCL and NCCL give the host no order of their own."""
        with named(self._name, self._group):
            return compat.wait_tensor(self._received)

    def to_host(self):
        """Values of each of ``also``, and of what arrived."""
        return host.to_host(*self._also, self.wait())


def all_gather_vector(vector, group, name):
    """[P, len(vector)]: the vectors of all ranks of the group.

    A sum of rows that are zero elsewhere: the one collective that every backend takes as it is.
    """
    gathered = vector.new_zeros(dist.get_world_size(group), len(vector))
    gathered[dist.get_rank(group)] = vector
    return all_reduce(gathered, group, name)


def _all_to_all(x, send_splits, recv_splits, group, name):
    with named(name, group):
        return compat.wait_tensor(compat.all_to_all_single(x.contiguous(), recv_splits, send_splits, group))


def all_reduce(x, group, name, dtype=None):
    """x summed over the group, as a new tensor, with terms of the given dtype; no gradient."""
    summed = x.to(dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
    with named(name, group):
        dist.all_reduce(summed, group=group)
    return summed.to(x.dtype)


class AllToAllRows(torch.autograd.Function):
    """Forward: rows to the ranks they are meant for. Backward: their gradients back, with the splits swapped."""

    @staticmethod
    def forward(ctx, x, send_splits, recv_splits, group, name):
        ctx.swapped = functools.partial(
            _all_to_all, send_splits=recv_splits, recv_splits=send_splits, group=group, name=f"{name} (backward)"
        )
        return _all_to_all(x, send_splits, recv_splits, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.swapped(grad), None, None, None, None


class CopyToGroup(torch.autograd.Function):
    """Forward: identity. Backward: sum over the group."""

    @staticmethod
    def forward(ctx, x, group, name, dtype):
        ctx.call = group, f"{name} (backward)", dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce(grad, *ctx.call), None, None, None


class ReduceFromGroup(torch.autograd.Function):
    """Forward: sum over the group. Backward: identity."""

    @staticmethod
    def forward(ctx, x, group, name, dtype):
        return all_reduce(x, group, name, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None, None, None


def _share(x, splits, group):
    rank = dist.get_rank(group)
    return x[sum(splits[:rank]) : sum(splits[: rank + 1])].clone()


def _gather(x, splits, group, name):
    # An all-to-all of equal content: gloo has no all-gather of different sizes.
    size = dist.get_world_size(group)
    return _all_to_all(x.repeat(size, *[1] * (x.ndim - 1)), (x.shape[0],) * size, splits, group, name)


class SplitOverGroup(torch.autograd.Function):
    """Forward: this rank's share of the rows. Backward: all shares, gathered."""

    @staticmethod
    def forward(ctx, x, splits, group, name):
        ctx.call = splits, group, f"{name} (backward)"
        return _share(x, splits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gather(grad, *ctx.call), None, None, None


class GatherFromGroup(torch.autograd.Function):
    """Forward: all shares, gathered. Backward: this rank's share."""

    @staticmethod
    def forward(ctx, x, splits, group, name):
        ctx.call = splits, group
        return _gather(x, splits, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _share(grad, *ctx.call), None, None, None


def _all_gather(x, splits, group, name):
    if min(splits) < max(splits):
        return _gather(x, splits, group, name)
    with named(name, group):
        return compat.wait_tensor(compat.all_gather_into_tensor(x.contiguous(), group))


def _reduce_scatter(x, splits, group, name, dtype):
    terms = x.to(dtype or x.dtype).contiguous()
    if min(splits) == max(splits):
        with named(name, group):
            return compat.wait_tensor(compat.reduce_scatter_tensor(terms, group)).to(x.dtype)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = _all_to_all(terms, splits, (splits[rank],) * size, group, name)
    return parts.view(size, splits[rank], *x.shape[1:]).sum(0).to(x.dtype)


class GatherTokens(torch.autograd.Function):
    """Forward: all shares, gathered, twice. Backward: this rank's share of what is complete, and its share of the sum
    of the terms."""

    @staticmethod
    def forward(ctx, x, splits, group, name, dtype):
        ctx.call = splits, group, f"{name} (backward)", dtype
        ctx.set_materialize_grads(False)
        gathered = _all_gather(x, splits, group, name)
        return gathered, gathered.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, complete, terms):
        splits, group, *_ = ctx.call
        # Every rank comes by here with the same of the two: what the layer does with them is the same everywhere.
        found = [] if complete is None else [_share(complete, splits, group)]
        found += [] if terms is None else [_reduce_scatter(terms, *ctx.call)]
        return sum(found[1:], start=found[0]) if found else None, None, None, None, None


class ScatterTokens(torch.autograd.Function):
    """Forward: this rank's share of the sum of the terms, and of what is complete. Backward: all shares, gathered."""

    @staticmethod
    def forward(ctx, terms, complete, splits, group, name, dtype):
        ctx.call = splits, group, f"{name} (backward)"
        ctx.has_complete = complete is not None
        share = _reduce_scatter(terms, splits, group, name, dtype)
        return share + _share(complete, splits, group) if ctx.has_complete else share

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gathered = _all_gather(grad, *ctx.call)
        return gathered, gathered if ctx.has_complete else None, None, None, None, None
