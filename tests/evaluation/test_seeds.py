"""Intervals over seeds and over problems, against values worked out by hand and textbook quantiles."""

from __future__ import annotations

import math

import pytest

from parallel_r1.evaluation.estimators import Estimate
from parallel_r1.evaluation.seeds import direction, over_problems, over_seeds


def test_interval_over_three_seeds() -> None:
    # mean 2, deviation 1, t(0.975; 2) = 4.3027: half-width 4.3027 / sqrt(3) = 2.4842
    found = over_seeds([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert (found.low, found.high) == pytest.approx((-0.4842, 4.4842), abs=1e-4)


@pytest.mark.parametrize(("n", "t"), [(2, 12.7062), (4, 3.1824), (5, 2.7764), (6, 2.5706), (11, 2.2281)])
def test_quantiles_of_students_t(n: int, t: float) -> None:
    # n values, half of them +1 and half -1, and one 0 where n is odd
    values = [1.0] * (n // 2) + [-1.0] * (n // 2) + [0.0] * (n % 2)
    deviation = math.sqrt(2 * (n // 2) / (n - 1))
    assert over_seeds(values).high == pytest.approx(t * deviation / math.sqrt(n), rel=0.01)


def test_equal_seeds_leave_no_width() -> None:
    assert over_seeds([0.25, 0.25, 0.25]) == Estimate(0.25, 0.25, 0.25)


def test_one_seed_has_no_interval_and_none_no_value() -> None:
    assert over_seeds([0.5]) == Estimate(0.5, None, None)
    assert math.isnan(over_seeds([]).value)


def test_paired_difference_over_problems() -> None:
    a = {f"p{i}": 1.0 for i in range(100)}
    b = {f"p{i}": float(i % 2) for i in range(100)}
    found = over_problems([(a, b), (a, b)])
    # differences are 0 or 1, half each: standard error 0.05, so about 0.5 +- 0.1
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.4, 0.6), abs=0.02)


def test_pairing_takes_the_spread_of_the_problems_out() -> None:
    a = {f"p{i}": i / 100 for i in range(100)}
    found = over_problems([(a, {id: score - 0.01 for id, score in a.items()})])
    assert (found.value, found.low, found.high) == pytest.approx((0.01, 0.01, 0.01))


def test_only_problems_of_all_runs_are_compared() -> None:
    found = over_problems([({"x": 1.0, "y": 1.0}, {"x": 0.0, "y": 0.0}), ({"x": 1.0, "z": 0.0}, {"x": 1.0})])
    assert found == Estimate(0.5, None, None)
    assert over_problems([({"x": 1.0}, {})]) is None
    assert over_problems([]) is None


@pytest.mark.parametrize(
    ("low", "high", "sign", "margin", "verdict"),
    [
        (0.1, 0.3, 1, 0.0, "holds"),
        (-0.3, -0.1, 1, 0.0, "fails"),
        (-0.1, 0.3, 1, 0.0, "open"),
        (-0.3, -0.1, -1, 0.0, "holds"),
        (0.1, 0.3, -1, 0.0, "fails"),
        (0.0, 0.3, 1, 0.0, "open"),  # zero itself is not excluded
        (-0.04, 0.3, 1, 0.05, "holds"),
        (-0.06, 0.3, 1, 0.05, "open"),
        (-0.3, -0.06, 1, 0.05, "fails"),
        (-0.3, -0.04, 1, 0.05, "open"),
    ],
)
def test_direction(low: float, high: float, sign: int, margin: float, verdict: str) -> None:
    assert direction(Estimate((low + high) / 2, low, high), sign, margin) == verdict


def test_nothing_is_settled_without_an_interval() -> None:
    assert direction(Estimate(1.0, None, None), 1) == "open"
