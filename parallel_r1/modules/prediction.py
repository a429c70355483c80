"""`predict` as a LightningModule: several attempts a problem, in rounds, until they decide, and one answer of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel_r1.data.order import share
from parallel_r1.data.sources import UNKNOWN
from parallel_r1.evaluation.consolidate import (
    EarlyStop,
    Voting,
    answer_groups,
    confidence,
    consolidate,
    fewest_to_stop,
    may_stop,
)
from parallel_r1.evaluation.records import Row, response_row
from parallel_r1.modules.testing import Batches, Talker
from parallel_r1.modules.voice import EvalMode, Source
from parallel_r1.types import Judged, Problem, Rollout


@dataclass(frozen=True)
class PredictPlan:
    """What is answered, and how attempts become an answer. window: see `consolidate.confidence`.

    per_round: None asks for as many as could decide the answer.

    draft: where finished rows go until all are there; a rank adds its number.
    """

    problems: tuple[Problem, ...]
    mode: EvalMode
    attempts: int
    per_round: int | None
    voting: Voting
    window: int | None
    early_stop: EarlyStop
    threshold: float
    batch_size: int
    draft: Path


@dataclass(frozen=True)
class Attempt:
    """One response. answer: its final answer, None where it has none or a limit cut it."""

    judged: Judged
    answer: str | None
    confidence: float


class Attempts:
    """The attempts at one problem so far."""

    def __init__(self, problem: Problem, plan: PredictPlan) -> None:
        self.problem, self.plan = problem, plan
        self.made: list[Attempt] = []

    @property
    def groups(self) -> list[int]:
        return answer_groups([attempt.answer for attempt in self.made])

    @property
    def confidences(self) -> list[float]:
        return [attempt.confidence for attempt in self.made]

    def next(self) -> list[int]:
        """The indices of the attempts of the next round; none where the answer is decided."""
        plan, n = self.plan, len(self.made)
        left = plan.attempts - n
        so_far = (self.groups, self.confidences, left, plan.early_stop, plan.voting, plan.threshold)
        if may_stop(*so_far):
            return []
        return list(range(n, n + min(plan.per_round or fewest_to_stop(*so_far), left)))

    def add(self, judged: Judged, rollout: Rollout) -> None:
        sampled = [p for p, s in zip(rollout.logprobs, rollout.sampled, strict=True) if s]
        found = response_row(judged)["final_answer"] if judged.finished else None
        self.made.append(Attempt(judged, found, confidence(sampled, self.plan.window)))

    def row(self) -> Row:
        """The answer as a row: that of the attempt that speaks for it, and what the others said.

        A problem without a gold answer has `correct` null.
        """
        groups = self.groups
        outcome = consolidate(groups, self.confidences, self.plan.voting)
        best = self.made[outcome.chosen]
        votes: dict[str, int] = {}
        for group in groups:
            if group >= 0:
                said = self.made[groups.index(group)].answer
                votes[said] = votes.get(said, 0) + 1
        known = self.problem.answer != UNKNOWN
        return {
            **response_row(best.judged),
            "final_answer": best.answer,
            "correct": best.judged.correct if known else None,
            "mode": self.plan.mode,
            "agreement": round(outcome.agreement, 6),
            "weight": round(outcome.weight, 6),
            "confidence": round(best.confidence, 6),
            "votes": votes,
            "paths": [list(block.paths) for block in best.judged.response.blocks],
            "summaries": [block.summary for block in best.judged.response.blocks],
            "attempts": [
                {
                    "final_answer": attempt.answer,
                    "finished": attempt.judged.finished,
                    "confidence": round(attempt.confidence, 6),
                    "total_tokens": attempt.judged.total_tokens,
                    "response": attempt.judged.text,
                }
                for attempt in self.made
            ],
            "tokens_of_all_attempts": sum(attempt.judged.total_tokens for attempt in self.made),
        }


class Predict(Talker):
    """Answers this rank's share of the problems; `rows` holds all of them, in order, once every rank is done."""

    def __init__(self, source: Source, plan: PredictPlan) -> None:
        super().__init__(source)
        self.plan = plan
        self._rows: list[tuple[int, Row]] = []

    def predict_dataloader(self) -> Batches:
        return Batches(list(self._batches()))

    def _batches(self) -> Iterator[list[tuple[int, Problem]]]:
        numbered = list(enumerate(self.plan.problems))
        size = max(1, self.plan.batch_size // (self.plan.per_round or self.plan.attempts))
        for start in range(0, len(numbered), size):
            yield share(numbered[start : start + size], self.global_rank, self.trainer.world_size)

    def predict_step(self, batch: Sequence[tuple[int, Problem]], batch_idx: int) -> None:
        self.voice.use(self.plan.mode)
        open_ = [Attempts(problem, self.plan) for _, problem in batch]
        asked = [(a, index) for a in open_ for index in a.next()]
        while self.on_any_rank(bool(asked)):  # ranks may share an engine: all of them ask it, if only for nothing
            for (attempts, _), (judged, rollout) in zip(
                asked, self.voice.answer([(a.problem, index) for a, index in asked]), strict=True
            ):
                attempts.add(judged, rollout)
            asked = [(a, index) for a in dict.fromkeys(a for a, _ in asked) for index in a.next()]
        done = [(number, attempts.row()) for (number, _), attempts in zip(batch, open_, strict=True)]
        self._rows += done
        path = self.plan.draft.with_name(f"{self.plan.draft.name}.{self.global_rank}")
        with path.open("a" if batch_idx else "w", encoding="ascii") as file:
            file.write("".join(json.dumps(row) + "\n" for _, row in done))

    def on_any_rank(self, flag: bool) -> bool:
        return bool(self.trainer.strategy.reduce(torch.tensor(float(flag), device=self.device), reduce_op="max"))

    def on_predict_epoch_end(self) -> None:
        parts: list[Any] = [self._rows]
        if self.trainer.world_size > 1:
            parts = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, self._rows)
        self.rows: list[Row] = [row for _, row in sorted((item for part in parts for item in part), key=lambda i: i[0])]
