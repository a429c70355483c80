"""The bench measures the same update by both ways, and counts its tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "bench.py"
    spec = importlib.util.spec_from_file_location("bench", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["bench"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("structure", ["seen", "unseen"])
def test_both_ways_are_one_update(bench: ModuleType, structure: str) -> None:
    line = f"update --prompt 40 --response 40 70 --group-size 3 --structure {structure}"
    args = bench.parser().parse_args(line.split())
    case = bench.Case((1, 32, 32, 2, 2, 16), 64, 400)
    packed, padded = (bench.measure(case, args, variant) for variant in ("packed", "padded"))
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-4)
    assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)
    assert packed["tokens"] == 40 + 40 + 55 + 70
    assert padded["tokens"] == 3 * (40 + 70)
