"""What holds without any simulated arithmetic: which operators there are, what they take, which have a gradient.

These tests run against the generated stubs alone (`make test-npu-sim` runs them first), so they say what a new release
of torch_npu changes for the library, even one on which the simulated runtime does not work.
"""

import pytest
import torch

from hyper_parallel.platform.torch import npu_experts, npu_rows

DTYPES = [torch.float16, torch.bfloat16]
DERIVATIVE_KEYS = ("AutogradPrivateUse1", "Autograd", "CompositeImplicitAutograd")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def has_derivative(operator):
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{operator}", key) for key in DERIVATIVE_KEYS)


def test_the_device_and_its_backend_are_registered():
    assert torch.utils.backend_registration._privateuse1_backend_name == "npu"
    assert torch.distributed.is_backend_available("hccl")
    assert torch.distributed.Backend.default_device_backend_map["npu"] == "hccl"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_scores", [False, True])
def test_experts_pass_the_meta_kernels(dtype, with_scores):
    """The library's own calls, forward and backward, with the shapes that must come out."""
    x, w1, w2, w3 = (
        meta(10, 6, dtype=dtype),
        *(meta(*shape, dtype=dtype) for shape in [(3, 4, 6), (3, 6, 4), (3, 4, 6)]),
    )
    scores = meta(10, dtype=torch.float32) if with_scores else None
    y = npu_experts.swiglu_experts(x, w1, w2, w3, meta(3, dtype=torch.int64), scores)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    y.sum().backward()
    for leaf in (x, w1, w2, w3, *([scores] if with_scores else [])):
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_permuting_copies_passes_the_meta_kernels(dtype):
    x, order = meta(5, 6, dtype=dtype), meta(10, dtype=torch.int64)
    y = npu_rows.permute(x, order, order, copies=2)
    assert y.shape == (10, 6)
    y.sum().backward()
    assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)


def test_grouped_matmul_still_has_no_derivative():
    """When this fails, torch_npu differentiates it, and `npu_experts._SwiGLUExperts` may lean on that."""
    assert not has_derivative("npu_grouped_matmul")


def test_swiglu_has_a_derivative():
    assert has_derivative("npu_swiglu")  # npu_experts.swiglu leans on it


def test_a_wrong_call_does_not_pass_the_meta_kernels():
    import torch_npu

    x, w, counts = meta(10, 6), meta(3, 6, 4), meta(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="group_type only supports"):
        torch_npu.npu_grouped_matmul([x], [w], group_list=counts, split_item=2, group_type=1, group_list_type=1)
    with pytest.raises((TypeError, RuntimeError), match="group_lists"):
        torch_npu.npu_grouped_matmul([x], [w], group_lists=counts, split_item=2, group_type=0)
