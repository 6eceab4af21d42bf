"""The public modules for MindSpore: parameters, buffers, and ``construct``. The rest is in ``core.expert_parallel``."""

import math
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common.initializer import Uniform, initializer

from hyper_parallel.core.expert_parallel.modules import FeedForwardBase, GroupedExpertsBase, MoEBase, RouterBase
from hyper_parallel.platform.mindspore import PLATFORM, amp, experts
from hyper_parallel.platform.mindspore.sharding import pynative_only

__all__ = ["FeedForward", "GroupedExperts", "MoE", "TokenChoiceTopKRouter"]


class _Linear(nn.Dense):
    """A linear layer without bias that takes no rows too: MindSpore's CPU product over none returns leftovers."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        if 0 in x.shape:
            return experts.LinearOfNoRows.apply(x, self.weight)
        return super().construct(x)


class GroupedExperts(GroupedExpertsBase, nn.Cell):
    """All experts of a MoE layer in three stacked weights, as a ``mindspore.nn.Cell``; see ``GroupedExpertsBase``."""

    platform = PLATFORM

    def construct(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        pynative_only()
        return amp.experts(self, x, num_tokens_per_expert, scores)

    construct.__doc__ = GroupedExpertsBase.run.__doc__

    def _weight(self, name: str, num_experts: int, out_features: int, in_features: int) -> Parameter:
        bound = 1 / math.sqrt(in_features)
        shape = (num_experts, out_features, in_features)
        return Parameter(initializer(Uniform(bound), shape, ms.float32), name=name)


class FeedForward(FeedForwardBase, nn.Cell):
    """Dense SwiGLU, as a ``mindspore.nn.Cell``; see ``FeedForwardBase``."""

    platform = PLATFORM

    def construct(self, x: Tensor) -> Tensor:
        pynative_only()
        return self.run(x)

    construct.__doc__ = FeedForwardBase.run.__doc__

    def _linear(self, in_features: int, out_features: int) -> _Linear:
        return _Linear(in_features, out_features)


class TokenChoiceTopKRouter(RouterBase, nn.Cell):
    """The router of a MoE layer, as a ``mindspore.nn.Cell``; see ``RouterBase``."""

    platform = PLATFORM

    def construct(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pynative_only()
        return self.run(x, expert_bias)

    construct.__doc__ = RouterBase.run.__doc__

    def _linear(self, in_features: int, out_features: int) -> _Linear:
        return _Linear(in_features, out_features)


class MoE(MoEBase, nn.Cell):
    """A Mixture-of-Experts layer, as a ``mindspore.nn.Cell``; see ``MoEBase``."""

    platform = PLATFORM
    router_class, experts_class, feed_forward_class = TokenChoiceTopKRouter, GroupedExperts, FeedForward

    def construct(self, x: Tensor) -> Tensor:
        pynative_only()
        return self.run(x)

    construct.__doc__ = MoEBase.run.__doc__

    # Mixed precision of level O1 copies this class to a file of its own, where signatures must not need `_Linear`.
    def _linear(self, in_features: int, out_features: int) -> nn.Dense:
        return _Linear(in_features, out_features)

    def _make_buffers(self, num_experts: int) -> None:
        self.tokens_per_expert = _buffer("tokens_per_expert", num_experts, ms.int64)
        self.expert_bias = None if self.bias_update_rate is None else _buffer("expert_bias", num_experts, ms.float32)


def _buffer(name: str, size: int, dtype: Any) -> Parameter:
    return Parameter(mint.zeros((size,), dtype=dtype), name=name, requires_grad=False)
