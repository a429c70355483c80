"""The DataModule of the embedded task (see `doors` for the task itself)."""

from __future__ import annotations

from typing import Any

from parallel_r1.data.datamodules import ProblemDataModule, Split
from parallel_r1.data.doors import ROOMS, ROOMS_OF_TIER, make_problems
from parallel_r1.types import Problem


class EmbeddedTask(ProblemDataModule):
    """Generated "doors" problems with demonstrations; train, val and test are disjoint by problem identity.

    Args:
        train: problems to train on, by tier (`easy`, `hard`, `harder`).
        eval_tiers: tiers to validate and test on.
        eval_size: problems a tier in validation and in test.
        doors: corridors that a problem opens (the paths of a demonstration), 2 or 3.
        parallel_share: share of training demonstrations that open a block at once, one path a door.
        late_share: share that solve in one stream first and then verify in a block; the rest are plain streams.
        task_seed: seed of the problems themselves; the seed of the run only orders them.
        kwargs: arguments of ProblemDataModule.
    """

    def __init__(
        self,
        train: dict[str, int] = {"easy": 8000},  # noqa: B006 - read only
        eval_tiers: list[str] = ["easy", "hard"],  # noqa: B006
        eval_size: int = 512,
        doors: int = 2,
        parallel_share: float = 0.5,
        late_share: float = 0.0,
        task_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name in [*train, *eval_tiers]:
            if name not in ROOMS_OF_TIER:
                raise ValueError(f"EmbeddedTask has no tier {name!r}; choose from {', '.join(ROOMS_OF_TIER)}")
        if doors not in (2, 3):
            raise ValueError(f"EmbeddedTask.doors={doors}: choose 2 or 3")
        for name in [*train, *eval_tiers]:
            if (doors + 1) * (max(ROOMS_OF_TIER[name]) + 1) > len(ROOMS):
                raise ValueError(f"EmbeddedTask: tier {name!r} has too few room names for doors={doors}; choose 2")
        if parallel_share < 0 or late_share < 0 or parallel_share + late_share > 1:
            raise ValueError(
                f"EmbeddedTask: parallel_share={parallel_share} and late_share={late_share} must be shares of one whole"
            )
        self.train_sizes, self.eval_tiers, self.eval_size = train, eval_tiers, eval_size
        self.doors, self.task_seed = doors, task_seed
        self.shares = (parallel_share, 1.0 - parallel_share - late_share, late_share)

    def problems(self, split: Split) -> list[Problem]:
        sizes = self.train_sizes if split == "train" else dict.fromkeys(self.eval_tiers, self.eval_size)
        drawn = "test" if split == "predict" else split
        # the styles move the stream that problems are drawn from: every run is evaluated on the same ones
        shares = self.shares if split == "train" else (0.5, 0.5, 0.0)
        return [
            problem
            for tier, size in sizes.items()
            for problem in make_problems(tier, drawn, size, self.doors, shares, self.task_seed)
        ]
