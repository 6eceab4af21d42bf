"""Checkpoints that go from any mesh to any other, and between the frameworks.

    from hyper_parallel import checkpoint

    checkpoint.save("run/checkpoint", model, optimizer, step=1000)
    step = checkpoint.load("run/checkpoint", model, optimizer)

    python -m hyper_parallel.checkpoint inspect run/checkpoint
    python -m hyper_parallel.checkpoint consolidate run/checkpoint whole

See docs/checkpoints.md. Nothing here imports a framework; what is asked of one is in ``platform/<name>/state.py``.
"""

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.consolidation import consolidate
from hyper_parallel.checkpoint.loading import load
from hyper_parallel.checkpoint.saving import Saving, save

__all__ = ["save", "load", "Saving", "CheckpointError", "consolidate"]
