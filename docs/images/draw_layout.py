"""Draw layout.png: four ranks as a mesh of ep 2 x tp 2, and what travels between them.

python docs/images/draw_layout.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, GREY, PALE, CARD = "#1f2933", "#5c6b7a", "#c3ccd5", "#f7f9fb"
# Okabe and Ito's palette: told apart with any colour vision. Every colour also carries its expert's number.
EXPERT = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
ON_EXPERT = ("white", INK, "white", INK)
EP_COLOUR, TP_COLOUR = "#3b4cc0", "#b5482a"

CARD_W, CARD_H = 37, 24
COLUMN_X, ROW_Y = (18, 72), (41, 5)
ROWS_OF_EP = ((0, 0, 0, 1, 2, 3), (0, 1, 2, 2, 3, 3))


def draw(path):
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, axes = plt.subplots(figsize=(11, 7.0), dpi=150)
    axes.set(xlim=(0.5, 113), ylim=(-2.6, 73))
    axes.set_aspect("equal")
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    for ep in (0, 1):
        for tp in (0, 1):
            draw_rank(axes, ep, tp)
    draw_headings(axes)
    draw_arrows(axes)
    write(
        axes,
        63.5,
        0.8,
        "A square is a row: a token on its way to one expert, whose number it shows. "
        "A bar is an expert; its width is the hidden dim.",
        9.5,
        GREY,
    )
    figure.savefig(path, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def write(axes, x, y, text, size, colour=INK, **more):
    axes.text(x, y, text, fontsize=size, color=colour, **{"ha": "center", "va": "center", **more})


def draw_rank(axes, ep, tp):
    x, y = COLUMN_X[tp], ROW_Y[ep]
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            CARD_W,
            CARD_H,
            boxstyle="round,pad=0,rounding_size=1.4",
            facecolor=CARD,
            edgecolor=PALE,
            linewidth=1.3,
        )
    )
    write(axes, x + 2, y + CARD_H - 3, f"rank {2 * ep + tp}", 13, weight="bold", ha="left")
    write(axes, x + CARD_W - 2, y + CARD_H - 3, f"ep {ep}, tp {tp}", 10.5, GREY, ha="right")

    write(axes, x + 2, y + CARD_H - 8, "its rows", 9.5, GREY, ha="left")
    for place, expert in enumerate(ROWS_OF_EP[ep]):
        left = x + 12.5 + 3.9 * place
        axes.add_patch(Rectangle((left, y + CARD_H - 9.6), 3.2, 3.2, facecolor=EXPERT[expert], edgecolor="none"))
        write(axes, left + 1.6, y + CARD_H - 8.05, str(expert), 9.5, ON_EXPERT[expert], weight="bold")

    for place, expert in enumerate((2 * ep, 2 * ep + 1)):
        bottom, left, half = y + 7.2 - 5.4 * place, x + 12.5, 11.35
        write(axes, x + 2, bottom + 1.9, f"expert {expert}", 9.5, GREY, ha="left")
        axes.add_patch(
            Rectangle(
                (left, bottom), 2 * half, 3.8, facecolor="white", edgecolor=PALE, linewidth=1.1, linestyle=(0, (3, 2))
            )
        )
        axes.add_patch(Rectangle((left + half * tp, bottom), half, 3.8, facecolor=EXPERT[expert], edgecolor="none"))
        write(
            axes,
            left + half * (tp + 0.5),
            bottom + 1.8,
            f"{('first', 'second')[tp]} half",
            9,
            ON_EXPERT[expert],
            weight="bold",
        )


def draw_headings(axes):
    for tp, half in enumerate(("first", "second")):
        centre = COLUMN_X[tp] + CARD_W / 2
        write(axes, centre, 70.2, f"tp {tp}", 13, TP_COLOUR, weight="bold")
        write(axes, centre, 67.2, f"the {half} half of every expert", 10, GREY)
    for ep, experts in enumerate(("experts 0, 1", "experts 2, 3")):
        centre = ROW_Y[ep] + CARD_H / 2
        write(axes, 8.5, centre + 1.6, f"ep {ep}", 13, EP_COLOUR, weight="bold")
        write(axes, 8.5, centre - 1.6, experts, 10, GREY)


def draw_arrows(axes):
    style = {"arrowstyle": "<|-|>", "mutation_scale": 17, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
    for tp in (0, 1):
        x = COLUMN_X[tp] + 7
        axes.add_patch(FancyArrowPatch((x, ROW_Y[0] - 0.7), (x, ROW_Y[1] + CARD_H + 0.7), color=EP_COLOUR, **style))
        write(axes, x + 2.4, 36.6, "all-to-all over ep", 11, EP_COLOUR, weight="bold", ha="left")
        write(axes, x + 2.4, 33.4, "rows go to their expert and back", 9.5, GREY, ha="left")
    for ep in (0, 1):
        y, left, right = ROW_Y[ep] + 8.6, COLUMN_X[0] + CARD_W, COLUMN_X[1]
        axes.add_patch(FancyArrowPatch((left + 0.7, y), (right - 0.7, y), color=TP_COLOUR, **style))
        write(axes, (left + right) / 2, y + 5.3, "sum", 11, TP_COLOUR, weight="bold")
        write(axes, (left + right) / 2, y + 2.4, "over tp", 11, TP_COLOUR, weight="bold")
        write(axes, (left + right) / 2, y - 3.2, "of both\nhalves' terms", 9.5, GREY, va="top", linespacing=1.35)


if __name__ == "__main__":
    draw(Path(__file__).with_name("layout.png"))
