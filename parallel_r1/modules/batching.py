"""From rollouts to padded rows under a token budget. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel_r1.structure.grammar import Structure
from parallel_r1.structure.layout import Positions, layout, visibility
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import PolicyBatch, Rollout


@dataclass(frozen=True)
class Row:
    """One sequence to train on. advantage: its weight in the policy loss (unused in supervised training)."""

    rollout: Rollout
    advantage: float = 0.0

    def __len__(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.response_ids)


# what a rank without rows runs: nothing in it is trained, yet its loss has a gradient function
EMPTY_ROW = Row(Rollout((0,), (0,), (0.0,), (False,), finished=True))


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows into micro-batches of at most `max_tokens` padded tokens each, similar lengths together.

    A single row above the budget gets a micro-batch of its own. Deterministic; every row appears exactly once.
    """
    out: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        if out and len(out[-1][0]) * (len(out[-1]) + 1) <= max_tokens:
            out[-1].append(row)
        else:
            out.append([row])
    return out


def collate(
    rows: Sequence[Row],
    tags: TagIds,
    pad_id: int,
    structure: Structure,
    positions: Positions = "longest",
    banned: tuple[int, ...] = (),
    device: torch.device | str = "cpu",
) -> PolicyBatch:
    """Pad rows on the right into one PolicyBatch."""
    width = max(map(len, rows))
    shape = (len(rows), width)
    ids = torch.full(shape, pad_id)
    place = torch.arange(width).repeat(len(rows), 1)
    mask = torch.zeros(shape, dtype=torch.bool)
    old = torch.zeros(shape)
    block, path = torch.full(shape, -1), torch.full(shape, -1)
    for r, row in enumerate(rows):
        rollout, n, start = row.rollout, len(row), len(row.rollout.prompt_ids)
        ids[r, :n] = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        mask[r, start:n] = torch.tensor(rollout.sampled, dtype=torch.bool)
        old[r, start:n] = torch.tensor(rollout.logprobs)
        if structure == "unseen":
            where = layout(start, rollout.response_ids, tags, structure, positions)
            place[r, :n] = torch.tensor(where.positions)
            block[r, :n], path[r, :n] = torch.tensor(where.block), torch.tensor(where.path)
    visible = visibility(block, path).to(device) if structure == "unseen" else None
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32)
    return PolicyBatch(
        ids.to(device), place.to(device), mask.to(device), old.to(device), advantages.to(device), visible, banned
    )
