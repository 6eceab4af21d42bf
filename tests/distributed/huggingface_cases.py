"""Cases over models of transformers: tiny ones of random weights, cut and on one device."""

import contextlib
import copy
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import hyper_parallel as hp
from tests.harness.oracle import relative_error
from tests.harness.setting import coordinates, mesh_for

EXPERTS = "model.layers.*.mlp.experts"
VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "attn_implementation": "eager",
}
FAMILIES = {
    "Mixtral": {"num_local_experts": 8, "router_aux_loss_coef": 0.5},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 4, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 8},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
    "GptOss": {"num_local_experts": 8, "head_dim": 4, "layer_types": ["full_attention"] * 2},
}


def make_model(family, dtype="float64"):
    """A model whose weights, biases too, are drawn: the same on every rank."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def batch_of(ep_rank):
    """Texts of this ep rank, [sequences, tokens]; every rank has another number of them."""
    generator = torch.Generator().manual_seed(100 + ep_rank)
    return torch.randint(VOCABULARY, (1 + ep_rank % 2, 9), generator=generator)


def cut(context, model, style, ep, tp):
    """``model``, its experts under the style."""
    style = getattr(hp, style)()
    return hp.parallelize_module(model, mesh_for(context, style, ep, tp), {EXPERTS: style})


def loss_of(model, tokens):
    """The model's own loss, with its auxiliary loss where it has one."""
    asked = {"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}
    return model(tokens, labels=tokens, use_cache=False, **asked)


def model_errors(context, family, style, ep, tp, dtype="float64", checkpointing=False, implementation=None):
    """Relative errors of this rank: logits, loss, auxiliary loss and all gradients of one step, against one device over
    the texts of all ep ranks."""
    one = make_model(family, dtype)
    model = cut(context, copy.deepcopy(one), style, ep, tp)
    if checkpointing:
        model.gradient_checkpointing_enable()
    ep_rank = coordinates(context, ep, tp)[0]
    expected = [loss_of(one, batch_of(rank)) for rank in range(ep)]
    sum(output.loss for output in expected).backward()
    with counted_implementation() if implementation else contextlib.nullcontext([]) as calls:
        if implementation:
            model.set_experts_implementation(implementation)
        found = loss_of(model, batch_of(ep_rank))
        found.loss.backward()
    pairs = {"logits": (found.logits, expected[ep_rank].logits), "loss": (found.loss, expected[ep_rank].loss)}
    if "router_aux_loss_coef" in FAMILIES[family]:
        pairs["auxiliary loss"] = found.aux_loss, expected[ep_rank].aux_loss
    pairs |= gradients(model, one, mesh_for(context, hp.ExpertTensorParallel(), ep, tp))
    return {name: relative_error(*(value.detach().numpy() for value in pair)) for name, pair in pairs.items()}, calls


@contextlib.contextmanager
def counted_implementation():
    """An implementation "counted" of experts, which is "grouped_mm"; yield the list of the sizes of its calls."""
    calls = []

    def counted(module, rows, *rest):
        calls.append(len(rows))
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, rows, *rest)

    with mock.patch.dict(ALL_EXPERTS_FUNCTIONS._global_mapping, counted=counted):
        yield calls


def gradients(model, one, mesh):
    """(found, expected) by name, in the shapes of one device."""
    pairs = {}
    for (name, cut_one), (expected_name, whole) in zip(model.named_parameters(), one.named_parameters()):
        assert name == expected_name
        if whole.grad is None:
            assert cut_one.grad is None, name
            continue
        found = cut_one.grad
        if isinstance(found, DTensor):
            found = found.full_tensor().reshape(whole.shape)
        else:
            dist.all_reduce(found, group=mesh.get_group("ep"))
        pairs[name] = found, whole.grad
    return pairs


def cut_as_it_lies(context, ep, tp):
    """The error of the logits where gate_up_proj is cut along 2H as it lies: gates on some ranks, ups on the others."""
    one = make_model("Mixtral")
    model = cut(context, copy.deepcopy(one), "ExpertTensorParallel", ep, tp)
    ep_rank, tp_rank = coordinates(context, ep, tp)
    for layer, whole in zip(model.model.layers, one.model.layers):
        local = layer.mlp.experts.gate_up_proj.to_local()
        part = whole.mlp.experts.gate_up_proj.detach().chunk(ep, 0)[ep_rank].chunk(tp, 1)[tp_rank]
        local.detach().copy_(part.reshape(local.shape))
    with torch.no_grad():
        logits = [m(batch_of(ep_rank)).logits.numpy() for m in (model, one)]
    return relative_error(*logits)


def state_dicts(context, folder):
    """What differs from one device in names, shapes or bits: in the cut model's state dict, in models that load it, by
    themselves or from a checkpoint of it, over other meshes and on one device."""
    wrong = []
    for family in ("Mixtral", "GptOss"):
        one = make_model(family, "float32")
        expected = one.state_dict()
        model = cut(context, copy.deepcopy(one), "ExpertTensorParallel", 2, 2)
        wrong += differing(f"{family}: its own", model.state_dict(), expected)
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/{family}")
        for ep, tp in ((4, 1), (1, 4), (2, 2)):
            other = cut(context, emptied(one), "ExpertTensorParallel", ep, tp)
            state = other.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{family}")
            other.load_state_dict(state)
            wrong += differing(f"{family}: from a checkpoint to {ep, tp}", other.state_dict(), expected)
        other = cut(context, emptied(one), "SplitExpertTensorParallel", 1, 4)
        other.load_state_dict(expected)
        wrong += differing(f"{family}: of whole tensors", other.state_dict(), expected)
        wrong += on_one_device(context, model, emptied(one), folder, family, expected)
    return wrong


def emptied(model):
    """A copy of other weights, on which ``state_dicts`` can see that something was loaded."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def on_one_device(context, model, single, folder, family, expected):
    """The cut model's checkpoint on one device without ranks, and its folder of transformers."""
    whole = {name: full(value) for name, value in model.state_dict().items()}
    if context.rank:
        return []
    state = single.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/{family}", no_dist=True)
    wrong = differing(f"{family}: from a checkpoint to one device", state, expected)
    model.save_pretrained(f"{folder}/{family}-saved", state_dict=whole)
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{family}-saved")
    return wrong + differing(f"{family}: through from_pretrained", again.state_dict(), expected)


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def differing(what, found, expected):
    """Names of the entries that differ."""
    if list(found) != list(expected):
        return [f"{what}: the names"]
    shapes = [name for name, value in expected.items() if found[name].shape != value.shape]
    return [
        f"{what}: {name}"
        for name, value in expected.items()
        if name in shapes or not torch.equal(full(found[name]), value)
    ]
