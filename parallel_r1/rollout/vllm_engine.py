"""A colocated vLLM engine: same process and devices as the trainer, weights streamed in without touching the disk."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from parallel_r1.rollout import vllm_runtime as runtime
from parallel_r1.rollout.branching import start_samples
from parallel_r1.rollout.engine import (
    Branching,
    Request,
    RolloutEngine,
    Sampling,
    check_branching,
    check_requests,
    make_rollout,
    require_mode,
)
from parallel_r1.rollout.model_folder import architecture, has_weights, read_config, stored_dtype
from parallel_r1.rollout.weights import WeightStream, parameter_names
from parallel_r1.structure.layout import Positions
from parallel_r1.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

_CPU_KV_BYTES = 1 << 30
_CPU_BLOCK_SIZE = 32
_CPU_BATCHED_TOKENS = 8192


class VLLMEngine(RolloutEngine):
    """A `RolloutEngine` on vLLM, in this process.

    Args:
        dtype: "auto" takes the model folder's own (vLLM's "auto" would turn float32 into bfloat16), or its name.
        max_model_len: context in tokens; None takes the model's own.
        max_num_seqs: requests decoded at once.
        kv_cache_bytes: size of the KV cache. None: 1 GiB on CPU; on GPU what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the device that the engine may take, its weights included. GPU only.
        enable_prefix_caching: compute shared prompts once.
        block_size: tokens a KV block; only full blocks are shared. None: 32 on CPU (the least its kernels want: short
            prompts hit the cache more often), vLLM's choice on GPU.
        enforce_eager: no CUDA graphs, no compilation. None: yes on CPU, no on GPU.
        cpu_threads: threads while sampling on CPU; None leaves the trainer's number. A tiny model is fastest with 1.
        tensor_parallel: ranks that share one engine; all of them then call with the same requests.
        sleep_level: 2 frees weights and KV cache between rollouts, 1 keeps the weights in CPU memory, 0 keeps
            everything where it is. GPU only.
        timeout_s: seconds that one decoding step of the engine may take; after them it hangs, and the process ends with
            status 75. None waits for ever.

    weight_version counts the syncs; prompt_tokens and cached_prompt_tokens are those of the last `generate` (forced
    prefixes included): how many there were, and how many of them the prefix cache spared. computed, requests: of the
    last `generate_branching`, by kind of piece: prompt tokens that were really computed, and requests.
    """

    def __init__(
        self,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.5,
        enable_prefix_caching: bool = True,
        block_size: int | None = None,
        enforce_eager: bool | None = None,
        cpu_threads: int | None = None,
        tensor_parallel: int = 1,
        sleep_level: Literal[0, 1, 2] = 2,
        timeout_s: float | None = 1800.0,
    ) -> None:
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.kv_cache_bytes = kv_cache_bytes
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enable_prefix_caching = enable_prefix_caching
        self.block_size = block_size
        self.enforce_eager = enforce_eager
        self.cpu_threads = cpu_threads
        self.tensor_parallel = self.ranks = tensor_parallel
        self.sleep_level = sleep_level
        self.timeout_s = timeout_s
        self.weight_version = 0
        self.prompt_tokens = self.cached_prompt_tokens = 0
        self.computed: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self._engine: Any = None  # a vllm.LLMEngine: naming the type would have the command line import vLLM
        self._shutdown: weakref.finalize | None = None
        self._loaded: dict[str, Any] = {}
        self._names: frozenset[str] = frozenset()
        self._weights_known = False
        self._asleep: set[str] = set()
        self._on_cpu = False
        self._branching: Positions | None = None
        self._store: Any = None

    def start(self, model_dir: Path, branching: Positions | None = None) -> None:
        config = read_config(model_dir)
        dtype = stored_dtype(config) if self.dtype == "auto" else self.dtype
        loaded = {**architecture(config), "engine_dtype": dtype, "engine_branching": branching}
        if self._engine is not None and loaded == self._loaded:
            self._weights_known = False
            return
        self.close()
        runtime.prepare_environment()
        from vllm.platforms import current_platform

        self._on_cpu = current_platform.is_cpu()
        self._check_ranks()
        arguments = self._arguments(model_dir, config, dtype)
        if branching is not None:
            from parallel_r1.rollout.vllm_branching import branching_arguments

            self._store, more = branching_arguments(config, branching)
            arguments |= more
        self._branching = branching
        self._engine, owns_process_group = _launch(arguments)
        self._shutdown = weakref.finalize(self, runtime.shut_down, self._engine, owns_process_group)
        self._loaded, self._names = loaded, parameter_names(model_dir)
        self._weights_known = has_weights(model_dir)

    def _check_ranks(self) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, the trainer has {ranks} rank(s): the engine shares the "
                "trainer's ranks, so their number must be a multiple of tensor_parallel"
            )

    def _arguments(self, model_dir: Path, config: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The arguments of vLLM's engine, by its own names."""
        arguments: dict[str, Any] = {
            "model": str(model_dir),
            "load_format": "auto" if has_weights(model_dir) else "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # not the folder's: it could add stops that the caller does not know of
            "dtype": dtype,
            "seed": 0,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": self.enable_prefix_caching,
            "block_size": self.block_size,
            "enforce_eager": self._on_cpu if self.enforce_eager is None else self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel,
            "enable_sleep_mode": self.sleep_level > 0 and not self._on_cpu,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature and bans applied
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self._on_cpu:
            context = self.max_model_len or config.get("max_position_embeddings") or 0
            arguments |= {
                "kv_cache_memory_bytes": self.kv_cache_bytes or _CPU_KV_BYTES,
                "block_size": self.block_size or _CPU_BLOCK_SIZE,
                # Prompts are never split: a seed then gives the same tokens whatever else is in the batch. Split, vLLM
                # would rewind the generator of a half-read prompt, which fails on CPU.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(context, _CPU_BATCHED_TOKENS),
            }
        return arguments

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        engine = self._require_engine()
        self._wake("weights")
        self._weights_known = False  # until all have arrived and the cache is gone
        stream = WeightStream(weights)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
        stream.check(self._names)
        self._drop_cache()
        self._weights_known = True
        self.weight_version += 1

    def _drop_cache(self) -> None:
        """vLLM keeps its prefix cache when weights change: prompts would go on from keys and values of the old ones."""
        if not self._require_engine().reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be dropped: requests are running, sync between rollouts")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        engine = self._ready(requests, sampling, None)
        self.prompt_tokens = self.cached_prompt_tokens = 0
        rollouts: dict[int, Rollout] = {}

        def keep(index: int, output: Any) -> None:
            completion = output.outputs[0]
            finished = completion.finish_reason == "stop"
            ids, logprobs = completion.token_ids, completion.logprobs.logprobs
            rollouts[index] = make_rollout(requests[index], ids, logprobs, finished)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_prompt_tokens += output.num_cached_tokens or 0

        with self._sampling_mode(), runtime.RequestLoop(engine, self.timeout_s) as loop:
            for index, request in enumerate(requests):
                if len(request.prefix_ids) == request.max_tokens:
                    rollouts[index] = make_rollout(request, (), (), finished=False)
                else:
                    start = request.prompt_ids + request.prefix_ids
                    loop.submit(start, sampling_params(request, sampling), partial(keep, index))
            loop.run()
        return [rollouts[index] for index in range(len(requests))]

    def generate_branching(self, requests: Sequence[Request], sampling: Sampling, plan: Branching) -> list[Rollout]:
        from parallel_r1.rollout.vllm_branching import Splicer, nothing_left

        engine = self._ready(requests, sampling, plan.positions)
        check_branching(requests, plan)
        rollouts: dict[int, Rollout] = {}

        def keep(index: int, rollout: Rollout) -> None:
            rollouts[index] = rollout
            splicer.finished(index)

        with (
            self._sampling_mode(),
            nothing_left(self._store, engine.step),
            runtime.RequestLoop(engine, self.timeout_s) as loop,
        ):
            splicer = Splicer(loop, self._store, plan, sampling.temperature, sampling_params)
            start_samples(requests, sampling, plan, splicer.submit, keep)
            loop.run()
        self.computed, self.requests = dict(splicer.computed), dict(splicer.requests)
        return [rollouts[index] for index in range(len(requests))]

    def _ready(self, requests: Sequence[Request], sampling: Sampling, asked: Positions | None) -> Any:
        """The engine, awake, if it can serve the requests. asked: None for plain text, else positions of branches."""
        engine = self._require_engine()
        if not self._weights_known:
            raise RuntimeError("the engine's weights are unknown: call sync before generate")
        require_mode(self._branching, asked)
        model = engine.model_config
        check_requests(requests, sampling, context=model.max_model_len, vocab_size=model.get_vocab_size())
        self._wake("kv_cache")
        return engine

    @contextmanager
    def _sampling_mode(self) -> Iterator[None]:
        threads = self.cpu_threads if self._on_cpu else None
        with runtime.trainer_randomness_kept(), runtime.quick_sampler(self._on_cpu), runtime.cpu_threads(threads):
            yield

    def sleep(self) -> None:
        if self._engine is None or self._on_cpu or self.sleep_level == 0 or self._asleep:
            return
        self._engine.sleep(self.sleep_level)
        self._asleep = {"weights", "kv_cache"}
        self._weights_known = False

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Bring one part back: weights for a sync while the KV cache stays away, the cache only when sampling."""
        if part in self._asleep:
            self._require_engine().wake_up([part])
            self._asleep.discard(part)

    def close(self) -> None:
        try:
            if self._shutdown is not None:
                self._shutdown()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._engine, self._shutdown, self._loaded, self._weights_known = None, None, {}, False
        self._asleep = set()
        self._branching, self._store = None, None

    def _require_engine(self) -> Any:
        if self._engine is None:
            raise RuntimeError("the engine is not running: call start first")
        return self._engine


def _launch(arguments: dict[str, Any]) -> tuple[Any, bool]:
    """A running vLLM engine, and whether it made the default process group itself (the trainer had none)."""
    from vllm import EngineArgs, LLMEngine

    owns_process_group = not dist.is_initialized()
    try:
        with (
            runtime.trainer_randomness_kept(),
            runtime.thread_setter_kept(),
            runtime.launcher_environment() as launcher,
        ):
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments, **launcher))
    except Exception as error:
        runtime.release_groups(owns_process_group)
        if "KV cache" in str(error):
            raise ValueError(
                f"the KV cache does not hold one response of full length: raise kv_cache_bytes (now "
                f"{arguments['kv_cache_memory_bytes']}) or gpu_memory_utilization, or lower max_model_len. vLLM says: "
                f"{error}"
            ) from error
        raise
    gc.unfreeze()  # vLLM freezes every object of the process: a finished stage's modules would never be collected
    return engine, owns_process_group


def sampling_params(request: Request, sampling: Sampling) -> Any:
    """vLLM's parameters for one request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens - len(request.prefix_ids),
        # Stops by id only: the sampled stop token is part of the output, and nothing else ends a response.
        stop_token_ids=list(sampling.eos_ids),
        ignore_eos=True,
        # A bias of -inf renormalises the rest exactly; the web interface's -100 would leave a sharp model a chance.
        logit_bias=dict.fromkeys(sampling.banned, float("-inf")) or None,
        logprobs=0,  # those of the sampled tokens only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
