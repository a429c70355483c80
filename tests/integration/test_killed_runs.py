"""Runs that are killed, stopped or damaged go on exactly where they stood. `RESUME_KILLS=25` kills more than five."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from killing import STAGES, begun, campaign, differences, finish, start, weights

pytestmark = pytest.mark.integration
KILLS = int(os.environ.get("RESUME_KILLS", "5"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[list[str], list[str]]]]:
    folder = tmp_path_factory.mktemp("killed")
    return folder, campaign(folder, KILLS, "vllm", seed=int(os.environ.get("RESUME_SEED", "0")))


def test_a_killed_run_ends_as_the_undisturbed_one(killed) -> None:
    """Weights bit for bit, every metric, every step of TensorBoard once; real vLLM."""
    _, results = killed
    assert len(results) == KILLS
    assert not [found for found in results if found[1]]
    assert any("goes on from step" in line for kills, _ in results for line in kills), "none was killed inside a stage"


def test_nothing_is_left_of_the_checkpoints_of_finished_stages(killed) -> None:
    folder, _ = killed
    for stage in STAGES:
        names = {path.name for path in (folder / "run0" / "stages" / stage).iterdir()}
        assert names <= {"model", "stage.json", "rollouts"}


def wait_for(process: subprocess.Popen[str], root: Path, pattern: str) -> None:
    deadline = time.monotonic() + 300
    while not any(root.glob(pattern)):
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop(process: subprocess.Popen[str], signum: int) -> tuple[int, float, str]:
    """(status, seconds it took, output) of a run that is asked to stop."""
    asked = time.monotonic()
    process.send_signal(signum)
    out, _ = process.communicate(timeout=120)
    return process.returncode, time.monotonic() - asked, out


def test_sigterm_and_ctrl_c_save_and_the_same_command_goes_on(killed, tmp_path: Path) -> None:
    reference = killed[0] / "reference"
    process = start(tmp_path, "vllm")
    while not begun(tmp_path):  # in the start of the engine, or in the first validation
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(2.0)
    status, seconds, out = stop(process, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert seconds < 30
    assert "the same command goes on" in out
    assert "Traceback" not in out

    process = start(tmp_path, "vllm", "--curriculum.checkpoint_every=1000")
    wait_for(process, tmp_path, "stages/easy/rollouts/*")  # an iteration of the second stage is under way
    status, seconds, out = stop(process, signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert seconds < 30
    assert "Traceback" not in out
    assert list(tmp_path.glob("stages/easy/checkpoints/step-*")), "it was saved although no checkpoint was due"

    assert "stage easy goes on from step" in finish(tmp_path, "vllm")
    assert differences(reference, tmp_path) == []


def test_a_damaged_checkpoint_is_told_and_the_older_one_used(killed, tmp_path: Path) -> None:
    process = start(tmp_path, "transformers")
    wait_for(process, tmp_path, "stages/cold_start/checkpoints/step-00000003")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    *_, newest = sorted((tmp_path / "stages/cold_start/checkpoints").glob("step-*[0-9]"))
    with (newest / "rank-00000.pt").open("r+b") as file:
        file.truncate(1000)
    out = finish(tmp_path, "transformers", "--curriculum.only=cold_start")
    assert f"{newest.name} is damaged (rank-00000.pt has 1,000 bytes of" in out
    assert f"goes on from step {int(newest.name.removeprefix('step-')) - 1}" in out
    # supervised training does not depend on the engine
    model = "stages/cold_start/model/model.safetensors"
    assert (tmp_path / model).read_bytes() == weights(killed[0] / "reference")["cold_start"]


def two_ranks() -> list[str]:
    strategy = "--trainer.strategy"
    return [
        "--trainer.devices=2",
        f"{strategy}=lightning.pytorch.strategies.ModelParallelStrategy",
        f"{strategy}.data_parallel_size=2",
        f"{strategy}.tensor_parallel_size=1",
        f"{strategy}.process_group_backend=gloo",
        "--curriculum.only=[cold_start,easy]",
    ]


def test_two_ranks_under_fsdp2_stop_together_and_go_on_exactly(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    finish(whole, "transformers", *two_ranks())
    process = start(stopped, "transformers", *two_ranks())
    wait_for(process, stopped, "stages/cold_start/checkpoints/step-00000002")
    status, seconds, out = stop(process, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM, out[-3000:]
    assert seconds < 60
    saved = list(stopped.glob("stages/*/checkpoints/step-*"))
    assert saved
    assert all({path.name for path in folder.glob("rank-*")} == {"rank-00000.pt", "rank-00001.pt"} for folder in saved)
    assert "goes on from step" in finish(stopped, "transformers", *two_ranks())
    for stage in ("cold_start", "easy"):
        model = f"stages/{stage}/model/model.safetensors"
        assert (stopped / model).read_bytes() == (whole / model).read_bytes()
