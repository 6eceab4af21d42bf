"""Experts on Ascend devices, by torch_npu's operators, with hand-written gradients. The names are those of ``experts``.

Shape suffixes: R rows, E experts, D model size, H hidden size; K, N features of any kind.
"""

import torch

from hyper_parallel.platform.torch import experts, rows
from hyper_parallel.platform.torch.npu_operators import runs

__all__ = ["grouped_linear", "swiglu", "swiglu_experts"]

# Documented limits (aclnnGroupedMatmulV4).
MAX_EXPERTS = 1024
MAX_FEATURES = 65535


def swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R=None):
    """``scores * w2(silu(w1 x) * (w3 x))`` for the rows of each expert.

    The counts stay on the device, unless the portable code computes.
    """
    if runs("npu_grouped_matmul", x_RD.dtype, _grouped_matmul_obstacle(*w1_EHD.shape)):
        counts_E = num_tokens_per_expert_E.to(x_RD.device, torch.int64)
        return _SwiGLUExperts.apply(x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, counts_E)
    return experts.swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R)


def grouped_linear(x_RK, w_ENK, num_tokens_per_expert_E):
    """``y = x @ w[e].T`` for the rows of each expert e. The counts stay on the device, as above."""
    if runs("npu_grouped_matmul", x_RK.dtype, _grouped_matmul_obstacle(*w_ENK.shape)):
        return _GroupedLinear.apply(x_RK, w_ENK, num_tokens_per_expert_E.to(x_RK.device, torch.int64))
    return experts.grouped_linear(x_RK, w_ENK, num_tokens_per_expert_E)


def _grouped_matmul_obstacle(num_experts, hidden_dim, dim):
    if num_experts == 1:
        return "it does not take the counts of one expert alone"
    if num_experts > MAX_EXPERTS:
        return f"{num_experts} experts are more than {MAX_EXPERTS}"
    if max(hidden_dim, dim) > MAX_FEATURES:
        return f"experts of {hidden_dim} x {dim} exceed {MAX_FEATURES}"
    return None


class _SwiGLUExperts(torch.autograd.Function):
    """npu_grouped_matmul has no autograd formula, so the gradients are written here.

    Kept for backward: rows, and gate and up side by side, as npu_swiglu takes them. Hidden rows are formed again.
    """

    @staticmethod
    def forward(ctx, x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, counts_E):
        import torch_npu

        x_RD, w1_EHD, w2_EDH, w3_EHD = (_plain(value) for value in (x_RD, w1_EHD, w2_EDH, w3_EHD))
        if x_RD.shape[0] == 0:  # the operators take no empty tensors
            ctx.save_for_backward(x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R)
            return torch.empty_like(x_RD)
        gate_RH, up_RH = (_product_by_rows(x_RD, w_EHD.transpose(1, 2), counts_E) for w_EHD in (w1_EHD, w3_EHD))
        gate_up_R2H = torch.cat((gate_RH, up_RH), dim=1)
        hidden_RH = _scaled(torch_npu.npu_swiglu(gate_up_R2H), scores_R)
        ctx.save_for_backward(x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, gate_up_R2H, counts_E)
        return _product_by_rows(hidden_RH, w2_EDH.transpose(1, 2), counts_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RD):
        if grad_RD.shape[0] == 0:
            return *(None if value is None else torch.zeros_like(value) for value in ctx.saved_tensors), None
        import torch_npu

        x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, gate_up_R2H, counts_E = ctx.saved_tensors
        x_needed, w1_needed, w2_needed, w3_needed, scores_needed, _ = ctx.needs_input_grad
        grad_RD = _plain(grad_RD)
        hidden_RH = torch_npu.npu_swiglu(gate_up_R2H)
        grad_RH = _product_by_rows(grad_RD, w2_EDH, counts_E)
        grad_scores = (hidden_RH * grad_RH).sum(1, dtype=scores_R.dtype) if scores_needed else None
        grad_w2 = _weight_gradient(grad_RD, _scaled(hidden_RH, scores_R), counts_E) if w2_needed else None
        grad_R2H = torch_npu.npu_swiglu_backward(_scaled(grad_RH, scores_R), gate_up_R2H)
        grad_gate_RH, grad_up_RH = (_plain(half) for half in grad_R2H.chunk(2, dim=1))
        grad_w1 = _weight_gradient(grad_gate_RH, x_RD, counts_E) if w1_needed else None
        grad_w3 = _weight_gradient(grad_up_RH, x_RD, counts_E) if w3_needed else None
        grad_x = None
        if x_needed:
            grad_x = _product_by_rows(grad_gate_RH, w1_EHD, counts_E)
            grad_x += _product_by_rows(grad_up_RH, w3_EHD, counts_E)
        return grad_x, grad_w1, grad_w2, grad_w3, grad_scores, None


