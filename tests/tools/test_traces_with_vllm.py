"""The trace pipeline against a real vLLM server on loopback, killed three times: the same rows as undisturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loading import TOOLS, load_tool

from parallel_r1.data.doors import make_problems
from parallel_r1.data.prompts import encode_prompt, load_template, named_prompt
from parallel_r1.policy import save_folder
from parallel_r1.tiny import TinyQwen3

pytestmark = pytest.mark.integration

PROBLEMS, CANDIDATES = 10, 8
tool = load_tool("generate_traces")


def demonstrations() -> list[tuple[str, str, str]]:
    """(question, answer, a parallel response) of a few easy problems."""
    found = make_problems("easy", "train", PROBLEMS, shares=(1.0, 0.0, 0.0))
    return [(p.question, p.answer, p.demonstration or "") for p in found]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that half remembers its problems: some of its samples are right, some are not."""
    model, tokenizer = TinyQwen3(induction_init=False).build(seed=0)
    plain = load_template("plain")
    rows = []
    for question, _, response in demonstrations():
        prompt = encode_prompt(tokenizer, plain, question)
        ids = [*prompt, *tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        rows.append((torch.tensor([ids]), torch.tensor([[-100] * len(prompt) + ids[len(prompt) :]])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(12 * PROBLEMS):
        ids, labels = rows[step % PROBLEMS]
        model(input_ids=ids, labels=labels).loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_folder(model, tokenizer, dict(model.state_dict()), folder, named_prompt("plain", "seen"))
    return folder


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # prompts are never split, so that a seed gives the same tokens whatever else is in the batch
    options = [
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"),
        *("--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048", "--distributed-executor-backend", "uni"),
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # with the executor `uni`: one process less to start
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def arguments(out: Path, url: str) -> list[str]:
    file = out.parent / "problems.jsonl"
    rows = [{"problem": question, "answer": answer} for question, answer, _ in demonstrations()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = ["--base-url", url, "--model", "tiny", "--api", "completions", "--prompt", "plain"]
    sampling = ["-k", str(CANDIDATES), "--max-tokens", "72", "--concurrency", "4", "--white-space", "keep"]
    extra = ["--extra", '{"skip_special_tokens": false, "spaces_between_special_tokens": false}']
    return [str(out), "--problems", str(file), *teacher, *sampling, *extra]


def test_killed_three_times_it_ends_with_the_same_rows(server: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert tool.main(arguments(whole, server)) == 0
    account = json.loads((whole / "yield.json").read_text())
    assert account["candidates"] == PROBLEMS * CANDIDATES
    assert 0 < account["kept"] < account["candidates"]

    raw, rng = cut / "raw.jsonl", random.Random(1)
    command = [sys.executable, str(TOOLS / "generate_traces.py"), *arguments(cut, server)]
    for kills in range(3):
        there = raw.read_bytes().count(b"\n") if raw.exists() else 0
        enough = there + rng.randint(2, 20)
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while run.poll() is None and (not raw.exists() or raw.read_bytes().count(b"\n") < enough):
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, f"it ended before kill {kills + 1}"
    assert 0 < raw.read_bytes().count(b"\n") - 1 < PROBLEMS * CANDIDATES
    assert tool.main(arguments(cut, server)) == 0

    for name in ("train.jsonl", "yield.json", "solve_rates.jsonl"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(raw.read_bytes().split(b"\n")) == sorted((whole / "raw.jsonl").read_bytes().split(b"\n"))
