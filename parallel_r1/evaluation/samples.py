"""The samples of an evaluation on disk: one row a response, appended and synced batch by batch, never written twice.

<folder>/settings.json          all that decides what is sampled; a folder made with others is refused
<folder>/samples-<rank>.jsonl   rows of `evaluation.records` with `mode` and `sample`, in the order they were made

A kill at any moment leaves whole rows and at most one torn one, at the end of a file, which readers leave out and the
next run cuts off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel_r1.evaluation.records import Row
from parallel_r1.files import write_json

Key = tuple[str, str, str, int]
"""(mode, tier, problem id, sample)."""

SETTINGS = "settings.json"


def key_of(row: Mapping[str, Any]) -> Key:
    return row["mode"], row["tier"], row["id"], row["sample"]


def read_samples(folder: Path) -> Iterator[Row]:
    """The whole rows of all ranks, each sample once. Raises ValueError, naming file and line, for a damaged row."""
    seen: set[Key] = set()
    for path in sorted(folder.glob("samples-*.jsonl")):
        for row, _ in _rows(path):
            if (key := key_of(row)) not in seen:
                seen.add(key)
                yield row


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Each whole row of a file and the offset of its end."""
    end, bad = 0, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if bad:
                raise ValueError(f"{path}, line {bad}: not a row of an evaluation, and not the last line; delete it")
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
                key_of(row)
            except (ValueError, TypeError, KeyError, RecursionError):
                bad = number
                continue
            end += len(line)
            yield row, end


class InUseError(ValueError):
    """Another process is at work in the folder."""


class SampleFile:
    """The rows of one rank, open for appending; held by a lock that dies with the process."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Cuts a torn last row off. Raises InUseError for a file that another process writes to."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"samples-{rank}.jsonl"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise InUseError(
                f"{self.path}: another process is writing to it; wait for it or end it, or give another "
                "evaluation.folder"
            ) from None
        whole = max((end for _, end in _rows(self.path)), default=0)
        if self.path.stat().st_size > whole:
            os.ftruncate(self._file, whole)

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows; the disk has them when this returns."""
        # ASCII: a model can write halves of surrogate pairs, which UTF-8 has no bytes for
        data = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def check_settings(folder: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
    """Raise ValueError where a folder holds samples made with other settings, naming each that differs.

    fresh: nothing in the folder counts, so nothing is compared.
    """
    path = folder / SETTINGS
    if fresh or not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); start anew with --evaluation.fresh=true") from None
    differ = _differences(found, json.loads(json.dumps(settings)))
    if differ:
        told = "; ".join(f"{name} was {_short(a)}, now {_short(b)}" for name, a, b in differ)
        raise ValueError(
            f"{folder} holds samples made with other settings ({told}). Use the same settings, give another "
            "--evaluation.folder, or drop these samples with --evaluation.fresh=true"
        )


def open_folder(folder: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
    """Make a folder ready for samples under these settings; fresh drops those that it holds. One process calls this."""
    check_settings(folder, settings, fresh)
    if fresh:
        for path in folder.glob("samples-*.jsonl"):
            path.unlink()
    write_json(folder / SETTINGS, settings)


def _differences(found: Any, wanted: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = sorted(found.keys() | wanted.keys())
        return [d for key in keys for d in _differences(found.get(key), wanted.get(key), f"{name}.{key}".strip("."))]
    return [] if found == wanted else [(name, found, wanted)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
