"""Data as text that acts on nothing: what the tables and charts of a page say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A value with the ends of its interval, as one cell of a table."""

    value: float
    low: float
    high: float


_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


def shown(value: Any) -> str:
    """Text in which controls and marks of direction show by their numbers instead of acting."""
    return _HIDDEN.sub(lambda match: f"⟪U+{ord(match[0]):04X}⟫", str(value))


def cell(value: Any) -> str:
    """A cell of a table as text: shares and means with three digits after the point, `–` for nothing."""
    if value is None:
        return "–"
    if isinstance(value, Cell):
        return f"{_number(value.value)} [{_number(value.low)}, {_number(value.high)}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value)
    return shown(value)


def _number(value: float) -> str:
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 10):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
