"""tools/generate_traces.py as a user runs it: killed at random, started again, given wrong things."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loading import TOOLS, load_tool
from stub_server import Server, completion

from parallel_r1.data.datamodules import ParallelGSM8K
from parallel_r1.structure.grammar import render_block

tool = load_tool("generate_traces")
PROBLEMS = 24


def reply(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A teacher whose answer depends on prompt and seed alone: good, wrong, cut or plain."""
    time.sleep(0.05)
    question = body["messages"][0]["content"].split("Problem: ")[1].split("\n")[0]
    a, b = (int(n) for n in question.removesuffix("?").split(" + "))
    kind = body["seed"] % 6
    answer = a + b + (kind == 1)
    block = "" if kind == 2 else render_block([f"{a} and {b}", f"way {body['seed']}"], "both agree")
    return completion(f"So:\n{block}\nFinal Answer: {answer}", "length" if kind == 3 else "stop")


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server(reply)
    yield one
    one.http.shutdown()
    one.http.server_close()


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "problems.jsonl"
    rows = [{"question": f"{i} + {i * i}?", "answer": f"so\n#### {i + i * i}"} for i in range(PROBLEMS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(out: Path, problems: Path, server: Server, *more: str) -> list[str]:
    source = ["--problems", str(problems), "--source", "gsm8k", "--base-url", server.url, "--model", "stub"]
    return [str(out), *source, "-k", "4", "--concurrency", "4", *more]


def lines_of(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_run_that_was_killed_three_times_ends_like_one_that_was_not(
    tmp_path: Path, problems: Path, server: Server
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert tool.main(arguments(whole, problems, server)) == 0
    assert len(server.asked) == 4 * PROBLEMS

    server.asked.clear()
    raw, rng = cut / "raw.jsonl", random.Random(0)
    command = [sys.executable, str(TOOLS / "generate_traces.py"), *arguments(cut, problems, server)]
    for _ in range(3):
        enough, deadline = lines_of(raw) + rng.randint(2, 25), time.monotonic() + 60
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while lines_of(raw) < enough and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, "it ended before it was killed"
        with raw.open("ab") as file:  # what a kill in the middle of a write leaves
            file.write(b'{"problem": "half a li')
    assert not (cut / "train.jsonl").exists()
    done = lines_of(raw) - 1
    assert 6 <= done < 4 * PROBLEMS
    server.settle()
    server.asked.clear()
    assert tool.main(arguments(cut, problems, server)) == 0

    assert len(server.asked) == 4 * PROBLEMS - done, "a candidate that was there was asked for again"
    for name in ("train.jsonl", "yield.json", "solve_rates.jsonl"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert sorted((cut / "raw.jsonl").read_bytes().split(b"\n")) == sorted(
        (whole / "raw.jsonl").read_bytes().split(b"\n")
    )


def test_what_it_writes_is_accounted_for_and_can_be_trained_on(
    tmp_path: Path, problems: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert tool.main(arguments(out, problems, server)) == 0
    said = capsys.readouterr().out
    account = json.loads((out / "yield.json").read_text())
    assert account["candidates"] == 96 == account["kept"] + sum(account["left_out"].values())
    assert set(account["left_out"]) == {
        "cut by the length limit",
        "no block",
        "wrong final answer",
        "good, but beyond 1 a problem",
    }
    assert account["settings"]["model"] == "stub"
    assert f"{account['left_out']['no block']:>8,} left out" in said

    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"problem", "text", "ground_truth"}] * account["kept"]
    data = ParallelGSM8K(path=str(out), val_size=0)
    assert len(data.split("train")) == account["kept"]
    assert data.reports[0].rejected == {}

    rates = [json.loads(line) for line in (out / "solve_rates.jsonl").read_text().splitlines()]
    assert [rate["tried"] for rate in rates] == [4] * PROBLEMS
    wrong = sum(account["left_out"][why] for why in ("wrong final answer", "cut by the length limit"))
    assert sum(rate["solved"] for rate in rates) == 96 - wrong

    # more candidates later: those of before stay, and nothing else about the teacher may change
    server.asked.clear()
    assert tool.main(arguments(out, problems, server, "-k", "5")) == 0
    assert len(server.asked) == PROBLEMS
    assert tool.main(arguments(out, problems, server, "--temperature", "0.5")) == 2
    assert "other settings (temperature was 1.0, now 0.5)" in capsys.readouterr().err


def test_rollouts_become_traces_as_they_were_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = f"{render_block([' one', ' two'], ' three')}\nFinal Answer: 3"
    rows = [
        {"question": "1 + 2", "response": good.replace("3", "4"), "answer": "3", "reward": -1},
        {"question": "1 + 2", "response": good, "answer": "3", "reward": 1},
        {"question": "2 + 2", "response": "Final Answer: 4", "answer": "4"},
    ]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tool.main([str(tmp_path / "out"), "--from-rollouts", str(file)]) == 0
    written = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert written == [{"problem": "1 + 2", "text": good, "ground_truth": "3"}]
    assert tool.main([str(tmp_path / "out"), "--from-rollouts", str(file), "--white-space", "canonical"]) == 0
    assert "<Path>\\none\\n</Path>" in (tmp_path / "out" / "train.jsonl").read_text()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ([], "give --problems and --model, or --from-rollouts"),
        (["--problems", "{problems}", "--model", "m", "-k", "0"], "'0': give a whole number of 1 or more"),
        (["--problems", "{problems}", "--model", "m", "--extra", "[1]"], "'[1]' is no JSON object"),
        (["--problems", "{tmp}/no.jsonl", "--model", "m"], "no data file or folder"),
        (["--problems", "{problems}", "--model", "m"], "problems.jsonl, row 1: no column 'problem'"),
        (["--problems", "{problems}", "--source", "gsm8k", "--model", "{tmp}"], "no config.json there"),
        (
            ["--problems", "{problems}", "--source", "gsm8k", "--model", "m", "--base-url", "x"],
            "no address of a server",
        ),
        (["--problems", "{problems}", "--source", "gsm8k", "--model", "{tmp}", "--prompt", "no"], "no config.json"),
        (["--from-rollouts", "{problems}"], "no column 'response' or 'text'"),
    ],
)
def test_a_mistake_is_one_message(
    tmp_path: Path, problems: Path, more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(tmp=tmp_path, problems=problems) for argument in more]
    try:
        status = tool.main([str(tmp_path / "out"), *given])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_down_ends_in_one_message(
    tmp_path: Path, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--problems", str(problems), "--source", "gsm8k", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    assert tool.main([str(tmp_path / "out"), *source, "--tries", "1"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith("error: http://127.0.0.1:9/v1 gave no answer in 1 tries")
    assert said[-1] == "what was written is kept: start the same command again to go on"
