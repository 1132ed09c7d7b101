"""The figures: what they show is what they were given, and every word of it can be read."""

import io
from collections import namedtuple
from itertools import combinations

import matplotlib
import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import AxesImage, imread
from matplotlib.text import Text

from mhar_minimal import plot
from mhar_minimal.stats import Difference

Row = namedtuple("Row", "step tokens seconds train_loss val_loss")


def rows(scale: float = 1.0) -> list[Row]:
    return [Row(s, 1000 * s, 0.1 * s, 9.0, scale * 5 / (1 + s)) for s in range(0, 401, 50)]


def cells(heads: int, sites: int, block_size: int = 1) -> torch.Tensor:
    """Random depth weights that add up to one over the sources a site can read, NaN elsewhere."""
    finished, inside = np.divmod(np.arange(sites), block_size)
    live = torch.tensor(1 + finished + (inside > 0))
    logits = torch.randn(heads, sites, int(live.max()), generator=torch.Generator().manual_seed(0))
    possible = torch.arange(logits.shape[-1]) < live[:, None]
    return logits.masked_fill(~possible, -torch.inf).softmax(-1).masked_fill(~possible, torch.nan)


def matrix(heads: int, sources: int = 13, dim: int = 64) -> torch.Tensor:
    weights = torch.randn(sources, heads, generator=torch.Generator().manual_seed(1)).softmax(0)
    return weights.repeat_interleave(dim // heads, 1)


TEXT = "def f(é):\n\treturn 'the quick br wn fox. $ 12345"


def by_token(heads: int, sources: int = 13) -> torch.Tensor:
    """Random depth weights [N, T, H] of one site over TEXT."""
    shape = (sources, len(TEXT.encode()), heads)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).softmax(0)


APART = Difference(-0.03, 0.01, (-0.05, -0.01), (-0.04, -0.02), 0.01, 0.03)
LONG = [f"multi-head, H = {2**i}" for i in range(7)]
FIGURES = {
    "loss, one": lambda: plot.loss_curves({"standard": rows()}),
    "loss, minus": lambda: plot.loss_curves({name: rows(1 + i) for i, name in enumerate("abc")}, minus="b"),
    "loss, seven": lambda: plot.loss_curves({name: rows(1 + i) for i, name in enumerate(LONG)}, x="tokens"),
    "depth, 13 sites": lambda: plot.by_depth({"standard": range(13), "full": range(13)}, "RMS"),
    "depth, 24 outputs, log": lambda: plot.by_depth({"standard": np.exp(np.arange(24))}, "gradient norm", log=True),
    "depth, 72 outputs": lambda: plot.by_depth({n: [i] * 72 for i, n in enumerate(LONG)}, "RMS"),
    "intervals, two": lambda: plot.intervals({"full:1": APART, "full:8": APART}, "minus standard (nats per byte)"),
    "intervals, eleven": lambda: plot.intervals({f"input independent {i}": APART for i in range(11)}, "minus standard"),
    "weights, one head": lambda: plot.depth_weights(cells(1, 13)),
    "weights, two, titled": lambda: plot.depth_weights(cells(2, 13), ["before", "after"]),
    "weights, four, blocks": lambda: plot.depth_weights(cells(4, 13, 5)),
    "weights, six, deep": lambda: plot.depth_weights(cells(6, 25)),
    "weights, eight": lambda: plot.depth_weights(cells(8, 13)),
    "weights, sixteen": lambda: plot.depth_weights(cells(16, 13)),
    "weights, 73 sites": lambda: plot.depth_weights(cells(1, 73, 8)),
    "read matrix": lambda: plot.read_matrix(matrix(8), heads=8),
    "read matrix, deep": lambda: plot.read_matrix(matrix(1, sources=73)),
    "tokens": lambda: plot.token_weights(cells(1, 13)[0].nan_to_num().T, "def f(é):\n\t$"),
    "tokens, long": lambda: plot.token_weights(torch.full((3, 90), 0.3), "the quick br wn fox." * 4 + "0123456789"),
    "heads over a text": lambda: plot.heads_over_text(by_token(8), TEXT, 3, 64),
    "heads over a text, one": lambda: plot.heads_over_text(by_token(1), TEXT, 47, 64),
    "costs": lambda: plot.costs({"standard": 3, "block, S = 4": 9.5}, {"standard": 3, "block, S = 4": 10.25}, "bytes"),
    "routing": lambda: plot.routing_diagram(12, 5),
    "routing, deep": lambda: plot.routing_diagram(72, 8),
    "routing, one layer": lambda: plot.routing_diagram(2, 2),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_word_is_large_enough_and_inside_and_ticks_do_not_collide(name):
    figure = FIGURES[name]()
    FigureCanvasAgg(figure).draw()
    words = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text()]
    for text in words:
        box = text.get_window_extent()
        assert text.get_fontsize() >= 8, text
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside or not _is_drawn(figure, text), (text, box)
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            boxes = [t.get_window_extent() for t in axis.get_ticklabels() if _is_drawn(figure, t)]
            assert not any(a.overlaps(b) for a, b in combinations(boxes, 2)), [t.get_text() for t in words]


