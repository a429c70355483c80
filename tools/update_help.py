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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a stored text is out of date")
    check = parser.parse_args().check
    HELP.mkdir(exist_ok=True)
    stale = [name for name, text in help_texts().items() if not is_current(name, text)]
    for name in stale:
        print(f"{name} is out of date")
        if not check:
            (HELP / name).write_text(help_texts()[name])
    raise SystemExit(1 if check and stale else 0)


def is_current(name: str, text: str) -> bool:
    return (HELP / name).is_file() and (HELP / name).read_text() == text


if __name__ == "__main__":
    main()
