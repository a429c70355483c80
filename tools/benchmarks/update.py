"""`bench.py update`: tokens computed, CPU-seconds and peak memory of one update, packed against padded rows.

The baseline is what most trainers do: one padded row a response, all logits at once. `loss` and `grad_norm` must agree
between variants: they compute the same update.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Shape, peak_bytes, random_qwen3, resident_bytes

VARIANTS = {"packed": "sdpa", "packed_flex": "flex_attention", "padded": "sdpa"}


@dataclass(frozen=True)
class Case:
    """A model and a token budget of a forward pass."""

    shape: Shape
    vocabulary: int
    max_tokens: int


CASES = {
    "tiny": Case(Shape(4, 128, 384, 4, 4, 32), 512, 8192),
    "large_vocabulary": Case(Shape(2, 128, 384, 4, 4, 32), 151_936, 2048),
    "qwen3_0.6b": Case(Shape(28, 1024, 3072, 16, 8, 128), 151_936, 16_384),
    "qwen3_1.7b": Case(Shape(28, 2048, 6144, 16, 8, 128), 151_936, 16_384),
}


def add_options(update: argparse.ArgumentParser) -> None:
    update.add_argument("--case", nargs="+", choices=list(CASES), default=["tiny", "large_vocabulary"])
    update.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["packed", "padded"])
    update.add_argument("--problems", type=int, default=1, help="groups in the update (default 1)")
    update.add_argument("--group-size", type=int, default=8)
    update.add_argument("--prompt", type=int, default=300, help="prompt tokens")
    update.add_argument(
        "--response", type=int, nargs=2, default=[50, 600], help="shortest and longest response, tokens"
    )
    update.add_argument("--max-tokens", type=int, help="token budget of a forward pass (default: the case's own)")
    update.add_argument("--structure", choices=["seen", "unseen"], default="seen")
    update.add_argument("--gradient-checkpointing", action="store_true")
    update.add_argument("--device", default="cpu")
    update.add_argument("--dtype", default="float32")
    update.add_argument("--peak-tflops", type=float, help="of the device, for the model FLOPs utilisation")


def build_policy(case: Case, args: argparse.Namespace, attention: str, folder: Path) -> Any:
    """A random Qwen3 of the case's size."""
    from parallel_r1.policy import PolicySource, load_policy

    random_qwen3(folder, case.shape, case.vocabulary)
    source = PolicySource(
        name=str(folder),
        dtype=args.dtype,
        attn_implementation=attention,
        gradient_checkpointing=args.gradient_checkpointing,
    )
    policy = load_policy(folder, source)
    policy.model.to(args.device).train()
    return policy


def make_rows(case: Case, args: argparse.Namespace) -> list[list[Any]]:
    """Groups of rows; response lengths are spread evenly over the range, a third of each response lies in two paths."""
    from parallel_r1.modules.batching import Row
    from parallel_r1.types import Rollout

    rng = random.Random(0)

    def words(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(8, case.vocabulary) for _ in range(n))

    low, high = args.response
    lengths = [round(low + (high - low) * g / max(args.group_size - 1, 1)) for g in range(args.group_size)]
    groups = []
    for _ in range(args.problems):
        prompt, group = words(args.prompt), []
        for n in lengths:
            inside = n // 6
            block = (2, 4, *words(inside - 2), 5, 4, *words(inside - 2), 5, 3, 6, *words(4), 7)
            ids = words(n - len(block) - 1) + block + (1,)
            group.append(Row(Rollout(prompt, ids, (-6.0,) * n, (True,) * n, True), rng.choice((-1.0, 1.0))))
        groups.append(group)
    return groups


