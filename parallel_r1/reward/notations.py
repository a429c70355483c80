"""Notations that are one value without parts: numbers with units and scales, bases, ratios, times, dates, durations."""

from __future__ import annotations

import re
from fractions import Fraction

from parallel_r1.reward.exact import evaluate
from parallel_r1.reward.normalize import trim
from parallel_r1.reward.quantities import UNITS, Unit, clock, names_month, number_in_words, split_unit
from parallel_r1.reward.scanning import plain, split_at
from parallel_r1.reward.values import (
    MINUS_INFINITY,
    PLUS_INFINITY,
    Based,
    Interval,
    Many,
    Quantity,
    Ratio,
    Region,
    Words,
)

MAX_PARTS = 20

_NOTHING = re.compile(
    r"(?:\\emptyset|\\\{\s*\\\}|(?:there (?:is|are) )?no(?: real)? (?:solutions?|roots?|values?)(?: exists?)?|(?:the )?"
    r"empty(?: set)?|none)",
    re.IGNORECASE,
)


def empty(text: str) -> Many | None:
    return Many((), "set") if _NOTHING.fullmatch(plain(text)) else None


_REALS = re.compile(r"\\reals|all real(?: number|value)?s?|all reals", re.IGNORECASE)


def reals(text: str) -> Region | None:
    return Region((Interval(MINUS_INFINITY, PLUS_INFINITY, False, False),)) if _REALS.fullmatch(plain(text)) else None


_DURATION = re.compile(
    r"\s*(?:and |\\text\{\s*and\s*\}|,)?\s*(\d+(?:\.\d+)?)\s*(\\text\{\s*([a-z]+)\s*\}|([a-z]+))", re.IGNORECASE
)


def compound(text: str) -> Quantity | None:
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


_BASED = re.compile(
    r"\(?(-?[0-9A-Z]+(?:\.[0-9A-Z]+)?)\)?_(?:\{\s*\(?(\w+)\)?\s*\}|(\d))|([0-9A-Z]+) (?:in )?base[ -](\w+)",
    re.IGNORECASE,
)
_BASE_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip


def based(text: str) -> Based | None:
    match = (
        _BASED.fullmatch(re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r"\1", text)) if "_" in text or "base" in text else None
    )
    if not match:
        return None
    digits, name = (match[1] or match[4]).upper(), (match[2] or match[3] or match[5]).lower()
    base = int(name) if name.isdigit() and len(name) < 4 else _BASE_WORDS.get(name, 0)
    if (
        not 2 <= base <= 36
        or not any(c.isdigit() for c in digits)
        or not all(int(c, 36) < base for c in re.sub(r"[-.]", "", digits))
    ):
        return None
    sign = "-" if digits.startswith("-") else ""
    return Based(sign + (digits.lstrip("-0") or "0"), base)


def ratio(text: str) -> Ratio | None:
    time = clock(plain(text))
    pieces, ops = split_at(re.sub(r"\\text\{\s*to\s*\}|(?<=\d) to (?=\d)", ":", text), lambda token, *_: token == ":")
    parts = [evaluate(piece.strip()) for piece in pieces] if ops and len(pieces) <= MAX_PARTS else []
    if time is None and (not parts or None in parts):
        return None
    return Ratio(() if None in parts else tuple(parts), *(time or (None, False)))


_SEPARATED = re.compile(
    r"[-+]?(?:\d{1,3}(?:[ '_]\d{3})+(?:\.\d+)?|\d{1,3}(?:\\_\d{3})+|\d{1,3}(?:\.\d{3}){2,}"
    r"|\d{1,2}(?:,\d{2})+,\d{3}|(\d{1,3}(?:\.\d{3})+),\d\d?)"
)


_SCALE = re.compile(r"(?<=\d)\s*(\\text\{\s*)?(thousand|million|billion|trillion)(?![a-z])\s*\}?", re.IGNORECASE)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ORDINAL = re.compile(r"(\d{1,9})\s*\^?\s*\{?\s*(?:\\text\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?")
_DATE = re.compile(
    r"(?:on )?(?:\d{1,2}(?:st|nd|rd|th)?(?: of)? [A-Z][a-z]{2,8}\.?"
    r"|[A-Z][a-z]{2,8}\.? \d{1,2}(?:st|nd|rd|th)?)(?:,? \d{4})?"
)


def date(text: str) -> Words | None:
    words = plain(text)
    return Words(words) if _DATE.fullmatch(words) and names_month(words) else None


def quantity(text: str, letters: bool) -> Quantity | Words:
    if match := _ORDINAL.fullmatch(text):
        return Quantity(match[1], Fraction(int(match[1])))
    text = _SCALE.sub(lambda m: rf" \times 10^{{{_ZEROS[m[2].lower()]}}}", text)
    core, unit = split_unit(text, letters)
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


_SHORT_WORDS = frozenset(["yes", "no", "odd", "all", "any", "red", "up", "left", "east", "west"])


def _is_words(text: str) -> bool:
    """Letters that are text and no product of variables: a \\text, a name, a number, a long word, several words."""
    if text.startswith(r"\text") or text.lower() in _SHORT_WORDS or number_in_words(text) is not None:
        return True
    return bool(re.search(r"(?<!\\)[^\W\d_]{4,}|[^\W\d_]{2,} [^\W\d_]{2,}|^[A-Z][a-z]{2,}$", text))
