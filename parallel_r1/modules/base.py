"""What every stage module does around its training step: load, shard, sample, evaluate, export.

Life of a stage:  attach(session) -> configure_model -> (validate) -> train -> export_weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from parallel_r1.evaluation.metrics import TierMetrics
from parallel_r1.modules import faults, ranks
from parallel_r1.modules.batching import Pass, Row, make_pass, packs
from parallel_r1.modules.responder import Generation, Mode, Responder
from parallel_r1.modules.tally import peak_memory_gb
from parallel_r1.policy import Policy, PolicySource
from parallel_r1.rollout.engine import RolloutEngine
from parallel_r1.types import Judged, Problem

T = TypeVar("T")

# a sampling stream that training iterations (0, 1, ...) never use
_VALIDATION = -1


@dataclass(frozen=True)
class Session:
    """What the runner hands to the module of a stage.

    folder: the model folder the stage starts from. step_offset: optimizer steps of all earlier stages. stage_folder:
    where training leaves files of its own, None where it leaves none.
    """

    source: PolicySource
    engine: RolloutEngine
    folder: Path
    seed: int
    step_offset: int = 0
    stage_folder: Path | None = None


@dataclass
class Schedule:
    """The learning rate over the steps of a stage (transformers' schedules).

    Args:
        name: `constant_with_warmup`, `cosine`, `cosine_with_min_lr`, `linear`, ...
        warmup: warm-up as a share of the stage's steps.
        min_lr_rate: floor as a share of the peak, for `cosine_with_min_lr`.
    """

    name: str = "constant_with_warmup"
    warmup: float = 0.0
    min_lr_rate: float | None = None

    def build(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        from transformers import get_scheduler

        specific = {} if self.min_lr_rate is None else {"min_lr_rate": self.min_lr_rate}
        return get_scheduler(
            self.name,
            optimizer,
            num_warmup_steps=round(self.warmup * steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=specific,
        )

    def check(self) -> None:
        """Raise ValueError for a schedule that does not exist."""
        from transformers.optimization import SchedulerType

        known = [s.value for s in SchedulerType]
        if self.name not in known:
            raise ValueError(f"schedule.name={self.name!r} is not a schedule; choose one of {', '.join(known)}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"schedule.warmup={self.warmup}: give a share of the stage's steps between 0 and 1")


class StageModule(L.LightningModule):
    """A policy in training that owns a rollout engine. Subclasses write `training_step`.

    Optimisation is manual: one `training_step` is one iteration, and losses are normalised over the whole step.
    """

    def __init__(
        self,
        generation: Generation,
        optimizer: OptimizerCallable,
        schedule: Schedule,
        gradient_clip: float | None,
        max_tokens_per_micro_batch: int,
        max_skipped_steps: int,
        eval_modes: list[Mode],
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generation = generation
        self.make_optimizer = optimizer
        self.schedule = schedule
        self.gradient_clip = gradient_clip
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.max_skipped_steps = max_skipped_steps
        self.eval_modes = eval_modes
        self.skipped = faults.SkippedSteps(max_skipped_steps)
        self._finite: Tensor | bool = True
        self.model: nn.Module | None = None
        self.evaluation: dict[str, float] = {}
        self.shown: list[Judged] = []
        self._metrics: dict[Mode, TierMetrics] = {}

    # ------------------------------------------------------------------ set-up

    def check(self) -> None:
        """Raise ValueError for settings that can never work. Loads no model."""
        self.generation.check()
        self.schedule.check()
        if self.max_tokens_per_micro_batch < 1:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}: give a number of tokens above 0"
            )
        if self.max_skipped_steps < 1:
            raise ValueError(
                f"max_skipped_steps={self.max_skipped_steps}: give 1 to stop at the first step whose loss or gradient "
                "is not finite, or more to skip some"
            )
        if self.generation.structure == "sequential" and "parallel" in self.eval_modes:
            raise ValueError("eval_modes: a sequential structure cannot be evaluated in mode `parallel`; remove it")

    def attach(self, session: Session) -> None:
        """Tell the module where its policy comes from and which engine it owns."""
        self.session = session

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.policy: Policy = self.load()
        self.model = self.policy.model
        engine = self.session.engine
        engine_ranks = ranks.EngineRanks(engine.ranks)
        recovery = faults.EngineRecovery(self._rebuild_engine, self.agree)
        self.responder = Responder(
            self.policy, engine, self.generation, self.session.seed, ranks=engine_ranks, recovery=recovery
        )

    def to(self, *args: Any, **kwargs: Any) -> StageModule:
        """Move the module, unless its weights live in CPU memory by policy.cpu_offload: FSDP2 moves what it needs."""
        if self.sharded_offloaded:
            return self
        return super().to(*args, **kwargs)

    def load(self) -> Policy:
        """The policy of the session's folder, in the form that the trainer's strategy trains."""
        return ranks.load_for(self.trainer, self.session.folder, self.session.source)

    def _rebuild_engine(self) -> None:
        try:
            self.session.engine.close()
        except Exception as error:  # it is broken already; what counts is whether the next one starts
            rank_zero_warn(f"the failed engine could not be shut down ({error}): memory it held may stay taken")
        self._start_engine()
        self.responder.weights_changed = True
        self.responder.refresh()

    def _start_engine(self) -> None:
        self.session.engine.start(self.session.folder, self.generation.branching)

    def on_fit_start(self) -> None:
        self._start_engine()

    def on_train_start(self) -> None:
        # sharded checkpoints are restored after on_fit_start: only now are the weights those that will be trained
        self.responder.weights_changed = True
        self.model.train()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # else Lightning logs once more what an earlier iteration has logged and this one does not
        self.trainer.fit_loop.epoch_loop._results.clear()

    def configure_optimizers(self) -> dict[str, Any]:
        if self.trainer.max_steps < 1:
            raise ValueError("trainer.max_steps is not set: give the number of optimizer steps of the stage")
        optimizer = self.make_optimizer([(n, p) for n, p in self.model.named_parameters() if p.requires_grad])
        scheduler = self.schedule.build(optimizer, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # ------------------------------------------------------------------ the update

    def packs(self, rows: Sequence[Row], least: int = 0) -> list[Pass]:
        """Forward passes of this rank's rows, as many on every rank (collectives must match), empty ones where it has
        fewer; at least `least`."""
        parts = packs(rows, self.max_tokens_per_micro_batch, self.policy.can_pack)
        wanted = int(self.over_ranks(max(len(parts), least), "max"))
        parts = parts + [[]] * (wanted - len(parts))
        tags, kind, scheme = self.policy.tags, self.generation.structure, self.generation.positions
        return [make_pass(p, tags, kind, scheme, device=self.device) for p in parts]

    def attempt(self, work: Callable[[], T], rows: Sequence[Row], before_retry: Callable[[], None] | None = None) -> T:
        """Do work on rows; where memory runs out, do it again with a smaller `max_tokens_per_micro_batch`."""
        return faults.in_less_memory(self, work, max(map(len, rows), default=0), before_retry)

    def share(self) -> tuple[int, int]:
        """(rank, ranks): which part of a global batch is here."""
        return self.global_rank, self.trainer.world_size

    @property
    def sharded_offloaded(self) -> bool:
        """Whether the shards stay in CPU memory between passes."""
        return getattr(self, "session", None) is not None and self.session.source.cpu_offload and self.sharded

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of every weight."""
        return ranks.is_sharded(self.trainer)

    def over_ranks(self, value: Tensor | float, op: str = "sum") -> Tensor:
        """Reduce a value over all ranks; on one rank, the value itself. Numbers become float64."""
        # never in the default type, which is bfloat16 under trainer.precision=bf16-true
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        return self.trainer.strategy.reduce(tensor.to(self.device), reduce_op=op)

    def agree(self, level: int) -> int:
        """The highest level of all ranks."""
        return int(self.over_ranks(level, "max"))

    def apply_gradients(self) -> Tensor:
        """Clip, step the optimizer and its schedule. Returns the gradient norm before clipping.

        Where a loss or the gradient of any rank is not finite, the step goes without gradients, which changes neither
        weights nor optimizer state; it counts as a step, so that steps, data and schedule stay in line.
        """
        optimizer = self.optimizers()
        ranks.average_gradients(self.trainer, self.model)
        limit = self.gradient_clip if self.gradient_clip is not None else float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        skip = bool(self.agree(not bool(norm.isfinite() & self._finite)))
        if skip:
            self.drop_gradients()
        optimizer.step()
        self.drop_gradients()
        self.lr_schedulers().step()
        self.responder.weights_changed = True
        self.skipped.count(skip, self.global_step - 1)
        return norm

    def drop_gradients(self) -> None:
        """Forget what has been accumulated since the last optimizer step."""
        self.optimizers().zero_grad(set_to_none=True)
        self._finite = True

    def backward_sum(self, loss_sum: Tensor, denominator: float) -> None:
        """Backward of a sum normalised over all ranks. Gradients are averaged: the number of ranks comes back in."""
        self._finite = loss_sum.detach().isfinite() & self._finite  # no synchronisation a micro-batch
        with ranks.gradients_stay_here(self.trainer):
            self.manual_backward(loss_sum * (self.trainer.world_size / denominator))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_steps"] = [self.skipped.total, self.skipped.in_a_row]
        checkpoint["max_tokens_per_micro_batch"] = self.max_tokens_per_micro_batch  # halved where memory ran out

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped.total, self.skipped.in_a_row = checkpoint["skipped_steps"]
        known = checkpoint["max_tokens_per_micro_batch"]
        self.max_tokens_per_micro_batch = min(self.max_tokens_per_micro_batch, known)

    def peak_memory_gb(self) -> float:
        """The most any rank has used, in GB (1e9 bytes)."""
        return float(self.over_ranks(peak_memory_gb(self.device), "max"))

    # ------------------------------------------------------------------ validation

    def on_validation_start(self) -> None:
        self._start_engine()

    def on_validation_epoch_start(self) -> None:
        # every rank knows the whole split, so all agree on the tiers even where a rank has no problem of one
        tiers = tuple(dict.fromkeys(problem.tier for problem in self.trainer.datamodule.split("val")))
        self.responder.refresh()
        self._metrics = {mode: TierMetrics(tiers).to(self.device) for mode in self.eval_modes}
        self.shown = []

    def validation_step(self, problems: list[Problem], batch_idx: int) -> None:
        first = batch_idx * self.trainer.datamodule.val_batch_size
        for mode, metrics in self._metrics.items():
            rollouts = self.responder.respond(problems, _VALIDATION, share=self.share(), first=first, mode=mode)
            judged = self.responder.judge(problems, rollouts)
            metrics.update(judged)
            if mode == self.eval_modes[0] and len(self.shown) < 8:
                self.shown += judged[: 8 - len(self.shown)]

    def on_validation_epoch_end(self) -> None:
        self.responder.rest()
        self.evaluation = {}
        for mode, metrics in self._metrics.items():
            for key, value in metrics.compute().items():
                tier, name = key.split("/")
                self.evaluation[key if mode == "free" else f"{tier}/forced_{mode}/{name}"] = value
        self.log_dict({f"val/{key}": float(value) for key, value in self.evaluation.items()}, sync_dist=True)

    # ------------------------------------------------------------------ hand-over

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names. Collective over ranks."""
        return self.policy.weights()

    def release(self) -> None:
        """Drop the model, so that the next stage has the memory."""
        self.model = None
        del self.policy, self.responder
