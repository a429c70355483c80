"""What k samples a problem say about a policy: estimates and their 95 % intervals. NumPy only, nothing of models.

Problems are what is drawn at random: samples of one problem are alike, so an interval comes from drawing whole problems
anew (cluster bootstrap), never single samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MAX_SUBSETS = 512
"""Subsets of samples that `subsets` goes through; where there are more it draws so many."""
MAX_EXACT_SIGNS = 14
"""Differing problems up to which the paired test tries all 2^d signs."""
SIGN_DRAWS = 20_000


def pass_at(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k), the chance that k of n samples without replacement hold a right one.

    Chen et al. 2021 (arXiv 2107.03374). 0 <= k <= n; pass@0 is 0.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at(n: int, correct: int, k: int) -> float:
    """Bootstrap best@k: the expected maximum of k draws WITH replacement from the n samples, 1 - (1 - c/n)^k.

    What the public code of Parallel-R1 reports as pass@k; lower than pass@k, and never 1 unless all are right.
    """
    return 1.0 - (1.0 - correct / n) ** k


def powers_up_to(k: int) -> list[int]:
    """2, 4, 8, ... up to k, and k itself; nothing for k = 1."""
    return sorted({2**i for i in range(1, k.bit_length()) if 2**i <= k} | ({k} if k > 1 else set()))


# ------------------------------------------------------------------ majority


def majority(votes: NDArray[np.int64], right: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> Array:
    """[S] the score of the majority answer in each of S subsets of a problem's k samples.

    votes: [k] the group of each sample's answer (0, 1, ...), -1 for a sample without one, which casts no vote. right:
    [groups] whether an answer is right. chosen: [S, k] the samples of each subset. The group with the most votes wins;
    a tie counts as the share of right groups among those tied, which is what choosing one at random gives on average;
    no vote at all counts as wrong.
    """
    if not len(right):
        return np.zeros(len(chosen))
    counts = chosen.astype(np.int64) @ (votes[:, None] == np.arange(len(right)))
    most = counts.max(axis=1, keepdims=True)
    leading = (counts == most) & (most > 0)
    return (leading & right).sum(axis=1) / np.maximum(leading.sum(axis=1), 1)


def subsets(n: int, size: int, seed: int) -> NDArray[np.bool_]:
    """[S, n] subsets of `size` out of n samples: all of them up to MAX_SUBSETS, else so many drawn at random."""
    if math.comb(n, size) <= MAX_SUBSETS:
        members = np.array(list(combinations(range(n), size)), dtype=np.int64).reshape(math.comb(n, size), size)
    else:
        members = np.random.default_rng([seed, n, size]).random((MAX_SUBSETS, n)).argsort(axis=1)[:, :size]
    chosen = np.zeros((len(members), n), dtype=bool)
    chosen[np.arange(len(members))[:, None], members] = True
    return chosen


def between(x: float, at: dict[int, float]) -> float:
    """Linear interpolation of a function known at integers. at: needs floor(x) and ceil(x)."""
    low = math.floor(x)
    share = x - low
    return at[low] if share == 0 else (1 - share) * at[low] + share * at[low + 1]


# ------------------------------------------------------------------ intervals


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; low and high are None where one problem alone says nothing about others."""

    value: float
    low: float | None
    high: float | None


def student_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t as expanded by Fisher and Cornish (1960): within 1 % from 5 degrees of freedom on."""
    z, n = NormalDist().inv_cdf(p), float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / n ** (i + 1) for i, term in enumerate(terms))


def tail(problems: int) -> float:
    """The share to cut off each end of bootstrap means of so many problems for a 95 % interval.

    Expanded percentile interval (Hesterberg 2015, The American Statistician 69, section 3.3): a bootstrap knows the
    spread of n problems with n in place of n - 1, and the normal in place of Student's t; both make plain 2.5 %
    tails too narrow where problems are few.
    """
    return NormalDist().cdf(-math.sqrt(problems / (problems - 1)) * student_quantile(0.975, problems - 1))


def cluster_bootstrap(sums: Array, weights: Array, resamples: int, seed: int) -> list[Estimate]:
    """Estimates of M ratios of sums over P problems, `sums.sum(0) / weights.sum(0)`, with their intervals.

    sums, weights: [P, M]; a mean over problems has weights of one. All M see the same resamples. Resamples in which a
    ratio has no weight say nothing about it; a ratio without any weight has the value NaN.
    """
    n = len(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = sums.sum(axis=0) / weights.sum(axis=0)
        if n < 2:
            return [Estimate(float(value), None, None) for value in values]
        rng = np.random.default_rng([seed, n])
        parts = []
        for start in range(0, resamples, 256):
            counts = rng.multinomial(n, np.full(n, 1 / n), size=min(256, resamples - start)).astype(np.float64)
            parts.append((counts @ sums) / (counts @ weights))
    drawn = np.concatenate(parts)
    cut = tail(n)
    out = []
    for value, column in zip(values, drawn.T, strict=True):
        known = column[np.isfinite(column)]
        if not len(known):
            out.append(Estimate(float(value), None, None))
            continue
        low, high = np.quantile(known, [cut, 1 - cut])
        out.append(Estimate(float(value), float(low), float(high)))
    return out


def share_interval(estimate: Estimate, problems: int) -> Estimate:
    """The interval of a share of which every problem says 0, or every problem 1: there a bootstrap sees no spread.

    Wilson's (1927) for that many independent trials, one a problem; any other estimate comes back as it is.
    """
    if estimate.value not in (0.0, 1.0) or estimate.low is None:
        return estimate
    z = NormalDist().inv_cdf(0.975)
    reach = z * z / (problems + z * z)
    return Estimate(estimate.value, 0.0, reach) if estimate.value == 0 else Estimate(estimate.value, 1 - reach, 1.0)


def sign_flip_test(differences: Sequence[float] | Array, seed: int) -> float:
    """Two-sided p-value of paired differences under the hypothesis that each could as well have the other sign.

    Exact over all signs for up to MAX_EXACT_SIGNS problems that differ, else by SIGN_DRAWS draws, the observed one
    counted in (Phipson and Smyth 2010), so that it is never 0.
    """
    d = np.asarray(differences, dtype=np.float64)
    d = d[d != 0]
    if not len(d):
        return 1.0
    observed = abs(d.sum()) * (1 - 1e-12)  # equal sums in another order are equal
    if len(d) <= MAX_EXACT_SIGNS:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(d))))
        return float((np.abs(signs @ d) >= observed).mean())
    rng, extreme = np.random.default_rng([seed, len(d)]), 0
    for start in range(0, SIGN_DRAWS, 1000):
        signs = rng.integers(0, 2, size=(min(1000, SIGN_DRAWS - start), len(d))) * 2.0 - 1.0
        extreme += int((np.abs(signs @ d) >= observed).sum())
    return (extreme + 1) / (SIGN_DRAWS + 1)
