"""The arrangements of ``examples/train_matrix.py``, trained by running ranks."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")


def differences(context, words, sum_gradients=True):
    """By title: the last record of each arrangement whose title holds all of one of ``words``, and its losses."""
    sys.path.insert(0, EXAMPLES)
    try:
        from moe_lm import arrangements, matrix, weights
    finally:
        sys.path.remove(EXAMPLES)
    settings = replace(matrix.SMALLER, dim=16, hidden_dim=32, sequence=8, batch=8, num_experts=4)
    start = matrix.Start(context.platform, context.world_size)
    rows = [arrangements.ONE_DEVICE, *arrangements.arrangements(start.platform, start.num_ranks)]
    rows = [row for row in rows if row.title in ("one device", *words)]
    folder, found = Path(tempfile.mkdtemp()), {}
    weights.save_initial_weights(settings, folder)
    for record in matrix.train_under(start, rows, 2, folder, sum_gradients, settings):
        kept = found.setdefault(record["title"], {"losses": []})
        kept["losses"] += [record["loss"]] if "loss" in record else []
        kept.update({kind: record[kind] for kind in ("gradients", "weights") if kind in record})
    return found
