"""What an answer is: numbers, expressions, words, lists, tuples, intervals, equations, matrices. Strings to records.

`read` takes a cleaned answer (see `normalize`) and never computes more than `exact` does; expressions that need algebra
stay LaTeX inside their record. Structure is found by splitting at separators outside all brackets, so the cost is linear
a level and the levels are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from parallel_r1.reward.exact import Exact, evaluate
from parallel_r1.reward.normalize import trim
from parallel_r1.reward.quantities import UNITS, Unit, clock, names_month, split_unit

MAX_DEPTH = 8
MAX_ITEMS = 200


@dataclass(frozen=True)
class Quantity:
    """A number or an expression. number: its exact value where it has one; tex: what algebra would read."""

    tex: str
    number: Exact | None = None
    percent: bool = False
    unit: Unit | None = None


@dataclass(frozen=True)
class Words:
    """Text: a name, a letter of a choice, a phrase."""

    text: str


@dataclass(frozen=True)
class Many:
    """Several values. list: bare, unordered; set: braces; tuple: ordered, in `brackets`."""

    items: tuple[Value, ...]
    kind: Literal["list", "set", "tuple"]
    brackets: str = ""


@dataclass(frozen=True)
class Interval:
    """From low to high. An end that is infinite has no brackets that count."""

    low: Quantity
    high: Quantity
    low_closed: bool
    high_closed: bool


@dataclass(frozen=True)
class Region:
    """A union of intervals; complement: all real numbers but these points.

    name: the variable, if one was named; source: the inequality it was read from, if it was one.
    """

    intervals: tuple[Interval, ...] = ()
    complement: tuple[Value, ...] = ()
    name: str = ""
    source: str = ""


@dataclass(frozen=True)
class Relation:
    """sides[0] ops[0] sides[1] ops[1] ..., as LaTeX."""

    sides: tuple[str, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]
    kind: str


@dataclass(frozen=True)
class Ratio:
    """a : b : ...; clock: the same text as a time of day, in seconds, where it can be one."""

    parts: tuple[Exact, ...]
    time: int | None = None
    half_day: bool = False


@dataclass(frozen=True)
class Based:
    """A numeral that names its base."""

    digits: str
    base: int


Value = Quantity | Words | Many | Region | Relation | Matrix | Ratio | Based


@dataclass(frozen=True)
class Reading:
    """How to read what is ambiguous. grouped: `1,234` outside brackets is one number (in brackets: the other way
    round); letters: a lone letter after a number may be a unit. depth: levels of nesting so far."""

    grouped: bool = True
    letters: bool = False
    depth: int = 0

    def inside(self) -> Reading:
        return Reading(self.grouped, self.letters, self.depth + 1)

    def in_brackets(self) -> Reading:
        return Reading(not self.grouped if self.depth == 0 else self.grouped, self.letters, self.depth + 1)


def read(text: str, reading: Reading = Reading()) -> Value:  # noqa: B008 (frozen)
    """The value of a cleaned answer. Never raises; what is not understood is a Quantity without a number, or Words."""
    text = trim(text)
    if reading.depth < MAX_DEPTH:
        for reader in _READERS:
            if (value := reader(text, reading)) is not None:
                return value
    return _quantity(text, reading)


# -- splitting


_TOKEN = re.compile(
    r"\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|[()\[\]{}]|<=|>=|:=|[=<>,;:&/ ]|[a-zA-Z]+", re.DOTALL
)
_OPEN, _CLOSE = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}


def top_level(text: str) -> Iterator[tuple[str, int, int]]:
    """(token, start, end) for the tokens that stand outside all brackets. A half-open interval is a bracket, too."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _OPEN or token.startswith(r"\begin"):
            depth += 1
        elif token in _CLOSE or token.startswith(r"\end"):
            depth = max(depth - 1, 0)
        elif depth == 0:
            yield token, match.start(), match.end()


def split_at(text: str, wanted: Callable[[str, int, int], bool]) -> tuple[list[str], list[str]]:
    """(pieces, separators) of a text cut at the wanted top-level tokens."""
    pieces, separators, at = [], [], 0
    for token, start, end in top_level(text):
        if start >= at and wanted(token, start, end):
            pieces.append(text[at:start])
            separators.append(token)
            at = end
    return [*pieces, text[at:]], separators


# -- readers, in the order they are tried


_NOTHING = re.compile(
    r"(?:\\emptyset|\\\{\s*\\\}|(?:there (?:is|are) )?no(?: real)? (?:solutions?|roots?|values?)(?: exists?)?|(?:the )?"
    r"empty(?: set)?|none)",
    re.IGNORECASE,
)


