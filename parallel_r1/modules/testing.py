"""`test` as a LightningModule: k samples of every problem in every mode, on disk batch by batch, none taken twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from parallel_r1.data.order import share
from parallel_r1.evaluation.measures import measures
from parallel_r1.evaluation.records import Row, response_row, token_columns
from parallel_r1.evaluation.samples import Key, SampleFile, key_of, read_samples
from parallel_r1.modules.voice import EvalMode, Source, Voice, in_few_starts
from parallel_r1.types import Problem


@dataclass(frozen=True)
class TestPlan:
    """What is sampled, and where it goes. samples: of each problem, by tier; batch_size: responses of all ranks."""

    __test__ = False  # no class of tests

    folder: Path
    problems: tuple[Problem, ...]
    samples: Mapping[str, int]
    modes: tuple[EvalMode, ...]
    batch_size: int
    save_tokens: bool = False

    def keys(self) -> set[Key]:
        """Every sample of a whole evaluation."""
        return {
            (mode, p.tier, p.id, sample)
            for mode in self.modes
            for p in self.problems
            for sample in range(self.samples[p.tier])
        }

    def batches(self, done: set[Key]) -> list[Batch]:
        """What is left, mode by mode. Which problems share a batch does not depend on what is done."""
        out = []
        for mode in in_few_starts(self.modes):
            for part in self._parts():
                missing = [
                    [(p, s) for s in range(self.samples[p.tier]) if (mode, p.tier, p.id, s) not in done] for p in part
                ]
                if any(missing):
                    out.append(Batch(mode, missing))
        return out

    def _parts(self) -> Iterator[list[Problem]]:
        part: list[Problem] = []
        size = 0
        for problem in self.problems:
            if part and size + self.samples[problem.tier] > self.batch_size:
                yield part
                part, size = [], 0
            part.append(problem)
            size += self.samples[problem.tier]
        if part:
            yield part


@dataclass(frozen=True)
class Batch:
    """missing: (problem, sample) still to take, problem by problem, over all ranks; a finished problem has none."""

    mode: EvalMode
    missing: list[list[tuple[Problem, int]]]


class Batches:
    """A loader; a plain list would be several loaders to Lightning."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Talker(L.LightningModule):
    """What test and prediction share: a voice instead of a model, batches that are no tensors."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def configure_model(self) -> None:
        """There is nothing to shard or to move: strategies that ask for it are content."""

    def setup(self, stage: str) -> None:
        self.voice = Voice(self.source)

    def teardown(self, stage: str) -> None:
        self.voice.close()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


class SampleTest(Talker):
    """Takes what a plan misses."""

    def __init__(self, source: Source, plan: TestPlan) -> None:
        super().__init__(source)
        self.plan = plan

    def setup(self, stage: str) -> None:
        super().setup(stage)
        done = {key_of(row) for row in read_samples(self.plan.folder)}
        self.trainer.strategy.barrier()  # no rank writes before all have read, so all see the same batches
        self.file = SampleFile(self.plan.folder, self.global_rank)
        self.batches = self.plan.batches(done)

    def test_dataloader(self) -> Batches:
        return Batches(self.batches)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.voice.use(batch.mode)
        mine = share(batch.missing, self.global_rank, self.trainer.world_size)
        asked = [item for samples in mine for item in samples]
        self.file.append(self.rows(batch.mode, asked))

    def rows(self, mode: EvalMode, asked: Sequence[tuple[Problem, int]]) -> list[Row]:
        words, out = self.voice.vocabulary, []
        for (_, sample), (judged, rollout) in zip(asked, self.voice.answer(asked), strict=True):
            row = {**response_row(judged), "mode": mode, "sample": sample, **measures(judged, rollout, words.tags)}
            if self.plan.save_tokens:
                row |= token_columns(rollout, words.pieces(rollout.response_ids))
            out.append(row)
        return out

    def teardown(self, stage: str) -> None:
        self.trainer.strategy.barrier()  # whoever merges now finds the rows of all ranks
        self.file.close()
        super().teardown(stage)
