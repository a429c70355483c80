"""The command line: `python -m parallel_r1 {fit,validate,test,predict} --config FILE [--key=value ...]`.

A LightningCLI whose model and data come in named stages. Stage names are read from the config files first, so that
each stage gets typed options of its own (`--curriculum.stages.hard.trainer.max_steps=5`), several files merge key by
key, and an unknown key is refused with its name.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from parallel_r1.callbacks import BehaviourFigures, RolloutTable, StageLogger, StageProgress, print_summary
from parallel_r1.changes import OnChange, put_aside, settle
from parallel_r1.curriculum import Curriculum, Stage, is_first_rank
from parallel_r1.evaluate import Evaluator
from parallel_r1.evaluate_options import Evaluation, Prediction
from parallel_r1.evaluation.answer_text import answer_text
from parallel_r1.evaluation.samples import InUseError
from parallel_r1.files import write_json, write_text
from parallel_r1.modules.faults import StageError
from parallel_r1.planning import plan_run
from parallel_r1.policy import PolicySource
from parallel_r1.resume import CheckpointError, StopRun, exit_stopped
from parallel_r1.rollout.engine import RolloutEngine
from parallel_r1.shell import TASKS

SHOWN_ANSWERS = 20
"""Predictions printed; the file holds all."""

DEFAULT_ENGINE = {"class_path": "parallel_r1.rollout.vllm_engine.VLLMEngine"}


class CurriculumCLI(LightningCLI):
    """LightningCLI over `curriculum.stages`: it parses and instantiates; `main` runs."""

    def __init__(self, args: list[str]) -> None:
        self._args, self._stage_names = args, stage_names(args)
        super().__init__(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # else the config of the absent `model` would overwrite the hyperparameters of every stage's module
            load_from_checkpoint_support=False,
            trainer_defaults={
                "enable_checkpointing": False,
                "enable_model_summary": False,
                "enable_progress_bar": True,
                "use_distributed_sampler": False,
                "num_sanity_val_steps": 0,
                "check_val_every_n_epoch": None,
                "log_every_n_steps": 1,
                "inference_mode": False,  # the engine's and the policy's tensors are trained and overwritten later
            },
            parser_kwargs={
                "prog": "python -m parallel_r1",
                "usage": "python -m parallel_r1 {fit,validate,test,predict} --config FILE [--key=value ...]",
                "description": "Train language models to think in parallel, stage by stage.",
            },
            args=None if args == sys.argv[1:] else args,
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{key}": value for key, value in self.trainer_defaults.items()})
        parser.add_class_arguments(PolicySource, "policy", sub_configs=True)
        parser.add_subclass_arguments(RolloutEngine, "engine", required=False)
        parser.set_defaults({"engine": DEFAULT_ENGINE})
        parser.add_argument("--curriculum.name", type=str, default="run", help="name of the run, kept in summary.json")
        parser.add_argument(
            "--curriculum.root", type=str, default=None, help="folder of the run (default: runs/<name>)"
        )
        parser.add_argument(
            "--curriculum.only", type=list[str] | str | None, default=None, help="run these stages alone"
        )
        parser.add_argument(
            "--curriculum.start_at",
            type=str | None,
            default=None,
            help="run this stage and those after it; finished ones are skipped as ever",
        )
        parser.add_argument(
            "--curriculum.fresh",
            type=bool,
            default=False,
            help="do the stages that are run anew; what they left is moved to <root>/aside/<n>, nothing is deleted",
        )
        parser.add_argument(
            "--curriculum.on_change",
            type=OnChange,
            default="error",
            help="where the configuration is not the one the run was begun with, in a stage that has begun: refuse and "
            "show the differences; continue under the new one; restart the first stage it touches and all after it",
        )
        parser.add_argument(
            "--curriculum.plan_only", type=bool, default=False, help="print the plan of the run, check it and stop"
        )
        parser.add_argument(
            "--curriculum.checkpoint_every",
            type=int | None,
            default=None,
            help="iterations between checkpoints of a stage in training; null: by time alone",
        )
        parser.add_argument(
            "--curriculum.checkpoint_minutes",
            type=PositiveFloat,
            default=10.0,
            help="minutes between checkpoints, where checkpoint_every does not come first",
        )
        parser.add_class_arguments(Evaluation, "evaluation", sub_configs=True)
        parser.add_class_arguments(Prediction, "predict", sub_configs=True)
        parser.add_argument("--problem", action="append", type=str, help="a problem for predict; may be repeated")
        for name in self._stage_names:
            parser.add_class_arguments(Stage, f"curriculum.stages.{name}", sub_configs=True)

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate(self.config)

    def _run_subcommand(self, subcommand: str) -> None:
        pass  # `main` runs it, outside the constructor

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Build only the options of the subcommand that is asked for: each set takes a second."""
        asked = next((arg for arg in self._args if arg in TASKS), None)
        actions = parser.add_subcommands(prog="python -m parallel_r1")
        for task, text in TASKS.items():
            usage = f"python -m parallel_r1 {task} --config FILE [--key=value ...]"
            sub = self.init_parser(description=text, usage=usage)
            if task == asked:
                self._add_arguments(sub)
                self._task_parser = sub
            actions.add_subcommand(task, sub, help=text)

    @property
    def options(self) -> Namespace:
        return self.config_init[self.subcommand]

    def curriculum(self) -> Curriculum:
        """The runner, as configured."""
        options = self.options
        chosen = options.curriculum
        return Curriculum(
            chosen.name,
            Path(chosen.root or f"runs/{chosen.name}"),
            options.seed_everything,
            {name: chosen.stages[name] for name in self._stage_names},
            options.policy,
            options.engine,
            self.make_trainer,
            [chosen.only] if isinstance(chosen.only, str) else chosen.only,
            chosen.start_at,
            chosen.checkpoint_every,
            chosen.checkpoint_minutes,
        )

    def evaluator(self) -> Evaluator:
        """The runner of `test` and `predict`, as configured."""
        options = self.options
        asked = list(options.problem or [])
        return Evaluator(self.curriculum(), options.evaluation, options.predict, asked, self.make_trainer)

    def make_trainer(self, stage: str, step_offset: int, overrides: dict[str, Any], own: list[Callback]) -> Trainer:
        """A Trainer for one stage: the shared arguments, its own overrides and callbacks, its logger and its bar."""
        # anew for each stage: a strategy or a callback belongs to the Trainer that first used it
        shared = dict(self.parser.instantiate(self.config)[self.subcommand].trainer)
        root = Path(self.options.curriculum.root or f"runs/{self.options.curriculum.name}")
        callbacks = shared.pop("callbacks", None) or []
        callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        config = {**shared, **overrides}
        if config.get("logger") in (None, True):
            config["logger"] = StageLogger(root, stage, step_offset)
        if config.get("enable_progress_bar", True):
            callbacks.append(StageProgress(stage))
        config["default_root_dir"] = config.get("default_root_dir") or root / "stages" / stage
        return Trainer(**config, callbacks=[*callbacks, RolloutTable(), BehaviourFigures(), *own])

    def kept_config(self) -> dict[str, Any]:
        """The configuration as it runs, as plain values, short of what a single command asks for."""
        config = yaml.safe_load(self._task_parser.dump(self.config[self.subcommand], skip_unset=True))
        for option in ("only", "start_at", "fresh", "on_change", "plan_only"):
            config["curriculum"].pop(option, None)
        return config

    def settle(self, curriculum: Curriculum) -> None:
        """Make the run's folder ready for this configuration, and keep it there beside the results.

        Raises ValueError where the folder holds what another configuration has begun.
        """
        chosen, root = self.options.curriculum, curriculum.root
        if (chosen.fresh or chosen.on_change == "restart") and ranks_started_together() > 1:
            raise ValueError(
                "curriculum.fresh and curriculum.on_change=restart move folders that other ranks may be reading: "
                f"move {curriculum.root}, or folders of stages in it, out of the way by hand, then start the ranks"
            )
        stages, new = curriculum.chosen("fit"), self.kept_config()
        done = put_aside(root, stages, base=len(stages) == len(curriculum.stages)) if chosen.fresh else []
        for line in done + settle(root, new, chosen.on_change):
            print(line, file=sys.stderr)
        write_text(root / "config.yaml", yaml.safe_dump(new, sort_keys=False, allow_unicode=True))


