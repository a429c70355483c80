"""Metrics by tier: counted by hand, merged, and an interval against published values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.evaluation.metrics import TierMetrics, wilson_half_width
from parallel_r1.structure.grammar import parse, render_block
from parallel_r1.types import Judged, Problem

BLOCK = render_block(["a", "b"], "s")


def judged(
    text: str = "",
    correct: bool = False,
    finished: bool = True,
    total: int = 10,
    critical: int = 10,
    tier: str = "easy",
    budget: int | None = None,
) -> Judged:
    problem = Problem("id", "q", "1", tier, meta={} if budget is None else {"critical_budget": budget})
    return Judged(problem, text, parse(text), correct, finished, total, critical)


def measure(responses: list[Judged], tiers: tuple[str, ...] = ("easy", "hard")) -> dict[str, float]:
    metrics = TierMetrics(tiers)
    metrics.update(responses)
    return metrics.compute()


def test_every_metric_by_hand() -> None:
    found = measure(
        [
            judged(BLOCK, correct=True, total=20, critical=12),
            judged(f"{BLOCK} </Path>", correct=True, total=30, critical=24),  # parallel, yet not well formed
            judged("plain", total=7, critical=7),
            judged(BLOCK, finished=False, total=50, critical=30),  # cut: whatever was written, it is not valid
        ]
    )
    assert found.pop("easy/accuracy_ci95") == pytest.approx(wilson_half_width(0.5, 4))
    assert found == {
        "easy/accuracy": 2 / 4,
        "easy/parallel_ratio": 3 / 4,
        "easy/format_valid": 2 / 4,  # the first and the third
        "easy/truncated": 1 / 4,
        "easy/critical_tokens": (12 + 24 + 7 + 30) / 4,
        "easy/total_tokens": (20 + 30 + 7 + 50) / 4,
        "easy/n": 4,
    }


def test_tiers_are_apart_and_an_empty_tier_says_nothing() -> None:
    found = measure([judged(correct=True), judged(tier="hard")], ("easy", "hard", "harder"))
    assert (found["easy/accuracy"], found["hard/accuracy"]) == (1.0, 0.0)
    assert not any(key.startswith("harder/") for key in found)
    assert measure([]) == {}


def test_accuracy_at_critical_asks_for_both_a_right_answer_and_the_budget() -> None:
    found = measure(
        [
            judged(correct=True, critical=10, budget=10),  # the budget itself is within
            judged(correct=True, critical=11, budget=10),
            judged(correct=False, critical=5, budget=10),
            judged(correct=True, critical=11, total=40, budget=12),
        ]
    )
    assert found["easy/accuracy_at_critical"] == 2 / 4


def test_accuracy_at_critical_is_left_out_unless_every_problem_has_a_budget() -> None:
    found = measure([judged(correct=True, budget=10), judged(correct=True), judged(tier="hard", budget=9)])
    assert "easy/accuracy_at_critical" not in found
    assert found["hard/accuracy_at_critical"] == 0.0


@settings(deadline=None)
@given(flags=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5000)), min_size=1, max_size=20))
def test_batches_add_up_whatever_their_size(flags: list[tuple[bool, bool, int]]) -> None:
    responses = [judged(BLOCK if p else "", c, total=n, critical=n) for c, p, n in flags]
    one_by_one = TierMetrics(("easy",))
    for response in responses:
        one_by_one.update([response])
    assert one_by_one.compute() == measure(responses, ("easy",))


def test_ranks_are_merged_by_sums() -> None:
    """What torchmetrics does over processes: the states are reduced as declared. A rank may have seen nothing."""
    parts = [[judged(correct=True, critical=4)], [], [judged(), judged(tier="hard")]]
    ranks = [TierMetrics(("easy", "hard")) for _ in parts]
    for metrics, part in zip(ranks, parts, strict=True):
        metrics.update(part)
    merged = ranks[0]
    merged.sums = merged._reductions["sums"](torch.stack([metrics.sums for metrics in ranks]))
    assert merged.compute() == measure([response for part in parts for response in part])


def test_reset_forgets() -> None:
    metrics = TierMetrics(("easy",))
    metrics.update([judged(correct=True)])
    metrics.reset()
    metrics.update([judged()])
    assert (metrics.compute()["easy/n"], metrics.compute()["easy/accuracy"]) == (1, 0.0)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score interval)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_is_the_published_one(right: int, n: int, low: float, high: float) -> None:
    assert wilson_half_width(right / n, n) == pytest.approx((high - low) / 2, abs=6e-5)


def test_wilson_interval_of_a_half_by_hand() -> None:
    # z = 1.96, n = 100, p = 1/2: 1.96 * sqrt(0.0025 + 3.8416 / 40000) / 1.038416 = 1.96 * 0.0509514 / 1.038416
    assert wilson_half_width(0.5, 100, z=1.96) == pytest.approx(0.0961702, abs=1e-6)


@settings(deadline=None)
@given(right=st.integers(0, 50), more=st.integers(0, 50))
def test_wilson_interval_is_symmetric_positive_and_below_a_half(right: int, more: int) -> None:
    n = right + more + 1
    width = wilson_half_width(right / n, n)
    assert 0 < width < 0.5
    assert width == pytest.approx(wilson_half_width(1 - right / n, n))
    assert math.isclose(wilson_half_width(right / n, 4 * n) / width, 0.5, rel_tol=0.5)  # shrinks as samples grow
