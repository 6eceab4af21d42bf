"""What a whole program asks of MindSpore around the library: ranks, versions, tensors of given values, gradients."""

import os
from pathlib import Path

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import Parameter, Tensor

from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device_mesh import BACKENDS, DEVICE_TARGETS

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


def default_device_type():
    """ "npu" if MindSpore finds an Ascend device, or "cpu"."""
    return "npu" if ms.hal.is_available("Ascend") else "cpu"


def join(device_type):
    """Join the launcher's ranks and take this rank's device; True unless the program had done so.

    msrun runs the program as scheduler too; there, MindSpore serves until the job is over and ends the process.

    Raises:
        RuntimeError: no launcher, or its ranks cannot be reached. ValueError: unknown device type.
    """
    if compat.communication_is_initialised():
        return False
    if device_type not in DEVICE_TARGETS:
        raise ValueError(f"unknown device type {device_type!r}; MindSpore runs on {', '.join(DEVICE_TARGETS)} here")
    if not {"MS_ROLE", "RANK_TABLE_FILE", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        raise RuntimeError("no rank is set in the environment; start this with msrun or platform/mindspore/launch.sh")
    ms.set_device(DEVICE_TARGETS[device_type])
    comm.init(BACKENDS[device_type])
    if device_type == "cpu":
        # Each operator then ends before the next begins: faster on CPU, and an error is raised where it happens.
        ms.runtime.launch_blocking()
    return True


def leave():
    """Undo ``join``. MindSpore leaves by itself at the end of the process; a finalised one cannot join again."""


def description(device_type):
    """Versions, device and backend, as words by their name; what should be the same on every rank."""
    words = {"mindspore": ms.__version__}
    if device_type == "npu":
        words["CANN"] = _cann_version()
    words["device"] = "cpu" if device_type == "cpu" else ms.hal.get_device_name(0, DEVICE_TARGETS[device_type])
    words["backend"] = BACKENDS[device_type]
    return words


def _cann_version():
    """Read where MindSpore's own check of the version reads it (mindspore/run_check/_check_version.py)."""
    file = Path(os.environ.get("ASCEND_HOME_PATH", ""), "compiler", "version.info")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((line.partition("=")[2] for line in lines if line.startswith("Version=")), "unknown")


def float_types(device_type):
    """Types in which experts run there. MindSpore has no bfloat16 products on CPU, and Ascend no float64 ones."""
    return ("float32", "float64") if device_type == "cpu" else ("float32", "bfloat16")


def tensor(values, dtype, device_type):
    """A new tensor on this rank's device; ``dtype`` is a name such as "float32"."""
    return Tensor(np.asarray(values), getattr(ms, dtype))


def array(value):
    """A tensor's values as numpy float64."""
    return (value.astype(ms.float32) if value.dtype == ms.bfloat16 else value).asnumpy().astype(np.float64)


def fill(module, weights, dtype, device_type):
    """Give parameters the values of numpy arrays in the type; returns the module."""
    for name, values in weights.items():
        setattr(module, name, Parameter(tensor(values, dtype, device_type), name=name))
    return module


def value_and_gradients(function, inputs, module):
    """``function(*inputs) -> (scalar, output)``: the output, and the scalar's gradients for inputs and parameters.

    Returns:
        output, list of input gradients, dict of parameter gradients (local ones); numpy float64.
    """
    parameters = module.trainable_params()
    differentiate = ms.value_and_grad(function, tuple(range(len(inputs))), tuple(parameters), has_aux=True)
    (_, output), (of_inputs, of_parameters) = differentiate(*inputs)
    of_inputs = of_inputs if isinstance(of_inputs, tuple) else (of_inputs,)
    named = {parameter.name: array(grad) for parameter, grad in zip(parameters, of_parameters)}
    return array(output), [array(grad) for grad in of_inputs], named
