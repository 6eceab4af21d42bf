"""Experts on rows sorted by expert, on any torch device, with hand-written gradients.

Shape suffixes: R rows, E experts, D model size, H hidden size; K, M, N features of any kind.
"""

import torch
from torch.nn.functional import silu

from hyper_parallel.core.expert_parallel.experts import row_groups
from hyper_parallel.platform.torch import host, rows

__all__ = ["grouped_linear", "swiglu", "swiglu_experts"]


def swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R=None):
    """``scores * w2(silu(w1 x) * (w3 x))`` for the rows of each expert; see ``Platform.swiglu_experts``."""
    groups = row_groups(host.to_host(num_tokens_per_expert_E)[0])
    return SwiGLUExperts.apply(x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, groups)


def grouped_linear(x_RK, w_ENK, num_tokens_per_expert_E):
    """``y = x @ w[e].T`` for the rows of each expert e; see ``Platform.grouped_linear``."""
    return GroupedLinear.apply(x_RK, w_ENK, row_groups(host.to_host(num_tokens_per_expert_E)[0]))


def swiglu(gate, up):
    """``silu(gate) * up``."""
    return SwiGLU.apply(gate, up)


class SwiGLUExperts(torch.autograd.Function):
    """``scores * w2(silu(w1 x) * (w3 x))`` for rows grouped by expert, in one node of the graph.

    One large expert or several small ones at a time, so that what lies between the products stays in the processor's
    cache, and small experts share the steps that need no weights. Products are written into their place: slices of
    stacked weights under autograd would each get a gradient as large as all experts.
    Kept for backward: rows, gate and up. The hidden rows are formed again from these.
    """

    @staticmethod
    def forward(ctx, x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, groups):
        gate_RH, up_RH = (x_RD.new_empty(x_RD.shape[0], w1_EHD.shape[1]) for _ in range(2))
        y_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
        w1_EDH, w2_EHD, w3_EDH = (weight.mT for weight in (w1_EHD, w2_EDH, w3_EHD))
        for batch, local in _batches(groups, gate_RH.shape[1]):
            x, gate, up = x_RD[batch], gate_RH[batch], up_RH[batch]
            _multiply(x, w1_EDH, gate, local)
            _multiply(x, w3_EDH, up, local)
            hidden = _scaled(silu(gate).mul_(up), scores_R, batch)
            _multiply(hidden, w2_EHD, y_RD[batch], local)
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
        for batch, local in _batches(ctx.groups, gate_RH.shape[1]):
            grad, x, gate, up = grad_RD[batch], x_RD[batch], gate_RH[batch], up_RH[batch]
            activated = silu(gate)
            hidden = activated * up
            grad_hidden = torch.empty_like(gate)
            _multiply(grad, w2_EDH, grad_hidden, local)
            if grad_scores_R is not None:
                grad_scores_R[batch] = rows.row_products(hidden, grad_hidden, scores_R.dtype)
            if grad_w2 is not None:
                _multiply_transposed(grad, _scaled(hidden, scores_R, batch), grad_w2, local)
            grad_hidden = _scaled(grad_hidden, scores_R, batch)
            grad_up = activated.mul_(grad_hidden)
            grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up), gate)
            if grad_w1 is not None:
                _multiply_transposed(grad_gate, x, grad_w1, local)
            if grad_w3 is not None:
                _multiply_transposed(grad_up, x, grad_w3, local)
            if grad_x_RD is not None:
                _multiply(grad_gate, w1_EHD, grad_x_RD[batch], local)
                _multiply(grad_up, w3_EHD, grad_x_RD[batch], local, add=True)
        return *grads, None


class GroupedLinear(torch.autograd.Function):
    """``y = x @ w[e].T`` for rows grouped by expert. The rows are kept only where the weight learns."""

    @staticmethod
    def forward(ctx, x_RK, w_ENK, groups):
        ctx.save_for_backward(x_RK if ctx.needs_input_grad[1] else None, w_ENK)
        ctx.groups = groups
        y_RN = x_RK.new_empty(x_RK.shape[0], w_ENK.shape[1])
        _multiply(x_RK, w_ENK.mT, y_RN, groups)
        return y_RN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RN):
        x_RK, w_ENK = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_RN.new_empty(grad_RN.shape[0], w_ENK.shape[2])
            _multiply(grad_RN, w_ENK, grad_x, ctx.groups)
        if ctx.needs_input_grad[1]:
            grad_w = torch.empty_like(w_ENK, memory_format=torch.contiguous_format)
            _zero_experts_without_rows([grad_w], ctx.groups, w_ENK.shape[0])
            _multiply_transposed(grad_RN, x_RK, grad_w, ctx.groups)
        return grad_x, grad_w, None


def _batches(groups, width):
    """Consecutive experts whose rows fill a block together: (their rows, their groups counted from the first row)."""
    batch = []
    for group in groups:
        batch.append(group)
        first, end = batch[0][1], group[2]
        if (end - first) * width >= rows.BLOCK_ELEMENTS or group is groups[-1]:
            yield slice(first, end), [(expert, start - first, stop - first) for expert, start, stop in batch]
            batch = []


def _multiply(x_RK, w_EKN, out_RN, groups, add=False):
    """``out = x @ w[e]``, or with ``add`` the old value and that, for the rows of each expert e."""
    for expert, start, stop in groups:
        if add:
            out_RN[start:stop].addmm_(x_RK[start:stop], w_EKN[expert])
        else:
            torch.mm(x_RK[start:stop], w_EKN[expert], out=out_RN[start:stop])


def _multiply_transposed(a_RM, b_RN, out_EMN, groups):
    """``out[e] = a.T @ b`` over the rows of each expert e."""
    for expert, start, stop in groups:
        torch.mm(a_RM[start:stop].t(), b_RN[start:stop], out=out_EMN[expert])


def _scaled(rows_RN, scores_R, batch):
    """The rows of a batch times their scores, in place: the caller owns them."""
    return rows_RN if scores_R is None else rows.scaled_rows(rows_RN, scores_R[batch], out=rows_RN)


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
