"""A MoE layer from a Hugging Face configuration, and its weights from a Hugging Face folder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.loading import read_values
from hyper_parallel.checkpoint.rooms import room_of
from hyper_parallel.checkpoint.values import FLOATS, Value
from hyper_parallel.huggingface.families import Family, family_of, moe_arguments
from hyper_parallel.huggingface.folder import Folder
from hyper_parallel.huggingface.names import Part, parts_of
from hyper_parallel.plan.config import read_fields
from hyper_parallel.platform import get_platform

__all__ = ["load_moe", "moe_from_config"]

# Settings of a router that its weights do not show.
SETTINGS = ("top_k", "score_func", "route_norm", "route_scale", "num_expert_groups", "num_limited_groups")
SHOWN = 12


def moe_from_config(config: str | Path | Mapping[str, Any] | Any) -> Any:
    """The MoE layer of a Hugging Face model, as a ``MoE`` of the platform in use, with weights of its own.

    A layer whose family has a bias for the choice of experts gets ``bias_update_rate=0.0``, which leaves the bias as
    it was loaded; set ``moe.bias_update_rate`` to train it.

    Args:
        config: path of a ``config.json``, a folder that holds one, its content as a dict, or a configuration object of
            transformers.

    Raises:
        ConfigError: a ``ValueError``: the family is not known, or fields say something that ``MoE`` cannot express;
            named.
    """
    moe_class = get_platform().public_object("MoE")
    return moe_class(**moe_arguments(read_fields(config)))


def load_moe(moe: Any, folder: str | Path, layer: int) -> None:
    """Fill a ``MoE`` with the weights of one layer of a Hugging Face folder.

    The layer may be whole, or lie over a mesh in any way; each rank reads the byte ranges of its own slices, and holds
    two slices of one weight at a time beside the layer. Experts may lie in the folder one by one
    (``experts.0.gate_proj.weight``) or together (``experts.gate_up_proj``). Values are converted to the dtypes that are
    there. Ranks do not talk to each other: each may load the layers that it has.

    Args:
        moe: as ``moe_from_config`` makes it of the folder's ``config.json``.
        folder: holds ``config.json`` and safetensors files, with an index where there are several.
        layer: number of the layer in the model, counted from 0.

    Raises:
        ConfigError: the folder's configuration cannot be a ``MoE``; it names the fields.
        CheckpointError: all tensors that are missing or do not fit, all settings that differ, or files that are
            truncated. Nothing was written then.
    """
    room, source = room_of(moe), Folder(Path(folder))
    fields = read_fields(source.path)
    family, arguments = family_of(fields), moe_arguments(fields)
    values = room.model_values(moe)
    block = _block_of(source, family, layer)
    parts = parts_of(family, arguments, block, source.file_of)
    pieces, problems = _located(source, values, parts)
    problems = list(dict.fromkeys(_differences(moe, arguments) + problems))
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise CheckpointError(
            f"{block} of {source.path} ({fields['model_type']}) does not fit, and nothing was loaded; make the layer "
            "by moe_from_config(folder), or get a whole copy of the folder:\n  " + "\n  ".join(problems[:SHOWN] + more)
        )
    read_values(source.path, [(f"{block}: {name}", pieces[name], value) for name, value in values.items()])


def _block_of(source: Folder, family: Family, layer: int) -> str:
    """The dotted name of a layer's MoE block, found by the name of its router."""
    blocks, routers = ("|".join(map(re.escape, names)) for names in (family.block, family.router))
    pattern = re.compile(rf"((?:.*\.)?layers\.(\d+)\.(?:{blocks}))\.(?:{routers})")
    found: dict[int, list[str]] = {}
    for match in filter(None, map(pattern.fullmatch, source.file_of)):
        found.setdefault(int(match[2]), []).append(match[1])
    if layer not in found:
        raise CheckpointError(
            f"layer {layer} of {source.path} has no MoE block: no tensor layers.{layer}.({blocks}).({routers}). Layers "
            f"that have one: {_ranges(sorted(found)) or 'none; is this the whole folder?'}"
        )
    if len(found[layer]) > 1:
        raise CheckpointError(f"layer {layer} of {source.path} is ambiguous: {', '.join(found[layer])}")
    return found[layer][0]


def _ranges(numbers: list[int]) -> str:
    """ "1-3, 5" of [1, 2, 3, 5]."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))


def _located(
    source: Folder, values: Mapping[str, Value], parts: Mapping[str, list[Part]]
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Where the pieces of each value lie, and what is wrong with them."""
    pieces: dict[str, list[dict[str, Any]]] = {}
    problems = [f"{name}: the layer does not have it" for name in parts if name not in values]
    for name, value in values.items():
        if name not in parts:
            problems.append(f"{name}: the family does not have it")
            continue
        if value.dtype not in FLOATS:
            problems.append(f"{name}: is {value.dtype} in the layer; expected one of {', '.join(FLOATS)}")
        for part in parts[name]:
            found = source.find(part.tensor)
            problem = _problem(part, found, name, value)
            if problem is not None:
                problems.append(problem)
            elif found is not None:
                file, stored = found
                place = {"file": file, "start": stored.start, "dtype": stored.dtype}
                pieces.setdefault(name, []).append({**place, "offsets": part.offsets, "shape": part.shape})
    return pieces, problems


def _problem(part: Part, found: Any, name: str, value: Value) -> str | None:
    if found is None:
        return f"{part.tensor}: missing"
    _, stored = found
    if stored.dtype not in FLOATS:
        return f"{part.tensor}: is {stored.dtype}; quantised weights must be dequantised first (quantization_config)"
    if _without_ones(stored.shape) != _without_ones(part.shape):
        return f"{part.tensor}: {stored.shape} in the folder; expected {part.shape} by its config.json"
    if part.whole != value.shape:
        return f"{name}: {value.shape} in the layer, {part.whole} in the folder"
    return None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """An expert's matrix is a stack of one; a bias may be a matrix of one row."""
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def _differences(moe: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Settings of the router that are not the configuration's."""
    expected = {name: arguments.get(name) for name in SETTINGS}
    if expected["num_expert_groups"] is not None:
        expected["group_score_top_k"] = arguments["group_score_top_k"]
    return [
        f"{name}: {getattr(moe.router, name)!r} in the layer, {value!r} by the folder's config.json"
        for name, value in expected.items()
        if getattr(moe.router, name) != value
    ]
