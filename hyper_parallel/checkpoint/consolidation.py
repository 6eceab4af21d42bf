"""A checkpoint of whole tensors made from one of slices, and a description of either. Needs no framework."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint import folders
from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.manifest import check_files, read_manifest, write_manifest
from hyper_parallel.checkpoint.progress import progress
from hyper_parallel.checkpoint.saving import PARTS
from hyper_parallel.checkpoint.tensor_files import Slice, checksum, num_bytes, read_box, write_file
from hyper_parallel.checkpoint.values import STORED_AS

__all__ = ["consolidate", "describe", "grouped"]

INDEX = "model/model.safetensors.index.json"


def consolidate(folder: str | Path, out: str | Path, max_file_bytes: int = 5 << 30) -> None:
    """Write a checkpoint of whole tensors, which is the same checkpoint: ``load`` takes it too.

    ``OUT/model`` then holds ``model.safetensors``, or several files and the index that Hugging Face's tools read.
    One tensor at a time is in memory.

    Args:
        folder: a checkpoint. out: where the new one is to lie.
        max_file_bytes: begin a new file rather than let one grow beyond this.

    Raises:
        CheckpointError: no checkpoint, files that are missing or altered, or ``out`` holds something else.
    """
    source, out = folders.found(Path(folder).absolute()), Path(out).absolute()
    if out == Path(folder).absolute():
        raise CheckpointError(f"{out} is the checkpoint itself; give another folder for the whole tensors")
    manifest = read_manifest(source)
    check_files(source, manifest["files"])
    folders.begin(out, list(PARTS))
    new = {**manifest, "files": {}}
    total = sum(num_bytes(entry["dtype"], entry["shape"]) for part in PARTS for entry in manifest[part].values())
    try:
        with progress(f"consolidating {source.name}", total, shown=True) as advance:
            for part in PARTS:
                new[part] = _write_part(source, folders.partial_of(out), part, manifest, new, max_file_bytes, advance)
        write_manifest(folders.partial_of(out), new)
        folders.publish(out)
    except BaseException:
        folders.discard(out)
        raise


def _write_part(source, target, part, manifest, new, max_file_bytes, advance):
    groups = grouped(manifest[part], max_file_bytes)
    entries, weight_map = {}, {}
    for number, names in enumerate(groups, start=1):
        suffix = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        file = f"{part}/{part}{suffix}.safetensors"
        slices = [_whole(source, name, manifest[part][name]) for name in names]
        new["files"][file], starts = write_file(target / file, slices, advance)
        for item in slices:
            weight_map[item.name] = Path(file).name
            piece = {"file": file, "start": starts[item.name], "offsets": [0] * len(item.shape)}
            shape = list(item.shape)
            entries[item.name] = {"dtype": item.dtype, "shape": shape, "pieces": [{**piece, "shape": shape}]}
    if part == "model" and len(groups) > 1:
        total = sum(num_bytes(entry["dtype"], entry["shape"]) for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        new["files"][INDEX] = checksum(target / INDEX)
    return entries


def grouped(entries: Mapping[str, Any], max_file_bytes: int) -> list[list[str]]:
    """Names in lists, the tensors of each at most ``max_file_bytes`` large unless there is only one."""
    groups, size = [], 0
    for name, entry in entries.items():
        more = num_bytes(entry["dtype"], entry["shape"])
        if not groups or size + more > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += more
    return groups


def _whole(source, name, entry):
    shape = tuple(entry["shape"])
    return Slice(name, entry["dtype"], (0,) * len(shape), shape, partial(_read_whole, source, entry))


def _read_whole(source, entry):
    whole = np.empty(entry["shape"], STORED_AS[entry["dtype"]])
    for piece in entry["pieces"]:
        box = tuple(slice(offset, offset + size) for offset, size in zip(piece["offsets"], piece["shape"]))
        with open(source / piece["file"], "rb", buffering=0) as stream:
            part = np.empty(piece["shape"], whole.dtype)
            read_box(stream, piece["start"], piece["shape"], [0] * len(piece["shape"]), part)
        whole[box] = part
    return whole


def describe(folder: str | Path) -> str:
    """A checkpoint in words: where it comes from, its tensors, its files. File sizes are checked, contents are not.

    Raises:
        CheckpointError: no checkpoint, or files that are missing or truncated.
    """
    where = folders.found(Path(folder).absolute())
    manifest = read_manifest(where)
    check_files(where, manifest["files"], contents=False)
    state = manifest["optimizer_state"]
    lines = [
        f"{where}: saved by {manifest['num_ranks']} rank(s) of {manifest['framework']}",
        f"step: {manifest['step']}",
        f"optimizer: {state['class'] if state else 'none'}",
        f"random state: {'of every rank' if manifest['random_state'] else 'none'}",
    ]
    for part in PARTS:
        lines += _table(part, manifest[part])
    size = sum(file["bytes"] for file in manifest["files"].values())
    lines.append(f"\n{len(manifest['files'])} files, {size:,} bytes, all of the size that was written")
    return "\n".join(lines)


def _table(part, entries: dict[str, Any]):
    total = sum(num_bytes(entry["dtype"], entry["shape"]) for entry in entries.values())
    width = max((len(name) for name in entries), default=0)
    rows = [
        f"  {name:{width}}  {entry['dtype']:4}  {entry['shape']!s:20}  {len(entry['pieces'])} piece(s)"
        for name, entry in sorted(entries.items())
    ]
    return [f"\n{part}: {len(entries)} tensors, {total:,} bytes", *rows]
