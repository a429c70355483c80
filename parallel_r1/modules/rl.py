"""Reinforcement learning: GRPO with verifiable rewards on rollouts of the current policy."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import AdamW

from parallel_r1.modules.base import Schedule, StageModule
from parallel_r1.modules.batching import Row
from parallel_r1.modules.responder import Generation, Mode
from parallel_r1.objective import group_advantages, policy_loss
from parallel_r1.reward.rewards import Accuracy, Reward, Scores
from parallel_r1.types import Judged, PolicyBatch, Problem, Rollout


class RLModule(StageModule):
    """Group-relative policy optimisation.

    Args:
        reward: scores judged responses; any `parallel_r1.reward.rewards.Reward`.
        group_size: responses sampled a problem (G).
        generation: how problems become prompts and responses.
        optimizer: makes the optimizer from the parameters.
        schedule: the learning rate over the stage.
        clip_low: lower clip bound of the ratio, 1 - clip_low.
        clip_high: upper clip bound of the ratio, 1 + clip_high.
        normalize_std: divide advantages by the deviation of their group (GRPO); false for Dr. GRPO.
        mini_batches: optimizer steps an iteration; its problems are split evenly over them.
        gradient_clip: limit of the gradient norm; null for none.
        micro_batch_tokens: padded tokens a forward pass may hold; the update does not depend on it.
        max_logprob_gap: stop when the engine's and the trainer's log-probabilities of a sampled token differ by more
            (nats). 1e-4 suits float32; null, never stop, suits bfloat16.
        eval_modes: `free`, and `parallel` / `sequential` to force a block or forbid the tags.
    """

    def __init__(
        self,
        reward: Reward = Accuracy(),  # noqa: B008 - read only
        group_size: int = 8,
        generation: Generation = Generation(),  # noqa: B008
        optimizer: OptimizerCallable = AdamW,
        schedule: Schedule = Schedule(),  # noqa: B008
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        normalize_std: bool = True,
        mini_batches: int = 1,
        gradient_clip: float | None = 1.0,
        micro_batch_tokens: int = 16384,
        max_logprob_gap: float | None = None,
        eval_modes: list[Mode] = ["free"],  # noqa: B006
    ) -> None:
        super().__init__(generation, optimizer, schedule, gradient_clip, micro_batch_tokens, eval_modes)
        self.reward = reward
        self.group_size = group_size
        self.clip_low, self.clip_high = clip_low, clip_high
        self.normalize_std = normalize_std
        self.mini_batches = mini_batches
        self.max_logprob_gap = max_logprob_gap

    def check(self) -> None:
        super().check()
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: GRPO compares the responses of a group, so it needs 2 or more (8 is usual)"
            )
        if self.mini_batches < 1:
            raise ValueError(f"mini_batches={self.mini_batches}: an iteration takes at least one optimizer step")

    @property
    def iteration(self) -> int:
        """Iterations of this stage so far; each makes `mini_batches` optimizer steps."""
        return self.global_step // self.mini_batches

    def training_step(self, problems: list[Problem], batch_idx: int) -> None:
        """One iteration: sync, roll out, judge, reward, advantages, update."""
        iteration = self.iteration
        sync_s = self.responder.refresh()

        start = time.perf_counter()
        rollouts = self.responder.respond(
            problems,
            iteration=self.session.step_offset + iteration,
            group_size=self.group_size,
            share=self.share(),
        )
        rollout_s = time.perf_counter() - start
        judged = self.responder.judge([p for p in problems for _ in range(self.group_size)], rollouts)
        scores = self.reward.score(judged, iteration)
        rewards = torch.tensor(scores.total, dtype=torch.float32).view(len(problems), self.group_size)
        advantages = group_advantages(rewards, self.normalize_std)

        start = time.perf_counter()
        update = self.update(rollouts, advantages)
        update_s = time.perf_counter() - start

        self.log_rollouts(rollouts, judged, scores, advantages, rollout_s)
        self.log_dict({**update, "time/sync_s": sync_s, "time/update_s": update_s}, rank_zero_only=True)
        self.guard(update["rollout_logprob_gap/max"])

    def update(self, rollouts: list[Rollout], advantages: Tensor) -> dict[str, float]:
        """`mini_batches` optimizer steps on rollouts [P * G] with advantages [P, G]. Returns what happened."""
        groups = [
            [Row(r, float(a)) for r, a in zip(rollouts[p * self.group_size :], advantages[p], strict=False)]
            for p in range(len(advantages))
        ]
        sums = UpdateSums.zero(self.device)
        steps = [[row for group in groups[i :: self.mini_batches] for row in group] for i in range(self.mini_batches)]
        prepared = [self.batches(rows) for rows in steps]
        # one step: the policy has not moved since the rollout, so its own log-probabilities are the old ones
        old = [[None] * len(batches) for batches in prepared]
        if self.mini_batches > 1:
            with torch.no_grad():
                old = [[self.logprobs(batch)[0] for batch in batches] for batches in prepared]
        for batches, old_logprobs in zip(prepared, old, strict=True):
            trained = float(self.over_ranks(sum(batch.loss_mask.sum() for batch in batches).float()))
            for batch, before in zip(batches, old_logprobs, strict=True):
                sums += self.accumulate(batch, before, max(trained, 1.0))
            sums.grad_norm += self.apply_gradients()
        return sums.summary(self)

    def accumulate(self, batch: PolicyBatch, old: Tensor | None, denominator: float) -> UpdateSums:
        """Forward and backward of one micro-batch."""
        logprobs, entropy = self.logprobs(batch)
        before = logprobs.detach() if old is None else old
        loss = policy_loss(logprobs, before, batch.advantages, batch.loss_mask, self.clip_low, self.clip_high)
        self.backward_sum(loss.loss, denominator)
        # the gap is taken over every sampled token, before any clipping or weighting
        gap = (before - batch.old_logprobs).abs()[batch.loss_mask]
        return UpdateSums(
            loss=loss.loss.detach(),
            tokens=batch.loss_mask.sum(),
            entropy=entropy[batch.loss_mask].sum(),
            clipped_low=loss.clipped_low,
            clipped_high=loss.clipped_high,
            gap=gap.sum(),
            gap_max=gap.max() if len(gap) else gap.new_zeros(()),
            grad_norm=gap.new_zeros(()),
        )

    def logprobs(self, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
        return self.policy.logprobs(batch, self.generation.temperature)

    def guard(self, gap: float) -> None:
        """Raise RuntimeError when rollouts did not come from the policy that is trained."""
        if self.max_logprob_gap is not None and not gap <= self.max_logprob_gap:
            raise RuntimeError(
                f"rollout_logprob_gap/max is {gap:.2e} at iteration {self.iteration}, above max_logprob_gap="
                f"{self.max_logprob_gap:.0e}: the engine does not sample from the policy that is trained (stale weights, "
                "a stale cache, or a precision that differs). Raise or unset max_logprob_gap only if you expect this."
            )

    def log_rollouts(
        self, rollouts: list[Rollout], judged: list[Judged], scores: Scores, advantages: Tensor, seconds: float
    ) -> None:
        """Means over the responses of all ranks."""
        values = {
            "rollout/accuracy": [j.correct for j in judged],
            "rollout/parallel_ratio": [j.response.is_parallel for j in judged],
            "rollout/format_valid": [j.finished and j.response.well_formed for j in judged],
            "rollout/response_length": [len(r.response_ids) for r in rollouts],
            "rollout/truncated": [not r.finished for r in rollouts],
            "rollout/critical_tokens": [j.critical_tokens for j in judged],
            "rollout/total_tokens": [j.total_tokens for j in judged],
            "rollout/zero_variance_groups": (advantages == 0).all(dim=1).tolist(),
        }
        means = {name: self.mean_std(v)[0] for name, v in values.items()}
        means["reward/total/mean"], means["reward/total/std"] = self.mean_std(scores.total)
        for term, term_scores in scores.terms.items():
            defined = [s for s in term_scores if s is not None]
            means[f"reward/{term}/mean"], means[f"reward/{term}/std"] = self.mean_std(defined)
        tokens = float(self.over_ranks(torch.tensor(float(sum(len(r.response_ids) for r in rollouts)))))
        means["time/rollout_s"] = seconds
        means["time/tokens_per_second"] = tokens / seconds
        self.log_dict(means, rank_zero_only=True)

    def mean_std(self, values: list) -> tuple[float, float]:
        """Mean and (population) deviation over all ranks; (nan, nan) of nothing."""
        x = torch.tensor([float(v) for v in values], dtype=torch.float64)
        n, total, square = self.over_ranks(torch.stack([torch.tensor(float(len(x))), x.sum(), (x * x).sum()])).tolist()
        if not n:
            return float("nan"), float("nan")
        return total / n, max(square / n - (total / n) ** 2, 0.0) ** 0.5


@dataclass
class UpdateSums:
    """Sums over the trained tokens of one rank in one iteration."""

    loss: Tensor
    tokens: Tensor
    entropy: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    gap: Tensor
    gap_max: Tensor
    grad_norm: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> UpdateSums:
        return cls(*(torch.zeros((), device=device) for _ in range(8)))

    def __iadd__(self, other: UpdateSums) -> UpdateSums:
        for name in ("loss", "tokens", "entropy", "clipped_low", "clipped_high", "gap", "grad_norm"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.gap_max = torch.maximum(self.gap_max, other.gap_max)
        return self

    def summary(self, module: RLModule) -> dict[str, float]:
        """Means over the tokens of all ranks."""
        names = ("loss", "entropy", "clipped_low", "clipped_high", "gap")
        sums = module.over_ranks(torch.stack([getattr(self, n).float() for n in ("tokens", *names)])).tolist()
        tokens = max(sums[0], 1.0)
        loss, entropy, low, high, gap = (s / tokens for s in sums[1:])
        return {
            "policy/loss": loss,
            "policy/entropy": entropy,
            "policy/clip_fraction": low + high,
            "policy/clip_fraction_low": low,
            "policy/clip_fraction_high": high,
            "policy/grad_norm": float(self.grad_norm) / module.mini_batches,
            "policy/lr": module.lr_schedulers().get_last_lr()[0],
            "rollout_logprob_gap/mean": gap,
            "rollout_logprob_gap/max": float(module.over_ranks(self.gap_max, "max")),
        }
