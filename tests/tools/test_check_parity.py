"""tools/check_parity.py with the transformers engine; `tests/integration` measures the same gaps on vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loading import load_tool

from parallel_r1.rollout import transformers_engine

tool = load_tool("check_parity")


def run(model: Path, *arguments: str) -> int:
    return tool.main(["--model", str(model), "--engine", "transformers", "--samples", "6", "--group", "2", *arguments])


@pytest.mark.parametrize("structure", ["seen", "unseen", "sequential"])
@pytest.mark.parametrize("positions", ["longest", "index"])
def test_parity_by_segment(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], structure: str, positions: str
) -> None:
    assert run(tiny_model_dir, "--structure", structure, "--positions", positions, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["max_gap"] == max(gap["max"] for gap in found["gap"].values()) < 1e-4
    assert (found["samples"], found["structure"], found["engine"]) == (6, structure, "TransformersEngine")
    if structure == "unseen":
        assert found["paths"] >= 2 * found["summaries"] >= 2
        assert set(found["gap"]) == {"main", "path", "summary"}
    if structure == "sequential":
        assert found["paths"] == 0


def test_a_gap_is_told(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that lets paths see each other."""
    laid_out = transformers_engine.layout
    monkeypatch.setattr(transformers_engine, "layout", lambda n, ids, tags, *_: laid_out(n, ids, tags, "seen"))
    assert run(tiny_model_dir) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("NO parity: ")
    assert float(lines[2].split()[2]) > 0.1, "the summary's"


def test_what_cannot_be_used_is_named(tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny_model_dir, "--paths", "1") == 2
    assert "generation.paths=[1, 1]: give a number from 2 on" in capsys.readouterr().err
    assert run(tmp_path) == 2
    assert torch.is_grad_enabled()
