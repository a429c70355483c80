"""Problems in, judged responses out: the part that training, validation, test and prediction share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from parallel_r1.data.prompts import AUTO, Prompt, choose_prompt, encode_prompt, load_template
from parallel_r1.modules.faults import EngineRecovery
from parallel_r1.modules.ranks import EngineRanks
from parallel_r1.policy import Policy
from parallel_r1.reward.grading import grade
from parallel_r1.rollout.engine import Branching, Request, RolloutEngine, Sampling, request_seed
from parallel_r1.structure.grammar import Structure, parse
from parallel_r1.structure.layout import Positions
from parallel_r1.structure.tokens import token_counts
from parallel_r1.types import Judged, Problem, Rollout
from parallel_r1.vocabulary import Vocabulary

Mode = Literal["free", "parallel", "sequential"]


@dataclass
class Generation:
    """How a problem becomes a response.

    Args:
        structure: `seen` (one causal stream that may hold blocks), `unseen` (isolated paths) or `sequential` (the tags
            are never sampled).
        prompt: the instruction around a problem: `parallel`, `sequential`, `plain`, or a text file with one
            `{problem}`; `auto` takes that of the model folder that the stage starts from, else that of the structure.
        max_tokens: limit of a response in tokens.
        max_prompt_tokens: problems with a longer prompt are left out of training, and counted; null: none is. In an
            evaluation none is left out: one that the engine cannot hold is an error that names the problem.
        temperature: of sampling, in training and in evaluation.
        positions: `unseen`: where the text after a block stands: `longest` goes on from the longest path, `index` at
            the token's own index, which needs no model class of its own in vLLM.
        paths: `unseen`: paths of a block, or [fewest, most] to draw the number for each block.
        max_blocks: `unseen`: blocks a response may open; after them `<Parallel>` is not sampled any more.
        max_path_tokens: `unseen`: sampled tokens of one path, its closing tag included; a path cut there is closed by
            force. null: an equal share of what is left of max_tokens.
        max_summary_tokens: `unseen`: the same for one summary; null: what is left of max_tokens.
        path_index: `unseen`: write the number of a path after its `<Path>`, as demonstrations that number theirs do.
    """

    structure: Structure = "seen"
    prompt: str = AUTO
    max_tokens: int = 1024
    max_prompt_tokens: int | None = None
    temperature: float = 1.0
    positions: Positions = "longest"
    paths: int | list[int] = 2
    max_blocks: int = 4
    max_path_tokens: int | None = None
    max_summary_tokens: int | None = None
    path_index: bool = False

    @property
    def branching(self) -> Positions | None:
        """What an engine has to be started for: a scheme of positions for isolated paths, None for plain text."""
        return self.positions if self.structure == "unseen" else None

    @property
    def path_range(self) -> tuple[int, int]:
        """The fewest and the most paths of a block."""
        return (self.paths, self.paths) if isinstance(self.paths, int) else (self.paths[0], self.paths[-1])

    def check(self) -> None:
        """Raise ValueError for settings that can never work."""
        if self.prompt != AUTO:
            load_template(self.prompt)
        if self.max_tokens < 1:
            raise ValueError(f"generation.max_tokens={self.max_tokens}: a response needs at least one token")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"generation.max_prompt_tokens={self.max_prompt_tokens}: give 1 or more, or null for all")
        if self.temperature <= 0:
            raise ValueError(
                f"generation.temperature={self.temperature}: training samples, so it must be above 0 (1.0 is standard)"
            )
        if self.structure == "unseen":
            self._check_blocks()

    def _check_blocks(self) -> None:
        fewest, most = self.path_range
        if (not isinstance(self.paths, int) and len(self.paths) != 2) or not 2 <= fewest <= most:
            raise ValueError(f"generation.paths={self.paths}: give a number from 2 on, or [fewest, most]")
        if self.max_blocks < 1:
            raise ValueError(
                f"generation.max_blocks={self.max_blocks}: give 1 or more; for no blocks choose structure: sequential"
            )
        for name in ("max_path_tokens", "max_summary_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"generation.{name}={value}: give 1 or more, or null for what is left")
        # each path has an opening tag and may need an inserted closing one; five tags more make the block
        block = most * (2 + (self.max_path_tokens or 1)) + (self.max_summary_tokens or 1) + 5
        if block > self.max_tokens:
            raise ValueError(
                f"generation.max_tokens={self.max_tokens}: one block of {most} paths with max_path_tokens="
                f"{self.max_path_tokens} and max_summary_tokens={self.max_summary_tokens} takes up to {block} tokens: "
                "lower those budgets, which could never be used up, or raise max_tokens"
            )


class Responder:
    """Samples with the engine, always from the current weights of the policy, and has the answers judged.

    policy: a vocabulary alone where the engine read the weights from its folder by itself, and nothing changes them.
    prompt: None takes the one that `generation` asks for. ranks: those that share the engine. recovery: what is done
    where it fails; None lets its errors through.
    """

    def __init__(
        self,
        policy: Policy | Vocabulary,
        engine: RolloutEngine,
        generation: Generation,
        seed: int,
        prompt: Prompt | None = None,
        ranks: EngineRanks | None = None,
        recovery: EngineRecovery | None = None,
    ) -> None:
        self.policy, self.engine, self.generation, self.seed = policy, engine, generation, seed
        self.ranks, self.recovery = ranks or EngineRanks(), recovery
        self.weights_changed = isinstance(policy, Policy)
        self.prompt = prompt or choose_prompt(generation.prompt, generation.structure, policy.folder)
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

    def rest(self) -> None:
        """Let the engine give its device memory to the update. What it holds is unknown afterwards: refresh first."""
        self.engine.sleep()
        self.weights_changed = True

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """The prompt of a problem, encoded once."""
        if problem.id not in self._prompts:
            self._prompts[problem.id] = encode_prompt(self.policy.tokenizer, self.prompt.text, problem.question)
        return self._prompts[problem.id]

    def fits(self, problem: Problem) -> bool:
        """Whether the prompt of a problem is short enough to train on."""
        limit = self.generation.max_prompt_tokens
        return limit is None or len(self.prompt_ids(problem)) <= limit

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
        repeated = [problem for problem in problems for _ in range(group_size)]
        seeds = [
            request_seed(self.seed, iteration, (first + p * ranks + rank) * group_size + g)
            for p in range(len(problems))
            for g in range(group_size)
        ]
        return self.sample(repeated, seeds, mode, temperature)

    def sample(
        self, problems: Sequence[Problem], seeds: Sequence[int], mode: Mode = "free", temperature: float | None = None
    ) -> list[Rollout]:
        """Sample one response a problem (one that is named twice gets two), each from the seed of its own."""
        if self.weights_changed:
            raise RuntimeError("the engine's weights are stale: call refresh() on every rank before sampling")
        prefix = (self.policy.tags.parallel,) if mode == "parallel" else ()
        requests = [
            Request(
                self.prompt_ids(problem),
                self.generation.max_tokens,
                seed,
                prefix,
                f"the prompt of problem {problem.id}",
            )
            for problem, seed in zip(problems, seeds, strict=True)
        ]
        heat = self.generation.temperature if temperature is None else temperature
        sampling = Sampling(heat, self.policy.eos_ids, self.banned(mode))
        call = partial(self.ranks.sample, requests, partial(self._sample, sampling, mode))
        return self.recovery.call(call) if self.recovery else call()

    def _sample(self, sampling: Sampling, mode: Mode, requests: list[Request]) -> list[Rollout]:
        if self.generation.structure == "unseen":
            return self.engine.generate_branching(requests, sampling, self.plan(mode))
        return self.engine.generate(requests, sampling)

    def plan(self, mode: Mode = "free") -> Branching:
        """How responses branch in the `unseen` structure; mode `sequential` leaves no block to open."""
        generation = self.generation
        most = generation.path_range[1]
        numbers = [f" {i + 1}" for i in range(most)] if generation.path_index else []
        return Branching(
            self.policy.tags,
            generation.positions,
            generation.path_range,
            0 if mode == "sequential" else generation.max_blocks,
            generation.max_path_tokens,
            generation.max_summary_tokens,
            tuple(tuple(self.policy.tokenizer(text, add_special_tokens=False).input_ids) for text in numbers),
        )

    def judge(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> list[Judged]:
        """Judge one rollout a problem (a problem is repeated for each response). A cut response is never right."""
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
