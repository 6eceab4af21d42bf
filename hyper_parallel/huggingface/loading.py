"""A model of transformers from a Hugging Face folder: every rank reads the byte ranges of its own slices."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import folders
from hyper_parallel.checkpoint.agreement import CheckpointError, together
from hyper_parallel.checkpoint.loading import raise_problems, read_value, read_values
from hyper_parallel.checkpoint.rooms import room_of
from hyper_parallel.checkpoint.tensor_files import Stored, closing_all
from hyper_parallel.checkpoint.values import FLOATS, STORED_AS, Value
from hyper_parallel.huggingface.assembly import Assembled
from hyper_parallel.huggingface.folder import CONFIG, Folder

__all__ = ["load_pretrained", "rooms_of"]

SHOWN = 12
MISSING = "get a whole copy of the folder, or build the model from the folder's own config.json"
SHAPES = "build the model from the folder's own config.json"
DTYPES = "get the folder of the model that is not quantised, or dequantise it first (quantization_config)"
TIES = "set tie_word_embeddings=False in the model's config"
# A value of this rank and the stored pieces that it is read from, under a name of the folder's weights.
Pieces = list[dict[str, Any]]


def rooms_of(model: Any) -> tuple[Any, Any]:
    """What the platform knows of checkpoints, and of models of transformers.

    Raises:
        TypeError: not a model of transformers. ValueError: one with adapters.
    """
    state = room_of(model)
    path = f"{state.__package__}.pretrained"
    if importlib.util.find_spec(path) is None:
        raise TypeError(
            f"load_pretrained and save_pretrained take models of transformers, on torch; on {state.NAME}, load the "
            "layers of a MoE by hyper_parallel.huggingface.load_moe"
        )
    room = importlib.import_module(path)
    room.check(model)
    return state, room


def load_pretrained(model: Any, folder: str | Path) -> None:
    """Give a model of transformers the weights of a Hugging Face folder, whatever styles and FSDP2 lay it out as.

    Every rank of the job calls this with the same arguments; one process without ranks may call it too. Each rank reads
    the byte ranges of its own slices, and holds one slice of one weight at a time beside the model: no rank ever holds
    a layer's experts. Weights lie in the folder under any names that transformers itself takes, experts one by one or
    together. Values are converted to the dtypes that the model has.

    A model on the meta device gets memory for its own parts first, on the device of its mesh, or torch's default
    device without one; buffers that no folder holds are computed as transformers computes them. Make the optimizer
    afterwards: the parameters are new objects then.

    Args:
        model: a ``PreTrainedModel``, in memory or built under ``torch.device("meta")``, after its styles were applied.
        folder: holds ``config.json`` and safetensors files, with an index where there are several.

    Raises:
        TypeError: no model of transformers. ValueError: one with adapters.
        CheckpointError: on every rank: all names that are missing, unexpected or of another shape or dtype, together,
            and a file that is truncated or missing. Nothing was changed then. Also values that are too large for the
            model's dtype, and files that cannot be read any more: the model's weights are then not to be used.
    """
    state, room = rooms_of(model)
    rank, _ = state.rank_and_size()
    path = Path(folder).absolute()
    sources: list[_Source] = []
    together(state, f"reading the headers in {path}", lambda: sources.append(_look(path)))
    (source,) = sources
    matches: list[_Match] = []

    def match() -> dict[str, Any]:
        matches.append(found := _matched(state, room, model, source))
        return {"problems": found.problems, "unexpected": found.made.unexpected}

    _raise_what_does_not_fit(source, together(state, "comparing with the folder", match))
    (found,) = matches
    together(state, "giving the model memory", lambda: room.materialise(model))
    where, pieces = source.files.path, {found.names[name]: pieces for name, pieces in found.pieces.items()}
    together(state, "reading", lambda: _read_all(where, pieces, state.model_values(model), shown=rank == 0))
    room.remember(model, found.made)


@dataclass(frozen=True)
class _Source:
    """A folder, and the file and place of each of its tensors."""

    files: Folder
    tensors: dict[str, tuple[str, Stored]]


@dataclass(frozen=True)
class _Match:
    """A model beside a folder.

    Attributes:
        names: all names of the model's weights, to the one that stands for the tensor.
        made: the platform's ``Assembly``. pieces: by the weight's name in the folder.
        problems: (problem, what to do).
    """

    names: dict[str, str]
    made: Any
    pieces: dict[str, Pieces]
    problems: list[tuple[str, str]]


def _look(path: Path) -> _Source:
    files = Folder(_found(path))
    found = {name: files.find(name) for name in files.file_of}
    return _Source(files, {name: place for name, place in found.items() if place is not None})


def _matched(state: Any, room: Any, model: Any, source: _Source) -> _Match:
    names, values = room.aliases(model), state.model_layout(model)
    shapes = {name: values[first].shape for name, first in names.items()}
    made = room.assemble(model, shapes, {name: stored.shape for name, (_, stored) in source.tensors.items()})
    pieces = _located(source.tensors, made.weights)
    problems = [(problem, MISSING) for _, problem in made.problems]
    told_of = {names[name] for name in (*pieces, *(target for target, _ in made.problems))}
    problems += [(f"{name}: missing", MISSING) for name in values if name not in told_of]
    misfits = _misfits(values, names, made.weights, pieces)
    problems += misfits or _differing_ties(source.files.path, values, names, pieces)
    return _Match(names, made, pieces, problems)


def _raise_what_does_not_fit(source: _Source, told: Sequence[Mapping[str, Any]]) -> None:
    """Raise one error with the problems of all ranks, and with what no rank has a weight for."""
    path = source.files.path
    problems = [(text, remedy) for answer in told for text, remedy in answer["problems"]]
    unexpected = set.intersection(*(set(answer["unexpected"]) for answer in told))
    remedy = f"build the class that was saved ({_architectures(path)}), with all of its layers"
    problems += [(f"{name}: in the folder, not in the model", remedy) for name in source.tensors if name in unexpected]
    raise_problems(str(path), problems, SHOWN)


def _found(path: Path) -> Path:
    if not path.exists() and not path.with_name(path.name + ".previous").exists():
        raise CheckpointError(
            f"{path} is no folder that this rank sees; download the model first: hf download NAME --local-dir "
            f"{path.name}"
        )
    return folders.found(path, CONFIG)


def _architectures(folder: Path) -> str:
    try:
        return ", ".join(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["architectures"])
    except (ValueError, KeyError, TypeError, OSError):
        return "architectures in config.json"


def _located(tensors: Mapping[str, tuple[str, Stored]], weights: Mapping[str, Assembled]) -> dict[str, Pieces]:
    """The bytes that every weight is made of."""
    found: dict[str, Pieces] = {}
    for name, weight in weights.items():
        for box in weight.boxes:
            file, stored = tensors[box.tensor]
            place = {"tensor": box.tensor, "file": file, "start": stored.start, "dtype": stored.dtype}
            piece = {**place, "offsets": box.offsets, "shape": box.shape, "strides": box.strides}
            found.setdefault(name, []).append(piece)
    return found


def _misfits(
    values: Mapping[str, Value],
    names: Mapping[str, str],
    weights: Mapping[str, Assembled],
    pieces: Mapping[str, Pieces],
) -> list[tuple[str, str]]:
    problems = []
    for name, weight in weights.items():
        value = values[names[name]]
        if weight.shape != value.shape:
            problems.append((f"{name}: {weight.shape} in the folder, {value.shape} in the model", SHAPES))
        for piece in pieces[name]:
            known = FLOATS if value.dtype in FLOATS else (value.dtype,)
            if piece["dtype"] not in known:
                problems.append((f"{piece['tensor']}: is {piece['dtype']}; expected one of {', '.join(known)}", DTYPES))
    return problems


def _differing_ties(
    folder: Path, values: Mapping[str, Value], names: Mapping[str, str], pieces: Mapping[str, Pieces]
) -> list[tuple[str, str]]:
    """Weights that are one in the model, and that the folder has twice, with values that differ."""
    problems = []
    for name, first in names.items():
        if name != first and name in pieces and first in pieces:
            one, other = (_slice(folder, pieces[alias], values[first]) for alias in (first, name))
            if not np.array_equal(one.view(np.uint8), other.view(np.uint8)):
                problems.append((f"{first} and {name}: one in the model, and two that differ in the folder", TIES))
    return problems


def _slice(folder: Path, pieces: Pieces, value: Value) -> np.ndarray:
    array = np.empty(value.local_shape, STORED_AS[value.dtype])
    with closing_all() as streams:
        read_value(folder, streams, pieces, value, array)
    return array


def _read_all(folder: Path, pieces: Mapping[str, Pieces], values: Mapping[str, Value], shown: bool) -> int:
    """Fill this rank's slices; returns the number of bytes read."""
    tensors = [(name, pieces[name], value) for name, value in values.items()]
    return read_values(folder, tensors, shown, "build the model in a wider dtype")
