"""The optimizer steps of one iteration: from rows with advantages to new weights and to numbers that say what happened.

Knows nothing of Lightning: a `Host` computes gradients and steps. Every rank makes the same calls in the same order,
whatever its share of the data is, since each forward and backward pass may be a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel_r1.methods import Objective
from parallel_r1.modules.batching import Row
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


class Host(Protocol):
    """What an update needs from whoever owns the model and the optimizer."""

    def packs(self, rows: Sequence[Row], least: int = 0) -> list[Pack]:
        """Forward passes of rows, as many on every rank, empty ones where a rank has fewer; at least `least`."""

    def over_ranks(self, value: Tensor, op: str = "sum") -> Tensor:
        """Reduce a value over all ranks: `sum` or `max`."""

    def backward_sum(self, loss_sum: Tensor, denominator: float) -> None:
        """Add the gradient of loss_sum / denominator, summed over ranks."""

    def apply_gradients(self) -> Tensor:
        """One optimizer step; returns the norm of the gradient."""


@dataclass(frozen=True)
class Step:
    """One optimizer step. idle: passes whose rows have no gradient; they are measured only."""

    active: list[Pack]
    idle: list[Pack]
    denominator: float


def update(
    host: Host,
    groups: Sequence[Sequence[Row]],
    objective: Objective,
    score: Score,
    reference: Score | None = None,
    mini_batches: int = 1,
    epochs: int = 1,
) -> dict[str, float]:
    """`epochs` times `mini_batches` optimizer steps on groups of rows. objective: settled, without nulls.

    reference: scores under the policy the stage started from; needed where kl_coef is not 0. Returns metrics.
    """
    tally = Tally()
    steps = [plan(host, [row for g in groups[i::mini_batches] for row in g], objective) for i in range(mini_batches)]
    with torch.no_grad():
        for step in steps:
            for pack in step.idle:
                scores = score(pack)
                tally.add("policy/entropy", scores.entropy)
                gap(tally, pack, scores.logprobs)
        several = len(steps) * epochs > 1
        fixed = [[_fixed(pack, objective, score, reference, several) for pack in step.active] for step in steps]
    for epoch in range(epochs):
        for number, step in enumerate(steps):
            for pack, (old, ref) in zip(step.active, fixed[number], strict=True):
                scores = score(pack)
                if old is None:  # one step: the policy has not moved, so its own log-probabilities are the old ones
                    old = scores.logprobs.detach()
                if epoch == 0:
                    tally.add("policy/entropy", scores.entropy)
                    if objective.old_logprobs == "trainer":
                        gap(tally, pack, old)
                    elif number == 0:
                        gap(tally, pack, scores.logprobs.detach())
                loss = pack_loss(pack, scores, old, ref, objective, tally)
                host.backward_sum(loss, step.denominator)
                tally.total("policy/loss", loss / (step.denominator * len(steps) * epochs))
            tally.add("policy/grad_norm", host.apply_gradients().reshape(1))
    return tally.metrics(host.over_ranks)


def plan(host: Host, rows: Sequence[Row], objective: Objective) -> Step:
    """Cut the rows of one optimizer step into passes. Rows of zero advantage count in the mean but need no gradient."""
    trained = [row for row in rows if any(row.rollout.sampled)]
    regularised = objective.kl_coef > 0 or objective.entropy_coef > 0
    active = [row for row in trained if regularised or row.advantage != 0]
    idle = [row for row in trained if not regularised and row.advantage == 0]
    counts = torch.tensor([sum(sum(row.rollout.sampled) for row in trained), len(trained)], dtype=torch.float64)
    tokens, responses = host.over_ranks(counts).tolist()
    length = objective.constant_length
    # one pass at least, so that every parameter has a gradient, a zero if need be
    passes = host.packs(active, least=1)
    return Step(passes, host.packs(idle), denominator(tokens, responses, objective.aggregation, length))


def _fixed(
    pack: Pack, objective: Objective, score: Score, reference: Score | None, several: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Log-probabilities that stay as they are while the policy moves: the old ones, and the reference's."""
    old = score(pack).logprobs if several and objective.old_logprobs == "trainer" else None
    if objective.old_logprobs == "engine":
        old = pack.engine_logprobs
    return old, reference(pack).logprobs if objective.kl_coef > 0 else None


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
