"""Sums on the way to metrics: kept as tensors (no synchronisation a micro-batch), reduced over ranks at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

OverRanks = Callable[[Tensor, str], Tensor]


Statistic = Literal["mean", "std", "min", "max"]


@dataclass
class Tally:
    """Statistics and totals by name. Every rank adds under the same names in the same order, if only nothing."""

    _sums: dict[str, Tensor] = field(default_factory=dict)
    _extremes: dict[str, Tensor] = field(default_factory=dict)
    _statistics: dict[str, tuple[Statistic, ...]] = field(default_factory=dict)
    _totals: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, *statistics: Statistic) -> None:
        """Take values [n] in; n may be 0. Reported: `<name>/<statistic>` for those named, and the mean as `<name>`
        itself where `mean` is not one of them.
        """
        x = values.detach().double()
        sums = torch.stack([x.sum(), (x * x).sum(), x.new_tensor(float(len(x)))])
        nothing = x.new_full((1,), float("-inf"))
        extremes = torch.stack([torch.cat([-x, nothing]).max(), torch.cat([x, nothing]).max()])
        self._statistics[name] = statistics
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        self._extremes[name] = torch.maximum(self._extremes[name], extremes) if name in self._extremes else extremes

    def total(self, name: str, value: Tensor) -> None:
        """Add to a sum that is reported as it is."""
        added = value.detach().double()
        self._totals[name] = self._totals[name] + added if name in self._totals else added

    def join(self, other: Tally) -> None:
        """Take in all that another tally holds."""
        for name, sums in other._sums.items():
            known = name in self._sums
            self._sums[name] = self._sums[name] + sums if known else sums
            extremes = other._extremes[name]
            self._extremes[name] = torch.maximum(self._extremes[name], extremes) if known else extremes
            self._statistics[name] = other._statistics[name]
        for name, value in other._totals.items():
            self.total(name, value)

    def metrics(self, over_ranks: OverRanks) -> dict[str, float]:
        """What was added, over all ranks, but for names that got no value on any. `std` is the population's."""
        out: dict[str, float] = {}
        if self._totals:
            totals = over_ranks(torch.stack(list(self._totals.values())), "sum").tolist()
            out |= dict(zip(self._totals, totals, strict=True))
        if not self._sums:
            return out
        sums = over_ranks(torch.stack(list(self._sums.values())), "sum").tolist()
        extremes = over_ranks(torch.stack(list(self._extremes.values())), "max").tolist()
        for name, (x, square, n), (low, high) in zip(self._sums, sums, extremes, strict=True):
            if not n:
                continue
            mean = x / n
            known = {"mean": mean, "std": max(square / n - mean * mean, 0.0) ** 0.5, "min": -low, "max": high}
            asked = self._statistics[name]
            if "mean" not in asked:
                out[name] = mean
            out |= {f"{name}/{statistic}": known[statistic] for statistic in asked}
        return out


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory in GB (1e9 bytes): of the device since the last call; on a CPU, of the process since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
