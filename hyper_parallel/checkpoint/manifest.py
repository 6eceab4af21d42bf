"""``checkpoint.json``: which tensors there are, in which bytes of which files, and what each file must look like.

{"format": "hyper_parallel checkpoint", "version": 1, "framework": "torch", "num_ranks": 4, "step": 1000,
 "model": {NAME: {"dtype": "F32", "shape": [8, 32, 16],
                  "pieces": [{"file": FILE, "start": 5120, "offsets": [0, 16, 0], "shape": [4, 16, 16]}, ...]}},
 "optimizer": {"exp_avg.NAME": as above},
 "optimizer_state": {"class": "AdamW", "scalars": {"step": {NAME: 1000}}},
 "random_state": one text per rank, or null,
 "files": {FILE: {"bytes": 66560, "sha256": "..."}},
 "sha256": of everything else in this file}
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.folders import MANIFEST
from hyper_parallel.checkpoint.tensor_files import checksum

__all__ = ["FORMAT", "VERSION", "write_manifest", "read_manifest", "check_files", "digest"]

FORMAT = "hyper_parallel checkpoint"
VERSION = 1


def digest(manifest: dict[str, Any]) -> str:
    """Checksum of a manifest, without the one that stands in it."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write it, with format, version and checksum added."""
    manifest = {"format": FORMAT, "version": VERSION, **manifest}
    manifest["sha256"] = digest(manifest)
    with open(folder / MANIFEST, "x", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check it.

    Raises:
        CheckpointError: truncated, altered, or of another format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated or altered: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint of this library")
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {manifest.get('version')}; this library reads version {VERSION}")
    if manifest.get("sha256") != digest(manifest):
        raise CheckpointError(f"{path} was altered: its checksum does not fit; use another checkpoint")
    return manifest


def check_files(folder: Path, files: dict[str, dict], contents: bool = True) -> None:
    """Compare files with what the manifest says of them; ``contents=False`` compares their sizes only.

    Raises:
        CheckpointError: names every file that is missing, truncated or altered.
    """
    wrong = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{path} is missing")
        elif (size := path.stat().st_size) != expected["bytes"]:
            wrong.append(f"{path} has {size} bytes, not the {expected['bytes']} that were written")
        elif contents and checksum(path) != expected:
            wrong.append(f"{path} was altered or exchanged: its checksum is not the one that was written")
    if wrong:
        raise CheckpointError("; ".join(wrong) + "; use another checkpoint, or a copy of this one")
