"""Row kernels of the experts for tensors on any torch device, with hand-written gradients.

Shape suffixes: R rows, E experts, D input features, N output features, H hidden size.
"""

import torch

__all__ = ["TakeRows", "GroupedLinear", "SwiGLU", "row_groups"]


def row_groups(counts):
    """(expert, first row, row after the last) of every expert that has rows."""
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append((expert, start, start + count))
        start += count
    return tuple(groups)


class TakeRows(torch.autograd.Function):
    """``y[i] = x[index[i] // copies]``. The gradient is gathered by the inverse order: nothing is added at random."""

    @staticmethod
    def forward(ctx, x, index_R, inverse_R, copies):
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return x.index_select(0, index_R if copies == 1 else index_R // copies)

    @staticmethod
    def backward(ctx, grad):
        (inverse_R,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse_R)
        if ctx.copies > 1:
            grad = grad.reshape(grad.shape[0] // ctx.copies, ctx.copies, *grad.shape[1:]).sum(1)
        return grad, None, None, None


class GroupedLinear(torch.autograd.Function):
    """``y = x @ w[e].T`` per expert. Products are written into their place: no slices under autograd, whose gradients
    would each be as large as all experts together."""

    @staticmethod
    def forward(ctx, x_RD, w_END, groups):
        ctx.save_for_backward(x_RD, w_END)
        ctx.groups = groups
        y_RN = x_RD.new_empty(x_RD.shape[0], w_END.shape[1])
        for expert, start, stop in groups:
            torch.mm(x_RD[start:stop], w_END[expert].t(), out=y_RN[start:stop])
        return y_RN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RN):
        x_RD, w_END = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
            for expert, start, stop in ctx.groups:
                torch.mm(grad_RN[start:stop], w_END[expert], out=grad_x[start:stop])
        if ctx.needs_input_grad[1]:
            grad_w = torch.empty_like(w_END, memory_format=torch.contiguous_format)
            with_rows = {expert for expert, _, _ in ctx.groups}
            for expert in range(w_END.shape[0]):
                if expert not in with_rows:
                    grad_w[expert].zero_()
            for expert, start, stop in ctx.groups:
                torch.mm(grad_RN[start:stop].t(), x_RD[start:stop], out=grad_w[expert])
        return grad_x, grad_w, None


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * up``, times one score per row. Only the inputs are kept; the product is formed again backward."""

    @staticmethod
    def forward(ctx, gate, up, scores):
        ctx.save_for_backward(gate, up, scores)
        hidden = torch.nn.functional.silu(gate).mul_(up)
        return hidden if scores is None else (hidden * scores.unsqueeze(1)).to(gate.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate, up, scores = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_scores = None
        if scores is not None:
            if ctx.needs_input_grad[2]:
                grad_scores = (grad * (silu * up)).sum(1, dtype=scores.dtype)
            grad = (grad * scores.unsqueeze(1)).to(gate.dtype)
        # d silu(g) / dg = sigmoid(g) * (1 + g - silu(g))
        grad_gate = grad * up * sigmoid * (1 + gate - silu) if ctx.needs_input_grad[0] else None
        grad_up = grad * silu if ctx.needs_input_grad[1] else None
        return grad_gate, grad_up, grad_scores
