"""The public modules for PyTorch: parameters, buffers, and ``forward``. The rest is in ``core.expert_parallel``."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor as dt
from torch import nn

from hyper_parallel.core.expert_parallel.modules import FeedForwardBase, GroupedExpertsBase, MoEBase, RouterBase
from hyper_parallel.core.types import Mesh
from hyper_parallel.platform.torch import PLATFORM, operators

__all__ = ["FeedForward", "GroupedExperts", "MoE", "TokenChoiceTopKRouter"]


class GroupedExperts(GroupedExpertsBase, nn.Module):
    """All experts of a MoE layer in three stacked weights, as a ``torch.nn.Module``; see ``GroupedExpertsBase``."""

    platform = PLATFORM

    def forward(
        self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor, scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.run(x, num_tokens_per_expert, scores)

    forward.__doc__ = GroupedExpertsBase.run.__doc__

    def _weight(self, name: str, num_experts: int, out_features: int, in_features: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        _draw(weight)
        return weight

    def reset_parameters(self) -> None:
        """Draw every weight from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as ``nn.Linear`` does.

        Sharded weights get their part of the same draw, so ranks with the same random state end up with what one
        device has; each weight is whole on every rank while it is drawn.
        """
        for weight in (self.w1, self.w2, self.w3):
            _draw(weight)


@torch.no_grad()
def _draw(weight: nn.Parameter) -> None:
    bound = 1 / math.sqrt(weight.shape[2])
    if not isinstance(weight, dt.DTensor):
        weight.uniform_(-bound, bound)
        return
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.to_local().device)
    whole.uniform_(-bound, bound)
    weight.copy_(dt.distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))


class FeedForward(FeedForwardBase, nn.Module):
    """Dense SwiGLU, as a ``torch.nn.Module``; see ``FeedForwardBase``."""

    platform = PLATFORM

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)

    forward.__doc__ = FeedForwardBase.run.__doc__

    def _linear(self, in_features: int, out_features: int) -> nn.Linear:
        return nn.Linear(in_features, out_features, bias=False)


class TokenChoiceTopKRouter(RouterBase, nn.Module):
    """The router of a MoE layer, as a ``torch.nn.Module``; see ``RouterBase``."""

    platform = PLATFORM

    def forward(self, x: torch.Tensor, expert_bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(x, expert_bias)

    forward.__doc__ = RouterBase.run.__doc__

    def _linear(self, in_features: int, out_features: int) -> nn.Linear:
        return nn.Linear(in_features, out_features, bias=False)


class MoE(MoEBase, nn.Module):
    """A Mixture-of-Experts layer, as a ``torch.nn.Module``; see ``MoEBase``."""

    platform = PLATFORM
    router_class, experts_class, feed_forward_class = TokenChoiceTopKRouter, GroupedExperts, FeedForward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)

    forward.__doc__ = MoEBase.run.__doc__

    @torch.no_grad()
    def update_expert_bias(self, device_mesh: Mesh | None = None) -> None:
        super().update_expert_bias(device_mesh)

    def __setstate__(self, state: dict) -> None:  # a copy is another module
        super().__setstate__(state)
        self.handle = operators.handle_for(self)

    def _linear(self, in_features: int, out_features: int) -> nn.Linear:
        return nn.Linear(in_features, out_features, bias=False)

    def _make_buffers(self, num_experts: int) -> None:
        self.handle = operators.handle_for(self)
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        bias = None if self.bias_update_rate is None else torch.zeros(num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)

    def _apply(self, fn: Callable, *args: Any, **kwargs: Any) -> "MoE":
        # A bias in bfloat16 would lose its updates: they are small beside it. It follows to a device, not to a dtype.
        bias, had_memory = self.expert_bias, not self.tokens_per_expert.is_meta
        super()._apply(fn, *args, **kwargs)
        if bias is not None:
            moved: torch.Tensor = self.expert_bias
            self.expert_bias = bias.to(moved.device) if had_memory and not moved.is_meta else moved.float()
        if not had_memory and not self.tokens_per_expert.is_meta:  # to_empty(); no reset_parameters() fills these
            for buffer in self.buffers(recurse=False):
                buffer.zero_()
        return self
