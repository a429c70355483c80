"""Order: permutations, shares and mixtures, each against a brute-force reading of its definition."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.data.order import epoch_order, hold_out, index_at, mixed_counts, share, shuffled
from parallel_r1.types import Problem

SEEDS = st.integers(0, 2**31)


@settings(deadline=None)
@given(n=st.integers(1, 50), seed=SEEDS, epochs=st.integers(1, 4))
def test_a_walk_shows_everything_once_an_epoch(n: int, seed: int, epochs: int) -> None:
    walk = [index_at(p, n, seed) for p in range(n * epochs)]
    for e in range(epochs):
        assert sorted(walk[e * n : (e + 1) * n]) == list(range(n))


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert epoch_order(100, 3, 0) == epoch_order(100, 3, 0)
    assert len({epoch_order(100, seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_order_is_the_one_of_earlier_releases() -> None:
    """A run that resumes after an upgrade must find its old order: these values may never change."""
    assert epoch_order(8, 0, 0) == (0, 3, 7, 4, 1, 5, 2, 6)
    assert shuffled("abcdef", "s") == ["e", "f", "a", "d", "b", "c"]


@settings(deadline=None)
@given(items=st.lists(st.integers(), max_size=40), world_size=st.integers(1, 6))
def test_shares_are_a_partition_with_known_global_indices(items: list[int], world_size: int) -> None:
    shares = [share(items, rank, world_size) for rank in range(world_size)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    found = {j * world_size + rank: item for rank, part in enumerate(shares) for j, item in enumerate(part)}
    assert found == dict(enumerate(items))


@settings(deadline=None)
@given(order=st.permutations(range(30)), size=st.integers(0, 30))
def test_hold_out_ignores_the_order_of_the_file(order: list[int], size: int) -> None:
    problems = [Problem(str(i), f"q{i}", "1", "t") for i in range(30)]
    chosen = hold_out([problems[i] for i in order], size, seed=5)
    assert chosen == hold_out(problems, size, seed=5)
    assert len(chosen) == size


WEIGHTS = st.lists(st.floats(0.02, 1.0), min_size=1, max_size=5).map(lambda w: [x / sum(w) for x in w])


@settings(deadline=None)
@given(weights=WEIGHTS, position=st.integers(0, 300))
def test_mixed_counts_are_the_draws_sorted_by_time(weights: list[float], position: int) -> None:
    draws = sorted(((m + 0.5) / weight, k) for k, weight in enumerate(weights) for m in range(position))
    expected = [sum(k == part for _, k in draws[:position]) for part in range(len(weights))]
    assert mixed_counts(position, weights) == expected


@settings(deadline=None)
@given(weights=WEIGHTS, position=st.integers(0, 10**7))
def test_mixed_counts_follow_the_weights(weights: list[float], position: int) -> None:
    now, then = mixed_counts(position, weights), mixed_counts(position + 3, weights)
    assert sum(now) == position
    assert all(a <= b for a, b in zip(now, then, strict=True)), "a draw was taken back"
    assert all(abs(n - w * position) <= len(weights) for n, w in zip(now, weights, strict=True))
