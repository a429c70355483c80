"""Branches on plain transformers: each piece is computed from the start, under the mask and positions of training.

Slow, and exact by construction: no keys or values are ever carried from one piece to another. The oracle of the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_r1.rollout.branching import Piece, Sampled, start_samples
from parallel_r1.rollout.engine import Branching, Request, Sampling
from parallel_r1.rollout.transformers_engine import _Row, left_padded, sample_tokens, uniforms
from parallel_r1.structure.layout import Layout, layout, visibility
from parallel_r1.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def generate_branching(
    model: PreTrainedModel, requests: Sequence[Request], sampling: Sampling, plan: Branching, max_batch_size: int
) -> list[Rollout]:
    """One response a request. Pieces are computed in batches, in the order in which samples ask for them."""
    waiting: deque[tuple[Piece, Callable[[Sampled], None]]] = deque()
    done: dict[int, Rollout] = {}
    start_samples(requests, sampling, plan, lambda piece, then: waiting.append((piece, then)), done.__setitem__)
    while waiting:
        batch = [waiting.popleft() for _ in range(min(max_batch_size, len(waiting)))]
        results = decode_pieces(model, [piece for piece, _ in batch], sampling.temperature, plan)
        for (_, then), result in zip(batch, results, strict=True):
            then(result)
    return [done[index] for index in range(len(requests))]


def piece_layout(piece: Piece, plan: Branching) -> Layout:
    """Where the tokens of a piece's context stand. What is sampled goes on from the last one, and sees all it sees."""
    return layout(piece.prompt_length, piece.context[piece.prompt_length :], plan.tags, "unseen", plan.positions)


def decode_pieces(
    model: PreTrainedModel, pieces: Sequence[Piece], temperature: float, plan: Branching
) -> list[Sampled]:
    """Sample every piece to its end: one batch, padded on the left."""
    from transformers import DynamicCache

    device = model.device
    rows = [_Row(Request(piece.context, piece.max_tokens, piece.seed)) for piece in pieces]
    noise = uniforms(rows)
    tokens, real = left_padded([piece.context for piece in pieces], device)
    positions, visible = _padded_layouts([piece_layout(piece, plan) for piece in pieces], device)
    mask = visible[:, None]
    real = real.bool()
    forbidden = _bans(pieces, model.config.vocab_size, device)
    cache = DynamicCache(config=model.config)
    heat = Sampling(temperature)
    live = list(range(len(rows)))
    step = 0
    while True:
        logits = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        logits = logits.float().masked_fill(forbidden[live], float("-inf"))
        chosen, logprobs = sample_tokens(logits, noise[live, step] if temperature else None, heat)
        for i, token, logprob in zip(live, chosen.tolist(), logprobs.tolist(), strict=True):
            if rows[i].open:
                rows[i].ids.append(token)
                rows[i].logprobs.append(logprob)
                rows[i].finished = token in pieces[i].stops
        step += 1
        keep = [line for line, i in enumerate(live) if rows[i].open]
        if not keep:
            return [Sampled(tuple(row.ids), tuple(row.logprobs)) for row in rows]
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        real = torch.cat([real, real.new_ones(len(live), 1)], dim=1)
        if len(keep) <= len(live) // 2:
            index = torch.tensor(keep, device=device)
            cache.batch_select_indices(index)
            tokens, positions, real = tokens[index], positions[index], real[index]
            live = [live[line] for line in keep]
        mask = real[:, None, None, :]


def _padded_layouts(layouts: Sequence[Layout], device: torch.device) -> tuple[Tensor, Tensor]:
    """[rows, T] positions and [rows, T, T] visibility, padded on the left. Padding sees itself alone: no row is empty."""
    width = max(map(len, layouts))
    positions = torch.zeros(len(layouts), width, dtype=torch.int64)
    visible = torch.eye(width, dtype=torch.bool).repeat(len(layouts), 1, 1)
    for row, where in enumerate(layouts):
        start = width - len(where)
        positions[row, start:] = torch.tensor(where.positions)
        visible[row, start:, start:] = visibility(torch.tensor(where.block), torch.tensor(where.path))
    return positions.to(device), visible.to(device)


def _bans(pieces: Sequence[Piece], vocab_size: int, device: torch.device) -> Tensor:
    """[rows, V] bool, True at ids that a piece may not hold."""
    out = torch.zeros(len(pieces), vocab_size, dtype=torch.bool)
    for row, piece in enumerate(pieces):
        out[row, list(piece.banned)] = True
    return out.to(device)