def _empty(text: str, _: Reading) -> Value | None:
    return Many((), "set") if _NOTHING.fullmatch(plain(text)) else None


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


_IS = re.compile(
    r"(?:\\text\{)?(?:[A-Za-z][A-Za-z'-]*(?:, | |\} *)){1,12}?(?:is|are|equals?|equal to|gives|yields)(?![A-Za-z]):?\s*\}?\s*"
    r"(?=\S)"
)
_COLON = re.compile(r"(?:\\text\{\s*[A-Za-z][A-Za-z' -]+:\s*\}|[A-Za-z][A-Za-z'-]+(?: [A-Za-z'-]+){0,4}\s?:(?!=))\s*(?=\S)")
_ABOUT = re.compile(
    r"(?:\\text\{\s*)?(?:approximately|about|exactly|roughly|around|only|an? total of|in total|total|therefore|thus|hence|so)"
    r"(?![A-Za-z]),?\s*\}?\s*(?=[^\s}])",
    re.IGNORECASE,
)


def without_label(text: str) -> str:
    for pattern in (_ABOUT, _IS, _COLON):
        if match := pattern.match(text):
            return text[match.end() :]
    if text.startswith(r"\approx"):
        return text[len(r"\approx") :]
    return text


_DURATION = re.compile(r"\s*(?:and |\\text\{\s*and\s*\}|,)?\s*(\d+(?:\.\d+)?)\s*(\\text\{\s*([a-z]+)\s*\}|([a-z]+))", re.IGNORECASE)


def _compound(text: str, _: Reading) -> Value | None:
    """`2 hours 30 minutes`, `5 feet and 6 inches`, `3 dollars and 50 cents`: one quantity."""
    at, total, dimension, count = 0, Fraction(0), None, 0
    text = re.sub(r"\\text\{\s*([a-z]+)(?: and|,)\s*\}", r" \1 and ", text)
    while match := _DURATION.match(text, at):
        name = (match[3] or match[4]).lower()
        unit = UNITS.get(name) or UNITS.get(name.removesuffix("s")) or UNITS.get(name.removesuffix("es"))
        if unit is None or dimension not in (None, unit.dimension):
            return None
        total, dimension, count, at = total + Fraction(match[1]) * unit.factor, unit.dimension, count + 1, match.end()
    if count < 2 or text[at:].strip():
        return None
    return Quantity(text, total, unit=Unit(dimension))


_NAME = re.compile(
    r"\\?[a-zA-Z]+'*(?:_(?:\{[^{}]*\}|\w))?(?:\([a-zA-Z](?:,\s*[a-zA-Z])*\))?|\\text\{[^{}]*\}(?:_(?:\{[^{}]*\}|\w))?"
    r"|\\(?:angle|triangle|overline|widehat|vec|hat|bar|mathbf)\s*\{?[ A-Za-z]+\}?|m?\\angle [A-Za-z]+|[A-Za-z ]+"
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)|\[[A-Z]+\]|\|[A-Z]+\||[A-Za-z]\([^()]*\)|f\^\{?-1\}?\([a-z]\)"
)


def is_name(text: str) -> bool:
    """Whether the left side of an equation only names what the right side is."""
    return bool(_NAME.fullmatch(text.strip())) and text.strip() not in (r"\pi", "e", "i")


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
    if not (text.startswith(r"\{") and text.endswith(r"\}")) or _bracket_end(text) != len(text):
        return None
    pieces, _ = split_at(text[2:-2], lambda token, *_: token in (",", ";"))
    if len(pieces) > MAX_ITEMS:
        return None
    inside = reading.in_brackets()
    return Many(tuple(read(piece, inside) for piece in pieces), "set")


