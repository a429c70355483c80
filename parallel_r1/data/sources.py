"""One adapter a public data set: a row in the set's own columns becomes a `Problem`.

`collect` applies one to all rows: rows of one problem are merged, problems whose rows disagree on the answer are
dropped (nobody can tell which is right), and a `Report` accounts for every row.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from parallel_r1.data.reading import Row, read_rows  # noqa: F401 - `read_rows` belongs to this interface
from parallel_r1.structure import grammar
from parallel_r1.types import Problem

Adapter = Callable[[Row], Problem]
"""Turns a row into a problem of an unnamed tier; raises ValueError (by `Row.error`) for a row that cannot be used."""

FINAL_ANSWER = "Final Answer:"

MATH_SUBJECTS = (
    "Algebra",
    "Counting & Probability",
    "Geometry",
    "Intermediate Algebra",
    "Number Theory",
    "Prealgebra",
    "Precalculus",
)

# Where the well-known evaluation sets live on the hub, by tier: (id, config); all have a `test` split.
BENCHMARK_HOMES: dict[str, tuple[str, str | None]] = {
    "aime24": ("math-ai/aime24", None),
    "aime25": ("math-ai/aime25", None),
    "amc23": ("math-ai/amc23", None),
    "math500": ("HuggingFaceH4/MATH-500", None),
    "gsm8k": ("openai/gsm8k", "main"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", None),
}


def problem_id(question: str) -> str:
    """The identity of a problem: a hash of its text, blind to white space and Unicode composition (not to case: in
    mathematics `x` and `X` differ, and so do `x²` and `x2`, which is why composition is canonical only)."""
    text = " ".join(unicodedata.normalize("NFC", question).split())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _problem(question: str, answer: str, demonstration: str | None = None, **meta: object) -> Problem:
    return Problem(problem_id(question), question, answer, tier="", demonstration=demonstration, meta=meta)


def gsm8k(row: Row) -> Problem:
    """GSM8K: `question`, and an `answer` that ends in `#### 1,234`."""
    _, found, gold = row.text("answer").rpartition("####")
    if not found:
        raise row.error("'answer' holds no '#### ' before a final answer")
    gold = gold.replace(",", "").strip().removeprefix("$")
    return _problem(row.text("question"), row.as_text(gold, "answer after ####"))


def math(row: Row) -> Problem:
    """MATH: `problem`, `level` (`Level 5` or 5), `type` or `subject`; gold boxed in `solution`, else in `answer`.

    The box comes first, since copies of the set exist whose `answer` was cut at the first closing brace. A solution
    with an empty box has lost its answer: it is then UNKNOWN.
    """
    level = re.search(r"\d", str(row.value("level")))  # a few rows say `Level ?`
    subject = row.text("type", "subject")
    box = last_boxed(row.text("solution")) if row.values.get("solution") or "answer" not in row.values else None
    if box is None and "answer" not in row.values:
        raise row.error("'solution' holds no \\boxed{} answer")
    answer = row.text("answer") if box is None else box or UNKNOWN
    return _problem(row.text("problem"), answer, level=int(level[0]) if level else None, subject=subject)


def dapo(row: Row) -> Problem:
    """DAPO-Math-17k: a chat or text `prompt`, gold in `reward_model.ground_truth`."""
    prompt, reward_model = row.value("prompt"), row.value("reward_model")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], Mapping):
            raise row.error(f"'prompt' holds {len(prompt)} messages where one of the user is expected")
        prompt = prompt[0].get("content")
    if not isinstance(reward_model, Mapping):
        raise row.error(
            f"'reward_model' holds {type(reward_model).__name__} where an object with 'ground_truth' is expected"
        )
    question = strip_instruction(row.as_text(prompt, "prompt"))
    answer = row.as_text(reward_model.get("ground_truth"), "reward_model.ground_truth")
    return _problem(row.as_text(question, "prompt without its instruction"), answer)


def benchmark(row: Row) -> Problem:
    """AIME, AMC, MATH-500 and the like: `problem` or `question`; gold in `answer`, else boxed in `solution`."""
    return _problem(row.text("problem", "question"), _gold(row))


def parallel_gsm8k(row: Row) -> Problem:
    """Parallel-GSM8K: `problem`, a trace `text`, `ground_truth`."""
    question = row.text("problem")
    response = row.as_text(response_part(row.text("text"), question), "text after the problem")
    return _problem(question, row.text("ground_truth"), response)


def columns(problem: str, answer: str | None) -> Adapter:
    """An adapter for any set: the names of its two columns. Without one of answers every gold is UNKNOWN."""

    def adapt(row: Row) -> Problem:
        return _problem(row.text(problem), row.text(answer) if answer else UNKNOWN)

    return adapt


UNKNOWN = "(unknown)"
"""The answer of a problem that has none: for prediction only, since every response to it would be judged wrong."""


def _gold(row: Row) -> str:
    if row.values.get("answer") is not None or "solution" not in row.values:
        answer = row.text("answer")
        if answer.count("{") == answer.count("}"):
            return answer  # else it was cut, see `math`
    return row.as_text(last_boxed(row.text("solution")) or "", "boxed answer of solution")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of a text, braces balanced, or after a bare `\boxed `; None without one.

    An `\fbox` counts as well. Linear in the length of the text.
    """
    boxes = list(re.finditer(r"\\(?:boxed|fbox)\s*(?=[{\w])", text))
    if not boxes:
        return None
    begin = boxes[-1].end()
    if text[begin] != "{":
        return re.match(r"\w+", text[begin:])[0]
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i].strip()
    return None


