"""Rows: their order, their scores, and sums of them, on any torch device, with hand-written gradients.

Functions named for what comes out (``scaled_rows``) have no gradient, and read and write memory as seldom as they can:
on a CPU what lies between two steps is formed for one block of rows at a time, so that it stays in the processor's
cache; the 32-bit products of a whole 16-bit tensor would be written to memory and read again.

Shape suffixes: R rows, T rows before they are copied, N features of any kind, D model size.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

__all__ = [
    "BLOCK_ELEMENTS",
    "index_add",
    "index_select",
    "permute",
    "row_products",
    "scale_rows",
    "scaled_rows",
    "summed_copies",
    "unpermute",
]

# Elements of one tensor in a block: a few such blocks of float32 fit into a core's 2 MiB of cache.
BLOCK_ELEMENTS = 2**17


def permute(x, order_R, inverse_R, copies=1):
    """``y[i] = x[order[i] // copies]``; see ``Platform.permute``."""
    return Permute.apply(x, order_R, inverse_R, copies)


def unpermute(x, order_R, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``; see ``Platform.unpermute``."""
    return Unpermute.apply(x, order_R, inverse_R, copies)


def index_select(x, index_R):
    """``y[i] = x[index[i]]``; see ``Platform.index_select``."""
    return x.index_select(0, index_R)


def index_add(x, index_R, num_rows):
    """``y[j]`` = sum of the rows i of x with ``index[i] = j``; see ``Platform.index_add``."""
    return x.new_zeros(num_rows, *x.shape[1:]).index_add(0, index_R, x)


def scale_rows(x_RD, scores_R):
    """Rows times their scores; see ``Platform.scale_rows``."""
    return ScaleRows.apply(x_RD, scores_R)


class Permute(torch.autograd.Function):
    """``y[i] = x[order[i] // copies]``. The gradient is gathered by the inverse order: nothing is added at random."""

    @staticmethod
    def forward(ctx, x, order_R, inverse_R, copies):
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return _taken(x, order_R, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (inverse_R,) = ctx.saved_tensors
        return summed_copies(grad, inverse_R, ctx.copies), None, None, None


class Unpermute(torch.autograd.Function):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``: what ``Permute`` does backward."""

    @staticmethod
    def forward(ctx, x, order_R, inverse_R, copies):
        ctx.save_for_backward(order_R)
        ctx.copies = copies
        return summed_copies(x, inverse_R, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (order_R,) = ctx.saved_tensors
        return _taken(grad, order_R, ctx.copies), None, None, None


def _taken(x, order_R, copies):
    if copies > 1:
        # Ascend devices divide int64 on their AICPU; no device minds 32 bits.
        order_R = (order_R if order_R.is_cpu else order_R.to(torch.int32)) // copies
    return x.index_select(0, order_R)


class ScaleRows(torch.autograd.Function):
    """Rows times their scores."""

    @staticmethod
    def forward(ctx, x_RD, scores_R):
        ctx.save_for_backward(x_RD, scores_R)
        return scaled_rows(x_RD, scores_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):
        x_RD, scores_R = ctx.saved_tensors
        needs_x, needs_scores = ctx.needs_input_grad
        return (
            scaled_rows(grad_RD, scores_R) if needs_x else None,
            row_products(grad_RD, x_RD, scores_R.dtype) if needs_scores else None,
        )


def scaled_rows(rows_RN, scores_R, out=None):
    """Rows times their scores, formed in the wider dtype, in the dtype of the rows. ``out`` may be the rows."""
    out = torch.empty_like(rows_RN, memory_format=torch.contiguous_format) if out is None else out
    for rows, scores, scaled in _blocks(rows_RN, scores_R.unsqueeze(1), out):
        if rows.is_cpu or rows.dtype == scores.dtype:
            torch.mul(rows, scores, out=scaled)
        else:  # not every device casts into ``out``
            scaled.copy_(rows * scores)
    return out


def row_products(a_RN, b_RN, dtype):
    """The inner product of each row of a with the same row of b, formed in the wider dtype, as ``dtype`` [R]."""
    products_R = torch.empty(a_RN.shape[0], dtype=dtype, device=a_RN.device)
    wider = torch.promote_types(a_RN.dtype, dtype)
    for a, b, products in _blocks(a_RN, b_RN, products_R):
        torch.sum(a.to(wider) * b, 1, dtype=dtype, out=products)
    return products_R


def summed_copies(x_RN, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``: [T, ...]."""
    if copies == 1:
        return x_RN.index_select(0, inverse_R)
    num_rows = x_RN.shape[0] // copies
    if x_RN.is_cpu and x_RN.dim() == 2 and num_rows:
        # It gathers and adds in one pass, and adds 16-bit rows in float32.
        return F.embedding_bag(inverse_R.view(num_rows, copies), x_RN.contiguous(), mode="sum")
    return x_RN.index_select(0, inverse_R).reshape(num_rows, copies, *x_RN.shape[1:]).sum(1)


def _blocks(first_RN, *others):
    """The tensors cut alike along their rows; not cut on devices, where each step is a kernel to launch."""
    size = max(1, BLOCK_ELEMENTS // max(1, first_RN.shape[1])) if first_RN.is_cpu else max(1, first_RN.shape[0])
    return zip(*(tensor.split(size) for tensor in (first_RN, *others)))
