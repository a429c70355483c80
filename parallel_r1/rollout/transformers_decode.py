"""Sampling rows of tokens with a transformers model: left-padded batches with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_r1.rollout.engine import Sampling
from parallel_r1.structure.layout import Layout, visibility

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Row:
    """A text in the making.

    context: what it goes on from. budget: tokens to sample at most, 1 or more. stops: ids that end it; banned: ids that
    are not sampled. layout: where the context stands, None for plain causal text; what is sampled follows its last
    token and sees all of it.
    """

    context: tuple[int, ...]
    budget: int
    seed: int
    stops: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    layout: Layout | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self.stops

    @property
    def open(self) -> bool:
        return not self.stopped and len(self.ids) < self.budget


def decode(model: PreTrainedModel, rows: Sequence[Row], temperature: float) -> None:
    """Sample every row to its end, in place. Rows that are done leave the batch when half of it is."""
    from transformers import DynamicCache

    device = model.device
    noise = uniforms(rows)
    tokens, real = left_padded([row.context for row in rows], device)
    mask, positions = _context_mask(rows, real)
    forbidden = _forbidden(rows, model.config.vocab_size, device)
    cache = DynamicCache(config=model.config)
    sampling = Sampling(temperature)
    live = list(range(len(rows)))  # row of each line of the batch
    step = 0
    while True:
        logits = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        if forbidden is not None:
            logits = logits.float().masked_fill(forbidden[live], float("-inf"))
        chosen, logprobs = sample_tokens(logits, noise[live, step] if temperature else None, sampling)
        for row, token, logprob in zip((rows[i] for i in live), chosen.tolist(), logprobs.tolist(), strict=True):
            if row.open:
                row.ids.append(token)
                row.logprobs.append(logprob)
        step += 1
        keep = [line for line, i in enumerate(live) if rows[i].open]
        if not keep:
            return
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        real = torch.cat([real, real.new_ones(len(live), 1)], dim=1)
        if len(keep) <= len(live) // 2:
            index = torch.tensor(keep, device=device)
            cache.batch_select_indices(index)
            tokens, positions, real = tokens[index], positions[index], real[index]
            live = [live[line] for line in keep]
        mask = real


def uniforms(rows: Sequence[Row]) -> Tensor:
    """[rows, longest budget] float64 in [0, 1): each row drawn from its own seed, so no row depends on another."""
    width = max(row.budget for row in rows)
    noise = torch.zeros(len(rows), width + 1, dtype=torch.float64)
    for line, row in enumerate(rows):
        generator = torch.Generator().manual_seed(row.seed)
        noise[line, : row.budget] = torch.rand(row.budget, generator=generator, dtype=torch.float64)
    return noise


def left_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[rows, longest] token ids and attention mask, both int64, padded on the left with id 0."""
    width = max(map(len, sequences))
    tokens = torch.tensor([[0] * (width - len(s)) + list(s) for s in sequences], device=device)
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences], device=device)
    return tokens, mask


def _context_mask(rows: Sequence[Row], real: Tensor) -> tuple[Tensor, Tensor]:
    """The attention mask of the contexts and their [rows, T] positions. real: [rows, T], 0 at padding.

    The mask is `real` itself where all rows are plain; else [rows, 1, T, T] bool, padding seeing itself alone, since
    the average over nothing would be no number.
    """
    positions = (real.cumsum(1) - 1).clamp(min=0)
    if all(row.layout is None for row in rows):
        return real, positions
    width = real.shape[1]
    visible = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
    for line, row in enumerate(rows):
        n = len(row.context)
        where = row.layout or Layout(tuple(range(n)), (-1,) * n, (-1,) * n)
        positions[line, width - n :] = torch.tensor(where.positions)
        visible[line, width - n :, width - n :] = visibility(torch.tensor(where.block), torch.tensor(where.path))
    return visible[:, None].to(real.device), positions


def _forbidden(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Tensor | None:
    """[rows, V] bool, True at ids that a row may not hold; None where no row forbids any."""
    if not any(row.banned for row in rows):
        return None
    out = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for line, row in enumerate(rows):
        out[line, list(row.banned)] = True
    return out.to(device)


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