def _bracket_end(text: str) -> int:
    """Index after the bracket that closes the first one, -1 where none does."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
        if depth == 0 and match[0] in _CLOSE:
            return match.end()
    return -1


_REALS = re.compile(r"\\reals|all real(?: number|value)?s?|all reals", re.IGNORECASE)


def _reals(text: str, _: Reading) -> Value | None:
    return Region((Interval(MINUS_INFINITY, PLUS_INFINITY, False, False),)) if _REALS.fullmatch(plain(text)) else None


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
    return _united([read(piece, reading.inside()) for piece in pieces])


def _united(values: list[Value], name: str = "") -> Region | None:
    intervals: list[Interval] = []
    for value in values:
        value = as_region(value)
        if value is None or value.complement:
            return None
        name = name or value.name
        intervals.extend(value.intervals)
    return Region(tuple(intervals), name=name)


def as_region(value: Value) -> Region | None:
    """An interval or a set of points as a region; a pair (a, b) is an open interval here."""
    if isinstance(value, Region):
        return value
    if isinstance(value, Many) and value.kind == "set" and all(isinstance(item, Quantity) for item in value.items):
        return Region(tuple(Interval(item, item, True, True) for item in value.items))
    if isinstance(value, Many) and value.brackets in ("()", "[]") and len(value.items) == 2:
        low, high = value.items
        if isinstance(low, Quantity) and isinstance(high, Quantity):
            closed = value.brackets == "[]"
            return Region((Interval(low, high, closed, closed),))
    return None


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
        return _joined(items, either) or Many(tuple(items), "list")
    return Many(tuple(items), "list")


_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]\d|\d)|(?<![\d,.])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])|\d{1,3}(?:\.\d{3})+,\d\d?(?!\d)")


def _joined(regions: list[Region], either: bool) -> Region | None:
    """Inequalities side by side: `or` unites; `and` or a comma intersects where the two meet, else unites as well."""
    if any(region.complement for region in regions):
        if all(region.complement for region in regions):
            return Region(complement=tuple(p for region in regions for p in region.complement), name=regions[0].name)
        return None
    if len({region.name for region in regions if region.name}) > 1:
        return None
    if not either and len(regions) == 2 and all(len(region.intervals) == 1 for region in regions):
        (a,), (b,) = regions[0].intervals, regions[1].intervals
        for left, right in ((a, b), (b, a)):
            if left.high == PLUS_INFINITY and right.low == MINUS_INFINITY:
                if isinstance(left.low.number, Fraction) and isinstance(right.high.number, Fraction):
                    if left.low.number >= right.high.number:
                        break
                    return Region((Interval(left.low, right.high, left.low_closed, right.high_closed),), name=regions[0].name)
                return None
    return _united(list(regions))


_RELATIONS = {"=": "=", ":=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\approx": "~", r"\equiv": "="}
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
        left = text[: len(text)] if not at and not sides[0] else None
        if left is not None:
            return read(sides[1], reading.inside())
        kept = sides[: at + 1]
        return read(kept[0], reading.inside()) if at == 0 else Relation(tuple(kept), tuple(ops[:at]))
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


def _bracketed(text: str, reading: Reading) -> Value | None:
    for opening, closing in (("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), (r"\langle", r"\rangle"), ("<", ">"), ("]", "[")):
        if len(text) > 2 and text.startswith(opening) and text.endswith(closing):
            break
    else:
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    if opening in _OPEN and _bracket_end(text) != len(text):
        return None
    pieces, ops = split_at(inner, lambda token, *_: token == ";")
    if not ops:
        pieces, ops = split_at(inner, lambda token, *_: token == ",")
    if len(pieces) > MAX_ITEMS:
        return None
    if not ops:  # one value in round or square brackets is that value
        return read(inner, reading.inside()) if opening + closing in ("()", "[]") else None
    items = tuple(read(piece, reading.in_brackets()) for piece in pieces)
    if len(items) == 2 and all(isinstance(item, Quantity) for item in items):
        infinite = any(is_infinite(item) for item in items)
        if opening + closing in ("(]", "[)", "][") or infinite or (opening == "[" and closing == "]"):
            low, high = items
            return Region((Interval(low, high, opening == "[" and not is_infinite(low), closing == "]" and not is_infinite(high)),))
    if opening + closing in ("(]", "[)", "]["):
        return None
    brackets = "()" if opening in ("(", r"\langle", "<") else "[]"
    return Many(items, "tuple", "<>" if opening in (r"\langle", "<") else brackets)


def _plus_minus(text: str, reading: Reading) -> Value | None:
    signs = re.findall(r"\\(?:pm|mp)(?![a-zA-Z])", text)
    if not signs or len(signs) > 2:
        return None
    linked = len(signs) == 1 or r"\mp" in signs
    choices = ["+-", "-+"] if linked else None
    items = []
    for a in "+-":
        for b in "+-" if not linked and len(signs) == 2 else "+":
            picked = iter([a, b])

            def sign(match: re.Match, a: str = a, picked: Iterator[str] = picked) -> str:
                if choices:
                    return choices["+-".index(a)][match[0] == r"\mp"]
                return next(picked)

            items.append(read(re.sub(r"\\(?:pm|mp)(?![a-zA-Z])", sign, text), reading.inside()))
    return Many(tuple(items), "list")


_BASED = re.compile(r"\(?(-?[0-9A-Z]+(?:\.[0-9A-Z]+)?)\)?_(?:\{\s*(\w+)\s*\}|(\d))|([0-9A-Z]+) (?:in )?base[ -](\w+)", re.IGNORECASE)
_BASE_WORDS = dict(
    zip(
        "two three four five six seven eight nine ten eleven twelve sixteen".split(), [*range(2, 13), 16], strict=True
    )
)


def _based(text: str, _: Reading) -> Value | None:
    match = _BASED.fullmatch(re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r"\1", text)) if "_" in text or "base" in text else None
    if not match:
        return None
    digits, name = (match[1] or match[4]).upper(), (match[2] or match[3] or match[5]).lower()
    base = int(name) if name.isdigit() and len(name) < 4 else _BASE_WORDS.get(name, 0)
    if not 2 <= base <= 36 or not any(c.isdigit() for c in digits) or not all(int(c, 36) < base for c in re.sub(r"[-.]", "", digits)):
        return None
    sign = "-" if digits.startswith("-") else ""
    return Based(sign + (digits.lstrip("-0") or "0"), base)


def _ratio(text: str, _: Reading) -> Value | None:
    time = clock(plain(text))
    pieces, ops = split_at(re.sub(r"\\text\{\s*to\s*\}|(?<=\d) to (?=\d)", ":", text), lambda token, *_: token == ":")
    parts = [evaluate(piece.strip()) for piece in pieces] if ops and len(pieces) <= MAX_ITEMS else []
    if time is None and (not parts or None in parts):
        return None
    return Ratio(() if None in parts else tuple(parts), *(time or (None, False)))


_SEPARATED = re.compile(
    r"[-+]?(?:\d{1,3}(?:[ '_]\d{3})+(?:\.\d+)?|\d{1,3}(?:\\_\d{3})+|\d{1,3}(?:\.\d{3}){2,}|\d{1,2}(?:,\d{2})+,\d{3}|(\d{1,3}(?:\.\d{3})+),\d\d?)"
)


_SCALE = re.compile(r"(?<=\d)\s*(\\text\{\s*)?(thousand|million|billion|trillion)(?![a-z])\s*\}?", re.IGNORECASE)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ORDINAL = re.compile(r"(\d{1,9})\s*\^?\s*\{?\s*(?:\\text\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?")
_DATE = re.compile(r"(?:on )?(?:\d{1,2}(?:st|nd|rd|th)?(?: of)? [A-Z][a-z]{2,8}\.?|[A-Z][a-z]{2,8}\.? \d{1,2}(?:st|nd|rd|th)?)(?:,? \d{4})?")


def _date(text: str, _: Reading) -> Value | None:
    words = plain(text)
    return Words(words) if _DATE.fullmatch(words) and names_month(words) else None


def _quantity(text: str, reading: Reading) -> Value:
    if match := _ORDINAL.fullmatch(text):
        return Quantity(match[1], Fraction(int(match[1])))
    text = _SCALE.sub(lambda m: rf" \times 10^{{{_ZEROS[m[2].lower()]}}}", text)
    core, unit = split_unit(text, reading.letters)
    percent = core.endswith("%")
    if percent:
        core = core[:-1].rstrip()
    core = trim(core)
    if match := _SEPARATED.fullmatch(core):
        core = core.replace(".", "").replace(",", ".") if match[1] else re.sub(r"[ '_,\\]", "", core)
        core = core if match[1] or core.count(".") < 2 else core.replace(".", "")
    number = evaluate(core)
    if number is None and not unit and not percent and _WORDS.fullmatch(plain(text)) and _is_words(text):
        return Words(plain(text))
    return Quantity(core, number, percent, unit)


_WORDS = re.compile(r"[^\\^_=+*<>{}]*[^\W\d_][^\\^_=+*<>{}]*")


def _is_words(text: str) -> bool:
    """Letters that are text and no product of variables: a \\text, a word of four letters, several words."""
    return text.startswith(r"\text") or bool(re.search(r"(?<!\\)[^\W\d_]{4,}|[^\W\d_]{2,} [^\W\d_]{2,}", text))


def plain(text: str) -> str:
    """The text with every `\\text{...}` opened and white space collapsed."""
    return re.sub(r"\s+", " ", re.sub(r"\\text\{([^{}]*)\}", r"\1", text)).strip()


def is_infinite(value: Value) -> bool:
    return isinstance(value, Quantity) and value.tex.replace(" ", "") in (r"\infty", r"+\infty", r"-\infty")


MINUS_INFINITY, PLUS_INFINITY = Quantity(r"-\infty"), Quantity(r"\infty")

_READERS = (
    _empty, _date, _matrix, _reals, _compound, _set, _complement, _union, _several, _member, _labelled, _relation, _bracketed, _plus_minus,
    _based, _ratio,
)  # fmt: skip
