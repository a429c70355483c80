"""Going on where a run stood: a callback that writes checkpoints of a stage and restores them, and orderly stops.

A stage is saved between two iterations, when everything the last one logged is on disk. What follows is then a pure
function of what is saved: problems of (seed, iteration), rollouts of (seed, iteration, index) and the weights, rewards
of the step.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from parallel_r1 import checkpoint
from parallel_r1.checkpoint import CheckpointError, Progress

SPARE_BYTES = 16 << 20
"""Kept free beside a checkpoint: for its manifest and for what else a run writes."""


class StopRun(BaseException):
    """The run was asked to stop. No Exception, so that nothing on the way takes it for a fault."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """SIGTERM (pre-emption) and SIGINT (Ctrl-C) end a run in order; a second Ctrl-C ends it at once.

    On one rank whatever runs is left at once, unless it is held or changes weights; with several ranks, whose
    collectives must match, the request waits for a point where all of them ask each other (`Checkpoints`).
    """

    NAMES = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.asked: int | None = None
        self.together = False  # several ranks: only stop where all do
        self.updating: Callable[[], bool] = lambda: False  # weights are between two states: stop after it
        self._held = 0

    def install(self) -> None:
        """Take the signals over. Does nothing outside the main thread, where Python allows none."""
        if threading.current_thread() is threading.main_thread():
            for name in self.NAMES:
                signal.signal(name, self._receive)

    def _receive(self, signum: int, _: Any) -> None:
        if self.asked is not None:
            if signum == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            return
        self.asked = signum
        print(f"\n{signal.Signals(signum).name}: saving, then stopping ...", file=sys.stderr, flush=True)
        if not self._held and not self.updating():
            self.heed()

    def heed(self) -> None:
        """Raise StopRun where a stop was asked for, unless several ranks have to agree on it first."""
        if self.asked is not None and not self.together:
            raise StopRun(self.asked)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the body finish before a stop that comes meanwhile."""
        known = self.asked
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.asked != known and not self._held:
            self.heed()


def exit_stopped(signum: int, first_rank: bool, root: Path) -> None:
    """End the process after a stop: status 128 + signal on the first rank, 0 on others, within seconds."""
    # a launcher kills the first rank, which may still be at work, if another one fails
    status = 128 + signum if first_rank else 0
    if first_rank:
        print(f"stopped; the same command goes on from where it stands: {root}", file=sys.stderr, flush=True)
    backstop = threading.Timer(5.0, os._exit, [status])  # an engine that was left in its work may not let go
    backstop.daemon = True
    backstop.start()
    raise SystemExit(status)


