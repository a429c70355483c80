"""tools/compare.py as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from loading import load_tool

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
from test_paired import report

tool = load_tool("compare")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, correct in zip(paths, ([0, 1, 2], [2, 1, 2]), strict=True):
        path.write_text(json.dumps(report({"easy": {"plain": correct}})))
    return list(map(str, paths))


def test_text_markdown_and_json_say_the_same(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([*files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["differences"]
    mean = next(d for d in found if d["metric"] == "mean@2")
    assert mean["difference"] == pytest.approx(1 / 3)
    for form in ([], ["--markdown"]):
        assert tool.main([*files, *form]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "mean@2" in line)
        for part in ("0.5000", "0.8333", "+0.3333"):
            assert part in line


def test_a_folder_stands_for_its_report(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(files[0]).rename(tmp_path / "report.json")
    assert tool.main([str(tmp_path), files[1]]) == 0
    assert "mean@2" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", "[]", '{"tiers": {}}'])
def test_what_is_no_report_is_one_message(
    files: list[str], tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    assert tool.main([files[0], str(bad)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert tool.main([files[0], str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err
