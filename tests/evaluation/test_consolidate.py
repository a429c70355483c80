"""Votes and early stops against brute force over everything that could still come."""

from __future__ import annotations

import itertools
import math
import time

import pytest

from parallel_r1.evaluation.consolidate import (
    answer_groups,
    beta_above_half,
    confidence,
    consolidate,
    fewest_to_stop,
    may_stop,
)


def test_answers_are_grouped_by_value() -> None:
    assert answer_groups(["1/2", "0.5", r"\frac{1}{2}", "7", None, " ", "7.0", "x"]) == [0, 0, 0, 1, -1, -1, 1, 2]


def test_grouping_is_bounded_whatever_a_model_wrote() -> None:
    hostile = ["(" * 5_000, "9" * 2_000, "9" * 2_000, "\\frac{" * 300, "\x00", "{{{", "2^{2^{2^{2^{9}}}}", "٣"]
    start = time.perf_counter()
    groups = answer_groups(hostile * 4)
    assert time.perf_counter() - start < 5
    assert groups[1] == groups[2]
    assert groups[: len(hostile)] * 4 == groups


def test_confidence_is_the_geometric_mean_and_its_lowest_stretch() -> None:
    logprobs = [math.log(p) for p in (0.9, 0.8, 0.1, 0.2, 1.0)]
    assert confidence(logprobs) == pytest.approx(math.prod((0.9, 0.8, 0.1, 0.2, 1.0)) ** (1 / 5))
    by_hand = min(math.exp(sum(logprobs[i : i + 2]) / 2) for i in range(4))
    assert confidence(logprobs, window=2) == pytest.approx(by_hand)
    assert confidence(logprobs, window=50) == pytest.approx(confidence(logprobs))
    assert confidence([]) == 0.0


def test_a_majority_and_its_most_confident_attempt() -> None:
    found = consolidate([0, 1, 0, -1], [0.2, 0.9, 0.4, 0.99])
    assert (found.chosen, found.group, found.agreement) == (2, 0, 0.5)
    assert found.weight == pytest.approx(2 / 3)


def test_confidence_may_outweigh_votes() -> None:
    found = consolidate([0, 1, 0], [0.2, 0.9, 0.4], "weighted")
    assert (found.chosen, found.group) == (1, 1)
    assert found.weight == pytest.approx(0.9 / 1.5)


def test_a_tie_and_no_agreement_at_all_go_to_the_most_confident() -> None:
    assert consolidate([0, 1, 0, 1, 2], [0.5, 0.6, 0.7, 0.1, 0.99]).group == 0
    assert consolidate([0, 1, 2], [0.5, 0.6, 0.1]).group == 1


def test_no_answer_and_no_attempt() -> None:
    found = consolidate([-1, -1], [0.1, 0.3])
    assert (found.chosen, found.group, found.agreement) == (1, -1, 0.0)
    assert consolidate([], []).chosen is None


def winner(groups: tuple[int, ...]) -> set[int]:
    """Groups that may win: those with the most votes."""
    votes = {g: groups.count(g) for g in groups if g >= 0}
    return {g for g in votes if votes[g] == max(votes.values())}


@pytest.mark.parametrize("n", [3, 4, 5])
def test_certain_stops_exactly_when_nothing_can_change_the_answer(n: int) -> None:
    for made in range(1, n + 1):
        for groups in itertools.product((-1, 0, 1, 2), repeat=made):
            ends = {
                tuple(sorted(winner(groups + rest))) for rest in itertools.product((-1, 0, 1, 2, 3), repeat=n - made)
            }
            settled = len(ends) == 1 and len(next(iter(ends))) == 1
            stopped = may_stop(groups, [0.5] * made, n - made)
            assert stopped == (settled or made == n), (groups, ends)


def test_certain_by_weight_counts_a_coming_vote_as_one() -> None:
    assert not may_stop([0, 0, 1], [0.9, 0.9, 0.1], 2, voting="weighted")
    assert may_stop([0, 0, 0, 1], [0.9, 0.9, 0.9, 0.1], 2, voting="weighted")


def test_off_makes_all_attempts() -> None:
    assert not may_stop([0] * 7, [1.0] * 7, 1, "off")
    assert may_stop([0] * 8, [1.0] * 8, 0, "off")


def test_beta_above_half_by_numerical_integration() -> None:
    for a, b in ((0, 0), (3, 0), (4, 1), (2, 5)):
        steps = 20_000
        x = [(i + 0.5) / steps for i in range(steps)]
        density = [p**a * (1 - p) ** b for p in x]
        assert beta_above_half(a, b) == pytest.approx(sum(density[steps // 2 :]) / sum(density), abs=1e-3)


def test_likely_stops_at_its_threshold() -> None:
    assert beta_above_half(4, 0) == pytest.approx(1 - 1 / 32)
    assert may_stop([0] * 4, [0.5] * 4, 10, "likely", threshold=0.95)
    assert not may_stop([0] * 3, [0.5] * 3, 10, "likely", threshold=0.95)
    assert not may_stop([-1] * 9, [0.5] * 9, 10, "likely")


def attempts_made(stream: tuple[int, ...], rule: str, one_by_one: bool) -> int:
    made = 0
    while not may_stop(stream[:made], [0.7] * made, len(stream) - made, rule, threshold=0.85):
        left = len(stream) - made
        made += 1 if one_by_one else fewest_to_stop(stream[:made], [0.7] * made, left, rule, threshold=0.85)
    return made


@pytest.mark.parametrize("rule", ["certain", "likely", "off"])
def test_rounds_of_the_fewest_make_as_many_attempts_as_one_by_one(rule: str) -> None:
    for stream in itertools.product((-1, 0, 1), repeat=7):
        assert attempts_made(stream, rule, False) == attempts_made(stream, rule, True), stream


def test_the_first_round_of_a_majority_is_more_than_half() -> None:
    assert [fewest_to_stop([], [], n) for n in (1, 2, 7, 8)] == [1, 2, 4, 5]
    assert fewest_to_stop([], [], 8, "off") == 8
