"""Rows of a data set, wherever they lie: a local file or folder (JSON, JSONL, parquet, CSV), else the hub.

Every row knows where it came from, so that an error can name the file, the row and the columns found. Rows are
streamed, so that a set with a hundred copies of each problem is never held whole.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row: `values` by column; `file` and `number` (the line in a JSONL file, else counted from 1) place it."""

    file: str
    number: int
    values: dict[str, Any]

    def error(self, cause: str, remedy: str = "correct the row, or leave it out") -> ValueError:
        """The error of a row that cannot be used, for the caller to raise."""
        found = ", ".join(map(str, self.values)) or "none"
        return ValueError(f"{self.file}, row {self.number}: {cause} (columns found: {found}); {remedy}")

    def value(self, *columns: str) -> Any:
        """What stands in the first of `columns` that the row has. Raises ValueError if it has none of them."""
        for column in columns:
            if column in self.values:
                return self.values[column]
        wanted = " or ".join(repr(column) for column in columns)
        raise self.error(
            f"no column {wanted}", "give a file in the public columns, or `data.Problems` the names of its columns"
        )

    def text(self, *columns: str) -> str:
        """The stripped text in the first of `columns` that the row has, else ValueError; see `as_text`."""
        return self.as_text(self.value(*columns), next(column for column in columns if column in self.values))

    def as_text(self, value: Any, name: str) -> str:
        """`value` as stripped text; numbers are written out. Raises ValueError for other types and for empty text."""
        if value is None or value != value:  # a missing cell reads as null or, from a table of numbers, as NaN
            raise self.error(f"{name!r} is empty")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise self.error(f"{name!r} holds {type(value).__name__} where text is expected")
        if not value.strip():
            raise self.error(f"{name!r} is empty")
        return value.strip()


def read_rows(path_or_id: str, split: str, config: str | None = None, streaming: bool = False) -> Iterator[Row]:
    """Rows of one split of a local file, a local folder or a hub data set.

    A file is read whole, whatever the split. A folder gives the files whose names start with the split's
    (`train.jsonl`, `train-00000-of-00002.parquet`), in it or in its `data` folder, or, for the split `train` only, all
    its files if no name starts with a split's. config, streaming: passed to `datasets.load_dataset` for a hub id.
    Raises FileNotFoundError for what is neither there nor on the hub, ValueError for a file that cannot be read.
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        for file in [path] if path.is_file() else _files_of_split(path, split):
            yield from _reader(file)(file)
    elif _looks_like_a_path(path_or_id):
        raise FileNotFoundError(f"no data file or folder {path_or_id!r} (looked in {Path.cwd()}); correct the path")
    else:
        yield from _read_hub(path_or_id, split, config, streaming)


SPLITS = {"train": ("train",), "val": ("val", "validation", "dev"), "test": ("test",)}


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = [f for place in (folder, folder / "data") for f in sorted(place.glob("*")) if f.suffix in READERS]
    named = {name: [f for f in files if f.stem.split("-")[0] in stems] for name, stems in SPLITS.items()}
    if named.get(split):
        return named[split]
    if split == "train" and files and not any(named.values()):
        return files
    found = ", ".join(f.name for f in files) or f"no {', '.join(sorted(READERS))} files"
    raise FileNotFoundError(
        f"folder {str(folder)!r} holds no {split!r} split (found: {found}); give the path of a file"
    )


def is_file(path_or_id: str) -> bool:
    """Whether this is one local file, which has no splits, rather than a folder, a hub id or nothing at all."""
    return Path(path_or_id).expanduser().is_file()


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or Path(text).suffix in READERS


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(file, number, _parse_json(file, number, line))


def _read_json(file: Path) -> Iterator[Row]:
    rows = _parse_json(file, None, file.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError(f"{file}: holds one {type(rows).__name__} where a list of rows is expected")
    for number, row in enumerate(rows, start=1):
        yield _object(file, number, row)


def _parse_json(file: Path, number: int | None, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{file}, row {number}" if number else f"{file}, line {error.lineno}"
        hint = "" if number else "; a file with one object a line needs the ending .jsonl"
        raise ValueError(f"{where}: not JSON ({error.msg}){hint}") from None


def _object(file: Path, number: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{file}, row {number}: holds a {type(row).__name__} where an object of columns is expected")
    return Row(str(file), number, row)


def _read_csv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB a field is less than a long solution
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=1):
            # DictReader files surplus cells under None and fills missing ones with None.
            yield Row(str(file), number, {k: v for k, v in row.items() if k is not None})


def _read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=4096):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(str(file), number, values)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file}: not a parquet file ({error})") from None


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _reader(file: Path) -> Callable[[Path], Iterator[Row]]:
    if file.suffix not in READERS:
        raise ValueError(f"{file}: unknown kind of file {file.suffix!r}; known: {', '.join(sorted(READERS))}")
    return READERS[file.suffix]


def _read_hub(hub_id: str, split: str, config: str | None, streaming: bool) -> Iterator[Row]:
    import datasets  # costs seconds, so only where it is needed

    try:
        hub_split = {"val": "validation"}.get(split, split)
        rows = datasets.load_dataset(hub_id, config, split=hub_split, streaming=streaming)
    except Exception as error:  # the hub client raises dozens of types, all meaning: no such data here
        cause = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{hub_id!r} is no local file or folder, and its split {split!r} could not be loaded from the hub "
            f"({type(error).__name__}: {cause}); correct the name, or give a `path` to a local copy"
        ) from error
    for number, values in enumerate(rows, start=1):
        yield Row(f"{hub_id} ({split})", number, values)
