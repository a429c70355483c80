"""What a grading worker may not do once it is ready, tried by hostile code inside a real worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# stands in for the comparison of answers: it runs what the answer says, as a parser fooled into `eval` would
WORKER = """
import sys
import parallel_r1.reward.answers as answers

def judge(gold, found, same):
    exec(found.answers[0], {})
    return answers.Verdict(True, "")

answers.judge = judge
from parallel_r1.reward import worker
sys.argv = ["worker", str(4 << 30)]
worker.main()
"""

ATTACKS = {
    "socket": "import socket; socket.socket()",
    "connection": "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
    "name": "import socket; socket.getaddrinfo('localhost', 80)",
    "url": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
    "write": "open('TARGET/new', 'w').write('x')",
    "append": "open('TARGET/old', 'a').write('x')",
    "low-level write": "import os; os.open('TARGET/new', os.O_WRONLY | os.O_CREAT)",
    "read": "open('TARGET/old').read()",
    "environment of the parent": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "list": "import os; os.listdir('TARGET')",
    "remove": "import os; os.remove('TARGET/old')",
    "rename": "import os; os.rename('TARGET/old', 'TARGET/new')",
    "folder": "import os; os.mkdir('TARGET/new')",
    "shell": "import os; os.system('touch TARGET/new')",
    "process": "import subprocess; subprocess.run(['touch', 'TARGET/new'])",
    "fork": "import os; os.fork()",
    "exec": "import os; os.execv('/bin/sh', ['sh', '-c', 'touch TARGET/new'])",
    "native code": "import ctypes; ctypes.CDLL(None).system(b'touch TARGET/new')",
    "kill": "import os; os.kill(os.getppid(), 9)",
}


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list], Path]:
    """What the worker answers to each attack, all in one worker; and the folder that they aim at."""
    target = tmp_path_factory.mktemp("target")
    (target / "old").write_text("secret")
    lines = [json.dumps([20.0, f"gold {i}", [code.replace("TARGET", str(target))], "line"])
             for i, code in enumerate([*ATTACKS.values(), "assert 1 + 1 == 2"])]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input="\n".join(lines) + "\n",
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    ready, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ready == ["ready"], done
    assert len(answers) == len(lines), done
    return dict(zip([*ATTACKS, "harmless"], answers, strict=True)), target


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_worker_refuses(replies: tuple[dict, Path], attack: str) -> None:
    verdict, reason = replies[0][attack]
    assert not verdict
    assert reason in ("cannot be compared (PermissionError)", "cannot be compared (URLError)"), reason


def test_it_did_not_happen_either(replies: tuple[dict, Path]) -> None:
    answers, target = replies
    assert [path.name for path in target.iterdir()] == ["old"]
    assert (target / "old").read_text() == "secret"
    assert answers["harmless"][0], "the worker survived all of it and still compares"


def test_the_kernel_refuses_a_file_that_grows_whatever_python_says(tmp_path: Path) -> None:
    """A descriptor from before the lock, which no hook sees."""
    code = (
        "import os, sys; file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT);"
        "from parallel_r1.reward.sandbox import lock_down; lock_down(); os.write(file, b'x')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "File too large" in done.stderr
    assert (tmp_path / "file").stat().st_size == 0


def test_a_worker_sees_nothing_of_the_environment_and_imports_nothing_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parallel_r1.reward.grading import Pool

    (tmp_path / "sympy.py").write_text("raise SystemExit('imported from the folder of the run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "a secret")
    pool = Pool(workers=1, timeout_s=60)
    try:
        assert pool.grade([("x^2-1", "Final Answer: $(x-1)(x+1)$")])[0].correct
        (pid,) = pool.pids
        if Path(f"/proc/{pid}").is_dir():
            assert b"HF_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")
    finally:
        pool.close()
