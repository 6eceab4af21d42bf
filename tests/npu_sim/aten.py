"""torch's own operators on npu tensors, computed by the CPU's kernels in the tensors' memory.

`install` registers a Python kernel over every aten operator that torch_npu registered for the device, except those
that need no arithmetic: they allocate, make views or move memory, and torch_npu's own code for them is what we want to
run. Operators without a CPU kernel keep torch_npu's too, and fail for want of CANN.
"""

import warnings

import torch

from tests.npu_sim import aicpu, hollow
from tests.npu_sim.launches import launch
from tests.npu_sim.memory import host_view, npu_tensors, on_cpu, on_meta, on_npu, other_tensors

__all__ = ["install"]

TORCH_NPUS_OWN = {
    "contiguous",
    "is_pinned",
    "is_set_to",
    "pin_memory",
    "_local_scalar_dense",
    "_pin_memory",
    "_resize_output_",
    "_to_copy",
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
}
TAKES_CPU_INDICES = {"index", "index_put_", "_index_put_impl_", "_unsafe_index"}
CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")

_library = torch.library.Library("aten", "IMPL")
_own_copy = torch.library.get_kernel(torch.ops.aten.copy_.default, "PrivateUse1")
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def install():
    """Register the kernels in this process. torch warns of every replacement, which is what is wanted here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            if name.startswith("aten::"):
                _install(name)
        _library.impl("copy_", _copy, "PrivateUse1", allow_override=True)
        _library.impl("matmul_backward", _matmul_backward, "PrivateUse1", allow_override=True)


def _install(name):
    base, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    if operator is None or not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in CPU_KEYS):
        return
    if base in TORCH_NPUS_OWN or "empty" in base or _makes_view(operator._schema):
        return
    _library.impl(name, _on_host(operator), "PrivateUse1", allow_override=True)


def _makes_view(schema):
    return any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)


def _on_host(operator):
    """A kernel that runs the operator on CPU views of its arguments and gives its results as npu tensors."""
    schema = operator._schema
    written = [_written_argument(schema, result) for result in schema.returns]
    silent = _written_and_not_returned(schema)
    takes_cpu_tensors = schema.name.removeprefix("aten::") in TAKES_CPU_INDICES

    def kernel(*args, **kwargs):
        tensors = npu_tensors((args, kwargs))
        if other_tensors((args, kwargs)) and not takes_cpu_tensors:
            raise RuntimeError(f"[npu-sim] {schema.name}: expected all tensors on the same device, got npu and cpu")
        device = tensors[0].device if tensors else torch.device("npu", torch.npu.current_device())
        on_aicpu = aicpu.note(schema.name, args, kwargs)
        view = hollow.view(operator, args, kwargs)
        cpu_args, cpu_kwargs = view((args, kwargs))
        results = operator(*cpu_args, **cpu_kwargs)
        results = list(results) if len(schema.returns) > 1 else [results] * len(schema.returns)
        for i, argument in enumerate(written):
            if argument is None:
                results[i] = on_npu(results[i], device)
            else:
                results[i] = _written(_pick(argument, args, kwargs), _pick(argument, cpu_args, cpu_kwargs))
        writes = results, [_pick(argument, args, kwargs) for argument in silent]
        launch(schema.name, tensors, writes, device, on_aicpu)
        return tuple(results) if len(results) > 1 else results[0] if results else None

    return kernel


def _written_argument(schema, result):
    """(position, name) of the argument that is written and returned as this result; None for a new tensor."""
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == result.alias_info.before_set:
            return position, argument.name
    raise AssertionError(f"{schema}: no argument for a written result")


def _written_and_not_returned(schema):
    """(position, name) of arguments that are written though nothing, or something else, is returned."""
    returned = [result.alias_info.before_set for result in schema.returns if result.alias_info is not None]
    return [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.is_write and argument.alias_info.before_set not in returned
    ]


def _pick(argument, args, kwargs):
    position, name = argument
    return kwargs[name] if name in kwargs else args[position]


def _written(tensor, view):
    """The npu argument that was written through `view`; an `out` of another size was replaced, not written."""
    if isinstance(tensor, torch.Tensor) and tensor.shape != view.shape:
        tensor.resize_(view.shape)
        host_view(tensor).copy_(view)
    return tensor


def _copy(target, source, non_blocking=False):
    """Between host and device torch_npu's own code, with its staging and its waits; on the device the CPU's kernel."""
    if target.device.type != source.device.type:
        _own_copy.call_boxed(_KEYS, target, source, non_blocking)
    else:
        view = hollow.view(torch.ops.aten.copy_, (target, source), {})
        view(target).copy_(view(source))
        launch("aten::copy_", [source], [target], target.device)
    return target


def _matmul_backward(grad, x, other, mask):
    """torch_npu differentiates matmul as one operator, which the CPU lacks; here for matrices and batches of them."""
    if x.dim() < 2 or other.dim() < 2:
        raise NotImplementedError("[npu-sim] the gradient of matmul with a vector")
    view = on_meta if hollow.is_large(grad) else on_cpu
    cpu_grad, cpu_x, cpu_other = view((grad, x, other))
    grads = (
        (cpu_grad @ cpu_other.mT).sum_to_size(x.shape) if mask[0] else None,
        (cpu_x.mT @ cpu_grad).sum_to_size(other.shape) if mask[1] else None,
    )
    grads = on_npu(grads, x.device)
    launch("aten::matmul_backward", [grad, x, other], grads, x.device)
    return grads
