"""Checks of the notebooks' exercises: an answer that is wrong, or not there yet, gets a hint and never a traceback."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def check(answer: Callable, cases: Sequence[tuple[tuple, Any]], hint: str) -> None:
    """Call ``answer`` on every case and print "Correct.", or what is missing and the hint.

    Args:
        answer: the reader's function; one that still returns None counts as not started.
        cases: pairs (arguments, expected); numbers, tensors and arrays are compared to 1e-5, relative or absolute,
            shapes included; anything else by ``==``.
        hint: one sentence.
    """
    name = getattr(answer, "__name__", "your answer")
    for arguments, expected in cases:
        try:
            got = answer(*arguments)
        except Exception as error:  # whatever the reader's code raises is an answer to explain, not ours to raise
            print(f"Not yet: {name} raised {type(error).__name__}: {error}. Hint: {hint}")
            return
        if got is None:
            print(f"Not started: {name} returns nothing. Hint: {hint}")
            return
        if not _agree(got, expected):
            print(f"Not yet: {name} does not give what it should. Hint: {hint}")
            return
    print("Correct.")


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
