"""Row kernels of the experts with hand-written gradients, and routing operators, on any device of MindSpore.

MindSpore's CPU operators return uninitialised memory for a product over no rows, and cannot differentiate a gather of
none; so experts and calls without rows never reach them. The CPU backend lacks many index operators; numpy has them,
and reads a CPU tensor in place.

Shape suffixes: R rows, E experts, D input features, N output features, H hidden size, T tokens, K experts per token.
"""

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

__all__ = [
    "TakeRows",
    "SumCopies",
    "GatherRows",
    "SumRows",
    "Pick",
    "LinearOfNoRows",
    "CountInBackward",
    "row_groups",
    "grouped_linear",
    "swiglu",
    "top_indices",
    "mark",
    "marked_positions",
    "sort_by_expert",
    "int_tensor",
    "copied",
    "host_values",
]

HOST_VALUES = "_hyper_parallel_host_values"

# With flags, products read a transposed factor in place; `matmul(a, b.T)` writes it down first.
PRODUCT = ops.MatMul()
PRODUCT_OF_TRANSPOSED = ops.MatMul(transpose_a=True)
PRODUCT_BY_TRANSPOSED = ops.MatMul(transpose_b=True)


def copied(x):
    """A copy of x, contiguous. ``Tensor.copy`` divides by one in float32, which takes twenty times as long."""
    return x * 1 if x.size else x


def int_tensor(values):
    """An int64 tensor that remembers its values: reading them on the host costs no copy from a device."""
    values = np.asarray(values, np.int64)
    tensor = Tensor(values)
    setattr(tensor, HOST_VALUES, values)
    return tensor


def host_values(tensor):
    """What :func:`int_tensor` remembers, or None."""
    return getattr(tensor, HOST_VALUES, None)


def row_groups(num_tokens_per_expert_E):
    """(first row, row after the last) of every expert, in order; the two agree for one without rows."""
    known = host_values(num_tokens_per_expert_E)
    counts = (num_tokens_per_expert_E.asnumpy() if known is None else known).tolist()
    ends = [sum(counts[: expert + 1]) for expert in range(len(counts))]
    return tuple((end - count, end) for count, end in zip(counts, ends))


def grouped_linear(x_RD, w_END, groups):
    """``y = x @ w[e].T`` for the rows of each expert e: [R, N]."""
    return GroupedLinear.apply(x_RD, w_END, groups)


def swiglu(gate, up, scores=None):
    """``silu(gate) * up``, times one score per row where given."""
    return SwiGLU.apply(gate, up, scores)


def _concatenate(pieces, shape, dtype):
    return mint.cat(pieces, 0) if pieces else mint.zeros(shape, dtype=dtype)


class TakeRows(_Function):
    """``y[i] = x[index[i] // copies]``. The gradient is gathered by the inverse order: nothing is added at random."""

    @staticmethod
    def forward(ctx, x, index_R, inverse_R, copies):
        ctx.inverse_R, ctx.copies = inverse_R, copies
        return _taken(x, index_R, copies)

    @staticmethod
    def backward(ctx, grad):
        return sum_copies(grad, ctx.inverse_R, ctx.copies), None, None, None


