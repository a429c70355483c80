"""The report of `tools/reproduce.py`: tables, figures, and what becomes of each claim of the paper.

The rule was fixed before any result was seen. A claim is a list of comparisons. Each is computed per seed, and its 95 %
interval is Student's t over the seeds:

    holds      the interval lies above 0 (below, for a fall)       fails      it lies on the other side
    open       it holds 0, or fewer than two seeds are finished

A claim is reproduced where all its comparisons hold, not reproduced where one fails, undecided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from parallel_r1.evaluation.estimators import Estimate
from parallel_r1.evaluation.seeds import direction, over_problems, over_seeds

MARGIN = 0.05
"""Accuracy that "near-equal" may cost."""
RESPONSES = 16 * 8
"""Of one RL step: problems x group size in configs/miniature/."""
WINDOW = 5
"""Steps averaged at each end of a training curve, and around each point of a figure."""


class Results(Protocol):
    """What one run left: a row of the tables with one seed."""

    row: str
    seed: int

    def metrics(self) -> dict[str, float]:
        """Held-out metrics; nothing where the run is not tested."""

    def correct(self) -> dict[str, float]:
        """Share of right samples, by problem."""

    def events(self, tag: str) -> list[float]:
        """A training curve, step by step."""

    def usage(self) -> list[dict[str, Any]]:
        """A record for each command: task, rc, wall_s, cpu_s, error."""


def claim_verdict(verdicts: Sequence[str]) -> str:
    if "fails" in verdicts:
        return "not reproduced"
    return "reproduced" if verdicts and all(v == "holds" for v in verdicts) else "undecided"


# --------------------------------------------------------------------------- the claims


@dataclass(frozen=True)
class Comparison:
    """metric of row a minus that of row b, per seed. sign: 1 where the claim is that it is positive, -1 negative.

    b None: metric is a training curve of row a, and the difference is its last steps minus its first.
    """

    metric: str
    a: str
    b: str | None
    sign: int = 1
    margin: float = 0.0

    def of_seed(self, runs: dict[str, Results]) -> float | None:
        """The difference in one seed. runs: by row. None where a run is missing."""
        if self.b is None:
            curve = runs[self.a].events(self.metric) if self.a in runs else []
            return mean(curve[-WINDOW:]) - mean(curve[:WINDOW]) if len(curve) >= 2 * WINDOW else None
        sides = [runs[name].metrics().get(self.metric) if name in runs else None for name in (self.a, self.b)]
        return None if None in sides else sides[0] - sides[1]


@dataclass(frozen=True)
class Claim:
    text: str
    comparisons: tuple[Comparison, ...]


ACCURACY, RATIO, VALID, CRITICAL = "accuracy", "parallel_ratio", "format_valid", "accuracy_at_critical"

CLAIMS = (
    Claim(
        "Supervised demonstrations teach the parallel format",
        (Comparison(RATIO, "sft_seen", "base"), Comparison(RATIO, "sft_unseen", "base")),
    ),
    Claim(
        "RL on top of them improves accuracy on hard problems",
        (Comparison(ACCURACY, "seen", "sft_seen"), Comparison(ACCURACY, "unseen_s1", "sft_unseen")),
    ),
    Claim("Seen beats sequential GRPO at the same steps", (Comparison(ACCURACY, "seen", "sequential"),)),
    Claim("Seen beats sequential GRPO at the same tokens", (Comparison(ACCURACY, "seen", "sequential_tokens"),)),
    Claim("Stage 1 (easy problems first) helps Seen", (Comparison(ACCURACY, "seen", "seen_without_stage1"),)),
    Claim("Stage 1 does not help Unseen: it is better without", (Comparison(ACCURACY, "unseen_s1", "unseen_stage1"),)),
    Claim(
        "Under an accuracy reward block use falls",
        (
            Comparison(RATIO, "unseen_s1", "sft_unseen", sign=-1),
            Comparison(RATIO, "seen_without_stage1", "sft_seen", sign=-1),
        ),
    ),
    Claim(
        "A parallel-only reward raises block use and costs accuracy (against the accuracy reward)",
        (
            Comparison(RATIO, "unseen_parallel", "unseen_s1"),
            Comparison(ACCURACY, "unseen_parallel", "unseen_s1", sign=-1),
        ),
    ),
    Claim(
        f"The alternating reward raises block use at near-equal accuracy (at most {MARGIN:.2f} lower)",
        (Comparison(RATIO, "unseen_s2", "unseen_s1"), Comparison(ACCURACY, "unseen_s2", "unseen_s1", margin=MARGIN)),
    ),
    Claim(
        "Parallel thinking as a scaffold, then accuracy alone, beats accuracy alone",
        (Comparison(ACCURACY, "scaffold", "unseen_s1"),),
    ),
    Claim(
        "Blocks move from early (exploring) to late (verifying) during RL",
        (Comparison("rollout/parallel_position", "seen_position", None),),
    ),
    Claim(
        "Ours, not the paper's: within the critical tokens of a perfect parallel answer Seen is right more often than "
        "sequential GRPO",
        (Comparison(CRITICAL, "seen", "sequential"), Comparison(CRITICAL, "seen", "sequential_tokens")),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """A comparison as measured. seeds: the difference in each seed."""

    comparison: Comparison
    seeds: tuple[float, ...]
    by_seed: Estimate
    by_problem: Estimate | None
    verdict: str


def measure(comparison: Comparison, runs: Sequence[Results]) -> Outcome:
    """Compare over the seeds in which both sides are finished."""
    by_seed: dict[int, dict[str, Results]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, {})[run.row] = run
    found = {seed: comparison.of_seed(rows) for seed, rows in sorted(by_seed.items())}
    known = {seed: value for seed, value in found.items() if value is not None}
    problems = None
    if comparison.metric == ACCURACY and comparison.b is not None:
        pairs = [(by_seed[s][comparison.a].correct(), by_seed[s][comparison.b].correct()) for s in known]
        problems = over_problems(pairs)
    interval = over_seeds(list(known.values()))
    verdict = direction(interval, comparison.sign, comparison.margin)
    return Outcome(comparison, tuple(known.values()), interval, problems, verdict)


# --------------------------------------------------------------------------- text


def shown(estimate: Estimate | None, form: str = ".3f") -> str:
    if estimate is None or math.isnan(estimate.value):
        return "-"
    if estimate.low is None or estimate.high is None:
        return format(estimate.value, form)
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


COLUMNS = {
    ACCURACY: ("accuracy", ".3f"),
    RATIO: ("parallel ratio", ".3f"),
    VALID: ("format valid", ".3f"),
    CRITICAL: ("accuracy within critical budget", ".3f"),
    "critical_tokens": ("critical tokens", ".1f"),
    "total_tokens": ("total tokens", ".1f"),
}


def results_table(runs: Sequence[Results], labels: dict[str, str]) -> str:
    """Every row of the paper's tables, mean over seeds with t intervals."""
    rows = []
    for row, label in labels.items():
        tested = [run for run in runs if run.row == row and run.metrics()]
        cells = [
            shown(over_seeds([run.metrics()[key] for run in tested]), form) if tested else "-"
            for key, (_, form) in COLUMNS.items()
        ]
        sampled = [RESPONSES * sum(run.events("rollout/total_tokens")) for run in tested]
        rows.append([label, str(len(tested)), *cells, f"{mean(sampled) / 1e3:.0f}" if any(sampled) else "-"])
    return table(["", "seeds", *(name for name, _ in COLUMNS.values()), "RL tokens, thousands"], rows)


