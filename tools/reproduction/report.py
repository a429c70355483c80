"""The report of `tools/reproduce.py`: tables, claims, figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from parallel_r1.evaluation.estimators import Estimate
from parallel_r1.evaluation.seeds import over_seeds
from reproduction.claims import CHECKS, CLAIMS, COLUMNS, WINDOW, Claim, Results, claim_verdict, measure
from reproduction.figures import draw

RESPONSES = 16 * 8
"""Of one RL step: problems x group size in configs/miniature/."""


def shown(estimate: Estimate | None, form: str = ".3f") -> str:
    if estimate is None or math.isnan(estimate.value):
        return "-"
    if estimate.low is None or estimate.high is None:
        return format(estimate.value, form)
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def claims_table(claims: Sequence[Claim], runs: Sequence[Results], labels: dict[str, str], judged: bool = True) -> str:
    """A line a comparison. judged: give verdicts."""
    rows = []
    for claim in claims:
        outcomes = [measure(comparison, runs) for comparison in claim.comparisons]
        verdict = claim_verdict([outcome.verdict for outcome in outcomes])
        for i, outcome in enumerate(outcomes):
            c = outcome.comparison
            what = f"last - first {WINDOW} steps" if c.b is None else f"{labels[c.a]} - {labels[c.b]}"
            rows.append(
                [
                    claim.text if i == 0 else "",
                    *([f"**{verdict}**" if i == 0 else ""] if judged else []),
                    f"{COLUMNS[c.metric][0] if c.metric in COLUMNS else 'position'}: {what}",
                    shown(outcome.by_seed, "+.3f"),
                    shown(outcome.by_problem, "+.3f"),
                    ", ".join(f"{value:+.3f}" for value in outcome.seeds) or "-",
                    *([outcome.verdict] if judged else []),
                ]
            )
    head = ["difference", "over seeds", "over problems", "each seed"]
    head = ["claim", "verdict", *head, "holds?"] if judged else ["question", *head]
    return table(head, rows)


# --------------------------------------------------------------------------- the document


HEAD = """# The paper in miniature

Parallel-R1 (arXiv 2509.07980) on the embedded task: a Qwen3 of half a million parameters on generated word problems,
every row of the paper's tables, {seeds} seeds. It shows what the method does at this size on a task made for it, not
what it does for a 4B model on competition mathematics. {unfinished}

- Command: `{command}`, configurations in `configs/miniature/`. Seeds: {names}.
- Hardware: {hardware}. {cpu_hours:.2f} CPU-hours for all training and evaluation, as the operating system counts them.
- Training: {recipe}
- Evaluation: {problems} hard problems of the test split, {same} for every row, one response each at temperature 1, once
  a finished run.
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


def unfinished(runs: Sequence[Results], labels: dict[str, str]) -> str:
    """A sentence on the runs that have no result."""
    missing: dict[str, list[str]] = {}
    for run in runs:
        if not run.metrics():
            missing.setdefault(labels[run.row], []).append(str(run.seed))
    if not missing:
        return "Every run is finished."
    told = "; ".join(f"{label} (seed {', '.join(seeds)})" for label, seeds in missing.items())
    return f"**Not finished:** {told}."


def report(runs: Sequence[Results], labels: dict[str, str], path: Path, command: str, hardware: str) -> str:
    """Draw the figures into a folder beside `path`, named like it, and return the text.

    A file `notes.md` in that folder, written by hand, becomes the section on reading the results.
    """
    tested = [run for run in runs if run.metrics()]
    seeds = sorted({run.seed for run in runs})
    problems = {frozenset(run.correct()) for run in tested}
    folder = path.with_suffix("")
    figures = draw(folder, runs, labels)
    head = HEAD.format(
        seeds=len(seeds),
        names=", ".join(map(str, seeds)),
        command=command,
        hardware=hardware,
        cpu_hours=sum(record["cpu_s"] for run in runs for record in run.usage()) / 3600,
        recipe=RECIPE,
        problems=" or ".join(map(str, sorted({len(ids) for ids in problems}))) or "no",
        same="the same" if len(problems) < 2 else "**not the same**",
        unfinished=unfinished(runs, labels),
    )
    failed, notes = failures(runs), folder / "notes.md"
    parts = [
        head,
        "## Results",
        "Mean over seeds, interval over seeds.",
        results_table(runs, labels),
        "## Claims",
        RULE,
        claims_table(CLAIMS, runs, labels),
        *(["## Reading the results", notes.read_text()] if notes.is_file() else []),
        "## Questions asked afterwards",
        "Once the first seed had been seen; they judge no claim.",
        claims_table(CHECKS, runs, labels, judged=False),
        "## Figures",
        *(f"![{name}]({path.stem}/{name})\n\n{caption}" for name, caption in figures),
        *(["## Commands that failed", "\n".join(failed)] if failed else []),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"
