"""Advantages and losses: pure functions, tensors in, tensors out. The choices stand in `methods.Objective`.

Losses return SUMS over tokens. The caller divides by a denominator of the whole optimizer step, over all micro-batches
and ranks, so that how a step is split never changes its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_r1.methods import Advantage, Aggregation, Kl, Mismatch, Objective, Std

Moments = Callable[[Tensor], tuple[float, float]]


# --------------------------------------------------------------------------- advantages


def local_moments(values: Tensor) -> tuple[float, float]:
    """Mean and unbiased deviation of a batch that lies on one rank; no deviation of fewer than two values."""
    return float(values.mean()), float(values.std()) if values.numel() > 1 else 0.0


def advantages(
    rewards: Tensor, kind: Advantage = "grpo", std: Std = "group", moments: Moments = local_moments, eps: float = 1e-4
) -> Tensor:
    """Advantages of P groups of G responses. rewards: [P, G] -> [P, G].

    grpo          r - mean of the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2)
    rloo          r - mean of the others (arXiv 2402.14740, eq. 9): G / (G - 1) times the former
    reinforce_pp  r - mean of the group, then scaled over the batch (REINFORCE++-baseline, arXiv 2501.03262)

    std: divide by (deviation + eps) of the `group` (GRPO), of all rewards of the `batch` for grpo and rloo (TRL's
    scale_rewards=batch), of all centred rewards for reinforce_pp; `none` does not (Dr. GRPO, arXiv 2503.20783).
    Deviations are unbiased. moments: mean and deviation over all ranks; called on every rank or on none.
    A group of one and a group whose rewards are all equal give exactly zero, whatever float sums say.
    """
    size = rewards.shape[1]
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    centred = (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(equal, 0.0)
    if kind == "rloo" and size > 1:
        centred = centred * (size / (size - 1))
    if std == "group" and size > 1:
        centred = centred / (rewards.std(dim=1, keepdim=True) + eps)
    elif std == "batch":
        centred = centred / (moments(centred if kind == "reinforce_pp" else rewards)[1] + eps)
    return centred.masked_fill(equal, 0.0)


# --------------------------------------------------------------------------- the policy's side


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, banned: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, in float32 nats.

    logits: [..., V], targets: [...] int64. The distribution is the one the engine sampled from: softmax(logits /
    temperature) over the vocabulary without `banned`. Returns two tensors [...]; the entropy carries no gradient.
    """
    scaled = logits.float() / temperature
    if banned:
        scaled = scaled.index_fill(-1, torch.tensor(banned, device=scaled.device), float("-inf"))
    logp = torch.log_softmax(scaled, dim=-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp.masked_fill(logp == float("-inf"), 0.0)).sum(dim=-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def log_ratios(new: Tensor, old: Tensor, response: Tensor, responses: int, sequence: bool) -> Tensor:
    """log(new / old) of N tokens, or, with `sequence`, its mean over each token's response (GSPO, arXiv 2507.18071).

    new, old: [N] float32 nats; response: [N] int64 in 0 ... responses - 1. Returns [N].
    """
    delta = new - old
    if not sequence:
        return delta
    return _per_response(delta, response, responses, mean=True)[response]


class Surrogate(NamedTuple):
    """N tokens. value: what is minimised, differentiable; ratio: new / old; low, high: bool, where the clip cut."""

    value: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor


def surrogate(log_ratio: Tensor, logprobs: Tensor, advantage: Tensor, objective: Objective) -> Surrogate:
    """The loss of each of N tokens before any weight. log_ratio, logprobs, advantage: [N] float32.

    With rho the ratio (of the token; of its sequence for gspo) and bounds 1 - clip_low, 1 + clip_high:
    ppo, dapo, dr_grpo, gspo  -min(rho A, clip(rho) A)  (PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv
                              2503.14476, eq. 10). dual_clip c: never below c A where A < 0 (arXiv 1912.09729, eq. 5).
    cispo                     -stop_gradient(min(rho, 1 + clip_high)) A log p  (MiniMax-M1, arXiv 2506.13585, eq. 4-5,
                              which sets no lower bound either)
    """
    ratio = log_ratio.exp()
    floor, cap = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    if objective.loss == "cispo":
        value = -ratio.clamp(max=cap).detach() * advantage * logprobs
        return Surrogate(value, ratio, torch.zeros_like(ratio, dtype=torch.bool), ratio > cap)
    gain = torch.minimum(ratio * advantage, ratio.clamp(floor, cap) * advantage)
    if objective.dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, objective.dual_clip * advantage), gain)
    return Surrogate(-gain, ratio, (ratio < floor) & (advantage < 0), (ratio > cap) & (advantage > 0))


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: Kl) -> Tensor:
    """Estimate of KL(policy, reference) at each of N sampled tokens, with d = log p - log ref: Schulman's estimators
    (http://joschu.net/blog/kl-approx.html). k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d, which GRPO uses (eq. 4).

    As a loss, the gradient of k1 is zero on average on policy: choose k2 or k3 to hold the policy back.
    """
    d = logprobs - reference
    if kind == "k1":
        return d
    return 0.5 * d * d if kind == "k2" else torch.exp(-d) - 1.0 + d


