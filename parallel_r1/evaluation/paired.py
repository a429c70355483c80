"""Two reports of `test` held against each other, problem by problem: what differs, and whether chance would do it.

Both answered the same problems, so each problem is its own control: the difference is taken per problem, its interval
is a bootstrap over problems, its p-value that of a sign-flip test over them (`estimators`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from parallel_r1.evaluation.estimators import cluster_bootstrap, pass_at, sign_flip_test

Json = Mapping[str, Any]

Metric = Callable[[Json, int], float]
"""(entry of a problem, k) -> its value."""


@dataclass(frozen=True)
class Difference:
    """B - A of one metric over the n problems that both have.

    a, b: means over these problems; difference: b - a, with its 95 % interval; p: two-sided; better, worse: problems
    where B is above A, and below.
    """

    tier: str
    mode: str
    metric: str
    n: int
    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    p: float
    better: int
    worse: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def metrics(k: int) -> dict[str, Metric]:
    """What is compared: accuracies, then parallel ratio and tokens of a response."""
    accuracies: dict[str, Metric] = {
        f"mean@{k}": lambda p, k: p["correct"] / k,
        f"pass@{max(k // 2, 1)}": lambda p, k: pass_at(k, p["correct"], max(k // 2, 1)),
        f"pass@{k}": lambda p, k: pass_at(k, p["correct"], k),
        f"majority@{k}": lambda p, k: p["majority"],
    }
    if k == 1:
        accuracies = {"mean@1": accuracies["mean@1"]}
    return {
        **accuracies,
        "parallel_ratio": lambda p, k: p["parallel"] / k,
        "total_tokens": lambda p, k: p["total_tokens"] / k,
        "critical_tokens": lambda p, k: p["critical_tokens"] / k,
    }


def compare(
    a: Json, b: Json, modes: tuple[str, str] | None = None, resamples: int = 10_000, seed: int = 0
) -> list[Difference]:
    """Every metric of every tier and mode that two reports share.

    modes: compare this mode of A with that one of B; None: each mode with itself. Raises ValueError where nothing is
    shared, where problems of one tier have other numbers of samples, or where a file is no report.
    """
    out = []
    tiers = [tier for tier in _tiers(a, "A") if tier in _tiers(b, "B")]
    if not tiers:
        raise ValueError(f"the reports share no set of problems: A has {_named(a)}, B has {_named(b)}")
    empty = []
    for tier in tiers:
        one, two = a["tiers"][tier], b["tiers"][tier]
        for mode, (mine, other) in _pairs(one, two, modes).items():
            entries = {entry["id"]: entry for entry in two["by_problem"][other]}
            both = [(entry, entries[entry["id"]]) for entry in one["by_problem"][mine] if entry["id"] in entries]
            if not both:
                empty.append(tier)
                continue
            if one["samples"] != two["samples"]:
                raise ValueError(
                    f"{tier} has {one['samples']} samples a problem in A and {two['samples']} in B: pass@k and "
                    "majority of different k are different quantities; test both with the same evaluation.samples"
                )
            out += _differences(tier, mode, both, one["samples"], resamples, seed)
    if not out:
        where = f"no problem of {', '.join(dict.fromkeys(empty))}" if empty else "no mode"
        raise ValueError(f"the reports share {where}: nothing to compare. {_modes_named(a, b)}")
    return out


def _differences(
    tier: str, mode: str, both: list[tuple[Json, Json]], k: int, resamples: int, seed: int
) -> list[Difference]:
    found = metrics(k)
    values = np.array([[[metric(p, k) for p in pair] for metric in found.values()] for pair in both])  # [P, M, 2]
    gaps = values[:, :, 1] - values[:, :, 0]
    estimates = cluster_bootstrap(gaps, np.ones_like(gaps), resamples, seed)
    return [
        Difference(
            tier,
            mode,
            name,
            len(both),
            float(values[:, i, 0].mean()),
            float(values[:, i, 1].mean()),
            estimate.value,
            estimate.low,
            estimate.high,
            sign_flip_test(gaps[:, i], seed),
            int((gaps[:, i] > 0).sum()),
            int((gaps[:, i] < 0).sum()),
        )
        for i, (name, estimate) in enumerate(zip(found, estimates, strict=True))
    ]


def _tiers(report: Json, which: str) -> Json:
    tiers = report.get("tiers") if isinstance(report, Mapping) else None
    if not isinstance(tiers, Mapping) or not all("by_problem" in found for found in tiers.values()):
        raise ValueError(f"{which} is no report of `test`: it has no results by problem; give its report.json")
    return tiers


def _pairs(one: Json, two: Json, modes: tuple[str, str] | None) -> dict[str, tuple[str, str]]:
    if modes is None:
        return {mode: (mode, mode) for mode in one["by_problem"] if mode in two["by_problem"]}
    mine, other = modes
    there = mine in one["by_problem"] and other in two["by_problem"]
    return {f"{mine} / {other}": modes} if there else {}


def _named(report: Json) -> str:
    return ", ".join(report["tiers"]) or "none"


def _modes_named(a: Json, b: Json) -> str:
    modes = [", ".join(dict.fromkeys(m for t in r["tiers"].values() for m in t["by_problem"])) for r in (a, b)]
    return f"Modes of A: {modes[0]}; of B: {modes[1]}"
