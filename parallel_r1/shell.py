"""The first thing that runs: answer `--help` from a stored text, else hand over to the real command line.

Importing torch and Lightning takes longer than a reader's patience. The texts are what `cli` prints, written by
`tools/update_help.py`; a test fails when they differ.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HELP = Path(__file__).parent / "help"
TASKS = {
    "fit": "Train the stages of a curriculum that are not finished yet.",
    "validate": "Evaluate stages on their validation problems.",
    "test": "Measure a stage or any model on test problems, several samples each, and write a report.",
    "predict": "Answer problems with a stage or any model.",
}


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    text = stored_help(args)
    if text is not None:
        print(text, end="")
        return
    # as torchrun does: threads that spin on each other make small models many times slower on busy cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from parallel_r1.cli import main as run

    run(args)


def stored_help(args: list[str]) -> str | None:
    """The help text of `[task] --help`, or of no arguments at all; None for anything else."""
    words = [arg for arg in args if arg not in ("-h", "--help")]
    asked = len(words) < len(args) or not args
    if not asked or len(words) > 1:
        return None
    if not words:
        return (HELP / "main.txt").read_text()
    task = words[0]
    if task not in TASKS:
        return None
    # the tasks share their options: one text serves them all
    return (HELP / "task.txt").read_text().replace("{task}", task).replace("{purpose}", TASKS[task])
