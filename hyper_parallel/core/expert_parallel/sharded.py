"""A module that a style has sharded: the style bound to the module's sizes and places, once, at ``apply``.

One call of bare experts:

    x_RD --dispatch--> rows of my experts --enter tp--> experts --leave tp--> --combine--> y_RD
           over ep                         id. / sum            sum / id.       over ep

Dispatch and combine only see the mesh ``("ep",)``. The pair "enter tp" and "leave tp" (forward / backward) makes
outputs and gradients complete on every rank; it stands outside of them, where the experts' own shards are used. A MoE
layer moves rows and sums by itself, and calls the experts for what lies between.

Shape suffixes: R rows, E experts.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hyper_parallel.core.device_mesh import axis_name
from hyper_parallel.core.expert_parallel.checks import ExpertShapes, FeedForwardShapes, check_fit, check_inputs
from hyper_parallel.core.expert_parallel.exchange import Exchange
from hyper_parallel.core.types import Mesh, Module, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["DEBUG_VARIABLE", "Caller", "Sharded", "ShardedExperts", "ShardedFeedForward", "debugging"]

logger = logging.getLogger("hyper_parallel")

DEBUG_VARIABLE = "HYPER_PARALLEL_DEBUG"


def debugging() -> bool:
    """Whether the user asked for checks at every call."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


class Caller(Enum):
    """The last positional input of a sharded module's call says who calls, if it is not the user."""

    # Rows are those of this rank's experts, counts are over them, and outputs may stay terms of the sum over tp.
    MOE_LAYER = "the MoE layer around the module"


@dataclass(frozen=True)
class Sharded:
    """A style bound to one module. It holds no module: a deep copy must call itself.

    Attributes:
        style: the parallel style. platform: the module's.
        name: dotted name of the module in what was parallelised, or that of its class.
        shapes: sizes of the module before sharding.
        device_mesh: the mesh it lies on.
        ep_mesh, tp_mesh: its slice along the axis, a mesh of one rank too; None where the style has no such axis.
    """

    style: Any
    platform: Platform
    name: str
    shapes: Any
    device_mesh: Mesh
    ep_mesh: Mesh | None
    tp_mesh: Mesh | None

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
            if inputs and inputs[-1] is Caller.MOE_LAYER:
                return self.local(local_forward, *inputs[:-1])
            return self.whole(mod, local_forward, *inputs, **keywords)

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


@dataclass(frozen=True)
class ShardedExperts(Sharded):
    """Stacked experts, called with rows and counts.

    Attributes:
        exchange: how a MoE layer's tokens travel to them; None where the style replaced the dispatch of bare experts
            only.
    """

    shapes: ExpertShapes
    exchange: Exchange | None

    def local(
        self, local_forward: Callable, x_RD: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None
    ) -> Tensor:
        # A module that takes no scores must still work for calls without them.
        return local_forward(x_RD, num_tokens_per_expert, *(() if scores is None else (scores,)))

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
        check_fit(self.platform, x, self.platform.parameters(mod)["w1"])
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
        return local_forward(x)

    def whole(self, mod: Module, local_forward: Callable, x: Tensor, **keywords: Any) -> Tensor:
        return self.summed_over_tp(lambda x: local_forward(x, **keywords), x)
