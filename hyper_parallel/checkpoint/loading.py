"""Loading: every rank checks its share of the files, then reads the byte ranges of its own slices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import folders
from hyper_parallel.checkpoint.agreement import CheckpointError, together
from hyper_parallel.checkpoint.layout import overlap
from hyper_parallel.checkpoint.manifest import check_files, read_manifest
from hyper_parallel.checkpoint.progress import progress
from hyper_parallel.checkpoint.rooms import room_of
from hyper_parallel.checkpoint.tensor_files import closing_all, num_bytes, read_box
from hyper_parallel.checkpoint.values import STORED_AS, Value, converted

__all__ = ["load", "raise_problems", "read_value", "read_values"]


def load(folder: str | Path, module: Any, optimizer: Any = None, *, random_state: bool = False) -> int | None:
    """Give a module, and its optimizer, the values of a checkpoint of any mesh, style, number of ranks and framework.

    Every rank of the job calls this with the same arguments, after the module was sharded and the optimizer made.
    Values are written into the tensors that are there: dtypes, devices and placements stay. Nothing is written before
    all files were checked and all names, shapes and dtypes found to fit.

    Args:
        folder: as it was given to ``save``.
        module: has the parameters and persistent buffers of the checkpoint, and no others.
        optimizer: of the same kind as the one saved; moments and step are loaded. Learning rates and the like stay
            what the program made them.
        random_state: restore the framework's random generators too; only for the same number of ranks and framework.

    Returns:
        The ``step`` that ``save`` was given.

    Raises:
        CheckpointError: on every rank, what went wrong on any of them: files that are missing, truncated or altered;
            all names, shapes and dtypes that do not fit.
    """
    room = room_of(module)
    rank, num_ranks = room.rank_and_size()
    source: dict[str, Any] = {}

    def read():
        source["folder"] = folders.found(Path(folder).absolute())
        source["manifest"] = read_manifest(source["folder"])
        return source["manifest"]["sha256"]

    if len(set(together(room, "reading the manifest", read))) > 1:
        raise CheckpointError(f"the ranks see different checkpoints under {folder}")
    where, manifest = source["folder"], source["manifest"]
    mine = dict(list(manifest["files"].items())[rank::num_ranks])
    together(room, "checking files", lambda: check_files(where, mine))

    def match():
        source["model"] = room.model_values(module)
        source["optimizer"], source["commit"] = {}, lambda: None
        problems = []
        if optimizer is not None and manifest["optimizer_state"] is None:
            problems.append(("the checkpoint holds no optimizer state", "load without optimizer"))
        elif optimizer is not None:
            saved = manifest["optimizer"], manifest["optimizer_state"]
            source["optimizer"], source["commit"] = room.optimizer_to_load(module, optimizer, *saved)
            problems += _differences("optimizer state", source["optimizer"], manifest["optimizer"])
        problems += _differences("model", source["model"], manifest["model"])
        problems += _random_problems(manifest, room, num_ranks) if random_state else []
        loads = [part for part in ("model", "optimizer") if part == "model" or optimizer is not None]
        return {"problems": problems, "names": {part: sorted(source[part]) for part in loads}}

    _raise_problems(together(room, "comparing with the checkpoint", match), manifest)
    together(room, "reading", lambda: _read_all(where, manifest, source, shown=rank == 0))
    if random_state:
        together(room, "restoring random state", lambda: room.set_random_state(manifest["random_state"][rank]))
    return manifest["step"]


def _differences(what, values, saved):
    """(problem, remedy) of every value of this rank that the checkpoint does not have as it is here."""
    problems = []
    for name, value in values.items():
        if name not in saved:
            problems.append((f"{what} {name}: not in the checkpoint", NAMES))
            continue
        dtype, shape = saved[name]["dtype"], tuple(saved[name]["shape"])
        if shape != value.shape:
            problems.append((f"{what} {name}: {shape} in the checkpoint, {value.shape} here", SHAPES))
        elif dtype != value.dtype:
            problems.append((f"{what} {name}: {dtype} in the checkpoint, {value.dtype} here", DTYPES))
    return problems


# Bytes that are converted at a time: what conversion needs beside them is small, whatever the tensor's size.
AT_ONCE = 1 << 20
NAMES = "build the module that was saved, under the same names; if layers were renamed, rename them back for loading"
SHAPES = "build the module with the sizes of the checkpoint"
DTYPES = "cast the module to the checkpoint's dtype before loading, and to another one afterwards"


def _random_problems(manifest, room, num_ranks):
    if manifest["random_state"] is None:
        return [("the checkpoint holds no random state", "load without random_state")]
    if (manifest["framework"], manifest["num_ranks"]) != (room.NAME, num_ranks):
        saved, here = f"{manifest['num_ranks']} ranks of {manifest['framework']}", f"{num_ranks} of {room.NAME}"
        return [(f"the random state is that of {saved}, here are {here}", "load without random_state, and set a seed")]
    return []


def _raise_problems(told, manifest):
    """Raise one error with all problems of all ranks, and with what no rank asked for."""
    problems = [tuple(problem) for answer in told for problem in answer["problems"]]
    for part in told[0]["names"]:
        asked = {name for answer in told for name in answer["names"][part]}
        what = "optimizer state" if part == "optimizer" else part
        if part == "model" or manifest["optimizer_state"] is not None:
            missing = [name for name in manifest[part] if name not in asked]
            problems += [(f"{what} {name}: in the checkpoint, not here", NAMES) for name in missing]
    raise_problems("the checkpoint", problems)


def raise_problems(what: str, problems: Sequence[tuple[str, str]], shown: int | None = None) -> None:
    """Raise one CheckpointError with all problems, each once, under what to do about them.

    Args:
        what: words for that which does not fit.
        problems: (problem, remedy). Of those with the same remedy the first ``shown`` are told.
    """
    told = []
    for remedy in dict.fromkeys(remedy for _, remedy in problems):
        texts = list(dict.fromkeys(text for text, its_remedy in problems if its_remedy == remedy))
        more = [f"and {len(texts) - shown} more"] if shown is not None and len(texts) > shown else []
        told.append(f"{remedy}:" + "".join(f"\n    {text}" for text in texts[:shown] + more))
    if told:
        raise CheckpointError(f"{what} does not fit, and nothing was loaded. What to do:\n  " + "\n  ".join(told))


def _read_all(folder, manifest, source, shown):
    """Fill this rank's tensors, one after the other; returns the number of bytes read."""
    tensors = [
        (name, manifest[part][name]["pieces"], value)
        for part in ("model", "optimizer")
        for name, value in source[part].items()
    ]
    num_read = read_values(folder, tensors, shown)
    source["commit"]()
    return num_read


