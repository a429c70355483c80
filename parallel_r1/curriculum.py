"""The curriculum: named stages in order, each from a model folder to a model folder.

<root>/config.yaml               the configuration as it ran
<root>/base/                     the start policy, tags added
<root>/stages/<name>/model/      the finished stage, a Hugging Face folder; the next stage starts from it
<root>/stages/<name>/stage.json  its record; written last, so a stage that has one is finished
<root>/stages/<name>/checkpoints/  the two newest of a stage in training: the next `fit` goes on from there
<root>/stages/<name>/rollouts/   responses of its training, where `save_rollouts` asks for them
<root>/tensorboard/<name>/       its events; the step axis goes on where the stage before stopped
<root>/aside/<n>/                what a fresh start or a restart took out of the way
<root>/summary.json              before and after of every finished stage
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, make_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Optional, get_type_hints

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from parallel_r1.data.datamodules import ProblemDataModule
from parallel_r1.data.overlap import stage_overlaps
from parallel_r1.files import write_json
from parallel_r1.modules.base import Session, StageModule
from parallel_r1.policy import PolicySource, export_policy, is_model_folder
from parallel_r1.resume import Checkpoints, StopSignals
from parallel_r1.rollout.engine import RolloutEngine

Task = Literal["fit", "validate", "test", "predict"]

# set once a run, not once a stage
_SHARED_BY_STAGES = ("self", "kwargs", "callbacks", "logger", "plugins", "strategy", "profiler", "default_root_dir")
_hints = get_type_hints(L.Trainer.__init__)
TrainerOverrides = make_dataclass(
    "TrainerOverrides",
    [
        (n, Optional[_hints.get(n, Any)], None)  # noqa: UP045 - a type computed at run time
        for n in signature(L.Trainer.__init__).parameters
        if n not in _SHARED_BY_STAGES
    ],
)
TrainerOverrides.__module__ = __name__
TrainerOverrides.__doc__ = "Trainer arguments of one stage; null takes the value under `trainer`."


@dataclass
class Stage:
    """One stage of the curriculum.

    Args:
        module: what is trained: SFTModule or RLModule.
        data: what it is trained and validated on.
        trainer: Trainer arguments of this stage alone, such as max_steps.
        init_from: where its policy comes from: `previous` (the stage before, or the base policy), `base`, the name of
            an earlier stage, or a model folder.
    """

    module: StageModule
    data: ProblemDataModule
    trainer: TrainerOverrides = field(default_factory=TrainerOverrides)
    init_from: str = "previous"

    def overrides(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self.trainer).items() if v is not None}


@dataclass(frozen=True)
class StageRecord:
    """What a finished stage leaves. before, after: held-out metrics `<tier>/<metric>`; steps: optimizer steps."""

    name: str
    module: str
    steps: int
    wall_s: float
    before: dict[str, float]
    after: dict[str, float]


class Curriculum:
    """Runs stages one after another in one process, the engine kept alive between them.

    Args:
        stages: by name, in order.
        make_trainer: (stage name, step offset, overrides, callbacks) -> Trainer.
        only, start_at: which stages to run; see `chosen`.
        checkpoint_every, checkpoint_minutes: see `resume.Checkpoints`.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        seed: int,
        stages: dict[str, Stage],
        source: PolicySource,
        engine: RolloutEngine,
        make_trainer: Callable[[str, int, dict[str, Any], list[L.Callback]], L.Trainer],
        only: list[str] | None = None,
        start_at: str | None = None,
        checkpoint_every: int | None = None,
        checkpoint_minutes: float = 10.0,
    ) -> None:
        self.name, self.root, self.seed = name, root, seed
        self.stages, self.source, self.engine = stages, source, engine
        self.make_trainer, self.only, self.start_at = make_trainer, only, start_at
        self.checkpoint_every, self.checkpoint_minutes = checkpoint_every, checkpoint_minutes
        self.stop = StopSignals()

    # ------------------------------------------------------------------ before anything is loaded

    def check(self, task: Task) -> None:
        """Find what can be found before a model is loaded. Raises ValueError or FileNotFoundError, naming the stage."""
        if not self.stages:
            raise ValueError("curriculum.stages is empty: give --config with at least one stage (see configs/)")
        asked = [("only", name) for name in self.only or []] + [("start_at", name) for name in [self.start_at] if name]
        for option, name in asked:
            if name not in self.stages:
                raise ValueError(
                    f"curriculum.{option}: there is no stage {name!r}; the stages are {', '.join(self.stages)}"
                )
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ValueError(f"curriculum.checkpoint_every={self.checkpoint_every}: give 1 iteration or more, or null")
        self.source.check()
        names = list(self.stages)
        for i, (name, stage) in enumerate(self.stages.items()):
            try:
                stage.module.check()
                if name in self.chosen(task):
                    stage.data.check(task)
                self._check_start(stage.init_from, names[:i])
            except (ValueError, FileNotFoundError) as error:
                raise type(error)(f"stage {name}: {error}") from error
            if task == "fit" and (stage.trainer.max_steps or 0) < 1:
                raise ValueError(
                    f"stage {name}: curriculum.stages.{name}.trainer.max_steps is {stage.trainer.max_steps}; give the "
                    "number of its optimizer steps"
                )
        if task == "fit":
            self._report_overlaps()

    def _report_overlaps(self) -> None:
        """Say which stages train on what other stages are validated on."""
        chosen = {name: self.stages[name].data for name in self.chosen("fit")}
        trains = {name: data.split("train") for name, data in chosen.items()}
        for line in stage_overlaps(trains, {name: data.split("val") for name, data in chosen.items()}):
            rank_zero_info(line)

    def _check_start(self, init_from: str, earlier: list[str]) -> None:
        if init_from in ("previous", "base", *earlier) or is_model_folder(Path(init_from)):
            return
        known = ", ".join(["previous", "base", *earlier])
        raise ValueError(f"init_from={init_from!r} is neither one of {known} nor a model folder")

    def chosen(self, task: Task) -> list[str]:
        """The stages to run: those of `only`, or from `start_at` on; else all in `fit`, the last finished otherwise."""
        names = list(self.stages)
        names = names[names.index(self.start_at) if self.start_at else 0 :]
        names = [name for name in names if not self.only or name in self.only]
        if task == "fit" or self.only:
            return names
        return [name for name in names if self.finished(name)][-1:] or names[-1:]

    def prepare(self, task: Task) -> None:
        """Write the base policy where a stage will start from it. Raises ValueError if it cannot be loaded."""
        waiting = [name for name in self.chosen(task) if not self.finished(name)]
        if not any(self.starts_from_base(name) for name in waiting):
            return
        if is_first_rank():
            self.source.prepare(self.root / "base", self.seed)
        else:  # there is no process group yet to wait in
            _wait_for_model(self.root / "base")

    # ------------------------------------------------------------------ running

    def fit(self) -> list[StageRecord]:
        """Train every stage that is not finished yet, from where it stands. Returns the records of finished stages.

        SIGTERM and SIGINT save the stage in training and raise `resume.StopRun`.
        """
        self.stop.install()
        for name in self.chosen("fit"):
            if self.finished(name):
                rank_zero_info(f"stage {name} is finished: skipped")
                if is_first_rank():
                    Checkpoints.remove(self.root, name)
            else:
                self._fit_stage(name)
        self.engine.close()
        if is_first_rank() and self.records():  # a kill may have come between a stage's record and the summary
            self.write_summary()
        return self.records()

    def _fit_stage(self, name: str) -> None:
        stage = self.stages[name]
        folder = self.start_folder(name)
        offset = sum(self.record(n).steps for n in self._before(name) if self.finished(n))
        keeper = Checkpoints(self.root, name, self.checkpoint_every, self.checkpoint_minutes, self.stop)
        trainer = self.make_trainer(name, offset, stage.overrides(), [keeper])
        self.stop.together = trainer.world_size > 1
        module = stage.module
        module.attach(Session(self.source, self.engine, folder, self.seed, offset, self.folder(name)))
        if trainer.is_global_zero:
            keeper.prepare()
        if not keeper.resumes:
            keeper.before = self._known_evaluation(name, folder) or self._evaluate(trainer, stage)
        trainer.fit(module, datamodule=stage.data)
        after = self._evaluate(trainer, stage)
        weights = {}
        for key, tensor in module.export_weights():  # collective: every rank takes part, the first one keeps
            if trainer.is_global_zero:
                weights[key] = tensor.detach().cpu()
        if trainer.is_global_zero:
            export_policy(module.policy, self.folder(name) / "model", weights, module.responder.prompt)
            kind, steps = type(module).__name__, trainer.global_step
            record = StageRecord(name, kind, steps, keeper.seconds, keeper.before, after)
            write_json(self.folder(name) / "stage.json", asdict(record))
            Checkpoints.remove(self.root, name)
            self.write_summary()
        trainer.strategy.barrier()
        module.release()

    def _evaluate(self, trainer: L.Trainer, stage: Stage) -> dict[str, float]:
        if not stage.data.split("val"):
            return {}
        trainer.validate(stage.module, datamodule=stage.data, verbose=False)
        return dict(stage.module.evaluation)

    def _known_evaluation(self, name: str, folder: Path) -> dict[str, float] | None:
        """The last evaluation of the stage before, where it was of the same policy, problems and sampling."""
        earlier = self._before(name)
        if not earlier or not self.finished(earlier[-1]) or folder != self.folder(earlier[-1]) / "model":
            return None
        here, there = self.stages[name], self.stages[earlier[-1]]
        same = (
            here.module.generation == there.module.generation
            and here.module.eval_modes == there.module.eval_modes
            and [p.id for p in here.data.split("val")] == [p.id for p in there.data.split("val")]
        )
        return self.record(earlier[-1]).after if same else None

    def validate(self) -> dict[str, dict[str, float]]:
        """Validate the policy of each chosen stage. Returns the metrics by stage."""
        results = {}
        for name in self.chosen("validate"):
            stage = self.stages[name]
            done = self.finished(name)
            if not done:
                rank_zero_info(f"stage {name} is not finished in {self.root}: using the policy it would start from")
            folder = self.folder(name) / "model" if done else self.start_folder(name)
            trainer = self.make_trainer(name, 0, stage.overrides(), [])
            stage.module.attach(Session(self.source, self.engine, folder, self.seed))
            trainer.validate(stage.module, datamodule=stage.data, verbose=False)
            results[name] = dict(stage.module.evaluation)
            stage.module.release()
        self.engine.close()
        return results

    # ------------------------------------------------------------------ what is on disk

    def folder(self, name: str) -> Path:
        return self.root / "stages" / name

    def finished(self, name: str) -> bool:
        return (self.folder(name) / "stage.json").is_file() and is_model_folder(self.folder(name) / "model")

    def record(self, name: str) -> StageRecord:
        return StageRecord(**json.loads((self.folder(name) / "stage.json").read_text()))

    def records(self) -> list[StageRecord]:
        return [self.record(name) for name in self.stages if self.finished(name)]

    def start_folder(self, name: str) -> Path:
        """The model folder a stage starts from. Raises ValueError if the stage that should have made it never ran."""
        init_from = self.stages[name].init_from
        earlier = self._before(name)
        if self.starts_from_base(name):
            return self.root / "base"
        source = earlier[-1] if init_from == "previous" else init_from
        if source not in self.stages:
            return Path(source)
        if not self.finished(source):
            raise ValueError(
                f"stage {name} starts from stage {source}, which is not finished in {self.root}; run it first"
            )
        return self.folder(source) / "model"

    def starts_from_base(self, name: str) -> bool:
        """Whether a stage starts from the base policy of the run."""
        init_from = self.stages[name].init_from
        return init_from == "base" or (init_from == "previous" and not self._before(name))

    def _before(self, name: str) -> list[str]:
        names = list(self.stages)
        return names[: names.index(name)]

    def write_summary(self) -> None:
        stages = [asdict(record) for record in self.records()]
        write_json(self.root / "summary.json", {"name": self.name, "seed": self.seed, "stages": stages})


def _wait_for_model(folder: Path, limit_s: float = 3600.0) -> None:
    """Wait until the first rank has written a model folder. Raises TimeoutError after `limit_s` seconds."""
    start = time.monotonic()
    while not is_model_folder(folder):
        if time.monotonic() - start > limit_s:
            raise TimeoutError(f"the first rank has not written {folder} within {limit_s:.0f} s; see its messages")
        time.sleep(0.5)


def is_first_rank() -> bool:
    """Before there is a process group Lightning reads the rank from the launcher's environment."""
    return getattr(rank_zero_only, "rank", 0) in (None, 0)
