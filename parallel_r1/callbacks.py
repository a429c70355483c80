"""What a user watches: a progress bar a stage, TensorBoard with one step axis, sample rollouts, the closing table."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from parallel_r1.curriculum import StageRecord
from parallel_r1.modules.behaviour import Behaviour
from parallel_r1.types import Judged

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StageLogger(TensorBoardLogger):
    """TensorBoard events of one stage; its steps go on where the stage before stopped."""

    def __init__(self, root: Path, stage: str, step_offset: int) -> None:
        super().__init__(save_dir=root / "tensorboard", name="", version=stage, default_hp_metric=False)
        self.step_offset = step_offset

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        # Lightning adds `epoch`, which says nothing where the data never ends
        kept = {key: value for key, value in metrics.items() if key != "epoch"}
        super().log_metrics(kept, (step or 0) + self.step_offset)


class StageProgress(ProgressBar):
    """One bar a stage: steps, time left, and the numbers that tell whether it learns."""

    # shown name -> logged name
    SHOWN: ClassVar = {
        "loss": "policy/loss",
        "reward": "reward/total/mean",
        "acc": "rollout/accuracy",
        "parallel": "rollout/parallel_ratio",
        "tok/s": "time/tokens_per_second",
    }

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage
        self.bar: Any = None
        self.shown = True

    def disable(self) -> None:  # Lightning calls it on every rank but the first
        self.shown = False

    def enable(self) -> None:
        self.shown = True

    def _open(self, what: str, total: int | None, initial: int = 0) -> None:
        from tqdm import tqdm

        self._close()
        if not self.shown:
            return
        self.bar = tqdm(
            total=total,
            initial=initial,
            desc=f"{self.stage:>12} {what}",
            file=sys.stderr,
            dynamic_ncols=True,
            leave=True,
        )

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open("train", trainer.max_steps, trainer.global_step)

    @rank_zero_only
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if self.bar is None:  # a validation in mid-training closed it
            self._open("train", trainer.max_steps, trainer.global_step - 1)
        if self.bar is None:
            return
        logged = trainer.callback_metrics
        shown = {name: f"{float(logged[key]):.3g}" for name, key in self.SHOWN.items() if key in logged}
        if "reward" in shown:
            shown.pop("loss", None)  # the surrogate of policy gradients says nothing to a reader
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    @rank_zero_only
    def on_train_end(self, *args: Any) -> None:
        self._close()

    @rank_zero_only
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._open("validate", _total(trainer.num_val_batches))

    @rank_zero_only
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open("test", _total(trainer.num_test_batches))

    @rank_zero_only
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open("predict", _total(trainer.num_predict_batches))

    @rank_zero_only
    def _advance(self, *args: Any) -> None:
        if self.bar is not None:
            self.bar.update(1)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _advance

    @rank_zero_only
    def _finish(self, *args: Any) -> None:
        self._close()

    on_validation_end = on_test_end = on_predict_end = _finish


def _total(batches: Sequence[int | float]) -> int | None:
    total = sum(batches)
    return int(total) if total != float("inf") else None


class RolloutTable(L.Callback):
    """Sample responses of each validation as text in TensorBoard. Model output is untrusted: it is escaped."""

    @rank_zero_only
    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        logger = trainer.logger
        if isinstance(logger, StageLogger) and pl_module.shown:
            step = trainer.global_step + logger.step_offset
            logger.experiment.add_text("val/rollouts", rollouts_as_markdown(pl_module.shown), step)


class BehaviourFigures(L.Callback):
    """Where blocks open and what for, over training: TensorBoard histograms and figures of the first rank's responses.

    The figures follow the paper's (arXiv 2509.07980): mean position of blocks over steps, exploration and verification
    over steps. Steps are those of the whole curriculum; the history is part of a checkpoint.

    Args:
        every: iterations from one drawing to the next; each histogram holds the blocks of so many.
    """

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"BehaviourFigures.every={every}: give a number of iterations from 1 on")
        self.every = every
        # step -> (mean position of its blocks, share of its labelled blocks that verify), None where there is none
        self.history: dict[int, tuple[float | None, float | None]] = {}
        self._recent: list[Behaviour] = []

    @rank_zero_only
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        behaviour, logger = getattr(pl_module, "behaviour", None), trainer.logger
        if behaviour is None or not isinstance(logger, StageLogger):
            return
        step = trainer.global_step + logger.step_offset
        verifying = [label == "verification" for label in behaviour.labels]
        self.history[step] = (_mean(behaviour.positions), _mean(verifying))
        self._recent.append(behaviour)
        if len(self.history) % self.every == 0:
            self._draw(logger, step)

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._recent and isinstance(trainer.logger, StageLogger):
            self._draw(trainer.logger, trainer.global_step + trainer.logger.step_offset)

    def _draw(self, logger: StageLogger, step: int) -> None:
        recent, self._recent = self._recent, []
        for name, bins in (("positions", POSITION_BINS), ("tokens", "auto"), ("paths", "auto")):
            values = [value for behaviour in recent for value in getattr(behaviour, name)]
            if values:
                logger.experiment.add_histogram(f"behaviour/{name}", np.asarray(values, dtype=float), step, bins=bins)
        logger.experiment.add_figure("behaviour", behaviour_figure(self.history), step)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = dict(state_dict["history"])


POSITION_BINS = [i / 10 for i in range(11)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def behaviour_figure(history: Mapping[int, tuple[float | None, float | None]]) -> Figure:
    """Two panels over steps: the mean position of blocks, and the shares of blocks that explore and verify."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    where, what = figure.subplots(1, 2)
    positions = [(step, position) for step, (position, _) in history.items() if position is not None]
    uses = [(step, share) for step, (_, share) in history.items() if share is not None]
    where.plot([s for s, _ in positions], [p for _, p in positions], ".-", linewidth=1)
    where.set(title="where blocks open", xlabel="step", ylabel="share of the response", ylim=(0, 1))
    steps, shares = [s for s, _ in uses], [p for _, p in uses]
    what.stackplot(steps, shares, [1 - p for p in shares], labels=["verification", "exploration"], alpha=0.8)
    what.set(title="what blocks are for", xlabel="step", ylabel="share of blocks", ylim=(0, 1))
    if uses:
        what.legend(loc="upper right")
    return figure


