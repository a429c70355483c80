"""Rows on disk: what a kill leaves, what is damaged, what JSON does not know."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from parallel_r1.evaluation.row_files import append_rows, finite, packed, row_files, saved_rows


def test_rows_come_back_in_order_over_several_calls(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl.gz"
    append_rows(path, [{"a": 1}, {"a": "é\n<"}])
    append_rows(path, [])
    append_rows(path, [{"a": None}])
    assert list(saved_rows(path)) == [{"a": 1}, {"a": "é\n<"}, {"a": None}]
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == 3, "any gzip reader opens it"


def test_every_torn_end_keeps_all_earlier_calls(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    first, second = [{"a": i} for i in range(3)], [{"b": f"text {i}" * 20} for i in range(5)]
    whole = packed(first) + packed(second)
    for cut in range(len(packed(first)), len(whole)):
        path.write_bytes(whole[:cut])
        found = list(saved_rows(path))
        assert found[:3] == first
        assert found[3:] == second[: len(found) - 3]


def test_a_last_line_without_an_end_counts_in_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}'))
    assert list(saved_rows(path)) == [{"a": 1}, {"a": 2}]


def test_a_torn_line_of_plain_text_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n{"a": ')
    assert list(saved_rows(path)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"a": 1}\n{"a": \n{"a": 3}\n', "row 2: not JSON"),
        (b"[1]\n", "row 1: holds a list"),
        (b"hello\n", "holds no row"),
        (b"[" * 100_000 + b"\n{}\n", "row 1: not JSON"),
    ],
)
def test_what_is_no_row_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        list(saved_rows(path))


def test_damage_before_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole = bytearray(packed([{"a": i} for i in range(300)]) + packed([{"b": 1}]))
    whole[60] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"rows.jsonl.gz.*(damaged|not JSON)"):
        list(saved_rows(path))


def test_numbers_that_json_does_not_know_become_null() -> None:
    line = gzip.decompress(packed([{"a": [float("nan"), 1.5], "b": {"c": float("-inf")}, "d": "\ud800"}]))
    assert json.loads(line) == {"a": [None, 1.5], "b": {"c": None}, "d": "?"}
    assert finite((1, float("inf"), True)) == [1, None, True]


def test_files_of_a_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no"):
        row_files(tmp_path)
    for name in ("b.jsonl.gz", "a.jsonl", "c.json", "b.jsonl.gz.partial"):
        (tmp_path / name).touch()
    assert [file.name for file in row_files(tmp_path)] == ["a.jsonl", "b.jsonl.gz"]
    assert row_files(tmp_path / "c.json") == [tmp_path / "c.json"]
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        row_files(tmp_path / "d")
