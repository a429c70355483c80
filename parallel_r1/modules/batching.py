"""From rollouts to forward passes under a token budget. Pure functions.

`packs` and `collate_pack` are what training uses; `micro_batches` and `collate` make the plain padded form, which tests
and `tools/bench.py` compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from parallel_r1.structure.grammar import Structure
from parallel_r1.structure.layout import Positions, layout, visibility
from parallel_r1.structure.tokens import TagIds, segments
from parallel_r1.structure.tree import Span, TreeIds
from parallel_r1.types import SEGMENT_KINDS, Pack, PolicyBatch, Rollout

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One sequence to train on. advantage: its weight in the policy loss (unused in supervised training)."""

    rollout: Rollout
    advantage: float = 0.0

    def __len__(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.response_ids)


@dataclass(frozen=True)
class Pass:
    """One forward pass. rows: those of the pack, in the order in which it holds their trained tokens."""

    pack: Pack
    rows: list[Row]


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


# --------------------------------------------------------------------------- packs: no padding, prompts shared

Tree = list[Row]
"""Rows of one prompt, which is computed once for them."""


def trees(rows: Sequence[Row], max_tokens: int) -> list[Tree]:
    """Rows of equal prompts together, as trees of at most `max_tokens` tokens (prompt once, all responses).

    A group above the budget becomes several trees, longest responses first; a single row above it a tree of its own.
    Rows without a trained token are left out: nothing of them reaches the loss.
    """
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        if any(row.rollout.sampled):
            groups.setdefault(row.rollout.prompt_ids, []).append(row)
    out: list[Tree] = []
    for prompt, members in groups.items():
        room = max_tokens - len(prompt)
        out += _first_fit(members, lambda row: len(row.rollout.response_ids), room)
    return out


def packs(rows: Sequence[Row], max_tokens: int, shared: bool = True) -> list[list[Tree]]:
    """Cut rows into forward passes of at most `max_tokens` tokens. Deterministic; every trained row appears once.

    shared=False gives each row a pass of its own, for models that cannot tell packed responses apart.
    """
    if not shared:
        return [[[row]] for row in rows if any(row.rollout.sampled)]
    return _first_fit(trees(rows, max_tokens), tree_tokens, max_tokens)


def tree_tokens(tree: Tree) -> int:
    """Tokens of a tree: its prompt once, and every response."""
    return len(tree[0].rollout.prompt_ids) + sum(len(row.rollout.response_ids) for row in tree)


def _first_fit(items: Sequence[T], size: Callable[[T], int], room: int) -> list[list[T]]:
    """First fit, largest first; an item above `room` gets a bin of its own."""
    bins: list[list[T]] = []
    used: list[int] = []
    for item in sorted(items, key=size, reverse=True):
        n = size(item)
        k = next((k for k, filled in enumerate(used) if filled + n <= room), len(bins))
        if k == len(bins):
            bins.append([])
            used.append(0)
        bins[k].append(item)
        used[k] += n
    return bins


def collate_pack(
    pack: Sequence[Tree],
    tags: TagIds,
    structure: Structure,
    positions: Positions = "longest",
    device: torch.device | str = "cpu",
) -> Pack:
    """One row of trees, and what the loss needs to know about each trained token. An empty pack trains nothing."""
    tokens: list[int] = []
    place: list[int] = []
    tree, branch, block, path = [], [], [], []
    spans: list[Span] = []
    source, targets, response, kind, engine, bans, advantages = [], [], [], [], [], [], []
    for t, rows in enumerate(pack or [[EMPTY_ROW]]):
        prompt = rows[0].rollout.prompt_ids
        trunk, trunk_end = len(tokens), len(tokens) + len(prompt)
        spans.append(Span(trunk, trunk_end, trunk, trunk))
        tokens += prompt
        place += range(len(prompt))
        tree += [t] * len(prompt)
        branch, block, path = (x + [-1] * len(prompt) for x in (branch, block, path))
        for row in rows:
            rollout, start, s = row.rollout, len(tokens), len(advantages)
            n = len(rollout.response_ids)
            where = layout(len(prompt), rollout.response_ids, tags, structure, positions)
            spans.append(Span(start, start + n, trunk, trunk_end))
            tokens += rollout.response_ids
            place += where.positions[len(prompt) :]
            tree += [t] * n
            branch += [s] * n
            block += where.block[len(prompt) :]
            path += where.path[len(prompt) :]
            kinds = segment_kinds(rollout.response_ids, tags)
            for i in (i for i, sampled in enumerate(rollout.sampled) if sampled):
                source.append(start + i - 1 if i else trunk_end - 1)
                targets.append(rollout.response_ids[i])
                response.append(s)
                kind.append(kinds[i])
                engine.append(rollout.logprobs[i])
                bans.append(rollout.banned[i] if rollout.banned else ())
            advantages.append(row.advantage)

    def ints(values: Sequence) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    ids = TreeIds(ints(tree), ints(branch), ints(block), ints(path))
    known = tuple(span for span in spans if span.queries)
    widest = max(map(len, bans), default=0)
    banned = ints([[*ids_, *[-1] * (widest - len(ids_))] for ids_ in bans]) if widest else None
    return Pack(
        ints(tokens), ints(place), ids, known, ints(source), ints(targets), ints(response), ints(kind), floats(engine),
        floats(advantages), banned,
    )  # fmt: skip


def make_pass(
    pack: Sequence[Tree],
    tags: TagIds,
    structure: Structure,
    positions: Positions = "longest",
    device: torch.device | str = "cpu",
) -> Pass:
    """`collate_pack`, with the rows it was made of."""
    return Pass(collate_pack(pack, tags, structure, positions, device), [row for rows in pack for row in rows])


def segment_kinds(response_ids: Sequence[int], tags: TagIds) -> list[int]:
    """The kind of each response token, as an index into `SEGMENT_KINDS`."""
    return [
        SEGMENT_KINDS.index(segment.kind)
        for segment in segments(response_ids, tags)
        for _ in range(segment.start, segment.end)
    ]
