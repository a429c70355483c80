"""Reinforcement learning with verifiable rewards, on rollouts of the current policy."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import AdamW

from parallel_r1.data.order import share
from parallel_r1.lora import adapters_off
from parallel_r1.methods import Objective
from parallel_r1.modules.base import Schedule, StageModule
from parallel_r1.modules.behaviour import Behaviour, behaviour_of
from parallel_r1.modules.experience import Experience, rows_of, tally_experience
from parallel_r1.modules.faults import IdleIterations, room_for
from parallel_r1.modules.responder import Generation, Mode
from parallel_r1.modules.rollout_log import RolloutLog, training_rows
from parallel_r1.modules.update import update
from parallel_r1.objective import advantages
from parallel_r1.policy import Policy
from parallel_r1.reward.rewards import Accuracy, Length, Reward, Sum
from parallel_r1.scores import TokenScores
from parallel_r1.types import Pack, Problem

# the stream of problems that dynamic sampling draws from starts where no training batch ever gets
_REFILL = 1 << 32


class RLModule(StageModule):
    """Group-relative policy optimisation: GRPO and its family, as `objective` says.

    Args:
        reward: scores judged responses; any `parallel_r1.reward.rewards.Reward`.
        group_size: responses sampled a problem (G).
        generation: how problems become prompts and responses.
        objective: what an update maximises: advantages, loss, regularisers, corrections.
        optimizer: makes the optimizer from the parameters.
        schedule: the learning rate over the stage.
        mini_batches: parts an iteration's problems are split into, an optimizer step each.
        ppo_epochs: how often an iteration goes over its rollouts.
        gradient_clip: limit of the gradient norm; null for none.
        max_tokens_per_micro_batch: tokens a forward pass may hold; the update does not depend on it.
        max_logprob_gap: stop when the engine's and the trainer's log-probabilities of a sampled token differ by more
            (nats). 1e-4 suits float32; null, never stop, suits bfloat16.
        max_skipped_steps: stop after so many optimizer steps in a row whose loss or gradient is not finite; each is
            skipped, on all ranks, and counted.
        max_idle_iterations: stop after so many iterations in a row that taught nothing (every response cut by
            max_tokens, or the rewards of every group equal); null only warns.
        save_rollouts: groups an iteration whose responses each rank keeps in `rollouts/` of the stage, as compressed
            JSONL: `tools/view.py` shows them, `tools/generate_traces.py --from-rollouts` makes demonstrations of them.
        eval_modes: `free`, and `parallel` / `sequential` to force a block or forbid the tags.
    """

    def __init__(
        self,
        reward: Reward = Accuracy(),  # noqa: B008 - read only
        group_size: int = 8,
        generation: Generation = Generation(),  # noqa: B008
        objective: Objective = Objective(),  # noqa: B008
        optimizer: OptimizerCallable = AdamW,
        schedule: Schedule = Schedule(),  # noqa: B008
        mini_batches: int = 1,
        ppo_epochs: int = 1,
        gradient_clip: float | None = 1.0,
        max_tokens_per_micro_batch: int = 16384,
        max_logprob_gap: float | None = None,
        max_skipped_steps: int = 10,
        max_idle_iterations: int | None = None,
        save_rollouts: int = 0,
        eval_modes: list[Mode] = ["free"],  # noqa: B006
    ) -> None:
        super().__init__(
            generation, optimizer, schedule, gradient_clip, max_tokens_per_micro_batch, max_skipped_steps, eval_modes
        )
        self.reward = reward
        self.group_size = group_size
        self.objective = objective
        self.mini_batches, self.ppo_epochs = mini_batches, ppo_epochs
        self.max_logprob_gap = max_logprob_gap
        self.max_idle_iterations = max_idle_iterations
        self.idle = IdleIterations(max_idle_iterations)
        self.save_rollouts = save_rollouts
        self.reference: Policy | None = None
        self._kept: RolloutLog | None = None
        self.behaviour: Behaviour | None = None  # of the last iteration; callbacks draw it

    def check(self) -> None:
        super().check()
        self.objective.check(self.generation.max_tokens)
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: responses are compared within their group, so it needs 2 or more "
                "(8 is usual)"
            )
        if self.mini_batches < 1 or self.ppo_epochs < 1:
            raise ValueError(
                f"mini_batches={self.mini_batches}, ppo_epochs={self.ppo_epochs}: an iteration takes at least one "
                "optimizer step, so give 1 or more"
            )
        if self.save_rollouts < 0:
            raise ValueError(f"save_rollouts={self.save_rollouts}: give a number of groups, or 0 to keep none")

        if self.max_idle_iterations is not None and self.max_idle_iterations < 1:
            raise ValueError(
                f"max_idle_iterations={self.max_idle_iterations}: give 1 or more, or null to go on with a warning"
            )

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.reference = self.frozen_copy()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.reference is not None:  # not a submodule, so that it stays out of checkpoints
            self.reference.model.to(self.device)

    @property
    def steps(self) -> dict[str, Any]:
        """How an iteration is cut into optimizer steps."""
        return {"mini_batches": self.mini_batches, "epochs": self.ppo_epochs, "share": self.share()}

    @property
    def iteration(self) -> int:
        """Iterations of this stage so far; each makes `mini_batches * ppo_epochs` optimizer steps."""
        return self.global_step // (self.mini_batches * self.ppo_epochs)

    def training_step(self, problems: list[Problem], batch_idx: int) -> None:
        """One iteration: sync, roll out, judge and reward, advantages, update."""
        iteration, skipped = self.iteration, self.skipped.total
        objective = self.objective.settled(self.generation.max_tokens)
        sync_s = self.responder.refresh()

        seen = self.roll_out(problems, iteration, objective)
        seen, used = self.refill(seen, iteration, objective)
        self.responder.rest()
        credit = advantages(used.rewards, objective.advantage, objective.std, self.moments)
        groups = rows_of(used.rollouts, credit, mask_cut=objective.overlong == "mask")
        self.keep(used, credit, iteration)

        start = time.perf_counter()
        done = update(self, groups, objective, self.score, self.reference_score, **self.steps)
        update_s = time.perf_counter() - start

        times = {"time/sync_s": sync_s, "time/rollout_s": seen.seconds, "time/update_s": update_s}
        metrics = self.report(seen, used, {**done, **times})
        self.idle.look(metrics, iteration, self.generation.max_tokens)
        self.guard(done.get("rollout_logprob_gap/max", 0.0), skipped=self.skipped.total > skipped)

    def roll_out(self, problems: list[Problem], iteration: int, objective: Objective, first: int = 0) -> Experience:
        """Sample, judge and reward a group a problem. first: index of the first problem among those of the step."""
        start = time.perf_counter()
        asked, problems = len(problems), [problem for problem in problems if self.responder.fits(problem)]
        rollouts = self.responder.respond(
            problems,
            iteration=self.session.step_offset + iteration,
            group_size=self.group_size,
            share=self.share(),
            first=first,
        )
        seconds = time.perf_counter() - start
        judged = self.responder.judge([p for p in problems for _ in range(self.group_size)], rollouts)
        reward = self.reward
        if objective.overlong == "soft":
            reward = Sum([reward, Length(self.generation.max_tokens, objective.overlong_buffer)])
        scores = reward.score(judged, iteration)
        rewards = torch.tensor(scores.total, dtype=torch.float32).view(len(problems), self.group_size)
        return Experience(rollouts, judged, rewards, scores.terms, seconds, asked - len(problems))

    def refill(self, seen: Experience, iteration: int, objective: Objective) -> tuple[Experience, Experience]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups of equal rewards give way to new ones.

        Returns (all that was sampled, what is trained on). Extra problems come from a stream of their own, a function
        of (seed, iteration, round) alone. Without dynamic sampling both are what came in.
        """
        limit = objective.dynamic_sampling
        if not limit:
            return seen, seen
        wanted, used = len(seen.rewards), seen.picked(~seen.flat())
        for n in range(limit):
            missing = wanted - len(used.rewards)
            if not self.over_ranks(missing, "max"):
                break  # on all ranks at once: rewards and rollouts may be collective
            batch = self.trainer.datamodule.batch(_REFILL + iteration * limit + n)
            problems = share(batch, *self.share())[:missing]
            extra = self.roll_out(problems, iteration, objective, first=(n + 1) * len(batch))
            seen, used = seen.joined(extra), used.joined(extra.picked(~extra.flat()))
        return seen, used

    def moments(self, values: Tensor) -> tuple[float, float]:
        """Mean and unbiased deviation over all ranks."""
        x = values.double()
        sums = torch.stack([x.new_tensor(float(x.numel())), x.sum(), (x * x).sum()])
        n, total, square = self.over_ranks(sums).tolist()
        mean = total / max(n, 1.0)
        return mean, max((square - n * mean * mean) / max(n - 1.0, 1.0), 0.0) ** 0.5

    # ------------------------------------------------------------------ the policy, and the one it started from

    def score(self, pack: Pack) -> TokenScores:
        return self.policy.score(pack, self.generation.temperature, self.responder.banned())

    def reference_score(self, pack: Pack) -> TokenScores:
        """Scores under the frozen policy of the stage's start; asked for only where kl_coef is not 0."""
        if self.reference is None:
            with adapters_off(self.model):
                return self.score(pack)
        return self.reference.score(pack, self.generation.temperature, self.responder.banned())

    def frozen_copy(self) -> Policy | None:
        """The policy as it starts, held only where a KL is asked for; None where switching adapters off gives it."""
        if self.objective.kl_coef == 0 or self.policy.lora is not None:
            return None
        reference = self.load()
        reference.model.requires_grad_(False).eval()
        return reference

    # ------------------------------------------------------------------ reports

    def keep(self, used: Experience, credit: Tensor, iteration: int) -> None:
        """Write this rank's first `save_rollouts` groups to the rollouts of the stage."""
        if not self.save_rollouts or self.session.stage_folder is None:
            return
        if self._kept is None:
            self._kept = RolloutLog(self.session.stage_folder / "rollouts", self.share())
        rows = training_rows(used, credit, iteration, self.save_rollouts, self.share(), self.policy)
        with room_for("rollouts", self._kept.folder, "set save_rollouts: 0"):
            self._kept.write(iteration, rows)

    def report(self, seen: Experience, used: Experience, more: dict[str, float]) -> dict[str, float]:
        """Log means over the responses of all ranks, and return them.

        seen: all that was sampled; used: what was trained on.
        """
        self.behaviour = behaviour_of(seen.judged, seen.rollouts, self.policy.tags)
        tally = tally_experience(seen, self.behaviour)
        counts = {
            "rollout/groups": float(len(seen.rewards)),
            "data/dropped_prompts": float(seen.dropped),
            "rollout/dropped_groups": float(len(seen.rewards) - len(used.rewards)),
            "time/tokens_per_second": seen.tokens / max(seen.seconds, 1e-9),
            "time/update_tokens_per_second": used.tokens / max(more["time/update_s"], 1e-9),
        }
        for name, value in counts.items():
            tally.total(name, torch.tensor(value, dtype=torch.float64))
        lr = self.lr_schedulers().get_last_lr()[0]
        more |= {"policy/lr": lr, "policy/skipped_steps": self.skipped.total, "memory/peak_gb": self.peak_memory_gb()}
        metrics = {**tally.metrics(self.over_ranks), **more}
        self.log_dict(metrics, rank_zero_only=True)
        return metrics

    def guard(self, gap: float, skipped: bool = False) -> None:
        """Raise RuntimeError when rollouts did not come from the policy that is trained.

        skipped: the iteration left out a step, whose own log-probabilities may have been no numbers.
        """
        if skipped and math.isnan(gap):
            return
        if self.max_logprob_gap is not None and not gap <= self.max_logprob_gap:
            raise RuntimeError(
                f"rollout_logprob_gap/max is {gap:.2e} at iteration {self.iteration}, above max_logprob_gap="
                f"{self.max_logprob_gap:.0e}: the engine does not sample from the policy that is trained (stale "
                "weights, a stale cache, or a precision that differs). Raise or unset max_logprob_gap only if you "
                "expect this."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["idle_iterations"] = self.idle.in_a_row

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.idle.in_a_row = checkpoint["idle_iterations"]

    def release(self) -> None:
        super().release()
        self.reference = self._kept = None
