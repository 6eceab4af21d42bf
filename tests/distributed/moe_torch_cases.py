"""Cases for what only torch has around a MoE layer: dtypes, meta device, compile; and copies to the host."""

import copy
import sys
from contextlib import contextmanager
from unittest import mock

import torch

import hyper_parallel as hp
from tests.distributed.moe_cases import evaluate, load, make_moe, parallel_moe
from tests.harness.setting import coordinates, get_platform_class, mesh_for


def host_copies(context, problem, ep, tp):
    """What forward and backward read from tensors, on a device that knows only what the host itself made: the module
    that reads, the way, and the number of values."""
    moe, platform, forward = parallel_moe(context, problem, ep, tp), get_platform_class("torch"), []
    adapter = context.framework
    x = adapter.tensor(problem.x[coordinates(context, ep, tp)[0]]).requires_grad_()
    made_by_host = {"on_host": lambda self, tensor: hasattr(tensor, "_hyper_parallel_host_values")}
    with mock.patch.multiple(platform, **made_by_host), reads_recorded() as reads:
        y = moe(x)
        forward.extend(reads)
        y.sum().backward()
    return forward, reads[len(forward) :]


@contextmanager
def reads_recorded():
    """Yield the growing list of the library's reads of a tensor's values by the host."""
    reads = []

    def recording(method):
        original = getattr(torch.Tensor, method)

        def call(self, *args, **kwargs):
            module = sys._getframe(1).f_globals["__name__"]
            if module.startswith("hyper_parallel."):
                reads.append((module.rpartition(".")[2], method, self.numel()))
            return original(self, *args, **kwargs)

        return call

    methods = ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero")
    with mock.patch.multiple(torch.Tensor, **{method: recording(method) for method in methods}):
        yield reads


def in_bfloat16(context, problems, ep, tp, shared):
    """Output and gradients of the sharded layer and of one rank, both in bfloat16, for every problem."""
    return [
        [
            _in_bfloat16(context, moe, problem)
            for moe in (
                parallel_moe(context, problem, ep, tp, shared, dtype="bfloat16"),
                make_moe(context, problem, "bfloat16"),
            )
        ]
        for problem in problems
    ]


def _in_bfloat16(context, moe, problem):
    x = context.framework.tensor(problem.x[0], "bfloat16").requires_grad_()
    y = moe(x)
    context.framework.loss(y.double(), context.framework.tensor(problem.targets[0])).backward()
    gradients = {name: _whole(parameter.grad) for name, parameter in moe.named_parameters()}
    found = {"output": y.detach(), "x": x.grad, **gradients}
    return {name: value.double().numpy() for name, value in found.items()}


def _whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def dtypes_of_bias(context, problem):
    """After conversions, copies and a round trip: dtypes of expert bias, counter and gate, and the bias itself."""

    def converted(convert):
        model = torch.nn.Sequential(make_moe(context, problem, "float32"))
        return convert(model)[0]

    def loaded(model):
        other = torch.nn.Sequential(make_moe(context, problem, "float32")).bfloat16()
        other[0].expert_bias.zero_()
        other.load_state_dict(model.bfloat16().state_dict())
        return other

    conversions = {
        "bfloat16": lambda model: model.bfloat16(),
        "to": lambda model: model.to(torch.bfloat16),
        "to device and dtype": lambda model: model.to("cpu", torch.float16),
        "double": lambda model: model.double(),
        "there and back": lambda model: model.bfloat16().float(),
        "copy": lambda model: copy.deepcopy(model.bfloat16()),
        "loaded": loaded,
    }
    found = {}
    for name, convert in conversions.items():
        moe = converted(convert)
        names = sorted(name for name in moe.state_dict() if "." not in name)
        dtypes = [str(tensor.dtype) for tensor in (moe.expert_bias, moe.tokens_per_expert, moe.router.gate.weight)]
        found[name] = dtypes, names, context.framework.array(moe.expert_bias)
    return found


def from_meta(context, problem):
    """Built without memory and materialised on memory that held something: bias and counter, and their dtypes."""
    with torch.device("meta"):
        moe = hp.MoE(6, 8, 8, 2, bias_update_rate=0.1)
    style = hp.ExpertTensorParallel()
    style.apply(moe.experts, mesh_for(context, style, 2, 2))
    with mock.patch.object(torch, "empty_like", lambda x, **keywords: torch.full_like(x, 7, **keywords)):
        moe.to_empty(device="cpu")
    return [(str(t.dtype), t.tolist()) for t in (moe.expert_bias, moe.tokens_per_expert)]


def compiled(context, problem, ep, tp):
    """The layer compiled and not, on two routings: evaluations and counters."""
    ep_rank, _ = coordinates(context, ep, tp)
    results = []
    plain = parallel_moe(context, problem, ep, tp)
    fast = parallel_moe(context, problem, ep, tp)
    run = torch.compile(fast, backend="eager", fullgraph=False)
    other = dict(vars(problem), x=problem.x[::-1])
    for experiment in (problem, type(problem)(**other)):
        pair = [evaluate(context, module, experiment, ep_rank) for module in (plain, run)]
        results.append((*pair, load(context, plain), load(context, fast)))
    return results
