"""Compare two reports of `test`, problem by problem.

    python tools/compare.py A/report.json B/report.json              each mode with itself
    python tools/compare.py R/report.json R/report.json --modes sequential plain    one mode with another

Shows B - A of every metric over the problems that both have: the difference with its 95 % interval (paired bootstrap
over problems) and a two-sided p-value (sign-flip test; exact for few problems). Exit status: 0, or 2 for files that
cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel_r1.evaluation.paired import Difference, compare

HEAD = ("set", "mode", "metric", "n", "A", "B", "B - A", "95 % interval", "p", "better", "worse")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("a", metavar="A", type=Path, help="a report.json, or the folder that holds one")
    out.add_argument("b", metavar="B", type=Path, help="another, or the same with --modes")
    out.add_argument("--modes", nargs=2, metavar=("OF_A", "OF_B"), help="compare one mode of A with one of B")
    out.add_argument("--resamples", type=int, default=10_000, help="of the bootstrap (default: %(default)s)")
    form = out.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--markdown", action="store_true", help="a Markdown table")
    return out


def read_report(path: Path) -> dict[str, Any]:
    """A report. Raises FileNotFoundError or ValueError, naming the file."""
    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}; run `test`, which writes it")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from None


def cells(d: Difference) -> tuple[str, ...]:
    form = ".1f" if d.metric.endswith("_tokens") else ".4f"
    interval = "" if d.low is None else f"[{d.low:+{form}}, {d.high:+{form}}]"
    shown = (f"{d.a:{form}}", f"{d.b:{form}}", f"{d.difference:+{form}}", interval, f"{d.p:.2g}")
    return (d.tier, d.mode, d.metric, str(d.n), *shown, str(d.better), str(d.worse))


def as_text(found: Sequence[Difference]) -> str:
    rows = [HEAD, *map(cells, found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    left = (0, 1, 2)
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(found: Sequence[Difference]) -> str:
    rows = [HEAD, tuple("---" if i < 3 else "---:" for i in range(len(HEAD))), *map(cells, found)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.resamples < 100:
        parser().error(f"--resamples {options.resamples}: give 100 or more")
    try:
        modes = tuple(options.modes) if options.modes else None
        found = compare(read_report(options.a), read_report(options.b), modes, options.resamples)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        named = {"a": str(options.a), "b": str(options.b), "differences": [d.as_json() for d in found]}
        print(json.dumps(named, indent=2))
    elif options.markdown:
        print(as_markdown(found))
    else:
        print(f"A {options.a}\nB {options.b}\n\n{as_text(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
