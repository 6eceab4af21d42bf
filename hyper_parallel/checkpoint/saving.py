"""Saving: every rank writes slices of its own, rank 0 the manifest, and then the checkpoint appears at once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import folders
from hyper_parallel.checkpoint.agreement import CheckpointError, together
from hyper_parallel.checkpoint.manifest import check_files, write_manifest
from hyper_parallel.checkpoint.planning import described, plan_part
from hyper_parallel.checkpoint.progress import progress
from hyper_parallel.checkpoint.rooms import room_of
from hyper_parallel.checkpoint.tensor_files import Slice, num_bytes, write_file

__all__ = ["save", "Saving"]

PARTS = ("model", "optimizer")
# Folders that a save which was not waited for still writes to.
_unfinished: set[Path] = set()


@dataclass(frozen=True)
class _Job:
    """What this rank writes, and what it knows of the whole."""

    room: Any
    folder: Path
    tensors: dict[str, dict]  # part -> the manifest's entries, without start and file
    files: dict[str, list[Slice]]  # this rank's files by their names
    about: dict[str, Any]  # further entries of the manifest


class Saving:
    """A checkpoint that is being written on a thread. It is published by ``wait``, and not before."""

    def __init__(self, job: _Job):
        self._job, self._outcome = job, None
        self._thread = threading.Thread(target=self._write, name="hyper_parallel.checkpoint")
        self._thread.start()

    def _write(self):
        try:
            written = _write_files(self._job, shown=False)
            self._outcome = lambda: written
        except Exception as error:
            self._outcome = partial(_raise, error)

    def done(self) -> bool:
        """Whether this rank has written its files."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the files of all ranks and publish the checkpoint. Every rank must call this; a second time it
        does nothing.

        Raises:
            CheckpointError: on every rank, what went wrong on any; the previous checkpoint is still there.
        """
        self._thread.join()
        job, self._job = self._job, None
        if job is not None:
            _finish(job, self._outcome)


def _raise(error):
    raise error


def save(
    folder: str | Path,
    module: Any,
    optimizer: Any = None,
    *,
    step: int | None = None,
    random_state: bool = False,
    asynchronous: bool = False,
) -> Saving | None:
    """Write a checkpoint, which takes the place of an older one of this name when it is whole, and not before.

    Every rank of the job calls this with the same arguments. It may be one process without a process group.

    Args:
        folder: on a file system that all ranks see. It appears at the end; until then ``FOLDER.partial`` is written.
        module: its parameters and persistent buffers are saved, sharded in any way or not at all. Of a value that
            several ranks hold, one rank writes its own: they must hold the same.
        optimizer: of the module's parameters; its moments are saved as the parameters are, and its step.
        step: any integer, which ``load`` returns.
        random_state: save the framework's random generators of every rank as well.
        asynchronous: copy everything to the host, return a :class:`Saving`, and write on a thread. Call its ``wait()``
            on every rank before the next save.

    Returns:
        None, or with ``asynchronous`` a :class:`Saving`.

    Raises:
        CheckpointError: on every rank, what went wrong on any of them. An older checkpoint is still there.
    """
    room, path = room_of(module), Path(folder).absolute()
    job = _planned(room, path, module, optimizer, step, random_state)
    if asynchronous:
        try:
            together(room, "copying to the host", lambda: _snapshot(job))
        except CheckpointError:
            _unfinished.discard(path)
            raise
        return Saving(job)
    _finish(job, lambda: _write_files(job, shown=room.rank_and_size()[0] == 0))
    return None


def _planned(room, folder, module, optimizer, step, random_state):
    """Agree with all ranks on who writes what, and make the folder."""
    rank, _ = room.rank_and_size()
    values: dict[str, dict] = {}

    def describe():
        if folder in _unfinished:
            raise CheckpointError(f"a save to {folder} is still being written; call its wait() first")
        values["model"] = room.model_values(module)
        values["optimizer"] = room.optimizer_values(module, optimizer) if optimizer is not None else {}
        state = room.optimizer_state(module, optimizer) if optimizer is not None else None
        return {
            "held": {part: {name: described(value) for name, value in values[part].items()} for part in PARTS},
            "optimizer_state": state,
            "random_state": room.random_state() if random_state else None,
            "arguments": [str(folder), step, optimizer is not None, random_state],
        }

    told = together(room, "describing what is to be saved", describe)
    plan: dict[str, Any] = {}
    together(room, "planning the files", lambda: plan.update(_plan(told)))
    together(room, "making the folder", lambda: folders.begin(folder, list(PARTS)) if rank == 0 else None)
    about = {
        "framework": room.NAME,
        "num_ranks": len(told),
        "step": step,
        "optimizer_state": _merged_state([answer["optimizer_state"] for answer in told]),
        "random_state": [answer["random_state"] for answer in told] if random_state else None,
    }
    files = _files(rank, len(told), plan, values)
    _unfinished.add(folder)
    return _Job(room, folder, plan, files, about)


def _plan(told):
    """part -> name -> the manifest's entry, with the writing rank in each piece. The same on every rank.

    Of the ranks that hold a piece, the one that has least to write so far writes it.
    """
    if len({repr(answer["arguments"]) for answer in told}) > 1:
        raise CheckpointError(f"the ranks ask for different checkpoints: {[answer['arguments'] for answer in told]}")
    load = [0] * len(told)
    return {part: plan_part([answer["held"][part] for answer in told], load) for part in PARTS}


def _files(rank, num_ranks, plan, values):
    """This rank's slices by file name. A file holds a name once, so further slices of it go into further files."""
    files: dict[str, list[Slice]] = {}
    for part in PARTS:
        for name, entry in plan[part].items():
            mine = [piece for piece in entry["pieces"] if piece["rank"] == rank]
            for number, piece in enumerate(mine):
                file = f"{part}/rank-{rank:05}-of-{num_ranks:05}{f'-part-{number + 1}' if number else ''}.safetensors"
                box = tuple(piece["offsets"]), tuple(piece["shape"])
                slices = files.setdefault(file, [])
                slices.append(Slice(name, entry["dtype"], *box, partial(_read, values[part].get(name), *box)))
    return files


