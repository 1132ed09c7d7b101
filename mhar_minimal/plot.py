"""Figures: values in, a matplotlib figure out. Nothing is shown, trained or remembered here.

A notebook shows the figure that is a cell's last value, or that is given to ``display``. pyplot is not used, so no
figure is shown twice and none is kept open. What is called an array may be a tensor, a NumPy array or nested lists.
"""

import io
import math
from collections.abc import Mapping, Sequence

import matplotlib.figure
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PolyCollection
from matplotlib.colors import PowerNorm
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from numpy.typing import ArrayLike
from torch import Tensor

# In the spirit of Okabe and Ito, with CIELAB lightness at least 10 apart: L* = 0, 65, 17, 78, 36, 49, 88.
PALETTE = ("#000000", "#E08A2C", "#241A70", "#84C8F0", "#9C2C1A", "#0F8566", "#F0E05A")
DASHES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
X_LABELS = {"step": "optimizer step", "seconds": "training time (s)", "tokens": "tokens seen (bytes)"}


class Figure(matplotlib.figure.Figure):
    """A figure that a notebook can show although pyplot, which would have told it how, was never imported."""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        return png(self), {"alt": self.alt()}

    def alt(self) -> str:
        """What is drawn, in words for who cannot see it: of each axes the title, the two labels and the series."""
        panels = []
        for ax in self.axes:
            labels = " by ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
            series = "; ".join(ax.get_legend_handles_labels()[1])
            panels.append(": ".join(filter(None, (ax.get_title(), labels, series))))
        return " | ".join(panels).replace("\n", " ")