def ranks_started_together() -> int:
    """Processes that a launcher (torchrun, srun) has started with this one; 1 where Lightning will start them."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)


def stage_names(args: list[str]) -> list[str]:
    """Names of all stages in the config files of a command line, in order of first mention.

    Raises FileNotFoundError for a missing file, ValueError for one that is no YAML mapping or whose stages are none,
    and for an option that names a stage of none of them.
    """
    names: dict[str, None] = {}
    for path in _values(args, ("--config", "-c")):
        try:
            content = yaml.safe_load(Path(path).read_text())
        except FileNotFoundError:
            raise FileNotFoundError(f"--config {path}: there is no such file") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"--config {path}: not a readable YAML file: {error}") from None
        stages = (
            ((content or {}).get("curriculum") or {}).get("stages") or {} if isinstance(content, dict | None) else None
        )
        if not isinstance(stages, dict):
            raise ValueError(f"--config {path}: expected a mapping with `curriculum: {{stages: {{name: ...}}}}`")
        names.update(dict.fromkeys(stages))
        _refuse_truncated_sampling(yaml.safe_dump(content), path)
    _refuse_truncated_sampling("\n".join(arg.split("=")[0].split(".")[-1] + ":" for arg in args), "command line")
    prefix = "--curriculum.stages."
    for arg in args:
        if arg.startswith(prefix) and (name := arg[len(prefix) :].split(".")[0].split("=")[0]) not in names:
            raise ValueError(f"{arg}: there is no stage {name!r}; the stages are {', '.join(names) or 'none'}")
    if not names and {"-h", "--help"} & set(args):
        return ["NAME"]  # shows a stage's options
    return list(names)


def _refuse_truncated_sampling(text: str, place: str) -> None:
    found = re.search(r"(?m)(?:^|[\s{,])(top_p|top_k|min_p):", text)
    if found:
        raise ValueError(
            f"{place}: there is no {found[1]}, on purpose. Cutting the tail of the distribution means that responses "
            "come from another policy than the one whose log-probabilities are trained, which biases every "
            "update; sample from all of it, and shape it with generation.temperature alone"
        )


def _values(args: list[str], flags: tuple[str, ...]) -> list[str]:
    found = []
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag in flags and (equals or i + 1 < len(args)):
            found.append(value if equals else args[i + 1])
    return found


def main(args: list[str] | None = None) -> None:
    """Entry point. A user's mistake ends in one message and exit status 2, before any model is loaded."""
    args = sys.argv[1:] if args is None else args
    quiet_libraries()
    try:
        cli = CurriculumCLI(args)
        task = cli.subcommand
        if task in ("test", "predict"):
            evaluator = cli.evaluator()
            evaluator.prepare(task)
        else:
            curriculum = cli.curriculum()
            curriculum.check(task)
            if task == "fit" and is_first_rank():
                print(plan_run(curriculum, cli.options.trainer).text(), file=sys.stderr)
                if cli.options.curriculum.plan_only:
                    return
                cli.settle(curriculum)
            curriculum.prepare(task)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if task in ("test", "predict"):
        evaluate(evaluator, task)
        return
    try:
        results = curriculum.fit() if task == "fit" else curriculum.validate()
    except StopRun as stop:
        exit_stopped(stop.signum, is_first_rank(), curriculum.root)
    except CheckpointError as error:
        print(f"error: {error.strerror or error}", file=sys.stderr)
        raise SystemExit(1) from None
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if is_first_rank():
        report(task, results, curriculum.root)