def _is_drawn(figure: plot.Figure, text: Text) -> bool:
    """Whether a text is not the label of a tick beyond the limits of its axis: those exist, but are never drawn."""
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if text in (tick.label1, tick.label2):
                    return bool(text.get_text()) and low <= tick.get_loc() <= high
    return True


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_values_give_the_same_bytes_and_nothing_is_left_behind(name):
    before = dict.copy(matplotlib.rcParams)  # as they are: asking rcParams for its backend would choose one
    first = plot.png(FIGURES[name]())
    assert first == plot.png(FIGURES[name]())
    assert first.startswith(b"\x89PNG\r\n\x1a\n")
    assert Gcf.get_all_fig_managers() == []
    assert dict.copy(matplotlib.rcParams) == before


def test_a_notebook_shows_a_picture_a_fixed_text_and_its_words():
    data, metadata = DisplayFormatter().format(plot.routing_diagram(6, 4))
    assert data["text/plain"] == "<Figure size 640x400 with 1 Axes>"
    assert data["image/png"].startswith(b"\x89PNG")
    words = "site by outputs a source sums (block size 4: 15 reads by 7 sites): embedding; finished block; running sum"
    assert metadata == {"image/png": {"alt": words}}


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "loss, one": "validation loss (nats per byte) by optimizer step: standard",
        "intervals, two": "minus standard (nats per byte): full:1; full:8",
        "weights, four, blocks": "site by source (block; the last may be running) | depth weight",
    }.items(),
)
def test_a_figure_says_in_words_what_it_draws(name, words):
    assert FIGURES[name]().alt() == words


def test_the_words_of_a_figure_name_its_panels_and_are_one_line():
    figure = plot.Figure()
    for title, ax in zip(("one", "two"), figure.subplots(2)):
        ax.plot([0, 1], label="series of " + title)
        ax.axhline(0)
        ax.set(title=title, ylabel="loss\n(nats)")
    assert figure.alt() == "one: loss (nats): series of one | two: loss (nats): series of two"


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
SEEN_BY = {
    "everybody": np.eye(3),
    "a protanope": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]
    ],
    "a deuteranope": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]
    ],
}  # fmt: skip


