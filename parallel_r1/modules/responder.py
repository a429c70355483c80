"""Problems in, judged responses out: the part that training, validation, test and prediction share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parallel_r1.data.prompts import encode_prompt, load_template
from parallel_r1.policy import Policy
from parallel_r1.reward.grading import grade
from parallel_r1.rollout.engine import Request, RolloutEngine, Sampling, request_seed
from parallel_r1.structure.grammar import Structure, parse
from parallel_r1.structure.tokens import token_counts
from parallel_r1.types import Judged, Problem, Rollout

Mode = Literal["free", "parallel", "sequential"]


@dataclass
class Generation:
    """How a problem becomes a response.

    Args:
        structure: `seen` (one causal stream that may hold blocks), `unseen` (isolated paths) or `sequential` (the tags
            are never sampled).
        prompt: the instruction around a problem: `parallel`, `sequential`, `plain`, or a text file with one `{problem}`.
        max_tokens: limit of a response in tokens.
        temperature: of sampling, in training and in evaluation.
    """

    structure: Structure = "seen"
    prompt: str = "parallel"
    max_tokens: int = 1024
    temperature: float = 1.0

    def check(self) -> None:
        """Raise ValueError for settings that can never work."""
        load_template(self.prompt)
        if self.max_tokens < 1:
            raise ValueError(f"generation.max_tokens={self.max_tokens}: a response needs at least one token")
        if self.temperature <= 0:
            raise ValueError(
                f"generation.temperature={self.temperature}: training samples, so it must be above 0 (1.0 is standard)"
            )


class Responder:
    """Samples with the engine, always from the current weights of the policy, and has the answers judged."""

    def __init__(self, policy: Policy, engine: RolloutEngine, generation: Generation, seed: int) -> None:
        self.policy, self.engine, self.generation, self.seed = policy, engine, generation, seed
        self.weights_changed = True
        self._template = load_template(generation.prompt)
        self._prompts: dict[str, tuple[int, ...]] = {}

    def banned(self, mode: Mode = "free") -> tuple[int, ...]:
        """Ids that may not be sampled: every tag in sequential generation, none else."""
        sequential = mode == "sequential" or self.generation.structure == "sequential"
        return self.policy.tags.all() if sequential else ()

    def refresh(self) -> float:
        """Bring the engine's weights up to date if they changed. Returns the seconds it took. Collective over ranks."""
        if not self.weights_changed:
            return 0.0
        start = time.perf_counter()
        self.engine.sync(self.policy.weights())
        self.weights_changed = False
        return time.perf_counter() - start

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """The prompt of a problem, encoded once."""
        if problem.id not in self._prompts:
            self._prompts[problem.id] = encode_prompt(self.policy.tokenizer, self._template, problem.question)
        return self._prompts[problem.id]

    def respond(
        self,
        problems: Sequence[Problem],
        iteration: int,
        group_size: int = 1,
        share: tuple[int, int] = (0, 1),
        first: int = 0,
        mode: Mode = "free",
        temperature: float | None = None,
    ) -> list[Rollout]:
        """Sample `group_size` responses a problem, problem by problem: [P * G].

        share: (rank, ranks). Problem p here is problem first + p * ranks + rank of the global batch, and the seed of a
        response depends on that alone: no two ranks share one, and their number changes nothing. mode `parallel` starts
        every response with `<Parallel>`, `sequential` bans the tags.
        """
        rank, ranks = share
        if self.weights_changed:
            raise RuntimeError("the engine's weights are stale: call refresh() on every rank before respond()")
        prefix = (self.policy.tags.parallel,) if mode == "parallel" else ()
        requests = [
            Request(
                self.prompt_ids(problem),
                self.generation.max_tokens,
                request_seed(self.seed, iteration, (first + p * ranks + rank) * group_size + g),
                prefix,
            )
            for p, problem in enumerate(problems)
            for g in range(group_size)
        ]
        heat = self.generation.temperature if temperature is None else temperature
        return self.engine.generate(requests, Sampling(heat, self.policy.eos_ids, self.banned(mode)))

    def judge(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> list[Judged]:
        """Judge one rollout a problem (repeat a problem for each response of its group). A cut response is never right."""
        texts = [self.policy.decode(r.response_ids) for r in rollouts]
        verdicts = grade([(problem.answer, text) for problem, text in zip(problems, texts, strict=True)])
        judged = []
        for problem, rollout, text, verdict in zip(problems, rollouts, texts, verdicts, strict=True):
            total, critical = token_counts(rollout.response_ids, rollout.sampled, self.policy.tags)
            judged.append(
                Judged(
                    problem, text, parse(text), verdict.correct and rollout.finished, rollout.finished, total, critical
                )
            )
        return judged
