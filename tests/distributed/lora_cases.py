"""Adapters on GroupedExperts, on every platform: against one device whose weights are ``W + alpha / r * B A``."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np

import hyper_parallel as hp
from hyper_parallel import lora
from hyper_parallel.core.expert_parallel import lora as core
from hyper_parallel.platform import get_platform
from tests.distributed.refusal_cases import message_of
from tests.distributed.variant_cases import evaluate, make_layer, sum_over_ep, tokens_for
from tests.harness import oracle, parity
from tests.harness.setting import coordinates, make_experts, mesh_for

R, ALPHA = 3, 6.0
WEIGHTS = ("w1", "w2", "w3")


def drawn(problem, targets=WEIGHTS):
    """A [E, r, in] and B [E, out, r] of each weight, as large as the weights."""
    random = np.random.default_rng(7)
    factors = {}
    for name in targets:
        num_experts, out, num_in = getattr(problem, name).shape
        a = random.standard_normal((num_experts, R, num_in)) / np.sqrt(num_in)
        factors[name] = a.astype(np.float32), (random.standard_normal((num_experts, out, R)) / 2).astype(np.float32)
    return factors


def part_of(parameter, whole):
    """What this rank holds of a whole array that lies as the parameter does."""
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            mesh = parameter.device_mesh
            whole = np.split(whole, mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    return whole


def adapted(context, problem, style, ep, tp, targets=WEIGHTS, own_forward=False):
    """Experts under the style with these factors."""
    experts = make_experts(context, problem)
    if own_forward:
        experts.__class__ = type("Own", (type(experts),), {"forward": lambda self, *inputs: self.run(*inputs)})
    style = getattr(hp, style)()
    style.apply(experts, mesh_for(context, style, ep, tp))
    assert lora.add_adapters(experts, R, ALPHA, None if targets == WEIGHTS else targets) == list(targets)
    fill(context, experts, drawn(problem, targets))
    return experts


def fill(context, experts, factors):
    laid_out, local = get_platform(experts).parameters(experts), context.framework.parameters(experts)
    for name, pair in factors.items():
        for kind, whole in zip("AB", pair):
            key = f"lora_{kind}_{name}"
            context.framework.fill(local[key], part_of(laid_out[key], whole))


def expected_gradients(factors, of_weights, pattern):
    """Of A and B, from those of ``W + alpha / r * B A``."""
    found = {}
    for name, (a, b) in factors.items():
        gradient = ALPHA / R * of_weights[pattern.format(name)]
        found[f"lora_A_{name}"], found[f"lora_B_{name}"] = b.swapaxes(1, 2) @ gradient, gradient @ a.swapaxes(1, 2)
    return found


def errors(context, style, ep, tp, problem, targets=WEIGHTS, own_forward=False, broken=False):
    """Relative errors of this rank: output, inputs' and factors' gradients, and the output once more when merged."""
    experts = adapted(context, problem, style, ep, tp, targets, own_forward)
    laid_out = get_platform(experts).parameters(experts)
    ep_rank = coordinates(context, ep, tp)[0]
    with mock.patch.object(core, "_complete_over_tp", (lambda _, whole: whole) if broken else core._complete_over_tp):
        found = parity.evaluate(context, experts, problem, ep_rank)

    factors = drawn(problem, targets)
    whole = {name: getattr(problem, name) + ALPHA / R * b.astype(float) @ a for name, (a, b) in factors.items()}
    expected = oracle.one_device(replace(problem, **whole))
    pairs = {
        "output": (found.output, expected.outputs[ep_rank]),
        "x": (found.input_gradients[0], expected.x_gradients[ep_rank]),
        "scores": (found.input_gradients[1], expected.score_gradients[ep_rank]),
    }
    assert set(found.parameter_gradients) == {f"lora_{kind}_{name}" for name in targets for kind in "AB"}
    for key, value in expected_gradients(factors, vars(expected), "{}_gradient").items():
        pairs[key] = found.parameter_gradients[key], part_of(laid_out[key], value)

    merged, adapter = copy.deepcopy(experts), context.framework
    assert lora.merge_adapters(merged) == list(targets)
    assert list(get_platform(merged).parameters(merged)) == list(WEIGHTS)
    inputs = (adapter.tensor(problem.x[ep_rank]), adapter.int_tensor(problem.counts[ep_rank]))
    for name, module in {"merged": merged, "the original": experts}.items():
        y = module(*inputs, adapter.tensor(problem.scores[ep_rank]))
        pairs[name] = adapter.array(y), expected.outputs[ep_rank]
    return {name: oracle.relative_error(*pair) for name, pair in pairs.items()}


def of_layer(context, style, ep, tp, num_tokens=(16, 9)):
    """Relative errors of this rank in a MoE layer whose router learns too: output and all gradients."""
    one = make_layer(context, 2)
    layer, gate = copy.deepcopy(one), "router.gate.weight"
    style = getattr(hp, style)()
    mesh = mesh_for(context, style, ep, tp)
    hp.parallelize_module(layer, mesh, {"experts": style})
    assert lora.add_adapters(layer, R, ALPHA) == [f"experts.{name}" for name in WEIGHTS]
    context.framework.parameters(layer)[gate].requires_grad = True
    weights = {name: context.framework.array(getattr(one.experts, name)).astype(float) for name in WEIGHTS}
    factors = drawn(SimpleNamespace(**weights))
    fill(context, layer.experts, factors)
    for name, (a, b) in factors.items():
        context.framework.set_parameter(one, f"experts.{name}", weights[name] + ALPHA / R * b.astype(float) @ a)

    ep_rank = coordinates(context, ep, tp)[0]
    batches = [tokens_for(rank, num_tokens[rank % len(num_tokens)]) for rank in range(ep)]
    found, whole = evaluate(context, layer, batches[ep_rank]), evaluate(context, one, np.concatenate(batches))
    start = sum(map(len, batches[:ep_rank]))
    mine = slice(start, start + len(batches[ep_rank]))
    pairs = {
        "output": (found.output, whole.output[mine]),
        "x": (found.input_gradients[0], whole.input_gradients[0][mine]),
        gate: (sum_over_ep(context, found.parameter_gradients.pop(gate), mesh), whole.parameter_gradients[gate]),
    }
    laid_out = get_platform(layer).parameters(layer.experts)
    assert len(found.parameter_gradients) == 6
    for key, value in expected_gradients(factors, whole.parameter_gradients, "experts.{}").items():
        pairs[key] = found.parameter_gradients[f"experts.{key}"], part_of(laid_out[key], value)
    return {name: oracle.relative_error(*pair) for name, pair in pairs.items()}


def refusals(context, problem):
    """What is refused, by name, with modules that stay as they were."""
    found, style = {}, hp.ExpertTensorParallel()
    mesh = mesh_for(context, style, 2, 2)

    def refused(name, module, function):
        before = list(get_platform(module).parameters(module))
        found[name] = message_of(function)
        assert list(get_platform(module).parameters(module)) == before, name

    plain = make_experts(context, problem)
    refused("no style", plain, lambda: lora.add_adapters(plain, R, ALPHA))
    refused("nothing to merge", plain, lambda: lora.merge_adapters(plain))
    refused("nothing to save", plain, lambda: lora.save_adapters(plain, "nowhere"))
    experts = style.apply(make_experts(context, problem), mesh)
    for r in (0, -1, 2.0, True):
        refused(f"r {r}", experts, lambda r=r: lora.add_adapters(experts, r, ALPHA))
    refused("alpha", experts, lambda: lora.add_adapters(experts, R, float("nan")))
    refused("target", experts, lambda: lora.add_adapters(experts, R, ALPHA, ["w1", "gate_up_proj"]))
    refused("no target", experts, lambda: lora.add_adapters(experts, R, ALPHA, []))
    assert all(p.requires_grad for p in get_platform(experts).parameters(experts).values())
    refused("no folder", experts, lambda: lora.load_adapters(experts, "nowhere"))
    one = int(context.rank == 1)
    refused("r of one rank", experts, lambda: lora.add_adapters(experts, R + one, ALPHA))
    refused("alpha of one rank", experts, lambda: lora.add_adapters(experts, R, ALPHA + one))
    refused("weights of one rank", experts, lambda: lora.add_adapters(experts, R, ALPHA, ["w1", "w2"][: 2 - one]))
    lora.add_adapters(experts, R, ALPHA)
    refused("twice", experts, lambda: lora.add_adapters(experts, R, ALPHA))
    refused("style afterwards", experts, lambda: style.apply(experts, mesh))
    return found


def folders(context, problem, folder):
    """What differs where adapters are saved on (2, 2) and loaded over other meshes, and what is refused."""
    experts, factors = adapted(context, problem, "ExpertTensorParallel", 2, 2), drawn(problem)
    lora.save_adapters(experts, folder)
    lora.save_adapters(experts, str(folder))  # takes the place of the first
    assert lora.load_adapters(experts, folder) == list(WEIGHTS)  # values alone
    wrong, found = [], {}
    for ep, tp in ((4, 1), (1, 4)):
        other = under_style(context, problem, ep, tp)
        lora.load_adapters(other, folder)
        laid_out, local = get_platform(other).parameters(other), context.framework.parameters(other)
        for name, pair in factors.items():
            for kind, whole in zip("AB", pair):
                key = f"lora_{kind}_{name}"
                if not np.array_equal(context.framework.array(local[key]), part_of(laid_out[key], whole)):
                    wrong.append(f"{key} on {ep, tp}")
        assert not laid_out["w1"].requires_grad and laid_out["lora_A_w1"].requires_grad

    def refused(name, function, into):
        before = list(get_platform(into).parameters(into))
        found[name] = message_of(function)
        assert list(get_platform(into).parameters(into)) == before, name

    other = under_style(context, problem, 2, 2)
    narrow = under_style(context, replace(problem, **{n: getattr(problem, n)[:2] for n in WEIGHTS}), 2, 2)
    refused("other sizes", lambda: lora.load_adapters(narrow, folder), narrow)
    for name, change in {
        "fields": {"use_dora": True, "lora_dropout": 0.1, "target_modules": ["q_proj"], "bias": "all"},
        "other kind": {"peft_type": "IA3", "target_parameters": []},
        "fewer weights": {"target_parameters": ["w1"]},
    }.items():
        if context.rank == 0:
            (folder / name).mkdir()
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / name / "adapter_config.json").write_text(json.dumps(config | change))
            (folder / name / "adapter_model.safetensors").symlink_to(folder / "adapter_model.safetensors")
        hp.synchronize_parameters(other, mesh_for(context, hp.ExpertTensorParallel(), 2, 2))  # rank 0 has written
        refused(name, lambda name=name: lora.load_adapters(other, folder / name), other)
    lora.add_adapters(other, R - 1, ALPHA)
    refused("other rank", lambda: lora.load_adapters(other, folder), other)
    return wrong, found


def under_style(context, problem, ep, tp):
    style = hp.ExpertTensorParallel()
    return style.apply(make_experts(context, problem), mesh_for(context, style, ep, tp))


def recomputed(context, problem):
    """MindSpore, whose recomputed cells keep a list of their parameters: gradients as without recomputation where
    the experts, or a cell around them, were recomputed before they got adapters."""
    found = []
    for recomputes in ("nothing", "experts", "around"):
        experts = under_style(context, problem, 2, 2)
        around = around_cell(experts)
        if recomputes != "nothing":
            {"experts": experts, "around": around}[recomputes].recompute()
        lora.add_adapters(experts, R, ALPHA)
        fill(context, experts, drawn(problem))
        evaluation = parity.evaluate(context, around, problem, coordinates(context, 2, 2)[0])
        found.append([evaluation.output, *evaluation.input_gradients, *evaluation.parameter_gradients.values()])
    return [all(map(np.array_equal, found[0], other)) and len(other) == 9 for other in found[1:]]


def around_cell(experts):
    from mindspore import nn

    class Around(nn.Cell):
        def __init__(self):
            super().__init__()
            self.experts = experts

        def construct(self, *inputs):
            return self.experts(*inputs)

    return Around()
