"""Exact arithmetic on written numbers: `3 1/2`, `1.2 \\times 10^{5}`, `0.\\overline{3}`, `2^{99}`, `6!`.

A small recursive-descent reader with a bound on everything, so it may run anywhere. Values are fractions while they are
small. Beyond `MAX_BITS` the same expression is read again modulo two large primes: equal numbers have equal residues,
different ones differ but for a chance of about 2^-245, so that `\\frac{1}{2004!}` or `2^{10^9}` compare exactly, in
microseconds, where floats see zero or a library computes for ever. What is irrational, unknown or out of all bounds is
None: somebody else's business.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from math import comb

from parallel_r1.reward.numerals import IrrationalError, NoValueError, TooBigError, decimal, repeating, root

MAX_BITS = 2_048
MAX_EXPONENT = 1 << 64
MAX_FACTORIAL = 20_000
MAX_DEPTH = 40
PRIMES = (15707963267948966192313216916397515439, 8469968755291048747229615390820316427)
"""Safe primes: no small power of a small number comes round to 1, as 2^127 does modulo 2^127 - 1."""

Residues = tuple[int, ...]
Exact = Fraction | Residues
"""A number: a fraction, or its residues modulo PRIMES where the fraction would be too long to write."""


_ARITHMETIC = re.compile(r"(?:\\(?:frac|binom|cdot|times|div)(?![a-zA-Z])|[\d\s.,+*/^!(){}-])+")


def is_arithmetic(text: str) -> bool:
    """Whether a text is made of numbers and rational operations alone, so that `evaluate` has the last word on it."""
    return bool(_ARITHMETIC.fullmatch(text)) and not _evaluate(text)[1]


def evaluate(text: str) -> Exact | None:
    """The value of a cleaned expression of numbers alone, or None. Never raises; bounded in time and memory."""
    return _evaluate(text)[0]


@lru_cache(maxsize=4_096)
def _evaluate(text: str) -> tuple[Exact | None, bool]:
    """(the value or None, whether it is None for a root that is irrational)."""
    tokens = _tokens(text)
    if tokens is None:
        return None, False
    try:
        return _Reader(tokens, None).all(), False
    except TooBigError:
        try:
            return tuple(_Reader(tokens, prime).all() for prime in PRIMES), False
        except (NoValueError, TooBigError):
            return None, False
    except NoValueError as error:
        return None, isinstance(error, IrrationalError)


def same_number(a: Exact, b: Exact) -> bool:
    """Whether two numbers are equal, in whichever form either of them is."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    return residues(a) == residues(b)


def scaled(a: Exact, factor: Fraction) -> Exact:
    """a * factor, in the form of a."""
    if isinstance(a, Fraction):
        return a * factor
    return tuple(x * y % p for x, y, p in zip(a, residues(factor), PRIMES, strict=True))


def residues(a: Exact) -> Residues:
    """A number modulo each of PRIMES."""
    if isinstance(a, Fraction):
        return tuple(a.numerator * pow(a.denominator, -1, p) % p for p in PRIMES)
    return a


_TOKEN = re.compile(
    r"(?P<repeat>\d*\.\d*(?:\\overline\s*\{\d+\}|\\bar\s*\{?\d+\}?|\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?|\(\d+\))"
    r"|\d*\.\d+\s*(?:\\ldots|\.\.\.))"
    r"|(?P<sci>(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,20}(?![\d.]))"
    r"|(?P<num>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+(?:\.\d*)?|\.\d+)"
    r"|(?P<cmd>\\(?:frac|binom|sqrt|cdot|times|div|overline))(?![a-zA-Z])"
    r"|(?P<op>!!|[-+*/^!(){}\[\]])"
    r"|(?P<space>\s+)"
)


def _tokens(text: str) -> list[tuple[str, str]] | None:
    out, at = [], 0
    if not any(c.isdigit() for c in text):
        return None
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            return None
        out.append((match.lastgroup or "", match[0]))
        at = match.end()
    return out


