"""A Hugging Face folder from a model of transformers: every rank writes the bytes of its own slices."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint import folders
from hyper_parallel.checkpoint.agreement import CheckpointError, together
from hyper_parallel.checkpoint.consolidation import grouped
from hyper_parallel.checkpoint.layout import overlap
from hyper_parallel.checkpoint.manifest import check_files
from hyper_parallel.checkpoint.planning import described, plan_part
from hyper_parallel.checkpoint.progress import progress
from hyper_parallel.checkpoint.tensor_files import closing_all, num_bytes, whole_header, write_box
from hyper_parallel.checkpoint.values import Value
from hyper_parallel.huggingface.assembly import Assembled, Box
from hyper_parallel.huggingface.folder import CONFIG, INDEX
from hyper_parallel.huggingface.loading import rooms_of

__all__ = ["save_pretrained"]

# Of an older model in the folder: its weights, and what a download left about them.
NOT_KEPT = ("*.safetensors", "*.bin", "*.index.json", ".cache", ".git")


@dataclass(frozen=True)
class _File:
    """A file of whole tensors, before any of them is written."""

    header: bytes
    size: int
    starts: dict[str, int]


@dataclass(frozen=True)
class _Plan:
    """What the ranks write together: the same on every rank.

    Attributes:
        entries: by the name of each weight, its dtype, shape and pieces with the rank that writes each.
        weights: how each weight is made of the folder's tensors.
        files: by name.
    """

    entries: dict[str, dict[str, Any]]
    weights: dict[str, Assembled]
    files: dict[str, _File]


def save_pretrained(model: Any, folder: str | Path, max_file_bytes: int = 5 << 30) -> None:
    """Write a Hugging Face folder of a model, whatever styles and FSDP2 lay it out as; ``from_pretrained`` reads it.

    Every rank of the job calls this with the same arguments; one process without ranks may call it too. Each rank
    writes the bytes of its own slices into the common files, and holds one slice of one weight at a time beside the
    model: no rank ever holds a layer's experts. Tensors have the names that the model was loaded from, and else those
    of its family on the hub, with experts one by one where the family has them so. Dtypes are those of the model.

    The folder takes the place of an older one when it is whole, and not before. What else lay in the older one, such as
    a tokenizer, goes along; ``config.json`` is the model's.

    Args:
        model: a ``PreTrainedModel``.
        folder: on a file system that all ranks see, and into one file of which several may write at a time. Until the
            end ``FOLDER.partial`` is written.
        max_file_bytes: begin a new file, and write an index, rather than let one grow beyond this.

    Raises:
        TypeError: no model of transformers. ValueError: one with adapters.
        CheckpointError: on every rank, what went wrong on any of them. An older folder is still there.
    """
    state, room = rooms_of(model)
    path = Path(folder).absolute()
    rank, _ = state.rank_and_size()
    values: dict[str, Value] = {}

    def describe() -> dict[str, Any]:
        values.update(state.model_values(model))
        held = {name: described(value) for name, value in values.items()}
        return {"held": held, "arguments": [str(path), max_file_bytes]}

    told = together(state, "describing what is to be saved", describe)
    plans: list[_Plan] = []
    together(state, "planning the files", lambda: plans.append(_planned(room, model, told, max_file_bytes)))
    (plan,) = plans
    partial = folders.partial_of(path)
    try:
        together(state, "making the files", lambda: _make_files(path, partial, plan) if rank == 0 else None)
        together(state, "writing", lambda: _write(partial, plan, values, rank))
        together(state, "publishing", lambda: _publish(room, model, path, partial, plan) if rank == 0 else None)
    except CheckpointError:
        if rank == 0:
            folders.discard(path)
        raise


def _planned(room: Any, model: Any, told: list[dict[str, Any]], max_file_bytes: int) -> _Plan:
    if len({repr(answer["arguments"]) for answer in told}) > 1:
        raise CheckpointError(f"the ranks ask for different folders: {[answer['arguments'] for answer in told]}")
    entries = plan_part([answer["held"] for answer in told], [0] * len(told))
    shapes, weights = room.named_as(model, {name: tuple(entry["shape"]) for name, entry in entries.items()})
    dtypes = {box.tensor: entries[name]["dtype"] for name, weight in weights.items() for box in weight.boxes}
    groups = grouped({name: {"dtype": dtypes[name], "shape": shape} for name, shape in shapes.items()}, max_file_bytes)
    files = {}
    for number, names in enumerate(groups, start=1):
        suffix = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        header = whole_header({name: (dtypes[name], shapes[name]) for name in names})
        files[f"model{suffix}.safetensors"] = _File(*header)
    return _Plan(entries, weights, files)


def _make_files(path: Path, partial: Path, plan: _Plan) -> None:
    folders.begin(path, [], CONFIG)
    for name, file in plan.files.items():
        with open(partial / name, "xb") as stream:
            stream.write(file.header)
            stream.truncate(file.size)


def _write(partial: Path, plan: _Plan, values: Mapping[str, Value], rank: int) -> None:
    """Write this rank's pieces into the files that hold them."""
    place = {tensor: (name, start) for name, file in plan.files.items() for tensor, start in file.starts.items()}
    mine = {name: [piece for piece in entry["pieces"] if piece["rank"] == rank] for name, entry in plan.entries.items()}
    total = sum(
        num_bytes(plan.entries[name]["dtype"], piece["shape"]) for name, pieces in mine.items() for piece in pieces
    )
    with closing_all() as streams, progress(f"saving {partial.stem}", total, shown=rank == 0) as advance:
        for name, pieces in mine.items():
            if not pieces:
                continue
            array = values[name].read()
            for piece in pieces:
                box = tuple(piece["offsets"]), tuple(piece["shape"])
                (local,) = (held.local for held in values[name].pieces if (held.offsets, held.shape) == box)
                for part in plan.weights[name].boxes:
                    file, start = place[part.tensor]
                    if file not in streams:
                        streams[file] = open(partial / file, "r+b", buffering=0)
                    _write_shared(streams[file], start, part, *box, array[local])
                advance(array[local].nbytes)
        for stream in streams.values():
            os.fsync(stream.fileno())


def _write_shared(
    stream: Any, start: int, part: Box, offsets: tuple[int, ...], shape: tuple[int, ...], array: Any
) -> None:
    """Write what a box of a weight, whose values ``array`` holds, has in common with a stored tensor."""
    shared = overlap(offsets, shape, part.offsets, part.shape)
    if shared is None:
        return
    first, size = shared
    inside = tuple(slice(at - begin, at - begin + count) for at, begin, count in zip(first, offsets, size))
    lower = [at - begin for at, begin in zip(first, part.offsets)]
    if inside:
        write_box(stream, start, part.shape, lower, array[inside], part.strides)
    else:
        write_box(stream, start, (1,), (0,), array.reshape(1))


def _publish(room: Any, model: Any, path: Path, partial: Path, plan: _Plan) -> None:
    check_files(partial, {name: {"bytes": file.size} for name, file in plan.files.items()}, contents=False)
    if path.is_dir():
        shutil.copytree(path, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_KEPT))
    if len(plan.files) > 1:
        weight_map = {tensor: name for name, file in plan.files.items() for tensor in file.starts}
        total = sum(file.size - len(file.header) for file in plan.files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    room.write_config(model, partial)
    folders.publish(path)
