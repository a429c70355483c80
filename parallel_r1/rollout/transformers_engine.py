"""Sampling with plain transformers: slow, simple, exact in float32. The oracle of the tests, and the fallback.

It holds a model of its own, so it is as stale as vLLM would be until it is synced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
from parallel_r1.rollout.weights import WeightStream
from parallel_r1.structure.layout import Positions
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
        # Rows of like length share a batch: less padding.
        todo = sorted((i for i in range(len(requests)) if i not in done), key=lambda i: _length(requests[i]))
        for at in range(0, len(todo), self.max_batch_size):
            batch = todo[at : at + self.max_batch_size]
            rows = [_Row(requests[i]) for i in batch]
            decode(model, rows, sampling)
            for i, row in zip(batch, rows, strict=True):
                done[i] = make_rollout(row.request, row.ids, row.logprobs, row.finished)
        return [done[i] for i in range(len(requests))]

    @torch.no_grad()
    def generate_branching(self, requests: Sequence[Request], sampling: Sampling, plan: Branching) -> list[Rollout]:
        from parallel_r1.rollout.transformers_branching import generate_branching

        model = self._ready(requests, sampling, plan.positions)
        check_branching(requests, plan)
        return generate_branching(model, requests, sampling, plan, self.max_batch_size)

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


@dataclass
class _Row:
    """A response in the making."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def budget(self) -> int:
        return self.request.max_tokens - len(self.request.prefix_ids)

    @property
    def open(self) -> bool:
        return not self.finished and len(self.ids) < self.budget


def _length(request: Request) -> int:
    return len(request.prompt_ids) + len(request.prefix_ids)


def decode(model: PreTrainedModel, rows: list[_Row], sampling: Sampling) -> None:
    """Sample every row to its end, in place. Rows that are done leave the batch when half of it is."""
    from transformers import DynamicCache

    device = model.device
    noise = uniforms(rows)
    tokens, mask = left_padded([r.request.prompt_ids + r.request.prefix_ids for r in rows], device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    live = list(range(len(rows)))  # row of each line of the batch
    eos = frozenset(sampling.eos_ids)
    step = 0
    while True:
        logits = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        chosen, logprobs = sample_tokens(logits, noise[live, step] if sampling.temperature else None, sampling)
        for row, token, logprob in zip((rows[i] for i in live), chosen.tolist(), logprobs.tolist(), strict=True):
            if row.open:
                row.ids.append(token)
                row.logprobs.append(logprob)
                row.finished = token in eos
        step += 1
        keep = [line for line, i in enumerate(live) if rows[i].open]
        if not keep:
            return
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
        if len(keep) <= len(live) // 2:
            index = torch.tensor(keep, device=device)
            cache.batch_select_indices(index)
            tokens, positions, mask = tokens[index], positions[index], mask[index]
            live = [live[line] for line in keep]


def uniforms(rows: Sequence[_Row]) -> Tensor:
    """[rows, longest budget] float64 in [0, 1): each row drawn from its own seed, so no row depends on another."""
    width = max(row.budget for row in rows)
    noise = torch.zeros(len(rows), width + 1, dtype=torch.float64)
    for line, row in enumerate(rows):
        generator = torch.Generator().manual_seed(row.request.seed)
        noise[line, : row.budget] = torch.rand(row.budget, generator=generator, dtype=torch.float64)
    return noise


def left_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[rows, longest] token ids and attention mask, both int64, padded on the left with id 0."""
    width = max(map(len, sequences))
    tokens = torch.tensor([[0] * (width - len(s)) + list(s) for s in sequences], device=device)
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences], device=device)
    return tokens, mask


def sample_tokens(logits: Tensor, noise: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under the distribution it came from.

    logits: [rows, vocabulary]; noise: [rows] float64 in [0, 1), None for greedy. Returns [rows] int64, [rows] float32.
    A token is the inverse of the cumulative distribution at the row's noise.
    """
    logits = logits.float()
    if sampling.banned:
        logits = logits.index_fill(1, torch.tensor(sampling.banned, device=logits.device), float("-inf"))
    logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
    if noise is None:
        chosen = logprobs.argmax(dim=-1)
    else:
        # float64: with a float32 sum over a large vocabulary rare tokens would never, or wrongly, be drawn. A strict
        # comparison never lands on a token of probability 0, since its step of the distribution is empty.
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        target = noise.to(logits.device) * cumulative[:, -1]
        chosen = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]
