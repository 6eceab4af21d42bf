"""The torch_npu operators that the library calls, by what the documentation says they compute.

Before one runs, torch_npu's own meta kernel sees the same arguments, and the reference must give the shapes and dtypes
that it gives: a wrong call and a wrong reference both raise. Documented limits are checked, and memory of which the
documentation promises nothing is NaN. Arithmetic is in float32, rounded once.

Shape suffixes: R rows, E experts, K and N sizes of a product, T tokens.
"""

import functools
import warnings

import torch
from torch.utils._pytree import tree_leaves

from tests.npu_sim import hollow
from tests.npu_sim.launches import launch
from tests.npu_sim.memory import npu_tensors, on_cpu, on_meta, on_npu, other_tensors

__all__ = ["install"]

MAX_INNER_SIZE, MAX_GROUPS = 65536, 1024
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_library = torch.library.Library("npu", "IMPL")


def install():
    """Register the references in this process, in place of torch_npu's kernels, which would call CANN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, reference in REFERENCES.items():
            _library.impl(name, _checked(name, reference), "PrivateUse1", allow_override=True)


def _checked(name, reference):
    """A kernel that runs the reference on CPU views, between torch_npu's word on the arguments and on the results."""
    operator = getattr(torch.ops.npu, name)

    def kernel(*args, **kwargs):
        require(not other_tensors((args, kwargs)), name, "a cpu tensor among npu tensors")
        device = npu_tensors((args, kwargs))[0].device
        meta_args, meta_kwargs = on_meta((args, kwargs))
        expected = operator(*meta_args, **meta_kwargs)
        if hollow.is_large(args, kwargs):
            result = expected
        else:
            cpu_args, cpu_kwargs = on_cpu((args, kwargs))
            result = reference(*cpu_args, **cpu_kwargs)
        require(_forms(result) == _forms(expected), name, f"{_forms(result)}, but the meta kernel {_forms(expected)}")
        result = on_npu(result, device)
        launch(f"npu::{name}", [args, kwargs], result, device)
        return result

    return kernel


def _forms(result):
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]


def require(condition, operator, message):
    if not condition:
        raise RuntimeError(f"[npu-sim] {operator}: {message}")


def grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type):
    """The form with one tensor for x, the weights and the result, and the counts on the device."""
    rule = functools.partial(require, operator="npu_grouped_matmul")
    (x,), (weight,) = x, weight
    rule(split_item in (2, 3) and group_list_type == 1, message="only one result, and counts, are simulated")
    rule(x.dtype in FLOATS and x.dtype == weight.dtype, message=f"x {x.dtype}, weight {weight.dtype}")
    rule(isinstance(group_list, torch.Tensor) and group_list.dtype == torch.int64, message="group_list must be int64")
    rule(1 < group_list.numel() <= MAX_GROUPS, message=f"group_list of {group_list.numel()} groups")
    rule(x.numel() and weight.numel(), message="an operand without elements")
    rows, inner = x.shape if group_type == 0 else x.shape[::-1]
    rule(max(inner, *weight.shape[1:]) < MAX_INNER_SIZE, message="a size is too large")
    counts = group_list.tolist()
    rule(min(counts) >= 0 and sum(counts) == rows, message=f"counts {counts} of {rows} rows")
    if group_type == 0:
        return [_product_per_group(rule, x, weight, counts)]
    return [_product_of_groups(rule, x, weight, counts)]


def _product_per_group(rule, x_RK, weight_EKN, counts_E):
    rule(x_RK.is_contiguous() and not _transposed(x_RK), message="x may not be transposed")
    rule(weight_EKN.is_contiguous() or _transposed(weight_EKN), message="weight is neither plain nor transposed")
    rule(len(counts_E) == weight_EKN.shape[0], message=f"{len(counts_E)} counts, {weight_EKN.shape[0]} weights")
    parts = zip(x_RK.float().split(counts_E), weight_EKN.float())
    return torch.cat([x @ w for x, w in parts]).to(x_RK.dtype)


def _product_of_groups(rule, x_KR, weight_RN, counts_E):
    rule(_transposed(x_KR), message=f"x must be a transposed view, got strides {x_KR.stride()} of {tuple(x_KR.shape)}")
    rule(weight_RN.is_contiguous() and not _transposed(weight_RN), message="weight may not be transposed")
    parts = zip(x_KR.float().split(counts_E, dim=1), weight_RN.float().split(counts_E))
    # The kernel skips a group without rows; what is in its block then is not defined.
    blocks = [x @ w if x.shape[1] else torch.full((x.shape[0], w.shape[1]), torch.nan) for x, w in parts]
    return torch.stack(blocks).to(x_KR.dtype)


def _transposed(x_MK):
    """By strides, as documented and as the meta kernel asks: also a matrix of one row is transposed or not."""
    return x_MK.stride()[-2:] == (1, x_MK.shape[-2])


def swiglu(x, dim=-1):
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def swiglu_backward(grad, x, dim=-1):
    gate, up = x.float().chunk(2, dim)
    grad, sigmoid = grad.float(), torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))  # of silu
    return torch.cat([grad * up * slope, grad * gate * sigmoid], dim).to(x.dtype)


def token_unpermute(rows_RN, positions_R, probs_TK=None, padded_mode=False, restore_shape=None):
    """``y[t] = sum over k of probs[t, k] * rows[positions[t * K + k]]``; without probs K is 1."""
    require(positions_R.dtype == torch.int32, "npu_moe_token_unpermute", f"positions are {positions_R.dtype}")
    taken = rows_RN.float().index_select(0, positions_R)
    if probs_TK is None:
        return taken.to(rows_RN.dtype)
    return (taken.unflatten(0, probs_TK.shape) * probs_TK.float().unsqueeze(2)).sum(1).to(rows_RN.dtype)


REFERENCES = {
    "npu_grouped_matmul": grouped_matmul,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    # The operator behind npu_moe_token_unpermute, which also hands on what its gradient needs.
    "_npu_moe_token_unpermute": lambda rows, *others: (token_unpermute(rows, *others), rows.clone()),
}
