"""A bar on rank 0's terminal while bytes are written or read; nothing where there is no terminal."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(what: str, num_bytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Give a function to be told the number of bytes done since it was last called.

    The bar is rich's where rich is installed, and else a line of text on stderr.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
    elif importlib.util.find_spec("rich") is not None:
        with _rich_bar() as bar:
            task = bar.add_task(what, total=num_bytes)
            yield lambda count: bar.advance(task, count)
    else:
        yield _Line(what, num_bytes)
        print(file=sys.stderr)


def _rich_bar():
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=Console(stderr=True))


class _Line:
    """Percents on one line, written anew when they change."""

    def __init__(self, what, num_bytes):
        self._what, self._num_bytes, self._done, self._percent = what, num_bytes, 0, -1

    def __call__(self, count):
        self._done += count
        percent = 100 * self._done // max(self._num_bytes, 1)
        if percent != self._percent:
            self._percent = percent
            print(f"\r{self._what}: {percent} %", end="", file=sys.stderr, flush=True)
