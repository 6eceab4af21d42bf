"""Gradients and values of parameters on MindSpore, where gradients are the tuple of ``value_and_grad``; see
``GradientVerbs``."""

import math
import zlib

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.gradients import GradientVerbs
from hyper_parallel.platform.mindspore import device
from hyper_parallel.platform.mindspore.rows import copied

__all__ = ["VERBS"]


class _Gradients(GradientVerbs):
    def __init__(self):
        self._joint_groups = set()

    def trainable(self, module):
        return [(parameter.name, parameter) for parameter in module.trainable_params()]

    def local_gradients(self, parameters, grads):
        if grads is None:
            raise TypeError(
                "MindSpore does not keep gradients with the parameters: give grads, the gradients of "
                "mindspore.value_and_grad(function, None, parameters)"
            )
        if len(grads) != len(parameters):
            raise ValueError(f"expected one gradient per parameter ({len(parameters)}), got {len(grads)}")
        for parameter, gradient in zip(parameters, grads):
            if not isinstance(gradient, Tensor) or gradient.shape != parameter.shape:
                what = getattr(gradient, "shape", type(gradient).__name__)
                raise ValueError(
                    f"the gradient of {parameter.name} must be a dense tensor of its shape {parameter.shape}, "
                    f"got {what}; give the gradients in the order of the parameters"
                )
        return list(grads)

    def zero_gradient(self, parameter):
        return mint.zeros(parameter.shape, dtype=parameter.dtype)

    def with_gradients(self, local):
        return tuple(local)

    def local_values(self, parameters):
        return [Tensor(parameter) for parameter in parameters]

    def set_local_value(self, parameter, value):
        parameter.set_data(value)

    def zeros_like(self, tensor):
        return mint.zeros(tensor.shape, dtype=tensor.dtype)

    def same(self, first, second):
        return np.array_equal(_host(first), _host(second), equal_nan=True)

    def ranks(self, group):
        return tuple(comm.get_process_group_ranks(group))

    def joint_group(self, ranks, device_type):
        ranks = sorted(ranks)
        # The same name at every start.
        name = f"hyper_parallel_joint_{zlib.crc32(repr(ranks).encode()):08x}_from_{ranks[0]}_count_{len(ranks)}"
        if name not in self._joint_groups:
            comm.create_group(name, ranks)
            self._joint_groups.add(name)
        return name

    def sum_flat(self, tensors, group, divisor, name):
        flat = tensors[0] if len(tensors) == 1 else mint.cat([tensor.reshape(-1) for tensor in tensors])
        if group is not None:
            flat = device.collectives().all_reduce(flat, group, name)
        if divisor != 1:
            flat = flat / divisor
        if len(tensors) == 1:
            return [flat]
        pieces = mint.split(flat, [tensor.size for tensor in tensors])
        return [copied(piece).reshape(tensor.shape) for piece, tensor in zip(pieces, tensors)]

    def largest(self, values, group, device_type, name):
        gathered = device.collectives().all_gather(Tensor(np.asarray(values, np.int64)), group, name)
        return np.max([vector.asnumpy() for vector in gathered], axis=0).tolist()

    def powers(self, pairs, norm_type, foreach):
        return _combined([_power(gradient, norm_type) for _, gradient in pairs], math.isinf(norm_type))

    def combine_scalars(self, scalars, group, largest, name):
        gathered = device.collectives().all_gather(_together(scalars), group, name)
        ranks = [mint.split(vector, 1) for vector in gathered]
        return [_combined([piece.reshape(()) for piece in of_ranks], largest) for of_ranks in zip(*ranks)]

    def total_norm(self, powers, norm_type):
        if not powers:
            return mint.zeros((), dtype=ms.float32)
        total = _combined(powers, math.isinf(norm_type))
        return total if math.isinf(norm_type) else total ** (1 / norm_type)

    def finite(self, tensors):
        return all(bool(mint.isfinite(_wide(tensor)).all()) for tensor in tensors)

    def clipped(self, local, norm, max_norm):
        factor = mint.clamp(max_norm / (norm + 1e-6), max=1.0)
        return [(gradient * factor).astype(gradient.dtype) for gradient in local]


def _host(tensor):
    return _wide(tensor).asnumpy()


def _together(scalars):
    return mint.cat([scalar.reshape((1,)) for scalar in scalars])


def _power(x, norm_type):
    x = _wide(x)
    if norm_type == 2:
        return mint.square(x).sum()
    return _largest(mint.abs(x)) if math.isinf(norm_type) else (mint.abs(x) ** norm_type).sum()


def _wide(x):
    return x.astype(ms.float32) if x.dtype in (ms.float16, ms.bfloat16) else x


def _combined(scalars, largest):
    together = _together(scalars)
    return _largest(together) if largest else together.sum()


def _largest(x):
    """The largest element, NaN if there is one: MindSpore's ``max`` passes over it on CPU."""
    return x.max() + mint.where((x != x).any(), math.nan, 0.0).astype(x.dtype)


VERBS = _Gradients()
