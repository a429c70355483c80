"""Rewards as objects: terms that score one response, combinators that compose them, schedules over steps.

A reward reads judged samples (the verifier ran before) and a step, and nothing else: a schedule is a pure function of
the step it is given, so a resumed run continues it exactly. Every reward of the paper is one line of YAML:

    stage 1, easy        {class_path: Gate, init_args: {terms: [{class_path: Accuracy}, {class_path: UsesParallel}]}}
    stage 2, S1 and Seen {class_path: Accuracy}
    stage 2, S2          {class_path: Alternate, init_args: {rewards: [{class_path: Accuracy}, {class_path: Tiered}],
                          steps: [8, 2]}}
    scaffold             {class_path: Switch, init_args: {at_step: 200, before: <S2>, after: {class_path: Accuracy}}}
    parallel only        {class_path: UsesParallel}
    accuracy + diversity {class_path: Sum, init_args: {terms: [{class_path: Accuracy}, {class_path: PathDiversity}],
                          weights: [1.0, 0.2]}}
    efficiency           {class_path: Sum, init_args: {terms: [{class_path: Accuracy}, {class_path: Efficiency}],
                          weights: [1.0, 0.2]}}

Class names alone are enough for the classes of this module; a subclass of your own goes by its import path, a plain
function through `FromCallable`. Conventions: +1 and -1 for yes and no; a bonus (diversity, efficiency, verification) is
zero where the answer is wrong; a truncated response is never right.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from parallel_r1.types import Judged

Terms = dict[str, list[float | None]]


@dataclass(frozen=True)
class Scores:
    """What a batch of n samples earned.

    total: [n], finite: the reward itself. terms: name -> [n], the leaves it was made of, for logging; None where a term
    is not defined for a sample (no block, no paths), to be left out of its mean.
    """

    total: list[float]
    terms: Terms


class Reward(ABC):
    """Anything that scores judged samples. Subclass it and name the class in YAML by its import path."""

    @abstractmethod
    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        """Score a batch at a global optimisation step (0-based). Must depend on its two arguments alone."""


class Term(Reward):
    """A leaf: one number a sample, logged under the class name in snake case."""

    @property
    def name(self) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def value(self, sample: Judged) -> float | None:
        """The value of one sample, finite; None where the term is not defined, which earns nothing (0.0)."""

    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        values = [self.value(sample) for sample in samples]
        return Scores([0.0 if value is None else value for value in values], {self.name: values})


def is_right(sample: Judged) -> bool:
    """Right, and ended by the policy itself: a response cut by a limit has no answer, whatever was found in it."""
    return sample.correct and sample.finished


class Accuracy(Term):
    """`right` for a right answer, else `wrong`."""

    def __init__(self, right: float = 1.0, wrong: float = -1.0) -> None:
        _check_order("Accuracy", right=right, wrong=wrong)
        self.right, self.wrong = right, wrong

    def value(self, sample: Judged) -> float:
        return self.right if is_right(sample) else self.wrong


class Format(Term):
    """+1 where the tags of the response obey the grammar (no block at all does), else -1."""

    def value(self, sample: Judged) -> float:
        return 1.0 if sample.response.well_formed else -1.0


class UsesParallel(Term):
    """+1 where the response holds at least one well-formed block, else -1."""

    def value(self, sample: Judged) -> float:
        return 1.0 if sample.response.is_parallel else -1.0


class PathDiversity(Term):
    """1 - symmetric mean pairwise self-BLEU of the paths, in [0, 1], mean over blocks; 0 where the answer is wrong.

    None where there is no block. See `diversity.path_diversity`.
    """

    def value(self, sample: Judged) -> float | None:
        if not sample.response.blocks:
            return None
        if not is_right(sample):
            return 0.0
        from parallel_r1.reward.diversity import response_diversity

        return response_diversity(sample.response)


class Efficiency(Term):
    """1 - critical / total tokens, in [0, 1): what running paths side by side saves; 0 where the answer is wrong."""

    def value(self, sample: Judged) -> float | None:
        if not sample.total_tokens:
            return None
        return 1.0 - sample.critical_tokens / sample.total_tokens if is_right(sample) else 0.0


class Length(Term):
    """Soft overlong punishment, in [-1, 0] (DAPO, arXiv 2503.14476, eq. 13), on the response's sampled tokens.

    0 up to `max_tokens - buffer`, then falling linearly to -1 at `max_tokens` and beyond.
    """

    def __init__(self, max_tokens: int, buffer: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"Length.max_tokens = {max_tokens}: a limit below one token; give the response limit")
        if not 1 <= buffer <= max_tokens:
            raise ValueError(f"Length.buffer = {buffer}: must lie between 1 and max_tokens = {max_tokens}")
        self.max_tokens, self.buffer = max_tokens, buffer

    def value(self, sample: Judged) -> float:
        over = sample.total_tokens - (self.max_tokens - self.buffer)
        return -min(max(over / self.buffer, 0.0), 1.0)


class Verification(Term):
    """How far the paths of a block bear its summary out, in [0, 1], mean over blocks; 0 where the answer is wrong.

    A block's share: paths whose last number is the last number of the summary / all paths. It needs no judge: it asks
    for agreement of independent derivations, not for prose. None where no block's summary states a number.
    """

    def value(self, sample: Judged) -> float | None:
        from parallel_r1.reward.answers import stated_value

        shares = []
        for block in sample.response.blocks:
            said = stated_value(block.summary)
            if said is not None:
                shares.append(sum(stated_value(path) == said for path in block.paths) / len(block.paths))
        if not shares:
            return None
        return sum(shares) / len(shares) if is_right(sample) else 0.0


class Tiered(Reward):
    """`with_block` for a right answer with a well-formed block, `without_block` for one without, else `wrong`."""

    def __init__(self, with_block: float = 1.2, without_block: float = 1.0, wrong: float = -1.0) -> None:
        _check_order("Tiered", without_block=without_block, wrong=wrong)
        _check_order("Tiered", with_block=with_block, wrong=wrong)
        self.with_block, self.without_block, self.wrong = with_block, without_block, wrong

    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        def tier(sample: Judged) -> float:
            if not is_right(sample):
                return self.wrong
            return self.with_block if sample.response.is_parallel else self.without_block

        terms = merge([term.score(samples, step).terms for term in (Accuracy(), UsesParallel())])
        return Scores([tier(sample) for sample in samples], terms)


class Sum(Reward):
    """The weighted sum of rewards. weights: one a term, 1.0 each where not given."""

    def __init__(self, terms: list[Reward], weights: list[float] | None = None) -> None:
        _check_some("Sum.terms", terms)
        weights = [1.0] * len(terms) if weights is None else weights
        if len(weights) != len(terms):
            raise ValueError(f"Sum.weights has {len(weights)} entries for {len(terms)} terms: give one a term, or none")
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"Sum.weights = {weights}: every weight must be a finite number")
        self.terms, self.weights = terms, weights

    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        parts = [term.score(samples, step) for term in self.terms]
        rows = zip(*(part.total for part in parts), strict=True)
        total = [math.fsum(w * x for w, x in zip(self.weights, row, strict=True)) for row in rows]
        return Scores(total, merge([part.terms for part in parts]))


class Gate(Reward):
    """+1 where every term holds (is above zero), else -1."""

    def __init__(self, terms: list[Reward]) -> None:
        _check_some("Gate.terms", terms)
        self.terms = terms

    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        parts = [term.score(samples, step) for term in self.terms]
        rows = zip(*(part.total for part in parts), strict=True)
        total = [1.0 if all(x > 0 for x in row) else -1.0 for row in rows]
        return Scores(total, merge([part.terms for part in parts]))


class Alternate(Reward):
    """Windows of `sum(steps)` steps, shared out in order: [8, 2] is eight of one reward, then two of the next."""

    def __init__(self, rewards: list[Reward], steps: list[int]) -> None:
        _check_some("Alternate.rewards", rewards)
        if len(steps) != len(rewards):
            raise ValueError(f"Alternate.steps has {len(steps)} entries for {len(rewards)} rewards: give one a reward")
        if any(n < 1 for n in steps):
            raise ValueError(f"Alternate.steps = {steps}: every reward needs at least one step; leave out unused ones")
        self.rewards, self.steps = rewards, steps

    def active(self, step: int) -> Reward:
        at = step % sum(self.steps)
        for reward, n in zip(self.rewards, self.steps, strict=True):
            if at < n:
                return reward
            at -= n
        raise AssertionError("unreachable: the window is covered by its parts")

    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        return self.active(step).score(samples, step)


class Switch(Reward):
    """`before` at steps 0 ... at_step - 1, `after` from at_step on."""

    def __init__(self, at_step: int, before: Reward, after: Reward) -> None:
        if at_step < 0:
            raise ValueError(f"Switch.at_step = {at_step}: give the first step (0-based) of `after`")
        self.at_step, self.before, self.after = at_step, before, after

    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        return (self.before if step < self.at_step else self.after).score(samples, step)


class FromCallable(Reward):
    """Any function `f(sample, step) -> float`, named by its import path in YAML.

    on_error: what an exception or a value that is no finite number means. `raise` stops the run and names the sample;
    `score` gives the sample `error_score`, and logs the share of such samples as `<name>_errors`.
    """

    def __init__(
        self,
        function: Callable[[Judged, int], float],
        on_error: Literal["raise", "score"] = "raise",
        error_score: float = -1.0,
    ) -> None:
        if not callable(function):
            raise ValueError(
                f"FromCallable.function = {function!r} is not callable: give the import path of a function"
            )
        if not math.isfinite(error_score):
            raise ValueError(f"FromCallable.error_score = {error_score}: give a finite number")
        self.function, self.on_error, self.error_score = function, on_error, error_score

    def score(self, samples: Sequence[Judged], step: int) -> Scores:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        values: list[float] = []
        errors: list[float] = []
        for sample in samples:
            problem = None
            try:
                value = self.function(sample, step)
                if not isinstance(value, (int, float)) or not math.isfinite(value):
                    problem = ValueError(f"it returned {value!r}: it must return a finite number")
            except Exception as error:
                problem = error
            if problem is not None and self.on_error == "raise":
                raise RuntimeError(
                    f"reward function {name} failed on a response to problem {sample.problem.id} (tier "
                    f"{sample.problem.tier}): {type(problem).__name__}: {problem}. Mend the function, or set "
                    f"FromCallable.on_error=score to give such responses {self.error_score:g}"
                ) from problem
            errors.append(float(problem is not None))
            values.append(self.error_score if problem is not None else float(value))
        return Scores(values, {name: list(values), **({f"{name}_errors": errors} if self.on_error == "score" else {})})


def merge(parts: Sequence[Terms]) -> Terms:
    """The terms of several rewards under distinct names; a second `length` is `length_2`.

    Names depend on the rewards alone, never on values: every rank of a run logs the same ones.
    """
    out: Terms = {}
    for part in parts:
        for name, values in part.items():
            n = next(n for n in itertools.count(1) if (name if n == 1 else f"{name}_{n}") not in out)
            out[name if n == 1 else f"{name}_{n}"] = values
    return out


def _check_some(key: str, items: Sequence[Reward]) -> None:
    if not items:
        raise ValueError(f"{key} is empty: name at least one reward")


def _check_order(owner: str, **values: float) -> None:
    (high, x), (low, y) = values.items()
    if not (math.isfinite(x) and math.isfinite(y) and x > y):
        raise ValueError(f"{owner}.{high} = {x} must be a finite number above {owner}.{low} = {y}")
