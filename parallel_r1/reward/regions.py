"""Regions of the real line: unions and intersections of intervals, one form for each. Records in, records out."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from parallel_r1.reward.values import (
    MINUS_INFINITY,
    PLUS_INFINITY,
    Interval,
    Many,
    Quantity,
    Region,
    Value,
    is_infinite,
)


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


def united(values: list[Value], name: str = "") -> Region | None:
    intervals: list[Interval] = []
    for value in values:
        value = as_region(value)
        if value is None or value.complement:
            return None
        name = name or value.name
        intervals.extend(value.intervals)
    return Region(tuple(intervals), name=name)


def joined(regions: list[Region], either: bool) -> Region | None:
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
                    return Region(
                        (Interval(left.low, right.high, left.low_closed, right.high_closed),), name=regions[0].name
                    )
                return None
    return united(list(regions))


def canonical(intervals: Sequence[Interval]) -> list[Interval]:
    """Sorted and merged where all the ends are fractions or infinite; else as they are."""

    def position(end: Quantity) -> float | Fraction | None:
        if is_infinite(end):
            return float("-inf") if "-" in end.tex else float("inf")
        return end.number if isinstance(end.number, Fraction) else None

    if any(position(end) is None for part in intervals for end in (part.low, part.high)):
        return list(intervals)
    merged: list[Interval] = []
    for part in sorted(intervals, key=lambda part: (position(part.low), not part.low_closed)):
        last = merged[-1] if merged else None
        meets = last and (
            position(part.low) < position(last.high)
            or (position(part.low) == position(last.high) and (part.low_closed or last.high_closed))
        )
        if not last or not meets:
            merged.append(part)
            continue
        ends = [(position(x.high), x.high_closed, x.high) for x in (last, part)]
        _, closed, high = max(ends, key=lambda end: end[:2])
        merged[-1] = Interval(last.low, high, last.low_closed, closed)
    return merged
