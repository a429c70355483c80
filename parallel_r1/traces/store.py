"""What a teacher wrote, on disk: one line a candidate, appended and synced before the next, never written again.

    {"settings": {"model": ..., "temperature": ...}}                               the first line
    {"problem": "<id>", "candidate": 0, "finished": true, "text": "..."}           every other line

A run that is killed at any moment leaves whole lines and at most one torn one, at the end, which the next run drops.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from parallel_r1.files import sync

Key = tuple[str, int]


@dataclass(frozen=True)
class Candidate:
    """One response of a teacher. problem: its id; index: which of its candidates; finished: no limit cut it."""

    problem: str
    index: int
    text: str
    finished: bool

    @property
    def key(self) -> Key:
        return self.problem, self.index


class CandidateFile:
    """The raw file of a run, open for appending; one process at a time, held by a lock that dies with the process.

    settings: all that decides what a candidate says. A file made with others is refused, since a mixture of two
    teachers would look like one. candidates: by key, in the order of the file; dropped: bytes of a torn last line.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.candidates: dict[Key, Candidate] = {}
        self.dropped = 0
        self._file = -1

    def __enter__(self) -> Self:
        """Raises ValueError for a file that is in use, is damaged, or was made with other settings."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._recover()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def append(self, candidates: Iterable[Candidate]) -> None:
        """Add whole lines and wait until the disk has them."""
        fresh = list(candidates)
        repeated = [c.key for c in fresh if c.key in self.candidates]
        assert not repeated, f"candidates were generated twice: {repeated}"
        self._write("".join(_line(c) for c in fresh))
        self.candidates.update({c.key: c for c in fresh})

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path}: another run is writing to it; wait for that run or end it, or give another OUT"
            ) from None

    def _recover(self) -> None:
        """Read what is there, cut a torn last line off, and write the settings if they are not there."""
        found, whole = None, 0
        for number, end, row in _rows(self.path):
            if number == 1:
                found = row.get("settings")
                self._compare(found)
            else:
                candidate = _candidate(row, f"{self.path}, line {number}")
                self.candidates.setdefault(candidate.key, candidate)
            whole = end
        self.dropped = self.path.stat().st_size - whole
        if self.dropped:
            os.ftruncate(self._file, whole)
        if found is None:
            self._write(json.dumps({"settings": self.settings}) + "\n")
            sync(self.path.parent)

    def _compare(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise ValueError(f"{self.path}: its first line holds no settings; it is not a raw file of this tool")
        wanted = json.loads(json.dumps(self.settings))
        differ = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
        if differ:
            told = "; ".join(f"{key} was {_short(found.get(key))}, now {_short(wanted.get(key))}" for key in differ)
            raise ValueError(f"{self.path} was made with other settings ({told}); use the same, or give another OUT")

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)


def _rows(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(line number, offset of its end, row) of every whole line. Raises ValueError for a bad line before the last."""
    end, bad = 0, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if bad:
                raise ValueError(f"{path}, line {bad}: not a JSON object, and not the last line; restore the file")
            row = _parse(line)
            if row is None:
                bad = number
            else:
                end += len(line)
                yield number, end, row


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _line(c: Candidate) -> str:
    # ASCII only: a model can write halves of surrogate pairs, which UTF-8 has no bytes for
    return json.dumps({"problem": c.problem, "candidate": c.index, "finished": c.finished, "text": c.text}) + "\n"


def _candidate(row: dict[str, Any], where: str) -> Candidate:
    try:
        found = Candidate(row["problem"], row["candidate"], row["text"], row["finished"])
    except KeyError as error:
        raise ValueError(f"{where}: it has no {error}; it is not a line of this tool") from None
    if [type(v) for v in (found.problem, found.index, found.text, found.finished)] != [str, int, str, bool]:
        raise ValueError(f"{where}: a value has the wrong type; it is not a line of this tool")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
