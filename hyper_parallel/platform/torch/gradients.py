"""Gradients and values of parameters on PyTorch, where a gradient is the parameter's ``.grad``: ``GradientVerbs``."""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from hyper_parallel.platform.gradients import GradientVerbs
from hyper_parallel.platform.operation import operation
from hyper_parallel.platform.torch import collectives, compat

__all__ = ["VERBS"]


class _Gradients(GradientVerbs):
    def __init__(self):
        self._world, self._joint_groups = None, {}

    def trainable(self, module):
        return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]

    @torch.no_grad()
    def local_gradients(self, parameters, grads):
        if grads is not None:
            raise TypeError("on torch a gradient is the parameter's .grad: leave out grads")
        return [_local_gradient(parameter) for parameter in parameters]

    @torch.no_grad()
    def zero_gradient(self, parameter):
        parameter.grad = torch.zeros_like(parameter)
        return _local(parameter.grad)

    def with_gradients(self, local):
        return None  # They were changed in place.

    @torch.no_grad()
    def local_values(self, parameters):
        return [_local(parameter.detach()) for parameter in parameters]

    @torch.no_grad()
    def set_local_value(self, parameter, value):
        _local(parameter.detach()).copy_(value)

    def zeros_like(self, tensor):
        return torch.zeros_like(tensor, memory_format=torch.contiguous_format)

    def same(self, first, second):
        return bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=True).all())

    def ranks(self, group):
        return tuple(dist.get_process_group_ranks(group))

    def joint_group(self, ranks, device_type):
        if self._world is not dist.group.WORLD:  # the groups of an earlier world are gone
            self._world, self._joint_groups = dist.group.WORLD, {}
        if ranks not in self._joint_groups:
            # Only the members meet here: other parts of the model, such as pipeline stages, come at their own time.
            limit = None
            if device_type == "cpu":
                limit = compat.default_time_limit(device_type)
                collectives.let_gloo_finish_before_exit()
            group = dist.new_group(sorted(ranks), timeout=limit, use_local_synchronization=True)
            self._joint_groups[ranks] = group
        return self._joint_groups[ranks]

    @torch.no_grad()
    def sum_flat(self, tensors, group, divisor, name):
        in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0] if in_place else torch.cat([tensor.reshape(-1) for tensor in tensors])
        if group is not None:
            _all_reduce(flat, group, name)
        if divisor != 1:
            flat.div_(divisor)
        if not in_place:
            for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(summed.view_as(tensor))
        return tensors

    def largest(self, values, group, device_type, name):
        largest = torch.tensor(values, dtype=torch.int64, device=device_type)
        _all_reduce(largest, group, name, dist.ReduceOp.MAX)
        return largest.tolist()

    @torch.no_grad()
    def powers(self, pairs, norm_type, foreach):
        gradients = [gradient for _, gradient in pairs if gradient is not None and gradient.numel()]
        if not gradients:
            return torch.zeros((), device=_local(pairs[0][0].detach()).device)
        # A norm of 16-bit numbers is formed and kept in fp32: rounded once more it could not tell ranks apart.
        narrow = [gradient for gradient in gradients if gradient.dtype.itemsize < 4]
        norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32) for gradient in narrow]
        if len(narrow) < len(gradients):
            wide = [gradient for gradient in gradients if gradient.dtype.itemsize >= 4]
            norms.append(get_total_norm(wide, norm_type, foreach=foreach))
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return norm if math.isinf(norm_type) else norm**norm_type

    @torch.no_grad()
    def combine_scalars(self, scalars, group, largest, name):
        # Gathered, not reduced: a backend's maximum may pass over a NaN.
        gathered = collectives.all_gather_vector(torch.stack(scalars), group, name)
        return list((gathered.amax(0) if largest else gathered.sum(0)).unbind())

    @torch.no_grad()
    def total_norm(self, powers, norm_type):
        if not powers:
            return torch.tensor(0.0)
        together = torch.stack([power.to(powers[0].device) for power in powers])
        return together.max() if math.isinf(norm_type) else together.sum() ** (1 / norm_type)

    def finite(self, tensors):
        # One answer per device before the host waits.
        answers = [torch.isfinite(tensor).all() for tensor in tensors]
        return all(bool(torch.stack(of_device).all()) for of_device in _by_device(answers))

    @torch.no_grad()
    def clipped(self, local, norm, max_norm):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in local:
            if gradient is not None:
                gradient.mul_(factor.to(gradient.device))
        return local


def _local(tensor):
    """What this rank holds; it shares its memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter):
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}; only dense gradients are summed, so "
            "make the embedding with sparse=False"
        )
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return _local(gradient)


def _all_reduce(x, group, name, op=dist.ReduceOp.SUM):
    with operation(name, dist.get_process_group_ranks(group), dist.get_rank()):
        dist.all_reduce(x, op, group=group)


def _by_device(scalars):
    found: dict[torch.device, list] = {}
    for scalar in scalars:
        found.setdefault(scalar.device, []).append(scalar)
    return found.values()


VERBS = _Gradients()
