"""Files that a kill or a power cut leaves whole: written beside their place, synced to disk, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""Suffix of what is being written; whatever bears it counts as absent and may be deleted."""


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. What UTF-8 cannot hold (lone surrogates, in a model's text) becomes `?`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + PARTIAL)
    with draft.open("w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def publish(draft: Path, folder: Path) -> None:
    """Put a finished folder in its place: all of it, or what was there before. An old folder there is replaced."""
    for path in sorted(draft.rglob("*")):
        sync(path)
    sync(draft)
    if folder.exists():
        old = folder.with_name(folder.name + ".replaced" + PARTIAL)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    draft.rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
