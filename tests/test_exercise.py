"""A right answer is told so; a wrong, failing, missing or ill-typed one gets the hint and no traceback."""

import functools
import math

import numpy as np
import pytest
import torch

from mhar_minimal.exercise import check

CASES = [((2.0,), 4.0), ((-3.0,), 9.0)]


def verdict(capsys, answer, cases=CASES):
    check(answer, cases, "multiply it by itself.")
    return capsys.readouterr().out


@pytest.mark.parametrize("square", [lambda x: x * x, lambda x: torch.tensor(x) ** 2, lambda x: np.float32(x * x)])
def test_right(capsys, square):
    assert verdict(capsys, square) == "Correct.\n"


@pytest.mark.parametrize(
    ("wrong", "start"),
    [
        (lambda x: 2 * x, "Not yet"),  # right in the first case only
        (lambda x: x * x + 1e-3, "Not yet"),
        (lambda x: None, "Not started"),
        (lambda x: x.nothing, "Not yet: <lambda> raised AttributeError"),
        (lambda: 4, "Not yet: <lambda> raised TypeError"),
        (lambda x: "four", "Not yet"),
        (lambda x: [x * x, x * x], "Not yet"),
        (lambda x: {"x": x}, "Not yet"),
        (lambda x: float("nan"), "Not yet"),
    ],
)
def test_anything_else_gets_the_hint(capsys, wrong, start):
    out = verdict(capsys, wrong)
    assert out.startswith(start)
    assert out.endswith("Hint: multiply it by itself.\n")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda x: x + 2, "gives -1.0, not 9.0, in case 2 of 2"),
        (lambda x: 4.0 if x == 2 else None, "returns nothing, in case 2 of 2"),
        (lambda x: 1 / 0, "raised ZeroDivisionError: division by zero, in case 1 of 2"),
        (lambda x: next(iter(())), "raised StopIteration, in case 1 of 2"),
        (lambda x: exec("raise ValueError('one\\ntwo')"), "raised ValueError: one, in case 1 of 2"),
        (lambda x: [[x] * 99], "does not give what it should, in case 1 of 2"),
        (lambda x: torch.Tensor, "gives <class 'torch.Tensor'>, not 4.0, in case 1 of 2"),
    ],
)
def test_what_is_wrong_is_said_and_where(capsys, wrong, told):
    assert verdict(capsys, wrong) == f"Not yet: <lambda> {told}. Hint: multiply it by itself.\n"


def test_an_answer_may_not_change_its_arguments_nor_the_next_case(capsys):
    numbers = torch.tensor([1.0, 2.0])
    cases = [((numbers, 3), torch.tensor([3.0, 6.0])), ((numbers, 2), torch.tensor([2.0, 4.0]))]
    assert "changes its arguments (work on a copy), in case 1 of 2" in verdict(capsys, torch.Tensor.mul_, cases)
    assert numbers.tolist() == [1, 2]
    assert verdict(capsys, torch.mul, cases) == "Correct.\n"


def test_tensors_are_compared_with_their_shape(capsys):
    cases = [((3,), torch.ones(3))]
    assert verdict(capsys, lambda n: torch.ones(n, requires_grad=True), cases) == "Correct.\n"
    assert "gives shape (1, 3), not (3,), in case 1 of 1" in verdict(capsys, lambda n: torch.ones(1, n), cases)


def test_what_reads_the_same_is_not_told_as_a_difference(capsys):
    cases = [((1.00004,), torch.tensor([1.5, 1.00001]))]
    assert "does not give what it should" in verdict(capsys, lambda x: torch.tensor([1.5, x]), cases)


def test_words_and_lists_are_compared_exactly(capsys):
    assert verdict(capsys, lambda: ["b", 1], [((), ["b", 1])]) == "Correct.\n"
    assert verdict(capsys, lambda: "block", [((), "Block")]).startswith("Not yet")


def test_whatever_is_given_as_an_answer_is_judged(capsys):
    assert verdict(capsys, functools.partial(pow, 3), [((2,), 9)]) == "Correct.\n"
    assert verdict(capsys, None, [((2,), 9)]).startswith("Not yet: your answer raised TypeError")
    half = lambda: torch.ones(2, dtype=torch.bfloat16)  # noqa: E731
    assert verdict(capsys, half, [((), torch.ones(2))]) == "Correct.\n"
    ragged = lambda: [[1], [2, torch.tensor(3.0, requires_grad=True)]]  # noqa: E731
    assert verdict(capsys, ragged, [((), [[1], [2, 3]])]) == "Correct.\n"
    assert verdict(capsys, ragged, [((), [[1], [2, 4]])]).startswith("Not yet")
    assert verdict(capsys, lambda: math.nan, [((), math.nan)]) == "Correct.\n"
