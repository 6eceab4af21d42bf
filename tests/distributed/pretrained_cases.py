"""Cases over Hugging Face folders: models of transformers read from them and written to them, slice by slice."""

import contextlib
import copy
import ctypes
import json
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hyper_parallel as hp
from hyper_parallel import huggingface
from hyper_parallel.checkpoint import CheckpointError
from hyper_parallel.checkpoint.loading import read_value
from hyper_parallel.platform.torch import pretrained
from tests.distributed.huggingface_cases import COMMON, EXPERTS, VOCABULARY, batch_of, cut, differing, full, make_model
from tests.harness.oracle import relative_error
from tests.harness.setting import coordinates, whole_mesh

SMALL_FILES = 16_000


def on_meta(config, dtype=None):
    """A model of this configuration without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def folder_of(context, model, folder, **how):
    """``folder``, to which rank 0 lets transformers write the model, in several files."""
    if context.rank == 0:
        model.save_pretrained(folder, **{"max_shard_size": "20KB", **how})
    dist.barrier()
    return Path(folder)


def names_in(folder):
    return sorted(json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"])


def equals_transformers(context, model, one, tokens):
    """The relative error of the logits, after bits of weights and buffers were compared; ``one`` is whole."""
    wrong = differing("weights", model.state_dict(), one.state_dict())
    wrong += differing("buffers", dict(model.named_buffers()), dict(one.named_buffers()))
    with torch.no_grad():
        logits = [m.eval()(tokens).logits.numpy() for m in (model, one)]
    return wrong, relative_error(*logits)


def round_trip(context, folder, family, style, ep, tp, per_expert):
    """Into a model on meta that is cut, and back: what differs from transformers' own reading, the logits' error, the
    names in both folders."""
    theirs = folder_of(context, make_model(family, "float32"), f"{folder}/theirs", save_original_format=per_expert)
    one = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    model = cut(context, on_meta(one.config, torch.float32), style, ep, tp)
    huggingface.load_pretrained(model, theirs)
    wrong, error = equals_transformers(context, model, one, batch_of(coordinates(context, ep, tp)[0]))
    huggingface.save_pretrained(model, f"{folder}/ours", max_file_bytes=SMALL_FILES)
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/ours")
    wrong += differing("saved", again.state_dict(), one.state_dict())
    configs = [json.loads((Path(folder) / which / "config.json").read_text()) for which in ("theirs", "ours")]
    wrong += ["config.json"] * (configs[0] != configs[1])
    return wrong, error, names_in(theirs), names_in(f"{folder}/ours")


def gate_for_up(context, folder):
    """The logits' error where gate and up are taken for each other: what ``round_trip`` must be able to see."""
    theirs = folder_of(context, make_model("Mixtral", "float32"), f"{folder}/theirs")
    one = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    model = cut(context, on_meta(one.config, torch.float32), "ExpertTensorParallel", 2, 2)
    concatenate = pretrained.concatenate
    with mock.patch.object(pretrained, "concatenate", lambda parts, dim: concatenate(parts[::-1], dim)):
        huggingface.load_pretrained(model, theirs)
    return equals_transformers(context, model, one, batch_of(coordinates(context, 2, 2)[0]))


def sharded(context, model, shape):
    """``model``: experts under ETP and FSDP2, all else under FSDP2, on a mesh (dp, ep, tp)."""
    _, ep, tp = shape
    mesh = whole_mesh(context.platform, context.world_size, ep, tp)
    hp.parallelize_module(model, mesh["ep", "tp"], {EXPERTS: hp.ExpertTensorParallel()})
    everyone = mesh["dp", "ep"]._flatten("everyone")
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model


def fsdp(context, folder):
    """What differs in models under FSDP2, dense weights of uneven parts and tied ones among them, read on one mesh and
    written, and read on another; and the error of the logits."""
    torch.manual_seed(0)
    tied = {"num_local_experts": 8, "tie_word_embeddings": True, "vocab_size": VOCABULARY - 3}
    config = transformers.MixtralConfig(**COMMON | tied, use_cache=False)
    one = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder_of(context, one, f"{folder}/0")
    wrong, errors = [], []
    for number, shape in enumerate(((2, 2, 1), (2, 1, 2), (1, 2, 2))):
        model = sharded(context, on_meta(config, torch.float32), shape)
        huggingface.load_pretrained(model, f"{folder}/{number}")
        whole = {name: full(value) for name, value in model.state_dict().items()}
        wrong += differing(f"on {shape}", whole, one.state_dict())
        wrong += ["the tie"] * (model.lm_head.weight is not model.model.embed_tokens.weight)
        huggingface.save_pretrained(model, f"{folder}/{number + 1}", max_file_bytes=SMALL_FILES)
        again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{number + 1}")
        wrong += differing(f"saved on {shape}", again.state_dict(), one.state_dict())
        with torch.no_grad():
            tokens = batch_of(0) % config.vocab_size
            errors.append(relative_error(*(m.eval()(tokens).logits.numpy() for m in (model, one))))
    return wrong, errors, str(model.model.layers[0].mlp.experts.gate_up_proj.placements)


