"""Parameters as DTensors, and modules that compute with their local parts."""

import torch
import torch.distributed.tensor as dt
from torch import nn

__all__ = ["to_torch", "shard_parameter", "wrap_forward", "LABEL"]

LABEL = "_hyper_parallel_style"


def to_torch(placements):
    """Our placements as torch's."""
    kinds = {
        "Shard": lambda p: dt.Shard(p.dim),
        "Replicate": lambda p: dt.Replicate(),
        "Partial": lambda p: dt.Partial(p.reduce_op),
    }
    return tuple(kinds[type(p).__name__](p) for p in placements)


def shard_parameter(module, name, device_mesh, placements):
    """Replace a parameter by a DTensor parameter; attributes that a user put on it go along."""
    old = getattr(module, name)
    new = nn.Parameter(
        dt.distribute_tensor(old.detach(), device_mesh, to_torch(placements)), requires_grad=old.requires_grad
    )
    new.__dict__.update(old.__dict__)
    module.register_parameter(name, new)


def wrap_forward(module, label, wrapper):
    """Give ``module`` a subclass of its class whose forward is ``wrapper``.

    A class, unlike a forward put on the object, is shared by deep copies without tying them to the original.
    """
    original = type(module)

    def forward(self, x, num_tokens_per_expert, scores=None):
        def local_forward(*inputs):
            return _call_with_local_parameters(self, original, inputs)

        return wrapper(self, local_forward, x, num_tokens_per_expert, scores)

    # Row counts are data: compiling this would compile again for every new routing.
    forward = torch._disable_dynamo(forward)
    body = {"forward": forward, LABEL: label, "__module__": original.__module__, "__doc__": original.__doc__}
    module.__class__ = type(f"{label}{original.__name__}", (original,), body)


def _call_with_local_parameters(module, original, inputs):
    """Run the class's forward on a shallow twin of the module that has local tensors in place of DTensors.

    A module written for plain tensors so needs no change, and the module itself keeps its parameters, also for calls
    that overlap. What forward assigns to ``self`` is carried over to the module.
    """
    twin = object.__new__(original)
    local = {
        name: parameter.to_local() if isinstance(parameter, dt.DTensor) else parameter
        for name, parameter in module._parameters.items()
    }
    twin.__dict__.update(module.__dict__, _parameters=local)
    before = dict(twin.__dict__)
    try:
        return original.forward(twin, *inputs)
    finally:
        changed = {name: value for name, value in twin.__dict__.items() if before.get(name, twin) is not value}
        module.__dict__.update(changed)
