"""Errors that all ranks share: what fails on one rank is raised on every rank, with that rank's number."""

import json
import zlib
from collections.abc import Callable
from typing import Any

__all__ = ["CheckpointError", "together"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; every rank raises the same."""


def together(room: Any, what: str, function: Callable[[], Any]) -> list:
    """Run ``function`` on every rank, and return the results of all ranks, which are plain JSON values.

    Every rank of the job must come here. If the function raises on any of them, all raise ``CheckpointError``.

    Args:
        room: the platform's ``state``.
        what: words for the error: what was going on.
    """
    cause, answer = None, {}
    try:
        answer["result"] = function()
        data = zlib.compress(json.dumps(answer).encode())
    except Exception as error:
        # Whatever it is, the other ranks wait for word of it.
        cause = error
        data = zlib.compress(json.dumps({"error": _described(error)}).encode())
    answers = [json.loads(zlib.decompress(part)) for part in room.all_gather(data, f"checkpoint, {what}")]
    errors = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if errors:
        raise CheckpointError(f"{what} failed{_on_ranks(errors, len(answers))}") from cause
    return [answer["result"] for answer in answers]


def _described(error):
    plain = isinstance(error, CheckpointError)
    return str(error) if plain else f"{type(error).__name__}: {error}"


def _on_ranks(errors, num_ranks):
    """Each error once, with the ranks that raised it."""
    ranks_of = {}
    for rank, text in errors.items():
        ranks_of.setdefault(text, []).append(str(rank))
    if num_ranks == 1:
        return ": " + next(iter(ranks_of))
    return "".join(
        f"\n  on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}" for text, ranks in ranks_of.items()
    )
