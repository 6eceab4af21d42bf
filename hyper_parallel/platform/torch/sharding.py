"""Parameters as DTensors, and modules that compute with their local parts."""

import functools

import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn

from hyper_parallel.platform.operation import operation
from hyper_parallel.platform.torch import compat

__all__ = ["to_torch", "shard_parameter", "wrap_forward", "SHARDED"]

SHARDED = "_hyper_parallel_sharded"


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
    whole, ranks = old.detach(), device_mesh.mesh.flatten().tolist()
    with operation(f"distribute_tensor: laying out {name}", ranks, dist.get_rank()):
        sharded = dt.distribute_tensor(whole, device_mesh, to_torch(placements))
    new = nn.Parameter(sharded, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    module.register_parameter(name, new)


def wrap_forward(module, sharded):
    """Prepare a subclass of the module's class whose forward is ``sharded``; what comes back puts it on.

    A class, unlike a forward put on the object, is shared by deep copies without tying them to the original.
    """
    original = type(module)
    if SHARDED in vars(original):
        return functools.partial(setattr, original, SHARDED, sharded)

    def forward(self, *inputs, **keywords):
        def local_forward(*local_inputs, **local_keywords):
            return _call_with_local_parameters(self, original, local_inputs, local_keywords)

        return getattr(type(self), SHARDED)(self, local_forward, *inputs, **keywords)

    # Row counts are data: compiling this would compile again for every new routing.
    forward = compat.never_compiled(forward)
    body = {"forward": forward, SHARDED: sharded, "__module__": original.__module__, "__doc__": original.__doc__}
    wrapped = type(f"{sharded.label}{original.__name__}", (original,), body)
    return functools.partial(setattr, module, "__class__", wrapped)


def _call_with_local_parameters(module, original, inputs, keywords):
    """Run the class's forward on a shallow twin of the module that has local tensors in place of DTensors.

    A module written for plain tensors so needs no change, and the module itself keeps its parameters, also for calls
    that overlap. What forward assigns to ``self`` is carried over to the module.
    """
    twin = _local_twin(module, original)
    before = dict(vars(twin))
    try:
        return original.forward(twin, *inputs, **keywords)
    finally:
        vars(module).update({name: value for name, value in vars(twin).items() if before.get(name, twin) is not value})


def _local_twin(module, cls):
    """A module of class ``cls`` that shares everything with ``module`` but its DTensors, and those of its children."""
    twin = object.__new__(cls)
    parameters = {
        name: parameter.to_local() if isinstance(parameter, dt.DTensor) else parameter
        for name, parameter in compat.parameters_of(module).items()
    }
    children = {name: child and _local_twin(child, type(child)) for name, child in compat.children_of(module).items()}
    vars(twin).update(vars(module), _parameters=parameters, _modules=children)
    return twin
