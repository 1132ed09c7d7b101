"""The sliders, moved without a kernel: what is on the screen follows the value, and errors are not lost."""

import pytest
from ipywidgets import HTML, Image, SelectionSlider, VBox

from mhar_minimal import plot, widgets


def draw(block_size: int) -> plot.Figure:
    return plot.routing_diagram(6, block_size)


def parts(box: VBox) -> tuple[list[SelectionSlider], Image, HTML]:
    *controls, image, problem = box.children
    return controls, image, problem


def test_the_first_figure_is_there_before_any_move():
    [control], image, problem = parts(widgets.slider(draw, range(1, 7), "block size"))
    assert (control.value, control.description, control.options) == (1, "block size", (1, 2, 3, 4, 5, 6))
    assert image.value == plot.png(draw(1))
    assert image.format == "png"
    assert bytes(image.value).startswith(b"\x89PNG\r\n\x1a\n")
    assert problem.value == ""


def test_the_figure_follows_the_value():
    [control], image, _ = parts(widgets.slider(draw, [1, 2, 4], "block size", start=4))
    first = image.value
    assert first == plot.png(draw(4))
    control.value = 2
    assert image.value == plot.png(draw(2)) != first
    control.value = 4
    assert image.value == first


def test_an_error_is_shown_and_the_next_good_value_recovers():
    [control], image, problem = parts(widgets.slider(draw, [1, "<b>", 7, 6], "block size"))
    good = image.value
    control.value = 7
    assert "ValueError: block_size=7; accepted: 1 to sublayers=6" in problem.value
    assert image.value == good
    control.value = "<b>"
    assert "TypeError" in problem.value
    control.value = 6
    assert problem.value == ""
    assert image.value == plot.png(draw(6))


def test_an_error_message_is_text_and_not_markup():
    def fail(value: int) -> plot.Figure:
        if value:
            raise RuntimeError("<script>")
        return draw(1)

    [control], _, problem = parts(widgets.slider(fail, [0, 1], "x"))
    control.value = 1
    assert "RuntimeError: &lt;script&gt;" in problem.value


def test_an_error_of_the_first_figure_is_raised():
    with pytest.raises(ValueError, match="block_size=7"):
        widgets.slider(draw, [7, 6], "block size")


def test_two_sliders_give_one_figure():
    box = widgets.sliders(plot.routing_diagram, sublayers=[6, 8], block_size=[1, 2])
    [sublayers, block_size], image, _ = parts(box)
    assert [c.description for c in (sublayers, block_size)] == ["sublayers", "block_size"]
    assert image.value == plot.png(plot.routing_diagram(6, 1))
    block_size.value = 2
    assert image.value == plot.png(plot.routing_diagram(6, 2))
    sublayers.value = 8
    assert image.value == plot.png(plot.routing_diagram(8, 2))


def test_bad_values_are_named():
    with pytest.raises(ValueError, match=r"start=3; accepted: one of \[1, 2\]"):
        widgets.slider(draw, [1, 2], "block size", start=3)
    with pytest.raises(ValueError, match="block size has no values; accepted: at least one"):
        widgets.slider(draw, [], "block size")
