"""A run as a page: what its stages did, how behaviour changed, and the responses that it kept.

<run>/summary.json            held-out metrics before and after each stage
<run>/tensorboard/<stage>/    curves and histograms
<run>/stages/<stage>/rollouts responses of training
<run>/test/<name>/            report.json and samples-*.jsonl of `test`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel_r1.evaluation.charts import Chart, Section, Steps, Table, band_chart, line_chart
from parallel_r1.evaluation.page_text import Cell
from parallel_r1.evaluation.row_files import ENDINGS, row_files, saved_rows

Series = dict[float, float]
"""step -> value."""


@dataclass(frozen=True)
class Curves:
    """What TensorBoard holds of a run. scalars: by name; positions: step -> blocks that open in each tenth."""

    scalars: dict[str, Series] = field(default_factory=dict)
    positions: dict[float, list[float]] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)


@dataclass(frozen=True)
class Source:
    """What a path holds. reports: by name."""

    rows: tuple[tuple[Path, str | None], ...]
    reports: Mapping[str, Mapping[str, Any]]
    run: Path | None


def find(path: Path) -> Source:
    """What there is to show of a run folder, a folder of `test`, a folder of rows or a file of rows.

    Raises FileNotFoundError where there is nothing, ValueError for a report that is no JSON.
    """
    if path.is_dir() and (path / "stages").is_dir():
        folders = [*sorted(path.glob("stages/*/rollouts")), *sorted(path.glob("test/*"))]
        files = [(file, _stage(file)) for folder in folders for file in _files(folder)]
        reports = {p.parent.name: _json(p) for p in sorted(path.glob("test/*/report.json"))}
        return Source(tuple(files), reports, path)
    files = [(file, _stage(file)) for file in row_files(path)]
    report = path / "report.json" if path.is_dir() else path.parent / "report.json"
    reports = {report.parent.name: _json(report)} if path.is_dir() and report.is_file() else {}
    return Source(tuple(files), reports, None)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS)) if folder.is_dir() else []


def _stage(file: Path) -> str | None:
    """The stage that a file of rollouts lies in; the name of the test that a file of samples lies in."""
    parts = file.absolute().parts
    if parts[-2] == "rollouts" and parts[-4:-3] == ("stages",):
        return parts[-3]
    return f"test {parts[-2]}" if parts[-3:-2] == ("test",) else None


def rows_of(sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    """The rows of all files, each with the stage it is from where that is known."""
    for source in sources:
        for file, stage in source.rows:
            for row in saved_rows(file):
                yield row if stage is None else {**row, "stage": stage}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); delete it, or run `test` again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__} where an object is expected")
    return value


# --------------------------------------------------------------------------- a run


def run_sections(run: Path) -> list[Section]:
    """Held-out metrics, training, behaviour over training; those that the run has left something for."""
    curves = read_curves(run / "tensorboard")
    sections = [_held_out(run, curves), _training(curves), _behaviour(curves)]
    return [section for section in sections if section.tables or section.charts]


def read_curves(folder: Path) -> Curves:
    """The events of every stage below a TensorBoard folder, on one axis. Nothing where there is no folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: dict[str, Series] = {}
    positions: dict[float, list[float]] = {}
    starts: dict[float, str] = {}
    for stage in sorted(p for p in folder.glob("*") if p.is_dir()):
        events = EventAccumulator(str(stage), size_guidance={"scalars": 0, "histograms": 0, "images": 1, "tensors": 1})
        events.Reload()
        first: list[float] = []
        for name in events.Tags()["scalars"]:
            points = {float(event.step): event.value for event in events.Scalars(name)}
            scalars.setdefault(name, {}).update(points)
            first += [min(points)] if points and not name.startswith("val/") else []
        if "behaviour/positions" in events.Tags()["histograms"]:
            for event in events.Histograms("behaviour/positions"):
                positions[float(event.step)] = _tenths(event.histogram_value)
        if first:
            starts[min(first)] = stage.name
    return Curves(scalars, positions, Steps(dict(sorted(starts.items()))))


def _tenths(histogram: Any) -> list[float]:
    """Counts in ten equal bins of [0, 1]: TensorBoard leaves out empty bins at both ends."""
    counts = [0.0] * 10
    for limit, count in zip(histogram.bucket_limit, histogram.bucket, strict=True):
        if count:
            counts[min(max(round(limit * 10) - 1, 0), 9)] += count
    return counts


