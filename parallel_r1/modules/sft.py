"""Supervised cold start: imitate demonstrations, loss on the response only."""

from __future__ import annotations

import time

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch.optim import AdamW

from parallel_r1.modules.base import Schedule, StageModule
from parallel_r1.modules.batching import Row
from parallel_r1.modules.responder import Generation, Mode
from parallel_r1.modules.tally import Tally
from parallel_r1.structure.tokens import inserted_by_scheduler
from parallel_r1.types import Problem, Rollout


class SFTModule(StageModule):
    """Cross-entropy on demonstrations, validated by generation through the rollout engine.

    Args:
        generation: how problems become prompts, and how validation samples.
        optimizer: makes the optimizer from the parameters.
        schedule: the learning rate over the stage.
        gradient_clip: limit of the gradient norm; null for none.
        max_tokens_per_micro_batch: tokens a forward pass may hold; the loss does not depend on it.
        max_length: prompt + response tokens; longer rows are left out and counted. null: 4096, or what the model holds.
        max_skipped_steps: stop after so many optimizer steps in a row whose loss or gradient is not finite; each is
            skipped, on all ranks, and counted.
        eval_modes: `free`, and `parallel` / `sequential` to force a block or forbid the tags.
    """

    def __init__(
        self,
        generation: Generation = Generation(),  # noqa: B008 - read only; shows its fields in --help
        optimizer: OptimizerCallable = AdamW,
        schedule: Schedule = Schedule(),  # noqa: B008
        gradient_clip: float | None = 1.0,
        max_tokens_per_micro_batch: int = 16384,
        max_length: int | None = None,
        max_skipped_steps: int = 10,
        eval_modes: list[Mode] = ["free"],  # noqa: B006
    ) -> None:
        super().__init__(
            generation, optimizer, schedule, gradient_clip, max_tokens_per_micro_batch, max_skipped_steps, eval_modes
        )
        self.max_length = max_length

    @property
    def longest(self) -> int:
        """Tokens that a row may have."""
        return self.max_length or min(4096, getattr(self.model.config, "max_position_embeddings", None) or 4096)

    def training_step(self, problems: list[Problem], batch_idx: int) -> None:
        """One optimizer step on the demonstrations of this rank's share of the batch."""
        start = time.perf_counter()
        rows = [self.row(problem) for problem in problems]
        kept = [row for row in rows if len(row) <= self.longest]
        trained = float(self.over_ranks(sum(sum(row.rollout.sampled) for row in kept)))
        if not trained:
            raise ValueError(
                f"every demonstration of step {self.global_step} is longer than max_length={self.longest} tokens: "
                "raise max_length or filter the data"
            )
        tally = self.attempt(lambda: self.gradient(kept, trained), kept)
        grad_norm = self.apply_gradients()
        seconds = time.perf_counter() - start
        tokens, n, dropped = self.over_ranks(torch.tensor([sum(map(len, kept)), len(kept), len(rows) - len(kept)]))
        self.log_dict(
            {
                **tally.metrics(self.over_ranks),
                "policy/grad_norm": grad_norm,
                "policy/lr": self.lr_schedulers().get_last_lr()[0],
                "policy/skipped_steps": self.skipped.total,
                "data/dropped_rows": float(dropped),
                "data/response_length": trained / float(n),
                "memory/peak_gb": self.peak_memory_gb(),
                "time/update_s": seconds,
                "time/tokens_per_second": float(tokens) / seconds,
            },
            rank_zero_only=True,
        )

    def gradient(self, rows: list[Row], trained: float) -> Tally:
        """Accumulate the gradient of the mean loss over all `trained` tokens of all ranks."""
        tally = Tally()
        for part in self.packs(rows, least=1):
            loss = -self.policy.score(part.pack).logprobs.sum()
            self.backward_sum(loss, trained)
            tally.total("policy/loss", loss / trained)
        return tally

    def row(self, problem: Problem) -> Row:
        """Prompt and demonstration as ids, closed by an end-of-sequence token; the loss falls on the response only.

        In the unseen structure the tags that the fork-join scheduler writes are context here too.
        """
        if problem.demonstration is None:
            raise ValueError(f"problem {problem.id} of tier {problem.tier!r} has no demonstration to imitate")
        ids = self.policy.tokenizer(problem.demonstration, add_special_tokens=False).input_ids
        response = (*ids, self.policy.eos_ids[0])
        trained = (True,) * len(response)
        if self.generation.structure == "unseen":
            inserted = inserted_by_scheduler(response, self.policy.tags, self.responder.plan().openings)
            trained = tuple(not i for i in inserted)
        prompt = self.responder.prompt_ids(problem)
        return Row(Rollout(prompt, response, (0.0,) * len(response), trained, finished=True))
