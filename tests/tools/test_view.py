"""tools/view.py: what a path holds, what a page says of a run, what is no run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading import load_tool

from parallel_r1.callbacks import BehaviourFigures, StageLogger
from parallel_r1.evaluation.row_files import append_rows
from parallel_r1.evaluation.run_page import find, read_curves, rows_of, run_sections
from parallel_r1.modules.behaviour import Behaviour

tool = load_tool("view")


def row(id: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "tier": "easy",
        "question": f"question {id}",
        "response": "Final Answer: 4",
        "finished": True,
        **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What training and `test` leave, by the code that leaves it where that is quick."""
    root = tmp_path / "run"
    for stage, offset in (("warm", 0), ("hard", 10)):
        logger = StageLogger(root, stage, offset)
        callback = BehaviourFigures(every=2)
        for step in range(1, 5):
            logger.log_metrics({"rollout/accuracy": step / 4, "val/easy/accuracy": 0.5}, step)
            if stage == "hard":
                logger.log_metrics({"rollout/verification_share": 0.25, "rollout_logprob_gap/max": 10.0**-step}, step)
                module = SimpleNamespace(behaviour=Behaviour([0.0, 0.95], [9, 9], [2], [0.5], [], [], [], []))
                callback.on_train_batch_end(SimpleNamespace(global_step=step, logger=logger), module)
        logger.finalize("success")
    stages = [
        {"name": "hard", "before": {"easy/accuracy": 0.5}, "after": {"easy/accuracy": 0.9, "easy/accuracy_ci95": 0.02}}
    ]
    (root / "summary.json").write_text(json.dumps({"stages": stages}))
    for first in range(2):
        file = root / "stages/hard/rollouts" / f"rank0-{first:06d}.jsonl.gz"
        append_rows(file, [row(f"r{first}{g}", iteration=first, group=0, sample=g) for g in range(2)])
    test = root / "test" / "all"
    test.mkdir(parents=True)
    (test / "samples-0.jsonl").write_text(json.dumps(row("t0", mode="plain", sample=0)) + '\n{"torn')
    metrics = {"mean@1": {"value": 0.75, "ci95": [0.5, 1.0]}}
    tiers = {"easy": {"problems": 4, "samples": 1, "modes": {"plain": metrics}, "equal_tokens": None}}
    (test / "report.json").write_text(json.dumps({"name": "all", "model": "m", "settings": {}, "tiers": tiers}))
    return root


def test_curves_of_all_stages_stand_on_one_axis(run: Path) -> None:
    curves = read_curves(run / "tensorboard")
    assert curves.scalars["rollout/accuracy"] == {s + o: s / 4 for o in (0, 10) for s in range(1, 5)}
    assert list(curves.steps.starts.items()) == [(1.0, "warm"), (11.0, "hard")]
    # two iterations of two blocks each, in the first and in the last tenth
    assert curves.positions == {12.0: [2.0, *[0.0] * 8, 2.0], 14.0: [2.0, *[0.0] * 8, 2.0]}
    assert read_curves(run / "nowhere").scalars == {}


def test_sections_of_a_run(run: Path) -> None:
    held_out, training, behaviour = run_sections(run)
    assert held_out.tables[0].rows[0][:3] == ["hard", "easy", 0.5]
    assert (held_out.tables[0].rows[0][3].low, held_out.tables[0].rows[0][3].high) == pytest.approx((0.88, 0.92))
    assert [chart.title for chart in training.charts] == ["Right, parallel, well formed", "Engine against trainer"]
    assert [chart.title for chart in behaviour.charts] == ["Where all blocks open", "What blocks are for"]
    assert behaviour.charts[1].table.rows[0] == [11.0, 0.75, 0.25]


def test_every_kind_of_path(run: Path) -> None:
    assert [(r["id"], r["stage"]) for r in rows_of([find(run)])] == [
        ("r00", "hard"), ("r01", "hard"), ("r10", "hard"), ("r11", "hard"), ("t0", "test all")
    ]  # fmt: skip
    assert [r["id"] for r in rows_of([find(run / "stages/hard/rollouts")])] == ["r00", "r01", "r10", "r11"]
    assert [r["id"] for r in rows_of([find(run / "stages/hard/rollouts/rank0-000001.jsonl.gz")])] == ["r10", "r11"]
    assert list(find(run / "test/all").reports) == ["all"]


def test_a_page_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(run)]) == 0
    assert f"5 responses: {run / 'report.html'}" in capsys.readouterr().out
    html = (run / "report.html").read_text()
    heads = re.findall(r"<h2[^>]*>(.*?)</h2>", html)
    assert heads == ["Held-out problems", "Training", "Behaviour over training", "Accuracy", "Behaviour", "Responses"]
    assert "question r10" in html
    assert "<dt>model</dt><dd>m</dd>" in html
    assert tool.main([str(run / "test/all"), "--out", str(run / "new/test.html"), "--title", "T", "--most", "1"]) == 0
    assert "<title>T</title>" in (run / "new/test.html").read_text()


def test_what_holds_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("{}\nhello\n{}\n")
    for path, complaint in (
        ("", "holds no rollouts, no test and no curves"),
        ("missing", "no file or folder"),
        ("empty", "holds no .jsonl or .jsonl.gz file"),
        ("bad.jsonl", "row 2: not JSON"),
    ):
        assert tool.main([str(tmp_path / path), "--out", str(tmp_path / "page.html")]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
