"""Grade a file of answers: `python tools/grade.py FILE.jsonl > graded.jsonl`.

Each line of FILE is a JSON object with `id`, `gold` and `response`. Standard output gets the same objects, in order,
with `correct` (true or false) and `reason` set; standard error gets the progress. A row that cannot be read is named by
its line number and left out. Exit status: 0, or 2 where the file or any row of it could not be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from parallel_r1.reward.answers import require_gold
from parallel_r1.reward.grading import TIMEOUT_S, Pool

BATCH = 512


def read_row(line: bytes) -> dict[str, Any]:
    """The row on a line, with `gold` as text. Raises ValueError saying what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    if missing := [key for key in ("id", "gold", "response") if key not in row]:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    if isinstance(row["gold"], (int, float)) and not isinstance(row["gold"], bool):
        row["gold"] = str(row["gold"])
    for key in ("gold", "response"):
        if not isinstance(row[key], str):
            raise ValueError(f"its {key} is {type(row[key]).__name__}, not a string")
    require_gold(row["gold"], f"id {row['id']!r}")
    return row


def read_rows(lines: Iterable[bytes], bad: list[int]) -> Iterator[dict[str, Any]]:
    """The readable rows; the numbers of the other lines are told on standard error and added to `bad`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield read_row(line)
        except ValueError as error:
            bad.append(number)
            print(f"line {number}: {error}", file=sys.stderr)


def batches(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="rows {id, gold, response}, one a line")
    parser.add_argument("--workers", type=int, default=None, help="grading processes (default: one a CPU, at most 8)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="seconds an answer may take (default: %(default)g)"
    )
    options = parser.parse_args(arguments)
    try:
        pool = Pool(options.workers, options.timeout)
        lines = options.file.open("rb")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    bad: list[int] = []
    done = right = 0
    try:
        with lines:
            for batch in batches(read_rows(lines, bad), BATCH):
                verdicts = pool.grade([(row["gold"], row["response"]) for row in batch])
                for row, verdict in zip(batch, verdicts, strict=True):
                    print(json.dumps({**row, "correct": verdict.correct, "reason": verdict.reason}))
                done, right = done + len(batch), right + sum(verdict.correct for verdict in verdicts)
                sys.stdout.flush()
                print(f"{done} rows graded, {right} right", file=sys.stderr)
    except BrokenPipeError:  # whoever read the output has enough
        sys.stdout = None
        return 0
    except OSError as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        pool.close()
    if bad:
        print(f"{len(bad)} rows could not be read and were left out", file=sys.stderr)
    return 2 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
