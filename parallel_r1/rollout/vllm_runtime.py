"""Living in one process with vLLM: what it expects of the process, and what it would do to the trainer if let.

Measured on vLLM 0.32. Importing this file does not import vLLM.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist

from parallel_r1.rollout.watchdog import Watchdog

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams

_ENVIRONMENT = {
    # The engine core in this process: weights are handed over as tensors, not through a pipe.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Its start-up notes would drown the progress bars.
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A trainer reports to nobody.
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported, leaving alone what the user set.

    Raises RuntimeError where the user's own setting would keep the engine out of this process.
    """
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise RuntimeError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is set, which moves the engine to a process that weights cannot be "
            "streamed to: unset it or set it to 0"
        )


@contextmanager
def trainer_randomness_kept() -> Iterator[None]:
    """Undo what the body does to the global random states.

    vLLM seeds all of them when it starts and, on CPU, draws from torch's at every step; a resumed run would otherwise
    depend on how many steps its rollouts took.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def quick_sampler(on_cpu: bool) -> Iterator[None]:
    """Run vLLM's sampler without torch.compile on CPU, where compiling one small kernel takes 18 s and a C++ compiler.

    A stance, not an environment variable: the trainer's own torch.compile stays as it is.
    """
    with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
        yield


@contextmanager
def launcher_environment() -> Iterator[dict[str, Any]]:
    """Engine arguments for the process group that the trainer has set up, if any, with the variables vLLM reads.

    Each rank then runs its own engine on its own device; the default executor would put all of them on the first one.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        yield {}
        return
    devices = max(1, torch.cuda.device_count())
    wanted = {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(dist.get_rank() % devices)),
        # Only asked for, never used: the group exists already.
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
    }
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield {"distributed_executor_backend": "external_launcher"}
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Run the body with `count` threads, then give the trainer its own number back. None changes nothing."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def thread_setter_kept() -> Iterator[None]:
    """Keep `torch.set_num_threads` working: vLLM replaces it by a no-op for the whole process when it starts on CPU."""
    setter = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = setter


def shut_down(engine: LLMEngine, owns_process_group: bool) -> None:
    """Free an engine's memory and its process groups; the default group only where vLLM itself made it."""
    import vllm.v1.engine.core as core

    whole = core.cleanup_dist_env_and_memory
    # vLLM ends every shutdown by destroying the default process group, which is the trainer's. There is no switch.
    core.cleanup_dist_env_and_memory = lambda: release_groups(owns_process_group)
    try:
        engine.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = whole


def release_groups(owns_process_group: bool) -> None:
    """Free vLLM's own process groups and cached memory; the default group too, where vLLM itself made it."""
    from vllm.distributed import parallel_state

    if owns_process_group:
        parallel_state.cleanup_dist_env_and_memory()
        return
    # The same, short of the default group.
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class RequestLoop:
    """Feeds an engine and steps it until nothing is left; what is done with an output may submit more requests.

    A context manager: however its body ends, nothing is left in the engine, where it would block the next weight sync.
    timeout_s: seconds that one step may take before the process ends (see `watchdog`); None: any number.
    """

    def __init__(self, engine: LLMEngine, timeout_s: float | None = None) -> None:
        self._engine = engine
        self._watchdog = Watchdog("the engine", timeout_s)
        self._waiting: dict[str, Callable[[RequestOutput], None]] = {}
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._engine.abort_request(list(self._waiting))
            self._waiting.clear()

    def submit(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        done: Callable[[RequestOutput], None],
        cache_salt: str | None = None,
        **options: Any,
    ) -> None:
        """Queue a prompt; `done` is called with its finished output during `run`.

        cache_salt: prompts of different salts share nothing that is cached. options: others of vLLM's `add_request`.
        """
        name = str(self._count)
        self._count += 1
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        self._engine.add_request(name, prompt, params, **options)
        self._waiting[name] = done

    def run(self) -> None:
        """Step until every request has finished, those submitted on the way included."""
        with self._watchdog as watchdog:
            while self._waiting:
                outputs = self._engine.step()
                watchdog.beat()
                for output in outputs:
                    if output.finished:
                        self._waiting.pop(output.request_id)(output)