class Bench:
    """One process, one model, plain torch: the same update by either way."""

    def __init__(self, case: Case, args: argparse.Namespace, variant: str, folder: Path) -> None:
        import torch

        torch.manual_seed(0)
        self.args, self.packed = args, variant != "padded"
        self.max_tokens = args.max_tokens or case.max_tokens
        self.policy = build_policy(case, args, VARIANTS[variant], folder)
        self.optimizer = torch.optim.AdamW(self.policy.model.parameters(), lr=1e-6)
        self.tokens = 0

    def packs(self, rows: list[Any], least: int = 0) -> list[Any]:
        from parallel_r1.modules.batching import make_pass, packs

        parts = packs(rows, self.max_tokens, self.policy.can_pack)
        made = [make_pass(p, self.policy.tags, self.args.structure, device=self.args.device) for p in parts]
        self.tokens += sum(len(one.pack.tokens) for one in made)
        return made

    def attempt(self, work: Any, rows: Any, before_retry: Any) -> Any:
        return work()

    def over_ranks(self, value: Any, op: str = "sum") -> Any:
        return value

    def backward_sum(self, loss_sum: Any, denominator: float) -> None:
        (loss_sum / denominator).backward()

    def apply_gradients(self) -> Any:
        import torch

        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def update(self, groups: list[list[Any]]) -> dict[str, float]:
        return self._packed(groups) if self.packed else self._padded(groups)

    def _packed(self, groups: list[list[Any]]) -> dict[str, float]:
        from parallel_r1.modules.update import update
        from parallel_r1.objective import Objective

        done = update(self, groups, Objective().settled(1024), self.policy.score)
        return {"loss": done["policy/loss"], "grad_norm": done["policy/grad_norm"]}

    def _padded(self, groups: list[list[Any]]) -> dict[str, float]:
        from parallel_r1.modules.batching import collate, micro_batches
        from parallel_r1.objective import policy_loss

        rows = [row for group in groups for row in group]
        trained = sum(sum(row.rollout.sampled) for row in rows)
        total = 0.0
        for part in micro_batches(rows, self.max_tokens):
            policy = self.policy
            batch = collate(part, policy.tags, policy.pad_id, self.args.structure, device=self.args.device)
            self.tokens += batch.input_ids.numel()
            logprobs, _ = policy.logprobs(batch)
            out = policy_loss(logprobs, logprobs.detach(), batch.advantages, batch.loss_mask)
            self.backward_sum(out.loss, trained)
            total += float(out.loss.detach()) / trained
        return {"loss": total, "grad_norm": float(self.apply_gradients())}


def measure(case: Case, args: argparse.Namespace, variant: str) -> dict[str, float]:
    """One update after a small one that warms everything up (optimizer state included)."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(case, args, variant, Path(folder))
    cuda = args.device.startswith("cuda")
    groups = make_rows(case, args)
    small = make_rows(case, argparse.Namespace(**{**vars(args), "prompt": 4, "response": [24, 30], "problems": 1}))
    bench.update(groups if cuda else small)  # kernels are tuned and compiled by shape
    bench.tokens = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else resident_bytes()
    cpu, wall = time.process_time(), time.perf_counter()
    out = bench.update(groups)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - wall
    peak = torch.cuda.max_memory_allocated() if cuda else peak_bytes()
    result = {
        **out,
        "tokens": bench.tokens,
        "cpu_s": time.process_time() - cpu,
        "wall_s": seconds,
        "peak_mb": (peak - before) / 1e6,
        "tokens_per_second": bench.tokens / seconds,
    }
    if args.peak_tflops:
        body = sum(p.numel() for p in bench.policy.model.get_decoder().layers.parameters())
        trained = sum(sum(row.rollout.sampled) for group in groups for row in group)
        head = case.vocabulary * case.shape.hidden
        flops = 6 * (body * bench.tokens + head * trained)  # attention scores and recomputation left out
        result["mfu"] = flops / seconds / (args.peak_tflops * 1e12)
    return result


COMPARED = ("tokens", "cpu_s", "wall_s", "peak_mb")


def variants(args: argparse.Namespace, case: str) -> list[str]:
    return args.variants
