"""One small DataModule a public data set, a generic one, evaluation sets side by side, and a mixture of others."""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice
from typing import Any

from parallel_r1.data import sources
from parallel_r1.data.base import ProblemDataModule, Split
from parallel_r1.data.order import index_at, mixed_counts, shuffled
from parallel_r1.data.overlap import check_sets, read_benchmark
from parallel_r1.data.reading import Row, is_file, read_rows
from parallel_r1.types import Problem

__all__ = [
    "GSM8K",
    "MATH",
    "Benchmark",
    "DAPOMath",
    "Mixture",
    "ParallelGSM8K",
    "ProblemDataModule",
    "Problems",
    "SourceDataModule",
    "Split",
]


class SourceDataModule(ProblemDataModule):
    """Problems of one public source. Subclasses name its hub id and tier, and turn a row into a problem."""

    hub_id: str | None = None
    home_config: str | None = None
    tier: str = "problems"

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        hub_config: str | None = None,
        streaming: bool = False,
        max_rows: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Reads nothing yet.

        Args:
            path: A local file or folder in the columns of the set, or a hub id; null takes the set from the hub.
            val_path: Where the validation problems lie; null holds some training problems out.
            test_path: Where the test problems lie; null looks for a test split in the folder or hub set of `path`.
            hub_config: Configuration of the hub set named by `path`, where it has several.
            streaming: Read a hub set as a stream, without a copy on disk; with max_rows, a part of one of any size.
            max_rows: Training rows to read at most; null reads all.
            kwargs: Arguments of ProblemDataModule.
        """
        super().__init__(**kwargs)
        self.path = path
        self.val_path = val_path
        self.test_path = test_path
        self.hub_config = hub_config
        self.streaming = streaming
        self.max_rows = max_rows

    @abstractmethod
    def adapt(self, row: Row) -> Problem:
        """The problem of a row. Raises ValueError, by `Row.error`, for a row that cannot be used."""

    def reject(self, problem: Problem) -> str | None:
        """The reason to leave a problem out, or None."""
        return None

    def problems(self, split: Split) -> list[Problem]:
        if split == "train":
            return self._read(self._home(), "train", self.max_prompt_chars, self.max_rows)
        if split == "val":
            return self._read(self.val_path, "val") if self.val_path else []
        if not self.test_path and self.path and is_file(self.path):
            raise ValueError(
                f"{type(self).__name__}: path is the file {self.path!r}, which holds no {split!r} split of its own; "
                "give test_path"
            )
        return self._read(self.test_path or self._home(), "test")

    def _home(self) -> str:
        home = self.path or self.hub_id
        if not home:
            raise ValueError(f"{type(self).__name__} needs a path: a local file or folder, or a hub id")
        return home

    def _read(self, place: str, split: str, max_chars: int | None = None, max_rows: int | None = None) -> list[Problem]:
        config = self.hub_config or (self.home_config if place == self.hub_id else None)
        rows = islice(read_rows(place, split, config, self.streaming), max_rows)
        name = f"{type(self).__name__} {split} ({place})"
        problems, report = sources.collect(name, rows, self.adapt, self.tier, self.reject, max_chars)
        self.account(report)
        return problems


class GSM8K(SourceDataModule):
    """Grade-school word problems with integer answers: columns `question`, `answer` (which ends in `#### 18`)."""

    hub_id, home_config, tier = "openai/gsm8k", "main", "gsm8k"

    def adapt(self, row: Row) -> Problem:
        return sources.gsm8k(row)


class DAPOMath(SourceDataModule):
    """DAPO-Math-17k, competition problems with integer answers: columns `prompt`, `reward_model`."""

    hub_id, tier = "BytedTsinghua-SIA/DAPO-Math-17k", "dapo"

    def adapt(self, row: Row) -> Problem:
        return sources.dapo(row)


class MATH(SourceDataModule):
    """The MATH problems: columns `problem`, `level`, `type` (or `subject`), and `solution` or `answer`."""

    hub_id, tier = "DigitalLearningGmbH/MATH-lighteval", "math"

    def __init__(self, levels: list[int] | None = None, subjects: list[str] | None = None, **kwargs: Any) -> None:
        """Reads nothing yet.

        Args:
            levels: Levels to keep, of 1 to 5; null keeps all.
            subjects: Subjects to keep, as the set spells them (`Number Theory`), in any case; null keeps all.
            kwargs: Arguments of SourceDataModule.
        """
        super().__init__(**kwargs)
        known = {subject.lower() for subject in sources.MATH_SUBJECTS}
        if unknown := [level for level in levels or () if level not in range(1, 6)]:
            raise ValueError(f"levels holds {unknown}; MATH has the levels 1 to 5")
        if unknown := [subject for subject in subjects or () if subject.lower() not in known]:
            raise ValueError(f"subjects holds {unknown}; MATH has {', '.join(sources.MATH_SUBJECTS)}")
        self.levels = levels
        self.subjects = None if subjects is None else [subject.lower() for subject in subjects]

    def adapt(self, row: Row) -> Problem:
        return sources.math(row)

    def reject(self, problem: Problem) -> str | None:
        if problem.answer == sources.UNKNOWN:
            return "an empty box for an answer"
        if self.levels is not None and problem.meta["level"] not in self.levels:
            return "another level"
        if self.subjects is not None and problem.meta["subject"].lower() not in self.subjects:
            return "another subject"
        return None


class ParallelGSM8K(SourceDataModule):
    """Traces to imitate: columns `problem`, `text`, `ground_truth`. Every problem has a `demonstration`."""

    hub_id, tier = "Parallel-R1/Parallel-GSM8K", "gsm8k"

    def __init__(self, drop_faulty: bool = True, **kwargs: Any) -> None:
        """Reads nothing yet.

        Args:
            drop_faulty: Leave out traces that break the grammar, give no final answer, or a wrong number as one.
            kwargs: Arguments of SourceDataModule.
        """
        super().__init__(**kwargs)
        self.drop_faulty = drop_faulty

    def adapt(self, row: Row) -> Problem:
        return sources.parallel_gsm8k(row)

    def reject(self, problem: Problem) -> str | None:
        return sources.trace_fault(problem) if self.drop_faulty else None


class Problems(SourceDataModule):
    """Any set of problems, with the names of its columns given."""

    def __init__(
        self,
        path: str,
        problem_column: str = "problem",
        answer_column: str | None = "answer",
        tier: str = "problems",
        **kwargs: Any,
    ) -> None:
        """Reads nothing yet.

        Args:
            path: A local file or folder, or a hub id. Prediction reads it too.
            problem_column: Column of the question.
            answer_column: Column of the gold answer; null for questions without one, which only prediction takes.
            tier: The name its metrics are reported under.
            kwargs: Arguments of SourceDataModule.
        """
        super().__init__(path=path, **kwargs)
        self.tier = tier
        self.problem_column = problem_column
        self.answer_column = answer_column

    def adapt(self, row: Row) -> Problem:
        return sources.columns(self.problem_column, self.answer_column)(row)

    def problems(self, split: Split) -> list[Problem]:
        if split == "predict":
            return self._read(self._home(), "train")
        if self.answer_column is None:
            raise ValueError(
                f"Problems without an answer_column can only be predicted; the {split!r} split needs answers"
            )
        return super().problems(split)


class Benchmark(ProblemDataModule):
    """Evaluation sets side by side, each its own tier; the same problems validate, test and predict."""

    def __init__(self, sets: dict[str, str | None], **kwargs: Any) -> None:
        """Reads nothing yet.

        Args:
            sets: Where each set lies, by tier: a local file or folder, a hub id, or null for the hub home of a known
                one (aime24, aime25, amc23, math500, gsm8k, math). Columns: `problem` or `question`, and `answer` or a
                `solution` with a box; those of GSM8K for the tier gsm8k.
            kwargs: Arguments of ProblemDataModule.
        """
        super().__init__(**kwargs)
        if not sets:
            raise ValueError("Benchmark: sets is empty; name at least one, as in {aime24: null}")
        check_sets(sets, "Benchmark")
        self.sets = dict(sets)

    def problems(self, split: Split) -> list[Problem]:
        if split == "train":
            raise ValueError("Benchmark holds no problems to train on; use it for validate, test or predict")
        return [problem for tier, place in self.sets.items() for problem in self._read(tier, place)]

    def _read(self, tier: str, place: str | None) -> list[Problem]:
        problems, report = read_benchmark(tier, place)
        self.account(report)
        return problems


class Mixture(ProblemDataModule):
    """Several sets at once: training batches mix them by weight, evaluation takes all of them.

    Each part goes through its own problems in its own seeded order, so weights change how often a part is drawn, never
    its order. A problem that two parts hold is drawn from the first.
    """

    def __init__(self, parts: list[ProblemDataModule], weights: list[float] | None = None, **kwargs: Any) -> None:
        """Reads nothing yet.

        Args:
            parts: The sets; their own batch sizes are not used.
            weights: Share of the training draws of each part, scaled to sum to 1; null: by number of problems.
            kwargs: Arguments of ProblemDataModule.
        """
        super().__init__(**kwargs)
        if not parts:
            raise ValueError("Mixture: parts is empty; give at least one DataModule")
        if weights is not None and (len(weights) != len(parts) or min(weights) <= 0):
            raise ValueError(f"Mixture: weights is {weights}; give one positive number for each of {len(parts)} parts")
        self.parts = parts
        self.weights = weights
        self._trains: list[list[Problem]] = []

    def check(self, stage: str = "fit") -> None:
        super().check(stage)
        if stage == "fit":
            self._train_by_part()

    def problems(self, split: Split) -> list[Problem]:
        merged: dict[tuple[str, str], Problem] = {}
        for part in self.parts:
            for problem in part.split(split):
                # Evaluation tiers stay whole; a training problem is drawn from one part only.
                merged.setdefault((problem.id, "" if split == "train" else problem.tier), problem)
        return list(merged.values())

    def batch(self, i: int, size: int | None = None) -> list[Problem]:
        size = self.batch_size if size is None else size
        trains = self._train_by_part()
        weights = self.weights or [len(train) for train in trains]
        weights = [weight / sum(weights) for weight in weights]
        start, stop = mixed_counts(i * size, weights), mixed_counts((i + 1) * size, weights)
        drawn = [
            train[index_at(p, len(train), f"{self.seed}/part {k}")]
            for k, train in enumerate(trains)
            for p in range(start[k], stop[k])
        ]
        return shuffled(drawn, f"{self.seed}/mixture {i}")  # else a rank could get one part's problems only

    def _train_by_part(self) -> list[list[Problem]]:
        if not self._trains:
            free = {problem.id for problem in self.split("train")}
            trains = []
            for k, part in enumerate(self.parts):
                train = [problem for problem in part.split("train") if problem.id in free]
                free -= {problem.id for problem in train}
                if not train:
                    raise ValueError(f"Mixture: nothing is left to train on of part {k}; leave it out of parts")
                trains.append(train)
            self._trains = trains
        return self._trains
