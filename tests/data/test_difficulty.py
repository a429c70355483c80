"""Solve rates: the file, the band, what the user is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from parallel_r1.data.datamodules import Mixture, Problems
from parallel_r1.data.difficulty import SolveRate, read_solve_rates, within
from parallel_r1.data.sources import problem_id
from parallel_r1.types import Problem


def rates_file(tmp_path: Path, *rates: SolveRate) -> str:
    file = tmp_path / "rates.jsonl"
    file.write_text("".join(rate.line() for rate in rates))
    return str(file)


def set_of(tmp_path: Path, *questions: str) -> str:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"problem": q, "answer": "1"}) + "\n" for q in questions))
    return str(file)


EIGHT = tuple(SolveRate(f"q{i}", i, 8) for i in range(9))


def test_a_file_says_what_was_measured_and_counts_add_up(tmp_path: Path) -> None:
    file = rates_file(tmp_path, SolveRate("a b", 1, 4), SolveRate("c", 0, 4), SolveRate(" a  b", 3, 4))
    assert read_solve_rates(file) == {problem_id("a b"): 0.5, problem_id("c"): 0.0}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"question": "q", "solved": 1}, "row 1: no column 'tried'"),
        ({"question": "q", "solved": 3, "tried": 2}, "row 1: 'solved' is 3 of 'tried' 2"),
        ({"question": "q", "solved": 0, "tried": 0}, "'solved' is 0 of 'tried' 0"),
        ({"question": "q", "solved": 0.5, "tried": 1}, "'solved' is 0.5 where a whole number is expected"),
        ({"question": "q", "solved": True, "tried": 1}, "'solved' is True where a whole number"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: dict[str, Any], complaint: str) -> None:
    (tmp_path / "rates.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=re.escape(complaint)):
        read_solve_rates(str(tmp_path / "rates.jsonl"))
    (tmp_path / "rates.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no solve rates; measure them with"):
        read_solve_rates(str(tmp_path / "rates.jsonl"))


def test_both_ends_of_the_band_belong_to_it() -> None:
    rates = {problem_id(rate.question): rate.solved / rate.tried for rate in EIGHT}
    # the identity of an embedded problem is not a hash of its text: rates are found by the text
    problems = [Problem(f"maze {i}", f"q{i}", "1", "t") for i in range(10)]
    kept, outside, unknown = within(problems, rates, 0.25, 0.5)
    assert [problem.question for problem in kept] == ["q2", "q3", "q4"]
    assert (outside, unknown) == (6, 1)


def test_a_data_module_trains_within_the_band_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, rates = set_of(tmp_path, *(f"q{i}" for i in range(10))), rates_file(tmp_path, *EIGHT)
    band: dict[str, Any] = {"solve_rate": (0.25, 0.75), "solve_rate_file": rates}
    data = Problems(path, val_size=0, **band)
    with caplog.at_level("INFO"):
        data.check("fit")
    assert [problem.question for problem in data.split("train")] == ["q2", "q3", "q4", "q5", "q6"]
    said = "5 of 10 training problems have a solve rate within [0.25, 0.75]; 4 lie outside, 1 were not measured"
    assert said in caplog.text

    held_out = Problems(path, val_size=3, seed=1, **band)
    assert len(held_out.split("val")) == 3, "the filter is for training alone"
    assert {p.id for p in held_out.split("train")} <= {p.id for p in data.split("train")}

    part = Mixture([Problems(path, val_size=0, **band)], val_size=0)
    assert [p.question for p in part.split("train")] == [p.question for p in data.split("train")]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"solve_rate": (0.2, 0.8)}, "give solve_rate (as [0.2, 0.8]) and solve_rate_file together"),
        ({"solve_rate_file": "x"}, "give solve_rate (as [0.2, 0.8]) and solve_rate_file together"),
        ({"solve_rate": (0.8, 0.2), "solve_rate_file": "x"}, "solve_rate is [0.8, 0.2]; give two shares"),
        ({"solve_rate": (0.0, 8.0), "solve_rate_file": "x"}, "solve_rate is [0.0, 8.0]; give two shares"),
        ({"drop_contaminated": True}, "drop_contaminated needs benchmarks"),
        ({"benchmarks": {"mine": None}}, "benchmarks: no known home of ['mine']"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Problems("problems.jsonl", **options)


def test_a_band_that_keeps_nothing_is_an_error(tmp_path: Path) -> None:
    path = set_of(tmp_path, "a", "b")
    data = Problems(path, val_size=0, solve_rate=(0.1, 0.9), solve_rate_file=rates_file(tmp_path, *EIGHT))
    with pytest.raises(ValueError, match=r"no training problem has a solve rate within solve_rate=\[0\.1, 0\.9\]"):
        data.check("fit")
    missing = Problems(path, val_size=0, solve_rate=(0.1, 0.9), solve_rate_file=str(tmp_path / "no.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        missing.check("fit")
