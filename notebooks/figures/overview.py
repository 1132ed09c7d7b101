"""Draws overview.png, the README's figure: who reads what, under four schemes. A drawing, not a measurement."""

from pathlib import Path

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

LABELS = ["emb", "A1", "M1", "A2", "M2", "A3", "M3"]  # sources; site s reads the first s + 1 of them
SITES = ["A1", "M1", "A2", "M2", "A3", "M3", "out"]
HEADS, BLOCK = 4, 2
COLOURS = ScalarMappable(PowerNorm(0.5, 0, 1), "cividis")


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def box(ax, x, y, width, colour, text=""):
    ax.add_patch(
        Rectangle((x + 0.06, y + 0.06), width - 0.12, 0.88, facecolor=colour, edgecolor="black", linewidth=0.6)
    )
    ax.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=8)


def main():
    rng = np.random.default_rng(17)
    figure = Figure(figsize=(11, 3.3), dpi=120)
    titles = ["Standard\nadds, every weight 1", "Full AttnRes\none softmax over depth per site"]
    titles += [
        f"Block AttnRes\nover sums of {BLOCK} sublayers",
        f"Multi-head (MHAR)\na softmax per slice, H = {HEADS}",
    ]
    for n, title in enumerate(titles):
        ax = figure.add_axes((0.05 + 0.225 * n, 0.17, 0.205, 0.63))
        ax.set_title(title, fontsize=10)
        for site in range(7):
            if n == 0:
                for i in range(site + 1):
                    box(ax, i, site, 1, "0.85", "1")
            if n == 1:
                for i, w in enumerate(softmax(1.5 * rng.standard_normal(site + 1))):
                    box(ax, i, site, 1, COLOURS.to_rgba(w))
            if n == 2:
                edges = [0, *range(1, site + 1, BLOCK), site + 1]
                for a, b, w in zip(edges, edges[1:], softmax(1.5 * rng.standard_normal(len(edges) - 1))):
                    box(ax, a, site, b - a, COLOURS.to_rgba(w))
            if n == 3:
                weights = np.stack([softmax(1.5 * rng.standard_normal(site + 1)) for _ in range(HEADS)], 1)
                for i in range(site + 1):
                    for h in range(HEADS):
                        at = (i + 0.06 + 0.88 * h / HEADS, site + 0.06)
                        ax.add_patch(Rectangle(at, 0.88 / HEADS, 0.88, facecolor=COLOURS.to_rgba(weights[i, h])))
                    box(ax, i, site, 1, "none")
        ax.set(xlim=(0, 7), ylim=(7, 0), xticks=np.arange(7) + 0.5, yticks=np.arange(7) + 0.5)
        ax.set_xticklabels(LABELS, fontsize=8)
        ax.set_yticklabels(SITES if n == 0 else [], fontsize=8)
        ax.tick_params(length=0)
        ax.set_xlabel("source" if n else "source (A attention, M MLP)", fontsize=9)
        for side in ax.spines.values():
            side.set_visible(False)
    figure.axes[0].set_ylabel("site that reads", fontsize=9)
    bar = figure.colorbar(COLOURS, cax=figure.add_axes((0.955, 0.17, 0.01, 0.63)))
    bar.ax.tick_params(labelsize=8)
    figure.text(0.96, 0.84, "weight", fontsize=9, ha="center")
    figure.savefig(Path(__file__).with_name("overview.png"), metadata={"Software": None})


if __name__ == "__main__":
    main()
