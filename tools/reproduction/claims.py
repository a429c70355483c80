"""The paper's claims, and the rule by which a few seeds decide them.

The rule was fixed before any result was seen. A claim is a list of comparisons. Each is computed per seed, and its 95 %
interval is Student's t over the seeds:

    holds      the interval lies above 0 (below, for a fall)       fails      it lies on the other side
    open       it holds 0, or fewer than two seeds are finished

A claim is reproduced where all its comparisons hold, not reproduced where one fails, undecided otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Protocol

from parallel_r1.evaluation.estimators import Estimate
from parallel_r1.evaluation.seeds import direction, over_problems, over_seeds

MARGIN = 0.05
"""Accuracy that "near-equal" may cost."""
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
COLUMNS = {
    ACCURACY: ("accuracy", ".3f"),
    RATIO: ("parallel ratio", ".3f"),
    VALID: ("format valid", ".3f"),
    CRITICAL: ("accuracy within critical budget", ".3f"),
    "critical_tokens": ("critical tokens", ".1f"),
    "total_tokens": ("total tokens", ".1f"),
}
"""Metrics of the tables: name -> heading and format."""

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

# added after the first seed was seen: is the baseline a fair one, and do the rows differ at all?
CHECKS = (
    Claim("Does RL improve the sequential baseline?", (Comparison(ACCURACY, "sequential", "sft_sequential"),)),
    Claim("Is Seen ahead of the baseline before its RL, too?", (Comparison(ACCURACY, "seen", "sft_sequential"),)),
    Claim("Does the scaffold differ from S2?", (Comparison(ACCURACY, "scaffold", "unseen_s2"),)),
    Claim(
        "Does a parallel-only reward raise block use above the cold start's?",
        (Comparison(RATIO, "unseen_parallel", "sft_unseen"),),
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
