"""Training under one arrangement after the other, in ranks that are started once, and what that differs by."""

import importlib
import itertools
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from safetensors.numpy import load_file, save_file

import hyper_parallel as hp
from moe_lm.data import Text
from moe_lm.settings import SETTINGS
from moe_lm.weights import load_initial_weights

__all__ = ["SMALLER", "Start", "forget_reference", "joined", "train_under", "write_records"]

SMALLER = replace(SETTINGS, dim=48, hidden_dim=96, sequence=32)
REFERENCE = "reference.safetensors"


@dataclass(frozen=True)
class Start:
    """One start of ranks, which train under all arrangements of their number."""

    platform: str
    num_ranks: int

    @property
    def title(self):
        return f"{self.platform} on {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"

    @property
    def name(self):
        """Stem of its files."""
        return self.title.replace(" ", "-")

    @property
    def one_device(self):
        return self.num_ranks == 1


def train_under(start, rows, steps, folder, sum_gradients=True, settings=SMALLER):
    """Train on this rank, and yield the records.

    Each arrangement yields a record per step, with ``title``, ``step``, ``loss`` and ``seconds``, and one of what
    differs from the reference: ``gradients`` of the first step, and ``weights`` after the last one, each the largest
    relative difference of all parameters on all ranks. The first to train, on one device, leaves the reference.
    """
    hp.set_platform(start.platform)
    framework = _framework(start)
    initial, text = load_initial_weights(folder), Text(settings)
    for row in rows:
        trainer = framework.Trainer(settings, initial, row, sum_gradients)
        for step in range(steps):
            began = time.perf_counter()
            loss, _ = trainer.step(*text.batch(step))
            yield {"title": row.title, "step": step, "loss": loss, "seconds": time.perf_counter() - began}
            if step == 0:
                gradients = {name: array.copy() for name, array in trainer.gradients().items()}
        yield {"title": row.title, **_differences(trainer, folder, gradients=gradients, weights=trainer.weights())}


def _differences(trainer, folder, **found):
    path = folder / REFERENCE
    if not path.exists():
        _save(path, found)
    reference, differences = load_file(path), {}
    for kind, arrays in found.items():
        pairs = ((array, trainer.own_part(name, reference[f"{kind}/{name}"])) for name, array in arrays.items())
        # The parts of one array are compared with the largest number of all of it.
        differences[kind] = trainer.largest(max(_relative(*pair) for pair in pairs))
    return differences


def _relative(found, expected):
    if not np.isfinite(found).all():
        return np.inf
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _save(path, arrays):
    """All or nothing, so that no rank reads half a file."""
    unfinished = path.with_suffix(".unfinished")
    named = ((f"{kind}/{name}", array) for kind, by_name in arrays.items() for name, array in by_name.items())
    save_file({name: np.ascontiguousarray(array) for name, array in named}, unfinished)
    unfinished.replace(path)


@contextmanager
def joined(start):
    """Join the ranks of the launcher: this process's rank."""
    if start.one_device:
        yield 0
        return
    hp.set_platform(start.platform)
    framework = _framework(start)
    yield framework.join()
    framework.leave()


def _framework(start):
    return importlib.import_module(f"moe_lm.{start.platform}_training")


def forget_reference(folder):
    """Remove what an earlier run left."""
    (folder / REFERENCE).unlink(missing_ok=True)


def write_records(records, path):
    """Write each record as a line of JSON as it comes, and then that it was the last. Without a path, only train."""
    if path is None:
        for _ in records:
            pass
        return
    with open(path, "w", encoding="utf-8") as file:
        for record in itertools.chain(records, [{"last": True}]):
            file.write(json.dumps(record) + "\n")
            file.flush()
