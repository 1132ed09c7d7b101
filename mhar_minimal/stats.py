"""How far a comparison of training runs can be trusted: paired differences, power, equal budgets, published tests.

A run is known by its rows (`mhar_minimal.train.Row`), of which only the columns named here are read; losses are in nats
per byte. Runs of one seed share their initial trunk and their batches, so what is compared is the difference within a
seed. NumPy and torch are enough; the tests judge everything by SciPy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

POWER = 0.8
FLAT = 0.01  # nats per byte: a run whose last tenth lowers the validation loss by less has flattened
RESAMPLES = 10_000
LOG_CHI = np.linspace(-40, 3, 20_001)  # where the density of log(chi / √df) is summed, for every df ≥ 1


class Difference(NamedTuple):
    """An arm minus the reference, over the seeds; both intervals hold for all comparisons at a time."""

    mean: float
    sd: float  # of the differences, n − 1 in the denominator
    t_interval: tuple[float, float]
    bootstrap_interval: tuple[float, float]  # percentiles; with five seeds it is too narrow, and t is the one to trust
    p: float  # of the paired t test, two-sided, after Holm
    detectable: float  # the smallest true difference that this comparison would have seen with power 0.8


def paired_differences(
    values: Mapping[str, Mapping[int, float]], reference: str | None, alpha: float = 0.05
) -> dict[str, Difference]:
    """Every other arm minus the reference, paired by seed, corrected for the number of comparisons.

    Intervals have the confidence 1 − alpha / comparisons (Bonferroni: Holm's steps give no simultaneous intervals), and
    ``detectable`` is that of a test at the same level; p values are adjusted after Holm. The bootstrap's seed is fixed.

    Args:
        values: by arm, the metric by seed.
        reference: the arm that the others are compared with; None where the values are differences already.
        alpha: the chance that any of the intervals misses its difference.

    Raises:
        ValueError: no such reference, no other arm, other seeds than the reference's, or fewer than two seeds.
    """
    if reference is None:
        values = {**values, None: dict.fromkeys(next(iter(values.values()), ()), 0.0)}
    arms, seeds = [arm for arm in values if arm != reference], sorted(values.get(reference, ()))
    if reference not in values or not arms:
        raise ValueError(f"reference={reference!r} of arms {list(values)}; accepted: one of two arms or more")
    level, p, found = alpha / len(arms), {}, {}
    for arm in arms:
        if sorted(values[arm]) != seeds or len(seeds) < 2:
            raise ValueError(
                f"{arm} has seeds {sorted(values[arm])}, {reference} {seeds}; accepted: the same, at least two"
            )
        d = np.array([values[arm][seed] - values[reference][seed] for seed in seeds])
        if not np.isfinite(d).all():
            raise ValueError(f"{arm} minus {reference} is {d.tolist()}; accepted: finite numbers")
        mean, sd = float(d.mean()), float(d.std(ddof=1))
        error = sd / math.sqrt(len(d))
        p[arm] = 2 * t_cdf(-abs(mean) / error, len(d) - 1) if sd else float(mean == 0)
        reach = t_critical(level, len(d) - 1) * error
        means = np.random.default_rng(0).choice(d, (RESAMPLES, len(d))).mean(1)
        low, high = np.quantile(means, (level / 2, 1 - level / 2)).tolist()
        detectable = smallest_difference(sd, len(d), level)
        found[arm] = Difference(mean, sd, (mean - reach, mean + reach), (low, high), p[arm], detectable)
    return {arm: found[arm]._replace(p=adjusted) for arm, adjusted in holm(p).items()}


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """P values adjusted for their number m (Holm, 1979): the k-th smallest times m − k + 1, in no other order."""
    adjusted, least = {}, 0.0
    for k, name in enumerate(sorted(p, key=p.get)):
        least = max(least, min(1.0, (len(p) - k) * p[name]))
        adjusted[name] = least
    return {name: adjusted[name] for name in p}


def smallest_difference(sd: float, n: int, alpha: float = 0.05, power: float = POWER) -> float:
    """The true difference that a two-sided paired t test detects with that power, in the unit of ``sd``.

    Args:
        sd: standard deviation of the paired differences.
        n: number of pairs, at least two.
        alpha: level of the test.
        power: the chance of a p value below alpha; above alpha.
    """
    if not alpha < power < 1:
        raise ValueError(f"power={power}; accepted: between alpha={alpha} and 1")
    df, critical = n - 1, t_critical(alpha, n - 1)
    shift = _solve(lambda d: t_cdf(-critical, df, -d) + t_cdf(-critical, df, d), power)
    return shift * sd / math.sqrt(n)


def t_cdf(t: float, df: int, shift: float = 0.0) -> float:
    """P((Z + shift) / (chi / √df) ≤ t), Z standard normal: Student's t, or noncentral t where ``shift`` is not 0.

    The mean of Φ(t · chi / √df − shift) over chi, by the trapezoid rule in log(chi / √df), where it converges
    exponentially.
    """
    if df < 1:
        raise ValueError(f"df={df}; accepted: at least 1, so at least two seeds")
    ratio = np.exp(LOG_CHI)
    density = np.exp(df * (LOG_CHI - (ratio**2 - 1) / 2))  # not normalised: 1 at its mode
    normal = torch.special.ndtr(torch.from_numpy(t * ratio - shift)).numpy()
    return float(np.average(normal, weights=density))


def t_critical(alpha: float, df: int) -> float:
    """The value that |T|, of Student's t, exceeds with probability alpha."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}; accepted: between 0 and 1")
    return _solve(lambda t: -2 * t_cdf(-t, df), -alpha)


def _solve(increasing: Callable[[float], float], target: float) -> float:
    """The x > 0 at which an increasing function reaches a value, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while increasing(high) < target:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if increasing(middle) < target else (low, middle)
    return high


def tail_mean(rows: Sequence, last: int) -> float:
    """The metric of a run: its mean validation loss over the last evaluations.

    Raises:
        ValueError: fewer evaluations than that, or none wanted.
    """
    if not 1 <= last <= len(rows):
        raise ValueError(f"last={last}; accepted: 1 to {len(rows)}, the evaluations of the run")
    return fmean(row.val_loss for row in rows[-last:])


def last_drop(rows: Sequence) -> float:
    """By how much the validation loss fell over the last tenth of the steps; below `FLAT`, the run has flattened.

    Below 0 it rose: flat by that rule, but overfitted.
    """
    return loss_at(rows, "step", 0.9 * rows[-1].step) - rows[-1].val_loss


def loss_at(rows: Sequence, budget: str, spent: float) -> float:
    """The validation loss of a run once it had spent so much, linear between the two evaluations around.

    Args:
        rows: in order, with the columns ``budget`` and ``val_loss``.
        budget: "step", "tokens" or "seconds".
        spent: from that of the first row to that of the last; nothing is extrapolated.

    Raises:
        ValueError: an amount outside that range, or rows that are not those of one run.
    """
    at = [getattr(row, budget) for row in rows]
    if (np.diff(at) <= 0).any():
        raise ValueError(f"{budget} of the rows does not increase; accepted: the rows of one run, in order")
    if not at[0] <= spent <= at[-1]:
        raise ValueError(f"{budget}={spent}; accepted: {at[0]} to {at[-1]}, where the run was evaluated")
    return float(np.interp(spent, at, [row.val_loss for row in rows]))


def readings(arm: Sequence, reference: Sequence) -> dict[str, tuple[float, float, float]]:
    """The same two runs at equal steps, tokens and seconds: by budget, what was spent and the two validation losses.

    Each is read at the largest budget that both have reached, the end of the run that ended first; the other is cut off
    there, not extrapolated. It is then in the middle of its learning-rate schedule, which is to its disadvantage.
    Seconds of runs that shared a machine mean nothing: replace them by steps × the seconds of a step timed alone.
    """
    found = {}
    for budget in ("step", "tokens", "seconds"):
        spent = min(getattr(arm[-1], budget), getattr(reference[-1], budget))
        found[budget] = spent, loss_at(arm, budget, spent), loss_at(reference, budget, spent)
    return found


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p value for paired items: of those that one model alone solved, each is either's by even chance.

    Published cases (arXiv:2607.27230): 123 against 81 give 0.004, 27 against 13 give 0.038.

    Raises:
        ValueError: a count below 0.
    """
    if min(only_a, only_b) < 0:
        raise ValueError(f"only_a={only_a}, only_b={only_b}; accepted: counts of at least 0")
    n = only_a + only_b
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n)


