"""Adapters on the experts of models of transformers, against one device that adapts its weights as PEFT does."""

import copy
import json
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

import hyper_parallel as hp
from hyper_parallel import checkpoint, lora
from hyper_parallel.core.expert_parallel import lora as core
from tests.distributed.huggingface_cases import batch_of, cut, full, loss_of, make_model
from tests.harness.oracle import relative_error
from tests.harness.setting import coordinates, mesh_for

R, ALPHA, STEPS, MAX_NORM = 3, 6, 2, 0.5
TARGETS = ("gate_up_proj", "down_proj")
# Beside the adapters these learn: a router, and what is before the first layer.
LEARNING = ("embed_tokens.weight", "gate.weight", "router.weight")


class AsPeft(nn.Module):
    """``W + alpha / r * B A`` of peft.tuners.lora.layer.ParamWrapper: A [r * E, in], B [out, r * E]."""

    def __init__(self, weight, transposed, seed):
        super().__init__()
        num_experts, out, num_in = (weight.shape[i] for i in ((0, 2, 1) if transposed else (0, 1, 2)))
        draw = torch.Generator().manual_seed(seed)
        self.transposed, self.num_experts = transposed, num_experts
        a = torch.randn(R * num_experts, num_in, generator=draw, dtype=torch.float64) / num_in**0.5
        b = torch.randn(out, R * num_experts, generator=draw, dtype=torch.float64) / 4
        self.lora_A, self.lora_B = (nn.Parameter(value.to(weight.dtype)) for value in (a, b))

    def forward(self, weight):
        a = self.lora_A.reshape(self.num_experts, -1, self.lora_A.shape[-1])
        b = self.lora_B.reshape(self.lora_B.shape[0], -1, self.num_experts)
        equation = "o r e, e r i -> e i o" if self.transposed else "o r e, e r i -> e o i"
        return weight + torch.einsum(equation, b, a) * (ALPHA / R)


def experts_of(model):
    """(path, module) of the model's experts."""
    return [(path, mod) for path, mod in model.named_modules() if path.endswith(".experts")]


def adapt_as_peft(model, targets):
    """Adapters on the experts of one device. Returns A and B by PEFT's names."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    factors = {}
    for number, (path, mod) in enumerate(experts_of(model)):
        for i, name in enumerate(targets):
            weight, wrapped = getattr(mod, name), "base_layer." * (len(targets) - 1 - i)
            adapter = AsPeft(weight, getattr(mod, "is_transposed", False), 10 * number + i)
            parametrize.register_parametrization(mod, name, adapter)
            for kind in "AB":
                factors[f"base_model.model.{path}.{wrapped}lora_{kind}.weight"] = getattr(adapter, f"lora_{kind}")
    return factors


def let_learn(model):
    for name, parameter in model.named_parameters():
        if name.endswith(LEARNING):
            parameter.requires_grad = True


def write_as_peft(context, folder, factors, targets):
    """The folder that PEFT would write of these adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    if context.rank == 0:
        save_file(
            {name: value.detach().clone() for name, value in factors.items()}, folder / "adapter_model.safetensors"
        )
        config = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "target_modules": [], "lora_dropout": 0.0}
        config |= {"target_parameters": [f"experts.{name}" for name in targets], "bias": "none", "use_dora": False}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.distributed.barrier()


def in_pefts_form(model, path_of_factor, value):
    """A factor of the model, or its gradient, as PEFT has it."""
    value = full(value)
    if ".lora_A" in path_of_factor:
        return value.reshape(-1, value.shape[-1])
    value = value.reshape(value.shape[0], -1, value.shape[-1])
    return value.permute(1, 2, 0).reshape(value.shape[1], -1)


def factors_of(model, targets):
    """A and B of the cut model by PEFT's names."""
    found = {}
    for path, mod in experts_of(model):
        for i, name in enumerate(targets):
            wrapped = "base_layer." * (len(targets) - 1 - i)
            for kind in "AB":
                found[f"base_model.model.{path}.{wrapped}lora_{kind}.weight"] = getattr(mod, f"lora_{kind}_{name}")
    return found


def two_models(context, folder, family, style, ep, tp, dtype="float64", targets=TARGETS):
    """A cut model, which has read its adapters from a folder of PEFT's, one on one device, and its factors."""
    one = make_model(family, dtype)
    model = cut(context, copy.deepcopy(one), style, ep, tp)
    factors = adapt_as_peft(one, targets)
    write_as_peft(context, folder, factors, targets)
    names = lora.load_adapters(model, folder)
    assert names == [f"{path}.{name}" for path, _ in experts_of(model) for name in targets]
    for each in (model, one):
        let_learn(each)
    return model, one, factors


