"""One run: what it is called, its loop on every rank, and the records of its steps."""

import importlib
import json
import time
from dataclasses import dataclass

from hyper_parallel import set_platform
from moe_lm.arrangements import ONE_DEVICE, Arrangement
from moe_lm.data import Text
from moe_lm.progress import Progress
from moe_lm.settings import SETTINGS
from moe_lm.weights import load_initial_weights

__all__ = ["Run", "train"]


@dataclass(frozen=True)
class Run:
    """One training run: on one device, or on ``ep * tp`` ranks."""

    platform: str
    ep: int = 1
    tp: int = 1
    one_device: bool = False

    @property
    def title(self):
        return f"one device {self.platform}" if self.one_device else f"ETP {self.ep}x{self.tp} {self.platform}"

    @property
    def name(self):
        """Stem of the run's files."""
        return self.title.lower().replace(" ", "-")

    @property
    def num_ranks(self):
        return self.ep * self.tp


def train(run, steps, folder):
    """Train on this rank. Rank 0 shows the progress and writes one JSON line per step.

    A record holds ``step``, ``loss`` (of all ranks' sequences), ``load`` (rows per block and expert), and ``seconds``.
    The last line holds ``held_out_loss`` instead, and ``last``.
    """
    set_platform(run.platform)
    framework = importlib.import_module(f"moe_lm.{run.platform}_training")
    rank = 0 if run.one_device else framework.join()
    arrangement = ONE_DEVICE if run.one_device else Arrangement(run.title, ep=run.ep, tp=run.tp)
    trainer = framework.Trainer(SETTINGS, load_initial_weights(folder), arrangement)
    text = Text(SETTINGS)
    if rank == 0:
        with Progress(steps) as progress, open(folder / f"{run.name}.jsonl", "w", encoding="utf-8") as file:
            progress.start(run.title)
            for record in _records(trainer, text, steps):
                file.write(json.dumps(record) + "\n")
                file.flush()
                progress.update(record)
    else:
        for _ in _records(trainer, text, steps):
            pass
    if not run.one_device:
        framework.leave()


def _records(trainer, text, steps):
    for step in range(steps):
        start = time.perf_counter()
        loss, load = trainer.step(*text.batch(step))
        yield {"step": step, "loss": loss, "load": load.tolist(), "seconds": time.perf_counter() - start}
    yield {"held_out_loss": trainer.evaluate(*text.held_out_batch()), "last": True}
