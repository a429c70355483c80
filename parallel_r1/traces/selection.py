"""From candidates to traces: canonical white space, a reason for each rejection, one account of all. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parallel_r1.data.difficulty import SolveRate
from parallel_r1.data.sources import response_part, trace_fault
from parallel_r1.reward.answers import Verdict
from parallel_r1.structure import grammar
from parallel_r1.structure.grammar import END_PARALLEL, END_PATH, END_SUMMARY, PARALLEL, PATH, SUMMARY, TAGS
from parallel_r1.traces.store import Candidate
from parallel_r1.types import Problem

Grader = Callable[[Sequence[tuple[str, str]]], list[Verdict]]
"""Judges (gold, response) pairs, one verdict a pair: `reward.grading.grade`."""

GRADED_AT_ONCE = 1024

# White space after and before a tag. Between the tags of a block there is none: where paths are forked nobody samples
# what stands between them. The text of a path or summary has lines of its own, and a block stands apart.
_AFTER = {PARALLEL: "", END_PATH: "", END_PARALLEL: "", PATH: "\n", SUMMARY: "\n", END_SUMMARY: "\n\n"}
_BEFORE = {PARALLEL: "\n\n", PATH: "", END_PARALLEL: "", SUMMARY: "", END_PATH: "\n", END_SUMMARY: "\n"}
_TAG = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")


def canonical_space(text: str) -> str:
    """The text with one kind of white space around each tag; doing it again changes nothing.

    Never changes what `grammar.parse` finds, nor anything inside a piece of text.
    """
    pieces = _TAG.split(text)
    pieces[::2] = [piece.strip() for piece in pieces[::2]]
    for i in range(0, len(pieces), 2):
        after = _AFTER[pieces[i - 1]] if i else ""
        before = _BEFORE[pieces[i + 1]] if i + 1 < len(pieces) else ""
        pieces[i] = f"{after}{pieces[i]}{before}" if pieces[i] else max(after, before, key=len)
    return "".join(pieces).strip()


def clean(text: str, question: str, canonical: bool = True) -> str:
    """A candidate as it would be imitated.

    canonical: one kind of white space, no hidden thoughts of a teacher (up to `</think>`), no repeated problem.
    """
    text = text.encode("utf-8", "replace").decode()  # halves of surrogate pairs are no text
    text = response_part(text.rpartition("</think>")[2].strip(), question) if canonical else text
    return canonical_space(text) if canonical else text


@dataclass(frozen=True)
class Rules:
    """What is kept.

    per_problem: traces of one problem at most, the first good ones; None for all. blocks: least number of blocks in a
    trace. canonical: white space is tidied (`canonical_space`); else a candidate stays as it was sampled.
    """

    per_problem: int | None = 1
    blocks: int = 1
    canonical: bool = True


@dataclass
class Selection:
    """What became of the candidates: candidates = len(kept) + all of rejected.

    kept: (problem, text) in the order of the problems; rejected: by reason; rates: of every problem with candidates;
    solved: candidates with a right answer, well formed or not.
    """

    candidates: int = 0
    kept: list[tuple[Problem, str]] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    rates: list[SolveRate] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The yield by reason, for people."""
        total = max(1, self.candidates)
        with_trace = len({problem.id for problem, _ in self.kept})
        lines = [f"{self.candidates:>8,} candidates of {len(self.rates):,} problems"]
        lines.append(f"{len(self.kept):>8,} kept ({len(self.kept) / total:.1%}), of {with_trace:,} problems")
        return lines + [f"{n:>8,} left out ({n / total:.1%}): {why}" for why, n in self.rejected.most_common()]


def select(
    problems: Iterable[Problem], candidates: Mapping[str, Sequence[Candidate]], rules: Rules, grade: Grader
) -> Selection:
    """Judge all candidates of the problems given, by problem id, each list in order of preference."""
    chosen = [problem for problem in problems if candidates.get(problem.id)]
    flat = [(problem, candidate) for problem in chosen for candidate in candidates[problem.id]]
    texts = [clean(candidate.text, problem.question, rules.canonical) for problem, candidate in flat]
    verdicts = _graded([(p.answer, text) for (p, _), text in zip(flat, texts, strict=True)], grade)
    found = Selection(candidates=len(flat))
    at = 0
    for problem in chosen:
        mine = range(at, at + len(candidates[problem.id]))
        at = mine.stop
        right = [verdicts[i].correct and flat[i][1].finished for i in mine]
        found.rates.append(SolveRate(problem.question, sum(right), len(right)))
        seen: set[str] = set()
        for i, is_right in zip(mine, right, strict=True):
            reason = fault(problem, texts[i], flat[i][1].finished, is_right, rules.blocks)
            same = " ".join(texts[i].split())
            if reason is None and same in seen:
                reason = "the same as another candidate"
            elif reason is None and rules.per_problem is not None and len(seen) >= rules.per_problem:
                reason = f"good, but beyond {rules.per_problem} a problem"
            if reason is None:
                seen.add(same)
                found.kept.append((problem, texts[i]))
            else:
                found.rejected[reason] += 1
    return found


def fault(problem: Problem, text: str, finished: bool, correct: bool, blocks: int) -> str | None:
    """The first reason not to imitate a cleaned candidate, or None. correct: the verifier's verdict on it."""
    if not finished:
        return "cut by the length limit"
    if not text.strip():
        return "empty"
    reason = trace_fault(replace(problem, demonstration=text))
    if reason and reason.startswith("not well formed"):
        return reason
    if len(grammar.parse(text).blocks) < blocks:
        return "no block" if blocks == 1 else f"fewer than {blocks} blocks"
    return reason or (None if correct else "wrong final answer")


def _graded(pairs: list[tuple[str, str]], grade: Grader) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for start in range(0, len(pairs), GRADED_AT_ONCE):
        verdicts += grade(pairs[start : start + GRADED_AT_ONCE])
    return verdicts