def any_placements(context, folder):
    """What differs in dense weights that lie over a mesh in other ways, one rank without any part among them."""
    one = make_model("Qwen3Moe", "float32")
    theirs = folder_of(context, one, f"{folder}/0")
    mesh = whole_mesh(context.platform, context.world_size, 2, 2)["ep", "tp"]
    model = on_meta(one.config, torch.float32)
    layouts = {
        "model.embed_tokens": (Shard(0), Shard(1)),
        "lm_head": (Shard(1), Shard(1)),
        "model.norm": (Replicate(), Shard(0)),
        "model.layers.0.self_attn.q_norm": (Shard(0), Shard(0)),  # 4 numbers
        "model.layers.1.self_attn.q_proj": (Replicate(), Replicate()),
    }
    for path, placements in layouts.items():
        module = model.get_submodule(path)
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    flat = whole_mesh(context.platform, context.world_size, 1, 4)["tp"]
    gate = model.model.layers[0].mlp.gate
    gate.weight = torch.nn.Parameter(distribute_tensor(gate.weight.detach()[:5], flat, [Shard(0)]))  # 2, 2, 1 and 0
    try:
        huggingface.load_pretrained(model, theirs)
    except CheckpointError as error:
        misshaped = str(error)
    fitting = on_meta(one.config, torch.float32).model.layers[0].mlp.gate.weight.detach()
    gate.weight = torch.nn.Parameter(distribute_tensor(fitting, flat, [Shard(0)]))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))  # nothing was changed
    huggingface.load_pretrained(model, theirs)
    huggingface.save_pretrained(model, f"{folder}/1")
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/1")
    expected = one.state_dict()
    wrong = differing("loaded", model.state_dict(), expected) + differing("saved", again.state_dict(), expected)
    return wrong, misshaped


def peaks(context, folder):
    """Bytes beside the model that reading, writing, and reading by whole tensors took at their most, and those of the
    largest slice; per rank."""
    tiny = make_model("Mixtral", "float32")  # what is imported on the way does not count
    huggingface.load_pretrained(tiny, folder_of(context, tiny, f"{folder}/tiny"))
    huggingface.save_pretrained(tiny, f"{folder}/tiny")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 8, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**COMMON | sizes)
    torch.manual_seed(0)
    if context.rank == 0:
        one = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        one.save_pretrained(f"{folder}/theirs", save_original_format=False)
        del one
    dist.barrier()

    def models():
        model = cut(context, on_meta(config, torch.float32), "ExpertTensorParallel", 2, 2)
        shards = sum(_local_bytes(parameter) for parameter in model.parameters())
        return model, shards, max(_local_bytes(parameter) for parameter in model.parameters())

    model, shards, largest = models()
    before = _resident(reset=True)
    huggingface.load_pretrained(model, f"{folder}/theirs")
    reading = _resident() - before - shards
    before = _resident(reset=True)
    huggingface.save_pretrained(model, f"{folder}/saved")
    writing = _resident() - before
    del model
    other, shards, _ = models()
    before = _resident(reset=True)
    with mock.patch("hyper_parallel.checkpoint.loading.read_value", _read_whole_first):
        huggingface.load_pretrained(other, f"{folder}/theirs")
    return reading, writing, _resident() - before - shards, largest


def _read_whole_first(folder, streams, pieces, value, array):
    """As a loader that takes its part of a whole tensor does."""
    whole = b"".join((folder / piece["file"]).read_bytes() for piece in pieces[:1])
    return read_value(folder, streams, pieces, value, array) + 0 * len(whole)


def _local_bytes(parameter):
    local = parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def _resident(reset=False):
    """The most memory that this process had since it was last reset."""
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed must not be used again unseen
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS" if reset else "VmHWM"].split()[0])


def one_rank_fails(context, folder):
    """What every rank is told when one of them cannot read or write, and what is in the folder then."""
    one = make_model("Mixtral", "float32")
    theirs = folder_of(context, one, f"{folder}/theirs")
    model = cut(context, copy.deepcopy(one), "ExpertTensorParallel", 2, 2)
    told = []
    for target, action in (
        ("checkpoint.loading.read_value", "load_pretrained"),
        ("huggingface.saving.write_box", "save_pretrained"),
    ):
        broken = mock.patch(f"hyper_parallel.{target}", side_effect=OSError("no such disk"))
        with broken if context.rank == 2 else contextlib.nullcontext():
            try:
                getattr(huggingface, action)(model, theirs)
            except CheckpointError as error:
                told.append(str(error))
    again = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    dist.barrier()
    return told, differing("after", again.state_dict(), one.state_dict()), sorted(os.listdir(folder))