def read_values(
    folder: Path,
    tensors: Sequence[tuple[str, Sequence[Mapping[str, Any]], Value]],
    shown: bool = False,
    remedy: str = "load it in a wider dtype",
) -> int:
    """Fill this rank's part of each tensor, one after the other; returns the number of bytes read.

    Args:
        tensors: name, saved pieces as in ``read_value``, and value. shown: with a bar.
        remedy: what to do about values that are too large for a tensor's dtype.

    Raises:
        CheckpointError: such values, with the tensor's name.
    """
    total = sum(num_bytes(value.dtype, value.local_shape) for _, _, value in tensors)
    num_read = 0
    with closing_all() as streams, progress(f"loading {folder.name}", total, shown) as advance:
        for name, pieces, value in tensors:
            array = np.empty(value.local_shape, STORED_AS[value.dtype])
            try:
                num_read += read_value(folder, streams, pieces, value, array)
            except FloatingPointError as error:
                raise CheckpointError(f"{name} has values that are too large for {value.dtype}; {remedy}") from error
            value.write(array)
            advance(array.nbytes)
    return num_read


def read_value(
    folder: Path, streams: dict[str, Any], saved_pieces: Sequence[Mapping[str, Any]], value: Value, array: np.ndarray
) -> int:
    """Fill this rank's part of a value from the byte ranges of files that hold it.

    Args:
        streams: open files by name; those that are missing are opened, and the caller closes all.
        saved_pieces: boxes of the whole tensor as a manifest has them. One may begin before the tensor and end behind
            it: the tensor is then a part of what is stored. With a "dtype" of its own a piece is converted, with
            "strides" (in elements) it is stored in another order.
        array: of the part's shape and storage dtype.

    Returns:
        Number of bytes read.
    """
    num_read = 0
    for piece in value.pieces:
        for saved in saved_pieces:
            shared = overlap(piece.offsets, piece.shape, saved["offsets"], saved["shape"])
            if shared is None:
                continue
            offsets, shape = shared
            stream = streams.get(saved["file"])
            if stream is None:
                stream = streams[saved["file"]] = open(folder / saved["file"], "rb", buffering=0)
            inside = tuple(
                slice(local.start + offset - start, local.start + offset - start + size)
                for local, offset, start, size in zip(piece.local, offsets, piece.offsets, shape)
            )
            lower = [offset - start for offset, start in zip(offsets, saved["offsets"])]
            # A scalar has no dims to slice; as one of a single element it can be filled like the others.
            out, saved, lower = (array[inside], saved, lower) if inside else (array.reshape(1), {**saved, **ONE}, (0,))
            num_read += _read_converted(stream, saved, lower, out, value.dtype)
    return num_read


ONE = {"shape": (1,), "strides": None}


def _read_converted(stream, saved, lower, out, dtype):
    """Fill ``out``, which is of ``dtype``, with a box of a saved piece; one that is converted is read by parts."""
    place, strides, stored_as = (saved["start"], saved["shape"], lower), saved.get("strides"), saved.get("dtype", dtype)
    if stored_as == dtype:
        return read_box(stream, *place, out, strides)
    if out.nbytes <= AT_ONCE:
        stored = np.empty(out.shape, STORED_AS[stored_as])
        num_read = read_box(stream, *place, stored, strides)
        out[...] = converted(stored, stored_as, dtype)
        return num_read
    dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
    half = out.shape[dim] // 2
    low, high = [(slice(None),) * dim + (part,) for part in (slice(half), slice(half, None))]
    further = [index + half * (dim == place_of) for place_of, index in enumerate(lower)]
    return _read_converted(stream, saved, lower, out[low], dtype) + _read_converted(
        stream, saved, further, out[high], dtype
    )