# The set's own instruction around the problem, in the public release and, in Chinese, in 18 rows of the cleaned one. It
# asks for another form of answer than our templates do.
_INSTRUCTIONS = (
    re.compile(r"^Solve the following math problem step by step\. The last line of your response .*?\n\n", re.DOTALL),
    re.compile(r'\n+Remember to put your answer on its own line after "Answer:"\.?$'),
    re.compile(r"\s*让我们一步一步地思考。请以“Answer: \\boxed\{<final_answer>\}”的格式输出最终答案。.*$", re.DOTALL),
)


def strip_instruction(prompt: str) -> str:
    """A DAPO prompt without the data set's own instruction; unchanged if it has none."""
    for instruction in _INSTRUCTIONS:
        prompt = instruction.sub("", prompt)
    return prompt.strip()


def response_part(text: str, problem: str) -> str:
    """A trace without the problem, which a few traces repeat first (1 of the 341 public ones here does)."""
    return text.removeprefix(problem).strip()


def trace_fault(problem: Problem) -> str | None:
    """Why a demonstration should not be imitated, or None: its grammar, no final answer, or a wrong one.

    Right or wrong is only decided between two plain numbers; any other answer is the verifier's business.
    """
    response = problem.demonstration or ""
    if error := grammar.parse(response).error:
        return f"not well formed: {error}"
    _, found, stated = response.rpartition(FINAL_ANSWER)
    if not found or not stated.strip():
        return "no final answer"
    said, gold = _number(stated), _number(problem.answer)
    if said is not None and gold is not None and said != gold:
        return "wrong final answer"
    return None


def _number(text: str) -> float | None:
    text = text.strip().rstrip(".").strip("$ ").replace(",", "")
    return float(text) if re.fullmatch(r"-?\d{1,300}(\.\d+)?", text) else None


def _same_answer(a: str, b: str) -> bool:
    return a == b or (_number(a) is not None and _number(a) == _number(b))


