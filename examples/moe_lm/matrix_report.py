"""The table and the picture of ``train_matrix.py``."""

from dataclasses import dataclass

import matplotlib
import numpy as np

from moe_lm.arrangements import Limits
from moe_lm.tables import markdown_table, show_table, show_verdict

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["Row", "write_report"]

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = {"torch": "#0072B2", "mindspore": "#D55E00"}
TITLES = {"losses": "Losses, all steps", "gradients": "Gradients, first step", "weights": "Weights, last step"}
KINDS = tuple(TITLES)
LEAST = 1e-9  # shown for what does not differ at all


@dataclass(frozen=True)
class Row:
    """What training under one arrangement gave: losses [steps], and the differences of its last record."""

    platform: str
    title: str
    num_ranks: int
    limits: Limits
    losses: np.ndarray
    seconds: float
    gradients: float
    weights: float

    @classmethod
    def of(cls, platform, arrangement, records):
        *steps, last = records
        return cls(
            platform,
            arrangement.title,
            arrangement.num_ranks,
            arrangement.limits,
            np.array([record["loss"] for record in steps]),
            sum(record["seconds"] for record in steps),
            last["gradients"],
            last["weights"],
        )

    def differences(self, reference):
        """Relative differences from one device, by kind: the largest of all steps, or of all parameters."""
        losses = float((np.abs(self.losses - reference.losses) / np.abs(reference.losses)).max())
        return {"losses": losses, "gradients": self.gradients, "weights": self.weights}

    def agrees(self, reference):
        """Whether all of them are below their limits; a NaN is not."""
        return all(d < getattr(self.limits, kind) for kind, d in self.differences(reference).items())


def write_report(rows, folder):
    """Draw, write and print. The first row is the one that the others are measured by.

    Returns:
        whether all rows agree with it.
    """
    reference, *others = rows
    out = sum(not row.agrees(reference) for row in others)
    verdict = f"{len(others) - out} of {len(others)} arrangements agree with {reference.title} on {reference.platform}."
    header = ("arrangement", "platform", "ranks", "ms/step", "last loss", *KINDS, "verdict")
    cells = [_cells(row, reference) for row in rows]
    _draw(reference, others, folder / "matrix.png")
    (folder / "matrix.md").write_text(_markdown(header, cells, verdict), encoding="utf-8")

    styles = [None if row.agrees(reference) else "bold red" for row in rows]
    console = show_table(header, cells, 160, styles)
    show_verdict(console, verdict, not out, folder / "matrix.png", folder / "matrix.md")
    return not out


def _cells(row, reference):
    found = row.differences(reference).items()
    differences = [f"{d:.0e} of {getattr(row.limits, kind):.0e}" for kind, d in found]
    is_reference = row is reference
    return (
        row.title,
        row.platform,
        str(row.num_ranks),
        f"{1e3 * row.seconds / len(row.losses):.0f}",
        f"{row.losses[-1]:.4f}",
        *("-" * len(KINDS) if is_reference else differences),
        "reference" if is_reference else "agrees" if row.agrees(reference) else "DIFFERS",
    )


def _markdown(header, cells, verdict):
    return f"""# One model under many arrangements, against one device

{verdict}

{markdown_table(header, cells)}

Each cell: the largest relative difference from one device, of the limit. Losses: of all steps. Gradients: of the first
step, all parameters and all ranks. Weights: the same after the last step.

![differences and limits](matrix.png)
"""


def _draw(reference, others, path):
    platforms = list(dict.fromkeys(row.platform for row in others))
    titles = list(dict.fromkeys(row.title for row in others))
    figure, axes = plt.subplots(
        1, len(KINDS), figsize=(13, 1.5 + 0.3 * len(titles)), sharey=True, layout="constrained", squeeze=False
    )
    for panel, kind in zip(axes[0], KINDS):
        for number, platform in enumerate(platforms):
            found = [row for row in others if row.platform == platform]
            places = [titles.index(row.title) + 0.2 * (number - (len(platforms) - 1) / 2) for row in found]
            differences = [max(LEAST, row.differences(reference)[kind]) for row in found]
            limits = [getattr(row.limits, kind) for row in found]
            panel.scatter(differences, places, s=36, color=COLOURS[platform], label=platform, zorder=3)
            panel.scatter(limits, places, s=90, color="black", marker="|", zorder=2)
        panel.set_xscale("log")
        panel.set_title(TITLES[kind], loc="left", fontweight="bold")
        panel.grid(axis="both", color="0.92")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("largest relative difference from one device", fontsize=10)
    axes[0][0].set_yticks(range(len(titles)), titles)
    axes[0][0].invert_yaxis()
    axes[0][-1].scatter([], [], s=90, color="black", marker="|", label="limit")
    axes[0][-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
