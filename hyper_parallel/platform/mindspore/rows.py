"""Rows: their order, their scores, and sums of them, on any device of MindSpore, with hand-written gradients.

MindSpore's CPU operators cannot differentiate a gather of no rows, so calls without rows never reach them.

Shape suffixes: R rows, T rows before they are copied, D model size.
"""

from mindspore import mint, ops

from hyper_parallel.platform.mindspore.compat import Function

__all__ = ["copied", "index_add", "index_select", "permute", "scale_rows", "summed_copies", "unpermute"]


def copied(x):
    """A copy of x, contiguous. ``Tensor.copy`` divides by one in float32, which takes twenty times as long."""
    return x * 1 if x.size else x


def permute(x, order_R, inverse_R, copies=1):
    """``y[i] = x[order[i] // copies]``; see ``Platform.permute``."""
    return Permute.apply(x, order_R, inverse_R, copies)


def unpermute(x_RD, order_R, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``; see ``Platform.unpermute``."""
    return Unpermute.apply(x_RD, order_R, inverse_R, copies)


def index_select(x, index_R):
    """``y[i] = x[index[i]]``; see ``Platform.index_select``."""
    return IndexSelect.apply(x, index_R)


def index_add(x, index_R, num_rows):
    """``y[j]`` = sum of the rows i of x with ``index[i] = j``; see ``Platform.index_add``."""
    return IndexAdd.apply(x, index_R, num_rows)


def scale_rows(x_RD, scores_R):
    """Rows times their scores; see ``Platform.scale_rows``."""
    return (x_RD * scores_R.reshape((scores_R.shape[0], 1))).astype(x_RD.dtype)


class Permute(Function):
    """``y[i] = x[order[i] // copies]``. The gradient is gathered by the inverse order: nothing is added at random."""

    @staticmethod
    def forward(ctx, x, order_R, inverse_R, copies):
        ctx.inverse_R, ctx.copies = inverse_R, copies
        return _taken(x, order_R, copies)

    @staticmethod
    def backward(ctx, grad):
        return summed_copies(grad, ctx.inverse_R, ctx.copies), None, None, None


class Unpermute(Function):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``: what ``Permute`` does backward."""

    @staticmethod
    def forward(ctx, x_RD, order_R, inverse_R, copies):
        ctx.order_R, ctx.copies = order_R, copies
        return summed_copies(x_RD, inverse_R, copies)

    @staticmethod
    def backward(ctx, grad_TD):
        return _taken(grad_TD, ctx.order_R, ctx.copies), None, None, None


def _taken(x, order_R, copies):
    return ops.gather(x, order_R if copies == 1 else order_R // copies, 0) if x.shape[0] else copied(x)


def summed_copies(x, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``; no gradient."""
    if x.shape[0] == 0:
        return copied(x)
    x = ops.gather(x, inverse_R, 0)
    return x if copies == 1 else x.reshape((x.shape[0] // copies, copies, *x.shape[1:])).sum(1)


def _gathered(x, index_R):
    if index_R.shape[0] == 0:
        return mint.zeros((0, *x.shape[1:]), dtype=x.dtype)
    return ops.gather(x, index_R, 0)


def _summed(x, index_R, num_rows):
    if 0 in (x.shape[0], num_rows):
        return mint.zeros((num_rows, *x.shape[1:]), dtype=x.dtype)
    return ops.unsorted_segment_sum(x, index_R, num_rows)


class IndexSelect(Function):
    """``y[i] = x[index[i]]``."""

    @staticmethod
    def forward(ctx, x, index_R):
        ctx.call = index_R, x.shape[0]
        return _gathered(x, index_R)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, *ctx.call), None


class IndexAdd(Function):
    """``y[j]`` = sum of the rows i with ``index[i] = j``."""

    @staticmethod
    def forward(ctx, x, index_R, num_rows):
        ctx.index_R = index_R
        return _summed(x, index_R, num_rows)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.index_R), None, None
