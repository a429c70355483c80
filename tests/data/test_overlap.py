"""What is looked for in a training set: benchmarks, its own validation problems, those of other stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_r1.data.datamodules import Problems
from parallel_r1.data.overlap import overlap_lines, stage_overlaps, without
from parallel_r1.data.sources import Known, problem_id
from parallel_r1.types import Problem


def problem(question: str, answer: str = "1", tier: str = "t") -> Problem:
    return Problem(problem_id(question), question, answer, tier)


TRAIN = [problem("What is $x$?"), problem("Two."), problem("Three.", "3")]


def test_how_a_set_holds_a_problem() -> None:
    known = Known(TRAIN)
    assert known.kind(problem("What  is $x$?", "2")) == "same", "the text alone makes the identity"
    assert known.kind(problem("what is x", "1.0")) == "similar"
    assert known.kind(problem("what is x", "2")) is None
    assert known.kind(problem("Four.")) is None


def test_lines_count_and_name() -> None:
    others = {"a": [problem("Two."), problem("three", "3"), problem("Four.")], "b": [problem("Five.")], "c": []}
    line = "a: 1 the same and 1 alike of 3 are training problems"
    assert overlap_lines(TRAIN, others) == [line]
    assert overlap_lines(TRAIN, others, all_of_them=True) == [
        line,
        "b: 0 the same and 0 alike of 1 are training problems",
    ]
    assert [p.question for p in without(TRAIN, others["a"])] == ["What is $x$?"]


def test_stages_are_compared_with_the_validation_of_others() -> None:
    """Stage three has the validation problems of stage two, which it was already kept apart from."""
    shared, own = [problem("Two.")], [problem("Six.")]
    trains = {"one": TRAIN, "two": own, "three": TRAIN}
    lines = stage_overlaps(trains, {"one": own, "two": shared, "three": shared})
    assert (
        lines
        == [
            "stage one: validation of stage two: 1 the same and 0 alike of 1 are training problems",
            "stage one: validation of stage three: 1 the same and 0 alike of 1 are training problems",
            "stage two: validation of stage one: 1 the same and 0 alike of 1 are training problems",
            "stage three: validation of stage two: 1 the same and 0 alike of 1 are training problems",
        ][:3]
    )


def test_a_data_module_reports_and_on_request_drops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write(name: str, *problems: Problem) -> str:
        file = tmp_path / name
        file.write_text("".join(json.dumps({"problem": p.question, "answer": p.answer}) + "\n" for p in problems))
        return str(file)

    path, bench = write("train.jsonl", *TRAIN), write("bench.jsonl", problem("two", "1"), problem("Nine."))
    val = write("val.jsonl", problem("Three.", "3"), problem("what is x", "1"))
    for drop, kept in ((False, ["What is $x$?", "Two."]), (True, ["What is $x$?"])):
        data = Problems(path, val_path=val, benchmarks={"aime24": bench}, drop_contaminated=drop)
        caplog.clear()
        with caplog.at_level("INFO"):
            data.check("fit")
            data.setup("fit")
        assert [p.question for p in data.split("train")] == kept
        assert "Problems: benchmark aime24: 0 the same and 1 alike of 2 are training problems" in caplog.text
        assert caplog.text.count("Problems: validation: 0 the same and 1 alike of 2 are training problems") == 1
        assert ("1 of 2 training problems stand in a benchmark: left out" in caplog.text) == drop
