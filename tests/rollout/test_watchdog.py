"""An engine that hangs: what the user sees, and the status the process ends with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_r1.rollout.watchdog import HUNG, Watchdog

ROOT = Path(__file__).parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_step_that_never_ends_ends_the_process_with_a_message_and_where_it_stood() -> None:
    done = run(
        "import time\n"
        "from parallel_r1.rollout.vllm_runtime import RequestLoop\n"
        "class Hung:\n"
        "    def add_request(self, *a): pass\n"
        "    def step(self):\n"
        "        time.sleep(1000)\n"
        "with RequestLoop(Hung(), timeout_s=0.4) as loop:\n"
        "    loop.submit((1,), None, print)\n"
        "    loop.run()\n"
    )
    assert done.returncode == HUNG
    assert "error: the engine made no progress for 0.4 s (engine.init_args.timeout_s)" in done.stderr
    assert "Run the same command again: it goes on from the last checkpoint" in done.stderr
    assert "in step" in done.stderr, "the stack of the hung call is shown"


def test_a_hang_that_holds_the_interpreter_ends_too() -> None:
    done = run(
        "import re\n"
        "import parallel_r1.rollout.watchdog as watchdog\n"
        "watchdog._GRACE_S = 0.5\n"
        "with watchdog.Watchdog('the engine', 0.5):\n"
        "    re.match('(a+)+b', 'a' * 64)\n"  # one call into C, for ages
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_progress_keeps_it_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with Watchdog("the engine", 0.3) as watchdog:
        for _ in range(6):
            time.sleep(0.1)
            watchdog.beat()
    time.sleep(0.5)
    with Watchdog("the engine", None):
        time.sleep(0.1)
    assert capfd.readouterr().err == ""
