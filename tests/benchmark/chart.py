"""The charts: time relative to the floor, and how cost grows."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

__all__ = ["draw_ratios", "draw_growth"]

INK, GREY, PALE = "#1f2933", "#5c6b7a", "#d9dfe5"
# Okabe and Ito's palette, told apart with any colour vision; hatching tells them apart without colour.
STYLE = {
    "titan": ("TorchTitan 0.2.2", "#E69F00", "//"),
    "ours": ("ours", "#0072B2", ""),
    "scores inside": ("ours, scores inside", "#56B4E9", ".."),
    "dedup": ("ours, dedup", "#009E73", "xx"),
    "split": ("ours, split", "#CC79A7", "\\\\"),
}
TITLES = {
    ("experts", "float32"): "Experts, fp32",
    ("experts", "bfloat16"): "Experts, bf16",
    ("moe", "float32"): "MoE layer, fp32",
    ("moe", "bfloat16"): "MoE layer, bf16",
}
GROWING = {"experts": "Experts, same rows", "tokens": "Tokens, 16 experts", "ranks": "Ranks = ep, same tokens each"}


def draw_ratios(results, path):
    _style()
    figure, grid = plt.subplots(2, 2, figsize=(11, 7.6), dpi=150, sharey="col")
    for axes, key in zip(grid.ravel(), TITLES):
        _panel(axes, [result for result in results["works"] if (result["layer"], result["dtype"]) == key])
        axes.set_title(TITLES[key], loc="left", fontsize=12, weight="bold", color=INK)
    shown = {name for result in results["works"] for name in result["memory"]}
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
        for name, (label, colour, hatch) in STYLE.items()
        if name in shown
    ]
    figure.legend(handles=handles, loc="upper left", ncols=len(handles), frameon=False, bbox_to_anchor=(0.012, 0.928))
    title = "Forward and backward, relative to the floor"
    figure.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=15, weight="bold")
    subtitle = "floor: matrix products by the fastest call, raw collectives"
    figure.text(0.5, 0.961, subtitle, fontsize=9.5, color=GREY)
    note = f"{results['machine']}. {results['shape']}. Bars: medians; whiskers: quartiles. {results['date']}."
    figure.text(0.02, 0.015, note, fontsize=8, color=GREY)
    figure.tight_layout(rect=(0.005, 0.035, 0.995, 0.9))
    _save(figure, path)


def _panel(axes, works):
    """A group of bars per mesh; not every contender runs on every mesh."""
    present = [[name for name in STYLE if f"{name} / floor" in result["ratios"]] for result in works]
    width = 0.84 / max((len(names) for names in present), default=1)
    for place, (names, result) in enumerate(zip(present, works)):
        for number, name in enumerate(names):
            low, middle, high = result["ratios"][f"{name} / floor"]["both"]
            x = place + (number - (len(names) - 1) / 2) * width
            _, colour, hatch = STYLE[name]
            axes.bar(x, middle, width * 0.9, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            whiskers = [[middle - low], [high - middle]]
            axes.errorbar(x, middle, whiskers, fmt="none", ecolor=INK, elinewidth=1.2, capsize=2.5)
            above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{middle:.2f}", (x, high), **above)
    axes.axhline(1, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.text(len(works) - 0.5, 1, " floor", fontsize=8.5, color=INK, va="bottom", ha="left")
    axes.set_xticks(range(len(works)), [f"ep {result['mesh'][0]}, tp {result['mesh'][1]}" for result in works])
    axes.set_xlim(-0.55, len(works) - 0.2)
    axes.margins(y=0.12)


def draw_growth(results, path):
    _style()
    growth = results["growth"]
    figure, grid = plt.subplots(1, 4, figsize=(13, 3.7), dpi=150)
    for axes, (what, title) in zip(grid, GROWING.items()):
        sizes = [size for size, _, _ in growth["layers"][what]]
        for column, label, colour, marker in ((1, "ours", "#0072B2", "o"), (2, "floor", GREY, "s")):
            axes.plot(sizes, [row[column] for row in growth["layers"][what]], marker=marker, color=colour, label=label)
        axes.set(xscale="log", yscale="log" if what == "tokens" else "linear", xlabel=f"number of {what}")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        if what != "tokens":
            axes.set_ylim(0)
        axes.set_title(title, loc="left", fontsize=10.5, weight="bold")
    grid[0].set_ylabel("processor ms per rank,\nforward and backward")
    grid[0].legend(frameon=False)
    rows = sorted((r, ms) for experts, ep, r, ms in growth["host_arithmetic"] if (experts, ep) == (128, 8))
    grid[3].plot([r for r, _ in rows], [ms for _, ms in rows], marker="o", color="#009E73")
    grid[3].set(xscale="log", yscale="log", xlabel="rows received, 128 experts, ep 8", ylabel="host ms per call")
    grid[3].set_title("Index arithmetic", loc="left", fontsize=10.5, weight="bold")
    figure.text(0.01, 0.02, f"{results['machine']}. {results['date']}.", fontsize=8, color=GREY)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    _save(figure, path)


def _style():
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9.5,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": GREY,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": PALE,
        }
    )


def _save(figure, path):
    figure.savefig(path, facecolor="white", metadata={"Software": None})
    plt.close(figure)
