"""Experience: groups, dynamic sampling, and what is reported; tallies over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel_r1.evaluation.measures import parallel_positions
from parallel_r1.methods import Objective
from parallel_r1.modules import RLModule
from parallel_r1.modules.behaviour import behaviour_of
from parallel_r1.modules.experience import Experience, rows_of, tally_experience
from parallel_r1.modules.tally import Tally
from parallel_r1.structure.grammar import parse
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import Judged, Problem, Rollout

TAGS = TagIds(1, 2, 3, 4, 5, 6)
TEXT = "a <Parallel><Path> x y </Path><Path> x z </Path></Parallel><Summary> s </Summary> b"
BLOCK = (8, 1, 3, 9, 9, 4, 3, 9, 8, 4, 2, 5, 7, 6, 8, 7)


def experience(rewards: list[list[float]], name: str = "p") -> Experience:
    size = len(rewards[0]) if rewards else 2
    rollouts, judged = [], []
    for p, group in enumerate(rewards):
        for g in range(size):
            n = len(BLOCK) if g == 0 else 4
            ids = BLOCK[:n] if g == 0 else (8,) * n
            rollouts.append(Rollout((p,), ids, (0.0,) * n, (True,) * n, finished=g == 0))
            text = TEXT if g == 0 else "a b c d"
            problem = Problem(f"{name}{p}", "q", "1", "easy")
            judged.append(Judged(problem, text, parse(text), group[g] > 0, g == 0, n, n - 4 * (g == 0)))
    terms = {"accuracy": [r for group in rewards for r in group]}
    return Experience(rollouts, judged, torch.tensor(rewards).view(-1, size), terms, seconds=1.0)


def test_flat_groups_are_found_and_dropped_whole() -> None:
    e = experience([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
    assert e.flat().tolist() == [False, True, False]
    kept = e.picked(~e.flat())
    assert [j.problem.id for j in kept.judged] == ["p0", "p0", "p2", "p2"]
    assert kept.rewards.tolist() == [[1.0, -1.0], [-1.0, 1.0]]
    assert kept.terms == {"accuracy": [1.0, -1.0, -1.0, 1.0]}
    joined = kept.joined(experience([[0.5, 0.0]], "q"))
    assert joined.rewards.shape == (3, 2)
    assert len(joined.rollouts) == len(joined.judged) == len(joined.terms["accuracy"]) == 6


def test_cut_responses_can_be_left_out_of_the_loss() -> None:
    e = experience([[1.0, -1.0]])
    assert [any(row.rollout.sampled) for row in rows_of(e.rollouts, e.rewards, mask_cut=False)[0]] == [True, True]
    masked = rows_of(e.rollouts, e.rewards, mask_cut=True)[0]
    assert [any(row.rollout.sampled) for row in masked] == [True, False]
    assert [row.advantage for row in masked] == [1.0, -1.0]


def test_positions_of_blocks() -> None:
    assert parallel_positions(BLOCK, TAGS) == [1 / 16]
    assert parallel_positions((8, 1, 1, 2, 8, 1, 8, 8), TAGS) == [1 / 8, 5 / 8]  # a nested opening opens nothing
    assert parallel_positions((8, 8), TAGS) == []


def test_the_report_by_hand() -> None:
    e = experience([[1.0, -1.0], [1.0, 1.0]])
    found = tally_experience(e, behaviour_of(e.judged, e.rollouts, TAGS)).metrics(lambda value, op: value)
    expected = {
        "rollout/accuracy": 0.75,
        "rollout/parallel_ratio": 0.5,
        "rollout/response_length": 10.0,
        "rollout/response_length/min": 4.0,
        "rollout/response_length/max": 16.0,
        "rollout/truncated": 0.5,
        "rollout/critical_tokens": 8.0,
        "rollout/total_tokens": 10.0,
        "rollout/parallel_position": 1 / 16,
        "rollout/parallel_token_share": 10 / 16 / 2,
        "rollout/block_tokens": 10.0,
        "rollout/paths_per_block": 2.0,
        "rollout/verification_share": 0.0,
        "rollout/zero_variance_groups": 0.5,
        "reward/total/mean": 0.5,
        "reward/total/std": 0.75**0.5,
        "reward/accuracy/mean": 0.5,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert 0 < found["rollout/path_diversity"] < 1
    assert "rollout/answer_agreement" not in found, "no path states a number"


def test_a_tally_reduces_over_ranks() -> None:
    tallies = []
    for values in ([1.0, 3.0], [5.0], []):
        tally = Tally()
        tally.add("a", torch.tensor(values), "mean", "min", "max")
        tally.add("b", torch.tensor([]))
        tally.total("c", torch.tensor(2.0))
        tallies.append(tally)

    def over_ranks(value: torch.Tensor, op: str) -> torch.Tensor:
        return calls.setdefault(len(calls), (value, op))[0]

    # what each rank hands over, in order; then the reduction of all
    handed = []
    for tally in tallies:
        calls: dict = {}
        tally.metrics(over_ranks)
        handed.append(list(calls.values()))
    reduced = iter(
        [torch.stack([h[i][0] for h in handed]).sum(0) if handed[0][i][1] == "sum"
         else torch.stack([h[i][0] for h in handed]).amax(0) for i in range(3)]
    )  # fmt: skip
    assert tallies[2].metrics(lambda value, op: next(reduced)) == {"a/mean": 3.0, "a/min": 1.0, "a/max": 5.0, "c": 6.0}


class Refilling(RLModule):
    """An RLModule whose rollouts are scripted: a problem's id says what its group earns."""

    def __init__(self, limit: int) -> None:
        super().__init__(group_size=2, objective=Objective(dynamic_sampling=limit))
        self.asked: list[tuple[list[str], int]] = []
        self.batches: list[int] = []

    @property
    def trainer(self) -> SimpleNamespace:
        return SimpleNamespace(datamodule=SimpleNamespace(batch=self.draw))

    def draw(self, i: int) -> list[Problem]:
        self.batches.append(i)
        return [Problem(f"{'good' if p == 1 else 'flat'} {i} {p}", "q", "1", "easy") for p in range(4)]

    def over_ranks(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return value

    def share(self) -> tuple[int, int]:
        return 0, 1

    def roll_out(self, problems: list[Problem], iteration: int, objective: Objective, first: int = 0) -> Experience:
        self.asked.append(([p.id for p in problems], first))
        return experience([[1.0, -1.0] if p.id.startswith("good") else [1.0, 1.0] for p in problems] or [[]])


def test_dynamic_sampling_replaces_flat_groups_up_to_its_limit() -> None:
    start = experience([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]])
    module = Refilling(limit=2)
    seen, used = module.refill(start, 5, module.objective)
    # three are missing, then two: problems of a stream of their own, sampling indices that no other round has
    assert [len(ids) for ids, _ in module.asked] == [3, 2]
    assert [first for _, first in module.asked] == [4, 8]
    assert module.batches == [(1 << 32) + 10, (1 << 32) + 11]
    assert len(seen.rewards) == 9
    assert used.rewards.tolist() == [[1.0, -1.0]] * 3
    again = Refilling(limit=2)
    again.refill(start, 5, again.objective)
    assert (again.asked, again.batches) == (module.asked, module.batches)


def test_dynamic_sampling_stops_when_nothing_is_missing() -> None:
    full = experience([[1.0, -1.0], [-1.0, 1.0]])
    module = Refilling(limit=3)
    _, used = module.refill(full, 0, module.objective)
    assert (module.asked, len(used.rewards)) == ([], 2)
    off = Refilling(limit=0)
    seen, used = off.refill(experience([[1.0, 1.0]]), 0, off.objective)
    assert seen is used