class _Reader:
    """Reads tokens left to right. prime: work modulo this prime, or None for fractions."""

    def __init__(self, tokens: list[tuple[str, str]], prime: int | None) -> None:
        self.tokens, self.prime = tokens, prime
        self.at = self.depth = 0

    def all(self) -> Fraction | int:
        value = self.sum()
        self.spaces()
        if self.at < len(self.tokens):
            raise NoValueError
        return value

    # -- tokens

    def spaces(self) -> None:
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "space":
            self.at += 1

    def peek(self) -> tuple[str, str]:
        self.spaces()
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def take(self, *texts: str) -> bool:
        if self.peek()[1] in texts:
            self.at += 1
            return True
        return False

    def after_bracket(self) -> bool:
        return self.at > 0 and self.tokens[self.at - 1][1] in (")", "}", "!")

    def need(self, text: str) -> None:
        if not self.take(text):
            raise NoValueError

    # -- arithmetic in the ring at hand

    def number(self, value: Fraction) -> Fraction | int:
        if self.prime is None:
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                raise TooBigError
            return value
        return value.numerator * pow(value.denominator, -1, self.prime) % self.prime

    def keep(self, value: Fraction | int) -> Fraction | int:
        return self.number(value) if self.prime is None else value % self.prime

    def divide(self, a: Fraction | int, b: Fraction | int) -> Fraction | int:
        if b == 0:
            raise NoValueError
        return self.keep(a / b if self.prime is None else a * pow(b, -1, self.prime))

    def power(self, base: Fraction | int, exponent: Fraction) -> Fraction | int:
        if exponent.denominator != 1:
            if self.prime is not None or exponent.denominator > 64:
                raise NoValueError
            base = root(base, exponent.denominator)
        n = exponent.numerator
        if abs(n) > MAX_EXPONENT or (base == 0 and n <= 0):
            raise NoValueError
        if self.prime is not None:
            return pow(base, n, self.prime)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(base) not in (0, 1) and bits * abs(n) > 2 * MAX_BITS:
            raise TooBigError
        if abs(base) in (0, 1):
            n %= 2
            return base**n if base else base
        return self.number(base**n)

    def factorial(self, n: Fraction | int, step: int) -> Fraction | int:
        # In a ring of residues a small n is its own residue, so the bound holds there too.
        n = Fraction(n)
        if n.denominator != 1 or not 0 <= n <= MAX_FACTORIAL:
            raise NoValueError
        if self.prime is None and n > 400:
            raise TooBigError
        product = 1
        for factor in range(int(n), 0, -step):
            product = product * factor if self.prime is None else product * factor % self.prime
        return self.keep(Fraction(product) if self.prime is None else product)

    # -- grammar

    def nested(self, read):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NoValueError
        value = read()
        self.depth -= 1
        return value

    def sum(self) -> Fraction | int:
        value = self.product()
        while True:
            if self.take("+"):
                value = self.keep(value + self.product())
            elif self.take("-"):
                value = self.keep(value - self.product())
            else:
                return value

    def product(self) -> Fraction | int:
        value = self.signed()
        while True:
            kind, text = self.peek()
            if text in ("*", r"\cdot", r"\times"):
                self.at += 1
                value = self.keep(value * self.signed())
            elif text in ("/", r"\div"):
                self.at += 1
                value = self.divide(value, self.signed())
            elif (
                text in ("(", "{") or kind == "cmd" or (kind == "num" and self.after_bracket())
            ):  # 2\sqrt{4}, 3(4), (3)4
                value = self.keep(value * self.postfix())
            else:
                return value

    def signed(self) -> Fraction | int:
        if self.take("-"):
            return self.keep(-self.nested(self.signed))
        if self.take("+"):
            return self.nested(self.signed)
        return self.mixed()

    def mixed(self) -> Fraction | int:
        r"""A mixed number, `3\frac{1}{2}` or `3 1/2`, or else whatever stands there."""
        start = self.at
        kind, text = self.peek()
        if kind == "num" and text.isdigit():
            whole, after = int(text) if len(text) < 400 else 0, self.at + 1
            self.at = after
            if self.peek() == ("cmd", r"\frac"):
                self.at += 1
                top, bottom = self.group(), self.group()
                if self.peek()[1] != "^" and _proper(top, bottom):
                    return self.keep(self.number(Fraction(whole)) + self.divide(top, bottom))
            elif self.tokens[self.at - 1][0] == "space" and self.peek()[0] == "num":
                top = self.peek()[1]
                self.at += 1
                if top.isdigit() and self.take("/") and self.peek()[0] == "num" and self.peek()[1].isdigit():
                    bottom = self.peek()[1]
                    self.at += 1
                    if max(len(top), len(bottom)) < 400 and 0 < int(top) < int(bottom):
                        return self.keep(self.number(whole + Fraction(int(top), int(bottom))))
            self.at = start
        return self.postfix()

    def postfix(self) -> Fraction | int:
        value = self.atom()
        while True:
            if self.take("^"):
                value = self.power(value, self.exponent())
            elif self.take("!!"):
                value = self.factorial(value, 2)
            elif self.take("!"):
                value = self.factorial(value, 1)
            else:
                return value

    def exponent(self) -> Fraction:
        """Exponents are always exact, in residues too (a^b mod p needs b itself)."""
        prime, self.prime = self.prime, None
        try:
            if self.take("-"):
                return -self.nested(self.exponent)
            base = self.nested(self.atom)
            return self.power(base, self.nested(self.exponent)) if self.take("^") else base  # towers hang to the right
        except TooBigError:
            raise NoValueError from None
        finally:
            self.prime = prime

    def atom(self) -> Fraction | int:
        kind, text = self.peek()
        self.at += 1
        if kind == "num":
            return self.number(decimal(text.replace(",", "")))
        if kind == "sci":
            mantissa, exponent = re.split("[eE]", text)
            return self.keep(self.number(decimal(mantissa)) * self.power(self.number(Fraction(10)), Fraction(exponent)))
        if kind == "repeat":
            return self.number(repeating(text))
        if text in ("(", "{", "["):
            value = self.nested(self.sum)
            self.need({"(": ")", "{": "}", "[": "]"}[text])
            return value
        if text == r"\frac":
            top = self.group()
            return self.divide(top, self.group())
        if text == r"\binom":
            n, k = Fraction(self.group()), Fraction(self.group())
            if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= 2_000:
                raise NoValueError
            return self.number(Fraction(comb(int(n), int(k))))
        if text == r"\sqrt":
            degree = Fraction(2)
            if self.take("["):
                degree = Fraction(self.nested(self.sum))
                self.need("]")
            inside = self.group()
            if self.prime is not None or degree.denominator != 1 or not 2 <= degree <= 64:
                raise NoValueError
            return root(inside, int(degree))
        raise NoValueError

    def group(self) -> Fraction | int:
        """One argument of a command: `{...}` or a single digit."""
        self.need("{")
        value = self.nested(self.sum)
        self.need("}")
        return value


def _proper(top: Fraction | int, bottom: Fraction | int) -> bool:
    return (
        top > 0 and bottom > 0 and Fraction(top).denominator == 1 and Fraction(bottom).denominator == 1 and top < bottom
    )
