"""Who writes the candidates. Here: the interface, and a model in this process; `endpoint` asks a server.

A teacher is asked for single candidates, each with a seed of its own that depends on the problem and the number of the
candidate alone: a run that is cut short and started again asks for exactly what is missing, and gets the same.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from parallel_r1.data.prompts import encode_prompt
from parallel_r1.rollout.engine import Request, RolloutEngine, Sampling
from parallel_r1.traces.store import Candidate, Key
from parallel_r1.types import Problem


class TeacherError(RuntimeError):
    """The teacher cannot go on. What it wrote so far is kept; a run started again goes on from there."""


@dataclass(frozen=True)
class Ask:
    """One candidate to write. seed: in [0, 2**31)."""

    problem: Problem
    index: int
    seed: int

    @property
    def key(self) -> Key:
        return self.problem.id, self.index


@dataclass(frozen=True)
class Refusal:
    """A request that the teacher would not answer, such as a prompt above its context. Asked again by the next run."""

    key: Key
    cause: str


def candidate_seed(seed: int, problem_id: str, index: int) -> int:
    """The sampling seed of a candidate, in [0, 2**31)."""
    digest = hashlib.blake2b(f"{seed}/{problem_id}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def missing(problems: Iterable[Problem], per_problem: int, seed: int, done: Mapping[Key, Any]) -> Iterator[Ask]:
    """The candidates 0 ... per_problem - 1 of each problem that are not done yet, problem by problem."""
    for problem in problems:
        for index in range(per_problem):
            if (problem.id, index) not in done:
                yield Ask(problem, index, candidate_seed(seed, problem.id, index))


class Teacher(ABC):
    """Writes candidates."""

    @abstractmethod
    def write(self, asks: Iterable[Ask]) -> Iterator[list[Candidate | Refusal]]:
        """The answer to every ask, in any order, as they come. Raises TeacherError when it cannot go on."""


class EngineTeacher(Teacher):
    """Samples a local model folder with a `RolloutEngine`, `batch` candidates a call; tags stay in the text."""

    def __init__(
        self,
        engine: RolloutEngine,
        folder: Path,
        template: str,
        max_tokens: int,
        temperature: float,
        batch: int = 256,
    ) -> None:
        self.engine, self.folder, self.template = engine, folder, template
        self.max_tokens, self.temperature, self.batch = max_tokens, temperature, batch
        self._started = False

    def write(self, asks: Iterable[Ask]) -> Iterator[list[Candidate | Refusal]]:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        from parallel_r1.policy import eos_ids_of

        tokenizer, waiting = AutoTokenizer.from_pretrained(self.folder), iter(asks)
        try:
            generation = GenerationConfig.from_pretrained(self.folder)
        except OSError:  # it has none
            generation = None
        config = AutoConfig.from_pretrained(self.folder)
        eos = eos_ids_of(SimpleNamespace(config=config, generation_config=generation), tokenizer)
        hidden = {*eos, tokenizer.pad_token_id}
        while part := list(islice(waiting, self.batch)):
            if not self._started:
                self.engine.start(self.folder)
                self._started = True
            yield self._write(part, tokenizer, eos, hidden)

    def _write(self, part: Sequence[Ask], tokenizer: Any, eos: tuple[int, ...], hidden: set[int]) -> list[Candidate]:
        prompts = [encode_prompt(tokenizer, self.template, ask.problem.question) for ask in part]
        requests = [Request(ids, self.max_tokens, ask.seed) for ids, ask in zip(prompts, part, strict=True)]
        try:
            rollouts = self.engine.generate(requests, Sampling(self.temperature, eos))
        except ValueError as error:
            raise TeacherError(f"the engine cannot hold a request: {error}") from None
        texts = [
            tokenizer.decode(
                [i for i in rollout.response_ids if i not in hidden],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            for rollout in rollouts
        ]
        return [
            Candidate(ask.problem.id, ask.index, text, rollout.finished)
            for ask, text, rollout in zip(part, texts, rollouts, strict=True)
        ]