def _read(value, offsets, shape):
    if 0 in shape:
        return np.empty(shape, np.uint8)
    (local,) = (piece.local for piece in value.pieces if (piece.offsets, piece.shape) == (offsets, shape))
    return value.read()[local]


def _merged_state(states):
    """One description of the optimizer from those of all ranks, of which each knows the parameters that it holds."""
    if states[0] is None:
        return None
    merged: dict[str, Any] = {**states[0], "scalars": {}}
    for state in states:
        for key, by_name in state["scalars"].items():
            merged["scalars"].setdefault(key, {}).update(by_name)
    return merged


def _snapshot(job):
    for slices in job.files.values():
        for index, item in enumerate(slices):
            values = np.array(item.values(), order="C", copy=True)
            slices[index] = replace(item, values=partial(_identity, values))


def _identity(values):
    return values


def _write_files(job, shown):
    """Write this rank's files; returns what the manifest says of them."""
    total = sum(num_bytes(item.dtype, item.shape) for slices in job.files.values() for item in slices)
    written = {}
    with progress(f"saving {job.folder.name}", total, shown) as advance:
        for file, slices in job.files.items():
            found, starts = write_file(folders.partial_of(job.folder) / file, slices, advance)
            written[file] = {**found, "starts": {item.name: [starts[item.name], item.offsets] for item in slices}}
    return written


def _finish(job: _Job, written: Callable[[], dict]) -> None:
    """Gather what was written, and publish it."""
    rank, _ = job.room.rank_and_size()
    try:
        files = {
            file: about for answer in together(job.room, "writing files", written) for file, about in answer.items()
        }
        together(job.room, "publishing", lambda: _publish(job, files) if rank == 0 else None)
    except CheckpointError:
        if rank == 0:
            folders.discard(job.folder)
        raise
    finally:
        _unfinished.discard(job.folder)


def _publish(job, files):
    where = {
        (file.partition("/")[0], name, tuple(offsets)): {"file": file, "start": start}
        for file, about in files.items()
        for name, (start, offsets) in about["starts"].items()
    }
    parts = {
        part: {
            name: {**entry, "pieces": [_located(where, part, name, piece) for piece in entry["pieces"]]}
            for name, entry in job.tensors[part].items()
        }
        for part in PARTS
    }
    on_disk = {file: {"bytes": about["bytes"], "sha256": about["sha256"]} for file, about in files.items()}
    folder = folders.partial_of(job.folder)
    check_files(folder, on_disk, contents=False)  # sizes, as this rank sees the other ranks' files
    write_manifest(folder, {**job.about, **parts, "files": on_disk})
    folders.publish(job.folder)


def _located(where, part, name, piece):
    place = where[part, name, tuple(piece["offsets"])]
    return {**place, "offsets": piece["offsets"], "shape": piece["shape"]}
