"""Two commands on one folder: what may differ, what is refused with what text, and what `continue` and `restart` do."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel_r1.changes import differences, put_aside, settle, touched

CONFIG: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {"accelerator": "cpu", "enable_progress_bar": True},
    "policy": {"init": {"class_path": "TinyQwen3"}},
    "curriculum": {
        "root": "runs/x",
        "only": None,
        "stages": {
            "cold_start": {"module": {"lr": 0.1, "terms": [{"a": 1}]}, "trainer": {"max_steps": 5}},
            "easy": {"module": {"group_size": 4}, "trainer": {"max_steps": 3}},
            "hard": {"module": {"group_size": 4}, "trainer": {"max_steps": 3}},
        },
    },
}


def changed(**values: Any) -> dict[str, Any]:
    """CONFIG with some values replaced, by dotted path with `__` for dots."""
    config = deepcopy(CONFIG)
    for key, value in values.items():
        *path, last = key.split("__")
        part = config
        for name in path:
            part = part.setdefault(name, {})
        part[last] = value
    return config


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run whose cold_start is finished and whose easy is in progress; hard has not begun."""
    (tmp_path / "base").mkdir()
    (tmp_path / "stages/cold_start").mkdir(parents=True)
    (tmp_path / "stages/cold_start/stage.json").write_text("{}")
    (tmp_path / "stages/easy/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "tensorboard/easy").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    return tmp_path


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        changed(curriculum__only="easy"),
        changed(curriculum__root="elsewhere"),
        changed(curriculum__checkpoint_every=3),
        changed(evaluation__samples=16),
        changed(trainer__enable_progress_bar=False),
        changed(curriculum__stages__hard__module__group_size=8),
        changed(curriculum__stages__last={"trainer": {"max_steps": 1}}),
    ],
    ids=["none", "only", "root", "checkpoint_every", "evaluation", "bar", "a stage not begun", "a later stage"],
)
def test_what_touches_nothing_that_has_begun_is_allowed(root: Path, config: dict[str, Any]) -> None:
    assert settle(root, config, "error") == []


@pytest.mark.parametrize(
    ("config", "line", "again"),
    [
        (changed(seed_everything=2), "seed_everything: 1 -> 2", ["cold_start", "easy"]),
        (changed(policy__name="m"), 'policy.name: (not there) -> "m"', ["cold_start", "easy"]),
        (changed(trainer__accelerator="gpu"), 'trainer.accelerator: "cpu" -> "gpu"', ["cold_start", "easy"]),
        (
            changed(curriculum__stages__easy__module__group_size=8),
            "curriculum.stages.easy.module.group_size: 4 -> 8",
            ["easy"],
        ),
        (
            changed(curriculum__stages__cold_start__trainer__max_steps=9),
            "curriculum.stages.cold_start.trainer.max_steps: 5 -> 9",
            ["cold_start", "easy"],
        ),
        (
            changed(curriculum__stages__cold_start__module__terms=[{"a": 2}]),
            'curriculum.stages.cold_start.module.terms: [{"a": 1}] -> [{"a": 2}]',
            ["cold_start", "easy"],
        ),
    ],
)
def test_what_matters_is_refused_with_what_changed(
    root: Path, config: dict[str, Any], line: str, again: list[str]
) -> None:
    with pytest.raises(ValueError, match="the configuration is not the one") as error:
        settle(root, config, "error")
    text = str(error.value)
    assert f"\n  {line}\n" in text
    assert f"stage(s) {', '.join(again)} anew" in text
    for remedy in ("on_change=continue", "on_change=restart", "curriculum.root"):
        assert remedy in text
    assert touched(root, CONFIG, config)[1] == again


def test_a_stage_put_before_one_that_has_begun_is_refused(root: Path) -> None:
    config = deepcopy(CONFIG)
    stages = config["curriculum"]["stages"]
    config["curriculum"]["stages"] = {"cold_start": stages["cold_start"], "mid": {}, "easy": stages["easy"]}
    with pytest.raises(ValueError, match=r"those before easy\): cold_start -> cold_start, mid"):
        settle(root, config, "error")


def test_a_begun_stage_that_is_taken_out_is_refused(root: Path) -> None:
    config = deepcopy(CONFIG)
    del config["curriculum"]["stages"]["cold_start"]
    with pytest.raises(ValueError, match=r"curriculum.stages.cold_start.module.lr: 0.1 -> \(not there\)"):
        settle(root, config, "error")


def test_continue_goes_on_and_says_so(root: Path) -> None:
    (line,) = settle(root, changed(seed_everything=2), "continue")
    assert "holds from here on:\n  seed_everything: 1 -> 2" in line
    assert (root / "stages/easy/checkpoints/step-00000001").is_dir()


def test_restart_moves_the_touched_stages_out_of_the_way(root: Path) -> None:
    _, moved = settle(root, changed(curriculum__stages__easy__module__group_size=8), "restart")
    assert "stages/easy, tensorboard/easy" in moved
    assert not (root / "stages/easy").exists()
    assert (root / "aside/1/stages/easy/checkpoints/step-00000001").is_dir()
    assert (root / "aside/1/tensorboard/easy").is_dir()
    assert yaml.safe_load((root / "aside/1/config.yaml").read_text()) == CONFIG
    assert (root / "stages/cold_start/stage.json").is_file()
    assert (root / "base").is_dir()
    settle(root, changed(seed_everything=2), "restart")
    assert not (root / "base").exists()
    assert (root / "aside/2/base").is_dir()


def test_a_base_policy_alone_is_held_to_its_configuration_too(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    assert settle(tmp_path, changed(trainer__accelerator="gpu"), "error") == []
    with pytest.raises(ValueError, match="makes the base policy anew"):
        settle(tmp_path, changed(seed_everything=2), "error")


def test_a_folder_without_a_kept_configuration_is_new(tmp_path: Path) -> None:
    assert settle(tmp_path, CONFIG, "error") == []
    assert put_aside(tmp_path, ["easy"], base=True) == []
    assert not (tmp_path / "aside").exists()


def test_long_values_are_shortened() -> None:
    (change,) = differences({"a": "x"}, {"a": "y" * 1000})
    assert len(str(change)) < 160
