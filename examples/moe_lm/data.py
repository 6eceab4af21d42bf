"""Real text that every machine has: the Python standard library's own source files, character by character."""

import sysconfig
from pathlib import Path

import numpy as np

__all__ = ["Text"]

NUM_CHARACTERS = 4_000_000
HELD_OUT = 0.05
SKIP = {"site-packages", "test", "tests", "idle_test"}

# Newline, printable ASCII, and one id for every other character: 97 in all.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
OTHER = len(CHARACTERS)


class Text:
    """The text as ids, the same in every process, and batches from it."""

    def __init__(self, settings):
        self.settings = settings
        ids = _to_ids(_read())
        cut = int(len(ids) * (1 - HELD_OUT))
        self.training, self.held_out = ids[:cut], ids[cut:]

    def batch(self, step):
        """Characters and the ones that follow them, int64 [batch, sequence]: for a step, the same in every process."""
        rng = np.random.default_rng((self.settings.seed, step))
        return self._windows(self.training, rng)

    def held_out_batch(self):
        """One batch from the files that training never sees."""
        return self._windows(self.held_out, np.random.default_rng(self.settings.seed))

    def _windows(self, ids, rng):
        starts = rng.integers(0, len(ids) - self.settings.sequence - 1, self.settings.batch)
        windows = ids[starts[:, None] + np.arange(self.settings.sequence + 1)]
        return windows[:, :-1], windows[:, 1:]


def _read():
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(library) for path in library.rglob("*.py")]
    # Single modules before packages: what people read and write, rather than the tables in `encodings`.
    names = sorted((n for n in names if not SKIP & set(n.parts)), key=lambda name: (len(name.parts), name.as_posix()))
    pieces, size = [], 0
    for name in names:
        pieces.append((library / name).read_text(encoding="utf-8", errors="replace"))
        size += len(pieces[-1])
        if size >= NUM_CHARACTERS:
            break
    return "".join(pieces)[:NUM_CHARACTERS]


def _to_ids(text):
    id_of = np.full(128, OTHER, np.int64)
    id_of[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return id_of[np.minimum(codes, 127)]
