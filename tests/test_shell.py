"""The stored help: quick, and equal to what the real command line prints."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_r1.shell import TASKS, stored_help

ROOT = Path(__file__).parents[1]


@pytest.mark.integration
def test_help_is_what_the_command_line_prints_and_parsing_imports_no_vllm() -> None:
    # In a process of its own: the texts list all known subclasses, and tests define some. And jsonargparse executes
    # `if TYPE_CHECKING:` blocks to resolve types, so that even those must not name vLLM.
    code = (
        "import sys; sys.path.insert(0, 'tools'); import update_help; from parallel_r1.cli import CurriculumCLI; "
        "stale = [n for n, text in update_help.help_texts().items() if not update_help.is_current(n, text)]; "
        "CurriculumCLI(['fit', '--config', 'configs/quickstart.yaml']); "
        "print(stale, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["[] False"], f"run `uv run python tools/update_help.py`: {done.stderr}"


@pytest.mark.parametrize("task", ["", *TASKS])
def test_help_imports_nothing_heavy(task: str) -> None:
    code = f"import sys; from parallel_r1.shell import main; main({[*([task] if task else []), '--help']!r}); " + (
        "assert not {'torch', 'lightning', 'vllm'} & set(sys.modules)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"parallel_r1 {task}" in done.stdout
    assert time.perf_counter() - start < 4


def test_help_with_other_options_is_left_to_the_command_line() -> None:
    assert stored_help(["fit", "--config", "x.yaml", "--help"]) is None
    assert stored_help(["fit"]) is None
    assert stored_help(["fly", "--help"]) is None
