"""Objectives: what null settles to, and what is refused."""

from __future__ import annotations

import pytest

from parallel_r1.methods import Objective


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("group", "token_mean", 0.2, 0.2)),
        ({"loss": "dapo"}, ("group", "token_mean", 0.2, 0.28)),
        ({"loss": "dr_grpo"}, ("none", "constant", 0.2, 0.2)),
        ({"loss": "gspo"}, ("group", "sequence_mean", 3e-4, 4e-4)),
        ({"advantage": "rloo"}, ("none", "token_mean", 0.2, 0.2)),
        ({"advantage": "reinforce_pp"}, ("batch", "token_mean", 0.2, 0.2)),
        ({"loss": "dapo", "clip_high": 0.4, "std": "none"}, ("none", "token_mean", 0.2, 0.4)),
    ],
)
def test_null_follows_the_method(given: dict, expected: tuple) -> None:
    settled = Objective(**given).settled(max_tokens=64)
    assert (settled.std, settled.aggregation, settled.clip_low, settled.clip_high) == expected
    assert settled.constant_length == 64
    assert settled.settled(128) == settled


@pytest.mark.parametrize("loss", ["ppo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_defaults_pass(loss: str) -> None:
    Objective(loss=loss).check(max_tokens=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "trpo"}, r"objective\.loss='trpo': choose one of ppo, dapo"),
        ({"advantage": None}, r"objective\.advantage=None: choose one of grpo"),
        ({"clip_low": -0.1}, r"objective\.clip_low=-0\.1: give a finite number"),
        ({"clip_low": 1.5}, r"objective\.clip_low=1\.5: ratios are above 0"),
        ({"kl_coef": float("nan")}, r"objective\.kl_coef=nan: give a finite number"),
        ({"dual_clip": 1.0}, r"objective\.dual_clip=1\.0.*3\.0 is usual"),
        ({"constant_length": 0}, r"objective\.constant_length=0"),
        ({"mismatch": "token_mask", "old_logprobs": "engine"}, r"objective\.mismatch=token_mask.*set mismatch=none"),
        ({"mismatch": "token_mask", "mismatch_low": 1.2}, r"mismatch_low=1\.2.*must lie between"),
        ({"mismatch": "sequence_truncate", "mismatch_high": 0.5}, r"mismatch_high=0\.5: a cap below 1"),
        ({"overlong": "soft"}, r"objective\.overlong_buffer=0: overlong=soft needs between 1 and .*max_tokens=64"),
        ({"dynamic_sampling": -1}, r"objective\.dynamic_sampling=-1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**given).check(max_tokens=64)
