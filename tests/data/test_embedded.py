"""The DataModule of the embedded task."""

from __future__ import annotations

from typing import Any

import pytest

from parallel_r1.data.doors import split_of
from parallel_r1.data.embedded import EmbeddedTask


def small(**arguments: Any) -> EmbeddedTask:
    return EmbeddedTask(**{"train": {"easy": 30, "hard": 10}, "eval_size": 12, "seed": 0} | arguments)


def test_train_holds_the_sizes_asked_for() -> None:
    train = small().split("train")
    assert [problem.tier for problem in train].count("easy") == 30
    assert [problem.tier for problem in train].count("hard") == 10


@pytest.mark.parametrize("split", ["val", "test", "predict"])
def test_evaluation_splits_hold_every_tier(split: str) -> None:
    problems = small(eval_tiers=["hard", "harder"]).split(split)
    assert [problem.tier for problem in problems] == ["hard"] * 12 + ["harder"] * 12
    assert all(problem.demonstration for problem in problems)


def test_splits_are_disjoint_whatever_the_seeds() -> None:
    found: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for seed in range(3):
        for split, ids in found.items():
            problems = small(task_seed=seed, seed=10 - seed).split(split)
            assert all(split_of(problem.id) == split for problem in problems)
            ids |= {problem.id for problem in problems}
    assert not found["train"] & found["val"]
    assert not found["train"] & found["test"]
    assert not found["val"] & found["test"]


def test_predict_reads_the_test_problems() -> None:
    task = small()
    assert task.split("predict") == task.split("test")


def test_the_problems_depend_on_the_seed_of_the_task_not_of_the_run() -> None:
    assert small(seed=1).split("train") == small(seed=2).split("train")
    assert small(task_seed=1).split("val") != small(task_seed=2).split("val")
    assert small(seed=1).batch(0) != small(seed=2).batch(0)  # the run's seed orders them


def test_shares_become_styles() -> None:
    streams = small(parallel_share=0.0).split("train")
    assert all("<Parallel>" not in problem.demonstration for problem in streams)
    late = small(parallel_share=0.0, late_share=1.0).split("train")
    assert all(problem.demonstration.index("<Parallel>") > 0 for problem in late)
    blocks = small(parallel_share=1.0, doors=3).split("train")
    assert all(problem.demonstration.startswith("<Parallel>") for problem in blocks)
    assert all(problem.demonstration.count("<Path>") == 3 for problem in blocks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": {"esay": 10}}, "no tier 'esay'; choose from easy, hard, harder"),
        ({"eval_tiers": ["hardest"]}, "no tier 'hardest'"),
        ({"doors": 4}, "doors=4: choose 2 or 3"),
        ({"doors": 3, "train": {"harder": 10}}, "tier 'harder' has too few room names for doors=3; choose 2"),
        ({"parallel_share": 0.8, "late_share": 0.3}, "must be shares of one whole"),
        ({"late_share": -0.1}, "must be shares of one whole"),
    ],
)
def test_mistakes_are_named_before_anything_is_generated(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**arguments)


@pytest.mark.parametrize("split", ["val", "test"])
def test_every_style_of_demonstrations_is_evaluated_on_the_same_problems(split: str) -> None:
    usual = [problem.question for problem in small().split(split)]
    for shares in ({"parallel_share": 0.0}, {"parallel_share": 0.4, "late_share": 0.4}):
        assert [problem.question for problem in small(**shares).split(split)] == usual
