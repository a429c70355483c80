"""Write the stored help texts anew: `uv run python tools/update_help.py`. Needed after any change of an option."""

from __future__ import annotations

import argparse
import contextlib
import io
import os

from parallel_r1.shell import HELP, TASKS


def live_help(*args: str) -> str:
    """What the real command line prints for `args --help`, 120 columns wide."""
    os.environ["COLUMNS"] = "120"
    from parallel_r1.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*args, "--help"])
    return out.getvalue()


def help_texts() -> dict[str, str]:
    """The stored texts by file name, as they should be."""
    task = live_help("fit").replace(TASKS["fit"], "{purpose}").replace("parallel_r1 fit", "parallel_r1 {task}")
    return {"main.txt": live_help(), "task.txt": task}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    HELP.mkdir(exist_ok=True)
    for name, text in help_texts().items():
        (HELP / name).write_text(text)
        print(name)


if __name__ == "__main__":
    main()
