"""What a few runs that differ in their seed say: means, paired differences, and whether a direction is settled.

Two intervals, two questions. Over seeds: would it come out so with other seeds, on these problems? Over problems: is it
so on other problems, with these very runs? The second is much narrower, and says nothing about another run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Literal

import numpy as np

from parallel_r1.evaluation.estimators import Estimate, cluster_bootstrap, student_quantile

Direction = Literal["holds", "fails", "open"]

# 97.5 % quantiles of Student's t, where the expansion in `student_quantile` is not exact enough
_FEW = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean and 95 % t interval of one value a seed; no interval for fewer than two."""
    n = len(values)
    if n < 2:
        return Estimate(values[0] if values else math.nan, None, None)
    t = _FEW.get(n - 1) or student_quantile(0.975, n - 1)
    half = t * stdev(values) / math.sqrt(n)
    return Estimate(mean(values), mean(values) - half, mean(values) + half)


def over_problems(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> Estimate | None:
    """Mean paired difference a - b and its bootstrap interval over problems, the seeds as they are.

    pairs: one (a, b) a seed, each the score by problem. None where no problem is in all of them.
    """
    shared = sorted(set.intersection(*(set(side) for pair in pairs for side in pair))) if pairs else []
    if not shared:
        return None
    differences = np.array([[mean(a[id] - b[id] for a, b in pairs)] for id in shared])
    return cluster_bootstrap(differences, np.ones_like(differences), resamples=2000, seed=0)[0]


def direction(estimate: Estimate, sign: int, margin: float = 0.0) -> Direction:
    """`holds`, `fails` or `open`: is sign * value above -margin?"""
    if estimate.low is None or estimate.high is None:
        return "open"
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    return "holds" if low > -margin else "fails" if high < -margin else "open"
