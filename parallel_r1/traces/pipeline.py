"""The steps of the cold-start pipeline in order: generate what is missing, choose, write what was found."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_r1.files import write_text
from parallel_r1.traces.selection import Selection
from parallel_r1.traces.store import Candidate, CandidateFile
from parallel_r1.traces.teachers import Refusal, Teacher, missing
from parallel_r1.types import Problem

RAW, TRACES, YIELD, SOLVE_RATES = "raw.jsonl", "train.jsonl", "yield.json", "solve_rates.jsonl"
SECONDS_BETWEEN_REPORTS = 5.0


def generate(
    file: CandidateFile,
    teacher: Teacher,
    problems: Sequence[Problem],
    per_problem: int,
    seed: int,
    say: Callable[[str], None],
) -> Counter[str]:
    """Have the teacher write the candidates that the file does not hold yet. Returns refused requests by cause.

    Raises TeacherError when the teacher cannot go on; the file then holds all that it wrote.
    """
    total = len(problems) * per_problem
    there = sum((p.id, i) in file.candidates for p in problems for i in range(per_problem))
    if there:
        say(f"{there:,} of {total:,} candidates were there already")
    refused: Counter[str] = Counter()
    start = said = time.monotonic()
    fresh = 0
    if there == total:
        return refused
    for answers in teacher.write(missing(problems, per_problem, seed, dict(file.candidates))):
        file.append(answer for answer in answers if isinstance(answer, Candidate))
        refused.update(answer.cause for answer in answers if isinstance(answer, Refusal))
        fresh += len(answers)
        now = time.monotonic()
        if now - said >= SECONDS_BETWEEN_REPORTS or there + fresh == total:
            said = now
            say(f"{there + fresh:,} of {total:,} candidates ({fresh / max(now - start, 1e-9):.1f} a second)")
    return refused


def by_problem(file: CandidateFile, per_problem: int) -> dict[str, list[Candidate]]:
    """The first `per_problem` candidates of each problem, in the order of their numbers: however they came in."""
    found: dict[str, list[Candidate]] = {}
    for key in sorted(file.candidates):
        if key[1] < per_problem:
            found.setdefault(key[0], []).append(file.candidates[key])
    return found


def write_results(
    out: Path, selection: Selection, refused: Mapping[str, int], settings: Mapping[str, Any], rules: Mapping[str, Any]
) -> None:
    """The traces in the columns of Parallel-GSM8K, the account of all candidates, and the solve rates: each whole."""
    rows = [
        {"problem": problem.question, "text": text, "ground_truth": problem.answer} for problem, text in selection.kept
    ]
    account = {
        "problems": len(selection.rates),
        "candidates": selection.candidates,
        "kept": len(selection.kept),
        "problems_with_a_trace": len({problem.id for problem, _ in selection.kept}),
        "left_out": dict(selection.rejected.most_common()),
        "not_generated": dict(refused),
        "rules": dict(rules),
        "settings": dict(settings),
    }
    write_text(out / TRACES, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_text(out / YIELD, json.dumps(account, indent=2) + "\n")
    write_text(out / SOLVE_RATES, "".join(rate.line() for rate in selection.rates))


def fingerprint(folder: Path) -> str:
    """Tells the weights in a model folder from others under the same name; reads the end of each file only."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(folder).glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as data:
            data.seek(max(0, size - (1 << 20)))
            digest.update(f"{file.name}/{size}/".encode() + data.read())
    return digest.hexdigest()
