"""Estimators against brute-force enumeration, intervals against simulation, tests against all signs."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from parallel_r1.evaluation.estimators import (
    Estimate,
    best_at,
    between,
    cluster_bootstrap,
    majority,
    pass_at,
    powers_up_to,
    share_interval,
    sign_flip_test,
    student_quantile,
    subsets,
    tail,
)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_pass_and_best_equal_enumeration(n: int) -> None:
    for correct in range(n + 1):
        samples = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            without = [any(draw) for draw in itertools.combinations(samples, k)]
            assert pass_at(n, correct, k) == pytest.approx(sum(without) / len(without))
            if n**k < 20_000:
                with_ = [any(draw) for draw in itertools.product(samples, repeat=k)]
                assert best_at(n, correct, k) == pytest.approx(sum(with_) / len(with_))
                assert best_at(n, correct, k) <= pass_at(n, correct, k) + 1e-12
    assert pass_at(n, n, 0) == 0


def test_which_k_are_reported() -> None:
    assert [powers_up_to(k) for k in (1, 2, 3, 4, 12, 16)] == [
        [],
        [2],
        [2, 3],
        [2, 4],
        [2, 4, 8, 12],
        [2, 4, 8, 16],
    ]


def majority_by_hand(votes: tuple[int, ...], right: tuple[bool, ...], chosen: tuple[int, ...]) -> float:
    counts = Counter(votes[i] for i in chosen if votes[i] >= 0)
    if not counts:
        return 0.0
    leading = [group for group, n in counts.items() if n == max(counts.values())]
    return sum(right[group] for group in leading) / len(leading)


def test_majority_of_every_subset_of_every_vote() -> None:
    right = (False, True, False)
    for votes in itertools.product((-1, 0, 1, 2), repeat=4):
        for size in range(1, 5):
            chosen = subsets(4, size, seed=0)
            expected = [majority_by_hand(votes, right, c) for c in itertools.combinations(range(4), size)]
            assert majority(np.array(votes), np.array(right), chosen).tolist() == pytest.approx(expected)


def test_majority_without_any_answer_is_wrong() -> None:
    assert majority(np.array([-1, -1]), np.array([], dtype=bool), subsets(2, 2, 0)).tolist() == [0.0]


def test_many_subsets_are_drawn_all_of_the_right_size_and_the_same_each_time() -> None:
    drawn = subsets(20, 10, seed=3)
    assert drawn.shape == (512, 20)
    assert (drawn.sum(axis=1) == 10).all()
    assert (drawn == subsets(20, 10, seed=3)).all()
    assert (drawn != subsets(20, 10, seed=4)).any()
    assert drawn.mean(axis=0) == pytest.approx(0.5, abs=0.1)
    assert subsets(5, 0, 0).tolist() == [[False] * 5]


def test_interpolation() -> None:
    assert between(2.25, {2: 1.0, 3: 5.0}) == 2.0
    assert between(3.0, {3: 5.0}) == 5.0


@pytest.mark.parametrize(
    ("p", "freedom", "value"),  # tables of Student's t
    [(0.975, 5, 2.571), (0.975, 10, 2.228), (0.975, 29, 2.045), (0.975, 120, 1.980), (0.95, 8, 1.860)],
)
def test_student_quantiles(p: float, freedom: int, value: float) -> None:
    assert student_quantile(p, freedom) == pytest.approx(value, rel=0.01)


def test_tails_are_wider_where_problems_are_few_and_approach_a_fortieth() -> None:
    assert tail(10) < tail(30) < tail(1000) < 0.025
    assert tail(100_000) == pytest.approx(0.025, abs=1e-4)


def test_a_ratio_of_sums_and_its_interval_equal_enumeration() -> None:
    """Three problems: all 27 equally likely resamples, against the drawn ones."""
    sums, weights = np.array([[1.0, 3.0], [0.0, 1.0], [0.5, 8.0]]), np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    values = []
    for draw in itertools.product(range(3), repeat=3):
        rows = list(draw)
        values.append(sums[rows].sum(axis=0) / weights[rows].sum(axis=0))
    found = cluster_bootstrap(sums, weights, 20_000, seed=0)
    assert [e.value for e in found] == pytest.approx([0.5, 12 / 7])
    for estimate, column in zip(found, np.array(values).T, strict=True):
        low, high = np.quantile(column, [tail(3), 1 - tail(3)], method="nearest")
        assert estimate.low == pytest.approx(low, abs=0.02)
        assert estimate.high == pytest.approx(high, abs=0.02)


def test_the_interval_is_that_of_problems_not_of_samples() -> None:
    """Four equal samples a problem tell no more than one."""
    one = np.array([[1.0]] * 10 + [[0.0]] * 10)
    many = cluster_bootstrap(one * 4, np.full((20, 1), 4.0), 4000, seed=0)[0]
    single = cluster_bootstrap(one, np.ones((20, 1)), 4000, seed=0)[0]
    assert many == single
    assert single.high - single.low == pytest.approx(2 * 2.093 * math.sqrt(0.25 / 19), rel=0.1)


@pytest.mark.parametrize(("problems", "k"), [(30, 4), (120, 2)])
def test_intervals_cover_at_the_stated_rate(problems: int, k: int) -> None:
    """mean@k of problems of unequal difficulty: the truth is the mean difficulty of all problems there could be."""
    rng, runs, hits = np.random.default_rng(7), 600, 0
    for run in range(runs):
        difficulty = rng.beta(0.8, 1.2, size=problems)
        scores = rng.binomial(k, difficulty)[:, None] / k
        found = cluster_bootstrap(scores, np.ones_like(scores), 400, seed=run)[0]
        hits += found.low <= 0.4 <= found.high
    # four standard errors of a rate of .95 over 600 runs are .036
    assert 0.95 - 0.036 < hits / runs < 0.95 + 0.036


def test_intervals_of_a_ratio_cover_too() -> None:
    rng, runs, hits = np.random.default_rng(8), 600, 0
    for run in range(runs):
        size = rng.integers(10, 100, size=40).astype(float)
        total = size * rng.uniform(1.0, 2.0, size=40)
        found = cluster_bootstrap(total[:, None], size[:, None], 400, seed=run)[0]
        hits += found.low <= 1.5 <= found.high
    assert 0.95 - 0.036 < hits / runs < 0.95 + 0.036


def test_one_problem_has_no_interval_and_nothing_has_no_value() -> None:
    assert cluster_bootstrap(np.array([[0.5]]), np.ones((1, 1)), 100, 0) == [Estimate(0.5, None, None)]
    nothing = cluster_bootstrap(np.zeros((3, 1)), np.zeros((3, 1)), 100, 0)[0]
    assert math.isnan(nothing.value)
    assert nothing.low is None


def test_a_share_without_spread_gets_wilsons_interval() -> None:
    # Newcombe 1998, table I, method 3: 0 of 20
    assert share_interval(Estimate(0.0, 0.0, 0.0), 20).high == pytest.approx(0.1611, abs=1e-4)
    assert share_interval(Estimate(1.0, 1.0, 1.0), 20).low == pytest.approx(1 - 0.1611, abs=1e-4)
    assert share_interval(Estimate(0.5, 0.4, 0.6), 20) == Estimate(0.5, 0.4, 0.6)


def test_sign_flips_by_hand_and_by_draws() -> None:
    assert sign_flip_test([1.0, 1.0, 1.0], 0) == 2 / 8
    assert sign_flip_test([1.0, -1.0, 0.0], 0) == 1.0
    assert sign_flip_test([0.0, 0.0], 0) == 1.0
    assert sign_flip_test([], 0) == 1.0
    d = np.array([0.5, 0.25, -0.25, 0.75, 0.5, 1.0, -0.5, 0.25, 0.5, 0.75, 0.25, -0.25, 0.5])
    exact = sign_flip_test(d, 0)
    drawn = sign_flip_test(np.concatenate([d, [1e-9, -1e-9]]), 0)  # two more than it enumerates
    assert drawn == pytest.approx(exact, abs=0.01)


def test_sign_flip_p_values_are_uniform_where_nothing_differs() -> None:
    rng = np.random.default_rng(1)
    p = [sign_flip_test(rng.choice([-0.5, 0.5], size=12), run) for run in range(400)]
    for level in (0.05, 0.2, 0.5):
        assert np.mean(np.array(p) <= level) <= level + 4 * math.sqrt(level * (1 - level) / 400)