def claims_table(runs: Sequence[Results], labels: dict[str, str]) -> str:
    rows = []
    for claim in CLAIMS:
        outcomes = [measure(comparison, runs) for comparison in claim.comparisons]
        verdict = claim_verdict([outcome.verdict for outcome in outcomes])
        for i, outcome in enumerate(outcomes):
            c = outcome.comparison
            what = f"last - first {WINDOW} steps" if c.b is None else f"{labels[c.a]} - {labels[c.b]}"
            rows.append(
                [
                    claim.text if i == 0 else "",
                    f"**{verdict}**" if i == 0 else "",
                    f"{COLUMNS[c.metric][0] if c.metric in COLUMNS else 'position'}: {what}",
                    shown(outcome.by_seed, "+.3f"),
                    shown(outcome.by_problem, "+.3f"),
                    ", ".join(f"{value:+.3f}" for value in outcome.seeds) or "-",
                    outcome.verdict,
                ]
            )
    head = ["claim", "verdict", "difference", "over seeds (decides)", "over problems", "each seed", ""]
    return table(head, rows)


# --------------------------------------------------------------------------- figures


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
        ("parallel_ratio.png", "Share of rollouts with a block, under each reward, Unseen from one cold start."),
        ("position.png", "Where blocks open, as a share of the response."),
    ]


