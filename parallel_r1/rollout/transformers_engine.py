"""Sampling with plain transformers: slow, simple, exact in float32. The oracle of the tests, and the fallback.

It holds a model of its own, so it is as stale as vLLM would be until it is synced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel_r1.rollout.branching import Piece, Sampled, start_samples
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
from parallel_r1.rollout.transformers_decode import Row, decode
from parallel_r1.rollout.weights import WeightStream
from parallel_r1.structure.layout import Positions, layout
from parallel_r1.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersEngine(RolloutEngine):
    """A `RolloutEngine` on `AutoModelForCausalLM`: left-padded batches with a KV cache.

    Args:
        dtype: "auto" takes the folder's own; or "float32", "bfloat16", "float16".
        device: "auto" takes a GPU when there is one.
        max_model_len: context in tokens; None takes the model's `max_position_embeddings`.
        max_batch_size: rows decoded at once; more requests are done in several batches.
    """

    def __init__(
        self,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_batch_size: int = 128,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}: give at least 1")
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.max_batch_size = max_batch_size
        self.weight_version = 0
        self._model: PreTrainedModel | None = None
        self._loaded: dict[str, Any] = {}
        self._weights_known = False
        self._branching: Positions | None = None

    def start(self, model_dir: Path, branching: Positions | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = read_config(model_dir)
        dtype = stored_dtype(config) if self.dtype == "auto" else self.dtype
        loaded = {**architecture(config), "engine_dtype": dtype}
        self._branching = branching  # nothing is kept between calls here, so no new start is needed
        if self._model is not None and loaded == self._loaded:
            self._weights_known = False
            return
        self.close()
        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        torch_dtype = getattr(torch, dtype)
        self._weights_known = has_weights(model_dir)
        with torch.random.fork_rng(devices=[]):
            if self._weights_known:
                model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch_dtype)
            else:
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch_dtype)
        self._model, self._loaded = model.to(device).eval().requires_grad_(False), loaded

    @torch.no_grad()
    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        model = self._require_model()
        self._weights_known = False  # until all have arrived
        own = dict(model.named_parameters(remove_duplicate=False))
        stream = WeightStream(weights)
        for name, tensor in stream:
            if name not in own:
                raise RuntimeError(f"weight sync brought {name!r}, which the engine's model does not have")
            own[name].copy_(tensor)
        stream.check(own)
        self._weights_known = True
        self.weight_version += 1

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        model = self._ready(requests, sampling, None)
        done: dict[int, Rollout] = {
            i: make_rollout(r, (), (), False) for i, r in enumerate(requests) if len(r.prefix_ids) == r.max_tokens
        }
        rows = {i: _row(request, sampling) for i, request in enumerate(requests) if i not in done}
        # Rows of like length share a batch: less padding.
        todo = sorted(rows, key=lambda i: len(rows[i].context))
        for at in range(0, len(todo), self.max_batch_size):
            decode(model, [rows[i] for i in todo[at : at + self.max_batch_size]], sampling.temperature)
        for i, row in rows.items():
            done[i] = make_rollout(requests[i], row.ids, row.logprobs, row.stopped)
        return [done[i] for i in range(len(requests))]

    @torch.no_grad()
    def generate_branching(self, requests: Sequence[Request], sampling: Sampling, plan: Branching) -> list[Rollout]:
        """Each piece is computed from the start under the mask and positions of training: exact by construction."""
        model = self._ready(requests, sampling, plan.positions)
        check_branching(requests, plan)
        waiting: deque[tuple[Piece, Callable[[Sampled], None]]] = deque()
        done: dict[int, Rollout] = {}
        start_samples(requests, sampling, plan, lambda piece, then: waiting.append((piece, then)), done.__setitem__)
        while waiting:
            batch = [waiting.popleft() for _ in range(min(self.max_batch_size, len(waiting)))]
            rows = [_piece_row(piece, plan) for piece, _ in batch]
            decode(model, rows, sampling.temperature)
            for row, (_, then) in zip(rows, batch, strict=True):
                then(Sampled(tuple(row.ids), tuple(row.logprobs)))
        return [done[i] for i in range(len(requests))]

    def _ready(self, requests: Sequence[Request], sampling: Sampling, asked: Positions | None) -> PreTrainedModel:
        """The model, where it can serve the requests. asked: None for plain text, else the positions of branches."""
        model = self._require_model()
        if not self._weights_known:
            raise RuntimeError("the engine's weights are unknown: call sync before generate")
        require_mode(self._branching, asked)
        check_requests(requests, sampling, context=self._context(), vocab_size=model.config.vocab_size)
        return model

    def close(self) -> None:
        self._model, self._loaded, self._weights_known = None, {}, False

    def _require_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("the engine is not running: call start first")
        return self._model

    def _context(self) -> int:
        return self.max_model_len or self._require_model().config.max_position_embeddings


def _row(request: Request, sampling: Sampling) -> Row:
    context = request.prompt_ids + request.prefix_ids
    budget = request.max_tokens - len(request.prefix_ids)
    return Row(context, budget, request.seed, sampling.eos_ids, sampling.banned)


def _piece_row(piece: Piece, plan: Branching) -> Row:
    where = layout(piece.prompt_length, piece.context[piece.prompt_length :], plan.tags, "unseen", plan.positions)
    return Row(piece.context, piece.max_tokens, piece.seed, piece.stops, piece.banned, where)