def lightness(colours, eye: str) -> np.ndarray:
    """CIE L*, 0 to 100, of colours as an eye sees them: all that is left of them in greyscale."""
    rgb = matplotlib.colors.to_rgba_array(colours)[:, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ np.transpose(SEEN_BY[eye])
    y = linear.clip(0, 1) @ [0.2126, 0.7152, 0.0722]
    return np.where(y > 216 / 24389, 116 * np.cbrt(y) - 16, y * 24389 / 27)


LEAST = {"everybody": 10, "a protanope": 6, "a deuteranope": 8}  # the seven colours have 10.7, 6.6 and 8.1


@pytest.mark.parametrize("eye", SEEN_BY)
def test_the_palette_stays_apart_by_lightness_alone(eye):
    assert np.diff(np.sort(lightness(plot.PALETTE, eye))).min() > LEAST[eye]
    assert len(set(plot.DASHES)) == len(set(plot.MARKERS)) == len(plot.PALETTE)


def signs(figure: plot.Figure) -> list[tuple]:
    """Of every line, group of bars or group of boxes: its colour, then what tells it apart without a colour."""
    ax = figure.axes[0]
    found = [(line.get_color(), line.get_marker(), line._dash_pattern) for line in ax.lines]
    found += [(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in ax.containers]
    return found + [(boxes.get_facecolor()[0], boxes.get_hatch()) for boxes in ax.collections]


@pytest.mark.parametrize(
    ("name", "series"), {"loss, seven": 7, "depth, 72 outputs": 7, "costs": 2, "routing": 3}.items()
)
def test_series_differ_by_lightness_to_every_eye_and_without_any_colour(name, series):
    found = signs(FIGURES[name]())
    assert len(found) == series
    for (one, *without), (other, *colour) in combinations(found, 2):
        assert all(a != b for a, b in zip(without, colour, strict=True)), (without, colour)
        for eye, least in LEAST.items():
            assert abs(np.subtract(*lightness([one, other], eye))) > least, (one, other, eye)


@pytest.mark.parametrize("eye", SEEN_BY)
def test_a_larger_weight_is_lighter_to_every_eye(eye):
    image = FIGURES["weights, one head"]().axes[0].images[0]
    shown = lightness(image.to_rgba(np.linspace(0, 1, 11)), eye)
    assert np.diff(shown).min() > 3


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", ["step", "seconds", "tokens"])
def test_loss_curves_show_the_validation_loss(x):
    figure = plot.loss_curves({"standard": rows(), "full": rows(2)}, x=x)
    [ax] = figure.axes
    for line, name, run in zip(ax.lines, ("standard", "full"), (rows(), rows(2)), strict=True):
        assert line.get_label() == name
        np.testing.assert_array_equal(line.get_xydata(), [(getattr(r, x), r.val_loss) for r in run])
    assert ax.get_ylabel() == "validation loss (nats per byte)"
    assert x.rstrip("s") in ax.get_xlabel() or x == "seconds"


def test_loss_curves_minus_one_of_them():
    figure = plot.loss_curves({"full": rows(2), "standard": rows(), "block": rows(3)}, minus="standard")
    [ax] = figure.axes
    *lines, zero = ax.lines
    for line, name, scale in zip(lines, ("full", "block"), (2, 3), strict=True):
        assert line.get_label() == name
        wanted = [(r.step, scale * r.val_loss - r.val_loss) for r in rows()]
        np.testing.assert_allclose(line.get_xydata(), wanted, rtol=1e-12)
    assert set(zero.get_ydata()) == {0}
    assert ax.get_ylabel() == "minus standard (nats per byte)"


def test_by_depth_tells_attention_from_mlp_and_keeps_the_readout():
    figure = plot.by_depth({"full": [1.0, 2.0, 3.0, 4.0, 5.0]}, "RMS", log=True)
    [ax] = figure.axes
    assert [t.get_text() for t in ax.get_xticklabels()] == ["A1", "M1", "A2", "M2", "out"]
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)])
    assert ax.get_yscale() == "log"
    assert plot.depth_labels(4) == ["A1", "M1", "A2", "M2"]


