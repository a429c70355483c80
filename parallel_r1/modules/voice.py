"""A finished model, sampled as evaluation and prediction ask for it. No weights here: the engine reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from parallel_r1.data.prompts import choose_prompt
from parallel_r1.modules.ranks import EngineRanks
from parallel_r1.modules.responder import Generation, Mode, Responder
from parallel_r1.rollout.engine import RolloutEngine
from parallel_r1.structure.grammar import Structure
from parallel_r1.types import Judged, Problem, Rollout
from parallel_r1.vocabulary import load_vocabulary

EvalMode = Literal["fork_join", "plain", "sequential", "forced"]
"""fork_join: isolated paths (structure `unseen`). plain: one causal stream that may hold blocks. sequential: the same
without the tags. forced: plain, every response starting with `<Parallel>`."""

_HOW: dict[EvalMode, tuple[Structure, Mode]] = {
    "fork_join": ("unseen", "free"),
    "plain": ("seen", "free"),
    "sequential": ("seen", "sequential"),
    "forced": ("seen", "parallel"),
}


def generation_in(mode: EvalMode, generation: Generation) -> Generation:
    """The generation settings of a model as a mode uses them: all but the structure stay."""
    return replace(generation, structure=_HOW[mode][0])


def native_mode(structure: Structure) -> EvalMode:
    """The mode that generates as a policy of this structure was trained to."""
    return {"unseen": "fork_join", "seen": "plain", "sequential": "sequential"}[structure]


def in_few_starts(modes: Sequence[EvalMode]) -> list[EvalMode]:
    """The modes in an order in which the engine starts once for forking and once for plain text."""
    return sorted(dict.fromkeys(modes), key=lambda mode: mode != "fork_join")


def sample_seed(seed: int, mode: str, problem: str, sample: int) -> int:
    """The sampling seed of one response, in [0, 2**31): of these four alone, so that no batch changes it."""
    digest = hashlib.blake2b(f"{seed}/{mode}/{problem}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Source:
    """What speaks: a model folder and the settings it is sampled with.

    temperature: None takes that of `generation`; 0 is greedy.
    """

    folder: Path
    generation: Generation
    engine: RolloutEngine
    seed: int
    temperature: float | None = None
    trust_remote_code: bool = False


class Voice:
    """Answers problems with one model, in one mode after another; the prompt is the same in all."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.vocabulary = load_vocabulary(source.folder, source.trust_remote_code)
        generation = source.generation
        # that of the structure the model was trained for, whatever the mode
        self.prompt = choose_prompt(generation.prompt, generation.structure, source.folder)
        self.ranks = EngineRanks(source.engine.ranks)
        self.mode: EvalMode | None = None
        self._started: str | None = "not yet"

    def use(self, mode: EvalMode) -> None:
        """Make ready for a mode, with a new engine where it needs another. All ranks call this together."""
        if mode == self.mode:
            return
        source, generation = self.source, generation_in(mode, self.source.generation)
        if generation.branching != self._started:
            source.engine.close()  # a start from nothing reads the weights of the folder
            source.engine.start(source.folder, generation.branching)
            self._started = generation.branching
        words, engine = self.vocabulary, source.engine
        self.responder = Responder(words, engine, generation, source.seed, self.prompt, self.ranks)
        self.mode = mode

    def answer(self, asked: Sequence[tuple[Problem, int]]) -> list[tuple[Judged, Rollout]]:
        """One response for each (problem, index of the sample), in order, judged."""
        if self.mode is None:
            raise RuntimeError("call use(mode) first")
        problems = [problem for problem, _ in asked]
        seeds = [sample_seed(self.source.seed, self.mode, problem.id, sample) for problem, sample in asked]
        rollouts = self.responder.sample(problems, seeds, _HOW[self.mode][1], self.source.temperature)
        return list(zip(self.responder.judge(problems, rollouts), rollouts, strict=True))

    def close(self) -> None:
        self.source.engine.close()
        self.mode, self._started = None, "not yet"
