"""Settings of generation, and which of its two doors a responder takes into an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_r1.data.doors import make_problems
from parallel_r1.modules.responder import Generation, Responder
from parallel_r1.policy import PolicySource, load_policy
from parallel_r1.rollout.engine import Branching, Request, RolloutEngine, Sampling
from parallel_r1.types import Rollout

UNSEEN = Generation(structure="unseen", prompt="plain", max_tokens=60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": 1}, r"generation.paths=1: give a number from 2 on, or \[fewest, most\]"),
        ({"paths": [3, 2]}, r"generation.paths=\[3, 2\]"),
        ({"paths": [2]}, r"generation.paths=\[2\]"),
        ({"max_blocks": 0}, "generation.max_blocks=0: give 1 or more"),
        ({"max_path_tokens": 0}, "generation.max_path_tokens=0: give 1 or more, or null"),
        ({"max_summary_tokens": -1}, "generation.max_summary_tokens=-1"),
        ({"paths": [2, 4], "max_path_tokens": 12}, "generation.max_tokens=60: one block of 4 paths .* takes up to 62"),
    ],
)
def test_settings_that_never_work_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(UNSEEN, **change).check()
    replace(UNSEEN, structure="seen", **change).check()  # where paths are not forked, they mean nothing


def test_settings_that_work() -> None:
    for change in ({}, {"paths": [2, 5]}, {"max_path_tokens": 20, "max_summary_tokens": 9}, {"max_tokens": 12}):
        replace(UNSEEN, **change).check()


def test_what_an_engine_is_started_for() -> None:
    assert Generation().branching is None
    assert Generation(structure="sequential").branching is None
    assert replace(UNSEEN, positions="index").branching == "index"


class Doors(RolloutEngine):
    """Notes which door is used."""

    start = close = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.plain: list[Sampling] = []
        self.branches: list[Branching] = []

    def sync(self, weights: object) -> None:
        list(weights)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        self.plain.append(sampling)
        return []

    def generate_branching(self, requests: Sequence[Request], sampling: Sampling, plan: Branching) -> list[Rollout]:
        self.branches.append(plan)
        return []


def test_the_structure_chooses_the_door(tiny_model_dir: Path) -> None:
    policy = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir)))
    problems = make_problems("easy", "test", 1)
    engine = Doors()

    def respond(generation: Generation, mode: str = "free") -> None:
        responder = Responder(policy, engine, generation, seed=0)
        responder.refresh()
        responder.respond(problems, 0, mode=mode)

    respond(replace(UNSEEN, structure="seen"))
    respond(replace(UNSEEN, structure="sequential"))
    assert [set(s.banned) for s in engine.plain] == [set(), set(policy.tags.all())]
    assert not engine.branches
    numbered = replace(UNSEEN, paths=[2, 3], max_path_tokens=9, path_index=True, positions="index")
    for mode in ("free", "parallel", "sequential"):
        respond(numbered, mode)
    assert len(engine.plain) == 2
    ids = policy.tokenizer.convert_tokens_to_ids
    openings = tuple((ids(str(i)),) for i in (1, 2, 3))
    expected = Branching(policy.tags, "index", (2, 3), 4, 9, None, openings)
    assert engine.branches == [expected, expected, replace(expected, max_blocks=0)]