def token_weights(response: Tensor, responses: int, aggregation: Aggregation) -> Tensor:
    """[N] weight of each token in the sum: 1, or 1 / (trained tokens of its response) for sequence_mean.

    response: [N] int64. A response lies in one micro-batch whole, so this needs no other.
    """
    if aggregation != "sequence_mean":
        return torch.ones_like(response, dtype=torch.float32)
    return 1.0 / torch.bincount(response, minlength=responses).clamp(min=1)[response].float()


def denominator(tokens: float, responses: float, aggregation: Aggregation, length: int) -> float:
    """What the sum over a whole optimizer step is divided by. tokens, responses: trained, over micro-batches and ranks.

    token_mean: all tokens (DAPO, eq. 10); sequence_mean: responses (GRPO, eq. 3); constant: responses * length (Dr.
    GRPO).
    """
    value = {"token_mean": tokens, "sequence_mean": responses, "constant": responses * length}[aggregation]
    return max(value, 1.0)


# --------------------------------------------------------------------------- rollout mismatch


class Correction(NamedTuple):
    """[N] each. weight: multiplies the loss, no gradient; ratio: trainer / engine before any bound; masked: bool."""

    weight: Tensor
    ratio: Tensor
    masked: Tensor


@torch.no_grad()
def mismatch_correction(
    trainer: Tensor, engine: Tensor, response: Tensor, responses: int, kind: Mismatch, low: float, high: float
) -> Correction:
    """Importance weights for tokens that the engine drew with probabilities other than the trainer's.

    trainer, engine: [N] log-probabilities (nats) of one policy; response: [N] int64.
    *_truncate  min(ratio, high): truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
                brings you off-policy RL training")
    *_mask      the ratio inside [low, high], 0 outside (IcePop; Ling team 2025, "Small leak can sink a great ship")
    token_* takes the ratio of the token, sequence_* the product over its response.
    """
    delta = trainer - engine
    if kind.startswith("sequence"):
        delta = _per_response(delta, response, responses, mean=False)[response]
    ratio = delta.exp()
    outside = (ratio < low) | (ratio > high)
    if kind == "none":
        return Correction(torch.ones_like(ratio), ratio, torch.zeros_like(outside))
    if kind.endswith("truncate"):
        return Correction(ratio.clamp(max=high), ratio, torch.zeros_like(outside))
    return Correction(torch.where(outside, 0.0, ratio), ratio, outside)


# --------------------------------------------------------------------------- padded rows, the plain form


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over trained tokens. loss: differentiable; clipped_low, clipped_high: tokens whose ratio was clipped."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """`surrogate` of padded rows, summed. logprobs, old_logprobs: [R, T] float32; advantages: [R]; mask: [R, T] bool.

    An empty mask gives a zero that still has a gradient function: a rank without data must not skip a collective.
    """
    # indexing drops masked positions altogether, so that one can never bring inf * 0 into the sum
    new, old = logprobs[mask], old_logprobs[mask]
    objective = Objective(loss="ppo", clip_low=clip_low, clip_high=clip_high)
    out = surrogate(new - old, new, advantages[:, None].expand_as(mask)[mask], objective)
    return PolicyLoss(out.value.sum(), out.low.sum(), out.high.sum())


def _per_response(values: Tensor, response: Tensor, responses: int, mean: bool) -> Tensor:
    """[S] sums or means of [N] values over each response."""
    sums = values.new_zeros(responses).index_add(0, response, values)
    return sums / torch.bincount(response, minlength=responses).clamp(min=1) if mean else sums
