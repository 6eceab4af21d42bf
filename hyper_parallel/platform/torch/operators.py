"""A method of a module as one operator, for graphs that torch.compile records.

The operator's result is new and of the shape of its first input. What it computes is not recorded: at run time it calls
the method on a twin of the module, under autograd, and keeps that record of operations for the operator of the backward
pass. A record lives as long as the ticket, a second output, which the graph saves like any tensor that backward needs;
so calls may overlap, and a recomputation makes a record of its own.
"""

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed.tensor as dt
from torch import Tensor, nn

from hyper_parallel.platform.torch import compat, sharding

__all__ = ["call", "can_be_operator", "handle_for"]

_MODULES = weakref.WeakValueDictionary()
_RECORDS = weakref.WeakValueDictionary()
_new_number = itertools.count().__next__


def handle_for(module: nn.Module) -> Tensor:
    """What a graph has in place of the module: a tensor, as a compiler makes a new graph for each new number."""
    number = _new_number()
    _MODULES[number] = module
    return torch.tensor(number, device="cpu")


def can_be_operator(module: nn.Module, parts: Sequence[str]) -> bool:
    """Whether parameters that are read before the call are what the parts compute with.

    FSDP2 brings parameters together in a hook, and other hooks may do the like. A module that was compiled by itself,
    or whose forward was replaced, is tied to the original.
    """
    for part in parts:
        for child in getattr(module, part).modules():
            if compat.has_hooks(child) or compat.is_compiled(child) or "forward" in child.__dict__:
                return False
    return all(type(p) in (nn.Parameter, dt.DTensor) for p in _parameters(module, parts))


def call(module: nn.Module, method: str, parts: Sequence[str], inputs: Sequence[Tensor]) -> Tensor:
    """``module.method(*inputs)`` as one operator, with gradients of the inputs and of the parts' parameters.

    Args:
        module: has the ``handle`` that :func:`handle_for` made.
        parts: names of the module's children that compute under the method.
        inputs: the first one has the shape of the result.
    """
    x, given = inputs[0], [*inputs, *(sharding.local(parameter) for parameter in _parameters(module, parts))]
    needs_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in given]
    device_type = x.device.type  # autocast is off again when the graph runs
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return _call(module.handle, method, ",".join(parts), given, needs_grad, autocast)[0]


def _parameters(module, parts):
    return [parameter for part in parts for parameter in getattr(module, part).parameters()]


class _Record(np.ndarray):
    """The record of one call's operations, as the memory of its ticket: the two die together.

    Attributes:
        result: where backward starts.
        leaves: where it ends, for each input that needs a gradient.
    """


def _ticket(y, leaves):
    record = np.full((), _new_number()).view(_Record)
    record.result = torch.autograd.graph.get_gradient_edge(y)
    record.leaves = [torch.autograd.graph.get_gradient_edge(leaf) for leaf in leaves]
    _RECORDS[int(record)] = record
    return torch.from_numpy(record)


@torch.library.custom_op("hyper_parallel::call", mutates_args=())
def _call(
    handle: Tensor,
    method: str,
    parts: str,
    given: Sequence[Tensor],
    needs_grad: Sequence[bool],
    autocast: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    module, training = _MODULES[int(handle)], any(needs_grad)
    parameters = _parameters(module, parts.split(","))
    num_inputs = len(given) - len(parameters)
    expected = given[0].shape, autocast or given[0].dtype
    # Operators run below autograd; this brings it back.
    with torch.inference_mode(False), torch.set_grad_enabled(training):
        # A compiler may use the memory of what it handed over for something else before backward comes by.
        inputs = [tensor.detach().clone() if training else tensor for tensor in given[:num_inputs]]
        weights = [weight.detach() for weight in given[num_inputs:]]
        leaves = [t.requires_grad_() for t, needed in zip((*inputs, *weights), needs_grad) if needed]
        with torch.autocast(given[0].device.type, dtype=autocast, enabled=autocast is not None):
            y = sharding.call_on_twin(module, method, zip(parameters, weights), inputs)
        if (y.shape, y.dtype) != expected:
            raise RuntimeError(
                f"{type(module).__name__}.{method} was compiled for a result {expected}, not {(y.shape, y.dtype)}"
            )
        ticket = _ticket(y, leaves) if y.requires_grad else torch.tensor(-1)
        return y.detach().contiguous(), ticket


@_call.register_fake
def _(handle, method, parts, given, needs_grad, autocast):
    x = given[0]
    return x.new_empty(x.shape, dtype=autocast or x.dtype), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("hyper_parallel::call_backward", mutates_args=())
def _call_backward(grad: Tensor, ticket: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of those given tensors that need one."""
    record = _RECORDS.get(int(ticket))
    if record is None:
        raise RuntimeError(
            "the record of a compiled MoE layer's forward is gone: its ticket, a 0-d tensor that the graph saves for "
            "backward, was copied. Leave 0-d tensors where they are when saved tensors are offloaded"
        )
    with torch.inference_mode(False):
        # The record stays until its ticket goes: backward may come by again.
        gradients = torch.autograd.grad([record.result], record.leaves, [grad], retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(tensor, memory_format=torch.contiguous_format) if gradient is None else gradient.contiguous()
        for tensor, gradient in zip(given, gradients)
    ]


@_call_backward.register_fake
def _(grad, ticket, given):
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]


def _save(ctx, inputs, output):
    _, _, _, given, ctx.needs_grad, _ = inputs
    ctx.save_for_backward(output[1], *(tensor for tensor, needed in zip(given, ctx.needs_grad) if needed))


def _backward(ctx, grad, _):
    ticket, *given = ctx.saved_tensors
    gradients = iter(_call_backward(grad, ticket, given))
    return None, None, None, [next(gradients) if needed else None for needed in ctx.needs_grad], None, None


_call.register_autograd(_backward, setup_context=_save)
