"""What a user watches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallel_r1.callbacks import (
    BehaviourFigures,
    StageLogger,
    behaviour_figure,
    print_summary,
    rollouts_as_markdown,
)
from parallel_r1.curriculum import StageRecord
from parallel_r1.modules.behaviour import Behaviour
from parallel_r1.structure.grammar import parse
from parallel_r1.types import Judged, Problem


def judged(text: str, question: str = "1 + 1?") -> Judged:
    problem = Problem("p", question, "2", "easy")
    return Judged(problem, text, parse(text), correct=False, finished=True, total_tokens=9, critical_tokens=5)


def test_model_output_is_shown_as_text() -> None:
    hostile = "<script>alert(1)</script>\n\n**bold** `code` <Parallel>\n</pre><img src=x>"
    shown = rollouts_as_markdown([judged(hostile, question="</pre><b>q</b>")])
    assert "<script" not in shown
    assert "<img" not in shown
    assert "<b>" not in shown
    assert shown.count("</pre>") == 2, "only our own blocks end"
    assert "&lt;Parallel&gt;" in shown
    assert "\n\n**bold**" not in shown, "a blank line would end the block and let Markdown in"


def test_steps_go_on_where_the_stage_before_stopped(tmp_path: Path) -> None:
    for stage, offset in (("first", 0), ("second", 10)):
        logger = StageLogger(tmp_path, stage, offset)
        for step in range(3):
            logger.log_metrics({"policy/loss": 1.0, "epoch": 0}, step)
        logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard" / "second"))
    events.Reload()
    assert events.Tags()["scalars"] == ["policy/loss"]
    assert [event.step for event in events.Scalars("policy/loss")] == [10, 11, 12]


def behaviour(positions: list[float], labels: list[str]) -> Behaviour:
    return Behaviour(positions, [9] * len(positions), [2], [0.5], labels, [None], [None], [None])


def test_behaviour_is_drawn_over_the_steps_of_the_curriculum(tmp_path: Path) -> None:
    logger = StageLogger(tmp_path, "hard", step_offset=100)
    callback = BehaviourFigures(every=2)
    for step in range(1, 4):
        if step == 3:  # resumed from a checkpoint
            state, callback = callback.state_dict(), BehaviourFigures(every=2)
            callback.load_state_dict(state)
        module = SimpleNamespace(behaviour=behaviour([0.0, 0.5] if step < 3 else [], ["exploration"]))
        callback.on_train_batch_end(SimpleNamespace(global_step=step, logger=logger), module)
    callback.on_train_end(SimpleNamespace(global_step=3, logger=logger), None)
    logger.finalize("success")
    assert callback.history == {101: (0.25, 0.0), 102: (0.25, 0.0), 103: (None, 0.0)}
    events = EventAccumulator(str(tmp_path / "tensorboard" / "hard"), size_guidance={"histograms": 0, "images": 0})
    events.Reload()
    assert [event.step for event in events.Images("behaviour")] == [102, 103]
    assert events.Tags()["histograms"] == ["behaviour/positions", "behaviour/tokens", "behaviour/paths"]
    (where,) = events.Histograms("behaviour/positions")
    assert (where.step, where.histogram_value.num) == (102, 4.0)


def test_what_does_no_rollouts_has_no_behaviour(tmp_path: Path) -> None:
    callback = BehaviourFigures()
    trainer = SimpleNamespace(global_step=1, logger=StageLogger(tmp_path, "cold_start", 0))
    callback.on_train_batch_end(trainer, SimpleNamespace())
    callback.on_train_end(trainer, None)
    assert not callback.history
    assert len(behaviour_figure({}).axes) == 2
    with pytest.raises(ValueError, match="every=0"):
        BehaviourFigures(every=0)


def test_summary_shows_every_stage_and_tier(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = {"accuracy": 0.5, "accuracy_ci95": 0.04, "parallel_ratio": 0.9, "format_valid": 1.0, "n": 512.0}
    before = {f"{tier}/{name}": value / 2 for tier in ("easy", "hard") for name, value in metrics.items()}
    after = {f"{tier}/{name}": value for tier in ("easy", "hard") for name, value in metrics.items()}
    print_summary([StageRecord("cold_start", "SFTModule", 7, 3.2, before, after)], tmp_path)
    shown = capsys.readouterr().err
    for part in ("cold_start", "easy", "hard", "0.250 -> 0.500 ± 0.040", "0.45 -> 0.90", "512"):
        assert part in shown