# --------------------------------------------------------------------------- the document


HEAD = """# The paper in miniature

Parallel-R1 (arXiv 2509.07980) on the embedded task: a Qwen3 of half a million parameters on generated word problems,
every row of the paper's tables, {seeds} seeds. It shows what the method does at this size on a task made for it, not
what it does for a 4B model on competition mathematics. {unfinished}

- Command: `{command}`, configurations in `configs/miniature/`. Seeds: {names}.
- Hardware: {hardware}. {cpu_hours:.2f} CPU-hours for all training and evaluation, as the operating system counts them.
- Training: {recipe}
- Evaluation: {problems} hard problems of the test split, the same for every row, one response each at temperature 1,
  touched once a finished run.
- Intervals are 95 %. Over seeds: Student's t (would it come out so with other seeds, on these problems?). Over
  problems: paired bootstrap (on other problems, with these very runs?). No correction for the number of claims.
"""

RULE = """The rule was fixed before any result was seen: a comparison holds (fails) where the interval over seeds of its
differences lies on the claimed (the other) side of zero, and is open otherwise; a claim is reproduced where all of its
comparisons hold, not reproduced where one fails, undecided otherwise."""

RECIPE = (
    "cold start of 180 steps x 32 demonstrations, then 30 GRPO steps x 16 problems x 8 responses (10 easy and 20 hard "
    "with stage 1, 30 hard without; `same tokens` takes as many as sample what Seen samples). Rows of one structure "
    "start from one cold start a seed."
)


def failures(runs: Sequence[Results]) -> list[str]:
    """Commands whose last try failed, and what they said."""
    lines = []
    for run in runs:
        last = {record["task"]: record for record in run.usage()}
        lines += [
            f"- seed {run.seed}, `{run.row}`, {task}: exit status {record['rc']}: `{record['error'].replace('`', '')}`"
            for task, record in last.items()
            if record["rc"]
        ]
    return lines


def report(runs: Sequence[Results], labels: dict[str, str], path: Path, command: str, hardware: str) -> str:
    """Draw the figures into a folder beside `path`, named like it, and return the text."""
    tested = [run for run in runs if run.metrics()]
    seeds = sorted({run.seed for run in runs})
    missing = [f"{labels[run.row]} (seed {run.seed})" for run in runs if not run.metrics()]
    problems = sorted({len(run.correct()) for run in tested})
    figures = draw(path.with_suffix(""), runs, labels)
    head = HEAD.format(
        seeds=len(seeds),
        names=", ".join(map(str, seeds)),
        command=command,
        hardware=hardware,
        cpu_hours=sum(record["cpu_s"] for run in runs for record in run.usage()) / 3600,
        recipe=RECIPE,
        problems=" or ".join(map(str, problems)) or "no",
        unfinished=f"Not finished: {', '.join(missing)}." if missing else "Every run is finished.",
    )
    failed = failures(runs)
    parts = [
        head,
        "## Results",
        "Mean over seeds, interval over seeds.",
        results_table(runs, labels),
        "## Claims",
        RULE,
        claims_table(runs, labels),
        "## Figures",
        *(f"![{caption}]({path.stem}/{name})\n\n{caption}" for name, caption in figures),
        *(["## Commands that failed", "\n".join(failed)] if failed else []),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"