class PowerLaw(NamedTuple):
    """L = a · C^−b, a loss as a function of compute, in whatever unit it was fitted in."""

    a: float
    b: float

    def loss(self, compute: float) -> float:
        return self.a * compute**-self.b


def power_law(compute: ArrayLike, loss: ArrayLike) -> PowerLaw:
    """Least squares in log L against log C.

    Raises:
        ValueError: fewer than two amounts of compute, or a number that is not above 0.
    """
    c, y = np.asarray(compute, float), np.asarray(loss, float)
    if len(set(c.tolist())) < 2 or not (min(c) > 0 and min(y) > 0):
        raise ValueError(f"compute={c.tolist()}, loss={y.tolist()}; accepted: numbers above 0, two amounts of compute")
    slope, intercept = np.polyfit(np.log(c), np.log(y), 1)
    return PowerLaw(math.exp(intercept), -float(slope))


def compute_multiplier(law: PowerLaw, reference: PowerLaw, compute: float) -> float:
    """How many times the compute the reference needs for the loss that ``law`` reaches with ``compute``.

    Published case (arXiv:2603.15031): 1.870 C^−0.058 against 1.891 C^−0.057 at 5.6 PFLOP/s-days give 1.25.
    """
    return (reference.a / law.loss(compute)) ** (1 / reference.b) / compute
