"""One rank and two, plain and sharded by FSDP2: the same gradient and metrics. Ranks are processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_ranks
from conftest import write_tiny_model

pytestmark = pytest.mark.integration  # starts a process a rank


SCRIPT = Path(two_ranks.__file__)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    folder = write_tiny_model(tmp_path_factory.mktemp("ranks"))
    ranks = [subprocess.Popen([sys.executable, SCRIPT, str(rank), "2", str(folder)]) for rank in range(2)]
    two_ranks.main(0, 1, folder)  # meanwhile
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    return torch.load(folder / "result1.pt"), torch.load(folder / "result2.pt")


@pytest.mark.parametrize("objective", list(two_ranks.OBJECTIVES))
@pytest.mark.parametrize("kind", ["plain", "sharded", "offloaded"])
def test_two_ranks_are_one(results: tuple[dict, dict], kind: str, objective: str) -> None:
    one, two = results
    expected, metrics = one["plain", objective]
    gradient, found = two[kind, objective]
    assert gradient.keys() == expected.keys()
    for name in expected:
        assert (gradient[name] - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
    assert found.keys() == metrics.keys()
    for name, value in metrics.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