def png(figure: matplotlib.figure.Figure) -> bytes:
    """The figure as a PNG: equal figures give equal bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi)
    return file.getvalue()


def loss_curves(histories: Mapping[str, Sequence], x: str = "step", minus: str | None = None) -> Figure:
    """Validation loss of several runs, in nats per byte.

    Args:
        histories: by name the rows of a run, of which the columns ``x`` and ``val_loss`` are drawn.
        x: "step", "seconds" or "tokens". Equal steps are not equal time.
        minus: the name of a run that is subtracted from all others, and not drawn itself.

    Raises:
        ValueError: another x, no run, or more than there are colours; a run to subtract that is not there, or that has
            not the others' x.
    """
    if x not in X_LABELS:
        raise ValueError(f"x={x!r}; accepted: {', '.join(X_LABELS)}")
    if minus not in (None, *histories):
        raise ValueError(f"minus={minus!r}; accepted: {', '.join(histories)}")
    curves = {name: ([getattr(r, x) for r in rows], [r.val_loss for r in rows]) for name, rows in histories.items()}
    if minus is None:
        return _lines("histories", curves, X_LABELS[x], "validation loss (nats per byte)")
    at, reference = curves.pop(minus)
    if any(other != at for other, _ in curves.values()):
        raise ValueError(f"minus={minus!r} with another {x} than the others; accepted: runs evaluated at the same {x}")
    curves = {name: (at, [a - b for a, b in zip(losses, reference)]) for name, (_, losses) in curves.items()}
    figure = _lines("histories", curves, X_LABELS[x], f"minus {minus} (nats per byte)")
    figure.axes[0].axhline(0, color="black", linewidth=1)
    return figure


def by_depth(
    series: Mapping[str, Sequence[float]],
    ylabel: str,
    xlabel: str = "depth (A attention, M MLP, of layer n)",
    log: bool = False,
) -> Figure:
    """One value per sublayer (2L) or per site (2L + 1), for several models.

    Raises:
        ValueError: no series, or more than there are colours.
    """
    figure = _lines("series", {name: (range(len(y)), y) for name, y in series.items()}, xlabel, ylabel)
    [ax] = figure.axes
    if log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # readable also within a single decade
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    _ticks(ax.xaxis, depth_labels(max(map(len, series.values()))), room=16)
    return figure


def depth_weights(heatmap: ArrayLike | Tensor, titles: Sequence[str] | None = None, brightest: float = 1) -> Figure:
    """The depth weights of all sites, a panel per head; hatched where a site cannot read a source.

    Args:
        heatmap: array [H, sites, sources], NaN at impossible cells, as `probe.heatmap` gives it. With as many sources
            as sites the sources are labelled as sublayers, with fewer as blocks.
        titles: one per panel; without them the heads are numbered, if there are several.
        brightest: the weight that gets the brightest colour, as larger ones do.

    Raises:
        ValueError: not three dimensions, weights outside 0 to 1, or a number of titles that is not H.
    """
    cells = _array("heatmap", heatmap, 3)
    heads, sites, sources = cells.shape
    if titles is None:
        titles = [f"head {h}" for h in range(heads)] if heads > 1 else [""]
    if len(titles) != heads:
        raise ValueError(f"titles has {len(titles)} entries; accepted: {heads}, one per head")
    rows = math.ceil(heads / 4)
    columns = math.ceil(heads / rows)
    in_blocks = sources < sites
    figure, ax = _axes(
        "source (block; the last may be running)" if in_blocks else "source",
        "site",
        top=0.25,
        right=1.0,
        height=0.8 + (2.4 if rows == 1 else 1.6 * rows),
    )
    ax.set_frame_on(False)
    across, down = 1.2 * sources, 1.22 * sites  # one axes for all panels: ticks are what takes time to draw
    for h, title in enumerate(titles):
        x, y = across * (h % columns), down * (h // columns)
        image = _weights(ax, cells[h], x, y, brightest)
        ax.text(x + (sources - 1) / 2, y - 0.5 - 0.02 * sites, title, fontsize=9, ha="center", va="bottom")
    ax.set_xlim(-0.5, across * (columns - 1) + sources - 0.5)
    ax.set_ylim(down * (rows - 1) + sites - 0.5, -0.5)
    read = [f"b{n}" for n in range(sources)] if in_blocks else ["emb", *depth_labels(sites)[:-1]]
    _ticks(ax.xaxis, read, 54 // columns // (max(map(len, read)) + 1), across * np.arange(columns))
    _ticks(ax.yaxis, depth_labels(sites), 14 if rows == 1 else 8, down * np.arange(rows))
    _colour_bar(figure, image)
    return figure


def read_matrix(matrix: ArrayLike | Tensor, heads: int | None = None) -> Figure:
    """The weight with which each channel of a read-out takes each source: row i, channel d.

    One head gives every channel the same weights (a matrix of rank one), H heads give H blocks of channels their own.

    Args:
        matrix: array [sources, D].
        heads: draw the boundaries between this many heads; divides D.

    Raises:
        ValueError: not two dimensions, weights outside 0 to 1, or heads that do not divide D.
    """
    cells = _array("matrix", matrix, 2)
    figure, ax = _matrix(cells, "channel")
    if heads is not None:
        if heads < 1 or cells.shape[1] % heads:
            raise ValueError(f"heads={heads} does not divide D={cells.shape[1]}; accepted: a divisor of D")
        edges = np.arange(1, heads) * (cells.shape[1] // heads) - 0.5
        ax.vlines(edges, *ax.get_ylim(), color="white", linewidth=1)
    return figure


def token_weights(weights: ArrayLike | Tensor, text: str) -> Figure:
    """The depth weights of one site and head over a text, a column per byte.

    Args:
        weights: array [N, T].
        text: its T bytes in UTF-8.

    Raises:
        ValueError: not two dimensions, weights outside 0 to 1, or another number of bytes than T.
    """
    cells = _array("weights", weights, 2)
    length = len(text.encode())
    if length != cells.shape[1]:
        raise ValueError(f"text has {length} bytes; accepted: {cells.shape[1]}, the width of weights")
    figure, ax = _matrix(cells, "text, byte by byte", width=max(6.4, 1.75 + 0.08 * length))
    _letters(ax, text)
    return figure


def heads_over_text(weights: ArrayLike | Tensor, text: str, byte: int, dim: int, brightest: float = 1) -> Figure:
    """How the heads of one site read a text: a band per head with its depth weights, under the read matrix of one byte.

    At the right the sources of the first band are numbered, as many as fit; every band has the same ones.

    Args:
        weights: array [N, T, H].
        text: its T bytes in UTF-8.
        byte: position of the byte whose read matrix is shown, 0 to T - 1; framed in every band.
        dim: D, the number of channels; H divides it.
        brightest: the weight that gets the brightest colour, as larger ones do.

    Raises:
        ValueError: not three dimensions, weights outside 0 to 1, another number of bytes than T, a byte beyond them,
            or heads that do not divide D.
    """
    cells = _array("weights", weights, 3)
    sources, length, heads = cells.shape
    if len(text.encode()) != length:
        raise ValueError(f"text has {len(text.encode())} bytes; accepted: {length}, the T of weights")
    if not 0 <= byte < length:
        raise ValueError(f"byte={byte}; accepted: 0 to {length - 1}")
    if dim % heads:
        raise ValueError(f"heads={heads} does not divide dim={dim}; accepted: a divisor of dim")
    width = max(6.4, 1.75 + 0.08 * length)
    ylabel = "depth weights of head (right: sources)"
    figure, ax = _axes("text, byte by byte", ylabel, top=2.35, right=1.0, width=width, height=6.2)
    centres = 1.15 * sources * np.arange(heads) + (sources - 1) / 2
    for h, centre in enumerate(centres):
        image = _weights(ax, cells[..., h], y=centre - (sources - 1) / 2, brightest=brightest)
    ax.set_ylim(centres[-1] + sources / 2, -0.5)
    ax.set_yticks(centres, range(heads))
    for source in _shown(sources, room=max(2, 23 // heads)):
        ax.text(1.01, source, source, fontsize=8, va="center", transform=ax.get_yaxis_transform())
    ax.vlines((byte - 0.5, byte + 0.5), *ax.get_ylim(), color="white", linewidth=1)
    _letters(ax, text)
    _colour_bar(figure, image)
    box = ax.get_position()
    upper = figure.add_axes((box.x0, 1 - 1.8 / 6.2, box.width, 1.65 / 6.2))
    _weights(upper, cells[:, byte].repeat(dim // heads, axis=-1), brightest=brightest)
    upper.vlines(np.arange(1, heads) * (dim // heads) - 0.5, *upper.get_ylim(), color="white", linewidth=1)
    upper.set_xlabel(f"channel (read matrix of the framed byte, {byte})", fontsize=9)
    upper.set_ylabel("source", fontsize=9)
    upper.tick_params(labelsize=8)
    _ticks(upper.yaxis, [str(i) for i in range(sources)], room=8)
    return figure


def costs(counted: Mapping[str, float], measured: Mapping[str, float], ylabel: str) -> Figure:
    """What was counted on paper beside what was measured, a pair of bars per name.

    Raises:
        ValueError: nothing, or different names in the two.
    """
    if not counted or list(counted) != list(measured):
        raise ValueError(f"measured has names {list(measured)}; accepted: those of counted, {list(counted)}")
    figure, ax = _axes("", ylabel, top=0.3)
    at = np.arange(len(counted))
    for side, (label, values) in enumerate({"counted": counted, "measured": measured}.items()):
        style = {"color": PALETTE[2 + side], "hatch": ("", "///")[side], "edgecolor": "black", "label": label}
        bars = ax.bar(at + 0.38 * (side - 0.5), list(values.values()), 0.36, **style)
        ax.bar_label(bars, fmt="{:.4g}", fontsize=8, padding=1)
    ax.set_xticks(at, list(counted))
    ax.margins(y=0.12)
    _legend(ax, columns=2)
    return figure


def intervals(differences: Mapping[str, object], xlabel: str) -> Figure:
    """Differences with their intervals, a line per name from top to bottom, and where no difference lies.

    Args:
        differences: by name the mean and the t interval of a `stats.Difference`.
        xlabel: what is subtracted from what, and its unit.

    Raises:
        ValueError: no differences.
    """
    if not differences:
        raise ValueError("differences is empty; accepted: at least one")
    figure, ax = _axes(xlabel, "", top=0.1, height=0.7 + 0.26 * len(differences))
    wider = 1.25  # inches for the names; the margin of other figures is room for one label
    box = ax.get_position()
    ax.set_position((box.x0 + wider / 6.4, box.y0, box.width - wider / 6.4, box.height))
    ax.axvline(0, color="black", linewidth=1)
    for y, (name, difference) in enumerate(differences.items()):
        ax.plot(difference.t_interval, (y, y), color=PALETTE[2], linewidth=2, marker="|", markersize=7, label=name)
        ax.plot(difference.mean, y, color=PALETTE[1], marker="o", markeredgecolor="black", markersize=6)
    ax.set_yticks(range(len(differences)), list(differences))
    ax.set_ylim(len(differences) - 0.4, -0.6)
    ax.grid(color="0.9", axis="x")
    return figure


def routing_diagram(sublayers: int, block_size: int) -> Figure:
    """What each site reads under Block AttnRes: a row per site, a box per source, as wide as the outputs it sums.

    Block size 1 is Full AttnRes.

    Raises:
        ValueError: a block size that is not from 1 to ``sublayers``.
    """
    if not 1 <= block_size <= sublayers:
        raise ValueError(f"block_size={block_size}; accepted: 1 to sublayers={sublayers}")
    boxes = {"embedding": [], "finished block": [], "running sum": []}
    for site in range(sublayers + 1):
        boxes["embedding"].append((site, 0, 1))
        for start in range(0, site, block_size):
            finished = start + block_size <= site
            kind = "finished block" if finished else "running sum"
            boxes[kind].append((site, 1 + start, min(block_size, site - start)))
    reads = sum(map(len, boxes.values()))
    xlabel = f"outputs a source sums (block size {block_size}: {reads} reads by {sublayers + 1} sites)"
    figure, ax = _axes(xlabel, "site", top=0.3, height=4.0)
    line = min(1, 12 / sublayers)
    for (kind, cells), colour, hatch in zip(boxes.items(), ("#FFFFFF", PALETTE[3], PALETTE[6]), ("...", "", "////")):
        corners = [
            [(x - 0.42, y - 0.36), (x + w - 0.58, y - 0.36), (x + w - 0.58, y + 0.36), (x - 0.42, y + 0.36)]
            for y, x, w in cells
        ]
        ax.add_collection(
            PolyCollection(corners, facecolor=colour, edgecolor="black", hatch=hatch, linewidth=line, label=kind)
        )
    ax.set(xlim=(-0.6, sublayers + 0.6), ylim=(sublayers + 0.6, -0.6))
    sites = depth_labels(sublayers + 1)
    _ticks(ax.xaxis, ["emb", *sites[:-1]], room=16)
    _ticks(ax.yaxis, sites, room=16)
    _legend(ax, columns=3)
    return figure


def depth_labels(count: int) -> list[str]:
    """Names along the depth: A1, M1, A2, … for 2L sublayers, and "out" for the last of 2L + 1 sites."""
    return [f"{'AM'[i % 2]}{i // 2 + 1}" for i in range(count - count % 2)] + ["out"] * (count % 2)


def _array(name: str, values: ArrayLike | Tensor, dimensions: int) -> np.ndarray:
    array = torch.as_tensor(values).detach().cpu().float().numpy()
    if array.ndim != dimensions:
        raise ValueError(f"{name} has shape {list(array.shape)}; accepted: {dimensions} dimensions")
    return array


def _axes(
    xlabel: str, ylabel: str, top: float, right: float = 0.15, width: float = 6.4, height: float = 3.2
) -> tuple[Figure, Axes]:
    """A figure and its axes; sizes in inches. Fixed margins: fitting them to the text would draw everything twice."""
    figure = Figure(figsize=(width, height), dpi=100)
    left, bottom = 0.75, 0.5
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    ax = figure.add_axes(box)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.tick_params(labelsize=8)
    return figure, ax


def _lines(argument: str, curves: Mapping[str, tuple[Sequence, Sequence]], xlabel: str, ylabel: str) -> Figure:
    if not 1 <= len(curves) <= len(PALETTE):
        raise ValueError(f"{argument} has {len(curves)} entries; accepted: 1 to {len(PALETTE)}, the colours there are")
    columns = max(1, 90 // (max(map(len, curves)) + 10))
    figure, ax = _axes(xlabel, ylabel, top=0.1 + 0.19 * math.ceil(len(curves) / columns))
    for (name, (x, y)), colour, dashes, marker in zip(curves.items(), PALETTE, DASHES, MARKERS):
        ax.plot(x, y, color=colour, linestyle=dashes, marker=marker, markersize=4, linewidth=1.5, label=name)
    ax.grid(color="0.9")
    _legend(ax, columns)
    return figure


def _matrix(cells: np.ndarray, xlabel: str, width: float = 6.4) -> tuple[Figure, Axes]:
    figure, ax = _axes(xlabel, "source (0: embedding)", top=0.15, right=1.0, width=width)
    image = _weights(ax, cells)
    _ticks(ax.yaxis, [str(i) for i in range(len(cells))], room=14)
    _colour_bar(figure, image)
    return figure, ax


def _weights(ax: Axes, cells: np.ndarray, x: float = 0, y: float = 0, brightest: float = 1) -> AxesImage:
    """Depth weights [rows, columns], the first cell around (x, y); NaN is a hatched gap.

    The colour follows the square root of the weight, 0 to 1 unless told: 1/N of a deep model stays apart from 0.
    """
    if np.nanmin(cells) < 0 or np.nanmax(cells) > 1 + 1e-5:
        raise ValueError(f"weights range from {np.nanmin(cells):g} to {np.nanmax(cells):g}; accepted: 0 to 1")
    rows, columns = cells.shape
    left, top = x - 0.5, y - 0.5
    if np.isnan(cells).any():
        gap = {"facecolor": "white", "edgecolor": "0.8", "hatch": "////", "zorder": -1}
        ax.add_patch(Rectangle((left, top), columns, rows, **gap))
    extent = (left, left + columns, top + rows, top)
    return ax.imshow(
        cells, "cividis", PowerNorm(0.5, 0, brightest), aspect="auto", interpolation="nearest", extent=extent
    )


def _letters(ax: Axes, text: str) -> None:
    """Every character of a text under the first of its bytes; as ticks they would be slow to draw."""
    visible = {" ": "␣", "\n": "↵", "\t": "⇥"}
    place = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "top"}
    ax.set_xticks([])
    ax.xaxis.labelpad = 16
    for i, c in enumerate(text):
        at = len(text[:i].encode())
        ax.text(at, -0.015, visible.get(c, c), fontsize=8, fontfamily="monospace", parse_math=False, **place)


def _colour_bar(figure: Figure, image: AxesImage) -> None:
    width, box = figure.get_figwidth(), image.axes.get_position()
    bar = figure.colorbar(image, cax=figure.add_axes((box.x1 + 0.2 / width, box.y0, 0.13 / width, box.height)))
    bar.set_label("depth weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _ticks(axis: Axis, labels: Sequence[str], room: int, starts: ArrayLike = (0,)) -> None:
    """Label the positions 0, 1, … from each start: the first, the last, and at most about ``room`` in all."""
    shown = _shown(len(labels), room)
    axis.set_ticks([start + i for start in starts for i in shown], [labels[i] for i in shown] * len(starts))


def _shown(count: int, room: int) -> list[int]:
    """The first of 0 … count - 1, the last, and at most about ``room`` in all."""
    step = math.ceil(count / room)
    if step > 1:
        step += step % 2  # an even step stays with attention, or with the MLPs
    return [*range(0, count - step, step), count - 1]


def _legend(ax: Axes, columns: int) -> None:
    place = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}  # above: it hides no data
    ax.legend(**place, ncols=columns, fontsize=8, frameon=False, handlelength=3)
