"""How often a policy solves each problem: measured by a pass of its own, kept in a file, used to choose problems.

One line a problem: {"question": ..., "solved": 3, "tried": 8}. `tools/generate_traces.py` writes such a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parallel_r1.data.reading import Row, read_rows
from parallel_r1.data.sources import problem_id
from parallel_r1.types import Problem


@dataclass(frozen=True)
class SolveRate:
    """Of `tried` responses to a question, `solved` gave the right answer."""

    question: str
    solved: int
    tried: int

    def line(self) -> str:
        """The line of a file of solve rates."""
        return json.dumps({"question": self.question, "solved": self.solved, "tried": self.tried}) + "\n"


def read_solve_rates(path: str) -> dict[str, float]:
    """The share solved, by the identity of the question (`sources.problem_id`); counts of several lines add up.

    Raises FileNotFoundError and ValueError, naming file and row, for what is no file of solve rates.
    """
    solved: dict[str, int] = {}
    tried: dict[str, int] = {}
    for row in read_rows(path, "train"):
        key = problem_id(row.text("question", "problem"))
        right, of = _count(row, "solved"), _count(row, "tried")
        if not 0 <= right <= of or of == 0:
            raise row.error(f"'solved' is {right} of 'tried' {of}")
        solved[key], tried[key] = solved.get(key, 0) + right, tried.get(key, 0) + of
    if not tried:
        raise ValueError(f"{path}: holds no solve rates; measure them with tools/generate_traces.py")
    return {key: solved[key] / tried[key] for key in tried}


def _count(row: Row, column: str) -> int:
    value = row.value(column)
    if isinstance(value, bool) or not (isinstance(value, int) or str(value).isdigit()):
        raise row.error(f"{column!r} is {value!r} where a whole number is expected")
    return int(value)


def within(
    problems: Iterable[Problem], rates: Mapping[str, float], low: float, high: float
) -> tuple[list[Problem], int, int]:
    """(problems with low <= rate <= high, how many lie outside, how many were never measured)."""
    kept, outside, unknown = [], 0, 0
    for problem in problems:
        rate = rates.get(problem_id(problem.question))
        if rate is None:
            unknown += 1
        elif low <= rate <= high:
            kept.append(problem)
        else:
            outside += 1
    return kept, outside, unknown
