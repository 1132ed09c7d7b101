"""Sliders that redraw a figure, without a figure's state, ``interact`` or cleared outputs.

The callback writes PNG bytes into an image widget, so nothing but what is on the screen depends on a slider.
"""

from collections.abc import Callable, Hashable, Sequence
from html import escape

from ipywidgets import HTML, Image, SelectionSlider, VBox
from matplotlib.figure import Figure

from mhar_minimal.plot import png


class Live(VBox):
    """Sliders and their figure. Where no kernel runs, a notebook shows these words in their place."""

    def __repr__(self) -> str:
        return "a slider: run this cell, and it moves the figure above"


def slider(
    draw: Callable[[Hashable], Figure], values: Sequence[Hashable], description: str, start: Hashable = None
) -> VBox:
    """A slider over ``values`` with the figure ``draw(value)`` under it.

    What ``draw`` raises for the first value is raised here; later it is written under the figure, which then stays as
    it was until a value can be drawn again.

    Args:
        draw: a pure function of one value.
        values: the positions of the slider, in order.
        description: what the values are, left of the slider.
        start: the first value drawn; without it, the first of ``values``.

    Raises:
        ValueError: no values, or a start that is not one of them.
    """
    control = _control(description, values, start)
    return _live(lambda: draw(control.value), [control])


def sliders(draw: Callable[..., Figure], **values: Sequence[Hashable]) -> VBox:
    """A slider per keyword, each starting at its first value, with the figure ``draw(**chosen)`` under them.

    Example: ``sliders(draw, head=range(8), site=range(13))`` calls ``draw(head=0, site=0)`` first.

    Raises:
        ValueError: a keyword without values.
    """
    controls = {name: _control(name, choices, None) for name, choices in values.items()}
    return _live(lambda: draw(**{name: c.value for name, c in controls.items()}), list(controls.values()))


def _control(name: str, values: Sequence[Hashable], start: Hashable) -> SelectionSlider:
    values = list(values)
    if not values:
        raise ValueError(f"{name} has no values; accepted: at least one")
    if start is None:
        start = values[0]
    if start not in values:
        raise ValueError(f"start={start!r}; accepted: one of {values}")
    return SelectionSlider(options=values, value=start, description=name, style={"description_width": "initial"})


def _live(draw: Callable[[], Figure], controls: list[SelectionSlider]) -> VBox:
    image, problem = Image(value=png(draw()), format="png"), HTML()

    def redraw(change: dict) -> None:
        try:
            image.value, problem.value = png(draw()), ""
        except Exception as error:  # raised from a callback it would reach a log that nobody reads
            problem.value = f"<pre>{escape(f'{type(error).__name__}: {error}')}</pre>"

    for control in controls:
        control.observe(redraw, "value")
    return Live([*controls, image, problem])
