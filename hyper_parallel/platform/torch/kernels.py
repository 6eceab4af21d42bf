"""Row kernels of the experts for tensors on any torch device, with hand-written gradients.

Shape suffixes: R rows, E experts, D model size, H hidden size.
"""

import torch
from torch.nn.functional import silu

from hyper_parallel.platform.torch import host, row_arithmetic

__all__ = ["take_rows", "sum_copies", "scale_rows", "swiglu_experts", "swiglu", "CountInBackward"]


def row_groups(counts):
    """(expert, first row, row after the last) of every expert that has rows."""
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append((expert, start, start + count))
        start += count
    return tuple(groups)


def take_rows(x, index_R, inverse_R, copies=1):
    """``y[i] = x[index[i] // copies]``; see ``Platform.take_rows``."""
    return TakeRows.apply(x, index_R, inverse_R, copies)


def sum_copies(x, index_R, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``; see ``Platform.sum_copies``."""
    return SumCopies.apply(x, index_R, inverse_R, copies)


def scale_rows(x_RD, scores_R):
    """Rows times their scores; see ``Platform.scale_rows``."""
    return ScaleRows.apply(x_RD, scores_R)


def swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R=None):
    """``scores * w2(silu(w1 x) * (w3 x))`` for the rows of each expert; see ``Platform.swiglu_experts``."""
    groups = row_groups(host.to_host(num_tokens_per_expert_E)[0])
    return SwiGLUExperts.apply(x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, groups)


def swiglu(gate, up):
    """``silu(gate) * up``."""
    return SwiGLU.apply(gate, up)


class TakeRows(torch.autograd.Function):
    """``y[i] = x[index[i] // copies]``. The gradient is gathered by the inverse order: nothing is added at random."""

    @staticmethod
    def forward(ctx, x, index_R, inverse_R, copies):
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return _taken(x, index_R, copies)

    @staticmethod
    def backward(ctx, grad):
        (inverse_R,) = ctx.saved_tensors
        return row_arithmetic.sum_copies(grad, inverse_R, ctx.copies), None, None, None


class SumCopies(torch.autograd.Function):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``: what ``TakeRows`` does backward."""

    @staticmethod
    def forward(ctx, x, index_R, inverse_R, copies):
        ctx.save_for_backward(index_R)
        ctx.copies = copies
        return row_arithmetic.sum_copies(x, inverse_R, copies)

    @staticmethod
    def backward(ctx, grad):
        (index_R,) = ctx.saved_tensors
        return _taken(grad, index_R, ctx.copies), None, None, None


def _taken(x, index_R, copies):
    return x.index_select(0, index_R if copies == 1 else index_R // copies)


class ScaleRows(torch.autograd.Function):
    """Rows times their scores."""

    @staticmethod
    def forward(ctx, x_RD, scores_R):
        ctx.save_for_backward(x_RD, scores_R)
        return row_arithmetic.scale_rows(x_RD, scores_R)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RD):
        x_RD, scores_R = ctx.saved_tensors
        needs_x, needs_scores = ctx.needs_input_grad
        return (
            row_arithmetic.scale_rows(grad_RD, scores_R) if needs_x else None,
            row_arithmetic.row_products(grad_RD, x_RD, scores_R.dtype) if needs_scores else None,
        )


class SwiGLUExperts(torch.autograd.Function):
    """``scores * w2(silu(w1 x) * (w3 x))`` for rows grouped by expert, in one node of the graph.

    One expert at a time, so that what lies between the products stays in the processor's cache. Products are written
    into their place: slices of stacked weights under autograd would each get a gradient as large as all experts.
    Kept for backward: rows, gate and up. The hidden rows are formed again from these.
    """

    @staticmethod
    def forward(ctx, x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, groups):
        gate_RH, up_RH = (x_RD.new_empty(x_RD.shape[0], w1_EHD.shape[1]) for _ in range(2))
        y_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
        for expert, start, stop in groups:
            x, gate, up = x_RD[start:stop], gate_RH[start:stop], up_RH[start:stop]
            torch.mm(x, w1_EHD[expert].t(), out=gate)
            torch.mm(x, w3_EHD[expert].t(), out=up)
            hidden = _scaled(silu(gate).mul_(up), scores_R, start, stop)
            torch.mm(hidden, w2_EDH[expert].t(), out=y_RD[start:stop])
        ctx.save_for_backward(x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, gate_RH, up_RH)
        ctx.groups = groups
        return y_RD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RD):
        x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, gate_RH, up_RH = ctx.saved_tensors
        grads = [
            torch.empty_like(value, memory_format=torch.contiguous_format) if needed else None
            for value, needed in zip((x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R), ctx.needs_input_grad)
        ]
        grad_x_RD, grad_w1, grad_w2, grad_w3, grad_scores_R = grads
        _zero_experts_without_rows((grad_w1, grad_w2, grad_w3), ctx.groups, w1_EHD.shape[0])
        for expert, start, stop in ctx.groups:
            grad, x, gate, up = (rows[start:stop] for rows in (grad_RD, x_RD, gate_RH, up_RH))
            activated = silu(gate)
            hidden = activated * up
            grad_hidden = torch.mm(grad, w2_EDH[expert])
            if grad_scores_R is not None:
                grad_scores_R[start:stop] = row_arithmetic.row_products(hidden, grad_hidden, scores_R.dtype)
            if grad_w2 is not None:
                torch.mm(grad.t(), _scaled(hidden, scores_R, start, stop), out=grad_w2[expert])
            grad_hidden = _scaled(grad_hidden, scores_R, start, stop)
            grad_up = activated.mul_(grad_hidden)
            grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up), gate)
            if grad_w1 is not None:
                torch.mm(grad_gate.t(), x, out=grad_w1[expert])
            if grad_w3 is not None:
                torch.mm(grad_up.t(), x, out=grad_w3[expert])
            if grad_x_RD is not None:
                grad_x = grad_x_RD[start:stop]
                torch.mm(grad_gate, w1_EHD[expert], out=grad_x)
                grad_x.addmm_(grad_up, w3_EHD[expert])
        return *grads, None


def _scaled(rows, scores_R, start, stop):
    """Rows times their scores, in place: the caller owns the rows."""
    return rows if scores_R is None else row_arithmetic.scale_rows(rows, scores_R[start:stop], out=rows)


def _zero_experts_without_rows(grads_E, groups, num_experts):
    without = set(range(num_experts)) - {expert for expert, _, _ in groups}
    for grad_E in grads_E:
        for expert in without if grad_E is not None else ():
            grad_E[expert].zero_()


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * up``. Only the inputs are kept; the product is formed again backward."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate) if ctx.needs_input_grad[0] else None
        grad_up = silu(gate).mul_(grad) if ctx.needs_input_grad[1] else None
        return grad_gate, grad_up


class CountInBackward(torch.autograd.Function):
    """Identity whose backward adds counts to a counter in place."""

    @staticmethod
    def forward(ctx, x, counter_E, counts_E):
        ctx.counter_E, ctx.counts_E = counter_E, counts_E
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.counter_E.add_(ctx.counts_E)
        return grad, None, None
