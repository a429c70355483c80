"""When two answers are the same, value by value. What needs algebra is asked of a `Leaf`; all else is decided here.

The same rules run in two places: in the trainer's process with a leaf that declines (so that only cheap and certain
comparisons happen there) and in a grading worker with `symbolic.same`, which is math-verify and sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from parallel_r1.reward.exact import Exact, is_arithmetic, same_number, scaled
from parallel_r1.reward.normalize import clean
from parallel_r1.reward.quantities import COUNTED, MONTHS, in_full, number_in_words
from parallel_r1.reward.reading import Reading, read
from parallel_r1.reward.regions import as_region, canonical
from parallel_r1.reward.scanning import is_name, plain
from parallel_r1.reward.values import (
    Based,
    Interval,
    Many,
    Matrix,
    Quantity,
    Ratio,
    Region,
    Relation,
    Value,
    Words,
    is_infinite,
)

Leaf = Callable[[str, str], bool]
"""(gold, answer) -> whether two LaTeX expressions, equations or inequalities are the same."""

MAX_NESTING = 40
_AMBIGUOUS = re.compile(r"\d,\d\d")
_MODULUS = re.compile(r"\s*(?:\\pmod\s*\{?\d{1,9}\}?|\(\\?mod ?\d{1,9}\))$")
_VARIABLE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
_CENT = Fraction(1, 100)


def same_answer(gold: str, answer: str, leaf: Leaf) -> bool:
    """Whether an answer states what the gold answer states. Both are raw text, without `\\boxed` or `Final Answer:`."""
    g, a = clean(gold), clean(answer)
    if not g or not a:
        return False
    if _squeezed(g) == _squeezed(a):
        return True
    if not _balanced(a):
        return False
    if (chosen := _same_choice(plain(g), plain(a))) is not None:
        return chosen
    if not _GOLD_CHOICE.fullmatch(plain(g)):
        a = _without_choice(a)
    if "mod" not in g:
        a = _MODULUS.sub("", a)
    # A lone letter behind a number is a unit where the gold answer shows no variable.
    letters = bool(re.fullmatch(r"[\d.,/]+ [a-zA-Z]", g)) or not _VARIABLE.search(re.sub(r"\\text\{[^{}]*\}", "", g))
    if _equal(read(g, Reading(letters=letters)), read(a, Reading(letters=letters)), leaf):
        return True
    if _AMBIGUOUS.search(g) or _AMBIGUOUS.search(a):  # 1,234: one number, or two
        return _equal(read(g, Reading(False, letters)), read(a, Reading(False, letters)), leaf)
    return False


def _squeezed(text: str) -> str:
    """Without the white space that means nothing (between digits it may: 3 1/2)."""
    return re.sub(r"(?<!\d) +| +(?!\d)", "", text)


def _balanced(text: str) -> bool:
    """Whether every brace has its partner and none is nested so deep that only a machine could have meant it."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


# -- multiple choice

_GOLD_CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?")
_CHOICE = re.compile(
    r"(?:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:?\s*)?\(?\s*([A-Za-z])\s*\)?", re.IGNORECASE
)
_CHOICE_AND_TEXT = re.compile(r"(?:\(\s*([A-Z])\s*\)|([A-Z])\s*[).:])\s*(\S.*)", re.DOTALL)


def _same_choice(gold: str, answer: str) -> bool | None:
    """The verdict where gold is the letter of a choice and the answer names a choice; None where it is not so."""
    wanted = _GOLD_CHOICE.fullmatch(gold)
    if not wanted:
        return None
    if match := _CHOICE.fullmatch(answer):
        return match[1].upper() == wanted[1]
    if (match := _CHOICE_AND_TEXT.fullmatch(answer)) and not re.search(r"\(?\b[A-Z]\b\)?", match[3]):
        return (match[1] or match[2]) == wanted[1]
    return None


def _without_choice(answer: str) -> str:
    """`(C) 42` is 42 where the gold answer is no letter."""
    match = re.match(r"(?:\\text\{\s*\(?[A-Z][).:]+\s*\}|\([A-Z]\)\s|[A-Z][).:]\s)\s*(?=\S)", answer)
    return answer[match.end() :] if match else answer


# -- dispatch


