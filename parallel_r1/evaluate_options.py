"""The options of `test` and `predict`."""

from __future__ import annotations

from dataclasses import dataclass

from parallel_r1.data.datamodules import ProblemDataModule
from parallel_r1.evaluation.consolidate import EarlyStop, Voting
from parallel_r1.modules.responder import Generation
from parallel_r1.modules.voice import EvalMode

ALL_MODES: tuple[EvalMode, ...] = ("fork_join", "plain", "sequential")


@dataclass
class Evaluation:
    """What `test` measures and how; `predict` takes model, data, generation, temperature and batch_size from here.

    Args:
        model: a run, a stage of one, or any model folder; null takes the last finished stage of the curriculum, or
            those of `curriculum.only`.
        data: the problems; null takes those of the stage (of the last one for a `model`).
        generation: how problems become responses; null takes that of the stage, or what the model's folder tells.
        samples: samples of each problem (k), or a number for each tier, as {aime24: 16, math500: 1}.
        modes: `fork_join` (isolated paths: the response forks and joins), `plain` (one causal stream, tags allowed),
            `sequential` (one stream, tags never sampled), `forced` (plain, starting with `<Parallel>`); null: the first
            three, for a model trained in one stream without tags `sequential` alone.
        temperature: of sampling; null takes that of the generation; 0 is greedy.
        limit: problems a tier to evaluate, the first ones; null: all.
        resamples: of the bootstrap that gives the intervals.
        batch_size: responses sampled before they are written to disk, over all ranks.
        save_tokens: keep every token and its log-probability with a response, for the report's viewer.
        folder: where samples and report go; null: <root>/test/<name of the stage or model>.
        fresh: drop the samples that the folder holds.
    """

    model: str | None = None
    data: ProblemDataModule | None = None
    generation: Generation | None = None
    samples: int | dict[str, int] = 4
    modes: list[EvalMode] | None = None
    temperature: float | None = None
    limit: int | None = None
    resamples: int = 2000
    batch_size: int = 512
    save_tokens: bool = False
    folder: str | None = None
    fresh: bool = False

    def check(self) -> None:
        """Raise ValueError for settings that can never work."""
        counts = self.samples.values() if isinstance(self.samples, dict) else [self.samples]
        for name, values, least in (
            ("samples", counts, 1),
            ("limit", [self.limit], 1),
            ("resamples", [self.resamples], 100),
            ("batch_size", [self.batch_size], 1),
        ):
            if any(value is not None and value < least for value in values):
                raise ValueError(f"evaluation.{name}={getattr(self, name)}: give {least} or more")
        if self.temperature is not None and self.temperature != 0 and self.temperature < 0.01:
            raise ValueError(f"evaluation.temperature={self.temperature}: give 0 (greedy) or at least 0.01")
        if self.modes is not None and not self.modes:
            raise ValueError(f"evaluation.modes is empty: name some of {', '.join(ALL_MODES)}, forced")

    def check_repeats(self, name: str, most: int) -> None:
        """Raise ValueError where greedy responses are asked for several times. name: the option that says how often."""
        if self.temperature == 0 and most > 1:
            raise ValueError(f"evaluation.temperature=0 gives one response a problem however often: set {name} to 1")

    def modes_of(self, generation: Generation) -> tuple[EvalMode, ...]:
        if self.modes is not None:
            return tuple(dict.fromkeys(self.modes))
        return ("sequential",) if generation.structure == "sequential" else ALL_MODES

    def samples_of(self, tiers: list[str]) -> dict[str, int]:
        """Samples by tier. Raises ValueError for a tier without a number."""
        if isinstance(self.samples, int):
            return dict.fromkeys(tiers, self.samples)
        if missing := [tier for tier in tiers if tier not in self.samples]:
            raise ValueError(
                f"evaluation.samples names no number for {', '.join(missing)}; add it, or give one for all"
            )
        return {tier: self.samples[tier] for tier in tiers}


@dataclass
class Prediction:
    """How `predict` answers.

    Args:
        problems: a JSONL file with `problem` or `question`, and perhaps `answer`; null takes the problems given with
            `--problem`, else those of the data.
        attempts: independent responses a problem, consolidated into one answer.
        mode: as in `evaluation.modes`; null: as the model was trained.
        consolidate: `majority`: the answer that most attempts give; `weighted`: the one with the most confidence. A tie
            goes to the more confident attempt.
        window: confidence of an attempt: exp of the mean log-probability of its tokens (null), or of the lowest mean
            over so many tokens in a row.
        early_stop: make no more attempts at a problem once the rest cannot change its answer (`certain`), once that is
            likely (`likely`, see threshold), or never (`off`).
        threshold: probability that the leading answer is the most frequent one, at which `likely` stops.
        attempts_per_round: attempts at a problem sampled at once, after which stopping is considered; fewer need less
            memory. null: as many as could decide the answer, which are no more in all than one by one.
        output: the file of the answers; null: <root>/predictions-<name>.jsonl.
    """

    problems: str | None = None
    attempts: int = 1
    mode: EvalMode | None = None
    consolidate: Voting = "majority"
    window: int | None = None
    early_stop: EarlyStop = "certain"
    threshold: float = 0.95
    attempts_per_round: int | None = None
    output: str | None = None

    def check(self) -> None:
        """Raise ValueError for settings that can never work."""
        for name in ("attempts", "attempts_per_round", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"predict.{name}={value}: give 1 or more")
        if not 0.5 <= self.threshold < 1:
            raise ValueError(f"predict.threshold={self.threshold}: give a probability from 0.5 on, below 1")
