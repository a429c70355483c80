"""The stored help: quick, and equal to what the real command line prints."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_r1.shell import TASKS, stored_help

ROOT = Path(__file__).parents[1]


def test_help_is_what_the_command_line_prints() -> None:
    # in a process of its own: the texts list all known subclasses, and tests define some
    command = [sys.executable, "tools/update_help.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"run `uv run python tools/update_help.py`: {done.stdout}{done.stderr}"


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


def test_parsing_a_config_imports_no_vllm() -> None:
    # jsonargparse resolves types by executing `if TYPE_CHECKING:` blocks, so even those must not name vLLM
    code = (
        "import sys; from parallel_r1.cli import CurriculumCLI; "
        "CurriculumCLI(['fit', '--config', 'configs/quickstart.yaml']); assert 'vllm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