def trained(context, folder, family, style, ep, tp, dtype="float64", targets=TARGETS, broken=False):
    """Relative errors of this rank: logits, loss, norm, and all gradients of the first of two steps, the logits and all
    that learns after them."""
    model, one, factors = two_models(context, folder / f"{family}-{style}-{ep}", family, style, ep, tp, dtype, targets)
    mesh, ep_rank = mesh_for(context, hp.ExpertTensorParallel(), ep, tp), coordinates(context, ep, tp)[0]
    optimizers = [torch.optim.AdamW(hp.parameter_groups(model), lr=0.01, foreach=False), None]
    optimizers[1] = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.01)
    pairs = {}
    for step in range(STEPS):
        with mock.patch.object(core, "_complete_over_tp", (lambda _, w: w) if broken else core._complete_over_tp):
            found = loss_of(model, batch_of(ep_rank))
            found.loss.backward()
        expected = [loss_of(one, batch_of(rank)) for rank in range(ep)]
        sum(output.loss for output in expected).backward()
        hp.reduce_gradients(model.parameters(), mesh["ep"])
        if step == 0:
            pairs |= {"logits": (found.logits, expected[ep_rank].logits), "loss": (found.loss, expected[ep_rank].loss)}
            pairs |= {f"gradient of {name}": pair for name, pair in learning(model, one, factors, targets, "grad")}
        norms = hp.clip_grad_norm_(model.parameters(), MAX_NORM), nn.utils.clip_grad_norm_(one.parameters(), MAX_NORM)
        pairs[f"norm {step}"] = norms
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        pairs["logits after"] = model(batch_of(ep_rank)).logits, one(batch_of(ep_rank)).logits
    pairs |= dict(learning(model, one, factors, targets, "data"))
    return {name: relative_error(*(value.detach().numpy() for value in pair)) for name, pair in pairs.items()}


def learning(model, one, factors, targets, what):
    """(name, (found, expected)) of everything that learns; ``what`` is "grad" or "data"."""
    mine = factors_of(model, targets)
    assert mine.keys() == factors.keys()
    for name, expected in factors.items():
        found = in_pefts_form(model, name, getattr(mine[name], what))
        yield name, (found.clone(), getattr(expected, what).clone())  # clipping changes gradients in place
    others = dict(one.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            yield name, (getattr(parameter, what).clone(), getattr(others[name], what).clone())


def saved_and_merged(context, folder, family):
    """What differs where a cut model's adapters are saved, loaded over other meshes, checkpointed and merged."""
    model, one, factors = two_models(context, folder / family, family, "ExpertTensorParallel", 2, 2)
    lora.save_adapters(model, folder / f"{family}-saved")
    stored = load_file(folder / f"{family}-saved" / "adapter_model.safetensors")
    wrong = [name for name in factors if name not in stored or not torch.equal(stored[name], factors[name])]
    wrong += [name for name in stored if name not in factors]
    tokens = batch_of(coordinates(context, 2, 2)[0])
    with torch.no_grad():
        expected, before = one(tokens).logits, model(tokens).logits
    checkpoint.save(str(folder / f"{family}-checkpoint"), model)
    for ep, tp in ((4, 1), (1, 4)):
        by_folder, by_checkpoint = (cut(context, make_model(family), "ExpertTensorParallel", ep, tp) for _ in range(2))
        lora.load_adapters(by_folder, folder / f"{family}-saved")
        lora.add_adapters(by_checkpoint, R, ALPHA)
        checkpoint.load(str(folder / f"{family}-checkpoint"), by_checkpoint)
        for what, other in (("folder", by_folder), ("checkpoint", by_checkpoint)):
            mine = factors_of(other, TARGETS)
            wrong += [
                f"{what} to {ep, tp}: {name}"
                for name, factor in factors.items()
                if not torch.equal(in_pefts_form(other, name, mine[name]), factor)
            ]
    lora.merge_adapters(model)
    state, whole = model.state_dict(), make_model(family).state_dict()
    wrong += ["names"] * (list(state) != list(whole)) + ["shapes"] * any(
        state[n].shape != whole[n].shape for n in whole
    )
    sums = {f"{path}.{name}": getattr(mod, name) for path, mod in experts_of(one) for name in TARGETS}
    errors = {name: relative_error(full(state[name]), value.detach()) for name, value in sums.items()}
    with torch.no_grad():
        merged, base = model(tokens).logits, make_model(family)(tokens).logits
    wrong += ["the adapters do nothing"] * (relative_error(base, expected) < 0.1)
    errors["adapted"], errors["merged"] = (relative_error(logits, expected) for logits in (before, merged))
    return wrong, errors


def with_peft(context, folder, family):
    """Errors of logits where PEFT reads what a cut model saved, and a cut model what PEFT saved."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model, one, _ = two_models(context, folder / family, family, "ExpertTensorParallel", 2, 2)
    lora.save_adapters(model, folder / "ours")
    tokens = batch_of(coordinates(context, 2, 2)[0])
    read = PeftModel.from_pretrained(make_model(family), folder / "ours")
    with torch.no_grad():
        errors = {"read by PEFT": relative_error(read(tokens).logits, model(tokens).logits)}
        errors["and one device"] = relative_error(read(tokens).logits, one(tokens).logits)

    targets = [f"experts.{name}" for name in TARGETS]
    config = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=[], target_parameters=targets, init_lora_weights=False)
    torch.manual_seed(1)
    written = get_peft_model(make_model(family), config)
    if context.rank == 0:
        written.save_pretrained(folder / "pefts")
    torch.distributed.barrier()
    again = cut(context, make_model(family), "ExpertTensorParallel", 2, 2)
    lora.load_adapters(again, folder / "pefts")
    with torch.no_grad():
        base = make_model(family)(tokens).logits
        errors["written by PEFT"] = relative_error(again(tokens).logits, written(tokens).logits)
    assert relative_error(base, written(tokens).logits.detach()) > 0.1
    return errors
