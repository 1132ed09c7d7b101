"""Checks of the notebooks' exercises: an answer that is wrong, or not there yet, gets a hint and never a traceback."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from traceback import format_exception_only
from typing import Any

import numpy as np

NOTHING = "returns nothing"
SHORT = 60  # characters of a value that are read at a glance


def check(answer: Callable, cases: Sequence[tuple[tuple, Any]], hint: str) -> None:
    """Call ``answer`` on every case and print "Correct.", or what is wrong in the first case that fails and the hint.

    Args:
        answer: the reader's function, which leaves its arguments as they are; one that returns None in the first case
            counts as not started.
        cases: pairs (arguments, expected); numbers, tensors and arrays are compared to 1e-5, relative or absolute,
            shapes included; anything else by ``==``.
        hint: one sentence.
    """
    name = getattr(answer, "__name__", "your answer")
    for number, (arguments, expected) in enumerate(cases, 1):
        wrong = _wrong(answer, arguments, expected)
        if wrong == NOTHING and number == 1:
            print(f"Not started: {name} {wrong}. Hint: {hint}")
            return
        if wrong:
            print(f"Not yet: {name} {wrong}, in case {number} of {len(cases)}. Hint: {hint}")
            return
    print("Correct.")


def _wrong(answer: Callable, arguments: tuple, expected: Any) -> str | None:
    """What is wrong with the answer in one case, or None."""
    given = deepcopy(arguments)  # an answer that changes them shall not spoil the next case
    try:
        got = answer(*given)
    except Exception as error:  # whatever the reader's code raises is an answer to explain, not ours to raise
        return f"raised {format_exception_only(error)[0].splitlines()[0]}"
    if got is None:
        return NOTHING
    if not _agree(given, arguments):
        return "changes its arguments (work on a copy)"
    if _agree(got, expected):
        return None
    shapes = [tuple(x.shape) for x in (got, expected) if isinstance(getattr(x, "shape", None), tuple)]
    if len(set(shapes)) == 2:
        return f"gives shape {shapes[0]}, not {shapes[1]}"
    told, wanted = repr(got), repr(expected)
    if told != wanted and max(len(told), len(wanted)) <= SHORT and "\n" not in told + wanted:
        return f"gives {told}, not {wanted}"
    return "does not give what it should"


def _agree(got: Any, expected: Any) -> bool:
    try:
        if isinstance(expected, list | tuple):
            return len(got) == len(expected) and all(map(_agree, got, expected))
        got, expected = (np.asarray(x.detach().double() if hasattr(x, "detach") else x) for x in (got, expected))
        if got.dtype.kind in "biufc" and expected.dtype.kind in "biufc":
            return got.shape == expected.shape and np.allclose(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        return bool(np.array_equal(got, expected))
    except Exception:  # shapes or types that cannot even be compared do not agree
        return False