def rollouts_as_markdown(judged: Sequence[Judged]) -> str:
    """A Markdown list of problems and responses in which nothing of the model's text is markup."""
    parts = []
    for j in judged:
        verdict = "right" if j.correct else "wrong" if j.finished else "cut"
        parts.append(
            f"**{html.escape(j.problem.tier)}** gold {_code(j.problem.answer)}: **{verdict}**, "
            f"{j.critical_tokens} critical of {j.total_tokens} tokens\n\n"
            f"{_block(j.problem.question)}\n\n{_block(j.text)}\n"
        )
    return "\n---\n".join(parts)


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _block(text: str) -> str:
    # one line of escaped HTML: Markdown leaves the inside of <pre> alone, and a blank line would end it
    return f"<pre>{html.escape(text).replace(chr(10), '&#10;').replace('`', '&#96;')}</pre>"


def print_summary(records: Sequence[StageRecord], root: Path) -> None:
    """The closing table: every tier's main metrics before and after each stage."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{root}: held-out problems, before -> after each stage")
    for column in (
        "stage",
        "steps",
        "wall",
        "tier",
        "accuracy",
        "parallel ratio",
        "format valid",
        "critical tokens",
        "n",
    ):
        table.add_column(column, justify="left" if column in ("stage", "tier") else "right")
    for record in records:
        tiers = list(dict.fromkeys(key.split("/")[0] for key in record.after))
        for i, tier in enumerate(tiers or ["-"]):
            head = [record.name, str(record.steps), f"{record.wall_s:.0f} s"] if i == 0 else ["", "", ""]
            table.add_row(
                *head,
                tier,
                _change(record, tier, "accuracy", ".3f", spread="accuracy_ci95"),
                _change(record, tier, "parallel_ratio", ".2f"),
                _change(record, tier, "format_valid", ".2f"),
                _change(record, tier, "critical_tokens", ".1f"),
                f"{record.after.get(f'{tier}/n', 0):.0f}",
            )
    console = Console(stderr=True)
    console.width = max(console.width, 130)  # a narrow terminal may wrap lines, but never cells
    console.print(table)


def _change(record: StageRecord, tier: str, metric: str, form: str, spread: str | None = None) -> str:
    key = f"{tier}/{metric}"
    before = format(record.before[key], form) if key in record.before else "?"
    after = format(record.after[key], form) if key in record.after else "?"
    plus = f" ± {record.after[f'{tier}/{spread}']:.3f}" if spread and f"{tier}/{spread}" in record.after else ""
    return f"{before} -> {after}{plus}"
