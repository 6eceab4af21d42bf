"""Hugging Face folders in one process without ranks: what does not fit, deaths, dtypes, ties, buffers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel import huggingface
from hyper_parallel.checkpoint import CheckpointError
from hyper_parallel.huggingface.assembly import chunk, concatenate, missing_members, stack, stored, transpose
from tests.conftest import require, require_transformers
from tests.distributed.huggingface_moe_configs import CONFIGS, SIZES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def transformers():
    require("torch")
    return pytest.importorskip("transformers")


def a_config(transformers, **others):
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 10}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**sizes | heads | others)


def a_model(transformers, meta=False, dtype=None, **others):
    import torch

    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(a_config(transformers, **others), dtype=dtype)


def same(one, other):
    import torch

    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


def values_of(assembled, tensors):
    """The tensor that is assembled, with the stored ones as numpy arrays."""
    import numpy as np

    whole = np.zeros(assembled.shape)
    for index in np.ndindex(*assembled.shape):
        for box in assembled.boxes:
            place = [at - begin for at, begin in zip(index, box.offsets)]
            if all(0 <= at < size for at, size in zip(place, box.shape)):
                flat = tensors[box.tensor].reshape(-1)
                whole[index] = flat[sum(at * stride for at, stride in zip(place, box.strides))]
    return whole


def test_boxes_are_what_whole_tensors_would_give():
    import numpy as np

    tensors = {name: np.random.default_rng(number).random((4, 6)) for number, name in enumerate("abcd")}
    a, b, c, d = (stored(name, (4, 6)) for name in "abcd")
    first, second = np.stack([tensors["a"], tensors["b"]]), np.stack([tensors["c"], tensors["d"]])
    both = concatenate([stack([a, b], 0), stack([c, d], 0)], 1)
    assert np.array_equal(values_of(both, tensors), np.concatenate([first, second], 1))
    turned = transpose(both, 1, 2)
    assert np.array_equal(values_of(turned, tensors), np.concatenate([first, second], 1).swapaxes(1, 2))
    for part, expected in zip(chunk(turned, 2, 2), (first, second)):
        assert np.array_equal(values_of(part, tensors), expected.swapaxes(1, 2))
    with pytest.raises(ValueError, match=r"shapes differ: \(4, 6\) and \(4, 5\)"):
        stack([a, stored("e", (4, 5))], 0)
    assert missing_members(["layers.0.experts.0.w1", "layers.0.experts.2.w1"], 4) == [
        "layers.0.experts.1.w1",
        "layers.0.experts.3.w1",
    ]


def test_a_stored_tensor_in_another_order_is_read_and_written(tmp_path):
    import numpy as np

    from hyper_parallel.checkpoint.tensor_files import read_box, write_box

    values = np.arange(300 * 500, dtype=np.float32).reshape(300, 500)
    path = tmp_path / "a"
    path.write_bytes(b"head" + values.tobytes() + b"tail")
    with open(path, "r+b", buffering=0) as stream:
        out = np.empty((400, 250), np.float32)
        read_box(stream, 4, (500, 300), (100, 50), out, strides=(1, 500))
        assert np.array_equal(out, values.T[100:, 50:])
        write_box(stream, 4, (500, 300), (7, 11), np.full((30, 20), -1, np.float32), strides=(1, 500))
    values[11:31, 7:37] = -1
    assert path.read_bytes() == b"head" + values.tobytes() + b"tail"


def test_dtypes_are_converted_as_transformers_does(transformers, tmp_path):
    import torch

    a_model(transformers, dtype=torch.float32).save_pretrained(tmp_path / "f32")
    a_model(transformers, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    for folder, dtype in (("f32", torch.bfloat16), ("bf16", torch.float32), ("f32", torch.float16)):
        model = a_model(transformers, meta=True, dtype=dtype)
        huggingface.load_pretrained(model, tmp_path / folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=dtype)
        assert same(model.state_dict(), theirs.state_dict()) and {p.dtype for p in model.parameters()} == {dtype}
        assert same(dict(model.named_buffers()), dict(theirs.named_buffers()))
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    large = a_model(transformers)
    torch.nn.init.constant_(large.lm_head.weight, 1e6)
    large.save_pretrained(tmp_path / "large")
    with pytest.raises(CheckpointError, match=r"lm_head.weight has values that are too large for F16"):
        huggingface.load_pretrained(a_model(transformers, meta=True, dtype=torch.float16), tmp_path / "large")


def test_ties(transformers, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    one = a_model(transformers, tie_word_embeddings=True)
    huggingface.save_pretrained(one, tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors

    def loaded():
        model = a_model(transformers, meta=True, tie_word_embeddings=True)
        huggingface.load_pretrained(model, tmp_path / "a")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model

    assert same(loaded().state_dict(), one.state_dict())
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert same(loaded().state_dict(), one.state_dict())
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="one in the model, and two that differ in the folder"):
        loaded()
    # Under the other of its names only.
    save_file({name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}, file)
    assert torch.equal(loaded().lm_head.weight, one.lm_head.weight)


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed(transformers, tmp_path):
    from safetensors.torch import load_file, save_file

    one = a_model(transformers)
    huggingface.save_pretrained(one, tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    experts = "model.layers.0.block_sparse_moe.experts"
    del tensors[f"{experts}.2.w1.weight"], tensors["model.norm.weight"]
    tensors["model.more.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:9].clone()
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"].int()
    save_file(tensors, file)
    whole, meta = a_model(transformers), a_model(transformers, meta=True)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    for model in (whole, meta):
        with pytest.raises(CheckpointError) as caught:
            huggingface.load_pretrained(model, tmp_path / "a")
        for line in (
            f"{experts}.2.w1.weight: missing",
            "model.norm.weight: missing",
            "model.more.weight: in the folder, not in the model",
            "lm_head.weight: (9, 8) in the folder, (10, 8) in the model",
            "model.layers.0.input_layernorm.weight: is I32; expected one of F64, F32, F16, BF16",
            "build the class that was saved (MixtralForCausalLM)",
        ):
            assert line in str(caught.value), str(caught.value)
    assert same(before, whole.state_dict())
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))


def test_bad_folders_and_models_are_named(transformers, tmp_path):
    import torch

    one = a_model(transformers)
    huggingface.save_pretrained(one, tmp_path / "a", max_file_bytes=2000)
    with pytest.raises(CheckpointError, match="nowhere is no folder that this rank sees; download the model first"):
        huggingface.load_pretrained(one, tmp_path / "nowhere")
    file = sorted((tmp_path / "a").glob("*.safetensors"))[1]
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=f"{file.name} is truncated: it has"):
        huggingface.load_pretrained(one, tmp_path / "a")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        huggingface.load_pretrained(one, tmp_path / "a")
    file.write_bytes(content)
    with pytest.raises(TypeError, match="expected a PreTrainedModel of transformers, got Linear"):
        huggingface.load_pretrained(torch.nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"called under torch.device\('meta'\)"), torch.device("meta"):
        huggingface.load_pretrained(a_model(transformers, meta=True), tmp_path / "a")
    model = a_model(transformers, meta=True)
    model.model.register_buffer("own", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match=r"buffers model.own are on the meta device, no folder holds them"):
        huggingface.load_pretrained(model, tmp_path / "a")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model = a_model(transformers)
    model.model.lora_A_weight = torch.nn.Parameter(torch.empty(2))
    for action in (huggingface.load_pretrained, huggingface.save_pretrained):
        with pytest.raises(ValueError, match=r"the model has adapters \(model.lora_A_weight and 0 more\)"):
            action(model, tmp_path / "a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("...")
    with pytest.raises(CheckpointError, match=r"other exists and is no checkpoint: there is no config.json in it"):
        huggingface.save_pretrained(one, tmp_path / "other")


def test_what_lies_beside_the_weights_stays(transformers, tmp_path):
    one = a_model(transformers)
    one.save_pretrained(tmp_path / "a", max_shard_size="2KB")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    huggingface.save_pretrained(one, tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert json.loads((tmp_path / "a" / "config.json").read_text())["architectures"] == ["MixtralForCausalLM"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_transformers_saves_what_was_loaded_under_the_same_names(transformers, tmp_path):
    one = a_model(transformers)
    for per_expert in (True, False):
        one.save_pretrained(tmp_path / "a", save_original_format=per_expert)
        model = a_model(transformers, meta=True)
        huggingface.load_pretrained(model, tmp_path / "a")
        model.save_pretrained(tmp_path / "theirs")
        huggingface.save_pretrained(model, tmp_path / "ours")
        contents = [(tmp_path / which / "model.safetensors").read_bytes() for which in ("theirs", "ours")]
        headers = [json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]) for content in contents]
        assert headers[0].keys() == headers[1].keys()
        assert any(".experts.3.w2." in name for name in headers[0]) == per_expert


def test_every_family_of_moe_from_config_goes_through_a_folder(transformers, tmp_path):
    import torch

    for kind, own in CONFIGS.items():
        config = transformers.AutoConfig.for_model(kind.split()[0], **SIZES | own)
        torch.manual_seed(0)
        one, model = (_built(transformers, config, device) for device in ("cpu", "meta"))
        one.save_pretrained(tmp_path / "theirs")
        huggingface.load_pretrained(model, tmp_path / "theirs")
        assert same(model.state_dict(), one.state_dict()), kind
        assert same(dict(model.named_buffers()), dict(one.named_buffers())), kind
        huggingface.save_pretrained(model, tmp_path / "ours")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert same(again.state_dict(), one.state_dict()), kind


def _built(transformers, config, device):
    import torch

    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


DEATHS = """
import os, sys, torch
sys.path.insert(0, sys.argv[2])
import transformers
from hyper_parallel import huggingface
from tests.harness.deaths import died
from tests.ut.huggingface.test_pretrained import a_model
torch.set_num_threads(1)
folder = sys.argv[1]
model, other = a_model(transformers), a_model(transformers, meta=True)
huggingface.save_pretrained(model, folder, max_file_bytes=5000)
def save(number):
    torch.nn.init.constant_(model.lm_head.weight, number)
    huggingface.save_pretrained(model, folder, max_file_bytes=5000)
for at in range(1, 1000):
    if not died(at, "folders", lambda: save(at)):
        break
    huggingface.load_pretrained(other, folder)
    found = other.lm_head.weight
    new = bool((found == at).all())
    assert new or torch.equal(found, model.lm_head.weight), at
    print(at, new)
    if new:
        huggingface.save_pretrained(model, folder, max_file_bytes=5000)
assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)], os.listdir(os.path.dirname(folder))
"""


@pytest.mark.slow
def test_a_save_that_dies_at_any_point_leaves_a_whole_folder(tmp_path):
    """Killed before every single operation on files in turn; the previous weights, or the new ones, can be loaded."""
    require("torch")
    require_transformers()
    (tmp_path / "folders").mkdir()
    command = [sys.executable, "-c", DEATHS, str(tmp_path / "folders" / "a"), str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    survivors = [line.split()[1] for line in done.stdout.splitlines()]
    assert len(survivors) > 15 and set(survivors) == {"True", "False"}
