"""Rows on disk: JSONL, gzip-compressed where the name ends in `.gz`.

A compressed file grows by whole gzip members, so that every call leaves a file that any gzip reader opens, and a kill
tears the last call's rows at most. Readers drop a torn end.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".jsonl.gz")


def packed(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as one gzip member; equal rows give equal bytes. A number that is not finite becomes null."""
    # a lone surrogate, which a tokenizer may decode to, has no UTF-8
    return gzip.compress("".join(_line(row) for row in rows).encode("utf-8", errors="replace"), mtime=0)


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """A copy of a JSON value in which every number that is not finite, which JSON does not know, is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a compressed file. Whoever goes on with a file that a kill may have torn mends it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(packed(rows))


def saved_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `.jsonl` or `.jsonl.gz` file in order, without a torn end.

    Raises ValueError, naming file and row, for what is damaged elsewhere or holds something else than objects.
    """
    number = 0
    torn: str | None = None
    for line in _lines(path):
        if torn is not None:
            raise ValueError(f"{path}, row {number}: not JSON ({torn}); correct the row, or leave it out")
        if not line.strip():
            continue
        number += 1
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            torn = str(error)
            continue
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: holds a {type(row).__name__} where an object is expected")
        yield row
    if torn is not None and number == 1 and path.suffix != ".gz":
        raise ValueError(f"{path}: holds no row; expected one JSON object a line")


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their ends; of a compressed file those of which every byte is there."""
    with path.open("rb") as file:
        if path.suffix != ".gz":
            yield from file
            return
        inflate, rest, whole = zlib.decompressobj(wbits=31), b"", True
        while data := file.read(1 << 16):
            while data:
                try:
                    *lines, rest = (rest + inflate.decompress(data)).split(b"\n")
                except zlib.error as error:
                    raise ValueError(f"{path}: damaged ({error}); delete it, or cut it before the damage") from None
                yield from lines
                data, whole = inflate.unused_data, inflate.eof
                if whole:  # the end of a member; the next one starts, if there is one
                    inflate = zlib.decompressobj(wbits=31)
        if whole and rest:
            yield rest


def row_files(path: Path) -> list[Path]:
    """The files of rows that a path stands for: itself, or those of a folder, by name.

    Raises FileNotFoundError where there is nothing.
    """
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
        if not found:
            raise FileNotFoundError(f"folder {str(path)!r} holds no {' or '.join(ENDINGS)} file")
        return found
    if not path.is_file():
        raise FileNotFoundError(f"no file or folder {str(path)!r}; correct the path")
    return [path]
