"""The report of `test` (`evaluation.summary`) as sections of the page; a report of another shape as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel_r1.evaluation.charts import (
    Chart,
    Interval,
    Section,
    Steps,
    Table,
    interval_chart,
    line_chart,
)
from parallel_r1.evaluation.page_text import Cell

Json = Mapping[str, Any]

_COLUMNS = {
    "mean": "mean@{k}",
    "pass": "pass@{k}",
    "majority": "majority@{k}",
}
MAX_FACTS = 300
"""Numbers shown of a report of unknown shape."""


def report_facts(report: Json) -> dict[str, Any]:
    """What stands under the title."""
    settings = report.get("settings") if isinstance(report.get("settings"), Mapping) else {}
    generation = settings.get("generation") if isinstance(settings.get("generation"), Mapping) else {}
    facts = {
        "model": report.get("model"),
        "temperature": settings.get("temperature"),
        "most tokens": generation.get("max_tokens"),
        "seed": settings.get("seed"),
    }
    return {n: f"{v:g}" if isinstance(v, float) else v for n, v in facts.items() if isinstance(v, str | int | float)}


def report_sections(report: Json) -> list[Section]:
    """Accuracy, accuracy at equal tokens, behaviour; for a report of another shape its numbers by name."""
    tiers = report.get("tiers")
    if not _is_known(tiers):
        flat = list(_numbers(report))
        note = f"The first {MAX_FACTS} of {len(flat)}." if len(flat) > MAX_FACTS else ""
        return [Section("Results", tables=[Table(["name", "value"], flat[:MAX_FACTS], note=note)])]
    modes = list(dict.fromkeys(mode for found in tiers.values() for mode in found["modes"]))
    sections = [_accuracy(tiers, modes)]
    if any(isinstance(found.get("equal_tokens"), Mapping) for found in tiers.values()):
        sections.append(_equal_tokens(tiers, modes))
    sections.append(_behaviour(tiers, modes))
    return sections


def _is_known(tiers: Any) -> bool:
    return (
        isinstance(tiers, Mapping)
        and bool(tiers)
        and all(isinstance(found, Mapping) and isinstance(found.get("modes"), Mapping) for found in tiers.values())
    )


def _numbers(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _numbers(item, f"{name}.{key}".lstrip("."))]
    return [(name, value)] if isinstance(value, int | float | str | bool) else []


def _cell(estimate: Any) -> Any:
    """`{value, ci95}` as a cell; None where there is none."""
    if not isinstance(estimate, Mapping):
        return estimate if isinstance(estimate, int | float) else None
    ends = estimate.get("ci95")
    value = estimate.get("value")
    return Cell(value, *ends) if isinstance(ends, Sequence) and len(ends) == 2 else value


def _accuracy(tiers: Json, modes: Sequence[str]) -> Section:
    rows = []
    for tier, found in tiers.items():
        for mode in modes:
            metrics, k = found["modes"].get(mode, {}), found.get("samples")
            values = [_cell(metrics.get(column.format(k=k))) for column in _COLUMNS.values()]
            best = _cell(metrics.get("accuracy_at_critical"))
            rows.append([tier, mode, found.get("problems"), k, *values, best])
    heads = ["set", "mode", "problems", "k", "mean@k", "pass@k", "majority@k", "right within the critical budget"]
    if all(row[-1] is None for row in rows):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    charts = [_marks("mean@k", "Share of right samples, mean over problems.", tiers, modes, "mean@{k}")]
    charts += [_pass_curves(tier, found) for tier, found in tiers.items() if (found.get("samples") or 0) > 1]
    intro = "With 95 % intervals over problems. pass@k is the unbiased estimator."
    return Section("Accuracy", intro, [Table(heads, rows)], charts)


def _marks(title: str, note: str, tiers: Json, modes: Sequence[str], name: str) -> Chart:
    marks = []
    for tier, found in tiers.items():
        for mode in modes:
            cell = _cell(found["modes"].get(mode, {}).get(name.format(k=found.get("samples"))))
            if isinstance(cell, Cell):
                marks.append(Interval(tier, mode, cell.value, cell.low, cell.high))
            elif cell is not None:
                marks.append(Interval(tier, mode, cell))
    return interval_chart(title, marks, note)


def _pass_curves(tier: str, found: Json) -> Chart:
    series = {}
    for mode, metrics in found["modes"].items():
        points = [(int(name[5:]), _value(e)) for name, e in metrics.items() if _is_at("pass", name)]
        mean = metrics.get(f"mean@{found['samples']}")
        series[mode] = sorted({1: _value(mean), **dict(points)}.items() if mean else points)
    note = "The chance that one of k samples is right."
    return line_chart(f"pass@k, {tier}", series, Steps(), note, share=True, axis="samples k")


def _is_at(name: str, key: str) -> bool:
    return key.startswith(f"{name}@") and key[len(name) + 1 :].isdigit()


def _value(estimate: Any) -> float:
    return estimate["value"] if isinstance(estimate, Mapping) else estimate


def _equal_tokens(tiers: Json, modes: Sequence[str]) -> Section:
    rows = []
    for tier, found in tiers.items():
        equal = found.get("equal_tokens") or {}
        for mode in modes:
            mine = equal.get("modes", {}).get(mode)
            if mine:
                values = [_cell(mine.get(name)) for name in ("mean", "majority", "pass")]
                rows.append([tier, mode, equal.get("budget"), mine.get("samples"), *values])
    intro = (
        "Every mode gets as many tokens on a problem as the cheapest mode spent on all its samples; samples is how "
        "many of its own it can pay with them."
    )
    heads = ["set", "mode", "tokens a problem", "samples", "mean", "majority", "pass"]
    return Section("At equal total tokens", intro, [Table(heads, rows)])


def _behaviour(tiers: Json, modes: Sequence[str]) -> Section:
    """A table a set: the metrics that are no accuracy, a column a mode."""
    tables = []
    for tier, found in tiers.items():
        names = dict.fromkeys(name for mode in modes for name in found["modes"].get(mode, {}) if "@" not in name)
        rows = [
            [name.replace("_", " "), *(_cell(found["modes"].get(m, {}).get(name)) for m in modes)] for name in names
        ]
        tables.append(Table(["", *modes], rows, title=tier))
    return Section("Behaviour", "What the responses look like, with 95 % intervals over problems.", tables)
