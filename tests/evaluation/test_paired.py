"""Two reports problem by problem: values by hand, refusals, coverage of the paired interval."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_r1.evaluation.paired import compare


def report(tiers: dict[str, dict[str, list[int]]], k: int = 2, first: int = 0) -> dict:
    """tiers: tier -> mode -> right samples by problem."""
    return {
        "tiers": {
            tier: {
                "samples": k,
                "by_problem": {
                    mode: [
                        {
                            "id": f"p{first + i}",
                            "correct": c,
                            "majority": float(c == k),
                            "parallel": 0,
                            "total_tokens": 10 * k,
                            "critical_tokens": 5 * k,
                        }
                        for i, c in enumerate(correct)
                    ]
                    for mode, correct in modes.items()
                },
            }
            for tier, modes in tiers.items()
        }
    }


def test_differences_by_hand() -> None:
    a = report({"easy": {"plain": [0, 1, 2, 2]}})
    b = report({"easy": {"plain": [1, 2, 2, 1]}})
    found = {d.metric: d for d in compare(a, b)}
    mean = found["mean@2"]
    assert (mean.n, mean.a, mean.b, mean.difference) == (4, 5 / 8, 6 / 8, 1 / 8)
    assert (mean.better, mean.worse) == (2, 1)
    assert mean.low < 1 / 8 < mean.high
    assert mean.p == 1.0  # +, +, - of equal size: every sum is at least as far from 0
    assert found["pass@2"].difference == 1 / 4
    assert found["majority@2"].difference == 0
    assert found["total_tokens"].a == 10
    assert found["total_tokens"].p == 1.0


def test_only_problems_that_both_have_count() -> None:
    a, b = report({"easy": {"plain": [0, 0, 2]}}), report({"easy": {"plain": [2, 2]}}, first=2)
    mean = compare(a, b)[0]
    assert (mean.n, mean.a, mean.b, mean.low) == (1, 1.0, 1.0, None)


def test_modes_are_compared_with_themselves_or_as_asked() -> None:
    a = report({"easy": {"plain": [0, 0], "sequential": [2, 2]}})
    assert [d.mode for d in compare(a, a) if d.metric == "mean@2"] == ["plain", "sequential"]
    found = compare(a, a, ("plain", "sequential"))
    assert found[0].mode == "plain / sequential"
    assert found[0].difference == 1.0


@pytest.mark.parametrize(
    ("b", "named"),
    [
        (report({"hard": {"plain": [1]}}), ["share no set", "easy", "hard"]),
        (report({"easy": {"plain": [1]}}, first=9), ["no problem of easy"]),
        (report({"easy": {"plain": [1]}}, k=4), ["2 samples", "4 in B", "evaluation.samples"]),
        (report({"easy": {"forced": [1]}}), ["no mode", "plain", "forced"]),
        ({"easy/accuracy": 0.5}, ["B is no report", "report.json"]),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(b: dict, named: list[str]) -> None:
    with pytest.raises(ValueError, match=named[0]) as error:
        compare(report({"easy": {"plain": [1, 2]}}), b)
    for part in named:
        assert part in str(error.value)


def test_the_interval_of_a_difference_covers() -> None:
    """Problems of unequal difficulty, B better by .1 on average: pairing takes the difficulty out."""
    rng, runs, hits, widths = np.random.default_rng(3), 120, 0, []
    for run in range(runs):
        difficulty = rng.uniform(0.1, 0.8, size=60)
        a, b = rng.binomial(8, difficulty), rng.binomial(8, difficulty + 0.1)
        pair = (report({"easy": {"plain": list(map(int, x))}}, k=8) for x in (a, b))
        mean = compare(*pair, resamples=300, seed=run)[0]
        hits += mean.low <= 0.1 <= mean.high
        widths.append(mean.high - mean.low)
    assert hits / runs > 0.95 - 0.08  # four standard errors
    assert np.mean(widths) < 0.15
