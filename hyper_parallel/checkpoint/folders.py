"""Where a checkpoint lies, and how a new one takes the place of an old one.

A checkpoint is written into ``FOLDER.partial``. When it is whole, the old one is renamed to ``FOLDER.previous``, the
new one to ``FOLDER``, and the old one is deleted. A program that dies between the two renames leaves no ``FOLDER``,
and ``FOLDER.previous`` whole: it is loaded instead, and the next save puts it back first.
"""

import os
import shutil
from pathlib import Path

from hyper_parallel.checkpoint.agreement import CheckpointError

__all__ = ["MANIFEST", "begin", "partial_of", "publish", "discard", "found"]

MANIFEST = "checkpoint.json"


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder.with_name(folder.name + ".partial")


def _previous_of(folder):
    return folder.with_name(folder.name + ".previous")


def begin(folder: Path, parts: list[str], marker: str = MANIFEST) -> None:
    """Make an empty ``FOLDER.partial`` with these sub-folders; clear away what a save that died has left.

    Args:
        marker: the file by which a folder of this kind is known.

    Raises:
        CheckpointError: the folder exists and holds something else than a checkpoint.
    """
    previous = _previous_of(folder)
    if not folder.exists() and (previous / marker).is_file():
        os.rename(previous, folder)
    holds_other = not folder.is_dir() or (not (folder / marker).is_file() and any(folder.iterdir()))
    if folder.exists() and holds_other:
        raise CheckpointError(
            f"{folder} exists and is no checkpoint: there is no {marker} in it. It is not overwritten: choose another "
            "folder"
        )
    for left in (partial_of(folder), previous):
        if left.exists():
            shutil.rmtree(left)
    for part in parts or [""]:
        (partial_of(folder) / part).mkdir(parents=True)


def publish(folder: Path) -> None:
    """Let the finished ``FOLDER.partial`` take the place of ``FOLDER``."""
    partial, previous = partial_of(folder), _previous_of(folder)
    for inside in (*(path for path in partial.iterdir() if path.is_dir()), partial):
        _settle(inside)
    if folder.exists():
        os.rename(folder, previous)
    os.rename(partial, folder)
    _settle(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def discard(folder: Path) -> None:
    """Remove ``FOLDER.partial``, if it is there."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)


def found(folder: Path, marker: str = MANIFEST) -> Path:
    """The folder to read: ``FOLDER``, or ``FOLDER.previous`` where a save died while it exchanged the two.

    Args:
        marker: the file by which a folder of this kind is known.

    Raises:
        CheckpointError: there is neither.
    """
    for candidate in (folder, _previous_of(folder)):
        if (candidate / marker).is_file():
            return candidate
        if candidate.exists():
            break
    raise CheckpointError(
        f"{folder} holds no checkpoint: there is no {marker} in it. All ranks must see the folder; "
        "a save that was never waited for leaves none"
    )


def _settle(folder):
    """See the folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
