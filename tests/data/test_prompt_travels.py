"""The prompt goes from a stage into its model folder, and from there into whatever uses the folder next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallel_r1.data.prompts import Prompt, attach_prompt, attached_prompt, encode_prompt, named_prompt
from parallel_r1.modules.responder import Generation, Responder
from parallel_r1.policy import Policy, PolicySource, export_policy, load_policy
from parallel_r1.rollout.transformers_engine import TransformersEngine
from parallel_r1.types import Problem

MINE = Prompt("mine.txt", "w1 {problem} w2", "seen")


def responder(policy: Policy, **generation: object) -> Responder:
    return Responder(policy, TransformersEngine(), Generation(**generation), seed=0)


@pytest.fixture
def policy(tiny_model_dir: Path, tmp_path: Path) -> Policy:
    source = PolicySource(name=str(tiny_model_dir))
    return load_policy(source.prepare(tmp_path / "base", seed=0), source)


def test_a_stage_leaves_its_prompt_and_the_next_one_takes_it(policy: Policy, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(MINE.text)
    trained = responder(policy, prompt=str(file))
    folder = tmp_path / "model"
    export_policy(policy, folder, dict(policy.model.state_dict()), trained.prompt)
    file.unlink()  # the folder is all that is left

    source = PolicySource(name=str(folder))
    again = load_policy(folder, source)
    used = responder(again)
    assert used.prompt == trained.prompt == MINE
    problem = Problem("1", "w3 w4", "5", "t")
    assert used.prompt_ids(problem) == trained.prompt_ids(problem) == encode_prompt(again.tokenizer, MINE.text, "w3 w4")
    assert responder(again, prompt="plain").prompt.name == "plain"
    assert responder(again, structure="sequential").prompt == replace(MINE, structure="sequential")


def test_a_base_policy_keeps_the_prompt_of_the_model_it_comes_from(policy: Policy, tmp_path: Path) -> None:
    attach_prompt(policy.folder, MINE)
    folder = PolicySource(name=str(policy.folder)).prepare(tmp_path / "run" / "base", seed=0)
    assert attached_prompt(folder) == MINE


def test_an_export_without_a_prompt_keeps_that_of_its_folder(policy: Policy, tmp_path: Path) -> None:
    weights = dict(policy.model.state_dict())
    export_policy(policy, tmp_path / "none", weights)
    assert attached_prompt(tmp_path / "none") is None
    attach_prompt(policy.folder, MINE)
    export_policy(policy, tmp_path / "kept", weights)
    assert attached_prompt(tmp_path / "kept") == MINE
    export_policy(policy, tmp_path / "other", weights, named_prompt("plain", "unseen"))
    assert attached_prompt(tmp_path / "other") == named_prompt("plain", "unseen")


def test_a_broken_prompt_file_of_a_base_model_is_found_before_anything_is_written(
    policy: Policy, tmp_path: Path
) -> None:
    (policy.folder / "parallel_r1.json").write_text("{}")
    with pytest.raises(ValueError, match="not a prompt that an export wrote"):
        PolicySource(name=str(policy.folder)).prepare(tmp_path / "run" / "base", seed=0)
    assert not (tmp_path / "run").exists()
