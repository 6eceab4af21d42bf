"""Differentiable collectives. MindSpore's own are silently not: their gradients are zero or those of the identity."""

import mindspore as ms
import mindspore.communication as comm
from mindspore import mint

from hyper_parallel.platform.mindspore import device, host
from hyper_parallel.platform.mindspore.compat import Function
from hyper_parallel.platform.mindspore.rows import copied

__all__ = [
    "AllToAllRows",
    "CopyToGroup",
    "CountsExchange",
    "ReduceFromGroup",
    "SplitOverGroup",
    "GatherFromGroup",
    "GatherTokens",
    "ScatterTokens",
]


class CountsExchange:
    """An all-to-all of equal chunks that runs while the host goes on; see ``Platform.start_counts_exchange``."""

    def __init__(self, counts, group, name, also):
        size = comm.get_group_size(group)
        splits = (counts.shape[0] // size,) * size
        self._also = also
        self._running = device.collectives().AllToAll(counts.astype(ms.int64), splits, splits, group, name)

    def wait(self):
        """What arrived, complete."""
        return self._running.wait()

    def to_host(self):
        """Values of each of ``also``, and of what arrived."""
        return host.to_host(*self._also, self.wait())


class AllToAllRows(Function):
    """Forward: rows to the ranks they are meant for. Backward: their gradients back, with the splits swapped."""

    @staticmethod
    def forward(ctx, x, send_splits, recv_splits, group, name):
        ctx.call = send_splits, recv_splits, group, name
        return device.collectives().all_to_all(x, send_splits, recv_splits, group, name)

    @staticmethod
    def backward(ctx, grad):
        send_splits, recv_splits, group, name = ctx.call
        grad = device.collectives().all_to_all(grad, recv_splits, send_splits, group, f"{name} (backward)")
        return grad, None, None, None, None


def _all_reduce(x, group, name, dtype):
    if dtype is None:
        return device.collectives().all_reduce(x, group, name)
    return device.collectives().all_reduce(x.astype(dtype), group, name).astype(x.dtype)


class CopyToGroup(Function):
    """Forward: identity. Backward: sum over the group."""

    @staticmethod
    def forward(ctx, x, group, name, dtype):
        ctx.call = group, f"{name} (backward)", dtype
        return copied(x)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad, *ctx.call), None, None, None


class ReduceFromGroup(Function):
    """Forward: sum over the group. Backward: identity."""

    @staticmethod
    def forward(ctx, x, group, name, dtype):
        return _all_reduce(x, group, name, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


def _share(x, splits, group):
    rank = comm.get_rank(group)
    return copied(x[sum(splits[:rank]) : sum(splits[: rank + 1])])


def _gather(x, splits, group, name):
    size = comm.get_group_size(group)
    return device.collectives().all_to_all(mint.cat([x] * size, 0), (x.shape[0],) * size, splits, group, name)


class SplitOverGroup(Function):
    """Forward: this rank's share of the rows. Backward: all shares, gathered."""

    @staticmethod
    def forward(ctx, x, splits, group, name):
        ctx.call = splits, group, f"{name} (backward)"
        return _share(x, splits, group)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, *ctx.call), None, None, None


class GatherFromGroup(Function):
    """Forward: all shares, gathered. Backward: this rank's share."""

    @staticmethod
    def forward(ctx, x, splits, group, name):
        ctx.call = splits, group
        return _gather(x, splits, group, name)

    @staticmethod
    def backward(ctx, grad):
        return _share(grad, *ctx.call), None, None, None


def _all_gather(x, splits, group, name):
    if min(splits) < max(splits):
        return _gather(x, splits, group, name)
    return mint.cat(device.collectives().all_gather(x, group, name), 0) if splits[0] else copied(x)


def _reduce_scatter(x, splits, group, name, dtype):
    terms, size = x if dtype is None else x.astype(dtype), splits[comm.get_rank(group)]
    if max(splits) == 0:
        return copied(x)
    if min(splits) == max(splits):
        return device.collectives().reduce_scatter(terms, group, name).astype(x.dtype)
    num_ranks = len(splits)
    parts = device.collectives().all_to_all(terms, splits, (size,) * num_ranks, group, name)
    return parts.reshape((num_ranks, size, *x.shape[1:])).sum(0).astype(x.dtype) if size else parts.astype(x.dtype)


class GatherTokens(Function):
    """Forward: all shares, gathered, twice. Backward: this rank's share of what is complete, and its share of the sum
    of the terms."""

    @staticmethod
    def forward(ctx, x, splits, group, name, dtype):
        ctx.call = splits, group, f"{name} (backward)", dtype
        gathered = _all_gather(x, splits, group, name)
        return gathered, copied(gathered)

    @staticmethod
    def backward(ctx, complete, terms):
        splits, group, *_ = ctx.call
        return _share(complete, splits, group) + _reduce_scatter(terms, *ctx.call), None, None, None, None


class ScatterTokens(Function):
    """Forward: this rank's share of the sum of the terms, and of what is complete. Backward: all shares, gathered."""

    @staticmethod
    def forward(ctx, terms, complete, splits, group, name, dtype):
        ctx.call = splits, group, f"{name} (backward)"
        ctx.has_complete = complete is not None
        share = _reduce_scatter(terms, splits, group, name, dtype)
        return share + _share(complete, splits, group) if ctx.has_complete else share

    @staticmethod
    def backward(ctx, grad):
        gathered = _all_gather(grad, *ctx.call)
        return gathered, gathered if ctx.has_complete else None, None, None, None, None
