"""Adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors, with whole tensors.

PEFT wraps a module once for each of its adapted parameters, so of the module ``experts`` with the weights gate_up_proj
and down_proj, in this order, the file holds

    base_model.model.PATH.experts.base_layer.lora_A.weight      of gate_up_proj [E * r, D]
    base_model.model.PATH.experts.base_layer.lora_B.weight                      [2H, r * E]
    base_model.model.PATH.experts.lora_A.weight                 of down_proj    [E * r, H]
    base_model.model.PATH.experts.lora_B.weight                                 [D, r * E]

A counts experts first and ranks within an expert, B ranks first and experts within a rank.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint.agreement import CheckpointError, together
from hyper_parallel.checkpoint.rooms import room_of
from hyper_parallel.checkpoint.tensor_files import Slice, Stored, read_box, read_header, write_file
from hyper_parallel.checkpoint.values import FLOATS, STORED_AS, converted, plain_name
from hyper_parallel.core.types import Module
from hyper_parallel.lora.adapters import Adapted, adapted, full_names, planned, put_on
from hyper_parallel.platform import get_platform

__all__ = ["load_adapters", "save_adapters"]

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Fields of PEFT's configuration that make adapters another thing; each must be absent, or as good as absent.
REFUSED = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "use_bdlora",
    "lora_dropout",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "layers_to_transform",
    "layer_replication",
    "exclude_modules",
    "target_modules",
)


def save_adapters(model: Module, folder: str | os.PathLike) -> None:
    """Write the adapters of a model as PEFT does: ``PeftModel.from_pretrained(base_model, folder)`` reads them.

    Every rank calls this, and rank 0 writes. Each factor is gathered whole, one after the other; they are small. Files
    of an earlier save are replaced, each of them at once.

    Raises:
        ValueError: the model has no adapters. CheckpointError: on every rank, what went wrong on one.
    """
    platform, room, folder = get_platform(model), room_of(model), Path(folder)
    found = adapted(platform, model)
    room.settle(model)
    rank, _ = room.rank_and_size()
    slices = []
    for each in found:
        own = platform.parameters(each.module)
        for factor in _factors(each):
            dtype, values = room.gathered(own[factor.parameter])
            if rank == 0:
                values = factor.to_peft(values)
                slices.append(Slice(factor.name, dtype, (0, 0), values.shape, partial(np.asarray, values)))

    def write() -> None:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / TENSORS, lambda path: write_file(path, slices, lambda _: None))
            text = json.dumps(_config(model, found), indent=2) + "\n"
            _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))

    together(room, f"saving adapters to {folder}", write)


def load_adapters(model: Module, folder: str | os.PathLike) -> list[str]:
    """Put the adapters of a folder of PEFT's on the experts of a model, and freeze everything else.

    The folder may come from :func:`save_adapters` on any mesh, or from PEFT, whose ``target_parameters`` are weights of
    experts. A model that has such adapters already gets their values. Every rank calls this, and reads the file, one
    tensor after the other.

    Returns:
        Full names of the adapted weights.

    Raises:
        CheckpointError: on every rank: a file that is missing or truncated; a configuration that asks for what these
            adapters are not, named by its field; names and shapes that do not fit, all of them listed. The model is
            then as it was. Otherwise as ``add_adapters``.
    """
    platform, room, folder = get_platform(model), room_of(model), Path(folder)
    (config, *_) = together(room, f"reading {folder / CONFIG}", lambda: _read_config(folder / CONFIG))
    made = planned(platform, model, config["r"], config["lora_alpha"], config["target_parameters"])
    _check_same(made)
    room.settle(model)
    expected = {factor.name: factor.peft_shape for each in made for factor in _factors(each)}
    together(room, f"loading adapters from {folder}", lambda: _check(read_header(folder / TENSORS), expected))
    if made[0].sharded.lora is None:
        put_on(platform, model, made)
    together(room, f"loading adapters from {folder}", lambda: _fill(room, made, folder / TENSORS))
    return full_names(made)


@dataclass(frozen=True)
class _Factor:
    """One of the two factors of an adapter.

    Attributes:
        name: PEFT's. parameter: ours, beside the weight.
        shape: ours, of the whole, [E, r, K] or [E, N, r].
        is_b: the second.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    is_b: bool

    @property
    def peft_shape(self) -> tuple[int, int]:
        """[E * r, K] or [N, r * E]."""
        num_experts, last = self.shape[0], self.shape[-1]
        others = math.prod(self.shape[1:-1])
        return (others, last * num_experts) if self.is_b else (num_experts * others, last)

    def to_peft(self, values: np.ndarray) -> np.ndarray:
        """The whole factor in PEFT's shape."""
        if self.is_b:
            values = values.reshape(values.shape[0], -1, values.shape[-1]).transpose(1, 2, 0)
        return values.reshape(self.peft_shape)

    def from_peft(self, values: np.ndarray) -> np.ndarray:
        """The inverse."""
        if self.is_b:
            values = values.reshape(-1, self.shape[-1], self.shape[0]).transpose(2, 0, 1)
        return values.reshape(self.shape)


