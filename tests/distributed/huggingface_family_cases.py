"""Cases over every module of the installed transformers that holds packed experts, by itself."""

import copy
import importlib
import inspect

import torch
from torch.distributed.tensor import DTensor

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.harness.oracle import relative_error
from tests.harness.setting import coordinates, mesh_for

E, H, D, K = 4, 6, 10, 2
# What configurations call these sizes; of all else the family's own default is taken.
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), H),
    "hidden_size": D,
}


class TinyConfig:
    """A configuration of these sizes, its other fields those of the first of the ``defaults`` that has them."""

    _experts_implementation = "eager"

    def __init__(self, defaults):
        self.defaults = defaults

    def __getattr__(self, name):
        if name in SIZES:
            return SIZES[name]
        found = [getattr(config, name) for config in vars(self).get("defaults", ()) if hasattr(config, name)]
        if not found:
            raise AttributeError(name)
        return next((value for value in found if value is not None), None)


def make_experts(family, module, name):
    """The family's own experts module, tiny, of random weights."""
    package = f"transformers.models.{family}"
    experts = getattr(importlib.import_module(f"{package}.{module}"), name)
    configs = importlib.import_module(f"{package}.{module.replace('modeling_', 'configuration_')}")
    defaults = [value for value in vars(configs).values() if inspect.isclass(value) and hasattr(value, "model_type")]
    # That of the text comes first: others may have an activation of their own.
    defaults.sort(key=lambda config: "Text" not in config.__name__)
    torch.manual_seed(0)
    made = experts(TinyConfig(defaults)).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def inputs_of(ep_rank):
    """Tokens of this ep rank, unevenly routed: the last expert gets none of any rank, the first one is chosen often."""
    generator = torch.Generator().manual_seed(ep_rank)
    tokens = 7 - 2 * ep_rank
    x = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(tokens)])
    ids[::2] = torch.tensor([0, 1 + ep_rank])
    scores = 0.5 + torch.rand(tokens, K, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), ids, scores.requires_grad_()


def family_errors(context, families):
    """For each (family, module, class): the words of its refusal, or whether the library's SwiGLU computes, and relative
    errors on (2, 2) against one device."""
    found = []
    for family, module, name in families:
        one = make_experts(family, module, name)
        cut, style = copy.deepcopy(one), hp.ExpertTensorParallel()
        try:
            style.apply(cut, mesh_for(context, style, 2, 2))
        except ValueError as error:
            found.append(str(error))
        else:
            is_swiglu = get_platform(cut).sharded(cut).shapes.swiglu
            found.append((is_swiglu, _errors(one, cut, coordinates(context, 2, 2)[0])))
    return found


def _errors(one, cut, ep_rank):
    whole = [inputs_of(rank) for rank in range(2)]
    outputs = [one(*inputs) for inputs in whole]
    sum(output.square().sum() for output in outputs).backward()
    inputs = inputs_of(ep_rank)
    output = cut(*inputs)
    output.square().sum().backward()
    pairs = {"output": (output, outputs[ep_rank])}
    pairs |= {what: (inputs[i].grad, whole[ep_rank][i].grad) for i, what in ((0, "x"), (2, "scores"))}
    for (name, parameter), (_, expected) in zip(cut.named_parameters(), one.named_parameters()):
        assert isinstance(parameter, DTensor)
        pairs[name] = parameter.grad.full_tensor().reshape(expected.shape), expected.grad
    return {name: relative_error(*(value.detach().numpy() for value in pair)) for name, pair in pairs.items()}
