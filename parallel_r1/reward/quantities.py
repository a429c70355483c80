"""What stands around a number: units, currencies, percent, times of day, numbers in words.

A unit is a dimension and an exact factor, so that 2 m = 200 cm and 80 cents = $0.80 while 35 m and 35 cm differ. A word
nobody knows (apples, ways, students) names what was counted and changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Unit:
    """dimension: what can be converted into each other; factor: size in the dimension's base unit."""

    dimension: str
    factor: Fraction = Fraction(1)


COUNTED = Unit("counted")
"""Whatever is not a known unit: compatible with every other."""

_LENGTHS = {
    "mm millimeter millimetre": "1", "cm centimeter centimetre": "10", "dm decimeter decimetre": "100",
    "m meter metre mtr": "1000", "km kilometer kilometre": "1000000", "in inch inches": "25.4",
    "ft foot feet": "304.8", "yd yard": "914.4", "mi mile": "1609344",
}  # fmt: skip
_OTHERS = {
    "mass": {"mg milligram": "1", "g gram gm gramme": "1000", "kg kilogram kilo": "1000000", "ton tonne": "1000000000"},
    "pound": {"oz ounce": "1", "lb lbs pound": "16"},
    "time": {"s sec second": "1", "min minute mins": "60", "h hr hour hrs": "3600", "day": "86400", "week": "604800"},
    "months": {"month": "1", "year yr yrs": "12"},
    "volume": {"ml milliliter millilitre": "1", "cl": "10", "l liter litre": "1000"},
    "gallon": {"cup": "1", "pint": "2", "quart": "4", "gallon gal": "16"},
    "angle": {"° deg degree": "1"},
    "radian": {"rad radian": "1"},
    "dollar": {"cent": "0.01", "\\$ dollar usd us\\$ buck": "1"},
    "euro": {"€ euro eur": "1"}, "sterling": {"£ gbp": "1"}, "yen": {"¥ yen jpy yuan rmb cny": "1"},
    "rupee": {"₹ rupee rs inr": "1"}, "hectare": {"hectare ha": "1"}, "acre": {"acre": "1"},
    "speed mi/h": {"mph": "1"}, "speed km/h": {"kmh kph kmph km/h km/hr": "1"},
    "celsius": {"°c celsius": "1"}, "fahrenheit": {"°f fahrenheit": "1"}, "kelvin": {"kelvin": "1"},
}  # fmt: skip
_SINGLE = frozenset("msghl")
_NO_UNIT = {
    "or", "and", "not", "if", "when", "where", "unless", "except", "mod", "modulo", "pi", "sin", "cos", "tan", "log",
    "ln", "exp", "max", "gcd", "lcm", "sqrt", "frac", "infinity", "least", "most", "more", "less", "than", "over",
    "under", "between", "plus", "minus", "times", "divided", "factorial", "squared", "cubed",
}  # fmt: skip


def _table() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for names, size in _LENGTHS.items():
        for power, dimension in ((1, "length"), (2, "area"), (3, "solid")):
            for name in names.split():
                units[name if power == 1 else f"{name}^{power}"] = Unit(dimension, Fraction(size) ** power)
    for dimension, members in _OTHERS.items():
        for names, size in members.items():
            for name in names.split():
                units[name] = Unit(dimension, Fraction(size))
    return units


UNITS = _table()


def unit_of(phrase: str) -> Unit | None:
    """The unit a trailing phrase names (`square inches`, `cm^{2}`, `km/h`, `apples`); None where it cannot be one."""
    words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", phrase)
    words = re.sub(r"\s*\^\s*\{?([23])\}?", r"^\1", words)
    words = re.sub(r"[.,()']", " ", words).strip().lower()
    parts = words.split()
    power = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
    if len(parts) == 2 and (parts[0] in power or parts[1] in power):
        square = parts[0] if parts[0] in power else parts[1]
        name = parts[1] if square == parts[0] else parts[0]
        if (known := _singular(f"{name}^{power[square]}", name)) is not None:
            return known
    if len(parts) == 1 and (known := _singular(parts[0], parts[0].partition("^")[0])) is not None:
        return known
    if re.fullmatch(r"(?:miles?|mi)(?: per |/| an )(?:hours?|hr|h)", words):
        return UNITS["mph"]
    if re.fullmatch(r"(?:kilomet(?:er|re)s?|km)(?: per |/| an )(?:hours?|hr|h)", words):
        return UNITS["kmh"]
    if not parts or any(word in _NO_UNIT or any(c.isdigit() for c in word.partition("^")[0]) for word in parts):
        return None
    if parts[0] in ("years", "days", "degrees", "cents", "dollars", "hours", "minutes", "seconds", "inches", "feet"):
        return _singular(parts[0], parts[0])  # years old, dollars a week
    return COUNTED


def _singular(name: str, stem: str) -> Unit | None:
    """A known unit in the singular or the plural."""
    for ending in ("", "s", "es"):
        if stem.endswith(ending) and len(stem) > len(ending):
            candidate = stem[: len(stem) - len(ending)] + name[len(stem) :]
            if candidate in UNITS:
                return UNITS[candidate]
    return None


