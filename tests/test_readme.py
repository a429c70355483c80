"""What the README says can be done: its commands parse, its files exist, CI runs its test command."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import sys
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


TOOLS = [
    words[next(i for i, word in enumerate(words) if word.startswith("tools/")) :]
    for words in commands()
    if any(word.startswith("tools/") for word in words)
]
PROGRAMS = {"tensorboard", "vllm", "sbatch", "torchrun", "pytest", "ruff", "git"}
"""What else a line may start, after `uv run`; whose own options are not checked here."""


def test_two_commands_do_everything() -> None:
    assert ["uv", "run", "python", "-m", "parallel_r1", "fit", "--config", "configs/quickstart.yaml"] in commands()
    assert ["uv", "run", "pytest"] in commands()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "uv run pytest" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.integration  # a second or two a command
@pytest.mark.parametrize("args", RUNS, ids=" ".join)
def test_every_run_parses(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cli = CurriculumCLI(args)
    assert cli.curriculum().stages or cli.options.evaluation.model


class _Parsed(Exception):  # noqa: N818 - an outcome
    pass


@pytest.mark.integration
@pytest.mark.parametrize("words", TOOLS, ids=" ".join)
def test_every_tool_command_parses(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, args: list[str] | None = None, namespace: None = None) -> None:
        parse(self, args, namespace)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", words[: words.index(">")] if ">" in words else words)
    monkeypatch.chdir(ROOT)
    with pytest.raises(_Parsed):
        runpy.run_path(words[0], run_name="__main__")


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_of_a_known_kind(words: list[str]) -> None:
    while words[0] in ("uv", "run", "--no-sync") or "=" in words[0]:
        words = words[1:]
    known = "parallel_r1" in words or any(w.startswith("tools/") for w in words) or words[0] in {*PROGRAMS, "sync"}
    assert known, "nothing checks that this command exists: make the test know it"


@pytest.mark.parametrize("code", blocks(README, "python") + blocks(CONTRIBUTING, "python"))
def test_every_python_block_imports_what_exists(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.yaml)`", README)) - {"config.yaml"}))
def test_every_config_named_exists(name: str) -> None:
    assert (ROOT / "configs" / name).is_file()


@pytest.mark.parametrize(
    "name",
    sorted(path.name + "/" * path.is_dir() for path in (ROOT / "configs").iterdir()),  # a folder goes by its name
)
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