class SumCopies(_Function):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``: what ``TakeRows`` does backward."""

    @staticmethod
    def forward(ctx, x_RD, index_R, inverse_R, copies):
        ctx.index_R, ctx.copies = index_R, copies
        return sum_copies(x_RD, inverse_R, copies)

    @staticmethod
    def backward(ctx, grad_TD):
        return _taken(grad_TD, ctx.index_R, ctx.copies), None, None, None


def _taken(x, index_R, copies):
    return ops.gather(x, index_R if copies == 1 else index_R // copies, 0) if x.shape[0] else copied(x)


def sum_copies(x, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``; no gradient."""
    if x.shape[0] == 0:
        return copied(x)
    x = ops.gather(x, inverse_R, 0)
    return x if copies == 1 else x.reshape((x.shape[0] // copies, copies, *x.shape[1:])).sum(1)


class GroupedLinear(_Function):
    """``y = x @ w[e].T`` per expert."""

    @staticmethod
    def forward(ctx, x_RD, w_END, groups):
        ctx.save_for_backward(x_RD, w_END)
        ctx.groups = groups
        pieces = [PRODUCT_BY_TRANSPOSED(x_RD[a:b], w_END[e]) for e, (a, b) in enumerate(groups) if b > a]
        return _concatenate(pieces, (0, w_END.shape[1]), x_RD.dtype)

    @staticmethod
    def backward(ctx, grad_RN):
        x_RD, w_END = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            pieces = [PRODUCT(grad_RN[a:b], w_END[e]) for e, (a, b) in enumerate(ctx.groups) if b > a]
            grad_x = _concatenate(pieces, x_RD.shape, x_RD.dtype)
        if ctx.needs_input_grad[1]:
            shape = (1, *w_END.shape[1:])
            grad_w = mint.cat(
                [
                    PRODUCT_OF_TRANSPOSED(grad_RN[a:b], x_RD[a:b]).reshape(shape)
                    if b > a
                    else mint.zeros(shape, dtype=w_END.dtype)
                    for a, b in ctx.groups
                ],
                0,
            )
        return grad_x, grad_w, None


class SwiGLU(_Function):
    """``silu(gate) * up``, times one score per row. Only the inputs are kept; the product is formed again backward."""

    @staticmethod
    def forward(ctx, gate, up, scores):
        ctx.save_for_backward(gate, up)
        ctx.scores = scores
        hidden = gate * mint.sigmoid(gate) * up
        return hidden if scores is None else (hidden * scores.reshape((-1, 1))).astype(gate.dtype)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        scores = ctx.scores
        sigmoid = mint.sigmoid(gate)
        silu = gate * sigmoid
        grad_scores = None
        if scores is not None:
            grad_scores = (grad * (silu * up)).astype(scores.dtype).sum(1)
            grad = (grad * scores.reshape((-1, 1))).astype(gate.dtype)
        # d silu(g) / dg = sigmoid(g) * (1 + g - silu(g))
        return grad * up * sigmoid * (1 + gate - silu), grad * silu, grad_scores


class Pick(_Function):
    """``y[t, k] = x[t, index[t, k]]``; the indices of a row differ."""

    @staticmethod
    def forward(ctx, x_TE, index_TK):
        ctx.index_TK, ctx.num_columns = index_TK, x_TE.shape[1]
        return mint.gather(x_TE, 1, index_TK) if x_TE.shape[0] else mint.zeros(index_TK.shape, dtype=x_TE.dtype)

    @staticmethod
    def backward(ctx, grad_TK):
        zeros_TE = mint.zeros((grad_TK.shape[0], ctx.num_columns), dtype=grad_TK.dtype)
        return (mint.scatter(zeros_TE, 1, ctx.index_TK, grad_TK) if grad_TK.shape[0] else zeros_TE), None


class CountInBackward(_Function):
    """Identity whose backward adds counts to a counter in place."""

    @staticmethod
    def forward(ctx, x, counter_E, counts_E):
        ctx.counter_E, ctx.counts_E = counter_E, counts_E
        return copied(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.counter_E.set_data(ctx.counter_E + ctx.counts_E)
        return grad, None, None


def _gathered(x, index_R):
    if index_R.shape[0] == 0:
        return mint.zeros((0, *x.shape[1:]), dtype=x.dtype)
    return ops.gather(x, index_R, 0)


def _summed(x, index_R, num_rows):
    if 0 in (x.shape[0], num_rows):
        return mint.zeros((num_rows, *x.shape[1:]), dtype=x.dtype)
    return ops.unsorted_segment_sum(x, index_R, num_rows)


class GatherRows(_Function):
    """``y[i] = x[index[i]]``."""

    @staticmethod
    def forward(ctx, x, index_R):
        ctx.call = index_R, x.shape[0]
        return _gathered(x, index_R)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, *ctx.call), None


class SumRows(_Function):
    """``y[j]`` = sum of the rows i with ``index[i] = j``."""

    @staticmethod
    def forward(ctx, x, index_R, num_rows):
        ctx.index_R = index_R
        return _summed(x, index_R, num_rows)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.index_R), None, None


class LinearOfNoRows(_Function):
    """``x @ w.T`` for x without elements. Connected to both, so that a rank without tokens takes part in backward."""

    @staticmethod
    def forward(ctx, x, w_ND):
        ctx.shapes = x.shape, w_ND.shape
        return mint.zeros((*x.shape[:-1], w_ND.shape[0]), dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return tuple(mint.zeros(shape, dtype=grad.dtype) for shape in ctx.shapes)


def top_indices(x_TE, k):
    """int64 [T, k], columns of the k largest values of each row, largest first."""
    return Tensor(np.argsort(-x_TE.asnumpy(), axis=-1, kind="stable")[:, :k].astype(np.int64))


def mark(index_TK, size):
    """fp32 [T, size], 1.0 at the indices of each row."""
    marks_TE = np.zeros((index_TK.shape[0], size), np.float32)
    np.put_along_axis(marks_TE, index_TK.asnumpy(), 1.0, axis=1)
    return Tensor(marks_TE)


def marked_positions(marks, num_marked):
    """int64 [num_marked], where the flat ``marks`` are not 0."""
    return Tensor(np.flatnonzero(marks.asnumpy()).astype(np.int64))


def sort_by_expert(selected_TK, num_experts):
    """Stable order of the rows by expert, its inverse, and rows per expert; all int64."""
    experts_R = selected_TK.asnumpy().reshape(-1)
    order_R = np.argsort(experts_R, kind="stable")
    inverse_R = np.empty_like(order_R)
    inverse_R[order_R] = np.arange(len(order_R))
    counts_E = np.bincount(experts_R, minlength=num_experts)
    return tuple(Tensor(values.astype(np.int64)) for values in (order_R, inverse_R, counts_E))
