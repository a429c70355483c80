"""tools/grade.py: the shared cases end to end, and files with rows that cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared/cases/answers.jsonl"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/grade.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_shared_cases_are_all_settled_as_they_are():
    if not CASES.exists():
        pytest.skip("shared/cases/answers.jsonl is not beside the repository")
    expected = [json.loads(line) for line in CASES.read_text().splitlines()]
    done = run(CASES)
    graded = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [row["id"] for row in graded] == [row["id"] for row in expected]
    wrong = [
        (got["id"], got["gold"], got["response"], got["reason"])
        for got, row in zip(graded, expected, strict=True)
        if got["correct"] is not row["correct"]
    ]
    assert wrong == []
    assert f"{len(expected)} rows graded" in done.stderr


def test_bad_rows_are_named_by_line_and_do_not_stop_the_rest(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'{"id": 1, "gold": "5", "response": "\\\\boxed{5}", "kind": "kept"}\n'
        b"not json\n"
        b"[1, 2]\n"
        b'{"id": 2}\n'
        b"\n"
        b'{"id": 3, "gold": " ", "response": "x"}\n'
        b"\xff\xfe\n"
        b'{"id": 4, "gold": "5", "response": null}\n'
        + b"[" * 100_000
        + b'\n{"id": 5, "gold": 5, "response": "Final Answer: 6"}\n'
    )
    done = run(file)
    assert done.returncode == 2
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {
            "id": 1,
            "gold": "5",
            "response": "\\boxed{5}",
            "kind": "kept",
            "correct": True,
            "reason": "the last \\boxed: 5",
        },
        {"id": 5, "gold": "5", "response": "Final Answer: 6", "correct": False, "reason": "the last answer line: 6"},
    ]
    for line, complaint in [
        (2, "not JSON"),
        (3, "not a JSON object"),
        (4, "no gold and no response"),
        (6, "id 3: the gold answer is empty"),
        (7, "not UTF-8"),
        (8, "response is NoneType"),
        (9, ""),
    ]:
        assert any(said.startswith(f"line {line}: ") and complaint in said for said in done.stderr.splitlines())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["missing.jsonl"], ["."], ["--timeout", "0", __file__], ["--workers", "0", __file__]]
)
def test_a_mistake_of_the_user_is_one_line(arguments: list[str]):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("grade.py: error: ")
