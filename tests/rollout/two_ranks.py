"""What one of several ranks does in `tests/integration/test_engines.py`; a process of its own.

python two_ranks.py RANK RANKS FOLDER [TENSOR_PARALLEL]: FOLDER holds the model and the ranks' rendezvous.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for conftest

import torch
import torch.distributed as dist
from conftest import tiny_model
from torch.distributed.fsdp import fully_shard

from parallel_r1.rollout.engine import Request, Sampling
from parallel_r1.rollout.vllm_engine import VLLMEngine
from parallel_r1.rollout.weights import full_weights


def main(rank: int, ranks: int, folder: Path, tensor_parallel: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    # The weights of the folder are those of seed 0: only a sync can bring these.
    plain, sharded = tiny_model(seed=1), tiny_model(seed=1)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert any(p.to_local().numel() < p.numel() for p in sharded.parameters()), "nothing was sharded"
    streamed = dict(full_weights(sharded))
    for name, weight in full_weights(plain):
        assert torch.equal(streamed[name], weight), name

    engine = VLLMEngine(max_model_len=128, kv_cache_bytes=32 << 20, tensor_parallel=tensor_parallel)
    engine.start(folder)
    engine.sync(full_weights(sharded))
    # Ranks with an engine each have different work; ranks that share one have the same.
    count = 5 if tensor_parallel > 1 else 3 + 6 * rank
    rollouts = engine.generate([Request((10, 11, 12 + i), 20, i) for i in range(count)], Sampling())
    assert len(rollouts) == count
    gap = max(_gap(plain, rollout) for rollout in rollouts)
    assert gap <= 1e-4, gap
    engine.close()

    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == ranks, "the trainer's process group did not survive"
    dist.destroy_process_group()
    (folder / f"rank{rank}").write_text(f"{count} {gap}")


@torch.no_grad()
def _gap(model, rollout) -> float:
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logits = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
    return (logprobs - torch.tensor(rollout.logprobs)).abs().max().item()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1)