def _held_out(run: Path, curves: Curves) -> Section:
    path = run / "summary.json"
    stages = _json(path).get("stages", []) if path.is_file() else []
    rows = []
    for stage in stages:
        for tier in dict.fromkeys(key.split("/")[0] for key in stage["after"]):
            before, after = (_of_tier(stage[when], tier) for when in ("before", "after"))
            rows.append(
                [
                    stage["name"],
                    tier,
                    *(_with_half_width(m) for m in (before, after)),
                    *(after.get(name) for name in ("parallel_ratio", "format_valid", "critical_tokens", "n")),
                ]
            )
    heads = ["stage", "set", "accuracy before", "after", "parallel ratio", "format valid", "critical tokens", "n"]
    tables = [Table(heads, rows)] if rows else []
    series = {name.split("/")[1]: points for name, points in curves.scalars.items() if _VALIDATION.fullmatch(name)}
    chart = _lines("Held-out accuracy", series, curves, "On problems that no stage trains on.", share=True)
    return Section("Held-out problems", "Before and after each stage, with 95 % intervals.", tables, chart)


_VALIDATION = re.compile(r"val/[^/]+/accuracy")


def _of_tier(metrics: Mapping[str, float], tier: str) -> dict[str, float]:
    return {key.split("/", 1)[1]: value for key, value in metrics.items() if key.startswith(f"{tier}/")}


def _with_half_width(metrics: Mapping[str, float]) -> Any:
    value, half = metrics.get("accuracy"), metrics.get("accuracy_ci95")
    return value if value is None or half is None else Cell(value, max(value - half, 0.0), min(value + half, 1.0))


def _training(curves: Curves) -> Section:
    shares = {
        "right": "rollout/accuracy",
        "parallel": "rollout/parallel_ratio",
        "well formed": "rollout/format_valid",
    }
    tokens = {"all": "rollout/total_tokens", "critical": "rollout/critical_tokens"}
    gap = {"largest": "rollout_logprob_gap/max", "mean": "rollout_logprob_gap/mean"}
    charts = [
        _named(curves, "Right, parallel, well formed", shares, "Shares of the responses sampled for training.", True),
        _named(curves, "Reward", {"": "reward/total/mean"}, "Mean over responses; each stage has its own."),
        _named(
            curves, "Tokens of a response", tokens, "Critical: main text, summaries and the longest path of each block."
        ),
        _named(curves, "Entropy", {"": "policy/entropy"}, "Of the policy at each sampled token, in nats."),
        _named(
            curves,
            "Engine against trainer",
            gap,
            "Difference in a token's log-probability, in nats.",
            log=True,
        ),
    ]
    return Section("Training", charts=[chart for found in charts for chart in found])


def _behaviour(curves: Curves) -> Section:
    verification = curves.scalars.get("rollout/verification_share", {})
    uses = {"exploration": {x: 1 - y for x, y in verification.items()}, "verification": verification}
    agreement = {"pairs of paths": "rollout/path_agreement", "with the answer": "rollout/answer_agreement"}
    bins = [i / 10 for i in range(11)]
    charts = [
        _named(
            curves,
            "Where blocks open",
            {"": "rollout/parallel_position"},
            "Mean place of <Parallel> as a share of the response: early blocks explore, late ones verify.",
            True,
        ),
        [band_chart("Where all blocks open", bins, curves.positions, curves.steps)] if curves.positions else [],
        _lines(
            "What blocks are for",
            uses if verification else {},
            curves,
            "A block verifies where a candidate answer precedes it, else it explores.",
            True,
        ),
        _named(
            curves, "Agreement", agreement, "Pairs of paths that end on one value; paths that end on the answer.", True
        ),
        _named(curves, "Diversity of paths", {"": "rollout/path_diversity"}, "1 - self-BLEU of a block's paths.", True),
        _named(curves, "Share of tokens in blocks", {"": "rollout/parallel_token_share"}, "Mean over responses.", True),
        _named(curves, "Paths of a block", {"": "rollout/paths_per_block"}, "Mean over well-formed blocks."),
        _named(curves, "Length of a block", {"": "rollout/block_tokens"}, "Tokens, mean over blocks."),
    ]
    return Section("Behaviour over training", charts=[chart for found in charts for chart in found])


def _named(
    curves: Curves, title: str, names: Mapping[str, str], note: str, share: bool = False, log: bool = False
) -> list[Chart]:
    """names: what a curve is called -> its scalar; one alone needs no name."""
    series = {label or title: curves.scalars[name] for label, name in names.items() if name in curves.scalars}
    return _lines(title, series, curves, note, share, log)


def _lines(
    title: str, series: Mapping[str, Series], curves: Curves, note: str, share: bool = False, log: bool = False
) -> list[Chart]:
    """A chart, or none where there is no point to draw."""
    points = {name: sorted(values.items()) for name, values in series.items() if values}
    return [line_chart(title, points, curves.steps, note, share=share, log=log)] if points else []
