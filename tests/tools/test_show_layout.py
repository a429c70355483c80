"""tools/show_layout.py: the table, the JSON and the picture of a response."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loading import load_tool

tool = load_tool("show_layout")
TEXT = "We try. <Parallel><Path> one</Path><Path> one two</Path></Parallel><Summary> both</Summary> 4"
IDS = ["--ids", "9,2,4,9,5,4,9,9,5,3,6,9,7,9", "--tags", "2,3,4,5,6,7"]


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert tool.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ids_have_the_positions_of_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *IDS, "--prompt-length", "2")
    assert [t["position"] for t in found["tokens"]] == [2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [t["path"] for t in found["tokens"]] == [-1, -1, 0, 0, 0, 1, 1, 1, 1, -1, -1, -1, -1, -1]
    assert found["mask"][7] == [1, 1, 1, 1, 0, 0, 0, 1, *[0] * 8]  # the second path: prompt, main text and itself
    assert not found["causal"]
    assert as_json(capsys, *IDS, "--positions", "index")["tokens"][9]["position"] == 9
    assert as_json(capsys, *IDS, "--structure", "seen")["causal"]


def test_a_text_needs_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "response.txt", tmp_path / "layout.png"
    file.write_text(TEXT)
    assert tool.main(["--text", str(file), "--png", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 16
    assert lines[5].split() == ["4", "4", "path", "0", "0", "'<Path>'"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_tokenizer_knows_its_tags(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--ids", "8,2,4,8,5", "--model", str(tiny_model_dir))
    assert [t["token"] for t in found["tokens"]] == ["0", "<Parallel>", "<Path>", "0", "</Path>"]


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--ids", "1,2"]) == 2
    assert "--ids needs --tags or --model" in capsys.readouterr().err
    assert tool.main(["--text", str(tmp_path / "none.txt")]) == 2
    with pytest.raises(SystemExit):
        tool.main(["--ids", "1", "--tags", "1,2"])
