"""Single numerals and roots as fractions: decimals, repeating decimals, rational roots. Bounded, for `exact`."""

from __future__ import annotations

import re
from fractions import Fraction
from math import isqrt


class NoValueError(Exception):
    """Not a rational number that can be read here."""


class IrrationalError(NoValueError):
    """A root that is not a rational number."""


class TooBigError(Exception):
    """A value, or one on the way to it, is too long to be written out."""


def decimal(text: str) -> Fraction:
    if len(text) > 600:
        raise TooBigError if text.isdigit() and len(text) < 4_000 else NoValueError
    return Fraction(text + "0" if text.endswith(".") else text)


def repeating(text: str) -> Fraction:
    r"""`0.1\overline{6}`, `0.\dot{1}4\dot{2}`, `0.(3)`, and `0.333...` where the block shows three times."""
    digits = re.sub(r"\\(?:overline|bar|ldots)\s*|\\dot\s*|[\s{}()]", "", text)
    if "\\ldots" in text or text.endswith("..."):
        match = re.fullmatch(r"(\d*)\.(\d*?)(\d{1,12}?)\3\3+", digits.rstrip("."))
        if not match:
            raise NoValueError
        whole, fixed, block = match.groups()
    else:
        whole, _, places = digits.partition(".")
        marked = re.sub(r"[\s{}]", "", text).partition(".")[2]
        fixed = re.match(r"\d*", marked)[0]
        block = places[len(fixed) :]
    if not block or len(digits) > 100:
        raise NoValueError
    scale = 10 ** len(fixed)
    return Fraction(int(whole or 0)) + (int(fixed or 0) + Fraction(int(block), 10 ** len(block) - 1)) / scale


def root(value: Fraction | int, degree: int) -> Fraction:
    """The rational root of that degree; raises where it is irrational or imaginary."""
    value = Fraction(value)
    sign = -1 if value < 0 and degree % 2 else 1
    if value * sign < 0:
        raise IrrationalError
    top, bottom = integer_root(abs(value.numerator), degree), integer_root(value.denominator, degree)
    if top**degree != abs(value.numerator) or bottom**degree != value.denominator:
        raise IrrationalError
    return Fraction(sign * top, bottom)


def integer_root(n: int, degree: int) -> int:
    """floor(n ** (1 / degree)), by Newton's method on integers."""
    if n < 2:
        return n
    if degree == 2:
        return isqrt(n)
    x = 1 << -(-n.bit_length() // degree)
    while True:
        y = ((degree - 1) * x + n // x ** (degree - 1)) // degree
        if y >= x:
            return x
        x = y
