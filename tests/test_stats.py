"""Statistics against SciPy, against enumeration, and against the papers' own figures."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats as scipy

from mhar_minimal.stats import (
    FLAT,
    PowerLaw,
    compute_multiplier,
    holm,
    last_drop,
    loss_at,
    mcnemar,
    paired_differences,
    power_law,
    readings,
    smallest_difference,
    t_cdf,
    t_critical,
    tail_mean,
)
from mhar_minimal.train import Row


def study(arms=3, seeds=5):
    """Metric by arm and seed; an effect of the seed far larger than that of the arm, seeds in another order per arm."""
    rng = np.random.default_rng(1)
    common = rng.normal(0, 1, seeds)
    values = {}
    for arm in range(arms):
        of_seed = dict(enumerate(2 + common - 0.05 * arm + rng.normal(0, 0.03, seeds)))
        values[f"arm {arm}"] = {seed: float(of_seed[seed]) for seed in rng.permutation(seeds).tolist()}
    return values


def run(*points):
    """Rows of (step, tokens, seconds, val_loss)."""
    return [Row(step, tokens, seconds, 0.0, loss) for step, tokens, seconds, loss in points]


# Paired differences


@pytest.mark.parametrize("arms", [2, 3, 12])
def test_paired_differences_are_scipys_t_test_at_bonferronis_level(arms):
    values = study(arms)
    found = paired_differences(values, "arm 0")
    assert list(found) == [f"arm {i}" for i in range(1, arms)]
    p = {}
    for arm, difference in found.items():
        a, b = ([values[name][seed] for seed in range(5)] for name in (arm, "arm 0"))
        test = scipy.ttest_rel(a, b)
        p[arm] = test.pvalue
        interval = test.confidence_interval(1 - 0.05 / (arms - 1))
        assert difference.t_interval == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert difference.mean == pytest.approx(np.mean(np.subtract(a, b)), rel=1e-12)
        assert difference.sd == pytest.approx(np.std(np.subtract(a, b), ddof=1), rel=1e-12)
        assert difference.detectable == smallest_difference(difference.sd, 5, 0.05 / (arms - 1))
    assert {arm: d.p for arm, d in found.items()} == pytest.approx(holm(p), rel=1e-9)


def test_alpha_widens_the_intervals_and_no_p():
    wide, narrow = (paired_differences(study(), "arm 0", alpha)["arm 1"] for alpha in (0.01, 0.2))
    assert wide.t_interval[0] < narrow.t_interval[0] < narrow.t_interval[1] < wide.t_interval[1]
    assert wide.bootstrap_interval[0] < narrow.bootstrap_interval[0] < narrow.bootstrap_interval[1]
    assert narrow.bootstrap_interval[1] < wide.bootstrap_interval[1]
    assert wide.p == narrow.p


@pytest.mark.parametrize(("arms", "seeds"), [(2, 3), (2, 5), (3, 5)])
def test_the_bootstrap_is_near_the_enumeration_of_all_resamples(arms, seeds):
    values = study(arms, seeds)
    difference = paired_differences(values, "arm 0")["arm 1"]
    d = [values["arm 1"][seed] - values["arm 0"][seed] for seed in range(seeds)]
    every = np.array([np.mean(drawn) for drawn in product(d, repeat=seeds)])
    level = 0.05 / (arms - 1)
    exact = np.quantile(every, (level / 2, 1 - level / 2), method="inverted_cdf")
    assert difference.bootstrap_interval == pytest.approx(exact, abs=0.1 * difference.sd)
    assert paired_differences(values, "arm 0")["arm 1"] == difference


def test_values_that_are_differences_already_need_no_reference():
    values = study()
    effect = {arm: {seed: values[arm][seed] - values["arm 0"][seed] for seed in range(5)} for arm in ("arm 1", "arm 2")}
    assert paired_differences(effect, None) == paired_differences(values, "arm 0")
    with pytest.raises(ValueError, match="reference=None of arms"):
        paired_differences({}, None)
    with pytest.raises(ValueError, match=r"b has seeds \[0\], None \[0, 1\]"):
        paired_differences({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0}}, None)


def test_equal_runs_differ_by_nothing_and_a_constant_is_certain():
    values = {"a": {0: 1.0, 1: 2.0}, "same": {0: 1.0, 1: 2.0}, "more": {0: 1.5, 1: 2.5}}
    found = paired_differences(values, "a")
    assert (found["same"].mean, found["same"].t_interval, found["same"].p) == (0, (0, 0), 1)
    assert (found["more"].mean, found["more"].bootstrap_interval, found["more"].p) == (0.5, (0.5, 0.5), 0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"b": {0: 1.0, 1: 2.0}, "c": {0: 1.0, 1: 2.0}}, "reference='a' of arms .*'b', 'c'"),
        ({"a": {0: 1.0, 1: 2.0}}, "reference='a' of arms"),
        ({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0, 2: 2.0}}, r"b has seeds \[0, 2\], a \[0, 1\]; accepted: the same"),
        ({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0, 1: 2.0, 2: 3.0}}, r"b has seeds \[0, 1, 2\]"),
        ({"a": {0: 1.0}, "b": {0: 1.0}}, "at least two"),
        ({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0, 1: float("nan")}}, "b minus a is .*nan.*; accepted: finite"),
    ],
)
def test_what_cannot_be_paired_is_refused(values, says):
    with pytest.raises(ValueError, match=says):
        paired_differences(values, "a")


def test_holm_by_hand():
    # In order: 4 × 0.005, 3 × 0.01, 2 × 0.03, and 1 × 0.04, which may not be below the one before.
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert holm({"a": 0.9, "b": 0.6}) == {"a": 1, "b": 1}


# Student's t and power


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 30, 500])
def test_t_is_scipys(df):
    for t in (-40.0, -4.0, -1.0, 0.0, 0.3, 2.5, 40.0):
        assert t_cdf(t, df) == pytest.approx(scipy.t.cdf(t, df), rel=1e-10, abs=1e-20)
    for t, shift in product((-1.0, 0.0, 0.3, 2.5), (-3.0, 0.5, 2.0, 6.0)):
        assert t_cdf(t, df, shift) == pytest.approx(scipy.nct.cdf(t, df, shift), abs=1e-9)
    for alpha in (0.5, 0.05, 0.05 / 11, 1e-4):
        assert t_critical(alpha, df) == pytest.approx(scipy.t.isf(alpha / 2, df), rel=1e-9)


@pytest.mark.parametrize(
    ("n", "alpha", "power"), [(2, 0.05, 0.8), (5, 0.05, 0.8), (5, 0.05 / 11, 0.8), (20, 0.01, 0.9)]
)
def test_the_smallest_difference_is_seen_with_that_power(n, alpha, power):
    shift = smallest_difference(0.02, n, alpha, power) / 0.02 * n**0.5
    critical = scipy.t.isf(alpha / 2, n - 1)
    seen = scipy.nct.sf(critical, n - 1, shift) + np.nan_to_num(scipy.nct.cdf(-critical, n - 1, shift))  # nan is ~0
    assert seen == pytest.approx(power, abs=1e-8)
    assert smallest_difference(0.04, n, alpha, power) == pytest.approx(2 * shift * 0.02 / n**0.5)


def test_power_is_seen_in_simulated_studies():
    true = smallest_difference(1, 5)
    draws = np.random.default_rng(0).normal(true, 1, (5, 20_000))
    assert (scipy.ttest_1samp(draws, 0).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((1, 1), "df=0"), ((1, 5, 0), "alpha=0"), ((1, 5, 0.05, 1), "power=1"), ((1, 5, 0.05, 0.04), "power=0.04")],
)
def test_power_that_cannot_be_is_refused(arguments, says):
    with pytest.raises(ValueError, match=f"{says}; accepted"):
        smallest_difference(*arguments)


# One run, and two at a time


def test_the_metric_and_the_last_drop_by_hand():
    rows = run((0, 0, 0, 5.0), (80, 8, 1, 2.0), (100, 10, 2, 1.0))
    assert tail_mean(rows, 2) == 1.5
    assert tail_mean(rows, 3) == pytest.approx(8 / 3)
    assert last_drop(rows) == pytest.approx(0.5)  # at step 90 halfway between 2 and 1
    flat = run((0, 0, 0, 5.0), (90, 9, 1, 1.009), (100, 10, 2, 1.0))
    assert last_drop(flat) == pytest.approx(0.009)
    assert last_drop(flat) < FLAT < last_drop(rows)
    assert last_drop(run((0, 0, 0, 1.0), (100, 10, 2, 2.0))) == pytest.approx(-0.1)
    for last in (0, 4):
        with pytest.raises(ValueError, match=f"last={last}; accepted: 1 to 3"):
            tail_mean(rows, last)


def test_a_loss_between_evaluations_is_interpolated_and_none_is_extrapolated():
    rows = run((0, 0, 0, 5.0), (10, 100, 2, 3.0), (20, 200, 6, 2.0))
    assert loss_at(rows, "step", 10) == 3
    assert loss_at(rows, "step", 15) == 2.5
    assert loss_at(rows, "tokens", 25) == 4.5
    assert loss_at(rows, "seconds", 3) == 2.75
    assert (loss_at(rows, "seconds", 0), loss_at(rows, "seconds", 6)) == (5, 2)
    for spent in (-1, 6.1):
        with pytest.raises(ValueError, match=f"seconds={spent}; accepted: 0 to 6"):
            loss_at(rows, "seconds", spent)
    with pytest.raises(ValueError, match="step of the rows does not increase"):
        loss_at(rows + rows, "step", 5)


def test_three_readings_of_the_same_two_runs():
    # The arm is better per step and takes twice the time; the reference had batches half as large, and more steps.
    arm = run((0, 0, 0, 6.0), (10, 200, 20, 3.0), (20, 400, 40, 2.0))
    reference = run((0, 0, 0, 6.0), (10, 100, 10, 4.0), (30, 300, 30, 2.0))
    assert readings(arm, reference) == {
        "step": (20, 2.0, 3.0),
        "tokens": (300, 2.5, 2.0),
        "seconds": (30, 2.5, 2.0),
    }
    assert readings(reference, arm)["step"] == (20, 3.0, 2.0)


def test_rows_may_be_anything_with_these_columns():
    rows = [SimpleNamespace(step=s, tokens=s, seconds=s, val_loss=-s) for s in range(3)]
    assert readings(rows, rows)["seconds"] == (2, -2, -2)
    assert tail_mean(rows, 1) == -2


# The papers' tests


def test_mcnemar_is_the_exact_binomial_test():
    for b, c in product(range(9), repeat=2):
        wanted = scipy.binomtest(b, b + c).pvalue if b + c else 1
        assert mcnemar(b, c) == pytest.approx(wanted, rel=1e-12)
    assert mcnemar(123, 81) == pytest.approx(0.004, abs=5e-4)  # as published
    assert mcnemar(27, 13) == pytest.approx(0.038, abs=5e-4)
    with pytest.raises(ValueError, match="only_b=-1"):
        mcnemar(2, -1)


def test_a_power_law_is_the_regression_of_the_logarithms():
    compute = np.array([0.5, 1.0, 2.0, 5.6])
    law = power_law(compute, 1.891 * compute**-0.057)
    assert law == pytest.approx((1.891, 0.057), rel=1e-12)
    noisy = 1.9 * compute**-0.06 * np.array([1.01, 0.98, 1.0, 1.02])
    line = scipy.linregress(np.log(compute), np.log(noisy))
    assert power_law(compute, noisy) == pytest.approx((np.exp(line.intercept), -line.slope), rel=1e-9)


def test_the_published_fits_give_the_published_multiplier():
    baseline, block = PowerLaw(1.891, 0.057), PowerLaw(1.870, 0.058)
    assert block.loss(5.6) == pytest.approx(1.692, abs=5e-4)
    assert compute_multiplier(block, baseline, 5.6) == pytest.approx(1.25, abs=5e-3)
    assert compute_multiplier(PowerLaw(1.0, 0.5), PowerLaw(2.0, 0.5), 7) == pytest.approx(4)  # (2 / 1)^(1 / 0.5)
    assert compute_multiplier(baseline, baseline, 3) == pytest.approx(1)


@pytest.mark.parametrize(("compute", "loss"), [([1, 1], [2, 3]), ([1], [2]), ([1, -2], [2, 3]), ([1, 2], [2, 0])])
def test_a_power_law_needs_two_amounts_and_positive_numbers(compute, loss):
    with pytest.raises(ValueError, match="accepted: numbers above 0, two amounts of compute"):
        power_law(compute, loss)