def _factors(each: Adapted) -> list[_Factor]:
    """A and B of every adapter of a module; PEFT's wrapper of the last weight is the outermost."""
    path, adapters = plain_name(each.path), list(each.lora.adapters.values())
    found = []
    for depth, adapter in zip(reversed(range(len(adapters))), adapters):
        start = ".".join(["base_model.model", *([path] if path else []), *["base_layer"] * depth])
        (name_a, name_b) = adapter.names
        found.append(_Factor(f"{start}.lora_A.weight", name_a, adapter.shape_a, False))
        found.append(_Factor(f"{start}.lora_B.weight", name_b, adapter.shape_b, True))
    return found


def _config(model: Module, found: Sequence[Adapted]) -> dict[str, Any]:
    """What PEFT must know; what is left out has PEFT's default."""
    lora = found[0].lora
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": getattr(getattr(model, "config", None), "name_or_path", None) or None,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": [],  # PEFT would choose some by the model's type
        "target_parameters": [plain_name(name) for name in full_names(found)],
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    write(beside)
    os.replace(beside, path)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a folder of adapters has it beside {TENSORS}")
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no configuration of PEFT: {error!r}") from error
    problems = [f"{field} is {config[field]!r}" for field in REFUSED if config.get(field)]
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {config.get('peft_type')!r}")
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {config['bias']!r}")
    if not config.get("target_parameters"):
        problems.append("target_parameters is empty")
    if problems:
        raise CheckpointError(
            f"{path}: {'; '.join(problems)}; these adapters are plain LoRA on weights of experts, which PEFT calls "
            "target_parameters"
        )
    return {
        "r": config.get("r", 8),
        "lora_alpha": config.get("lora_alpha", 8),
        "target_parameters": list(config["target_parameters"]),
    }


def _check_same(made: Sequence[Adapted]) -> None:
    """Raise where the model has other adapters than the planned ones."""
    for each in made:
        have = each.sharded.lora
        if (have is None) != (made[0].sharded.lora is None) or (have is not None and have != each.lora):
            was = "none" if have is None else f"r {have.r}, alpha {have.alpha} on {list(have.adapters)}"
            raise ValueError(
                f"{each.path or 'the module'} has adapters of {was}, the folder r {each.lora.r}, alpha "
                f"{each.lora.alpha} on {list(each.lora.adapters)}; merge_adapters(model) takes the old ones off"
            )


def _check(stored: dict[str, Stored], expected: dict[str, tuple[int, int]]) -> None:
    problems = [f"{name}: missing, expected {shape}" for name, shape in expected.items() if name not in stored]
    problems += [f"{name}: not of these experts" for name in stored if name not in expected]
    for name, shape in expected.items():
        if name in stored and stored[name].shape != shape:
            problems.append(f"{name}: {stored[name].shape} in the folder, {shape} in the model")
        elif name in stored and stored[name].dtype not in FLOATS:
            problems.append(f"{name}: is {stored[name].dtype}, expected one of {', '.join(FLOATS)}")
    if problems:
        raise CheckpointError("\n  ".join(["the adapters do not fit, and nothing was changed:", *problems]))


def _fill(room: Any, made: Sequence[Adapted], path: Path) -> None:
    """Give each factor this rank's part of what the file holds."""
    header = read_header(path)
    with open(path, "rb", buffering=0) as stream:
        for each in made:
            values = room.model_values(each.module)
            for factor in _factors(each):
                stored, value = header[factor.name], values[factor.parameter]
                whole = np.empty(stored.shape, STORED_AS[stored.dtype])
                read_box(stream, stored.start, stored.shape, (0, 0), whole)
                whole = factor.from_peft(converted(whole, stored.dtype, value.dtype))
                local = np.empty(value.local_shape, STORED_AS[value.dtype])
                for piece in value.pieces:
                    box = tuple(slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.shape))
                    local[piece.local] = whole[box]
                value.write(local)
