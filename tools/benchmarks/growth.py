"""`bench.py growth`: how the cost of an iteration grows, one size at a time, and that of starting on many rows.

From 2 problems x 8 responses of 128 tokens, one of these is varied: the group size (one alone teaches nothing: there
is no update), the response length, the paths of the block that every response opens, the vocabulary. `rows` is the time
and the memory that a JSONL file of so many problems takes until training could start.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import rl
from benchmarks.common import peak_bytes, resident_bytes

COMPARED = ()
BASE = rl.Case(2, 8, 128)


@dataclass(frozen=True)
class Rows:
    """A data set of so many rows."""

    rows: int


CASES: dict[str, rl.Case | Rows] = {
    **{f"group_size={n}": replace(BASE, group_size=n) for n in (1, 2, 4, 8, 16)},
    **{f"length={n}": replace(BASE, max_tokens=n) for n in (64, 128, 256, 512, 1024)},
    **{f"paths={n}": replace(BASE, paths=n) for n in (2, 4, 8)},
    **{f"vocabulary={n}": replace(BASE, vocabulary=n) for n in (1_000, 10_000, 50_000, 150_000)},
    **{f"rows={n}": Rows(n) for n in (1_000, 10_000, 100_000, 1_000_000)},
}


def add_options(growth: argparse.ArgumentParser) -> None:
    growth.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    growth.add_argument("--iterations", type=int, default=2, help="iterations a process measures (default 2)")


def variants(args: argparse.Namespace, case: str) -> list[str]:
    return ["ours"]


def measure(case: rl.Case | Rows, args: argparse.Namespace, variant: str) -> dict[str, float]:
    return start_on(case.rows) if isinstance(case, Rows) else rl.measure(case, args, "ours_vllm")


def start_on(rows: int) -> dict[str, float]:
    """Read a file of distinct problems, hold some out, draw the first batch."""
    from parallel_r1.data.datamodules import Problems

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problems.jsonl"
        with path.open("w") as file:
            for i in range(rows):
                row = {"problem": f"Joy has {i} coins and finds {i % 97} more. How many has she now?", "answer": str(i)}
                file.write(json.dumps(row) + "\n")
        data = Problems(str(path), seed=0)
        before, cpu, wall = resident_bytes(), time.process_time(), time.perf_counter()
        data.check("fit")
        data.batch(0)
        seconds = time.perf_counter() - wall
        return {"cpu_s": time.process_time() - cpu, "wall_s": seconds, "peak_mb": (peak_bytes() - before) / 1e6}