def _equal(gold: Value, answer: Value, leaf: Leaf) -> bool:
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _relations_equal(gold, answer, leaf)
    if isinstance(gold, Region) or isinstance(answer, Region):
        a, b = as_region(gold), as_region(answer)
        return a is not None and b is not None and _regions_equal(a, b, leaf)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices_equal(gold, answer, leaf)
    if isinstance(gold, Words) and isinstance(answer, Words):
        if _words(gold.text) == _words(answer.text):
            return True
        lists = _opened(gold), _opened(answer)
        return all(isinstance(value, Many) for value in lists) and _many_equal(*lists, leaf)
    if isinstance(gold, Many) or isinstance(answer, Many):
        return _many_equal(gold, answer, leaf)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return gold == answer
    if isinstance(gold, Ratio) or isinstance(answer, Ratio):
        return _ratios_equal(gold, answer)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _words_equal_quantity(gold, answer)
    return _quantities_equal(gold, answer, leaf)


# -- numbers and expressions


def _quantities_equal(gold: Quantity, answer: Quantity, leaf: Leaf) -> bool:
    scale_gold = scale_answer = Fraction(1)
    if gold.unit and answer.unit and COUNTED not in (gold.unit, answer.unit):
        if gold.unit.dimension != answer.unit.dimension:
            return False
        scale_gold, scale_answer = gold.unit.factor, answer.unit.factor
    if gold.percent == answer.percent:
        return _scaled_equal(gold, scale_gold, answer, scale_answer, leaf)
    # 28% is 28 where percent was asked for and 0.28 where a number was.
    if _scaled_equal(gold, scale_gold, answer, scale_answer, leaf):
        return True
    if gold.percent:
        return _scaled_equal(gold, scale_gold * _CENT, answer, scale_answer, leaf)
    return _scaled_equal(gold, scale_gold, answer, scale_answer * _CENT, leaf)


def _scaled_equal(gold: Quantity, m: Fraction, answer: Quantity, n: Fraction, leaf: Leaf) -> bool:
    """gold * m = answer * n, exactly."""
    if gold.number is not None and answer.number is not None:
        return same_number(scaled(gold.number, m), scaled(answer.number, n))
    if m == n and _squeezed(gold.tex) == _squeezed(answer.tex):
        return True
    if is_infinite(gold) or is_infinite(answer):
        return is_infinite(gold) and is_infinite(answer) and ("-" in gold.tex) == ("-" in answer.tex)
    for a, b in ((gold, answer), (answer, gold)):
        # Out of all bounds, or broken: no number and no formula with letters can equal it.
        if a.number is None and (is_arithmetic(a.tex) or not _is_mathematical(a.tex)):
            return False
        # A lone variable is no number, and no other variable.
        if re.fullmatch(r"[a-zA-Z]|\\[a-zA-Z]+", a.tex) and a.tex not in ("e", "i", r"\pi") and b.number is not None:
            return False
    return leaf(_times(gold.tex, m), _times(answer.tex, n))


_MATHEMATICAL = re.compile(r"[\w\s\\{}()\[\]|+\-*/^_!.,<>='°:;&]+", re.ASCII)


def _is_mathematical(tex: str) -> bool:
    return bool(_MATHEMATICAL.fullmatch(tex)) and "__" not in tex


def _times(tex: str, factor: Fraction) -> str:
    if factor == 1:
        return tex
    return rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}\left({tex}\right)"


# -- words

_ARTICLES = frozenset(["the", "a", "an"])


def _words(text: str) -> tuple[str, ...]:
    """The words of a text, as compared: no case, articles, punctuation; dates in one order; days and months in full."""
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text.casefold()))
    words = [word for word in words if word not in _ARTICLES] or words
    full = [in_full(word) for word in words]
    return tuple(sorted(full)) if any(word in MONTHS for word in full) else tuple(full)


def _words_equal_quantity(gold: Quantity | Words, answer: Quantity | Words) -> bool:
    words, quantity = (gold, answer) if isinstance(gold, Words) else (answer, gold)
    number = number_in_words(words.text)
    if number is not None and quantity.number is not None:
        return same_number(quantity.number, number)
    return quantity.number is None and _words(words.text) == _words(plain(quantity.tex)) != ()


