"""What a page is made of: tables, and charts as inline SVG in its colours, by matplotlib, with the table of each."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from parallel_r1.evaluation.page_text import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
"""(x, y), in the order of x."""

MAX_TABLE = 200
"""Rows of a chart's table; a longer one leaves out every so many."""


@dataclass(frozen=True)
class Table:
    """columns: heads; rows: cells, of which those that are no text stand to the right. note: a line below."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """svg: an `<svg>` element; table: the same numbers; note: what it shows, in a sentence."""

    title: str
    svg: str
    table: Table
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page, in the order intro, tables, charts."""

    title: str
    intro: str = ""
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


@dataclass(frozen=True)
class Interval:
    """A value with an interval: one mark of `interval_chart`. group: marks of a group share a colour."""

    label: str
    group: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Steps:
    """The axis of training: stage names by the step they start at."""

    starts: Mapping[float, str] = field(default_factory=dict)


# stand-ins that no chart uses otherwise; the page's variables take their place
_INK, _LINE = "#010203", "#010204"
_SERIES = ("#020101", "#020102", "#020103", "#020104", "#020105", "#020106")
_VARIABLES = {_INK: "--muted", _LINE: "--line"} | {c: f"--lane-{i}" for i, c in enumerate(_SERIES)}
_SIZE = (4.4, 2.5)


@contextmanager
def _figure(size: tuple[float, float] = _SIZE) -> Iterator[tuple[Figure, Axes]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.parse_math": False,
        "axes.edgecolor": _LINE,
        "axes.labelcolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": mpl.cycler(color=_SERIES),
        "xtick.color": _INK,
        "ytick.color": _INK,
        "text.color": _INK,
        "grid.color": _LINE,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.handlelength": 1.2,
        "legend.handletextpad": 0.4,
        "legend.columnspacing": 1.2,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.tick_params(length=0)
        axes.set_axisbelow(True)
        yield figure, axes


def line_chart(
    title: str,
    series: Mapping[str, Points],
    steps: Steps,
    note: str = "",
    share: bool = False,
    axis: str = "step",
    log: bool = False,
) -> Chart:
    """Curves.

    share: values lie in [0, 1], and the axis shows all of it. axis: what x counts. log: a logarithmic axis for values.
    """
    with _figure() as (figure, axes):
        axes.grid(axis="y")
        for name, points in series.items():
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(x, y, label=_short(name), marker="o" if len(points) == 1 else None, markersize=3)
        axes.set_xlabel(axis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if share:
            axes.set_ylim(-0.03, 1.03)
        elif not log:
            _widen(axes)
        if log:
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
            axes.yaxis.set_minor_formatter(lambda value, _: "")
        _mark(axes, steps)
        if len(series) > 1:
            above = 1.07 if steps.starts else 1
            axes.legend(loc="lower left", bbox_to_anchor=(0, above), ncols=3, borderaxespad=0.2)
        svg = _svg(figure, title)
    at = sorted({x for points in series.values() for x, _ in points})
    values = {name: dict(points) for name, points in series.items()}
    every = max(1, -(-len(at) // MAX_TABLE))
    rows = [[x, *(values[name].get(x) for name in series)] for x in at[::every]]
    return Chart(title, svg, Table([axis, *series], rows), note)


def band_chart(title: str, edges: Sequence[float], counts: Mapping[float, Sequence[float]], steps: Steps) -> Chart:
    """Histograms as columns of shades, each from the step before to its own.

    edges: [B + 1] of the bins; counts: step -> [B].
    """
    import numpy as np

    at = sorted(counts)
    shares = np.array([[c / max(sum(counts[x]), 1) for c in counts[x]] for x in at]).T  # [B, steps]
    with _figure() as (figure, axes):
        width = min((b - a for a, b in pairwise(at)), default=1.0)
        starts = [at[0] - width, *at[:-1]] if at else []
        for column, (start, end) in enumerate(zip(starts, at, strict=True)):
            for (low, high), value in zip(pairwise(edges), shares[:, column], strict=True):
                if value > 0:
                    alpha = 0.15 + 0.85 * value**0.5
                    axes.fill_between([start, end], low, high, color=_SERIES[0], alpha=alpha, lw=0)
        axes.set_ylim(edges[0], edges[-1])
        axes.set_xlabel("step")
        axes.set_ylabel("where a block opens")
        _mark(axes, steps)
        svg = _svg(figure, title)
    every = max(1, -(-len(at) // MAX_TABLE))
    heads = [f"{low:.1f}-{high:.1f}" for low, high in pairwise(edges)]
    rows = [[x, *(float(v) for v in shares[:, i])] for i, x in enumerate(at)][::every]
    note = "Of the blocks since the step before, how many open in each tenth of the response; 0 is its start."
    return Chart(title, svg, Table(["step", *heads], rows), note)


def interval_chart(title: str, marks: Sequence[Interval], note: str = "") -> Chart:
    """Values with their intervals, a line a label and a colour a group."""
    labels, groups = list(dict.fromkeys(m.label for m in marks)), list(dict.fromkeys(m.group for m in marks))
    with _figure((_SIZE[0], 0.75 + 0.17 * len(labels) * (len(groups) + 1))) as (figure, axes):
        axes.grid(axis="x")
        for m in marks:
            g = groups.index(m.group)
            y = labels.index(m.label) + (g - (len(groups) - 1) / 2) * 0.22
            colour = _SERIES[g % len(_SERIES)]
            if m.low is not None and m.high is not None:
                axes.plot([m.low, m.high], [y, y], color=colour, linewidth=1.4)
            known = [mark.get_label() for mark in axes.lines]
            shown = None if _short(m.group) in known else _short(m.group)
            axes.plot([m.value], [y], "o", color=colour, markersize=4.5, label=shown)
        axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
        axes.set_ylim(len(labels) - 0.5, -0.5)
        if len(groups) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
        svg = _svg(figure, title)
    table = Table(["", "", "value", "low", "high"], [[m.label, m.group, m.value, m.low, m.high] for m in marks])
    return Chart(title, svg, table, note)


def _widen(axes: Axes) -> None:
    """Show what hardly changes as hardly changing: the axis spans a tenth of its values at least."""
    low, high = axes.dataLim.intervaly
    middle, least = (low + high) / 2, 0.1 * max(abs(low), abs(high))
    if high - low < least:
        axes.set_ylim(middle - least, middle + least)


def _mark(axes: Axes, steps: Steps) -> None:
    """Where stages start."""
    low, high = axes.get_xlim()
    for start, name in steps.starts.items():
        if low <= start <= high:
            axes.axvline(start, color=_LINE, linewidth=1)
            axes.text(start, 1.01, _short(name), transform=axes.get_xaxis_transform(), fontsize=7.5)


def _short(text: str) -> str:
    text = shown(text)
    return text if len(text) <= 24 else text[:23] + "…"


def _svg(figure: Figure, title: str) -> str:
    """The figure as one element: no prologue, no metadata, ids that no other chart has, the page's colours and font."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    own = "c" + re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'\bid="([^"]+)"', rf'id="{own}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{own}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{own}-\1)", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    name = html.escape(shown(title), quote=True)
    text = re.sub(r"^<svg [^>]*viewBox=\"([^\"]+)\"[^>]*>", rf'<svg viewBox="\1" role="img" aria-label="{name}">', text)
    return text.strip()
