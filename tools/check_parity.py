"""Does the engine sample from the policy that is trained? `python tools/check_parity.py --model DIR`.

Samples responses with an engine, scores every sampled token with the trainer's own forward pass and compares the two
log-probabilities, by segment. Half of the responses are made to start with a block, so that there are some whatever the
model does. The model folder must hold the six tags (tools/prepare_model.py adds them). Exit status: 0; 1 where a gap is
above the tolerance; 2 for a model or a setting that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_r1.data.doors import make_problems
from parallel_r1.modules.responder import Generation, Responder
from parallel_r1.structure.tokens import segments
from parallel_r1.types import SEGMENT_KINDS, Rollout

if TYPE_CHECKING:
    from parallel_r1.policy import Policy
    from parallel_r1.rollout.engine import RolloutEngine


@dataclass(frozen=True)
class Gap:
    """|log-probability of the trainer - that of the engine| (nats) over the sampled tokens of one kind of segment."""

    max: float
    mean: float
    tokens: int


def gaps(policy: Policy, rollouts: Sequence[Rollout], generation: Generation, max_tokens: int = 8192) -> dict[str, Gap]:
    """By kind of segment; kinds without a sampled token are left out."""
    import torch

    from parallel_r1.modules.batching import Row, collate_pack, packs

    found: dict[str, list] = {kind: [] for kind in SEGMENT_KINDS}
    banned = policy.tags.all() if generation.structure == "sequential" else ()
    with torch.no_grad():
        for part in packs([Row(rollout) for rollout in rollouts], max_tokens, policy.can_pack):
            pack = collate_pack(part, policy.tags, generation.structure, generation.positions)
            difference = (policy.score(pack, generation.temperature, banned).logprobs - pack.engine_logprobs).abs()
            for k, kind in enumerate(SEGMENT_KINDS):
                found[kind].append(difference[pack.kind == k])
    whole = {kind: torch.cat(parts) for kind, parts in found.items() if parts}
    return {kind: Gap(float(x.max()), float(x.mean()), len(x)) for kind, x in whole.items() if len(x)}


def sample(responder: Responder, samples: int, group: int) -> tuple[list[Rollout], Counter[str]]:
    """`samples` responses, `group` to a problem, half of them starting with a block where the structure has any.

    Also the prompt tokens that the engine computed for them, by kind of request, where it counts them.
    """
    problems = make_problems("easy", "test", -(-samples // group))
    half = 0 if responder.generation.structure == "sequential" else max(1, len(problems) // 2)
    rollouts: list[Rollout] = []
    computed: Counter[str] = Counter()
    for number, (part, mode) in enumerate(((problems[:half], "parallel"), (problems[half:], "free"))):
        if part:
            rollouts += responder.respond(part, number, group, mode=mode)
            computed.update(getattr(responder.engine, "computed", {}))
    return rollouts[:samples], computed


def report(model: Path, generation: Generation, engine: RolloutEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Start, sample, score. The result as it is printed."""
    from parallel_r1.policy import PolicySource, load_policy

    policy = load_policy(model, PolicySource(name=str(model), dtype=options.trainer_dtype))
    policy.model.eval()
    engine.start(model, generation.branching)
    try:
        responder = Responder(policy, engine, generation, options.seed)
        responder.refresh()
        rollouts, computed = sample(responder, options.samples, options.group)
    finally:
        engine.close()
    found = gaps(policy, rollouts, generation)
    parts = [segment for r in rollouts for segment in segments(r.response_ids, policy.tags)]
    worst = max(gap.max for gap in found.values())
    return {
        "model": str(model),
        "structure": generation.structure,
        "positions": generation.positions,
        "engine": type(engine).__name__,
        "seed": options.seed,
        "samples": len(rollouts),
        "finished": sum(r.finished for r in rollouts),
        "paths": sum(segment.kind == "path" for segment in parts),
        "summaries": sum(segment.kind == "summary" for segment in parts),
        "cuts": sum(r.cuts for r in rollouts),
        "computed_prompt_tokens": dict(computed),
        "gap": {kind: vars(gap) for kind, gap in found.items()},
        "max_gap": worst,
        "tolerance": options.tolerance,
        "ok": worst <= options.tolerance,
    }


def make_engine(options: argparse.Namespace) -> RolloutEngine:
    if options.engine == "transformers":
        from parallel_r1.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(dtype=options.dtype, max_model_len=options.max_model_len)
    from parallel_r1.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(dtype=options.dtype, max_model_len=options.max_model_len, kv_cache_bytes=options.kv_cache_bytes)


def path_range(text: str) -> list[int]:
    """`3` or `2,4`."""
    numbers = [int(part) for part in text.split(",")]
    return numbers * 2 if len(numbers) == 1 else numbers


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = out.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="a model folder with the six tags")
    add("--structure", default="unseen", choices=("seen", "unseen", "sequential"), help="default: %(default)s")
    add("--engine", default="vllm", choices=("vllm", "transformers"), help="default: %(default)s")
    add("--positions", default="longest", choices=("longest", "index"), help="after a block (default: %(default)s)")
    add("--samples", type=int, default=16, metavar="N", help="responses (default: %(default)s)")
    add("--group", type=int, default=4, metavar="G", help="responses a prompt (default: %(default)s)")
    add("--paths", type=path_range, default=[2, 4], metavar="N[,M]", help="paths of a block (default: 2,4)")
    add("--max-blocks", type=int, default=3, metavar="N", help="blocks of a response (default: %(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens of a response (default: %(default)s)")
    add("--max-path-tokens", type=int, default=24, metavar="N", help="tokens of a path (default: %(default)s)")
    add("--max-summary-tokens", type=int, default=24, metavar="N", help="tokens of a summary (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--dtype", default="auto", help="of the engine (default: as the folder was saved)")
    add("--trainer-dtype", default="float32", help="of the trainer (default: %(default)s)")
    add("--max-model-len", type=int, default=None, metavar="N", help="context of the engine (default: the model's)")
    add("--kv-cache-bytes", type=int, default=None, metavar="N", help="vLLM's cache; a small one forces preemption")
    add("--tolerance", type=float, default=1e-4, metavar="NATS", help="largest gap allowed (default: %(default)g)")
    add("--json", action="store_true", help="print the whole result as JSON")
    return out


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    generation = Generation(
        structure=options.structure,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        positions=options.positions,
        paths=options.paths,
        max_blocks=options.max_blocks,
        max_path_tokens=options.max_path_tokens,
        max_summary_tokens=options.max_summary_tokens,
    )
    try:
        generation.check()
        result = report(options.model, generation, make_engine(options), options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for kind, gap in result["gap"].items():
            print(f"{kind:8} max {gap['max']:.2e}  mean {gap['mean']:.2e}  over {gap['tokens']} tokens")
        verdict = "parity" if result["ok"] else "NO parity"
        print(f"{verdict}: {result['max_gap']:.2e} against {options.tolerance:g} nats")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