# -- several values


def _many_equal(gold: Value, answer: Value, leaf: Leaf) -> bool:
    gold, answer = _opened(gold), _opened(answer)
    if not isinstance(gold, Many) or not isinstance(answer, Many):
        many, single = (gold, answer) if isinstance(gold, Many) else (answer, gold)
        # Saying one value twice is saying it once; a tuple never is its member.
        items = _distinct(many.items, leaf) if many.kind != "tuple" else []
        return len(items) == 1 and _equal(*((items[0], single) if many is gold else (single, items[0])), leaf)
    if gold.kind == "tuple" and answer.kind == "tuple":
        return _all_equal(gold.items, answer.items, leaf)
    if "tuple" in (gold.kind, answer.kind):
        points, other = (_point(gold), answer.items) if answer.kind == "tuple" else (_point(answer), gold.items)
        return points is not None and _all_equal(points, other, leaf)
    if not gold.items or not answer.items:
        return not gold.items and not answer.items
    golds, answers = gold.items, answer.items
    if "set" in (gold.kind, answer.kind) or len(golds) != len(answers):
        golds, answers = _distinct(golds, leaf), _distinct(answers, leaf)
    return len(golds) == len(answers) and _matched(golds, answers, leaf)


def _opened(value: Value) -> Value:
    """A list that stands in one \\text is a list."""
    if isinstance(value, Words) and isinstance(again := read(value.text), Many):
        return again
    return value


def _all_equal(golds: Sequence[Value], answers: Sequence[Value], leaf: Leaf) -> bool:
    return len(golds) == len(answers) and all(_equal(g, a, leaf) for g, a in zip(golds, answers, strict=True))


def _matched(golds: Sequence[Value], answers: Sequence[Value], leaf: Leaf) -> bool:
    """Whether the answers are the golds in some order. Greedy is enough: equality is an equivalence."""
    left = list(answers)
    for gold in golds:
        at = next((i for i, answer in enumerate(left) if _equal(gold, answer, leaf)), None)
        if at is None:
            return False
        left.pop(at)
    return True


def _distinct(items: Sequence[Value], leaf: Leaf) -> list[Value]:
    kept: list[Value] = []
    for item in items:
        if not any(_equal(other, item, leaf) for other in kept):
            kept.append(item)
    return kept


def _point(values: Many) -> tuple[Value, ...] | None:
    """`x = 1, y = 2` as the pair (1, 2), in the order of the names."""
    pairs = [_assignment(item) if isinstance(item, Relation) else None for item in values.items]
    if not pairs or None in pairs or len({name for name, _ in pairs}) != len(pairs):
        return None
    return tuple(read(tex) for _, tex in sorted(pairs))


def _matrices_equal(gold: Value, answer: Value, leaf: Leaf) -> bool:
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return (
            gold.kind == answer.kind
            and len(gold.rows) == len(answer.rows)
            and all(_all_equal(g, a, leaf) for g, a in zip(gold.rows, answer.rows, strict=True))
        )
    matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
    column = tuple(cell for row in matrix.rows for cell in row) if all(len(row) == 1 for row in matrix.rows) else None
    if column is None or not isinstance(other, Many) or other.kind != "tuple":
        return False
    return _all_equal(*((column, other.items) if matrix is gold else (other.items, column)), leaf)


# -- intervals


def _regions_equal(gold: Region, answer: Region, leaf: Leaf) -> bool:
    if gold.name and answer.name and _squeezed(gold.name) != _squeezed(answer.name):
        return False
    points_gold, points_answer = gold.complement or _holes(gold, leaf), answer.complement or _holes(answer, leaf)
    if points_gold and points_answer:
        return _same_set(points_gold, points_answer, leaf)
    if points_gold or points_answer:
        return False
    a, b = canonical(gold.intervals), canonical(answer.intervals)
    left = list(b)
    for interval in a:
        at = next((i for i, other in enumerate(left) if _intervals_equal(interval, other, leaf)), None)
        if at is None:
            return False
        left.pop(at)
    return not left


def _same_set(a: Sequence[Value], b: Sequence[Value], leaf: Leaf) -> bool:
    a, b = _distinct(a, leaf), _distinct(b, leaf)
    return len(a) == len(b) and _matched(a, b, leaf)


