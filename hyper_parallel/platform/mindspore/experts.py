"""Experts on rows sorted by expert, on any device of MindSpore, with hand-written gradients.

MindSpore's CPU operators return uninitialised memory for a product over no rows, so experts and calls without rows
never reach them.

Shape suffixes: R rows, E experts, D input features, N output features, H hidden size.
"""

from mindspore import mint, ops

from hyper_parallel.core.expert_parallel.experts import row_groups
from hyper_parallel.platform.mindspore import host
from hyper_parallel.platform.mindspore.compat import Function

__all__ = ["LinearOfNoRows", "experts_from_products", "grouped_linear", "swiglu", "swiglu_experts"]

# With flags, products read a transposed factor in place; `matmul(a, b.T)` writes it down first.
PRODUCT = ops.MatMul()
PRODUCT_OF_TRANSPOSED = ops.MatMul(transpose_a=True)
PRODUCT_BY_TRANSPOSED = ops.MatMul(transpose_b=True)


def swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
    """``scores * w2(silu(w1 x) * (w3 x))`` for the rows of each expert; see ``Platform.swiglu_experts``."""
    inputs = x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R
    return experts_from_products(grouped_linear, swiglu, *inputs)


def experts_from_products(grouped_linear, swiglu, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
    """SwiGLU experts from a device's products of rows and weights, and its product of gate and up."""
    groups = row_groups(host.to_host(num_tokens_per_expert_E)[0])
    gate_RH = grouped_linear(x_RD, w1_EHD, groups)
    up_RH = grouped_linear(x_RD, w3_EHD, groups)
    return grouped_linear(swiglu(gate_RH, up_RH, scores_R), w2_EDH, groups)


def grouped_linear(x_RD, w_END, groups):
    """``y = x @ w[e].T`` for the rows of each expert e, the ``groups`` of ``row_groups``: [R, N]."""
    return GroupedLinear.apply(x_RD, w_END, groups)


def swiglu(gate, up, scores=None):
    """``silu(gate) * up``, times one score per row where given."""
    return SwiGLU.apply(gate, up, scores)


def _concatenate(pieces, shape, dtype):
    return mint.cat(pieces, 0) if pieces else mint.zeros(shape, dtype=dtype)


class GroupedLinear(Function):
    """``y = x @ w[e].T`` per expert."""

    @staticmethod
    def forward(ctx, x_RD, w_END, groups):
        ctx.save_for_backward(x_RD, w_END)
        ctx.groups = groups
        pieces = [PRODUCT_BY_TRANSPOSED(x_RD[a:b], w_END[e]) for e, a, b in groups]
        return _concatenate(pieces, (0, w_END.shape[1]), x_RD.dtype)

    @staticmethod
    def backward(ctx, grad_RN):
        x_RD, w_END = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            pieces = [PRODUCT(grad_RN[a:b], w_END[e]) for e, a, b in ctx.groups]
            grad_x = _concatenate(pieces, x_RD.shape, x_RD.dtype)
        if ctx.needs_input_grad[1]:
            shape = (1, *w_END.shape[1:])
            of_expert = {e: PRODUCT_OF_TRANSPOSED(grad_RN[a:b], x_RD[a:b]).reshape(shape) for e, a, b in ctx.groups}
            zeros = mint.zeros(shape, dtype=w_END.dtype)
            grad_w = mint.cat([of_expert.get(e, zeros) for e in range(w_END.shape[0])], 0)
        return grad_x, grad_w, None


class SwiGLU(Function):
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


class LinearOfNoRows(Function):
    """``x @ w.T`` for x without elements. Connected to both, so that a rank without tokens takes part in backward."""

    @staticmethod
    def forward(ctx, x, w_ND):
        ctx.shapes = x.shape, w_ND.shape
        return mint.zeros((*x.shape[:-1], w_ND.shape[0]), dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return tuple(mint.zeros(shape, dtype=grad.dtype) for shape in ctx.shapes)
