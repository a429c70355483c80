"""What the README says can be done: its commands parse, its files exist, CI runs its test command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from parallel_r1.cli import CurriculumCLI
from parallel_r1.data.datamodules import Problems
from parallel_r1.reward.rewards import Reward

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[list[str]]:
    lines = "\n".join(blocks(README, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


RUNS = [words[words.index("parallel_r1") + 1 :] for words in commands() if "parallel_r1" in words]


def test_two_commands_do_everything() -> None:
    assert ["uv", "run", "python", "-m", "parallel_r1", "fit", "--config", "configs/quickstart.yaml"] in commands()
    assert ["uv", "run", "pytest"] in commands()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "uv run pytest" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("args", RUNS, ids=" ".join)
def test_every_run_parses(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert CurriculumCLI(args).curriculum().stages


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.yaml)`", README)) - {"config.yaml"}))
def test_every_config_named_exists(name: str) -> None:
    assert (ROOT / "configs" / name).is_file()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_config_is_named(name: str) -> None:
    assert f"`{name}`" in README, "the table of configs leaves it out"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "tools").glob("*.py")))
def test_every_tool_is_named(name: str) -> None:
    assert f"tools/{name}" in README + CONTRIBUTING, "neither document shows it"


def test_the_example_stage_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = blocks(CONTRIBUTING, "python")[0]
    (tmp_path / "my_package.py").write_text(reward.replace("class Short", "class MyReward"))
    (tmp_path / "mine.yaml").write_text(blocks(README, "yaml")[0])
    monkeypatch.syspath_prepend(tmp_path)
    stage = CurriculumCLI(["fit", "--config", str(tmp_path / "mine.yaml")]).curriculum().stages["mine"]
    assert isinstance(stage.module.reward, Reward)
    assert isinstance(stage.data, Problems)
    assert (stage.data.problem_column, stage.data.answer_column) == ("question", "gold")
