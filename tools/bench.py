"""Measure what training costs. CPU-seconds are of all threads; lower is better.

    python tools/bench.py rl --against trl --json    an RL iteration, beside TRL's GRPOTrainer (uv sync --group bench)
    python tools/bench.py growth --json              how that cost grows with group, length, paths, vocabulary, rows
    python tools/bench.py update --json              one update: packed with shared prompts, against padded rows
    python tools/bench.py update --case qwen3_0.6b --device cuda --dtype bfloat16 --variants packed packed_flex padded

Every measurement is a process of its own (peaks never fall), variants take turns (so that a busy machine hurts all
alike), and the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from benchmarks import growth, rl, update
from benchmarks.common import alternate, medians, run_child


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = top.add_subparsers(dest="what", required=True)
    for name, part, text in (
        ("rl", rl, "whole iterations of RL"),
        ("growth", growth, "how the cost grows"),
        ("update", update, "one optimizer step of RL"),
    ):
        sub = kinds.add_parser(
            name, help=text, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        part.add_options(sub)
        sub.add_argument("--repeats", type=int, default=3, help="processes a variant (default 3)")
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.add_argument("--child", help=argparse.SUPPRESS)  # the variant that this process measures
    return top


PARTS = {"rl": rl, "growth": growth, "update": update}


def compare(case: str, args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Every variant's medians and spread, and the ratios of each to the last one named (the baseline)."""
    part = PARTS[args.what]
    names = part.variants(args, case)

    def run(name: str) -> dict[str, float]:
        return run_child(Path(__file__), [*argv, "--case", case, "--child", name], f"{case}/{name}")

    runs = alternate(names, args.repeats, run)
    out: dict[str, Any] = {name: medians(found) for name, found in runs.items()}
    for name, found in runs.items():
        out[name]["cpu_s_spread"] = [round(f(run["cpu_s"] for run in found), 3) for f in (min, max)]
    base = out[names[-1]]
    for name in names[:-1]:
        shared = [key for key in part.COMPARED if base.get(key)]
        out[f"{name} / {names[-1]}"] = {key: round(out[name][key] / base[key], 3) for key in shared}
    return out


def main() -> None:
    args, argv = parser().parse_args(), sys.argv[1:]
    part = PARTS[args.what]
    if args.child:
        print(json.dumps(part.measure(part.CASES[args.case[0]], args, args.child)))
        return
    results = {case: compare(case, args, argv) for case in args.case}
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for case, result in results.items():
        print(case)
        for variant, row in result.items():
            shown = (f"{k}={v:.4g}" if isinstance(v, float | int) else f"{k}={v}" for k, v in row.items())
            print(f"  {variant:22}", "  ".join(shown))


if __name__ == "__main__":
    main()
