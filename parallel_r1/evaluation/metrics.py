"""Metrics over judged responses, by tier. Exact definitions stand beside each name in `TierMetrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torchmetrics import Metric

from parallel_r1.types import Judged

_FIELDS = ("n", "correct", "parallel", "valid", "truncated", "critical", "total", "budgeted", "in_budget")


class TierMetrics(Metric):
    """Means over responses, one set a tier; sums are reduced over ranks.

    `<tier>/accuracy`: share judged right; `accuracy_ci95`: half-width of its 95 % Wilson interval;
    `parallel_ratio`: share with at least one well-formed block; `format_valid`: share that finished and obeys the
    grammar; `truncated`: share cut by the length limit; `critical_tokens`, `total_tokens`: mean counts a response;
    `accuracy_at_critical`: share that is right within `problem.meta["critical_budget"]` critical tokens (only where
    every problem of the tier states one); `n`: responses.
    """

    full_state_update = False

    def __init__(self, tiers: Sequence[str]) -> None:
        super().__init__()
        self.tiers = tuple(tiers)
        self.add_state("sums", torch.zeros(len(self.tiers), len(_FIELDS), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, judged: Sequence[Judged]) -> None:
        for j in judged:
            budget = j.problem.meta.get("critical_budget")
            row = (
                1,
                j.correct,
                j.response.is_parallel,
                j.finished and j.response.well_formed,
                not j.finished,
                j.critical_tokens,
                j.total_tokens,
                budget is not None,
                budget is not None and j.correct and j.critical_tokens <= budget,
            )
            self.sums[self.tiers.index(j.problem.tier)] += self.sums.new_tensor(row)

    def compute(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for tier, sums in zip(self.tiers, self.sums.tolist(), strict=True):
            s = dict(zip(_FIELDS, sums, strict=True))
            n = s["n"]
            if not n:
                continue
            out |= {
                f"{tier}/accuracy": s["correct"] / n,
                f"{tier}/accuracy_ci95": wilson_half_width(s["correct"] / n, n),
                f"{tier}/parallel_ratio": s["parallel"] / n,
                f"{tier}/format_valid": s["valid"] / n,
                f"{tier}/truncated": s["truncated"] / n,
                f"{tier}/critical_tokens": s["critical"] / n,
                f"{tier}/total_tokens": s["total"] / n,
                f"{tier}/n": n,
            }
            if s["budgeted"] == n:
                out[f"{tier}/accuracy_at_critical"] = s["in_budget"] / n
        return out


def wilson_half_width(p: float, n: float, z: float = 1.959964) -> float:
    """Half-width of the Wilson score interval of a share p of n (Wilson 1927). n > 0."""
    return z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
