"""Reading rows: formats, folders, the hub (a stand-in), and errors that name file, row, columns and remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from parallel_r1.data.reading import Row, is_file, read_rows

ROWS = [{"question": "1 + 1?", "answer": "2"}, {"question": "a,\nb?", "answer": "7"}]


def write(file: Path, rows: list[dict] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    elif file.suffix == ".csv":
        lines = [",".join(rows[0])] + [",".join(f'"{v}"' for v in row.values()) for row in rows]
        file.write_text("\n".join(lines), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = list(read_rows(str(write(tmp_path / f"x{suffix}")), "train"))
    assert [row.values for row in rows] == ROWS
    assert [row.number for row in rows] == [1, 2]


def test_blank_lines_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('\ufeff{"a": 1}\n\n{"a": 2}', encoding="utf-8")
    assert [(row.number, row.values["a"]) for row in read_rows(str(file), "train")] == [(1, 1), (3, 2)]


def test_nested_columns_of_parquet_stay_nested(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "3"}}]
    assert [row.values for row in read_rows(str(write(tmp_path / "x.parquet", rows)), "train")] == rows


def test_a_folder_gives_the_files_of_the_split(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[1:])
    write(tmp_path / "validation.jsonl", ROWS[:1])
    (tmp_path / "README.md").write_text("not data")
    assert [row.values for row in read_rows(str(tmp_path), "train")] == ROWS
    assert [row.values for row in read_rows(str(tmp_path), "val")] == ROWS[:1]
    with pytest.raises(FileNotFoundError, match=r"holds no 'test' split .*validation\.jsonl.*give the path of a file"):
        list(read_rows(str(tmp_path), "test"))


def test_a_folder_without_splits_is_training_data(tmp_path: Path) -> None:
    write(tmp_path / "part_b.jsonl", ROWS[1:])
    write(tmp_path / "part_a.jsonl", ROWS[:1])
    assert [row.values for row in read_rows(str(tmp_path), "train")] == ROWS
    with pytest.raises(FileNotFoundError, match="holds no 'test' split"):
        list(read_rows(str(tmp_path), "test"))


@pytest.mark.parametrize("path", ["./none.jsonl", "/no/such/folder", "~/none", "none.parquet", "a/b/c"])
def test_a_missing_path_is_never_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no data file or folder .*; correct the path"):
        list(read_rows(path, "train"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": ', r"x\.jsonl, row 2: not JSON"),
        ("x.jsonl", "[1, 2]", r"x\.jsonl, row 1: holds a list where an object"),
        ("x.json", '{"a": 1}', r"x\.json: holds one dict where a list"),
        ("x.json", '{"a": 1}\n{"a": 2}', r"x\.json, line 2: not JSON .* needs the ending \.jsonl"),
        ("x.parquet", "hello", r"x\.parquet: not a parquet file"),
        ("x.txt", "hello", r"x\.txt: unknown kind of file '\.txt'; known: \.csv"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(str(tmp_path / name), "train"))


def test_texts_of_a_row() -> None:
    row = Row(
        "f.jsonl", 7, {"a": " x ", "i": 3, "f": 27.0, "n": None, "nan": float("nan"), "l": [], "b": True, "e": "  "}
    )
    assert (row.text("a"), row.text("i"), row.text("f")) == ("x", "3", "27")
    assert row.text("missing", "a") == "x"
    for column, cause in {
        "n": "'n' is empty",
        "nan": "'nan' is empty",
        "e": "'e' is empty",
        "l": "'l' holds list where text",
        "b": "'b' holds bool where text",
        "missing": "no column 'missing'",
    }.items():
        with pytest.raises(
            ValueError, match=rf"f\.jsonl, row 7: {cause}.*\(columns found: a, i, f, n, nan, l, b, e\); "
        ):
            row.text(column)


def test_hub_ids_go_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: object, **kwargs: object) -> list[dict]:
        calls.append((args, kwargs))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = list(read_rows("owner/name", "val", "main", streaming=True))
    assert [row.values for row in rows] == ROWS
    assert rows[1].file == "owner/name (val)"
    assert calls == [(("owner/name", "main"), {"split": "validation", "streaming": True})]


def test_a_hub_failure_is_one_readable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError("offline\nwith a long tail")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        FileNotFoundError, match=r"'owner/name' .*\(ConnectionError: offline\); .*`path` to a local copy"
    ):
        list(read_rows("owner/name", "train"))


def test_is_file(tmp_path: Path) -> None:
    assert is_file(str(write(tmp_path / "x.jsonl")))
    assert not is_file("not/there.jsonl")
    assert not is_file(str(tmp_path))
    assert not is_file("owner/name")
