"""From a response to a verdict: find the final answer, compare it with the gold answer.

`judge` is pure; whether it may think hard depends on the leaf it is given (see `equality`). Trainers do not call this
file: they call `grading.grade`, which keeps hostile text away from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from parallel_r1.reward.equality import Leaf, same_answer
from parallel_r1.reward.extraction import MAX_ANSWER, Extraction, extract

__all__ = [
    "Extraction",
    "Undecided",
    "Verdict",
    "extract",
    "judge",
    "require_gold",
    "stated_value",
    "undecided",
    "verify",
]


@dataclass(frozen=True)
class Verdict:
    """correct: the final answer is the gold answer. reason: one line for people."""

    correct: bool
    reason: str


class Undecided(Exception):  # noqa: N818 (an outcome, not an error)
    """The comparison needs algebra, which this process must not do."""


def undecided(gold: str, answer: str) -> bool:
    """The leaf that declines: for the process that must neither hang nor die."""
    raise Undecided


_INTEGER = re.compile(r"-?\d{1,60}")


def judge(gold: str, found: Extraction, leaf: Leaf) -> Verdict:
    """Compare what was found in a response with the gold answer.

    Raises Undecided where the leaf does, and whatever else the leaf raises.
    """
    gold = gold.strip()
    if not gold or len(gold) > MAX_ANSWER:
        return Verdict(False, "the gold answer is empty" if not gold else "the gold answer is too long")
    if not found.answers:
        return Verdict(False, found.where)
    first = found.answers[0].strip("$ ")
    if _INTEGER.fullmatch(first) and _INTEGER.fullmatch(gold):
        correct = int(first) == int(gold)
    else:
        correct = any(same_answer(gold, answer, leaf) for answer in found.answers)
    shown = first if len(first) <= 80 else first[:77] + "..."
    return Verdict(correct, f"{found.where}: {shown}")


def verify(gold: str, response: str, leaf: Leaf) -> Verdict:
    """`extract`, then `judge`."""
    return judge(gold, extract(response), leaf)


def require_gold(answer: str, row: str) -> str:
    """A gold answer as it may be used: stripped. Raises ValueError naming the row where nothing is left."""
    if not answer.strip():
        raise ValueError(f"{row}: the gold answer is empty, so no response could be right; drop the row or fill it in")
    return answer.strip()


_LAST_NUMBER = re.compile(r"(?<![\w.,])[-−]?\d[\d,]{0,30}(?:\.\d{1,30})?(?:/\d{1,30})?(?![\d])")


def stated_value(text: str) -> Fraction | None:
    """The last plain number of a text (integer, decimal, a/b), as the value it ends on; None where there is none."""
    numbers = _LAST_NUMBER.findall(text[-5_000:].replace("{,}", ","))
    if not numbers:
        return None
    try:
        return Fraction(numbers[-1].replace("−", "-").replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
