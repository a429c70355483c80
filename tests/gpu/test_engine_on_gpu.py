"""On a GPU: sleep frees memory, a sync brings the trainer's weights, and both take turns for several rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import tiny_model

from parallel_r1.rollout.engine import Request, Sampling
from parallel_r1.rollout.vllm_engine import VLLMEngine
from parallel_r1.rollout.weights import full_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@torch.no_grad()
def gap(model, rollout) -> float:
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids], device="cuda")
    logits = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float()
    chosen = torch.tensor(rollout.response_ids, device="cuda")[:, None]
    logprobs = logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu()
    return (logprobs - torch.tensor(rollout.logprobs)).abs().max().item()


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_the_engine_and_the_trainer_take_turns(tiny_model_dir: Path) -> None:
    cache = 1 << 30
    engine = VLLMEngine(max_model_len=256, kv_cache_bytes=cache, enforce_eager=True)
    engine.start(tiny_model_dir)
    requests = [Request((10, 11, 12 + i), 24, i) for i in range(16)]
    try:
        for seed in (1, 2, 3):
            trainer = tiny_model(seed=seed).to("cuda")
            engine.sync(full_weights(trainer))
            assert max(gap(trainer, r) for r in engine.generate(requests, Sampling())) <= 2e-2
            awake = free_bytes()
            engine.sleep()
            assert free_bytes() - awake >= 0.9 * cache, "the cache's memory is the trainer's while it sleeps"
            with pytest.raises(RuntimeError, match="call sync before generate"):
                engine.generate(requests, Sampling())
            engine._wake("weights")
            assert free_bytes() - awake >= 0.9 * cache, "weights come back without the cache"
    finally:
        engine.close()
