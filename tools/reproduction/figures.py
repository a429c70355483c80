"""The figures of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from reproduction.claims import ACCURACY, COLUMNS, CRITICAL, WINDOW, Results


def smooth(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean of curves over seeds, cut to the shortest, then a centred moving average over WINDOW steps."""
    length = min(map(len, curves))
    line = [mean(curve[i] for curve in curves) for i in range(length)]
    half = WINDOW // 2
    return [mean(line[max(0, i - half) : i + half + 1]) for i in range(length)]


def draw_curves(
    path: Path, runs: Sequence[Results], rows: dict[str, str], tag: str, label: str, note: str = ""
) -> None:
    """Training curves of some rows (name -> label), mean over seeds; thin lines are the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for i, (row, name) in enumerate(rows.items()):
        curves = [c for run in runs if run.row == row and (c := run.events(tag))]
        if not curves:
            continue
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), smooth([curve]), color=f"C{i}", alpha=0.25, linewidth=0.8)
        line = smooth(curves)
        axes.plot(range(1, len(line) + 1), line, color=f"C{i}", label=name)
    axes.set(xlabel=f"RL step{note}", ylabel=label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})


def draw_bars(path: Path, runs: Sequence[Results], labels: dict[str, str]) -> None:
    """Accuracy of every row, without a limit and within the critical budget; points are seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.0), dpi=100, layout="constrained")
    axes = figure.subplots()
    for k, metric in enumerate((ACCURACY, CRITICAL)):
        name: str | None = COLUMNS[metric][0]
        for i, row in enumerate(labels):
            values = [m[metric] for run in runs if run.row == row and metric in (m := run.metrics())]
            if values:
                y = i + 0.2 * (2 * k - 1)
                axes.barh(y, mean(values), 0.4, color=f"C{k}", alpha=0.6, label=name)
                axes.plot(values, [y] * len(values), "k.", markersize=3)
                name = None  # once in the legend
    axes.set_yticks(range(len(labels)), labels.values())
    axes.invert_yaxis()
    axes.set(xlabel="share of hard test problems", xlim=(0, 1))
    axes.grid(axis="x", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})


def draw(folder: Path, runs: Sequence[Results], labels: dict[str, str]) -> list[tuple[str, str]]:
    """All figures; returns (file name, caption)."""
    folder.mkdir(parents=True, exist_ok=True)

    def some(*rows: str) -> dict[str, str]:
        return {row: labels[row] for row in rows}

    draw_bars(folder / "accuracy.png", runs, labels)
    hard = some("seen", "seen_without_stage1", "sequential_tokens", "unseen_s1", "unseen_s2", "scaffold")
    draw_curves(folder / "accuracy_over_steps.png", runs, hard, "rollout/accuracy", "accuracy of rollouts")
    ablation = some("unseen_s1", "unseen_parallel", "unseen_s2", "scaffold")
    draw_curves(folder / "parallel_ratio.png", runs, ablation, "rollout/parallel_ratio", "parallel ratio of rollouts")
    position = some("seen_position")
    where = "opening of blocks / length"
    draw_curves(folder / "position.png", runs, position, "rollout/parallel_position", where)
    return [
        ("accuracy.png", "Accuracy on the hard test problems; points are seeds."),
        (
            "accuracy_over_steps.png",
            "Accuracy of training rollouts (no problem comes twice within a stage), smoothed over "
            f"{WINDOW} steps; Seen is on easy problems for its first 10 steps.",
        ),
        (
            "parallel_ratio.png",
            "Share of rollouts with a block under each reward; Unseen, from one cold start a seed. Rows that behave "
            "alike lie on each other.",
        ),
        ("position.png", "Where blocks open, as a share of the response."),
    ]
