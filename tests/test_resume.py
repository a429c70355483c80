"""Stopping in order, and what a stage logs; whole runs are killed in `integration/test_resume.py`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallel_r1.callbacks import StageLogger
from parallel_r1.checkpoint import CheckpointError, complete
from parallel_r1.modules.base import StageModule
from parallel_r1.resume import Checkpoints, StopRun, StopSignals


@pytest.fixture
def signals():
    before = {name: signal.getsignal(name) for name in StopSignals.NAMES}
    stop = StopSignals()
    stop.install()
    yield stop
    for name, handler in before.items():
        signal.signal(name, handler)


def ask(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", StopSignals.NAMES)
def test_a_signal_stops_what_runs_at_once(signals: StopSignals, signum: int) -> None:
    with pytest.raises(StopRun) as stop:
        ask(signum)
    assert stop.value.signum == signum


def test_a_stop_waits_for_what_is_held(signals: StopSignals) -> None:
    done: list[bool] = []

    def held() -> None:
        with signals.held():
            ask(signal.SIGTERM)
            done.append(True)

    with pytest.raises(StopRun):
        held()
    assert done
    with signals.held():
        pass  # what is held after the request ends as usual


def test_several_ranks_stop_only_where_all_ask(signals: StopSignals) -> None:
    signals.together = True
    ask(signal.SIGTERM)
    assert signals.asked == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):  # a Ctrl-C after that does not wait
        ask(signal.SIGINT)


class Counting(L.LightningModule):
    """One weight; logs `once` in its first iteration alone, and its data is whatever it is told."""

    on_train_batch_start = StageModule.on_train_batch_start

    def __init__(self, stop_at: int | None = None, where: str = "before") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = torch.nn.Linear(1, 1)
        self.stop_at, self.where, self.seen = stop_at, where, []

    def over_ranks(self, value, op="sum"):
        return torch.as_tensor(value)

    def maybe_stop(self, batch: int, where: str) -> None:
        if (batch, where) == (self.stop_at, self.where):
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch, batch_idx: int) -> None:
        self.maybe_stop(batch, "before")
        self.log("every", float(batch))
        if batch == 0:
            self.log("once", 1.0)
        optimizer = self.optimizers()
        self.manual_backward(self.model(torch.full((1, 1), float(batch) + torch.rand(()).item())).sum())
        optimizer.step()
        self.maybe_stop(batch, "in the update")
        optimizer.zero_grad()
        self.lr_schedulers().step()
        self.seen.append(int(batch))

    def validation_step(self, batch, batch_idx: int) -> None:
        self.maybe_stop(self.global_step - 1, "in the validation")
        self.log("val", float(self.global_step), batch_size=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}


class Numbers(L.LightningDataModule):
    start_iteration = 0

    def train_dataloader(self):
        return Endless(self)

    def val_dataloader(self):
        return [0]


class Endless:
    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __iter__(self):
        i = self.data.start_iteration
        while True:
            yield i
            i += 1


def run(root: Path, *stop_at, **options) -> tuple[Counting, Checkpoints]:
    torch.manual_seed(0)
    stop = StopSignals()
    stop.install()
    keeper = Checkpoints(root, "s", options.pop("every", 1), 10.0, stop)
    keeper.prepare()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=6,
        logger=StageLogger(root, "s", 10),
        callbacks=[keeper],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=2,
    )
    module = Counting(*stop_at)
    trainer.fit(module, datamodule=Numbers())
    return module, keeper


def logged(root: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(root / "tensorboard" / "s"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: sorted((e.step, e.value) for e in events.Scalars(tag)) for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("stop_at", "where", "goes_on_at"),
    [
        (0, "before", 0),
        (1, "before", 1),
        (2, "before", 2),
        (5, "before", 5),
        (0, "in the update", 1),
        (1, "in the update", 2),
        (5, "in the update", 6),
        (1, "in the validation", 2),
        (5, "in the validation", 6),
    ],
)
@pytest.mark.parametrize("every", [1, 100])
def test_a_stopped_stage_goes_on_exactly(
    signals: StopSignals, tmp_path: Path, stop_at: int, where: str, goes_on_at: int, every: int
) -> None:
    whole, _ = run(tmp_path / "whole", every=every)
    assert whole.seen == list(range(6))
    root = tmp_path / "stopped"
    with pytest.raises(StopRun):
        run(root, stop_at, where, every=every)
    again, keeper = run(root, every=every)
    assert again.seen == list(range(goes_on_at, 6)), "no iteration twice, none left out"
    assert torch.equal(again.model.weight, whole.model.weight)
    assert torch.equal(again.model.bias, whole.model.bias)
    assert logged(root) == logged(tmp_path / "whole")
    assert keeper.seconds > 0

    ended, _ = run(root)  # killed before its export: nothing is trained again
    assert ended.seen == []
    assert torch.equal(ended.model.weight, whole.model.weight)


def test_what_an_iteration_does_not_log_is_not_logged_again(signals: StopSignals, tmp_path: Path) -> None:
    run(tmp_path)
    found = logged(tmp_path)
    assert [step for step, _ in found["every"]] == [10, 11, 12, 13, 14, 15]
    assert [step for step, _ in found["once"]] == [10]
    assert [step for step, _ in found["val"]] == [11, 13, 15]


def test_a_full_disk_stops_the_stage_and_keeps_its_last_checkpoint(
    signals: StopSignals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parallel_r1 import checkpoint

    ask, calls = checkpoint.require_space, []

    def full_at_the_third(folder: Path, needed: int, what: str) -> None:
        calls.append(what)
        ask(folder, needed if len(calls) < 3 else 1 << 60, what)

    monkeypatch.setattr(checkpoint, "require_space", full_at_the_third)
    with pytest.raises(CheckpointError, match=r"no space for the checkpoint of stage s at step 3 .* untouched"):
        run(tmp_path)
    names = [path.name for path in complete(tmp_path / "stages/s/checkpoints")]
    assert names == ["step-00000002", "step-00000001"]
