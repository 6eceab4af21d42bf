"""Giving a failed collective a name that the user knows."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["operation"]


@contextmanager
def operation(name: str, ranks: Iterable[int], rank: int) -> Iterator[None]:
    """Re-raise a backend's error in this block as one that says which operation failed, over which ranks, and where.

    Args:
        name: what was going on, in words ("dispatch: all-to-all of rows over ep").
        ranks: global ranks of the process group.
        rank: global rank of this process.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"{name} failed on rank {rank}; the group is {list(ranks)}. A rank of the group died, did not enter this "
            f"operation within the time limit, or entered another one. The backend said: {error}"
        ) from error
