"""Parameters as DTensors, and modules that compute with their local parts."""

import functools
import math
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn
from torch.nn.utils import parametrize

from hyper_parallel.platform.operation import operation
from hyper_parallel.platform.torch import compat

__all__ = [
    "adapt",
    "call_on_twin",
    "distributed_tokens",
    "local",
    "local_tokens",
    "local_twin",
    "to_torch",
    "shard_parameter",
    "sharded_of",
    "wrap_forward",
    "SHARDED",
]

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


def local(parameter):
    """This rank's part of a parameter, with a gradient."""
    return parameter.to_local() if isinstance(parameter, dt.DTensor) else parameter


def local_tokens(x, device_mesh, placement):
    """See ``Platform.local_tokens``."""
    if not isinstance(x, dt.DTensor):
        return x, None
    (wanted,) = to_torch((placement,))
    if x.placements != (wanted,):
        x = x.redistribute(device_mesh, (wanted,))
    return x.to_local(), tuple(x.shape)


def distributed_tokens(x, device_mesh, placement, shape):
    """See ``Platform.distributed_tokens``."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return dt.DTensor.from_local(
        x, device_mesh, to_torch((placement,)), run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def wrap_forward(module, sharded, call=None, mixins=()):
    """Prepare a subclass of the module's class whose forward is ``sharded``, which is kept on the module; what comes
    back puts both on.

    ``call(module, original, inputs, keywords)`` is its local forward, by default that of the class ``original``; what
    the classes ``mixins`` have comes before what the original has.

    A class, unlike a forward put on the object, is shared by deep copies without tying them to the original, and by
    the layers of a model: code that was compiled for one of them serves all.
    """
    before = SHARDED in vars(module)
    wrapped = type(module) if before else _wrapped_class(type(module), sharded.label, call, mixins)

    def put_on():
        module.__class__ = wrapped
        setattr(module, SHARDED, sharded)
        if not before and not mixins:  # a class with a state dict of its own takes whole tensors apart
            module.register_load_state_dict_pre_hook(_refuse_whole_tensors)

    return put_on


def sharded_of(module):
    """What ``wrap_forward`` put on the module, or None."""
    return vars(module).get(SHARDED)


def _refuse_whole_tensors(module, state_dict, prefix, *_):
    """Raise ``RuntimeError`` before whole tensors are put in place of shards (``assign=True``), or copied into them."""
    for name, parameter in module.named_parameters():
        value = state_dict.get(f"{prefix}{name}")
        if value is None or not isinstance(parameter, dt.DTensor) or isinstance(value, dt.DTensor):
            continue
        raise RuntimeError(
            f"{prefix}{name} is laid out over a mesh, but the state dict holds a plain tensor of shape "
            f"{tuple(value.shape)}; load whole tensors by torch.distributed.checkpoint.state_dict."
            "set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True))"
        )


@functools.cache
def _wrapped_class(original, label, call, mixins):
    call = call or _call_with_local_parameters

    def forward(self, *inputs, **keywords):
        def local_forward(*local_inputs, **local_keywords):
            return call(self, original, local_inputs, local_keywords)

        return getattr(self, SHARDED)(self, local_forward, *inputs, **keywords)

    # Row counts are data: compiling this would compile again for every new routing.
    forward = compat.never_compiled(forward)
    body = {"forward": forward, "__module__": original.__module__, "__doc__": original.__doc__}
    return type(f"{label}{original.__name__}", (*mixins, original), body)


def _call_with_local_parameters(module, original, inputs, keywords):
    # A module written for plain tensors so needs no change, and the module itself keeps its parameters, also for calls
    # that overlap.
    with _twin(module, original, local) as twin:
        adapt(twin, sharded_of(module))
        return original.forward(twin, *inputs, **keywords)


def adapt(twin, sharded):
    """Let a twin find the sums of weights and their adapters' products in the place of the weights."""
    if sharded.lora is not None:
        parameters = compat.parameters_of(twin)
        parameters.update(sharded.lora.with_products(sharded, parameters))


def local_twin(module, cls):
    """A module of class ``cls`` that shares everything with ``module``, but has the local parts of its parameters."""
    return _made_twin(module, cls, local, [])


def call_on_twin(module, method, values, inputs):
    """``module.method(*inputs)``, where a parameter of the pairs (parameter, tensor) has the tensor as its value."""
    given = {id(parameter): tensor for parameter, tensor in values}
    with _twin(module, type(module), lambda parameter: given.get(id(parameter), parameter)) as twin:
        return getattr(twin, method)(*inputs)


def _parametrized(module, name):
    """The value of a parameter that torch's parametrizations compute."""
    try:
        return getattr(module, name)
    except RuntimeError as error:
        raise RuntimeError(
            f"the parametrization of {name} failed: {error}. {name} is a DTensor, so the parametrization's own "
            "parameters must be DTensors over the same mesh, made by torch.distributed.tensor.distribute_tensor"
        ) from error


@contextmanager
def _twin(module, cls, value):
    """A module of class ``cls`` that shares everything with ``module`` but its parameters, and those of its children:
    it has their values. What is assigned to its attributes is carried over to the module in the end."""
    twins = []
    try:
        yield _made_twin(module, cls, value, twins)
    finally:
        for original, twin, before in twins:
            vars(original).update({k: v for k, v in vars(twin).items() if before.get(k, twin) is not v})


def _made_twin(module, cls, value, twins):
    twin = object.__new__(cls)
    parameters = {name: p if p is None else value(p) for name, p in compat.parameters_of(module).items()}
    if parametrize.is_parametrized(module) and not issubclass(cls, type(module)):  # else the twin computes them itself
        parameters |= {name: value(_parametrized(module, name)) for name in module.parametrizations}
    children = {
        name: child and _made_twin(child, type(child), value, twins)
        for name, child in compat.children_of(module).items()
    }
    vars(twin).update(vars(module), _parameters=parameters, _modules=children)
    twins.append((module, twin, dict(vars(twin))))
    return twin
