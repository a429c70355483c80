"""A colocated vLLM engine: same process and devices as the trainer, weights streamed in without touching the disk."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from parallel_r1.rollout.engine import Request, RolloutEngine, Sampling, check_requests, make_rollout
from parallel_r1.rollout.model_folder import architecture, has_weights, read_config, stored_dtype
from parallel_r1.rollout.vllm_runtime import (
    RequestLoop,
    launcher_environment,
    prepare_environment,
    quick_sampler,
    shut_down,
    trainer_randomness_kept,
)
from parallel_r1.rollout.weights import checkpoint_names, recorded, require_names
from parallel_r1.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLMEngine, SamplingParams


class VLLMEngine(RolloutEngine):
    """A `RolloutEngine` on vLLM, in this process.

    Args:
        dtype: "auto" takes the model folder's own (vLLM's "auto" would turn float32 into bfloat16), or its name.
        max_model_len: context in tokens; None takes the model's own.
        max_num_seqs: requests decoded at once.
        kv_cache_bytes: size of the KV cache. None: 1 GiB on CPU; on GPU whatever `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the device that the engine may take, its weights included. GPU only.
        enable_prefix_caching: compute shared prompts once.
        block_size: tokens a KV block; only full blocks are shared. None: 32 on CPU (the least its kernels want, and
            short prompts hit the cache more often), vLLM's choice on GPU.
        enforce_eager: no CUDA graphs, no compilation. None: yes on CPU, no on GPU.
        tensor_parallel: ranks that share one engine; all of them then call with the same requests.
        sleep_level: 2 frees weights and KV cache between rollouts, 1 keeps the weights in CPU memory, 0 keeps
            everything where it is. GPU only.
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
        tensor_parallel: int = 1,
        sleep_level: Literal[0, 1, 2] = 2,
    ) -> None:
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.kv_cache_bytes = kv_cache_bytes
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enable_prefix_caching = enable_prefix_caching
        self.block_size = block_size
        self.enforce_eager = enforce_eager
        self.tensor_parallel = tensor_parallel
        self.sleep_level = sleep_level
        self.weight_version = 0
        self._engine: LLMEngine | None = None
        self._shutdown: weakref.finalize | None = None
        self._loaded: dict[str, Any] = {}
        self._names: frozenset[str] = frozenset()
        self._weights_known = False
        self._asleep: set[str] = set()
        self._on_cpu = False

    def start(self, model_dir: Path) -> None:
        config = read_config(model_dir)
        dtype = stored_dtype(config) if self.dtype == "auto" else self.dtype
        loaded = {**architecture(config), "engine_dtype": dtype}
        if self._engine is not None and loaded == self._loaded:
            self._weights_known = False
            return
        self.close()
        prepare_environment()
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        self._on_cpu = current_platform.is_cpu()
        owns_process_group = not dist.is_initialized()
        set_num_threads = torch.set_num_threads
        with trainer_randomness_kept(), launcher_environment() as launcher:
            arguments = self._arguments(model_dir, dtype) | launcher
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        torch.set_num_threads = set_num_threads
        gc.unfreeze()  # vLLM freezes all objects of the process: a finished stage's modules would never be collected
        self._shutdown = weakref.finalize(self, shut_down, self._engine, owns_process_group)
        self._loaded, self._names = loaded, checkpoint_names(model_dir)
        self._weights_known = has_weights(model_dir)

    def _arguments(self, model_dir: Path, dtype: str) -> dict[str, Any]:
        if self.tensor_parallel > 1 and not (dist.is_initialized() and dist.get_world_size() % self.tensor_parallel == 0):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, the trainer has {ranks} rank(s): the engine shares the "
                "trainer's ranks, so their number must be a multiple of tensor_parallel"
            )
        arguments: dict[str, Any] = {
            "model": str(model_dir),
            "load_format": "auto" if has_weights(model_dir) else "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # not the folder's: it could add stops that the caller does not know of
            "dtype": dtype,
            "seed": 0,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": self.enable_prefix_caching,
            "block_size": self.block_size,
            "enforce_eager": bool(self.enforce_eager),
            "tensor_parallel_size": self.tensor_parallel,
            "enable_sleep_mode": self.sleep_level > 0,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature and bans applied
            "disable_log_stats": True,
        }
        if self.max_model_len is not None:
            arguments["max_model_len"] = self.max_model_len
        if self._on_cpu:
            context = self.max_model_len or self._own_context(model_dir)
            arguments |= {
                "kv_cache_memory_bytes": self.kv_cache_bytes or 1 << 30,
                "block_size": self.block_size or 32,
                "enforce_eager": self.enforce_eager is not False,
                "enable_sleep_mode": False,
                # Only prompts that are never split give every request the same tokens in every batch.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(context, 8192),
            }
        return arguments

    @staticmethod
    def _own_context(model_dir: Path) -> int:
        return int(read_config(model_dir)["max_position_embeddings"])

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        engine = self._require_engine()
        self._wake("weights")
        self._weights_known = False  # until all have arrived and the cache is gone
        seen: set[str] = set()
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": recorded(weights, seen)})
        require_names(self._names, seen)
        # Reloading keeps the prefix cache: prompts would go on with keys and values of the old weights.
        if not engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be dropped, requests are still running: sync between rollouts")
        self._weights_known = True
        self.weight_version += 1

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        engine = self._require_engine()
        if not self._weights_known:
            raise RuntimeError("the engine's weights are unknown: call sync before generate")
        model = engine.model_config
        check_requests(requests, sampling, context=model.max_model_len, vocab_size=model.get_vocab_size())
        self._wake("kv_cache")
        rollouts: dict[int, Rollout] = {}
        loop = RequestLoop(engine)
        with trainer_randomness_kept(), quick_sampler(self._on_cpu):
            for index, request in enumerate(requests):
                if len(request.prefix_ids) == request.max_tokens:
                    rollouts[index] = make_rollout(request, (), (), finished=False)
                    continue

                def keep(output, index=index, request=request) -> None:
                    completion = output.outputs[0]
                    rollouts[index] = make_rollout(
                        request, completion.token_ids, completion.logprobs.logprobs, completion.finish_reason == "stop"
                    )

                loop.submit(request.prompt_ids + request.prefix_ids, sampling_params(request, sampling), keep)
            loop.run()
        return [rollouts[index] for index in range(len(requests))]

    def sleep(self) -> None:
        if self._engine is None or self._on_cpu or self.sleep_level == 0 or self._asleep:
            return
        self._engine.sleep(self.sleep_level)
        self._asleep = {"weights", "kv_cache"}
        self._weights_known = False

    def _wake(self, part: str) -> None:
        """Bring back one of "weights" and "kv_cache"; the other may stay away until it is needed."""
        if part in self._asleep:
            self._require_engine().wake_up([part])
            self._asleep.discard(part)

    def close(self) -> None:
        if self._shutdown is not None:
            self._shutdown()
        self._engine, self._shutdown, self._loaded, self._weights_known = None, None, {}, False
        self._asleep = set()

    def _require_engine(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("the engine is not running: call start first")
        return self._engine


def sampling_params(request: Request, sampling: Sampling) -> SamplingParams:
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
        # A bias of -inf renormalises the rest exactly; the -100 of the web interface would leave a sharp model a chance.
        logit_bias=dict.fromkeys(sampling.banned, float("-inf")) or None,
        logprobs=0,  # those of the sampled tokens only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