_PIECE = re.compile(
    r"(?P<word>\\text\{[^{}]*\}|(?<![\\a-zA-Z])an? (?=[a-zA-Z]{2})"
    r"|(?<![\\a-zA-Z])[a-zA-Z]{2,}\.?|°\s?[CF]?(?![a-zA-Z])|\\\$|[€£¥₹])"
    r"|(?P<letter>(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z]))"
    r"|(?P<power>\^\s*(?:[23]|\{[23]\})(?!\d))|(?P<link>\s*/\s*(?=[a-zA-Z\\])|\s*[-,']\s*)"
    r"|(?P<space>\s+)|(?P<other>\\[a-zA-Z]+|.)",
    re.DOTALL,
)
_MONEY = re.compile(
    r"^(-?)\s*(US\s*\\\$|\\\$|[€£¥₹]|\\text\{\s*(?:\$|Rs\.?)\s*\}|Rs\.?|USD|EUR|GBP|US\$)\s*(?=[-\d.\\])"
)


def split_unit(text: str, letters: bool) -> tuple[str, Unit | None]:
    """(what is before the unit, the unit). letters: a lone letter after a number may be a unit (5m), not a variable."""
    if match := _MONEY.match(text):
        name = re.sub(r"\\text\{|[\s{}.]", "", match[2]).lower()
        rest, after = _split_trailing(match[1] + text[match.end() :], letters=False)
        unit = UNITS.get(name.removeprefix("us") if name != "usd" else name, UNITS.get(name, COUNTED))
        return rest, after if after and after.dimension == "dollar" and unit.dimension != "dollar" else unit
    return _split_trailing(text, letters)


def _split_trailing(text: str, letters: bool) -> tuple[str, Unit | None]:
    pieces = [(match.lastgroup, match[0], match.start()) for match in _PIECE.finditer(text)]
    i = len(pieces)
    while i and pieces[i - 1][0] != "other":
        i -= 1
    # A power belongs to the number unless a unit stands before it; so does a lone letter that may be a variable.
    while i < len(pieces) and not (
        pieces[i][0] == "word" or (pieces[i][0] == "letter" and letters and pieces[i][1].lower() in _SINGLE)
    ):
        i += 1
    if i in (0, len(pieces)):
        return text, None
    core, tail = text[: pieces[i][2]], text[pieces[i][2] :]
    if not core.strip() or not _may_be_unit(core, tail):
        return text, None
    unit = unit_of(tail)
    return (core.strip(), unit) if unit else (text, None)


def _may_be_unit(core: str, tail: str) -> bool:
    """Plain letters after a formula may be a product of variables; known units and words of three letters are not."""
    if tail.startswith("°") and _ANGLE_FUNCTION.search(core):
        return False
    if tail.startswith(("\\text", "°", "\\$", "€", "£", "¥", "₹")):
        return True
    if "," in tail and not core.rstrip()[-1:].isdigit():
        return False
    first = re.match(r"[a-zA-Z]+", tail)[0]
    if len(first) > 1 and first.isupper() and first.lower() not in UNITS:  # the name of a triangle
        return False
    first = first.lower()
    if _singular(first, first) or first in ("sq", "square", "cubic", "cu"):
        return True
    if core.rstrip().endswith("%"):
        return True
    return (len(first) >= 3 or first in ("a", "an", "of")) and core.endswith(" ") and any(c.isdigit() for c in core)


_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")

_CLOCK = re.compile(
    r"(\d{1,2})(?:\s*:\s*([0-5]\d))?(?:\s*:\s*([0-5]\d))?\s*(?:\\text\{)?\s*([ap])\s*\.?\s*m\.?\s*\}?|"
    r"(\d{1,2})\s*:\s*([0-5]\d)(?:\s*:\s*([0-5]\d))?",
    re.IGNORECASE,
)


def clock(text: str) -> tuple[int, bool] | None:
    """(seconds since midnight, whether morning or afternoon was said), or None where the text is no time of day."""
    match = _CLOCK.fullmatch(re.sub(r"\s+", " ", text).strip())
    if not match:
        return None
    hour, minute, second = (int(x or 0) for x in (match.groups()[:3] if match[1] else match.groups()[4:]))
    half = (match[4] or "").lower()
    if hour > (12 if half else 23) or (half and not hour):
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour * 3600 + minute * 60 + second, bool(half) or hour > 12


_SMALL = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
_TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_ORDINALS = {
    "first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10, "eleventh": 11, "twelfth": 12,
}  # fmt: skip
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}


def number_in_words(text: str) -> Fraction | None:
    """`forty-two`, `two hundred and five`, `third`, `21st`, `two thirds`; None for other words."""
    if match := re.fullmatch(r"(\d{1,9})\s*(?:st|nd|rd|th)", text.strip().lower()):
        return Fraction(int(match[1]))
    words = [word for word in re.split(r"[\s-]+", text.lower().strip()) if word != "and"]
    if not 0 < len(words) <= 12:
        return None
    if len(words) == 1 and words[0] in _ORDINALS:
        return Fraction(_ORDINALS[words[0]])
    if words == ["half"]:
        return Fraction(1, 2)
    if len(words) == 2 and words[0] in {*_SMALL, "a"} and words[1].removesuffix("s") in _PARTS:
        return Fraction(_SMALL.get(words[0], 1), _PARTS[words[1].removesuffix("s")])
    total = current = 0
    for word in words:
        if word in _SMALL:
            current += _SMALL[word]
        elif word in _TENS:
            current += _TENS[word]
        elif word == "hundred":
            current = max(current, 1) * 100
        elif word in _SCALES:
            total, current = total + max(current, 1) * _SCALES[word], 0
        else:
            return None
    return Fraction(total + current)


MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def in_full(word: str) -> str:
    """A lower-case word, months and days without their abbreviation (`oct`, `mon`)."""
    return next((name for name in (*MONTHS, *DAYS) if len(word) >= 3 and name.startswith(word)), word)


def names_month(text: str) -> bool:
    return any(in_full(word) in MONTHS for word in re.findall("[a-z]+", text.lower()))
