"""A small adapter per framework, so that a test is written once: numpy goes in, numpy comes out.

    adapter = framework("mindspore")
    result = adapter.value_and_gradients(function, [adapter.tensor(x), adapter.int_tensor(counts)], module)

The frameworks are imported when their adapter is asked for. Losses go through `total`, because MindSpore's CPU kernels
read uninitialised memory when they sum a tensor without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Evaluation:
    """A loss, the output it was made of, and the gradients of the loss. A gradient is None for an integer input, and
    where the framework gave none."""

    loss: float
    output: np.ndarray
    input_gradients: list[np.ndarray | None]
    parameter_gradients: dict[str, np.ndarray | None]


class Framework:
    """What the adapters share. `dtype` is the widest float type that all operators and collectives of the platform
    take on its device, and `tolerance` is what `relative_error` may reach with it."""

    name: str
    device_type: str = "cpu"
    dtype: str
    tolerance: float

    def dtype_object(self, name: str) -> Any:
        """The framework's dtype of that name."""
        raise NotImplementedError

    def tensor(self, array: Any, dtype: str | None = None) -> Any:
        """A copy of `array`; floating point numbers become `self.dtype` unless `dtype` says otherwise."""
        raise NotImplementedError

    def array(self, tensor: Any) -> np.ndarray:
        """A copy of a plain tensor; bfloat16, which numpy does not have, becomes float32."""
        raise NotImplementedError

    def parameters(self, module: Any) -> dict[str, Any]:
        """The parameters under their names in the module tree, each as this rank's local tensor."""
        raise NotImplementedError

    def total(self, tensor: Any) -> Any:
        """The sum of all elements as a differentiable scalar, 0 for a tensor without elements."""
        raise NotImplementedError

    def value_and_gradients(self, function: Callable, inputs: Sequence[Any], module: Any = None) -> Evaluation:
        """Evaluate `function(*inputs) -> (scalar loss, output)`, and the gradients of the loss with respect to the
        floating point inputs and to the trainable parameters of `module`."""
        raise NotImplementedError

    def clear_after_error(self) -> None:
        """Undo what an exception out of a differentiated function may leave behind in the framework."""

    def int_tensor(self, array: Any) -> Any:
        """A copy of `array` as int64."""
        return self.tensor(np.asarray(array), "int64")

    def loss(self, output: Any, target: Any) -> Any:
        """The loss of tests/harness/oracle.py."""
        return self.total((output + target) * (output + target)) / 2

    def set_parameter(self, module: Any, name: str, array: np.ndarray) -> None:
        """Fill a parameter that is not sharded yet, keeping its type."""
        parameter = self.parameters(module)[name]
        if tuple(parameter.shape) != np.shape(array):
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, got values of shape {np.shape(array)}")
        self.fill(parameter, array)

    def fill(self, parameter: Any, array: np.ndarray) -> None:
        raise NotImplementedError


class _Torch(Framework):
    name = "torch"
    dtype = "float64"
    tolerance = 1e-12

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def dtype_object(self, name):
        return getattr(self._torch, name)

    def tensor(self, array, dtype=None):
        tensor = self._torch.tensor(np.asarray(array))
        if dtype is None:
            dtype = self.dtype if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
        return tensor.to(self.device_type, getattr(self._torch, dtype))

    def array(self, tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == self._torch.bfloat16 else tensor).numpy().copy()

    def parameters(self, module):
        return {name: self._local(parameter) for name, parameter in module.named_parameters()}

    def total(self, tensor):
        return tensor.sum()

    def value_and_gradients(self, function, inputs, module=None):
        parameters = dict(module.named_parameters()) if module is not None else {}
        leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        for parameter in parameters.values():
            parameter.grad = None
        loss, output = function(*leaves)
        loss.backward()
        return Evaluation(
            loss.item(),
            self.array(output),
            [self._gradient(leaf) for leaf in leaves],
            {name: self._gradient(parameter) for name, parameter in parameters.items() if parameter.requires_grad},
        )

    def _gradient(self, leaf):
        return None if leaf.grad is None else self.array(self._local(leaf.grad))

    def _local(self, tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def fill(self, parameter, array):
        with self._torch.no_grad():
            parameter.copy_(self._torch.tensor(np.asarray(array)))


class _TorchNpu(_Torch):
    name = "torch_npu"
    device_type = "npu"
    dtype = "float32"  # Asked to cast to float64 on the device, torch_npu gives float32.
    tolerance = 1e-5


class _MindSpore(Framework):
    name = "mindspore"
    dtype = "float32"  # The CPU backend has no all-reduce of float64.
    tolerance = 1e-5

    def __init__(self) -> None:
        import mindspore

        self._ms = mindspore

    def dtype_object(self, name):
        return getattr(self._ms, name)

    def tensor(self, array, dtype=None):
        array = np.asarray(array)
        if dtype is None and np.issubdtype(array.dtype, np.floating):
            dtype = self.dtype
        return self._ms.Tensor(array, dtype and getattr(self._ms, dtype))

    def array(self, tensor):
        array = tensor.asnumpy()
        return array.astype(np.float32) if tensor.dtype == self._ms.bfloat16 else array.copy()

    def parameters(self, module):
        return dict(module.parameters_and_names())

    def total(self, tensor):
        # One zero more, so that the sum never is over nothing; the loss stays connected to its inputs on every rank.
        return self._ms.mint.cat([tensor.reshape((tensor.size,)), self._ms.mint.zeros((1,), dtype=tensor.dtype)]).sum()

    def value_and_gradients(self, function, inputs, module=None):
        parameters = self.parameters(module) if module is not None else {}
        trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        positions = tuple(index for index, tensor in enumerate(inputs) if tensor.is_floating_point())
        weights = tuple(trainable.values()) or None
        differentiate = self._ms.value_and_grad(function, positions or None, weights, has_aux=True)
        try:
            (loss, output), gradients = differentiate(*inputs)
        except BaseException:
            self.clear_after_error()
            raise
        # Inputs and weights come as a pair only if both were asked for, and a single input without its tuple.
        of_inputs, of_weights = gradients if positions and trainable else (gradients, gradients)
        of_inputs = (of_inputs,) if len(positions) == 1 else of_inputs
        input_gradients = [None] * len(inputs)
        for position, gradient in zip(positions, of_inputs):
            input_gradients[position] = self.array(gradient)
        return Evaluation(
            float(loss.asnumpy()),
            self.array(output),
            input_gradients,
            {name: self.array(gradient) for name, gradient in zip(trainable, of_weights)},
        )

    def clear_after_error(self):
        from mindspore.graph.api import _pynative_executor

        _pynative_executor.clear_res()

    def fill(self, parameter, array):
        parameter.set_data(self._ms.Tensor(np.asarray(array), parameter.dtype))


@cache
def framework(name: str) -> Framework:
    """The adapter for "torch", "torch_npu" or "mindspore"."""
    return {"torch": _Torch, "torch_npu": _TorchNpu, "mindspore": _MindSpore}[name]()
