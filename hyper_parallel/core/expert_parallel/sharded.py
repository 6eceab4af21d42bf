"""A module that a style has sharded: the style bound to the module's sizes and places, once, at ``apply``.

One call of bare experts:

    x_RD --dispatch--> rows of my experts --enter tp--> experts --leave tp--> --combine--> y_RD
           over ep                         id. / sum            sum / id.       over ep

Dispatch and combine only see the mesh ``("ep",)``. The pair "enter tp" and "leave tp" (forward / backward) makes
outputs and gradients complete on every rank; it stands outside of them, where the experts' own shards are used. A MoE
layer moves rows and sums by itself, and calls the experts for what lies between.

Shape suffixes: R rows, E experts.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hyper_parallel.core.device_mesh import axis_name
from hyper_parallel.core.expert_parallel.checks import (
    ExpertShapes,
    FeedForwardShapes,
    check_features,
    check_fit,
    check_inputs,
    check_output,
)
from hyper_parallel.core.expert_parallel.exchange import Exchange
from hyper_parallel.core.expert_parallel.lora import Lora
from hyper_parallel.core.types import Mesh, Module, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["DEBUG_VARIABLE", "Caller", "Kept", "Sharded", "ShardedExperts", "ShardedFeedForward", "debugging"]

logger = logging.getLogger("hyper_parallel")

DEBUG_VARIABLE = "HYPER_PARALLEL_DEBUG"


def debugging() -> bool:
    """Whether the user asked for checks at every call."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


class Caller(Enum):
    """The last positional input of a sharded module's call says who calls, if it is not the user."""

    # Rows are those of this rank's experts, counts are over them, and outputs may stay terms of the sum over tp.
    MOE_LAYER = "the MoE layer around the module"


