"""Data and rewards for stage modules on the tiny model of `conftest`: shared by tests and the ranks they start."""

from __future__ import annotations

from parallel_r1.data.base import ProblemDataModule
from parallel_r1.reward.rewards import Reward, Scores
from parallel_r1.types import Problem


class Words(ProblemDataModule):
    """Problems in the words of the tiny tokenizer, with demonstrations of uneven length."""

    def problems(self, split: str) -> list[Problem]:
        if split == "val":
            return []
        return [
            Problem(f"p{i}", f"w{i} w{i + 1}", "7", "t", demonstration=f"w{i} 7 w3 w4" + " w5" * (i % 5))
            for i in range(20)
        ]


class Uneven(Reward):
    """Rewards that differ within a group, by the tokens of the response alone."""

    def score(self, samples, step):
        values = [float(sum(map(ord, sample.text)) % 7) for sample in samples]
        return Scores(values, {"uneven": values})
