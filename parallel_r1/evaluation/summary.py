"""From the rows of an evaluation to its report: every metric with its interval, by tier and mode.

`n` is the number of problems, `k` the samples of each. Intervals are 95 %, by cluster bootstrap over problems.

mean@k                share of right samples, mean over problems
pass@j                unbiased: the chance that j of the k samples hold a right one; j = 2, 4, ... and k
bootstrap_best@j      the expected best of j draws with replacement, 1 - (1 - c/k)^j, c of k samples right
majority@k            share of problems whose most frequent answer is right; ties and votes: `estimators.majority`
parallel_ratio        share of responses with at least one well-formed block
format_valid          share of responses that finished and obey the grammar throughout
truncated             share of responses that a limit cut
critical_tokens       mean over responses of main and summary tokens and the longest path of each block, as sampled
total_tokens          mean over responses of all sampled tokens
parallel_speedup      all total tokens / all critical tokens: an ideal ratio of decode steps, not of time
path_agreement        mean over responses with a block: share of path pairs that state the same final value
path_diversity        mean over responses with a block: 1 - mean pairwise self-BLEU of the paths
parallel_position     mean over blocks: index of `<Parallel>` / tokens of the response
parallel_token_share  mean over responses: tokens from `<Parallel>` to `</Parallel>` / tokens of the response
accuracy_at_critical  share of samples that are right within the problem's own budget of critical tokens, where every
                      problem states one

At equal total tokens (`equal_tokens`): the budget of a problem is what its cheapest mode spent on all its samples. It
buys a mode m = budget / (mean tokens of a sample of that mode on that problem) samples, 0 < m <= k, seldom a whole
number. `pass` is the unbiased pass@m and `majority` the mean score of the majority over subsets of m of the k samples,
both interpolated linearly between the whole numbers beside m, and 0 at m = 0; `mean` is mean@k: no budget changes it.
Taking the samples in order until the budget is gone would be simpler, and worse: which samples fit then depends on
their lengths (short ones are over-represented, and so are right ones), a mode whose first sample is longer than the
budget has none, and all samples after the cut are wasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel_r1.evaluation.consolidate import answer_groups
from parallel_r1.evaluation.estimators import (
    Estimate,
    best_at,
    between,
    cluster_bootstrap,
    majority,
    pass_at,
    powers_up_to,
    share_interval,
    subsets,
)
from parallel_r1.evaluation.records import Row

Json = dict[str, Any]

_DIGITS = 6


@dataclass(frozen=True)
class Sampled:
    """The k samples of one problem in one mode, in order.

    votes, right: the group of each sample's answer and the verdict of each group (`estimators.majority`).
    """

    id: str
    rows: tuple[Row, ...]
    votes: tuple[int, ...]
    right: tuple[bool, ...]
    budget: int | None

    @property
    def k(self) -> int:
        return len(self.rows)

    @property
    def correct(self) -> int:
        return sum(row["correct"] for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(row["total_tokens"] for row in self.rows)

    def majority(self, size: int, seed: int) -> float:
        """The mean score of the majority answer over subsets of so many samples; 0 for none."""
        if size == 0:
            return 0.0
        chosen = subsets(self.k, size, seed)
        return float(majority(np.array(self.votes), np.array(self.right, dtype=bool), chosen).mean())


def sampled(rows: Sequence[Row], budget: int | None = None) -> Sampled:
    """The samples of one problem. A response that a limit cut casts no vote, whatever it says.

    The verdict of an answer is that of the first sample that gave it.
    """
    ordered = tuple(sorted(rows, key=lambda row: row["sample"]))
    votes = answer_groups([row["final_answer"] if row["finished"] else None for row in ordered])
    right = [ordered[votes.index(group)]["correct"] for group in range(max(votes, default=-1) + 1)]
    return Sampled(ordered[0]["id"], ordered, tuple(votes), tuple(right), budget)


def summarise(
    rows: Iterable[Row],
    problems: Sequence[tuple[str, str]],
    modes: Sequence[str],
    budgets: Mapping[tuple[str, str], int] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Json:
    """`{tier: {problems, samples, modes: {mode: {metric: {value, ci95}}}, equal_tokens, by_problem}}`.

    problems: (tier, id) in the order of the report; budgets: critical tokens a problem allows, where known. Rows of
    other problems and modes are not looked at. Raises ValueError where a problem has no row in a mode, or not the same
    number as the others of its tier.
    """
    wanted = set(problems)
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if (row["tier"], row["id"]) in wanted and row["mode"] in modes:
            found.setdefault((row["mode"], row["tier"], row["id"]), []).append(row)
    out: Json = {}
    for tier in dict.fromkeys(tier for tier, _ in problems):
        ids = [id for t, id in problems if t == tier]
        by_mode: dict[str, list[Sampled]] = {}
        for mode in modes:
            if lost := [id for id in ids if (mode, tier, id) not in found]:
                raise ValueError(f"{len(lost)} of {len(ids)} problems of {tier} have no sample in mode {mode}")
            by_mode[mode] = [sampled(found[mode, tier, id], (budgets or {}).get((tier, id))) for id in ids]
        counts = {s.k for samples in by_mode.values() for s in samples}
        if len(counts) > 1:
            raise ValueError(f"problems of {tier} have {sorted(counts)} samples; an evaluation takes equally many")
        out[tier] = {
            "problems": len(ids),
            "samples": counts.pop(),
            "modes": {mode: mode_metrics(samples, resamples, seed) for mode, samples in by_mode.items()},
            "equal_tokens": equal_tokens(by_mode, resamples, seed) if len(modes) > 1 else None,
            "by_problem": {mode: [_problem(s, seed) for s in samples] for mode, samples in by_mode.items()},
        }
    return out


Pair = tuple[float, float]


def _share(test: Callable[[Row], Any]) -> Callable[[Sampled], Pair]:
    return lambda s: (sum(bool(test(row)) for row in s.rows) / s.k, 1.0)


def _mean(name: str) -> Callable[[Sampled], Pair]:
    """Over the responses where a column is defined."""

    def pair(s: Sampled) -> Pair:
        known = [row[name] for row in s.rows if row.get(name) is not None]
        return math.fsum(known), float(len(known))

    return pair


def _metrics(k: int, seed: int, budgeted: bool) -> dict[str, Callable[[Sampled], Pair]]:
    """How each metric is a ratio of sums over problems: name -> (what a problem adds above, and below)."""
    several = powers_up_to(k)
    return {
        f"mean@{k}": _share(lambda row: row["correct"]),
        **{f"pass@{j}": lambda s, j=j: (pass_at(s.k, s.correct, j), 1.0) for j in several},
        **{f"bootstrap_best@{j}": lambda s, j=j: (best_at(s.k, s.correct, j), 1.0) for j in several},
        f"majority@{k}": lambda s: (s.majority(s.k, seed), 1.0),
        "parallel_ratio": _share(lambda row: row["parallel"]),
        "format_valid": _share(lambda row: row["valid"]),
        "truncated": _share(lambda row: not row["finished"]),
        "critical_tokens": _mean("critical_tokens"),
        "total_tokens": _mean("total_tokens"),
        "parallel_speedup": lambda s: (float(s.tokens), float(sum(row["critical_tokens"] for row in s.rows))),
        "path_agreement": _mean("path_agreement"),
        "path_diversity": _mean("path_diversity"),
        "parallel_position": lambda s: _positions(s),
        "parallel_token_share": _mean("parallel_token_share"),
    } | (
        {
            "accuracy_at_critical": lambda s: (
                sum(row["correct"] and row["critical_tokens"] <= s.budget for row in s.rows) / s.k,
                1.0,
            )
        }
        if budgeted
        else {}
    )


def _positions(s: Sampled) -> Pair:
    known = [at for row in s.rows for at in row.get("parallel_positions") or ()]
    return math.fsum(known), float(len(known))


def mode_metrics(samples: Sequence[Sampled], resamples: int, seed: int) -> Json:
    """Every metric of one mode, `{value, ci95}`; those that are defined for no response are left out."""
    metrics = _metrics(samples[0].k, seed, all(s.budget is not None for s in samples))
    pairs = np.array([[metric(s) for metric in metrics.values()] for s in samples])  # [P, M, 2]
    defined = pairs[:, :, 1].sum(axis=0) > 0
    return _estimates(
        [name for name, keep in zip(metrics, defined, strict=True) if keep], pairs[:, defined], resamples, seed
    )


_SHARES = ("mean", "pass", "bootstrap_best", "majority", "parallel_ratio", "format_valid", "truncated", "accuracy_at")


def _estimates(names: Sequence[str], pairs: np.ndarray, resamples: int, seed: int) -> Json:
    estimates = cluster_bootstrap(pairs[:, :, 0], pairs[:, :, 1], resamples, seed)
    return {
        name: _shown(share_interval(estimate, len(pairs)) if name.startswith(_SHARES) else estimate)
        for name, estimate in zip(names, estimates, strict=True)
    }


def _shown(estimate: Estimate) -> Json:
    interval = None if estimate.low is None else [round(estimate.low, _DIGITS), round(estimate.high, _DIGITS)]
    return {"value": round(estimate.value, _DIGITS), "ci95": interval}


def equal_tokens(by_mode: Mapping[str, Sequence[Sampled]], resamples: int, seed: int) -> Json:
    """`{budget: mean tokens a problem, modes: {mode: {samples, mean, majority, pass}}}`; see the head of this file."""
    budgets = [min(s.tokens for s in same) for same in zip(*by_mode.values(), strict=True)]
    out: Json = {"budget": round(sum(budgets) / len(budgets), _DIGITS), "modes": {}}
    for mode, samples in by_mode.items():
        bought = [
            s.k * budget / s.tokens if s.tokens else float(s.k) for s, budget in zip(samples, budgets, strict=True)
        ]
        rows = []
        for s, m in zip(samples, bought, strict=True):
            around = {math.floor(m), math.ceil(m)}
            rows.append(
                (
                    s.correct / s.k,
                    between(m, {size: s.majority(size, seed) for size in around}),
                    between(m, {size: pass_at(s.k, s.correct, size) for size in around}),
                )
            )
        values = np.array(rows)
        pairs = np.stack([values, np.ones_like(values)], axis=2)
        out["modes"][mode] = {
            "samples": round(sum(bought) / len(bought), _DIGITS),
            **_estimates(["mean", "majority", "pass"], pairs, resamples, seed),
        }
    return out


def _problem(s: Sampled, seed: int) -> Json:
    """What a comparison with another report needs of a problem."""
    return {
        "id": s.id,
        "correct": s.correct,
        "majority": s.majority(s.k, seed),
        "parallel": sum(row["parallel"] for row in s.rows),
        "total_tokens": s.tokens,
        "critical_tokens": sum(row["critical_tokens"] for row in s.rows),
    }
