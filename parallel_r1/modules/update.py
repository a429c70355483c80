"""The optimizer steps of one iteration: from rows with advantages to new weights and to numbers that say what happened.

Knows nothing of Lightning: a `Host` computes gradients and steps. Every rank makes the same calls in the same order,
whatever its share of the data is, since each forward and backward pass may be a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from parallel_r1.methods import Objective
from parallel_r1.modules.batching import Pass, Row
from parallel_r1.modules.tally import Tally
from parallel_r1.objective import (
    Correction,
    denominator,
    kl_estimate,
    log_ratios,
    mismatch_correction,
    surrogate,
    token_weights,
)
from parallel_r1.scores import TokenScores
from parallel_r1.types import SEGMENT_KINDS, Pack

Score = Callable[[Pack], TokenScores]
Fixed = tuple[Tensor | None, Tensor | None]
"""Log-probabilities [N] of a pass under the old policy and under the reference."""


class Host(Protocol):
    """What an update needs from whoever owns the model and the optimizer."""

    def packs(self, rows: Sequence[Row], least: int = 0) -> list[Pass]:
        """Forward passes of rows, as many on every rank, empty ones where a rank has fewer; at least `least`."""

    def over_ranks(self, value: Tensor, op: str = "sum") -> Tensor:
        """Reduce a value over all ranks: `sum` or `max`."""

    def attempt(self, work: Callable[[], Tally], rows: Sequence[Row], before_retry: Callable[[], None]) -> Tally:
        """Do work on rows; where memory runs out: drop gradients, make `packs` cut finer, and do it again."""

    def backward_sum(self, loss_sum: Tensor, denominator: float) -> None:
        """Add the gradient of loss_sum / denominator, summed over ranks."""

    def apply_gradients(self) -> Tensor:
        """One optimizer step; returns the norm of the gradient."""


@dataclass
class Step:
    """One optimizer step: rows that are trained, rows without gradient (`idle`), and its passes with what stays fixed.

    share: of a mean over all steps of the iteration.
    """

    active: list[Row]
    idle: list[Row]
    denominator: float
    share: float
    passes: list[tuple[Pass, Fixed]] = field(default_factory=list)

    def cut_again(self, host: Host) -> None:
        """Other passes of the same rows; what was fixed moves along."""
        known: dict[int, Fixed] = {}
        nothing = tuple(None if values is None else values[:0] for values in self.passes[0][1])
        for part, fixed in self.passes:
            sizes = [sum(row.rollout.sampled) for row in part.rows]
            columns = [[None] * len(sizes) if values is None else values.split(sizes) for values in fixed]
            known |= {id(row): tuple(values) for row, *values in zip(part.rows, *columns, strict=True)}
        self.passes = []
        for part in host.packs(self.active, least=1):
            columns = zip(nothing, *(known[id(row)] for row in part.rows), strict=True)
            fixed = (None if parts[0] is None else torch.cat(parts) for parts in columns)
            self.passes.append((part, tuple(fixed)))


def update(
    host: Host,
    groups: Sequence[Sequence[Row]],
    objective: Objective,
    score: Score,
    reference: Score | None = None,
    mini_batches: int = 1,
    epochs: int = 1,
    share: tuple[int, int] = (0, 1),
) -> dict[str, float]:
    """`epochs` times `mini_batches` optimizer steps on groups of rows. objective: settled, without nulls.

    reference: scores under the policy the stage started from; needed where kl_coef is not 0. share: (rank, ranks):
    group p here is number p * ranks + rank of all, and a mini-batch holds consecutive numbers. Returns metrics.
    """
    several = mini_batches * epochs > 1
    total = max(1, int(host.over_ranks(torch.tensor(float(len(groups))))))
    part = [min((p * share[1] + share[0]) * mini_batches // total, mini_batches - 1) for p in range(len(groups))]
    steps = [
        plan(
            host,
            [row for g, k in zip(groups, part, strict=True) if k == i for row in g],
            objective,
            mini_batches * epochs,
        )
        for i in range(mini_batches)
    ]
    rows = [row for step in steps for row in step.active + step.idle]
    first = partial(before_the_steps, host, steps, objective, score, reference, several)
    tally = host.attempt(first, rows, lambda: None)
    for epoch in range(epochs):
        for number, step in enumerate(steps):
            # of an iteration's rollouts the gap is measured once, and before the policy moves where that can be
            measure_gap = epoch == 0 and (objective.old_logprobs == "trainer" or number == 0)
            work = partial(gradient, host, step, objective, score, epoch == 0, measure_gap)
            tally.join(host.attempt(work, step.active, partial(step.cut_again, host)))
            tally.add("policy/grad_norm", host.apply_gradients().reshape(1))
    return tally.metrics(host.over_ranks)


def plan(host: Host, rows: Sequence[Row], objective: Objective, steps: int = 1) -> Step:
    """The rows of one of several optimizer steps. Those of zero advantage count in the mean but need no gradient."""
    trained = [row for row in rows if any(row.rollout.sampled)]
    regularised = objective.kl_coef > 0 or objective.entropy_coef > 0
    active = [row for row in trained if regularised or row.advantage != 0]
    idle = [row for row in trained if not regularised and row.advantage == 0]
    counts = torch.tensor([sum(sum(row.rollout.sampled) for row in trained), len(trained)], dtype=torch.float64)
    tokens, responses = host.over_ranks(counts).tolist()
    length = objective.constant_length
    return Step(active, idle, denominator(tokens, responses, objective.aggregation, length), 1 / steps)


@torch.no_grad()
def before_the_steps(
    host: Host,
    steps: Sequence[Step],
    objective: Objective,
    score: Score,
    reference: Score | None,
    several: bool,
) -> Tally:
    """Cut every step into passes, measure what has no gradient, and keep what stays fixed while the policy moves."""
    tally = Tally()
    for step in steps:
        for part in host.packs(step.idle):
            scores = score(part.pack)
            tally.add("policy/entropy", scores.entropy)
            gap(tally, part.pack, scores.logprobs)
        # one pass at least, so that every parameter has a gradient, a zero if need be
        parts = host.packs(step.active, least=1)
        step.passes = [(part, _fixed(part.pack, objective, score, reference, several)) for part in parts]
    return tally


def _fixed(pack: Pack, objective: Objective, score: Score, reference: Score | None, several: bool) -> Fixed:
    """Log-probabilities of the old policy and of the reference; None for what is not needed or not known yet."""
    old = score(pack).logprobs if several and objective.old_logprobs == "trainer" else None
    if objective.old_logprobs == "engine":
        old = pack.engine_logprobs
    return old, reference(pack).logprobs if objective.kl_coef > 0 else None


def gradient(
    host: Host, step: Step, objective: Objective, score: Score, measure_entropy: bool, measure_gap: bool
) -> Tally:
    """Accumulate the gradient of one optimizer step, pass by pass. Returns what was measured on the way."""
    tally = Tally()
    for part, (old, reference) in step.passes:
        pack = part.pack
        scores = score(pack)
        new = scores.logprobs.detach()
        if old is None:  # one step: the policy has not moved, so its own log-probabilities are the old ones
            old = new
        if measure_entropy:
            tally.add("policy/entropy", scores.entropy)
        if measure_gap:
            gap(tally, pack, old if objective.old_logprobs == "trainer" else new)
        loss = pack_loss(pack, scores, old, reference, objective, tally)
        host.backward_sum(loss, step.denominator)
        tally.total("policy/loss", loss * (step.share / step.denominator))
    return tally


def pack_loss(
    pack: Pack, scores: TokenScores, old: Tensor, reference: Tensor | None, objective: Objective, tally: Tally
) -> Tensor:
    """The weighted sum of the loss over the tokens of one pass; differentiable even where there is none."""
    new, response, responses = scores.logprobs, pack.response, len(pack.advantages)
    log_ratio = log_ratios(new, old, response, responses, sequence=objective.loss == "gspo")
    out = surrogate(log_ratio, new, pack.advantages[response], objective)
    bounds = objective.mismatch_low, objective.mismatch_high
    correction = mismatch_correction(old, pack.engine_logprobs, response, responses, objective.mismatch, *bounds)
    value = out.value * correction.weight
    if reference is not None:
        kl = kl_estimate(new, reference, objective.kl)
        value = value + objective.kl_coef * kl
        tally.add("policy/reference_kl", kl)
    if objective.entropy_coef:
        value = value - objective.entropy_coef * scores.entropy
    _measure_loss(tally, out.ratio, log_ratio, out.low, out.high, correction)
    return (value * token_weights(response, responses, objective.aggregation)).sum()


# --------------------------------------------------------------------------- what is measured


def gap(tally: Tally, pack: Pack, trainer: Tensor) -> None:
    """|trainer - engine| over every sampled token, before any clip or weight, and by segment."""
    difference = (trainer - pack.engine_logprobs).abs()
    tally.add("rollout_logprob_gap", difference, "mean", "max")
    for k, kind in enumerate(SEGMENT_KINDS):
        tally.add(f"rollout_logprob_gap/{kind}", difference[pack.kind == k], "mean", "max")


def _measure_loss(
    tally: Tally, ratio: Tensor, log_ratio: Tensor, low: Tensor, high: Tensor, correction: Correction
) -> None:
    tally.add("policy/clip_fraction", low | high)
    tally.add("policy/clip_fraction_low", low)
    tally.add("policy/clip_fraction_high", high)
    tally.add("policy/approx_kl", ratio - 1.0 - log_ratio)  # of the old policy to the new one, k3
    tally.add("policy/ratio", ratio, "mean", "min", "max")
    tally.add("rollout_mismatch/ratio", correction.ratio, "mean", "min", "max")
    tally.add("rollout_mismatch/masked_fraction", correction.masked)