class _GroupedLinear(torch.autograd.Function):
    """``y = x @ w[e].T``; the rows are kept only where the weight learns."""

    @staticmethod
    def forward(ctx, x_RK, w_ENK, counts_E):
        x_RK, w_ENK = _plain(x_RK), _plain(w_ENK)
        ctx.save_for_backward(x_RK if ctx.needs_input_grad[1] else None, w_ENK, counts_E)
        if x_RK.shape[0] == 0:  # the operators take no empty tensors
            return x_RK.new_empty(0, w_ENK.shape[1])
        return _product_by_rows(x_RK, w_ENK.transpose(1, 2), counts_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RN):
        x_RK, w_ENK, counts_E = ctx.saved_tensors
        x_needed, w_needed, _ = ctx.needs_input_grad
        if grad_RN.shape[0] == 0:
            grad_x = grad_RN.new_empty(0, w_ENK.shape[2]) if x_needed else None
            return grad_x, torch.zeros_like(w_ENK) if w_needed else None, None
        grad_RN = _plain(grad_RN)
        grad_x = _product_by_rows(grad_RN, w_ENK, counts_E) if x_needed else None
        return grad_x, _weight_gradient(grad_RN, x_RK, counts_E) if w_needed else None, None


def _product_by_rows(x_RK, w_EKN, counts_E):
    """``x @ w[e]`` for the rows of each expert: [R, N]. ``w`` is contiguous, or with its last two dims swapped."""
    return _grouped_matmul(x_RK, w_EKN, counts_E, group_type=0, split_item=2)


def _weight_gradient(grad_RN, x_RK, counts_E):
    """``grad.T @ x`` over the rows of each expert: [E, N, K]."""
    grad_ENK = _grouped_matmul(grad_RN.t(), x_RK, counts_E, group_type=2, split_item=3)
    # The kernel passes over an expert without rows: its block is as it was allocated, and 0 times that may be NaN.
    return grad_ENK.masked_fill_((counts_E == 0).view(-1, 1, 1), 0)


def _grouped_matmul(left, right, counts_E, group_type, split_item):
    """One product per expert. ``group_type`` is the dim that the counts cut: 0 the rows of ``left``, 2 the dim that is
    summed over. ``split_item`` 2 and 3 both ask for one tensor."""
    import torch_npu

    (product,) = torch_npu.npu_grouped_matmul(
        [left],
        [right],
        group_list=counts_E,
        group_list_type=1,  # counts, not their running sums
        group_type=group_type,
        split_item=split_item,
    )
    return product


def _plain(x):
    """Contiguous, also in the strides of dims of size 1, which ``contiguous`` does not look at: the operator tells a
    transposed view by its strides."""
    return x.contiguous().flatten().view(x.shape)


def _scaled(rows_RH, scores_R):
    return rows_RH if scores_R is None else rows.scaled_rows(rows_RH, scores_R)


def swiglu(gate, up):
    """``silu(gate) * up``; torch_npu knows its gradient."""
    if gate.numel() and runs("npu_swiglu", gate.dtype):
        import torch_npu

        return torch_npu.npu_swiglu(torch.cat((gate, up), dim=-1))
    return experts.swiglu(gate, up)
