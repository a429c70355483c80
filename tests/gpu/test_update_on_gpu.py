"""On a GPU: FlexAttention and SDPA score packed responses alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "modules"))

from hosts import Host, some_groups

from parallel_r1.methods import Objective
from parallel_r1.policy import PolicySource, load_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def gradient(folder: Path, attention: str, structure: str) -> dict[str, torch.Tensor]:
    policy = load_policy(folder, PolicySource(name=str(folder), attn_implementation=attention))
    policy.model.to("cuda")
    host = Host(policy, structure, device="cuda")
    host.run(some_groups(), Objective())
    return host.gradient


@pytest.mark.parametrize("structure", ["seen", "unseen"])
def test_flex_attention_gives_the_gradient_of_sdpa(tiny_model_dir: Path, structure: str) -> None:
    flex, sdpa = (gradient(tiny_model_dir, kind, structure) for kind in ("flex_attention", "sdpa"))
    for name, expected in sdpa.items():
        assert (flex[name] - expected).norm() <= 5e-3 * expected.norm() + 1e-6, name
