"""The bench measures what it says: one update by both ways, whole iterations, the reading of rows."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import bench  # noqa: E402
from benchmarks import growth, rl, update  # noqa: E402
from benchmarks.common import TINY, Clock, Shape, alternate, medians, random_qwen3  # noqa: E402


@pytest.mark.parametrize("structure", ["seen", "unseen"])
def test_both_ways_are_one_update(structure: str) -> None:
    line = f"update --prompt 40 --response 40 70 --group-size 3 --structure {structure}"
    args = bench.parser().parse_args(line.split())
    case = update.Case(Shape(1, 32, 32, 2, 2, 16), 64, 400)
    packed, padded = (update.measure(case, args, variant) for variant in ("packed", "padded"))
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-4)
    assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)
    assert packed["tokens"] == 40 + 40 + 55 + 70
    assert padded["tokens"] == 3 * (40 + 70)


def test_responses_end_at_the_rate_asked_for(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    random_qwen3(tmp_path, TINY, 512, context=256, end_rate=0.01)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        probability = model(torch.randint(8, 512, (2, 64))).logits.softmax(-1)[..., 1]
    assert probability.mean() == pytest.approx(0.01, rel=0.2)


def test_an_iteration_is_measured_by_phase(tmp_path: Path) -> None:
    args = bench.parser().parse_args(["rl", "--iterations", "2"])
    case = rl.Case(problems=1, group_size=4, max_tokens=6, vocabulary=32, prompt=5)
    result = rl.measure(case, args, "ours_transformers")
    assert result["tokens"] == 4 * 6
    parts = [result[f"{phase}_cpu_s"] for phase in ("rollout", "sync", "score", "update")]
    assert min(parts) >= 0
    assert 0 < sum(parts) <= result["cpu_s"] * 1.01


def test_a_clock_adds_up_and_starts_anew() -> None:
    clock = Clock()
    wait = clock.timed("wait", lambda: time.sleep(0.02))
    wait(), wait()
    assert clock.wall["wait"] >= 0.04
    assert clock.cpu["wait"] < clock.wall["wait"]
    clock.reset()
    assert clock.wall == {}


def test_variants_take_turns_and_the_median_counts() -> None:
    turns: list[str] = []
    runs = alternate(["a", "b"], 3, lambda name: turns.append(name) or {"s": float(len(turns))})
    assert turns == ["a", "b", "a", "b", "a", "b"]
    assert medians(runs["a"]) == {"s": 3.0}


def test_the_cost_of_many_rows() -> None:
    small, large = growth.start_on(100), growth.start_on(3_000)
    assert large["cpu_s"] > small["cpu_s"] > 0


def test_every_case_can_be_asked_for() -> None:
    args = bench.parser().parse_args(["rl", "--against", "trl", "--json"])
    assert rl.variants(args, "16x64") == ["ours_vllm", "ours_transformers", "trl_transformers"]
    assert json.dumps(sorted(growth.CASES)).count("group_size") == 5
