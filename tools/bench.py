"""Measure what training costs. CPU-seconds are of all threads; lower is better.

    python tools/bench.py rl --against trl --json    an RL iteration, beside TRL's GRPOTrainer (uv sync --group bench)
    python tools/bench.py growth --json              how that cost grows with group, length, paths, vocabulary, rows
    python tools/bench.py update --json              one update: packed with shared prompts, against padded rows
    python tools/bench.py update --case qwen3_0.6b --device cuda --dtype bfloat16 --variants packed packed_flex padded

Every measurement is a process of its own (peaks never fall), variants take turns (so that a busy machine hurts all
alike), and the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from benchmarks import growth, rl, update
from benchmarks.common import alternate, medians, run_child


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = top.add_subparsers(dest="what", required=True)
    for name, part, text in (
        ("rl", rl, "whole iterations of RL"),
        ("growth", growth, "how the cost grows"),
        ("update", update, "one optimizer step of RL"),
    ):
        sub = kinds.add_parser(
            name, help=text, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        part.add_options(sub)
        sub.add_argument("--repeats", type=int, default=3, help="processes a variant (default 3)")
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.add_argument("--child", help=argparse.SUPPRESS)  # the variant that this process measures
    return top


PARTS = {"rl": rl, "growth": growth, "update": update}


def compare(case: str, args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Every variant's medians and spread, and the ratios of each to the last one named (the baseline)."""
    part = PARTS[args.what]
    names = part.variants(args, case)

    def run(name: str) -> dict[str, float]:
        return run_child(Path(__file__), [*argv, "--case", case, "--child", name], f"{case}/{name}")

<<<<<<< HEAD
    runs = alternate(names, args.repeats, run)
    out: dict[str, Any] = {name: medians(found) for name, found in runs.items()}
    for name, found in runs.items():
        out[name]["cpu_s_spread"] = [round(f(run["cpu_s"] for run in found), 3) for f in (min, max)]
    base = out[names[-1]]
    for name in names[:-1]:
        shared = [key for key in part.COMPARED if base.get(key)]
        out[f"{name} / {names[-1]}"] = {key: round(out[name][key] / base[key], 3) for key in shared}
=======
    layers, hidden, intermediate, heads, kv_heads, head = case.size
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    words = ["<pad>", "<eos>", *TAGS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Qwen3ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
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


def resident_bytes() -> int:
    """Memory of this process now; where the system does not say, its peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
        head = case.vocabulary * case.size[1]
        flops = 6 * (body * bench.tokens + head * trained)  # attention scores and recomputation left out
        result["mfu"] = flops / seconds / (args.peak_tflops * 1e12)
    return result


# --------------------------------------------------------------------------- comparison


def run_child(name: str, args: list[str], variant: str) -> dict[str, float]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, __file__, *args, "--case", name, "--child", variant]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{name}/{variant} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Medians a variant, and ratios of the first to the last one named (the baseline)."""
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in args.variants}
    for _ in range(args.repeats):
        for variant in args.variants:
            runs[variant].append(run_child(name, argv, variant))
    out: dict[str, Any] = {
        variant: {key: median(run[key] for run in found) for key in found[0]} for variant, found in runs.items()
    }
    first, last = args.variants[0], args.variants[-1]
    keys = ("tokens", "cpu_s", "wall_s", "peak_mb")
    out["ratio"] = {key: round(out[first][key] / out[last][key], 3) for key in keys}
>>>>>>> dc80c38 (A step that runs out of memory, a loss that is none, an engine that fails: repeated, counted or stopped, alike on every rank)
    return out


def main() -> None:
    args, argv = parser().parse_args(), sys.argv[1:]
    part = PARTS[args.what]
    if args.child:
        print(json.dumps(part.measure(part.CASES[args.case[0]], args, args.child)))
        return
    results = {case: compare(case, args, argv) for case in args.case}
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for case, result in results.items():
        print(case)
        for variant, row in result.items():
            shown = (f"{k}={v:.4g}" if isinstance(v, float | int) else f"{k}={v}" for k, v in row.items())
            print(f"  {variant:22}", "  ".join(shown))


if __name__ == "__main__":
    main()
