"""Algebra on two LaTeX expressions: parsed by math-verify, compared by sympy. For grading workers only.

Departs from `math_verify.verify` where that is loose: floats are exact (0.333 is not a third), numbers are compared
relative to their size at 60 and then 300 digits (so 1/2004! differs from 0), expressions with variables at exact points
rather than by `simplify`, equations by proportion rather than by `solve` (which calls any two equations without real
roots the same). What is neither is left to `verify`. May hang or eat memory on hostile text: run it where it can be
killed, and never turn what it parsed into a string.
"""

from __future__ import annotations

import re
from fractions import Fraction

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Equality, Relational, Unequality

from parallel_r1.reward.exact import evaluate, is_arithmetic
from parallel_r1.reward.normalize import matching

# Units, boxes and sloppy operators were dealt with before; a variable m is no metre here.
CONFIG = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
    )
)
MAX_EXPONENT = 5_000
DIGITS = (60, 300)
POINTS = (
    (sympy.Rational(17, 13), sympy.Rational(29, 11), sympy.Rational(7, 5), sympy.Rational(41, 17)),
    (sympy.Rational(5, 7), sympy.Rational(3, 11), sympy.Rational(9, 23), sympy.Rational(2, 19)),
    (sympy.Rational(-19, 17), sympy.Rational(-23, 29), sympy.Rational(-31, 37), sympy.Rational(-7, 3)),
    (sympy.Rational(31, 8), sympy.Rational(-13, 6), sympy.Rational(43, 9), sympy.Rational(-37, 10)),
    (sympy.Rational(-3, 10), sympy.Rational(11, 4), sympy.Rational(-53, 12), sympy.Rational(61, 14)),
)


def same(gold: str, answer: str) -> bool:
    """Whether two cleaned LaTeX expressions, equations or inequalities state the same. Raises whatever sympy raises."""
    if not (_in_bounds(gold) and _in_bounds(answer)):
        return False
    g, a = _parsed(gold), _parsed(answer)
    if g is None or a is None:
        return False
    if isinstance(g, Relational) or isinstance(a, Relational):
        return isinstance(g, Relational) and isinstance(a, Relational) and _same_relation(g, a)
    if isinstance(g, sympy.Expr) and isinstance(a, sympy.Expr):
        return _same_expression(g, a)
    return bool(verify(g, a, timeout_seconds=None))


_POWER = re.compile(r"\^\s*(\{|[-\d]+)")
_FACTORIAL = re.compile(r"(\d+)\s*!")


def _in_bounds(tex: str) -> bool:
    """Whether the numbers that algebra would write out are of a size that people write: cheap, and only a first net."""
    if re.search(r"\d{400}", tex) or any(len(n) > 4 for n in _FACTORIAL.findall(tex)):
        return False
    for match in _POWER.finditer(tex):
        end = matching(tex, match.start(1)) if match[1] == "{" else match.end()
        exponent = tex[match.start(1) : end + 1] if match[1] == "{" else match[1]
        if match[1] != "{" and tex[end : end + 1] == "^":
            return False
        value = evaluate(exponent)
        if value is None and is_arithmetic(exponent):
            return False
        if value is not None and (not isinstance(value, Fraction) or abs(value) > MAX_EXPONENT):
            return False
    return True


def _parsed(tex: str) -> sympy.Basic | None:
    # Bare text mis-parses, and decimals would become floats.
    tex = re.sub(r"(?<![\w.])(\d*)\.(\d+)", _fraction, tex)
    # Inside a sine an angle in degrees is that angle; anywhere else degrees are a unit, dealt with before.
    tex = re.sub(r"(\d+)\s*°", r"{(\1\\cdot\\frac{\\pi}{180})}", tex) if "°" in tex else tex
    found = parse(f"${tex}$", [CONFIG], fallback_mode="no_fallback", parsing_timeout=None)
    if not found or not isinstance(found[0], (sympy.Basic, sympy.MatrixBase)):
        return None
    imaginary = {symbol: sympy.I for symbol in found[0].free_symbols if symbol.name == "i"}
    return found[0].xreplace(imaginary) if imaginary else found[0]


def _fraction(match: re.Match) -> str:
    return rf"{{\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}}}"


def _same_expression(g: sympy.Expr, a: sympy.Expr) -> bool:
    if g == a:
        return True
    symbols = _shared_symbols(g, a)
    if symbols is None:
        return False
    g, a = g.doit(), a.doit()
    if not symbols:
        return _same_value(g, a)
    seen = 0
    for values in _assignments(symbols):
        x, y = g.xreplace(values), a.xreplace(values)
        verdict = _same_value(x, y)
        if verdict is False:
            return False
        seen += verdict is True
    return seen >= 2


def _same_value(x: sympy.Expr, y: sympy.Expr) -> bool | None:
    """Whether two numbers are equal to 300 digits, relative to their size; None where they have no value."""
    for digits in DIGITS:
        p, q = _number(x, digits), _number(y, digits)
        if p is None or q is None:
            return None
        size = max(abs(p), abs(q))
        if size and abs(p - q) > size * sympy.Float(10, digits) ** (5 - digits):
            return False
    return True


def _number(x: sympy.Expr, digits: int) -> sympy.Expr | None:
    value = x.doit().evalf(digits, maxn=4 * digits)
    if value.has(sympy.nan, sympy.zoo, sympy.oo) or value.free_symbols or not value.is_number:
        return None
    real, imaginary = value.as_real_imag()
    return value if real.is_Float or real.is_Integer or real.is_Rational or imaginary.is_Float else None


def _shared_symbols(*expressions: sympy.Expr) -> list[list[sympy.Symbol]] | None:
    """The variables of all expressions by name (one name may come with and without assumptions)."""
    names: dict[str, list[sympy.Symbol]] = {}
    for expression in expressions:
        for symbol in expression.free_symbols:
            names.setdefault(symbol.name, []).append(symbol)
    if len(names) > 12:
        return None
    return [names[name] for name in sorted(names)]


def _assignments(symbols: list[list[sympy.Symbol]]):
    for point in POINTS:
        yield {symbol: point[i % 4] + sympy.Rational(i // 4, 7) for i, group in enumerate(symbols) for symbol in group}


def _same_relation(g: Relational, a: Relational) -> bool:
    """Equations with proportional sides; inequalities with a proportion that keeps, or turns, their direction."""
    f, h = g.lhs - g.rhs, a.lhs - a.rhs
    if isinstance(g, (Equality, Unequality)) or isinstance(a, (Equality, Unequality)):
        if g.func is not a.func:
            return False
        return _proportion(f, h) is not None or _proportion(_numerator(f), _numerator(h)) is not None
    ratio = _proportion(f, h)
    if ratio is None:
        return False
    return a.func is (g.func if ratio > 0 else g.reversedsign.func)


def _numerator(f: sympy.Expr) -> sympy.Expr:
    return sympy.fraction(sympy.together(f))[0]


def _proportion(f: sympy.Expr, h: sympy.Expr) -> sympy.Expr | None:
    """The constant f / h, if it is one and neither zero nor infinite."""
    symbols = _shared_symbols(f, h)
    if not symbols:
        return None
    ratios = []
    for values in _assignments(symbols):
        p, q = _number(f.xreplace(values), DIGITS[0]), _number(h.xreplace(values), DIGITS[0])
        if p is None or q is None:
            continue
        if p == 0 or q == 0:
            return None
        ratios.append(p / q)
    if len(ratios) < 3 or any(_same_value(ratio, ratios[0]) is not True for ratio in ratios[1:]):
        return None
    return ratios[0] if ratios[0].is_real else None
