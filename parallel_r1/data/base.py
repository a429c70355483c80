"""The DataModule that all sets of problems share: splits, order, shares of ranks.

What differs from the usual DataModule: the train loader has no end and no state. Its batch i is a pure function of
(seed, i), so a run resumes by starting at iteration i, and any number of ranks sees the same global batches.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from parallel_r1.data.difficulty import read_solve_rates, within
from parallel_r1.data.order import hold_out, index_at, share
from parallel_r1.data.overlap import check_sets, overlap_lines, read_benchmark, without
from parallel_r1.data.sources import Report
from parallel_r1.types import Problem

Split = Literal["train", "val", "test", "predict"]

_SPLITS_OF: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


class ProblemDataModule(LightningDataModule, ABC):
    """Serves lists of problems. A subclass only says which problems a split holds.

    Every loader yields `list[Problem]`: this rank's share of a global batch. Shares are strided (problem j of rank r is
    problem j * world_size + r of the global batch), differ by one problem at most, and may be empty; every rank gets
    the same number of batches. The train loader never ends (`max_steps` ends the run), so `Trainer.val_check_interval`
    must be a number of batches and `check_val_every_n_epoch` null. It starts at `start_iteration`, which a resuming run
    sets before the loader is iterated.
    """

    def __init__(
        self,
        batch_size: int = 32,
        seed: int | None = None,
        val_size: int | None = None,
        val_batch_size: int = 64,
        max_prompt_chars: int | None = None,
        solve_rate: tuple[float, float] | None = None,
        solve_rate_file: str | None = None,
        benchmarks: dict[str, str | None] | None = None,
        drop_contaminated: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            batch_size: Problems of one optimizer step, over all ranks.
            seed: Seed of the order and of the hold-out; null takes the run's (`seed_everything`).
            val_size: Problems to validate on. Null: all of the set's own validation problems, or, where it has none, a
                tenth of the training problems, 256 at most, held out. 0: no validation.
            val_batch_size: Problems of one validation batch, over all ranks.
            max_prompt_chars: Longest question to train on, in characters; others are left out and counted. Problems of
                an evaluation set are never left out.
            solve_rate: Train on problems whose solve rate lies within [lowest, highest], ends included; others, and
                problems without a rate, are left out and counted. Null: on all.
            solve_rate_file: The measured rates: the `solve_rates.jsonl` of `tools/generate_traces.py`.
            benchmarks: Evaluation sets whose problems are looked for in the training problems at the start: a path, or
                null for the hub home, by tier, as in `Benchmark`.
            drop_contaminated: Leave problems of these benchmarks out of training; else they are only counted.
        """
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("val_batch_size", val_batch_size, 1),
            ("val_size", val_size, 0),
            ("max_prompt_chars", max_prompt_chars, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; give {least} or more")
        if (solve_rate is None) != (solve_rate_file is None):
            raise ValueError("give solve_rate (as [0.2, 0.8]) and solve_rate_file together, or neither")
        if solve_rate is not None and not 0 <= solve_rate[0] <= solve_rate[1] <= 1:
            raise ValueError(f"solve_rate is {list(solve_rate)}; give two shares of 0 to 1, the lowest first")
        if drop_contaminated and not benchmarks:
            raise ValueError("drop_contaminated needs benchmarks to look for; name some, as in {aime24: null}")
        check_sets(benchmarks or {}, "benchmarks")
        self.solve_rate = solve_rate
        self.solve_rate_file = solve_rate_file
        self.benchmarks = dict(benchmarks or {})
        self.drop_contaminated = drop_contaminated
        self.batch_size = batch_size
        self.val_size = val_size
        self.val_batch_size = val_batch_size
        self.max_prompt_chars = max_prompt_chars
        self.start_iteration = 0
        self.reports: list[Report] = []
        self._seed = seed
        self._found: dict[Split, list[Problem]] = {}
        self._splits: dict[Split, list[Problem]] = {}
        self._compared = False

    @abstractmethod
    def problems(self, split: Split) -> list[Problem]:
        """All problems of a split, each once. An empty `val` means: hold some of `train` out.

        Called at most once a split. Raises ValueError or FileNotFoundError, naming the remedy, for a split that cannot
        be served.
        """

    @property
    def seed(self) -> int:
        """The seed given, else the run's, else 0. Read late: the run may be seeded after this object is built."""
        return self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))

    def check(self, stage: str = "fit") -> None:
        """Load and validate what a stage (`fit`, `validate`, `test`, `predict`) needs, and keep it for `setup`.

        Cheap next to loading a model, so that a missing file is found before one is. Raises what `split` raises.
        """
        for name in _SPLITS_OF[stage]:
            self.split(name)
        if stage == "fit" and not self._compared:
            self._compared = True
            for line in overlap_lines(self.split("train"), {"validation": self.split("val")}):
                self.say(line)

    def setup(self, stage: str) -> None:
        self.check(stage)

    def split(self, name: Split) -> list[Problem]:
        """The problems of a split as they are served, no training problem being a validation problem.

        Raises ValueError for an empty split, besides what `problems` raises.
        """
        if name not in self._splits:
            make = {"train": self._train, "val": self._val}.get(name, lambda: self._source(name))
            problems = make()
            if not problems and not (name == "val" and self.val_size == 0):
                raise ValueError(
                    f"{type(self).__name__}: the {name!r} split holds no problem; check its path and filters"
                )
            self._splits[name] = problems
        return self._splits[name]

    def batch(self, i: int, size: int | None = None) -> list[Problem]:
        """The global training batch of iteration i, over all ranks: a pure function of (seed, i)."""
        size = self.batch_size if size is None else size
        train = self.split("train")
        return [train[index_at(p, len(train), self.seed)] for p in range(i * size, (i + 1) * size)]

    def train_dataloader(self) -> TrainBatches:
        return TrainBatches(self)

    def val_dataloader(self) -> EvalBatches | list[EvalBatches]:
        return EvalBatches(self, "val") if self.split("val") else []

    def test_dataloader(self) -> EvalBatches:
        return EvalBatches(self, "test")

    def predict_dataloader(self) -> EvalBatches:
        return EvalBatches(self, "predict")

    def transfer_batch_to_device(self, batch: list[Problem], device: Any, dataloader_idx: int) -> list[Problem]:
        return batch  # problems hold no tensors, and Lightning refuses to walk through frozen records

    def ranks(self) -> tuple[int, int]:
        """(rank, number of ranks) among which a batch is shared; one rank when no trainer is attached."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def account(self, report: Report) -> None:
        """Keep what became of the rows of a source, and say it once (on rank 0)."""
        self.reports.append(report)
        rank_zero_info(str(report))

    def say(self, what: str) -> None:
        """Tell the user something about this data (on rank 0)."""
        rank_zero_info(f"{type(self).__name__}: {what}")

    def _source(self, name: Split) -> list[Problem]:
        if name not in self._found:
            self._found[name] = self.problems(name)
        return self._found[name]

    def _val(self) -> list[Problem]:
        if self.val_size == 0:
            return []
        if own := self._source("val"):
            return own if self.val_size is None else hold_out(own, self.val_size, self.seed)
        train = self._source("train")
        size = self.val_size if self.val_size is not None else min(256, max(1, len(train) // 10))
        if size >= len(train):
            raise ValueError(
                f"{type(self).__name__}: cannot hold val_size={size} problems out of {len(train)} to train on; "
                "lower val_size (0 turns validation off) or give validation problems of their own"
            )
        return hold_out(train, size, self.seed)

    def _train(self) -> list[Problem]:
        val, everything = {problem.id for problem in self.split("val")}, self._source("train")
        train = [problem for problem in everything if problem.id not in val]
        if len(train) < len(everything) and self._source("val"):
            self.say(
                f"{len(everything) - len(train):,} of {len(everything):,} training problems are also validation "
                "problems, and are left out of training"
            )
        return self._without_benchmarks(self._within_band(train))

    def _within_band(self, train: list[Problem]) -> list[Problem]:
        if self.solve_rate is None:
            return train
        low, high = self.solve_rate
        kept, outside, unknown = within(train, read_solve_rates(self.solve_rate_file), low, high)
        self.say(
            f"{len(kept):,} of {len(train):,} training problems have a solve rate within [{low:g}, {high:g}]; "
            f"{outside:,} lie outside, {unknown:,} were not measured"
        )
        if not kept:
            raise ValueError(
                f"{type(self).__name__}: no training problem has a solve rate within solve_rate={[low, high]} in "
                f"{self.solve_rate_file}; widen solve_rate, or measure these problems with tools/generate_traces.py"
            )
        return kept

    def _without_benchmarks(self, train: list[Problem]) -> list[Problem]:
        sets = {tier: read_benchmark(tier, place)[0] for tier, place in self.benchmarks.items()}
        for line in overlap_lines(train, sets, all_of_them=True):
            self.say(f"benchmark {line}")
        if not self.drop_contaminated:
            return train
        clean = without(train, [problem for problems in sets.values() for problem in problems])
        self.say(f"{len(train) - len(clean):,} of {len(train):,} training problems stand in a benchmark: left out")
        return clean


class TrainBatches:
    """Endless: this rank's share of the global batches start_iteration, start_iteration + 1, ..."""

    def __init__(self, data: ProblemDataModule) -> None:
        self._data = data

    def __iter__(self) -> Iterator[list[Problem]]:
        i = self._data.start_iteration
        while True:
            yield share(self._data.batch(i), *self._data.ranks())
            i += 1


class EvalBatches:
    """Finite and in order: this rank's share of each global batch, so that every rank sees equally many batches."""

    def __init__(self, data: ProblemDataModule, split: Split) -> None:
        self._data = data
        self._split = split

    def __len__(self) -> int:
        return -(-len(self._data.split(self._split)) // self._data.val_batch_size)

    def __iter__(self) -> Iterator[list[Problem]]:
        problems, size = self._data.split(self._split), self._data.val_batch_size
        for start in range(0, len(problems), size):
            yield share(problems[start : start + size], *self._data.ranks())