def evaluate(evaluator: Evaluator, task: str) -> None:
    """Run `test` or `predict` and show what it found."""
    try:
        found = evaluator.test() if task == "test" else evaluator.predict()
    except InUseError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if not is_first_rank():
        return
    if task == "test":
        for folder in found.values():
            print((folder / "report.md").read_text(encoding="utf-8"))
            print(f"report: {folder / 'report.md'}, report.json and report.html", file=sys.stderr)
        return
    for path, rows in found.values():
        print("\n\n".join(answer_text(row, i, len(rows)) for i, row in enumerate(rows[:SHOWN_ANSWERS], 1)))
        print(f"{len(rows)} predictions: {path}", file=sys.stderr)


# what libraries say that a user can do nothing about
_NOISE = (
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",
    r".*`torch.distributed.reduce_op` is deprecated",
    r".*does not have many workers",
    r".*Consider setting `persistent_workers",
    r".*module\(s\) in eval mode at the start of training",
    r"predict returned None",
    r"It is recommended to use `self.log",  # vLLM's process group makes one rank look like several
    r".*torch.jit.script",
)
_CHATTER = ("💡 Tip", "GPU available", "TPU available", "HPU available", "`Trainer.", "Trainer already configured")


def quiet_libraries() -> None:
    """Keep the terminal for what concerns the user: progress, warnings about the run, errors."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith((*_CHATTER, "Seed set")))


def report(task: str, results: Any, root: Path) -> None:
    """Show what `fit` or `validate` found, write that of `validate` to the run folder, and say where it lies."""
    if task == "fit":
        print_summary(results, root)
        print(f"summary: {root / 'summary.json'}   watch: tensorboard --logdir {root}/tensorboard")
        print(f"curves, behaviour and responses as one page: python tools/view.py {root}")
        return
    path = root / f"{task}.json"
    write_json(path, results)
    print(json.dumps(results, indent=2))
    print(f"{task}: {path}", file=sys.stderr)
