"""What a whole program asks of torch around the library: ranks, versions, tensors of given values, gradients."""

import datetime
import os

import numpy as np
import torch
import torch.distributed as dist

__all__ = [
    "default_device_type",
    "join",
    "leave",
    "description",
    "float_types",
    "tensor",
    "array",
    "fill",
    "value_and_gradients",
]

BACKENDS = {"cpu": "gloo", "npu": "hccl", "cuda": "nccl"}
# torch's own 30 minutes (10 with NCCL) are long for a check in which a rank does not come.
TIME_LIMIT = datetime.timedelta(minutes=2)


def default_device_type():
    """The accelerator that torch finds, or "cpu"."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"


def join(device_type):
    """Join the launcher's ranks and take this rank's device; True unless the program had done so.

    Raises:
        RuntimeError: no launcher, or its ranks cannot be reached. ValueError: unknown device type.
    """
    if dist.is_initialized():
        return False
    if device_type not in BACKENDS:
        raise ValueError(f"unknown device type {device_type!r}; torch is known to run on {', '.join(BACKENDS)}")
    if "RANK" not in os.environ:
        raise RuntimeError("no rank is set in the environment; start this with torchrun or platform/torch/launch.sh")
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(BACKENDS[device_type], timeout=TIME_LIMIT)
    return True


def leave():
    """Undo ``join``."""
    dist.destroy_process_group()


def description(device_type):
    """Versions, device and backend, as words by their name; what should be the same on every rank."""
    words = {"torch": torch.__version__}
    if device_type == "npu":
        import torch_npu

        words["torch_npu"] = torch_npu.__version__
        words["CANN"] = torch_npu.npu.utils.get_cann_version() or "unknown"
    if device_type == "cuda":
        words["CUDA"] = torch.version.cuda
    words["device"] = "cpu" if device_type == "cpu" else torch.get_device_module(device_type).get_device_name()
    words["backend"] = dist.get_backend()
    return words


def float_types(device_type):
    """Types in which experts run there. An Ascend device has no float64: torch_npu makes float32 of it."""
    return ("float32", "bfloat16") if device_type == "npu" else ("float32", "float64", "bfloat16")


def tensor(values, dtype, device_type):
    """A new tensor on this rank's device; ``dtype`` is a name such as "float32"."""
    return torch.tensor(np.asarray(values)).to(device_type, getattr(torch, dtype))


def array(value):
    """A tensor's values as numpy float64."""
    return value.detach().double().cpu().numpy() if value.device.type == "cpu" else array(value.detach().cpu())


def fill(module, weights, dtype, device_type):
    """Give parameters the values of numpy arrays, and all of the module the type and device; returns the module."""
    module.to(device_type, getattr(torch, dtype))
    for name, values in weights.items():
        getattr(module, name).data.copy_(torch.tensor(values))
    return module


def value_and_gradients(function, inputs, module):
    """``function(*inputs) -> (scalar, output)``: the output, and the scalar's gradients for inputs and parameters.

    Returns:
        output, list of input gradients, dict of parameter gradients (local ones); numpy float64.
    """
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    loss, output = function(*leaves)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    local = {name: grad.to_local() if hasattr(grad, "to_local") else grad for name, grad in gradients.items()}
    return array(output), [array(leaf.grad) for leaf in leaves], {name: array(grad) for name, grad in local.items()}
