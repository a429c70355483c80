"""A host for `modules.update` without Lightning, and rollouts to feed it: shared by tests and the ranks they start."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_r1.methods import Objective
from parallel_r1.modules.batching import Pass, Row, make_pass, packs
from parallel_r1.modules.tally import Tally
from parallel_r1.modules.update import update
from parallel_r1.policy import Policy
from parallel_r1.structure.grammar import Structure
from parallel_r1.types import Rollout

# conftest's vocabulary: <pad> 0, <eos> 1, the tags 2..7
PAR, END_PAR, PATH, END_PATH, SUM, END_SUM = range(2, 8)


class Host:
    """One model, one rank or several; keeps the gradient of the last step and steps by plain gradient descent."""

    def __init__(
        self,
        policy: Policy,
        structure: Structure = "seen",
        max_tokens: int = 10_000,
        lr: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self.policy, self.structure, self.max_tokens, self.lr, self.device = policy, structure, max_tokens, lr, device
        self.passes = 0
        self.gradient: dict[str, Tensor] = {}
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.averages = False  # whether backward averages gradients over ranks by itself, as FSDP does

    def packs(self, rows: Sequence[Row], least: int = 0) -> list[Pass]:
        parts = packs(rows, self.max_tokens, self.policy.can_pack)
        wanted = int(self.over_ranks(torch.tensor(float(max(len(parts), least))), "max"))
        parts += [[]] * (wanted - len(parts))
        self.passes += len(parts)
        return [make_pass(part, self.policy.tags, self.structure, device=self.device) for part in parts]

    def attempt(self, work: Callable[[], Tally], rows: Sequence[Row], before_retry: Callable[[], None]) -> Tally:
        return work()

    def over_ranks(self, value: Tensor, op: str = "sum") -> Tensor:
        if self.ranks > 1:
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return value

    def backward_sum(self, loss_sum: Tensor, denominator: float) -> None:
        (loss_sum * (self.ranks / denominator)).backward()

    def apply_gradients(self) -> Tensor:
        self.gradient = {}
        for name, p in self.policy.model.named_parameters():
            if p.grad is None:
                continue
            grad = p.grad
            if self.ranks > 1 and not self.averages:  # what DDP does
                grad = self.over_ranks(grad) / self.ranks
            self.gradient[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            with torch.no_grad():
                p -= self.lr * grad
            p.grad = None
        return torch.stack([g.norm() for g in self.gradient.values()]).norm()

    def run(self, groups: Sequence[Sequence[Row]], objective: Objective, **more) -> dict[str, float]:
        return update(self, groups, objective.settled(64), self.policy.score, **more)


def some_groups(problems: int = 3, group_size: int = 4, seed: int = 0, noise: float = 0.3) -> list[list[Row]]:
    """Groups of responses with blocks, of uneven length, not every token sampled, no two advantages equal."""
    rng = random.Random(seed)

    def words(n: int) -> list[int]:
        return [rng.randint(20, 99) for _ in range(n)]

    def response() -> tuple[int, ...]:
        out = words(rng.randint(1, 6))
        for _ in range(rng.randint(0, 2)):
            paths = [i for _ in range(rng.randint(2, 3)) for i in (PATH, *words(rng.randint(1, 6)), END_PATH)]
            out += [PAR, *paths, END_PAR, SUM, *words(3), END_SUM, *words(rng.randint(1, 4))]
        return (*out, 1)

    groups = []
    for _ in range(problems):
        prompt = tuple(words(rng.randint(3, 10)))
        group = []
        for _ in range(group_size):
            ids = response()
            logprobs = tuple(-3.0 + noise * rng.gauss(0, 1) for _ in ids)
            sampled = tuple(rng.random() < 0.85 for _ in ids)
            group.append(Row(Rollout(prompt, ids, logprobs, sampled, True), rng.gauss(0, 1)))
        groups.append(group)
    return groups
