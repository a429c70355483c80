"""One answer out of several independent attempts. Pure functions of answers and confidences.

Attempts without a final answer, those that a limit cut among them, cast no vote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parallel_r1.reward.answers import Undecided, undecided
from parallel_r1.reward.equality import same_answer
from parallel_r1.reward.grading import IN_PROCESS_CHARS

Voting = Literal["majority", "weighted"]
EarlyStop = Literal["off", "certain", "likely"]


def answer_groups(answers: Sequence[str | None]) -> list[int]:
    """The group of each answer, 0, 1, ... in order of first mention; -1 where there is none.

    Two answers are one where the verifier finds their values equal without algebra (`1/2`, `0.5`, `\\frac12`); an
    answer is compared with the first of each group. Answers longer than IN_PROCESS_CHARS, and those that only algebra
    could tell apart, are one only if they are the same text. Bounded: at most one comparison a pair of distinct texts.
    """
    known: dict[str, int] = {}
    firsts: list[str] = []
    out = []
    for answer in answers:
        if answer is None or not answer.strip():
            out.append(-1)
            continue
        if answer not in known:
            known[answer] = next((g for g, first in enumerate(firsts) if _same(first, answer)), len(firsts))
            if known[answer] == len(firsts):
                firsts.append(answer)
        out.append(known[answer])
    return out


def _same(first: str, other: str) -> bool:
    if max(len(first), len(other)) > IN_PROCESS_CHARS:
        return False
    try:
        return same_answer(first, other, undecided)
    except Undecided:
        return False
    except Exception:  # a text that trips the reader has no value that could be equal
        return False


# ------------------------------------------------------------------ confidence


def confidence(logprobs: Sequence[float], window: int | None = None) -> float:
    """How sure a policy was of what it sampled, in (0, 1]: exp of the mean log-probability (nats) of its tokens.

    window: None takes the mean over all tokens (1 / perplexity); a number takes the lowest mean over that many tokens
    in a row, which finds the one stretch where it guessed (lowest group confidence, DeepConf, arXiv 2508.15260, with
    the log-probability of the sampled token in place of those of the top tokens, which engines do not return here). 0.0
    where nothing was sampled.
    """
    n = len(logprobs)
    if not n:
        return 0.0
    size = n if window is None else min(window, n)
    total = lowest = math.fsum(logprobs[:size])
    for i in range(size, n):
        total += logprobs[i] - logprobs[i - size]
        lowest = min(lowest, total)
    return math.exp(min(lowest / size, 0.0))


# ------------------------------------------------------------------ the vote


@dataclass(frozen=True)
class Outcome:
    """chosen: index of the attempt that speaks for the answer; None where there was no attempt.

    group: the group of the answer, -1 where no attempt had one. agreement: attempts in that group / attempts made.
    weight: the group's share of all weight that was cast, 0.0 where none was.
    """

    chosen: int | None
    group: int
    agreement: float
    weight: float


def weights(groups: Sequence[int], confidences: Sequence[float], voting: Voting) -> dict[int, float]:
    """The weight of each group: votes under `majority`, the sum of their confidences under `weighted`."""
    out: dict[int, float] = {}
    for group, sure in zip(groups, confidences, strict=True):
        if group >= 0:
            out[group] = out.get(group, 0.0) + (1.0 if voting == "majority" else sure)
    return out


def consolidate(groups: Sequence[int], confidences: Sequence[float], voting: Voting = "majority") -> Outcome:
    """The answer of the heaviest group, and the most confident attempt of that group.

    A tie goes to the tied group that holds the most confident attempt: so where every attempt says something else, it
    is the most confident one that counts. Where no attempt has an answer, the most confident attempt is chosen, with no
    answer.
    """
    if not groups:
        return Outcome(None, -1, 0.0, 0.0)
    cast = weights(groups, confidences, voting)
    most = max(cast.values(), default=0.0)
    leading = {group for group, weight in cast.items() if weight == most} or {-1}
    chosen = max((i for i, group in enumerate(groups) if group in leading), key=lambda i: (confidences[i], -i))
    group = groups[chosen]
    if group < 0:
        return Outcome(chosen, -1, 0.0, 0.0)
    return Outcome(chosen, group, list(groups).count(group) / len(groups), most / (sum(cast.values()) or 1.0))


def may_stop(
    groups: Sequence[int],
    confidences: Sequence[float],
    left: int,
    rule: EarlyStop = "certain",
    voting: Voting = "majority",
    threshold: float = 0.95,
) -> bool:
    """Whether the attempts so far decide the answer. left: attempts that could still be made.

    certain: no vote of the remaining attempts, each of weight 1 at most, can make another answer win or tie. The answer
    is then that of all attempts, by construction; only tokens are saved.
    likely: with v1 and v2 votes for the two leading answers, and a uniform prior on which of the two a further vote
    goes to, P(the first is the more frequent) = P(Beta(v1 + 1, v2 + 1) > 1/2) is at least `threshold` (adaptive
    consistency, Aggarwal et al. 2023, arXiv 2305.11860). It counts votes, whatever the voting.
    """
    if left <= 0:
        return True
    if rule == "off" or not groups:
        return False
    counted = weights(groups, confidences, "majority" if rule == "likely" else voting)
    first, second = [*sorted(counted.values(), reverse=True), 0.0, 0.0][:2]
    if rule == "certain":
        return first - second > left
    return first > 0 and beta_above_half(int(first), int(second)) >= threshold


def fewest_to_stop(
    groups: Sequence[int],
    confidences: Sequence[float],
    left: int,
    rule: EarlyStop = "certain",
    voting: Voting = "majority",
    threshold: float = 0.95,
) -> int:
    """The fewest further attempts, 1 to left, after which `may_stop` could say yes: all of them for the leading answer.

    One attempt after the other would make all of these as well, so asking for them at once costs nothing.
    """
    cast = weights(groups, confidences, voting)
    leading = max(cast, key=cast.get, default=0)
    for n in range(1, left):
        if may_stop([*groups, *[leading] * n], [*confidences, *[1.0] * n], left - n, rule, voting, threshold):
            return n
    return left


def beta_above_half(a: int, b: int) -> float:
    """P(X > 1/2) for X ~ Beta(a + 1, b + 1): the chance of at most a heads in a + b + 1 tosses of a fair coin."""
    n = a + b + 1
    return sum(math.comb(n, i) for i in range(a + 1)) / 2**n