@dataclass(frozen=True)
class Report:
    """What became of every row: rows = kept + merged + contradicting + too_long + all of rejected.

    distinct: texts that differ at all, white space included; merged: rows folded into an earlier row of their problem;
    contradictions: problems dropped since their rows disagree on the answer, `contradicting` rows in all; too_long:
    rows above the limit of characters; rejected: rows left out, by reason.
    """

    source: str
    rows: int
    distinct: int
    kept: int
    merged: int = 0
    contradictions: int = 0
    contradicting: int = 0
    too_long: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.kept:,} problems from {self.rows:,} rows"]
        if self.merged or self.contradictions:
            parts.append(f"{self.distinct:,} distinct texts")
        if self.merged:
            parts.append(f"{self.merged:,} duplicates merged")
        if self.contradictions:
            parts.append(f"{self.contradictions:,} problems with contradictory answers dropped")
        if self.too_long:
            parts.append(f"{self.too_long:,} too long")
        parts += [f"{count:,} left out ({reason})" for reason, count in sorted(self.rejected.items())]
        return ", ".join(parts)


def collect(
    source: str,
    rows: Iterable[Row],
    adapter: Adapter,
    tier: str,
    reject: Callable[[Problem], str | None] = lambda problem: None,
    max_chars: int | None = None,
) -> tuple[list[Problem], Report]:
    """The distinct problems of a source in the order of their first rows, and the account of its rows.

    reject: the reason to leave a problem out, or None. max_chars: longest question, in characters.
    Raises ValueError from the adapter, and for a source without rows.
    """
    first: dict[str, Problem] = {}
    count: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    texts: set[str] = set()
    disputed: set[str] = set()
    total = too_long = 0
    for row in rows:
        total += 1
        problem = adapter(row)
        texts.add(hashlib.blake2b(problem.question.encode(), digest_size=8).hexdigest())
        if max_chars is not None and len(problem.question) > max_chars:
            too_long += 1
        elif reason := reject(problem):
            rejected[reason] += 1
        else:
            kept = first.setdefault(problem.id, replace(problem, tier=tier))
            count[problem.id] += 1
            if not _same_answer(kept.answer, problem.answer):
                disputed.add(problem.id)
    if not total:
        raise ValueError(f"{source}: holds no rows; give a file with at least one")
    problems = [problem for key, problem in first.items() if key not in disputed]
    contradicting = sum(count[key] for key in disputed)
    merged = sum(count.values()) - contradicting - len(problems)
    report = Report(
        source, total, len(texts), len(problems), merged, len(disputed), contradicting, too_long, dict(rejected)
    )
    return problems, report


@dataclass(frozen=True)
class Overlap:
    """Problems of a benchmark that also stand in a training set.

    same: with the same identity; similar: of other identity, but with the same letters and digits and the same answer.
    Copies often differ in spaces, braces or display style alone; seldom, so do two problems that differ in a sign.
    """

    same: int = 0
    similar: int = 0


def contamination(train: Iterable[Problem], benchmark: Iterable[Problem]) -> dict[str, Overlap]:
    """How much of each tier of a benchmark is in a training set; tiers without any are in the result too."""
    known = Known(train)
    found: dict[str, Overlap] = {}
    for problem in benchmark:
        kind, before = known.kind(problem), found.get(problem.tier, Overlap())
        found[problem.tier] = Overlap(before.same + (kind == "same"), before.similar + (kind == "similar"))
    return found


class Known:
    """A set of problems to look others up in."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self._ids: set[str] = set()
        self._answers: dict[str, list[str]] = {}
        for problem in problems:
            self._ids.add(problem.id)
            self._answers.setdefault(_bare(problem.question), []).append(problem.answer)

    def kind(self, problem: Problem) -> Literal["same", "similar"] | None:
        """How the set holds a problem, in the words of `Overlap`; None if it does not."""
        if problem.id in self._ids:
            return "same"
        answers = self._answers.get(_bare(problem.question), ())
        return "similar" if any(_same_answer(answer, problem.answer) for answer in answers) else None


# LaTeX that changes the looks of a formula, not its meaning. Other commands (`\sin`) count as letters.
_LOOKS = r"\\(?:left|right|[dt]?frac|[lc]?dots|text|mathrm|mbox|displaystyle|overline|bar|circ|[bB]igg?)(?![A-Za-z])"


def _bare(question: str) -> str:
    return re.sub(rf"{_LOOKS}|[\W_]", "", question).casefold()
