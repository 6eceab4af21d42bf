"""What a person looks at: curves and expert load in report.png, a table on the terminal and in report.md."""

from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.ticker import PercentFormatter

from moe_lm.settings import SETTINGS
from moe_lm.tables import markdown_table, show_table, show_verdict
from moe_lm.training import Run

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["Curve", "LIMIT", "write_report"]

LIMIT = 1e-3  # of the relative difference between two fp32 loss curves

# Okabe and Ito's colours, which colour-blind people can tell apart; wide under narrow, so that all remain visible.
STYLES = (
    {"color": "0.72", "linewidth": 7, "solid_capstyle": "round"},
    {"color": "#0072B2", "linewidth": 2},
    {"color": "#D55E00", "linewidth": 2, "linestyle": (0, (2, 2))},
)


@dataclass(frozen=True)
class Curve:
    """What one run recorded: losses [steps], load [steps, blocks, experts], and its duration with start-up."""

    run: Run
    losses: np.ndarray
    load: np.ndarray
    training_seconds: float
    total_seconds: float
    held_out_loss: float

    @classmethod
    def of(cls, run, records, total_seconds):
        *steps, last = records
        return cls(
            run,
            np.array([r["loss"] for r in steps]),
            np.array([r["load"] for r in steps]),
            sum(r["seconds"] for r in steps),
            total_seconds,
            last["held_out_loss"],
        )

    @property
    def tokens_per_second(self):
        return SETTINGS.tokens * len(self.losses) / self.training_seconds

    def difference(self, other):
        """Relative difference of the losses, per step."""
        return np.abs(self.losses - other.losses) / np.abs(other.losses)


def write_report(curves, folder):
    """Draw, write and print the report. The first curve is the one that the others are measured by.

    Returns:
        whether every curve stays within ``LIMIT`` of it.
    """
    reference, *others = curves
    differences = [curve.difference(reference) for curve in others]
    agree = all(bool((difference < LIMIT).all()) for difference in differences)
    _draw(reference, others, differences, folder / "report.png")

    header = ("run", "ranks", "seconds", "tokens/s", "first loss", "last loss", "held-out loss", "largest difference")
    rows = [_row(reference, None), *map(_row, others, differences)]
    verdict = (
        f"The largest relative difference from one device over {len(reference.losses)} steps is "
        f"{max(d.max() for d in differences):.1e}: {'below' if agree else 'NOT below'} {LIMIT:g}."
    )
    (folder / "report.md").write_text(_markdown(header, rows, verdict), encoding="utf-8")

    console = show_table(header, rows, width=110)
    show_verdict(console, verdict, agree, folder / "report.png", folder / "report.md")
    return agree


def _row(curve, difference):
    run = curve.run
    return (
        run.title,
        str(run.num_ranks),
        f"{curve.total_seconds:.0f}",
        f"{curve.tokens_per_second:,.0f}",
        f"{curve.losses[0]:.4f}",
        f"{curve.losses[-1]:.4f}",
        f"{curve.held_out_loss:.4f}",
        "-" if difference is None else f"{difference.max():.1e}",
    )


def _markdown(header, rows, verdict):
    s = SETTINGS
    return f"""# ETP against one device

{verdict}

{markdown_table(header, rows)}

Next-character prediction over the Python standard library's source files, loss in nats per character.
{s.batch} sequences of {s.sequence} characters per step. {s.num_blocks} blocks of causal attention and a MoE layer,
dim {s.dim}: {s.num_experts} experts of hidden size {s.hidden_dim}, top-{s.top_k},
and {s.num_shared_experts} shared expert. AdamW in fp32.

All runs start from the same weights and see the same sequences. The difference is relative to one device, and
the largest of all steps. Seconds include starting the processes; tokens/s do not.

![loss curves and expert load](report.png)
"""


def _draw(reference, others, differences, path):
    num_blocks = reference.load.shape[1]
    figure = plt.figure(figsize=(13, 7.5), layout="constrained")
    grid = figure.add_gridspec(2 * num_blocks, 2, width_ratios=(1.15, 1))
    upper = figure.add_subplot(grid[: num_blocks + num_blocks // 2, 0])
    lower = figure.add_subplot(grid[num_blocks + num_blocks // 2 :, 0], sharex=upper)
    _draw_losses(upper, [reference, *others])
    _draw_differences(lower, reference, others, differences)
    axes = [figure.add_subplot(grid[2 * block : 2 * block + 2, 1]) for block in range(num_blocks)]
    _draw_load(figure, axes, others[-1])
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_losses(axes, curves):
    for curve, style in zip(curves, STYLES):
        axes.plot(curve.losses, label=curve.run.title, **style)
    axes.axhline(np.log(SETTINGS.vocab), color="0.5", linewidth=0.8)
    axes.annotate(
        "uniform guess",
        (1, np.log(SETTINGS.vocab)),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color="0.4",
        fontsize=9,
    )
    axes.set_title("Training loss", loc="left", fontweight="bold")
    axes.set_ylabel("nats per character")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.8), handlelength=3.5)
    _plain(axes)


def _draw_differences(axes, reference, others, differences):
    for curve, difference, style in zip(others, differences, STYLES[1:]):
        axes.plot(difference, label=curve.run.title, **style)
    axes.axhline(LIMIT, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        f"limit {LIMIT:g}",
        (1, LIMIT),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
    )
    # Logarithmic, but for the least that two fp32 numbers differ by: many differences are exactly zero.
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_ylim(-2e-9, max(2e-2, *(2 * d.max(initial=0, where=np.isfinite(d)) for d in differences)))
    axes.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2])
    axes.set_title(f"Relative difference from {reference.run.title}", loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("|difference| / loss")
    _plain(axes)


def _draw_load(figure, panels, curve):
    """Heat maps of each expert's share of the rows, experts x steps, with lines between the ep ranks."""
    share = curve.load / curve.load.sum(2, keepdims=True)
    uniform, num_experts = 1 / SETTINGS.num_experts, SETTINGS.num_experts
    per_rank = num_experts // curve.run.ep
    for block, axes in enumerate(panels):
        image = axes.imshow(
            share[:, block].T, aspect="auto", cmap="cividis", vmin=0, vmax=share.max(), interpolation="nearest"
        )
        for rank, first in enumerate(range(0, num_experts, per_rank)):
            axes.axhline(first - 0.5, color="white", linewidth=2.5)
            axes.annotate(
                f"ep {rank}",
                (1, first + (per_rank - 1) / 2),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                rotation=270,
                va="center",
                fontsize=9,
            )
        axes.set_title(f"Expert load, block {block + 1}  ({curve.run.title})", loc="left", fontweight="bold")
        axes.set_yticks(range(num_experts), [f"{e}" for e in range(num_experts)])
        axes.set_ylabel("expert")
    panels[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=panels, label="share of the rows", format=PercentFormatter(1, 0), aspect=40)
    bar.ax.axhline(uniform, color="white", linewidth=2)
    bar.ax.annotate(
        "even",
        (1, uniform),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )


def _plain(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