@pytest.mark.parametrize("sublayers", [40, 72])
def test_ticks_of_a_deep_model_stay_with_attention(sublayers):
    [ax] = plot.by_depth({"standard": range(sublayers)}, "RMS").axes
    *shown, last = [t.get_text() for t in ax.get_xticklabels()]
    assert len(shown) > 8
    assert {label[0] for label in shown} == {"A"}
    assert last == f"M{sublayers // 2}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.loss_curves({"a": rows()}, x="epoch"), "x='epoch'; accepted: step, seconds, tokens"),
        (lambda: plot.loss_curves({"a": rows()}, minus="b"), "minus='b'; accepted: a"),
        (lambda: plot.loss_curves({"a": rows(), "b": rows()[1:]}, minus="b"), "minus='b' with another step than"),
        (lambda: plot.loss_curves({}), "histories has 0 entries; accepted: 1 to 7"),
        (lambda: plot.by_depth({}, "RMS"), "series has 0 entries; accepted: 1 to 7"),
        (lambda: plot.by_depth({str(i): [1] for i in range(8)}, "RMS"), "series has 8 entries; accepted: 1 to 7"),
        (lambda: plot.depth_weights(cells(1, 5)[0]), r"heatmap has shape \[5, 5\]; accepted: 3 dimensions"),
        (lambda: plot.depth_weights(cells(2, 5), ["a"]), "titles has 1 entries; accepted: 2"),
        (lambda: plot.depth_weights([[[-0.5, 0.25]]]), "weights range from -0.5 to 0.25; accepted: 0 to 1"),
        (lambda: plot.read_matrix(cells(1, 5)), r"matrix has shape \[1, 5, 5\]; accepted: 2 dimensions"),
        (lambda: plot.read_matrix(matrix(1), heads=3), "heads=3 does not divide D=64"),
        (lambda: plot.read_matrix(matrix(1), heads=0), "heads=0 does not divide D=64"),
        (lambda: plot.token_weights(matrix(1), "é"), "text has 2 bytes; accepted: 64"),
        (lambda: plot.heads_over_text(matrix(1), "a", 0, 64), r"weights has shape \[13, 64\]; accepted: 3 dimensions"),
        (lambda: plot.heads_over_text(by_token(8), "é", 0, 64), "text has 2 bytes; accepted: 48"),
        (lambda: plot.heads_over_text(by_token(8), TEXT, 48, 64), "byte=48; accepted: 0 to 47"),
        (lambda: plot.heads_over_text(by_token(8), TEXT, 0, 12), "heads=8 does not divide dim=12"),
        (lambda: plot.costs({}, {}, "s"), r"measured has names \[\]; accepted: those of counted"),
        (lambda: plot.costs({"a": 1}, {"b": 1}, "s"), r"measured has names \['b'\]; accepted: .* \['a'\]"),
        (lambda: plot.routing_diagram(6, 7), "block_size=7; accepted: 1 to sublayers=6"),
        (lambda: plot.routing_diagram(6, 0), "block_size=0; accepted: 1 to sublayers=6"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- cells -----------------------------------------------------------------------------------------------------------


def pixel(figure: plot.Figure, x: float, y: float) -> np.ndarray:
    """The colours, [n, 3] from 0 to 1, around a point in the first axes' data coordinates."""
    image = imread(io.BytesIO(plot.png(figure)))[..., :3]
    column, row = figure.axes[0].transData.transform((x, y))
    row, column = len(image) - int(row), int(column)
    return image[row - 2 : row + 3, column - 2 : column + 3].reshape(-1, 3)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_depth_weights_colours_what_can_be_read_and_leaves_the_rest_blank(heads):
    shown = cells(heads, 7)
    figure = plot.depth_weights(shown)
    colours = matplotlib.colormaps["cividis"]
    for h, site, source in [(0, 0, 0), (0, 6, 2), (heads - 1, 3, 3), (heads - 1, 6, 6)]:
        expected = colours(float(shown[h, site, source]) ** 0.5)[:3]
        across = 1.2 * 7 * h
        np.testing.assert_allclose(pixel(figure, across + source, site), [expected] * 25, atol=0.01)
    for site, source in [(0, 1), (2, 5), (5, 6)]:
        blank = pixel(figure, source, site)
        assert np.ptp(blank, axis=1).max() < 0.01  # grey or white, in no colour of the scale
        assert blank.max() > 0.99
    titles = [t.get_text() for t in figure.axes[0].texts]
    assert titles == ([f"head {h}" for h in range(heads)] if heads > 1 else [""])


@pytest.mark.parametrize(
    ("block_size", "sources"), [(1, ["emb", "A1", "M1", "A2", "M2"]), (3, ["b0", "b1", "b2"]), (4, ["b0", "b1"])]
)
def test_depth_weights_names_sites_and_sources(block_size, sources):
    ax = plot.depth_weights(cells(1, 5, block_size)).axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == sources
    assert [t.get_text() for t in ax.get_yticklabels()] == ["A1", "M1", "A2", "M2", "out"]
    np.testing.assert_array_equal(ax.get_xticks(), range(len(sources)))


def test_depth_weights_scale_the_colours_to_the_brightest():
    figure = plot.depth_weights([[[0.2, 0.1]], [[0.05, 0.9]]], brightest=0.2)
    for image in figure.axes[0].images:
        assert (image.norm.vmin, image.norm.vmax) == (0, 0.2)
    np.testing.assert_allclose(pixel(figure, 0, 0), [matplotlib.colormaps["cividis"](1.0)[:3]] * 25, atol=0.01)


def test_read_matrix_shows_the_matrix_and_the_heads():
    ax = plot.read_matrix(matrix(4, sources=3, dim=8), heads=4).axes[0]
    np.testing.assert_array_equal(ax.findobj(AxesImage)[0].get_array(), matrix(4, sources=3, dim=8))
    assert [segment[0][0] for segment in ax.collections[0].get_segments()] == [1.5, 3.5, 5.5]


def test_token_weights_put_every_character_under_its_first_byte():
    ax = plot.token_weights(torch.full((2, 6), 0.5), "é \n$a").axes[0]
    assert [(t.get_position()[0], t.get_text()) for t in ax.texts] == [(0, "é"), (2, "␣"), (3, "↵"), (4, "$"), (5, "a")]


def test_heads_over_text_bands_every_head_and_reads_the_framed_byte():
    weights = by_token(4, sources=3)
    bands, _, upper = plot.heads_over_text(weights, TEXT, 5, 8, brightest=0.6).axes
    for h, image in enumerate(bands.images):
        np.testing.assert_array_equal(image.get_array(), weights[..., h])
        left, right, bottom, top = image.get_extent()
        assert top < bands.get_yticks()[h] < bottom
        assert (left, right) == (-0.5, len(TEXT.encode()) - 0.5)
    assert len(bands.images) == len(bands.get_yticks()) == 4
    numbers = [t for t in bands.texts if t.get_position()[0] == 1.01]
    assert [(t.get_position()[1], t.get_text()) for t in numbers] == [(0, "0"), (1, "1"), (2, "2")]
    assert bands.images[0].get_extent()[2:] == [2.5, -0.5]  # source i of the first band is row i
    assert {image.norm.vmax for image in (*bands.images, *upper.images)} == {0.6}
    [cells] = [image.get_array() for image in upper.images]
    for channel in range(8):
        np.testing.assert_array_equal(cells[:, channel], weights[:, 5, channel // 2])
    assert [segment[0][0] for segment in upper.collections[0].get_segments()] == [1.5, 3.5, 5.5]


def test_costs_pair_counted_and_measured():
    ax = plot.costs({"a": 1, "b": 2}, {"a": 3, "b": 4}, "bytes").axes[0]
    counted, measured = ([bar.get_height() for bar in bars] for bars in ax.containers)
    assert (counted, measured) == ([1, 2], [3, 4])
    assert [t.get_text() for t in ax.texts] == ["1", "2", "3", "4"]


def boxes(figure: plot.Figure) -> dict[str, list[tuple[int, int, int]]]:
    """By kind (site, first column, last column): column 0 is the embedding, column i the output of sublayer i - 1."""
    found = {}
    for collection in figure.axes[0].collections:
        corners = [(path.get_extents().min, path.get_extents().max) for path in collection.get_paths()]
        found[collection.get_label()] = [(round((a[1] + b[1]) / 2), round(a[0]), round(b[0])) for a, b in corners]
    return found


def test_intervals_are_drawn_where_they_are_beside_zero():
    other = APART._replace(mean=0.02, t_interval=(-0.01, 0.05))
    [ax] = plot.intervals({"a": APART, "b": other}, "minus c").axes
    zero, *lines = ax.lines
    assert list(zero.get_xdata()) == [0, 0]
    drawn = [(list(line.get_xdata()), set(line.get_ydata())) for line in lines]
    assert drawn == [([-0.05, -0.01], {0}), ([-0.03], {0}), ([-0.01, 0.05], {1}), ([0.02], {1})]
    assert [(t.get_text(), y) for t, y in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)] == [
        ("a", 0),
        ("b", 1),
    ]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first name on top
    with pytest.raises(ValueError, match="differences is empty"):
        plot.intervals({}, "")


def test_routing_diagram_by_hand():
    """Six sublayers in blocks of four: one whole block, and a ragged one that is still running at the last read-out."""
    found = boxes(plot.routing_diagram(6, 4))
    assert found["embedding"] == [(site, 0, 0) for site in range(7)]
    assert found["finished block"] == [(4, 1, 4), (5, 1, 4), (6, 1, 4)]
    assert found["running sum"] == [(1, 1, 1), (2, 1, 2), (3, 1, 3), (5, 5, 5), (6, 5, 6)]


def test_routing_diagram_of_full_and_of_one_block():
    full = boxes(plot.routing_diagram(4, 1))
    assert full["finished block"] == [(site, i, i) for site in range(5) for i in range(1, site + 1)]
    assert full["running sum"] == []
    one = boxes(plot.routing_diagram(4, 4))
    assert one["finished block"] == [(4, 1, 4)]
    assert one["running sum"] == [(1, 1, 1), (2, 1, 2), (3, 1, 3)]