class Checkpoints(L.Callback):
    """Saves one stage as it goes and restores it at the start.

    Args:
        root, stage: the run's folder and the stage's name.
        every: iterations between checkpoints; None for time alone.
        minutes: between checkpoints; whichever comes first.
        stop: where a request to stop is seen.
    """

    def __init__(self, root: Path, stage: str, every: int | None, minutes: float, stop: StopSignals) -> None:
        self.root, self.stage, self.every, self.minutes, self.stop = root, stage, every, minutes, stop
        self.folder = checkpoint.place(root, stage)
        self.found = checkpoint.newest(self.folder, rank_zero_info)
        self.resumes = self.found is not None
        self.before: dict[str, float] = self.found.progress.before if self.found else {}
        self._earlier = self.found.progress.seconds if self.found else 0.0
        self._began = self._saved_at = time.monotonic()
        self._kept: list[Path] = [self.found.folder] if self.found else []
        self._saved: tuple[int, bool, bool] | None = None  # what the newest checkpoint is of
        self._boundary: tuple[Progress, dict[str, Any]] | None = None
        self._last_iteration = 0

    @property
    def seconds(self) -> float:
        """Of the stage, those of earlier runs up to the checkpoint included."""
        return self._earlier + time.monotonic() - self._began

    def prepare(self) -> None:
        """Drop what was logged after the checkpoint; without one, all that an attempt at this stage has left.

        Call on the first rank, before a logger opens its files.
        """
        if self.found is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            at = self.found.progress
            rank_zero_info(f"stage {self.stage} goes on from step {at.step} ({self.found.folder})")
        checkpoint.cut_back(self.root, self.stage, self.found.progress.sizes if self.found else {})

    # ------------------------------------------------------------------ restore

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.found is None:
            return
        at, state = self.found.progress, self.found.state()
        checkpoint.load_weights(pl_module.model, state["model"])
        checkpoint.load_optimizer(trainer.optimizers[0], state["optimizer"])
        trainer.lr_scheduler_configs[0].scheduler.load_state_dict(checkpoint.plain(state["scheduler"]))
        trainer.precision_plugin.load_state_dict(checkpoint.plain(state["precision"]))
        pl_module.on_load_checkpoint(checkpoint.plain(state["module"]))
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(checkpoint.plain(state["callbacks"][callback.state_key]))
        # Lightning's counters: of optimizer steps, of batches, and the one its loggers count with
        loop = trainer.fit_loop.epoch_loop
        steps, batches = loop.manual_optimization.optim_step_progress.total, loop.batch_progress.total
        steps.ready = steps.completed = at.step
        batches.ready = batches.started = batches.processed = batches.completed = at.iteration
        loop._batches_that_stepped = at.logged
        trainer.should_stop = at.ended
        loop.max_steps += at.validate  # else a fit that has all its steps would leave the pending validation out
        trainer.datamodule.start_iteration = at.iteration
        self._saved = (at.iteration, at.validate, at.ended)
        self._last_iteration = at.iteration

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.stop.install()  # Lightning has put its own handlers in front
        steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        self.stop.updating = lambda: self._boundary is not None and steps.ready != self._boundary[0].step
        if self.found is None:
            return
        states = self.found.random(trainer.global_rank, trainer.world_size)
        if states is not None:
            checkpoint.set_random_states(states)
        if self.found.progress.validate:
            loop = trainer.fit_loop.epoch_loop
            loop.max_steps -= 1
            first = trainer._logger_connector._first_loop_iter
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first
            loop._batches_that_stepped += 1
        self.found = None  # lets go of the files

    # ------------------------------------------------------------------ save

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        at = self._reach(trainer)
        due = at.iteration > self._last_iteration and (
            (self.every is not None and at.iteration - self._last_iteration >= self.every)
            or time.monotonic() - self._saved_at >= 60 * self.minutes
        )
        asked = self._agreed(pl_module, due, self.stop.asked is not None)
        if asked[0]:
            self.save(trainer, pl_module)
        if asked[1]:
            raise StopRun(self.stop.asked or signal.SIGTERM)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.stop.install()
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._reach(trainer, validate=True)
        self.stop.heed()

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.world_size > 1 and self._agreed(pl_module, self.stop.asked is not None)[0]:
            raise StopRun(self.stop.asked or signal.SIGTERM)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._reach(trainer, ended=True)
        self.save(trainer, pl_module)
        self.stop.heed()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, StopRun) or trainer.state.fn != "fit" or self._boundary is None:
            return
        self.save(trainer, pl_module)

    def _agreed(self, pl_module: Any, *flags: bool) -> list[bool]:
        """Each flag, True where any rank says so."""
        if pl_module.trainer.world_size == 1:
            return list(flags)
        return [bool(v) for v in pl_module.over_ranks(torch.tensor([float(f) for f in flags]), "max")]

    def _reach(self, trainer: L.Trainer, validate: bool = False, ended: bool = False) -> Progress:
        """Note where the stage stands between two iterations; cheap, so that a stop can save it later."""
        loop = trainer.fit_loop.epoch_loop
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                with suppress(AttributeError):  # a logger without event files of its own
                    logger.experiment.flush()
        known = checkpoint.sizes(self.root, self.stage) if trainer.is_global_zero else {}
        at = Progress(
            step=trainer.global_step,
            iteration=loop.batch_progress.total.completed,
            logged=loop._batches_that_stepped,
            validate=validate,
            ended=ended,
            seconds=self.seconds,
            before=self.before,
            sizes=known,
        )
        self._boundary = at, checkpoint.random_states()
        return at

    def save(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the last boundary's checkpoint unless it is written already. Collective over ranks.

        Raises CheckpointError where there is no space or a file cannot be written; older checkpoints stay.
        """
        at, states = self._boundary
        if self._saved == (at.iteration, at.validate, at.ended):
            return
        with self.stop.held():
            self._write(trainer, pl_module, replace(at, seconds=self.seconds), states)
        self._saved, self._last_iteration = (at.iteration, at.validate, at.ended), at.iteration
        self._saved_at = time.monotonic()

    def _write(self, trainer: L.Trainer, pl_module: Any, at: Progress, states: dict[str, Any]) -> None:
        rank, ranks, strategy = trainer.global_rank, trainer.world_size, trainer.strategy
        what = f"the checkpoint of stage {self.stage} at step {at.step}"
        tree = {
            "model": checkpoint.trained_state(pl_module.model),
            "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
            "module": {},
            "callbacks": {c.state_key: state for c in trainer.callbacks if (state := c.state_dict())},
        }
        pl_module.on_save_checkpoint(tree["module"])
        whole, shards = checkpoint.split(tree)
        content: dict[str, Any] = {"shards": shards, "random": states}
        if rank == 0:
            content |= {"state": whole, "progress": vars(at)}
        total = int(pl_module.over_ranks(checkpoint.bytes_of(content))) + SPARE_BYTES
        draft, failed = checkpoint.folder_of(self.folder, at.step), ""
        if rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                checkpoint.require_space(self.folder, total, what)
                draft = checkpoint.begin(self.folder, at.step)
            except OSError as error:
                failed = _text(error)
        draft, failed = strategy.broadcast((draft, failed))
        if failed:
            raise CheckpointError(failed)
        try:
            part = checkpoint.write_part(draft, rank, content, what)
        except CheckpointError as error:
            part = _text(error)
        parts = _gathered(part, ranks)
        if problems := [p for p in parts if isinstance(p, str)]:
            if rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(problems[0])
        folder = draft
        if rank == 0:
            try:
                folder = checkpoint.commit(draft, dict(parts), self._kept[-1:])
            except OSError as error:
                failed = f"{what} could not be completed in {self.folder}: {error}"
        folder, failed = strategy.broadcast((folder, failed))
        if failed:
            raise CheckpointError(failed)
        self._kept = [*self._kept[-1:], folder]

    @staticmethod
    def remove(root: Path, stage: str) -> None:
        """Delete the checkpoints of a finished stage."""
        shutil.rmtree(checkpoint.place(root, stage), ignore_errors=True)


def _text(error: OSError) -> str:
    return error.strerror or str(error)


def _gathered(value: Any, ranks: int) -> list[Any]:
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(values, value)
    return values