class Kept:
    """A tensor among the inputs of the layer's call that must arrive in its own dtype, where what is wrapped around the
    module casts the tensors among its inputs. It would find them in tuples, dicts and dataclasses too; this is none."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True)
class Sharded:
    """A style bound to one module. It holds no module: a deep copy must call itself.

    Attributes:
        style: the parallel style. platform: the module's.
        name: dotted name of the module in what was parallelised, or that of its class.
        shapes: sizes of the module before sharding.
        device_mesh: the mesh it lies on.
        ep_mesh, tp_mesh: its slice along the axis, a mesh of one rank too; None where the style has no such axis.
        lora: adapters on the module's weights, or None.
    """

    style: Any
    platform: Platform
    name: str
    shapes: Any
    device_mesh: Mesh
    ep_mesh: Mesh | None
    tp_mesh: Mesh | None
    lora: Lora | None = field(default=None, kw_only=True)

    # What to do about a call with other arguments.
    advice = ""

    def __deepcopy__(self, memo: dict) -> "Sharded":
        return self  # the same places

    @property
    def label(self) -> str:
        return type(self.style).__name__

    @property
    def tp_group(self) -> Any:
        """The group over which terms are summed, or None where one rank holds all of it."""
        return self.tp_mesh.get_group() if self.tp_mesh is not None and self.tp_mesh.size() > 1 else None

    @property
    def tp_axis(self) -> str:
        """Its name, for messages."""
        return "tp" if self.tp_mesh is None else axis_name(self.tp_mesh)

    def __call__(self, mod: Module, local_forward: Callable, *inputs: Any, **keywords: Any) -> Tensor:
        """What the module computes for the user, or between dispatch and combine for the layer around it."""
        with self.naming_errors():
            self.check_laid_out(mod)
            if self.lora is not None:
                local_forward = self.lora.around(self, mod, local_forward)
            if inputs and inputs[-1] is Caller.MOE_LAYER:
                return self.local(local_forward, *(x.tensor if isinstance(x, Kept) else x for x in inputs[:-1]))
            self._check_arguments(inputs, keywords)
            return self.whole(mod, local_forward, *inputs, **keywords)

    def _check_arguments(self, inputs: tuple, keywords: dict[str, Any]) -> None:
        """Raise ``TypeError`` for arguments that :meth:`whole` does not have, in words about the module."""
        signature = _signature(type(self).whole)
        try:
            signature.bind(*inputs, **keywords)
        except TypeError as error:
            given = [type(value).__name__ for value in inputs] + [f"{name}=" for name in keywords]
            raise TypeError(
                f"{self.label} has the module called as {signature}, but it got ({', '.join(given)}): {error}"
                f"{self.advice}"
            ) from None

    def check_laid_out(self, mod: Module) -> None:
        """Raise where the module no longer holds its shards, as far as that can be seen."""

    def local(self, local_forward: Callable, *inputs: Any) -> Tensor:
        """The module on its shards alone."""
        raise NotImplementedError

    def whole(self, mod: Module, local_forward: Callable, *inputs: Any, **keywords: Any) -> Tensor:
        """What one device would compute."""
        raise NotImplementedError

    def summed_over_tp(self, forward: Callable, *inputs: Tensor) -> Tensor:
        """Run what holds a slice of the hidden dim: its output, and its inputs' gradients, are terms of a sum over tp
        (the operators f and g of Megatron-LM, Shoeybi et al. 2019, section 3)."""
        group, dtype = self.tp_group, self.style.reduce_dtype
        if group is None:
            return forward(*inputs)
        names = (f"experts: sum of the {what}' gradient over {self.tp_axis}" for what in ("rows", "scores"))
        entered = [self.platform.copy_to_group(x, group, name, dtype) for x, name in zip(inputs, names)]
        name = f"experts: sum of the output rows over {self.tp_axis}"
        return self.platform.reduce_from_group(forward(*entered), group, name, dtype)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Let an error in this block say from which module it comes; a model may have many."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError) as error:
            if type(error) not in (TypeError, ValueError, RuntimeError) or str(error).startswith(self.name):
                raise
            raise type(error)(f"{self.name}: {error}") from error

    def check_replicated(self, **inputs: Tensor | None) -> None:
        """In debug mode: the ranks of one tp group must have been given the same inputs."""
        if self.tp_mesh is None or not debugging():
            return
        for name, value in inputs.items():
            if value is None:
                continue
            ep, tp = "ep" if self.ep_mesh is None else axis_name(self.ep_mesh), self.tp_axis
            what = f"debug: all-gather of digests of {name} over {tp}"
            digests = self.platform.digests(value, self.tp_mesh.get_group(), what)
            different = [r for r, digest in enumerate(digests) if digest != digests[0]]
            nan = self._words_on_nan(name, value)
            if different:
                raise ValueError(
                    f"{self.label}: all {tp} ranks of one {ep} coordinate must be given the same {name}; those of "
                    f"{tp} coordinates {different} differ from that of {tp} coordinate 0{nan and f' ({nan})'}"
                )
            if nan:
                logger.warning("%s: %s", self.name, nan)

    def _words_on_nan(self, name: str, value: Tensor) -> str:
        """Whoever looks for a NaN switches debug mode on, and should be told of it."""
        rows = self.platform.rows_with_nan(value)
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        return f"{name} holds NaN in rows {shown}" if rows else ""


@functools.cache
def _signature(whole: Callable) -> inspect.Signature:
    """What the user gives to a call: ``whole`` without self, module and forward, and without types."""
    parameters = list(inspect.signature(whole).parameters.values())[3:]
    return inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters])


@dataclass(frozen=True)
class ShardedExperts(Sharded):
    """Stacked experts, called with rows and counts.

    Attributes:
        exchange: how a MoE layer's tokens travel to them; None where the style replaced the dispatch of bare experts
            only.
    """

    shapes: ExpertShapes
    exchange: Exchange | None

    advice = (
        "; x holds rows [R, D] sorted by expert, num_tokens_per_expert [E] how many each expert has. To have tokens "
        "routed and counted, call the MoE layer around the experts"
    )

    def check_laid_out(self, mod: Module) -> None:
        """Raise ``RuntimeError`` where somebody put a whole weight in the place of a shard."""
        if self.device_mesh.size() == 1:
            return
        sizes, own = self.shapes, self.platform.parameters(mod)
        wide = sizes.num_experts, sizes.hidden_dim, sizes.dim
        for name, shape in {"w1": wide, "w2": (sizes.num_experts, sizes.dim, sizes.hidden_dim), "w3": wide}.items():
            weight = own.get(name)
            if weight is not None and not self.platform.is_sharded(weight) and tuple(weight.shape) == shape:
                raise RuntimeError(
                    f"{name} is no longer laid out over the mesh: a whole weight {shape} was put in its place; load "
                    "whole weights before the style is applied, or through what distributes them (torch: "
                    "set_model_state_dict with full_state_dict=True)"
                )

    def local(
        self, local_forward: Callable, x_RD: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None
    ) -> Tensor:
        # A module that takes no scores must still work for calls without them.
        y_RD = local_forward(x_RD, num_tokens_per_expert, *(() if scores is None else (scores,)))
        return check_output(self.platform, y_RD, x_RD)

    def whole(
        self,
        mod: Module,
        local_forward: Callable,
        x: Tensor,
        num_tokens_per_expert: Tensor,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Rows of this ep coordinate sorted by expert, counts over all experts -> their outputs, in the same order."""
        num_tokens_per_expert = check_inputs(self.platform, self.shapes, x, num_tokens_per_expert, scores)
        check_fit(self.platform, x, mod.w1)
        self.check_replicated(x=x, num_tokens_per_expert=num_tokens_per_expert, scores=scores)
        inputs, trip = self.style._token_dispatch(mod, (x, num_tokens_per_expert, scores), self.ep_mesh)
        x_RD, counts_L, scores_R = inputs

        def forward(x_RD: Tensor, scores_R: Tensor | None = None) -> Tensor:
            return self.local(local_forward, x_RD, counts_L, scores_R)

        rows_RD = self.summed_over_tp(forward, *((x_RD,) if scores_R is None else (x_RD, scores_R)))
        return self.style._token_combine(mod, rows_RD, self.ep_mesh, trip)


@dataclass(frozen=True)
class ShardedFeedForward(Sharded):
    """A dense SwiGLU module."""

    shapes: FeedForwardShapes

    def local(self, local_forward: Callable, x: Tensor) -> Tensor:
        return check_output(self.platform, local_forward(x), x)

    def whole(self, mod: Module, local_forward: Callable, x: Tensor, **keywords: Any) -> Tensor:
        check_features(self.platform, x, self.shapes.dim)

        def forward(x: Tensor) -> Tensor:
            return check_output(self.platform, local_forward(x, **keywords), x)

        return self.summed_over_tp(forward, x)
