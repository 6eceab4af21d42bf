"""The runs: one device, ranks that are killed, and ranks of another mesh that go on from their checkpoint."""

import json
import os
import signal
import time
from dataclasses import dataclass

from moe_lm.data import Text
from moe_lm.progress import Progress
from moe_lm.settings import SETTINGS

from hf_finetune.model import Model
from hyper_parallel import checkpoint, huggingface

__all__ = ["BASE", "CHECKPOINT", "FINETUNED", "Run", "runs_of", "train"]

BASE, CHECKPOINT, FINETUNED = "base", "checkpoint", "finetuned"


@dataclass(frozen=True)
class Run:
    """One run of processes.

    Attributes:
        part: its name on the command line.
        mesh: (dp, ep, tp), or None on one device.
        fsdp: cut dense weights by FSDP2, rather than reduce their gradients.
        resumes: go on from the checkpoint, and export.
        dies: one rank is killed on the way.
    """

    part: str
    mesh: tuple[int, int, int] | None = None
    fsdp: bool = False
    resumes: bool = False
    dies: bool = False
    platform: str = "torch"

    @property
    def one_device(self):
        return self.mesh is None

    @property
    def num_ranks(self):
        return 1 if self.mesh is None else self.mesh[0] * self.mesh[1] * self.mesh[2]

    @property
    def title(self):
        way = "FSDP2" if self.fsdp else "reduce_gradients"
        return "one device" if self.one_device else f"(dp, ep, tp) = {self.mesh}, {way}"

    @property
    def name(self):
        """Stem of the run's files."""
        return self.part


def runs_of(mesh, then):
    """The runs of the example, by their parts."""
    runs = (Run("one-device"), Run("first", mesh, dies=True), Run("then", then, fsdp=True, resumes=True))
    return {run.part: run for run in runs}


def train(run, steps, folder):
    """Train on this rank. Rank 0 shows the progress and writes a JSON line per step, and ``held_out_loss`` at last."""
    model, text = Model(SETTINGS, folder / BASE, run.mesh, run.fsdp), Text(SETTINGS)
    first = checkpoint.load(folder / CHECKPOINT, model.model, model.optimizer) if run.resumes else 0
    if model.rank == 0:
        with Progress(steps) as progress, open(folder / f"{run.name}.jsonl", "w", encoding="utf-8") as file:
            progress.start(run.title)
            for record in _records(run, model, text, range(first, steps), folder):
                file.write(json.dumps(record) + "\n")
                file.flush()
                progress.update(record)
    else:
        for _ in _records(run, model, text, range(first, steps), folder):
            pass
    model.close()


def _records(run, model, text, steps, folder):
    every, last = steps.stop // 4, 5 * steps.stop // 8 - 1
    for step in steps:
        start = time.perf_counter()
        loss = model.step(*text.batch(step))
        yield {"step": step, "loss": loss, "seconds": time.perf_counter() - start}
        if run.dies and (step + 1) % every == 0:
            checkpoint.save(folder / CHECKPOINT, model.model, model.optimizer, step=step + 1)
        if run.dies and step == last and model.rank == run.num_ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that fails ends it
    if run.resumes:
        huggingface.save_pretrained(model.model, folder / FINETUNED)
    yield {"held_out_loss": model.evaluate(*text.held_out_batch()), "last": True}
