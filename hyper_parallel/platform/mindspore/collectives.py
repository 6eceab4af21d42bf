"""Differentiable collectives. MindSpore's own are silently not: their gradients are zero or those of the identity."""

from mindspore.common._grad_function import _Function

from hyper_parallel.platform.mindspore import cpu_collectives as backend

__all__ = ["AllToAllRows", "CopyToGroup", "ReduceFromGroup"]


class AllToAllRows(_Function):
    """Forward: rows to the ranks they are meant for. Backward: their gradients back, with the splits swapped."""

    @staticmethod
    def forward(ctx, x, send_splits, recv_splits, group, name):
        ctx.call = send_splits, recv_splits, group, name
        return backend.all_to_all(x, send_splits, recv_splits, group, name)

    @staticmethod
    def backward(ctx, grad):
        send_splits, recv_splits, group, name = ctx.call
        return backend.all_to_all(grad, recv_splits, send_splits, group, f"{name} (backward)"), None, None, None, None


class CopyToGroup(_Function):
    """Forward: identity. Backward: sum over the group."""

    @staticmethod
    def forward(ctx, x, group, name):
        ctx.call = group, f"{name} (backward)"
        return x.copy()

    @staticmethod
    def backward(ctx, grad):
        return backend.all_reduce(grad, *ctx.call), None, None


class ReduceFromGroup(_Function):
    """Forward: sum over the group. Backward: identity."""

    @staticmethod
    def forward(ctx, x, group, name):
        return backend.all_reduce(x, group, name)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None
