"""`configs/trainer`: each stacks on a recipe, and its numbers agree, also with those of the Slurm script."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from parallel_r1.cli import CurriculumCLI

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs" / "trainer"
SLURM = FOLDER / "slurm.sh"


def parsed(*arguments: str):
    cli = CurriculumCLI(["fit", *arguments])
    cli.curriculum()
    return cli.config["fit"]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
@pytest.mark.parametrize("recipe", ["quickstart.yaml", "seen.yaml"])
def test_it_stacks_on_a_recipe(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = parsed("--config", f"configs/{recipe}", "--config", f"configs/trainer/{name}")
    trainer = config.trainer
    ranks = int(trainer.devices) * int(trainer.num_nodes or 1)
    strategy = trainer.strategy
    if ranks == 1:
        assert strategy == "auto"
    else:
        assert strategy.class_path.endswith("ModelParallelStrategy")
        assert strategy.init_args.data_parallel_size == ranks, "each rank holds its own share of the weights"
        assert strategy.init_args.tensor_parallel_size == 1
    assert config.engine.class_path == "parallel_r1.rollout.vllm_engine.VLLMEngine"


def test_the_slurm_script_starts_what_its_config_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    subprocess.run(["bash", "-n", SLURM], check=True)
    text = SLURM.read_text()
    line = next(line for line in text.splitlines() if "-m parallel_r1 fit" in line)
    words = shlex.split(line)
    trainer = parsed(*words[words.index("fit") + 1 :]).trainer
    asked = {key: int(value) for key, value in re.findall(r"#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE)}
    assert asked["nodes"] == trainer.num_nodes
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == trainer.devices
