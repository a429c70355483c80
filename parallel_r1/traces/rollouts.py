"""A run's own rollouts as candidates: rejection-sampled self-distillation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from parallel_r1.data.reading import Row, read_rows
from parallel_r1.data.sources import UNKNOWN, problem_id
from parallel_r1.evaluation.row_files import row_files, saved_rows
from parallel_r1.traces.store import Candidate
from parallel_r1.types import Problem


def read_rollouts(path: str, problems: Iterable[Problem] = ()) -> tuple[list[Problem], dict[str, list[Candidate]]]:
    """Problems in the order of their first rows, and the candidates of each, those of the highest reward first.

    path: a file, or the folder of rollouts that training left.

    Columns: `question` or `problem`; `response` or `text`; `answer`, `gold` or `ground_truth`, where the question is
    not one of `problems`; and, if there, `finished` (else true) and `reward` (else 0). Raises FileNotFoundError and
    ValueError, naming file and row, for a file in other columns or a question without an answer.
    """
    golds = {problem_id(problem.question): problem.answer for problem in problems}
    found: dict[str, Problem] = {}
    ranked: dict[str, list[tuple[float, Candidate]]] = {}
    for row in _rows(path):
        question = row.text("question", "problem")
        key = problem_id(question)
        if key not in found:
            found[key] = Problem(key, question, golds.get(key) or _gold(row), tier="")
            ranked[key] = []
        text, finished = row.value("response", "text"), row.values.get("finished", True)
        if not isinstance(text, str) or not isinstance(finished, bool):
            raise row.error("the response is no text, or 'finished' is neither true nor false")
        ranked[key].append((_reward(row), Candidate(key, len(ranked[key]), text, finished)))
    if not found:
        raise ValueError(f"{path}: holds no rollouts; give a file with at least one")
    best = {key: sorted(mine, key=lambda item: (-item[0], item[1].index)) for key, mine in ranked.items()}
    numbered = {key: [replace(c, index=i) for i, (_, c) in enumerate(mine)] for key, mine in best.items()}
    return list(found.values()), numbered


def _rows(path: str) -> Iterator[Row]:
    place = Path(path).expanduser()
    if not place.name.endswith(".jsonl.gz") and not any(place.glob("*.jsonl.gz")):
        yield from read_rows(path, "train")
        return
    for file in row_files(place):
        for number, values in enumerate(saved_rows(file), start=1):
            yield Row(str(file), number, values)


def _gold(row: Row) -> str:
    columns = ("answer", "gold", "ground_truth")
    if (
        not any(row.values.get(column) for column in columns)
        or (answer := row.text(*(c for c in columns if row.values.get(c)))) == UNKNOWN
    ):
        raise row.error("no gold answer", "add a column `answer`, or give the problems with their answers (--problems)")
    return answer


def _reward(row: Row) -> float:
    value = row.values.get("reward") or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise row.error(f"'reward' is {value!r} where a number is expected")
    return float(value)
