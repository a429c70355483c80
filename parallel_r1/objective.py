"""Advantages and losses: pure functions, tensors in, tensors out.

Losses return SUMS over tokens. The caller divides by the number of trained tokens of the whole optimizer step, over all
micro-batches and ranks, so that how a step is split never changes its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def group_advantages(rewards: Tensor, normalize_std: bool = True, eps: float = 1e-4) -> Tensor:
    """GRPO advantages (DeepSeekMath, arXiv 2402.03300, eq. 3): (r - mean) / (std + eps) inside each group.

    rewards: [P, G]. normalize_std=False leaves the division out (Dr. GRPO, arXiv 2503.20783). The deviation is the
    unbiased one. A group of one and a group whose rewards are all equal give exactly zero.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    if normalize_std and rewards.shape[1] > 1:
        centred = centred / (rewards.std(dim=1, keepdim=True) + eps)
    return centred.masked_fill(equal, 0.0)


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
    """The clipped surrogate (PPO, arXiv 1707.06347, eq. 7) with asymmetric bounds (DAPO, arXiv 2503.14476, eq. 10).

    logprobs, old_logprobs: [R, T] float32; advantages: [R]; mask: [R, T] bool, True on tokens the policy sampled.
    Per token: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(logprobs - old_logprobs).
    An empty mask gives a zero that still has a gradient function: a rank without data must not skip a collective.
    """
    # the mask comes first, so that a padded position can never bring inf * 0 into the sum
    delta = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = delta.exp()
    advantage = advantages[:, None].expand_as(ratio)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -torch.minimum(ratio * advantage, clipped * advantage)
    low = mask & (ratio < 1.0 - clip_low) & (advantage < 0)
    high = mask & (ratio > 1.0 + clip_high) & (advantage > 0)
    return PolicyLoss(torch.where(mask, per_token, 0.0).sum(), low.sum(), high.sum())


def sft_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Sum of the cross-entropy (nats) over the tokens where mask is True. logits: [R, T, V], targets, mask: [R, T]."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return torch.where(mask, losses, 0.0).sum()
