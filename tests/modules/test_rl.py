"""The order of an RL iteration, as the engine sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_r1.cli import main
from parallel_r1.evaluation.row_files import row_files, saved_rows
from parallel_r1.rollout.transformers_engine import TransformersEngine

ROOT = Path(__file__).parents[2]


def test_the_engine_sleeps_between_a_rollout_and_the_next_sync(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def recorded(name: str):
        real = getattr(TransformersEngine, name)

        def call(self, *args):
            calls.append(name)
            return real(self, *args)

        return call

    for name in ("sync", "generate", "sleep"):
        monkeypatch.setattr(TransformersEngine, name, recorded(name))
    main(
        [
            "fit",
            f"--config={ROOT}/configs/debug.yaml",
            f"--curriculum.root={tmp_path}/run",
            "--engine=parallel_r1.rollout.transformers_engine.TransformersEngine",
            "--curriculum.only=easy",
            "--curriculum.stages.easy.init_from=base",
            "--curriculum.stages.easy.trainer.max_steps=2",
        ]
    )
    rows = [row for file in row_files(tmp_path / "run/stages/easy/rollouts") for row in saved_rows(file)]
    assert [(row["iteration"], row["group"], row["sample"]) for row in rows] == [
        (i, p, g) for i in range(2) for p in range(2) for g in range(4)
    ]
    assert all(row["reward"] == row["terms"]["gate"] if "gate" in row["terms"] else row["terms"] for row in rows)
    assert all(len(row["tokens"]) == len(row["logprobs"]) for row in rows)
    # the evaluation before, two iterations, the evaluation after: the update has the memory to itself
    assert calls == ["sync", "generate", "sleep"] * 4
