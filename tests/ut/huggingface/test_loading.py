"""Loading from a folder, with numpy in place of a framework: slices, dtypes, bytes, and what a bad folder is told."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from hyper_parallel.checkpoint import CheckpointError, tensor_files
from hyper_parallel.checkpoint.layout import Cut, local_pieces
from hyper_parallel.checkpoint.tensor_files import Slice, write_file
from hyper_parallel.checkpoint.values import STORED_AS, Value
from hyper_parallel.huggingface import load_moe, moe

DIM, HIDDEN, EXPERTS = 6, 8, 4
CONFIG = {
    "model_type": "glm4_moe",
    "hidden_size": DIM,
    "moe_intermediate_size": HIDDEN,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
}
# On a mesh (ep, tp).
CUTS = {
    "experts.w1": (Cut(0), Cut(1)),
    "experts.w3": (Cut(0), Cut(1)),
    "experts.w2": (Cut(0), Cut(2)),
    "shared_experts.w1.weight": (None, Cut(0)),
    "shared_experts.w3.weight": (None, Cut(0)),
    "shared_experts.w2.weight": (None, Cut(1)),
}


def whole_weights(dim=DIM, hidden=HIDDEN):
    random = np.random.default_rng(0)
    shapes = {
        "router.gate.weight": (EXPERTS, dim),
        "expert_bias": (EXPERTS,),
        "experts.w1": (EXPERTS, hidden, dim),
        "experts.w3": (EXPERTS, hidden, dim),
        "experts.w2": (EXPERTS, dim, hidden),
        "shared_experts.w1.weight": (2 * hidden, dim),
        "shared_experts.w3.weight": (2 * hidden, dim),
        "shared_experts.w2.weight": (dim, 2 * hidden),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def stored(weights, fused):
    """The weights under the names of layer 3 of a model, and a dense layer 0."""
    found = {
        "gate.weight": weights["router.gate.weight"],
        "gate.e_score_correction_bias": weights["expert_bias"],
        "shared_experts.gate_proj.weight": weights["shared_experts.w1.weight"],
        "shared_experts.up_proj.weight": weights["shared_experts.w3.weight"],
        "shared_experts.down_proj.weight": weights["shared_experts.w2.weight"],
    }
    if fused:
        found["experts.gate_up_proj"] = np.concatenate([weights["experts.w1"], weights["experts.w3"]], axis=1)
        found["experts.down_proj"] = weights["experts.w2"]
    else:
        for name, ours in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            for e in range(EXPERTS):
                found[f"experts.{e}.{name}.weight"] = weights[f"experts.{ours}"][e]
    found = {f"model.layers.3.mlp.{name}": value for name, value in found.items()}
    return {"model.layers.0.mlp.gate_proj.weight": np.ones((2, 2), np.float32), **found}


def write_folder(folder, tensors, dtypes=(), config=CONFIG, num_files=3):
    """Files of tensors, with an index; ``dtypes`` of those that are not written as they are."""
    (folder / "config.json").write_text(json.dumps(config))
    files = {name: f"model-{number % num_files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        slices = [_slice(name, tensors[name], dict(dtypes)) for name in tensors if files[name] == file]
        (folder / file).unlink(missing_ok=True)
        write_file(folder / file, slices, lambda _: None)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _slice(name, value, dtypes):
    dtype = dtypes.get(name, "F32")
    array = value if dtype == "F32" else value.astype(STORED_AS[dtype])
    return Slice(name, dtype, (0,) * array.ndim, array.shape, lambda: array)


@dataclass
class Layer:
    """A layer of one rank, of zeros."""

    whole: dict
    mesh: tuple = (1, 1)
    coordinate: tuple = (0, 0)
    dtype: str = "F32"
    top_k: int = 2
    local: dict = field(default_factory=dict)

    @property
    def router(self):
        groups = {"num_expert_groups": None, "num_limited_groups": None}
        return SimpleNamespace(top_k=self.top_k, score_func="sigmoid", route_norm=True, route_scale=1.0, **groups)

    def model_values(self, _):
        return {name: self._value(name, array) for name, array in self.whole.items()}

    def _value(self, name, whole):
        shape, pieces = local_pieces(whole.shape, CUTS.get(name, (None, None)), self.mesh, self.coordinate)

        def write(array):
            assert array.dtype == STORED_AS[self.dtype] and array.shape == shape
            self.local[name] = array

        return Value(self.dtype, whole.shape, shape, tuple(pieces), lambda: self.local[name], write)

    def expected(self, name):
        shape, pieces = local_pieces(self.whole[name].shape, CUTS.get(name, (None, None)), self.mesh, self.coordinate)
        part = np.empty(shape, np.float32)
        for piece in pieces:
            inside = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.shape))
            part[piece.local] = self.whole[name][inside]
        return part

    def load(self, folder, layer=3):
        with mock.patch.object(moe, "room_of", lambda _: self):
            load_moe(self, folder, layer)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("coordinate", [(0, 0), (1, 0), (1, 1)])
def test_each_rank_gets_its_slices(tmp_path, fused, coordinate):
    weights = whole_weights()
    write_folder(tmp_path, stored(weights, fused))
    layer = Layer(weights, (2, 2), coordinate)
    layer.load(tmp_path)
    assert set(layer.local) == set(weights)
    assert all(np.array_equal(layer.local[name], layer.expected(name)) for name in weights)
    assert not np.array_equal(layer.local["experts.w1"], layer.local["experts.w3"])


@pytest.mark.parametrize("fused", [False, True])
def test_each_rank_reads_its_byte_ranges(tmp_path, fused):
    weights = whole_weights(dim=256, hidden=512)
    config = {**CONFIG, "hidden_size": 256, "moe_intermediate_size": 512}
    write_folder(tmp_path, stored(weights, fused), config=config)
    num_read, fill = [], tensor_files._fill

    def counted(stream, position, view):
        num_read.append(len(view))
        fill(stream, position, view)

    layer = Layer(weights, (2, 2), (1, 1))
    with mock.patch.object(tensor_files, "_fill", counted):
        layer.load(tmp_path)
    own = sum(array.nbytes for array in layer.local.values())
    # Rows of w2 are cut: their other halves lie between, and are read with them.
    half_rows = layer.local["experts.w2"].nbytes + layer.local["shared_experts.w2.weight"].nbytes
    assert own <= sum(num_read) <= own + half_rows
    assert sum(num_read) < sum(array.nbytes for array in weights.values()) / 2


def test_dtypes_are_converted(tmp_path):
    weights, tensors = whole_weights(), stored(whole_weights(), fused=False)
    bias, up = "model.layers.3.mlp.gate.e_score_correction_bias", "model.layers.3.mlp.experts.1.up_proj.weight"
    write_folder(tmp_path, tensors, {bias: "F64", up: "F16"})
    layer = Layer(weights)
    layer.load(tmp_path)
    assert np.array_equal(layer.local["expert_bias"], weights["expert_bias"])
    expected = weights["experts.w3"].copy()
    expected[1] = expected[1].astype(np.float16)
    assert np.array_equal(layer.local["experts.w3"], expected) and not np.array_equal(expected, weights["experts.w3"])
    narrow = Layer(weights, dtype="F16")
    narrow.load(tmp_path)
    assert np.array_equal(narrow.local["experts.w2"], weights["experts.w2"].astype(np.float16))


def test_too_large_for_the_dtype(tmp_path):
    weights = whole_weights()
    weights["experts.w2"][2, 0, 0] = 1e5
    write_folder(tmp_path, stored(weights, fused=True))
    with pytest.raises(CheckpointError, match=r"experts\.w2 has values that are too large for F16"):
        Layer(weights, dtype="F16").load(tmp_path)


def test_all_that_is_wrong_is_told_together(tmp_path):
    weights, tensors = whole_weights(), stored(whole_weights(), fused=False)
    block = "model.layers.3.mlp."
    del tensors[f"{block}experts.2.up_proj.weight"], tensors[f"{block}shared_experts.up_proj.weight"]
    tensors[f"{block}experts.1.down_proj.weight"] = np.ones((HIDDEN, DIM), np.float32)
    write_folder(tmp_path, tensors, {f"{block}experts.0.gate_proj.weight": "F8_E4M3"})
    layer = Layer(weights, top_k=3)
    with pytest.raises(CheckpointError) as caught:
        layer.load(tmp_path)
    for words in (
        "nothing was loaded",
        "top_k: 3 in the layer, 2 by the folder's config.json",
        "experts.2.up_proj.weight: missing",
        "shared_experts.up_proj.weight: missing",
        "experts.1.down_proj.weight: (8, 6) in the folder; expected (1, 6, 8) by its config.json",
        "experts.0.gate_proj.weight: is F8_E4M3; quantised weights must be dequantised first",
    ):
        assert words in str(caught.value)
    assert layer.local == {}


def test_a_layer_with_other_parts(tmp_path):
    weights = whole_weights()
    write_folder(tmp_path, stored(weights, fused=True))
    other = {name: value for name, value in weights.items() if name != "expert_bias"}
    other |= {"shared_gate.weight": np.ones((1, DIM)), "router.gate.weight": np.ones((EXPERTS + 1, DIM))}
    with pytest.raises(CheckpointError) as caught:
        Layer(other).load(tmp_path)
    for words in (
        "expert_bias: the layer does not have it",
        "shared_gate.weight: the family does not have it",
        "router.gate.weight: (5, 6) in the layer, (4, 6) in the folder",
    ):
        assert words in str(caught.value)


def test_a_dense_layer(tmp_path):
    write_folder(tmp_path, stored(whole_weights(), fused=True))
    with pytest.raises(CheckpointError, match=r"layer 0 of .* has no MoE block.*that have one: 3"):
        Layer(whole_weights()).load(tmp_path, layer=0)


def test_bad_files(tmp_path):
    weights = whole_weights()
    with pytest.raises(CheckpointError, match=r"holds no .*safetensors files"):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        Layer(weights).load(tmp_path)
    tensors = stored(weights, fused=True)
    write_folder(tmp_path, tensors)
    file = tmp_path / "model-1.safetensors"
    content = file.read_bytes()
    for damaged, words in ((content[:-4], r"model-1\.safetensors is truncated"), (content[:20], "is truncated, or no")):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=words):
            Layer(weights).load(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is missing"):
        Layer(weights).load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no index"):
        Layer(weights).load(tmp_path)


def test_one_file_needs_no_index(tmp_path):
    weights = whole_weights()
    write_folder(tmp_path, stored(weights, fused=True), num_files=1)
    (tmp_path / "model.safetensors.index.json").unlink()
    layer = Layer(weights)
    layer.load(tmp_path)
    assert all(np.array_equal(layer.local[name], weights[name]) for name in weights)
