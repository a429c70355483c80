"""One device, DDP and FSDP2 over two gloo ranks: the same module code, the same weights; ranks are processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import strategies
import torch
from conftest import write_tiny_model

pytestmark = pytest.mark.integration  # starts processes

SCRIPT, ROOT = Path(strategies.__file__), Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = write_tiny_model(tmp_path_factory.mktemp("strategies"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = {}
    for kind in ("one", "ddp", "fsdp"):
        command = [sys.executable, str(SCRIPT), kind, str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=400)
        assert done.returncode == 0, done.stderr[-4000:]
        out[kind] = torch.load(folder / f"{kind}.pt", weights_only=True)
    return out


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight, relative to the largest of its tensor."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", list(strategies.CASES))
def test_two_ranks_end_with_the_weights_of_one(results: dict, kind: str, case: str) -> None:
    one, two = results["one"][case], results[kind][case]
    low = "bf16" in case
    assert distance(two["weights"], one["weights"]) <= (2e-2 if low else 1e-5)
    assert two["logged"].keys() == one["logged"].keys()
    for key in ("policy/loss", "policy/grad_norm", "reward/total/mean", "rollout/groups", "rollout/dropped_groups"):
        if key in one["logged"]:
            tolerance = 5e-2 if low else 1e-4
            assert two["logged"][key] == pytest.approx(one["logged"][key], rel=tolerance, abs=1e-6), key


def test_the_cases_are_what_they_say(results: dict) -> None:
    logged = {case: found["logged"] for case, found in results["one"].items()}
    assert results["one"]["rl, dropped groups"]["dropped"] > 0
    assert logged["rl, several steps and a KL"]["policy/reference_kl"] > 0
    start = results["one"]["rl, uneven shares"]["weights"]
    assert distance(start, results["one"]["sft, uneven shares"]["weights"]) > 1e-3, "training moves weights visibly"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_loss_that_is_no_number_on_one_rank_is_skipped_on_both(results: dict, kind: str) -> None:
    two = results[kind]["no number on rank 1"]
    assert two["logged"]["policy/skipped_steps"] == 1
    assert all(weight.isfinite().all() for weight in two["weights"].values())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_engine_that_fails_on_one_rank_changes_nothing(results: dict, kind: str) -> None:
    two = results[kind]["engine fails on rank 1"]
    assert two["starts"] == 2, "both ranks build theirs anew, since that may be a collective"
    assert distance(two["weights"], results["one"]["rl, uneven shares"]["weights"]) <= 1e-5


def test_a_rank_out_of_memory_has_both_repeat_the_step(results: dict) -> None:
    two = results["ddp"]["out of memory on rank 1"]
    assert two["budget"] < 20.5
    assert distance(two["weights"], results["one"]["rl, uneven shares"]["weights"]) <= 1e-5
