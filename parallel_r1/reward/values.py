"""What an answer is: numbers, expressions, words, lists, tuples, intervals, equations, matrices. Records only.

Expressions that need algebra stay LaTeX inside their record; `reading` makes the records, `equality` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel_r1.reward.exact import Exact
from parallel_r1.reward.quantities import Unit


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


def is_infinite(value: Value) -> bool:
    return isinstance(value, Quantity) and value.tex.replace(" ", "") in (r"\infty", r"+\infty", r"-\infty")


MINUS_INFINITY, PLUS_INFINITY = Quantity(r"-\infty"), Quantity(r"\infty")
