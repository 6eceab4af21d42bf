"""The MindSpore side of checkpoint_cases."""

import mindspore as ms
from mindspore import Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel.platform.mindspore import state as room

__all__ = ["room", "model", "adamw", "step", "whole", "draw"]


class Model(nn.Cell):
    def __init__(self, dim, hidden, experts):
        super().__init__()
        self.first, self.norm, self.last = nn.Dense(dim, dim), nn.LayerNorm((dim,), epsilon=1e-5), nn.Dense(dim, dim)
        self.moe = hp.MoE(dim, hidden, experts, 2, num_shared_experts=1, bias_update_rate=0.1)

    def construct(self, x):
        return self.last(self.moe(self.norm(ops.tanh(self.first(x)))))


def model(dim, hidden, experts, dtype):
    assert dtype == "float32"
    return Model(dim, hidden, experts)


def adamw(module):
    return ms.experimental.optim.AdamW(module.trainable_params(), lr=0.01, weight_decay=0.02)


def step(module, optimizer, x, num_tokens, reduced):
    def loss(x):
        y = module(x)
        return y.square().sum() / num_tokens + y.sum() / num_tokens

    parameters = module.trainable_params()
    _, gradients = ms.value_and_grad(loss, None, parameters)(Tensor(x, ms.float32))
    optimizer(tuple(reduced(parameter, gradient) for parameter, gradient in zip(parameters, gradients)))


def whole(module):
    found = {}
    for path, cell in module.cells_and_names():
        for name, parameter in cell.parameters_and_names(expand=False):
            name = {"gamma": "weight", "beta": "bias"}.get(name, name)
            full = parameter.full_tensor() if hasattr(parameter, "placements") else parameter
            found[f"{path}.{name}"] = full.asnumpy().copy()
    del found["moe.tokens_per_expert"]
    return found


def draw(seed=None):
    if seed is not None:
        ms.manual_seed(seed)
    # No operator of the CPU backend draws from this generator, so its state stands for what it would give.
    numbers = ms.get_rng_state().asnumpy().tolist()
    ms.manual_seed(sum(numbers) + 1)
    return numbers
