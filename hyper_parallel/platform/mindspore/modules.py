"""The public modules for MindSpore: parameters, buffers, and ``construct``. The rest is in ``core.expert_parallel``."""

import math

import mindspore as ms
from mindspore import Parameter, mint, nn
from mindspore.common.initializer import Uniform, initializer

from hyper_parallel.core.expert_parallel.modules import FeedForwardBase, GroupedExpertsBase, MoEBase, RouterBase
from hyper_parallel.platform.mindspore import PLATFORM, amp, experts
from hyper_parallel.platform.mindspore.sharding import pynative_only

__all__ = ["FeedForward", "GroupedExperts", "MoE", "TokenChoiceTopKRouter"]


class _Linear(nn.Dense):
    """A linear layer without bias that takes no rows too: MindSpore's CPU product over none returns leftovers."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, has_bias=False)

    def construct(self, x):
        if 0 in x.shape:
            return experts.LinearOfNoRows.apply(x, self.weight)
        return super().construct(x)


class GroupedExperts(GroupedExpertsBase, nn.Cell):
    __doc__ = GroupedExpertsBase.__doc__
    platform = PLATFORM

    def construct(self, x, num_tokens_per_expert, scores=None):
        pynative_only()
        return amp.experts(self, x, num_tokens_per_expert, scores)

    construct.__doc__ = GroupedExpertsBase.run.__doc__

    def _weight(self, name, num_experts, out_features, in_features):
        bound = 1 / math.sqrt(in_features)
        shape = (num_experts, out_features, in_features)
        return Parameter(initializer(Uniform(bound), shape, ms.float32), name=name)


class FeedForward(FeedForwardBase, nn.Cell):
    __doc__ = FeedForwardBase.__doc__
    platform = PLATFORM

    def construct(self, x):
        pynative_only()
        return self.run(x)

    construct.__doc__ = FeedForwardBase.run.__doc__

    def _linear(self, in_features, out_features):
        return _Linear(in_features, out_features)


class TokenChoiceTopKRouter(RouterBase, nn.Cell):
    __doc__ = RouterBase.__doc__
    platform = PLATFORM

    def construct(self, x, expert_bias=None):
        pynative_only()
        return self.run(x, expert_bias)

    construct.__doc__ = RouterBase.run.__doc__

    def _linear(self, in_features, out_features):
        return _Linear(in_features, out_features)


class MoE(MoEBase, nn.Cell):
    __doc__ = MoEBase.__doc__
    platform = PLATFORM
    router_class, experts_class, feed_forward_class = TokenChoiceTopKRouter, GroupedExperts, FeedForward

    def construct(self, x):
        pynative_only()
        return self.run(x)

    construct.__doc__ = MoEBase.run.__doc__

    def _make_buffers(self, num_experts):
        self.tokens_per_expert = _buffer("tokens_per_expert", num_experts, ms.int64)
        self.expert_bias = None if self.bias_update_rate is None else _buffer("expert_bias", num_experts, ms.float32)


def _buffer(name, size, dtype):
    return Parameter(mint.zeros((size,), dtype=dtype), name=name, requires_grad=False)