def _intervals_equal(a: Interval, b: Interval, leaf: Leaf) -> bool:
    return (
        a.low_closed == b.low_closed
        and a.high_closed == b.high_closed
        and _quantities_equal(a.low, b.low, leaf)
        and _quantities_equal(a.high, b.high, leaf)
    )


def _holes(region: Region, leaf: Leaf) -> tuple[Value, ...]:
    """The points that open intervals one after the other leave out of the real line, or ()."""
    parts = region.intervals
    if len(parts) < 2 or any(part.low_closed or part.high_closed for part in parts):
        return ()
    if not (is_infinite(parts[0].low) and is_infinite(parts[-1].high)):
        return ()
    pairs = list(pairwise(parts))
    if any(is_infinite(a.high) or is_infinite(b.low) for a, b in pairs):
        return ()
    return tuple(a.high for a, _ in pairs) if all(_quantities_equal(a.high, b.low, leaf) for a, b in pairs) else ()


# -- equations


def _assignment(value: Value) -> tuple[str, str] | None:
    """(name, LaTeX of the value) of `x = 5`, `5 = x`, `f(x) = 2x = ... `; None for other relations."""
    if not isinstance(value, Relation) or set(value.ops) != {"="}:
        return None
    first, last = value.sides[0], value.sides[-1]
    if is_name(first):
        return _squeezed(first), last
    return (_squeezed(last), first) if is_name(last) else None


def _relations_equal(gold: Value, answer: Value, leaf: Leaf) -> bool:
    g, a = _assignment(gold), _assignment(answer)
    if not isinstance(gold, Relation):
        if isinstance(gold, Region) and gold.source and set(answer.ops) != {"="}:
            return leaf(gold.source, _source(answer))
        return set(answer.ops) == {"="} and _equal(gold, read(a[1] if a else answer.sides[-1]), leaf)
    if not isinstance(answer, Relation):
        if isinstance(answer, Region) and answer.source and set(gold.ops) != {"="}:
            return leaf(_source(gold), answer.source)
        return g is not None and _equal(read(g[1]), answer, leaf)
    if g and a:
        if _same_name(g[0], a[0]):
            return _equal(read(g[1]), read(a[1]), leaf)
        if not (_is_variable(g[0]) and _is_variable(a[0])):
            return _equal(read(g[1]), read(a[1]), leaf)
    return leaf(_source(gold), _source(answer))


def _same_name(a: str, b: str) -> bool:
    """y = ... and f(x) = ... are two ways to give a function."""
    return a == b or ("y" in (a, b) and any(re.fullmatch(r"[fgh]\([a-z]\)", name) for name in (a, b)))


def _is_variable(name: str) -> bool:
    return bool(re.fullmatch(r"\\?[a-zA-Z](?:_\{?\w+\}?)?|\\[a-zA-Z]+|[a-zA-Z]\([a-z]\)", name))


def _source(relation: Relation) -> str:
    spelled = {"<=": r"\le ", ">=": r"\ge ", "!=": r"\ne "}
    out = relation.sides[0]
    for op, side in zip(relation.ops, relation.sides[1:], strict=True):
        out += spelled.get(op, op) + side
    return out


# -- ratios and times


def _ratios_equal(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        if gold.time is not None and answer.time is not None:
            if gold.time == answer.time:
                return True
            # Half a day apart, where one of the two did not say which half.
            return gold.half_day != answer.half_day and (gold.time - answer.time) % 43_200 == 0
        return len(gold.parts) == len(answer.parts) > 0 and _proportional(gold.parts, answer.parts)
    ratio, other = (gold, answer) if isinstance(gold, Ratio) else (answer, gold)
    if not isinstance(other, Quantity) or other.number is None or len(ratio.parts) != 2:
        return False
    return _proportional(ratio.parts, (other.number, Fraction(1)))


def _proportional(a: Sequence[Exact], b: Sequence[Exact]) -> bool:
    if not all(isinstance(x, Fraction) for x in (*a, *b)):
        return False
    return all(a) and all(b) and all(a[0] * y == b[0] * x for x, y in zip(a, b, strict=True))
