"""The vLLM engine, for real: against the trainer's forward pass and against the transformers engine.

One engine serves the file. It is started inside the trainer's process group, as under DDP, and the last test closes it.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_model, write_tiny_model

from parallel_r1.modules.faults import EngineRecovery
from parallel_r1.rollout.engine import Request, Sampling
from parallel_r1.rollout.transformers_engine import TransformersEngine
from parallel_r1.rollout.vllm_engine import VLLMEngine
from parallel_r1.rollout.weights import full_weights
from parallel_r1.types import Rollout

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """The trainer's: one rank, gloo."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def running(process_group, tiny_model_dir):
    engine = VLLMEngine(max_model_len=256, kv_cache_bytes=64 << 20)
    engine.start(tiny_model_dir)
    yield engine
    engine.close()


@pytest.fixture
def engine(running):
    """The engine, with the weights of `tiny_model()`."""
    running.sync(full_weights(tiny_model()))
    return running


def some_requests(count: int, tokens: int = 32) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    return [
        Request(tuple(torch.randint(8, 110, (5 + 11 * i % 67,), generator=generator).tolist()), tokens, 500 + i)
        for i in range(count)
    ]


@torch.no_grad()
def largest_gap(model, rollouts: list[Rollout], temperature: float = 1.0, banned: tuple[int, ...] = ()) -> float:
    """max |log-probability of the engine - the trainer's| over sampled tokens, one plain forward pass a response."""
    gap = 0.0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        logits = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float()
        logits[:, list(banned)] = float("-inf")
        chosen, sampled = torch.tensor(rollout.response_ids), torch.tensor(rollout.sampled)
        logprobs = (logits / temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        gap = max(gap, (logprobs - torch.tensor(rollout.logprobs))[sampled].abs().max().item())
    return gap


def test_both_engines_agree_on_64_prompts(engine, tiny_model_dir):
    oracle = TransformersEngine()
    oracle.start(tiny_model_dir)
    requests = some_requests(64)
    for sampling in (Sampling(0.0), Sampling(0.0, eos_ids=(1, 30, 31), banned=(2, 3))):
        ours, theirs = engine.generate(requests, sampling), oracle.generate(requests, sampling)
        assert [r.response_ids for r in ours] == [r.response_ids for r in theirs]
        assert [r.finished for r in ours] == [r.finished for r in theirs]
        pairs = zip(ours, theirs, strict=True)
        assert max(abs(p - q) for a, b in pairs for p, q in zip(a.logprobs, b.logprobs, strict=True)) <= 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("banned", [(), (2, 3, 40)])
def test_sampled_logprobs_are_the_trainers(engine, temperature, banned):
    rollouts = engine.generate(some_requests(32), Sampling(temperature, eos_ids=(1,), banned=banned))
    assert largest_gap(tiny_model(), rollouts, temperature, banned) <= 1e-4
    assert not set(banned) & {token for rollout in rollouts for token in rollout.response_ids}


def test_a_ban_holds_where_the_model_is_sure(engine):
    """A bias of -100, what other tools use, gives way to logits that are further apart."""
    trainer = tiny_model(tied=False)
    with torch.no_grad():
        trainer.lm_head.weight.mul_(1000.0)
    engine.sync((n, w) for n, w in full_weights(trainer))
    (free,) = engine.generate(some_requests(1), Sampling())
    (other,) = engine.generate(some_requests(1), Sampling(banned=(free.response_ids[0],)))
    assert free.response_ids[0] not in other.response_ids


def test_a_sync_brings_new_weights_and_drops_the_cache(engine):
    requests, trainer = some_requests(32), tiny_model(seed=1)
    assert largest_gap(trainer, engine.generate(requests, Sampling())) > 1e-2  # without the sync
    version = engine.weight_version
    engine.sync(full_weights(trainer))
    assert engine.weight_version == version + 1
    assert largest_gap(trainer, engine.generate(requests, Sampling())) <= 1e-4
    assert engine.cached_prompt_tokens == 0


def test_without_dropping_the_cache_the_gap_is_large(engine, monkeypatch):
    requests, trainer = some_requests(32), tiny_model(seed=1)
    engine.generate(requests, Sampling())
    monkeypatch.setattr(engine, "_drop_cache", lambda: None)
    engine.sync(full_weights(trainer))
    assert largest_gap(trainer, engine.generate(requests, Sampling())) > 1e-2
    assert engine.cached_prompt_tokens > 0


def test_only_the_tied_head_changed(engine):
    """vLLM keeps a repacked copy of a tied head: a stream without its name would leave that one stale."""
    trainer = tiny_model()
    with torch.no_grad():
        trainer.get_input_embeddings().weight.mul_(1.3)
    with pytest.raises(RuntimeError, match=r"left out 1 weights \(lm_head.weight"):
        engine.sync(trainer.named_parameters())
    engine.sync(full_weights(trainer))
    assert largest_gap(trainer, engine.generate(some_requests(8), Sampling())) <= 1e-4


def test_a_stream_that_breaks_off_leaves_no_weights_but_a_later_one_does(engine):
    def broken():
        for name, weight in full_weights(tiny_model(seed=2)):
            yield name, weight
            if name.startswith("model.layers.1"):
                raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        engine.sync(broken())
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate(some_requests(1), Sampling())
    trainer = tiny_model(seed=1)
    engine.sync(full_weights(trainer))
    assert largest_gap(trainer, engine.generate(some_requests(8), Sampling())) <= 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_does_not_depend_on_the_batch(engine, temperature):
    requests, sampling = some_requests(32), Sampling(temperature, eos_ids=(1, 20))
    together = engine.generate(requests, sampling)
    alone = [engine.generate([request], sampling)[0] for request in requests[:8]]
    backwards = engine.generate(requests[::-1], sampling)[::-1]
    assert [r.response_ids for r in alone] == [r.response_ids for r in together[:8]]
    assert [r.response_ids for r in backwards] == [r.response_ids for r in together]


def test_the_trainers_random_state_is_left_alone(engine):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (request,) = some_requests(1)
    first, again, other = engine.generate([request, request, replace(request, seed=7)], Sampling())
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again
    assert first.response_ids != other.response_ids


def test_a_group_computes_its_prompt_once(engine):
    prompt = tuple(range(8, 108))  # 100 tokens: three full blocks of 32
    engine.generate([Request(prompt, 8, seed) for seed in range(8)], Sampling())
    assert engine.prompt_tokens == 800
    assert engine.cached_prompt_tokens == 7 * 96


def test_ends_cuts_and_prefixes(engine):
    eos = (1, 30, 31, 32, 33, 34, 35)
    requests = [replace(r, prefix_ids=(50, 51), max_tokens=20 + i % 3) for i, r in enumerate(some_requests(32))]
    full = Request((9, 9), 2, 0, (50, 1))
    *rollouts, last = engine.generate([*requests, full], Sampling(eos_ids=eos))
    assert last == Rollout((9, 9), (50, 1), (0.0, 0.0), (False, False), finished=False)
    assert {r.finished for r in rollouts} == {True, False}
    for request, rollout in zip(requests, rollouts, strict=True):
        assert rollout.response_ids[:2] == (50, 51)
        assert rollout.sampled[:3] == (False, False, True)
        assert not set(rollout.response_ids[:-1]) & set(eos)
        assert rollout.finished == (rollout.response_ids[-1] in eos)
        assert rollout.finished or len(rollout.response_ids) == request.max_tokens
    assert largest_gap(tiny_model(), rollouts) <= 1e-4
    assert engine.generate([full], Sampling()) == [last]
    assert engine.generate([], Sampling()) == []


def test_it_says_what_cannot_be_held(engine):
    with pytest.raises(ValueError, match=r"250 prompt \+ 7 response \(max_tokens\) = 257 tokens, the engine holds 256"):
        engine.generate([Request((5,) * 250, 7, 0)], Sampling())
    assert len(engine.generate([Request((5,) * 250, 6, 0)], Sampling())[0].response_ids) == 6
    with pytest.raises(ValueError, match=r"vocabulary is 0\.\.109"):
        engine.generate([Request((110,), 7, 0)], Sampling())
    for call in (lambda: VLLMEngine().generate([], Sampling()), lambda: VLLMEngine().sync([])):
        with pytest.raises(RuntimeError, match="call start first"):
            call()


def test_starting_on_a_sister_folder_keeps_the_engine_but_not_its_weights(engine, tmp_path):
    inner = engine._engine
    sister = write_tiny_model(tmp_path, seed=1)
    engine.start(sister)
    assert engine._engine is inner
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate(some_requests(1), Sampling())
    engine.sync(full_weights(tiny_model(seed=1)))
    assert largest_gap(tiny_model(seed=1), engine.generate(some_requests(8), Sampling())) <= 1e-4


def test_the_order_of_a_gpu_with_a_real_engine(engine, monkeypatch):
    """Sleep level 2 frees weights and cache, so a rollout wakes the weights, takes the new ones in, drops the cache,
    and wakes the cache last. All is real but the device: memory cannot be freed on a CPU, so only the calls are seen.
    """
    inner, calls = engine._engine, []

    def noted(name: str, real=None):
        def call(*args, **kwargs):
            calls.append(" ".join([name, *map(str, args)]))
            return real(*args, **kwargs) if real else None

        monkeypatch.setattr(inner, name, call)

    noted("sleep")  # of the device: nothing behind them on a CPU
    noted("wake_up")
    for name in ("collective_rpc", "reset_prefix_cache", "add_request"):
        noted(name, getattr(inner, name))
    monkeypatch.setattr(engine, "_on_cpu", False)
    requests, trainer = some_requests(4), tiny_model(seed=1)
    engine.generate(requests[:1], Sampling())
    engine.sleep()
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate(requests, Sampling())
    engine.sync(full_weights(trainer))
    assert largest_gap(trainer, engine.generate(requests[:1], Sampling())) <= 1e-4
    engine.sleep()
    seen = [call.split(" {")[0].split(" ")[:2] for call in calls]
    assert [" ".join(words) if words[0] != "add_request" else "add_request" for words in seen] == [
        "add_request",
        "sleep 2",
        "wake_up ['weights']",
        "collective_rpc reload_weights",
        "reset_prefix_cache",
        "wake_up ['kv_cache']",
        "add_request",
        "sleep 2",
    ]


def test_an_engine_that_breaks_in_mid_rollout_is_built_anew_and_gives_the_same_tokens(running, engine, tiny_model_dir):
    """As a CUDA error would: a step raises after others have gone through."""
    requests, sampling = some_requests(24), Sampling(eos_ids=(1,))
    expected = engine.generate(requests, sampling)
    step, steps = running._engine.step, []

    def failing():
        steps.append(1)
        if len(steps) == 5:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step()

    running._engine.step = failing

    def rebuild():
        running.close()
        running.start(tiny_model_dir)
        running.sync(full_weights(tiny_model()))

    recovery = EngineRecovery(rebuild, lambda level: level)
    with pytest.warns(UserWarning, match="the engine failed"):
        rollouts = recovery.call(lambda: running.generate(requests, sampling))
    assert len(steps) == 5
    assert rollouts == expected


def test_streaming_weights_holds_one_gathered_tensor_at_a_time(engine):
    """Beside what the engine itself keeps of a layer until it is complete."""
    trainer, live, most = tiny_model(seed=2), weakref.WeakSet(), []

    def copies():
        weights = full_weights(trainer)
        while True:
            gc.collect()
            most.append(len(live))
            try:
                name, weight = next(weights)
            except StopIteration:
                return
            weight = weight.clone()  # as a gather makes a new one
            live.add(weight)
            yield name, weight
            del weight

    engine.sync(copies())
    assert largest_gap(trainer, engine.generate(some_requests(4), Sampling())) <= 1e-4
    layer = max(len([n for n, _ in trainer.named_parameters() if f"layers.{i}." in n]) for i in range(2))
    assert max(most) <= layer + 1, most


def test_a_small_cache_delays_responses_but_does_not_change_them(running, engine, tiny_model_dir):
    requests = some_requests(40, tokens=48)
    expected = running.generate(requests, Sampling())
    running.close()
    # 1 KiB a token: the 40 responses need about 3,300 tokens, 1,024 fit, so some are evicted and computed again.
    small = VLLMEngine(max_model_len=256, kv_cache_bytes=1 << 20, max_num_seqs=32)
    small.start(tiny_model_dir)
    small.sync(full_weights(tiny_model()))
    preemptions = count_preemptions(small)
    rollouts = small.generate(requests, Sampling())
    small.close()
    assert preemptions
    assert [r.response_ids for r in rollouts] == [r.response_ids for r in expected]
    assert largest_gap(tiny_model(), rollouts) <= 1e-4


def count_preemptions(engine: VLLMEngine) -> list[str]:
    """A list that fills with the ids of requests as vLLM's scheduler preempts them."""
    scheduler, names = engine._engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def noting(request, *args, **kwargs):
        names.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = noting
    return names


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", False), ("qwen2", True)])
def test_other_architectures_load_and_sync(running, kind, tied, tmp_path):
    """Another architecture replaces the engine in the same process; the folder's own weights are loaded at once."""
    running.start(write_tiny_model(tmp_path, kind, tied=tied))
    rollouts = running.generate(some_requests(16), Sampling())
    assert largest_gap(tiny_model(kind, tied=tied), rollouts) <= 1e-4
    trainer = tiny_model(kind, tied=tied, seed=1)
    running.sync(full_weights(trainer))
    assert largest_gap(trainer, running.generate(some_requests(16), Sampling())) <= 1e-4


def test_a_cache_too_small_for_one_response_names_the_setting(running, tiny_model_dir):
    running.close()
    with pytest.raises(ValueError, match="raise kv_cache_bytes"):
        VLLMEngine(kv_cache_bytes=1 << 16).start(tiny_model_dir)


def test_closing_spares_the_trainers_process_group(running, tiny_model_dir):
    running.start(tiny_model_dir)
    assert dist.get_world_size() == 1
    running.close()
    running.close()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    torch.set_num_threads(torch.get_num_threads())  # vLLM's stand-in takes the argument too, but says so:
    assert torch.set_num_threads.__name__ == "set_num_threads"
    running.start(tiny_model_dir)
    assert largest_gap(tiny_model(), running.generate(some_requests(4), Sampling())) <= 1e-4


def test_two_ranks_shard_one_trainer_and_run_an_engine_each(tiny_model_dir, tmp_path):
    """FSDP2 over gloo; different work on each rank; `tests/rollout/two_ranks.py` says what must hold."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    script, root = Path(__file__).parents[1] / "rollout" / "two_ranks.py", Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(folder)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    assert [(folder / f"rank{rank}").read_text().split()[0] for rank in range(2)] == ["3", "9"]
