"""From a cleaned answer to its value: structure first, by cutting at separators outside all brackets, then notation.

`read` never computes more than `exact` does, its levels are counted, and what it does not understand stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from parallel_r1.reward import notations
from parallel_r1.reward.normalize import trim
from parallel_r1.reward.regions import joined, united
from parallel_r1.reward.scanning import OPENING, bracket_end, is_name, split_at, without_label
from parallel_r1.reward.values import (
    MINUS_INFINITY,
    PLUS_INFINITY,
    Interval,
    Many,
    Matrix,
    Quantity,
    Region,
    Relation,
    Value,
    is_infinite,
)

MAX_DEPTH = 8
MAX_ITEMS = 200


@dataclass(frozen=True)
class Reading:
    """How to read what is ambiguous.

    grouped: `1,234` outside brackets is one number, in brackets it is two (or the other way round). letters: a lone
    letter after a number may be a unit. depth: levels of nesting so far.
    """

    grouped: bool = True
    letters: bool = False
    depth: int = 0

    def inside(self) -> Reading:
        return Reading(self.grouped, self.letters, self.depth + 1)

    def in_brackets(self) -> Reading:
        return Reading(not self.grouped if self.depth == 0 else self.grouped, self.letters, self.depth + 1)


def read(text: str, reading: Reading = Reading()) -> Value:
    """The value of a cleaned answer. Never raises; what is not understood is a Quantity without a number, or Words."""
    text = trim(text)
    if reading.depth < MAX_DEPTH:
        for reader in _READERS:
            if (value := reader(text, reading)) is not None:
                return value
    return notations.quantity(text, reading.letters)


_MATRIX = re.compile(r"\\begin\{((?:[pbvBV]|small)?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def _matrix(text: str, reading: Reading) -> Value | None:
    if "\\begin" not in text:
        return None
    if text[:1] in "([" and text[-1:] in ")]":
        text = text[1:-1].strip()
    match = _MATRIX.fullmatch(text)
    if not match or "\\begin" in match[2]:
        return None
    rows = [row for row in re.split(r"\\\\|\\cr(?![a-z])", match[2].replace(r"\hline", "")) if row.strip()]
    if not 0 < len(rows) <= MAX_ITEMS:
        return None
    inside = reading.in_brackets()
    cells = tuple(tuple(read(cell, inside) for cell in row.split("&")) for row in rows)
    return Matrix(cells, "determinant" if match[1] in ("vmatrix", "Vmatrix") else "matrix")


def _labelled(text: str, reading: Reading) -> Value | None:
    """`The area is 12`, `Area: 12`, `\\text{The answer is }12`: the value without what introduces it."""
    rest = without_label(text)
    return read(rest, reading.inside()) if rest != text else None


def _member(text: str, reading: Reading) -> Value | None:
    pieces, ops = split_at(text, lambda token, *_: token == r"\in")
    if len(ops) != 1 or not is_name(pieces[0]) or split_at(pieces[1], lambda token, *_: token in (r"\ne", "="))[1]:
        return None
    value = read(pieces[1], reading.inside())
    if isinstance(value, Region):
        return Region(value.intervals, value.complement, pieces[0].strip())
    return value


_BUILDER = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\reals\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}", re.DOTALL)


def _set(text: str, reading: Reading) -> Value | None:
    if match := _BUILDER.fullmatch(text):
        value = read(match[1], reading.inside())
        return value if isinstance(value, Region) else None
    if not (text.startswith(r"\{") and text.endswith(r"\}")) or bracket_end(text) != len(text):
        return None
    pieces, _ = split_at(text[2:-2], lambda token, *_: token in (",", ";"))
    if len(pieces) > MAX_ITEMS:
        return None
    inside = reading.in_brackets()
    return Many(_flat([read(piece, inside) for piece in pieces]), "set")


def _complement(text: str, reading: Reading) -> Value | None:
    pieces, ops = split_at(text, lambda token, *_: token == r"\setminus")
    if len(ops) != 1:
        pieces, ops = split_at(text, lambda token, start, *_: token == "\\" and start > 0)
    if len(ops) != 1 or not isinstance(read(pieces[0], reading.inside()), Region):
        return None
    points = read(pieces[1], reading.inside())
    return Region(complement=points.items) if isinstance(points, Many) and points.items else None


def _union(text: str, reading: Reading) -> Value | None:
    pieces, ops = split_at(text, lambda token, *_: token in (r"\cup", "U"))
    if not ops or len(ops) > MAX_ITEMS:
        return None
    return united([read(piece, reading.inside()) for piece in pieces])


_AND = ("and", r"\text{and}", "&", r"\&")
_OR = ("or", r"\text{or}")


def _several(text: str, reading: Reading) -> Value | None:
    """A bare list: `1, 2`, `1 or 2`, `x = 1 and x = 2`, `x < 1 or x > 2` (a region)."""
    groups = [match.span() for match in _GROUPED.finditer(text)] if reading.grouped else []

    def wanted(token: str, start: int, end: int) -> bool:
        word = re.sub(r"\s|,", "", token).lower()
        if token == ",":
            return not any(a < start < b for a, b in groups)
        return token == ";" or word in _AND or word in _OR

    pieces, ops = split_at(text, wanted)
    pieces = [piece for piece in pieces if piece.strip(" ,;")]
    if not ops or len(pieces) < 2 or len(pieces) > MAX_ITEMS:
        return None
    items = [read(piece, reading.inside()) for piece in pieces]
    either = any("or" in op.lower() for op in ops)
    if all(isinstance(item, Region) for item in items):
        return joined(items, either) or Many(tuple(items), "list")
    return Many(_flat(items), "list")


def _flat(items: list[Value]) -> tuple[Value, ...]:
    """`0, \\pm 1` is one list of three."""
    return tuple(
        part for item in items for part in (item.items if isinstance(item, Many) and item.kind == "list" else (item,))
    )


_GROUPED = re.compile(
    r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]\d|\d)|(?<![\d,.])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])|\d{1,3}(?:\.\d{3})+,\d\d?(?!\d)"
)


_RELATIONS = {
    "=": "=", ":=": "=", r"\equiv": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\approx": "~",
}  # fmt: skip
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _relation(text: str, reading: Reading) -> Value | None:
    if text.startswith("<") and text.endswith(">"):  # a vector
        return None
    sides, ops = split_at(text, lambda token, *_: token in _RELATIONS)
    if not ops or len(ops) > MAX_ITEMS:
        return None
    sides, ops = [side.strip() for side in sides], [_RELATIONS[op] for op in ops]
    if "~" in ops:  # the exact side of an approximation, which is the left one
        at = ops.index("~")
        if at == 0:
            return read(sides[0] or sides[1], reading.inside())
        sides, ops = sides[: at + 1], ops[:at]
    if not all(sides):
        return None
    return _inequality(text, sides, ops, reading) or Relation(tuple(sides), tuple(ops))


def _inequality(text: str, sides: list[str], ops: list[str], reading: Reading) -> Region | None:
    """A chain around one variable as a region: `-2 <= x < 7`, `x > 3`, `x != 0`."""
    inside = reading.inside()
    if ops == ["!="] and is_name(sides[0]):
        values = read(sides[1], inside)
        points = values.items if isinstance(values, Many) else (values,)
        return Region(complement=points, name=sides[0], source=text)
    if (match := re.fullmatch(r"\|\s*([a-zA-Z])\s*\|", sides[0])) and len(ops) == 1 and ops[0] in _FLIPPED:
        return _absolute(text, match[1], ops[0], read(sides[1], inside))
    names = [i for i, side in enumerate(sides) if is_name(side) and side not in (r"\infty", r"-\infty", r"+\infty")]
    if len(names) != 1 or any(op not in _FLIPPED for op in ops):
        return None
    low, high, low_closed, high_closed = MINUS_INFINITY, PLUS_INFINITY, False, False
    (at,) = names
    if len(ops) > 2 or (len(ops) == 2 and (at != 1 or ops[0][0] != ops[1][0])):
        return None
    for i, op in enumerate(ops):
        bound, op = (sides[i + 1], op) if i == at else (sides[i], _FLIPPED[op])
        value = read(bound, inside)
        if not isinstance(value, Quantity):
            return None
        if op[0] == "<":
            high, high_closed = value, op == "<=" and not is_infinite(value)
        else:
            low, low_closed = value, op == ">=" and not is_infinite(value)
    return Region((Interval(low, high, low_closed, high_closed),), name=sides[at], source=text)


def _absolute(text: str, name: str, op: str, bound: Value) -> Region | None:
    """`|x| < 2` and its kin, around zero."""
    if not isinstance(bound, Quantity) or not isinstance(bound.number, Fraction) or bound.number <= 0:
        return None
    low, closed = Quantity("-" + bound.tex, -bound.number), op.endswith("=")
    if op[0] == "<":
        return Region((Interval(low, bound, closed, closed),), name=name, source=text)
    parts = Interval(MINUS_INFINITY, low, False, closed), Interval(bound, PLUS_INFINITY, closed, False)
    return Region(parts, name=name, source=text)


_BRACKETS = (("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), ("]", "["), (r"\langle", r"\rangle"), ("<", ">"))


def _bracketed(text: str, reading: Reading) -> Value | None:
    """A tuple, a vector or an interval; a single value in brackets is that value."""
    text = re.sub(r"^[A-Z]\s*(?=\(.*,)", "", text)  # the name of a point
    pair = next((p for p in _BRACKETS if len(text) > 2 and text.startswith(p[0]) and text.endswith(p[1])), None)
    if pair is None or (pair[0] in OPENING and bracket_end(text) != len(text)):
        return None
    inner, kind = text[len(pair[0]) : len(text) - len(pair[1])], "".join(pair)
    pieces, ops = split_at(inner, lambda token, *_: token == ";")
    if not ops:
        pieces, ops = split_at(inner, lambda token, *_: token == ",")
    if len(pieces) > MAX_ITEMS:
        return None
    if not ops:
        return read(inner, reading.inside()) if kind in ("()", "[]") else None
    items = tuple(read(piece, reading.in_brackets()) for piece in pieces)
    if len(items) == 2 and all(isinstance(item, Quantity) for item in items):
        low, high = items
        if is_infinite(low) or is_infinite(high) or kind not in ("()", r"\langle\rangle", "<>"):
            closed = pair[0] == "[" and not is_infinite(low), pair[1] == "]" and not is_infinite(high)
            return Region((Interval(low, high, *closed),))
    if kind in ("(]", "[)", "]["):
        return None
    return Many(items, "tuple", kind if kind in ("()", "[]") else "<>")


_SIGN = re.compile(r"\\(pm|mp)(?![a-zA-Z])")


def _text(text: str, reading: Reading) -> Value | None:
    """`\\text{5 apples}` is 5 apples."""
    match = re.fullmatch(r"\\text\{([^{}]*\d[^{}]*)\}", text)
    return read(match[1], reading.inside()) if match else None


def _plus_minus(text: str, reading: Reading) -> Value | None:
    r"""`1 \pm \sqrt{2}` as the list of its values: `\pm` and `\mp` go together, two `\pm` are free of each other."""
    signs = _SIGN.findall(text)
    if not 0 < len(signs) <= 2:
        return None
    if len(signs) == 2 and "mp" not in signs:
        choices = ["++", "+-", "-+", "--"]
    else:
        choices = ["".join("+-"[(sign == "mp") != flipped] for sign in signs) for flipped in (False, True)]
    return Many(tuple(read(_signed(text, choice), reading.inside()) for choice in choices), "list")


def _signed(text: str, signs: str) -> str:
    picked = iter(signs)
    return _SIGN.sub(lambda _: next(picked), text)


_READERS: tuple[Callable[[str, Reading], Value | None], ...] = (
    lambda text, _: notations.empty(text) or notations.date(text),
    _matrix,
    lambda text, _: notations.reals(text) or notations.compound(text),
    _text,
    _set,
    _complement,
    _union,
    _several,
    _member,
    _labelled,
    _relation,
    _bracketed,
    _plus_minus,
    lambda text, _: notations.based(text) or notations.ratio(text),
)
