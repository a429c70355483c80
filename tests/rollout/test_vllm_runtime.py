"""How the vLLM engine treats its process, without vLLM: only its engine object is replaced by one that notes calls."""

import os
import random
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parallel_r1.rollout.vllm_engine import VLLMEngine
from parallel_r1.rollout.vllm_runtime import (
    RequestLoop,
    cpu_threads,
    launcher_environment,
    prepare_environment,
    trainer_randomness_kept,
)


class NotingEngine:
    """Stands for vLLM's engine: notes the calls, finishes one request a step, newest first."""

    def __init__(self, cache_can_be_dropped: bool = True) -> None:
        self.calls: list[str] = []
        self.pending: list[str] = []
        self.cache_can_be_dropped = cache_can_be_dropped

    def add_request(self, name, prompt, params):
        self.calls.append(f"add {prompt['prompt_token_ids']}")
        self.pending.append(name)

    def step(self):
        return [SimpleNamespace(request_id=self.pending.pop(), finished=True)]

    def abort_request(self, names):
        self.calls.append(f"abort {len(names)}")

    def collective_rpc(self, method, kwargs):
        self.calls.append(f"{method} {[name for name, _ in kwargs['weights_iterator']]}")

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return self.cache_can_be_dropped

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags}")


def gpu_engine(fake: NotingEngine, **arguments) -> VLLMEngine:
    engine = VLLMEngine(**arguments)
    engine._engine, engine._weights_known, engine._names = fake, True, frozenset({"w"})
    return engine


def test_on_gpu_weights_wake_for_the_sync_and_the_cache_for_sampling():
    fake = NotingEngine()
    engine = gpu_engine(fake)
    engine.sleep()
    engine.sleep()  # once is enough
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate([], None)
    engine.sync([("w", torch.ones(1))])
    engine._wake("kv_cache")
    engine._wake("kv_cache")
    assert fake.calls == [
        "sleep 2",
        "wake ['weights']",
        "reload_weights ['w']",
        "reset_prefix_cache",
        "wake ['kv_cache']",
    ]


def test_sleep_level_0_keeps_everything():
    fake = NotingEngine()
    engine = gpu_engine(fake, sleep_level=0)
    engine.sleep()
    assert fake.calls == []
    assert engine._weights_known


def test_a_cache_that_cannot_be_dropped_is_an_error_and_blocks_sampling():
    engine = gpu_engine(NotingEngine(cache_can_be_dropped=False))
    with pytest.raises(RuntimeError, match="prefix cache could not be dropped"):
        engine.sync([("w", torch.ones(1))])
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate([], None)


def test_what_is_done_with_an_output_may_submit_more():
    fake, seen = NotingEngine(), []
    with RequestLoop(fake) as loop:

        def again(output):
            seen.append(output.request_id)
            if len(seen) < 4:
                loop.submit((7,), None, again)

        loop.submit((5,), None, again)
        loop.submit((6,), None, again)
        loop.run()
    assert fake.calls == ["add [5]", "add [6]", "add [7]", "add [7]", "add [7]"]
    assert len(set(seen)) == 5


def test_nothing_is_left_in_the_engine_after_an_error():
    fake = NotingEngine()

    def fail(output):
        raise ValueError("in a callback")

    def run():
        with RequestLoop(fake) as loop:
            for token in range(3):
                loop.submit((token,), None, fail)
            loop.run()

    with pytest.raises(ValueError, match="in a callback"):
        run()
    assert fake.calls[-1] == "abort 2"


def test_the_trainers_random_states_survive():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with suppress(KeyboardInterrupt), trainer_randomness_kept():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        raise KeyboardInterrupt
    assert draw() == expected


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with cpu_threads(None):
        assert torch.get_num_threads() == before


def test_one_rank_needs_no_launcher():
    with launcher_environment() as arguments:
        assert arguments == {}


def test_each_rank_gets_its_own_variables_for_as_long_as_the_engine_starts(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)
    with launcher_environment() as arguments:
        assert arguments == {"distributed_executor_backend": "external_launcher"}
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("3", "1", "4")
    assert "RANK" not in os.environ
    assert os.environ["LOCAL_RANK"] == "1"


def test_an_engine_outside_the_process_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(RuntimeError, match="unset it or set it to 0"):
        prepare_environment()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_tensor_parallel_needs_as_many_ranks():
    with pytest.raises(ValueError, match="tensor_parallel is 2, the trainer has 1 rank"):
        VLLMEngine(tensor_parallel=2)._check_ranks()
