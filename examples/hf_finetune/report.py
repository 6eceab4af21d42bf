"""What a person looks at: the loss curves over one another in report.png, a table and generated text in report.md."""

import matplotlib
import numpy as np
from moe_lm.tables import markdown_table, show_table, show_verdict

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["LIMIT", "write_report"]

LIMIT = 1e-3  # of the relative difference between two fp32 losses
# Okabe and Ito's colours, which colour-blind people can tell apart; the wide one lies under the others.
STYLES = (
    {"color": "0.75", "linewidth": 7, "solid_capstyle": "round"},
    {"color": "#0072B2", "linewidth": 2},
    {"color": "#D55E00", "linewidth": 2},
)


def write_report(curves, reread_loss, text, folder):
    """Draw, write and print the report.

    Args:
        curves: (run, records) of one device, of the ranks that were killed, and of those that went on.
        reread_loss: held-out loss of what was exported, on one device. text: what it wrote.

    Returns:
        whether every loss is that of one device to within ``LIMIT``.
    """
    reference = {record["step"]: record["loss"] for record in curves[0][1] if "step" in record}
    differences = [_differences(records, reference) for _, records in curves]
    held_out = [next((r["held_out_loss"] for r in records if "held_out_loss" in r), None) for _, records in curves]
    exported = abs(reread_loss - held_out[2]) / held_out[2]
    largest = max(*(d.max() for d in differences[1:]), exported, abs(held_out[2] - held_out[0]) / held_out[0])
    _draw(curves, differences, folder / "report.png")

    header = ("run", "ranks", "steps", "first loss", "last loss", "held-out loss", "largest difference")
    rows = [_row(*curve, loss, d.max()) for curve, loss, d in zip(curves, held_out, differences)]
    rows.append(("exported, read by transformers", "1", "-", "-", "-", f"{reread_loss:.4f}", f"{exported:.1e}"))
    agree = bool(largest < LIMIT)
    side = "below" if agree else "NOT below"
    verdict = f"The largest relative difference from one device is {largest:.1e}: {side} {LIMIT:g}."
    table = markdown_table(header, rows)
    parts = ("# A Hugging Face model under ETP", verdict, table, "![loss curves](report.png)", f"```text\n{text}\n```")
    page = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(page, encoding="utf-8")

    console = show_table(header, rows, width=130)
    console.print("model.generate:", repr(text), highlight=False)
    show_verdict(console, verdict, agree, folder / "report.png", folder / "report.md")
    return agree


def _differences(records, reference):
    """Relative difference from one device, per step."""
    steps = [record for record in records if "step" in record]
    return np.array([abs(r["loss"] - reference[r["step"]]) / reference[r["step"]] for r in steps])


def _row(run, records, held_out, difference):
    steps = [record for record in records if "step" in record]
    return (
        run.title + (", killed" if run.dies else ""),
        str(run.num_ranks),
        f"{steps[0]['step']}-{steps[-1]['step']}",
        f"{steps[0]['loss']:.4f}",
        f"{steps[-1]['loss']:.4f}",
        "-" if held_out is None else f"{held_out:.4f}",
        "-" if run.one_device else f"{difference:.1e}",
    )


def _draw(curves, differences, path):
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, layout="constrained", height_ratios=(1.6, 1)
    )
    for (run, records), difference, style in zip(curves, differences, STYLES):
        steps = [record["step"] for record in records if "step" in record]
        upper.plot(steps, [record["loss"] for record in records if "step" in record], label=run.title, **style)
        if not run.one_device:
            lower.plot(steps, difference, **style)
        if run.dies:
            _mark((upper, lower), steps[-1], "killed", style["color"], "left")
        if run.resumes:
            _mark((upper, lower), steps[0], "resumed", style["color"], "right")
    upper.set_title("Training loss", loc="left", fontweight="bold")
    upper.set_ylabel("nats per character")
    upper.legend(frameon=False, handlelength=3)
    lower.axhline(LIMIT, color="black", linewidth=1, linestyle="--")
    lower.set_yscale("symlog", linthresh=1e-8)
    lower.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2])
    lower.set_title(f"Relative difference from one device, limit {LIMIT:g}", loc="left", fontweight="bold")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _mark(panels, step, word, color, side):
    for axes in panels:
        axes.axvline(step, color=color, linewidth=0.8, linestyle=":")
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "ha": side}
    panels[0].annotate(word, (step, 1), xytext=(4 if side == "left" else -4, -4), fontsize=9, **place)
