"""Rows, micro-batches and the padded batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.modules.batching import EMPTY_ROW, Row, collate, micro_batches
from parallel_r1.structure.layout import layout, visibility
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import Rollout

TAG_IDS = TagIds(1, 2, 3, 4, 5, 6)
PAR, END_PAR, PATH, END_PATH = 1, 2, 3, 4
PAD = 0
BLOCK = (8, PAR, PATH, 9, END_PATH, PATH, 9, 9, END_PATH, END_PAR, 10)


def row(prompt: int, response: tuple[int, ...] | int, advantage: float = 0.0, sampled: bool = True) -> Row:
    ids = response if isinstance(response, tuple) else (11,) * response
    n = len(ids)
    return Row(Rollout((7,) * prompt, ids, tuple(-0.5 * i for i in range(n)), (sampled,) * n, True), advantage)


@settings(deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=25), budget=st.integers(1, 120))
def test_micro_batches_keep_every_row_once_and_the_budget(lengths: list[tuple[int, int]], budget: int) -> None:
    rows = [row(p, r, advantage=float(i)) for i, (p, r) in enumerate(lengths)]
    parts = micro_batches(rows, budget)
    assert sorted(one.advantage for part in parts for one in part) == list(range(len(rows)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(map(len, part)) <= budget
    sizes = [len(one) for part in parts for one in part]
    assert sizes == sorted(sizes, reverse=True)  # similar lengths together
    assert micro_batches(rows, budget) == parts


def test_micro_batches_by_hand() -> None:
    rows = [row(1, n - 1) for n in (3, 10, 4, 2, 5)]
    # 10 | 5 4 (2 * 5 = 10) | 3 2 (2 * 3 = 6), a third row would be 3 * 5 = 15
    assert [[len(one) for one in part] for part in micro_batches(rows, 10)] == [[10], [5, 4], [3, 2]]
    assert [[len(one) for one in part] for part in micro_batches(rows, 1)] == [[10], [5], [4], [3], [2]]
    assert [[len(one) for one in part] for part in micro_batches(rows, 50)] == [[10, 5, 4, 3, 2]]
    assert micro_batches([], 10) == []


def test_collate_by_hand() -> None:
    partly = Row(Rollout((7, 7), (5, 11, 6), (0.0, -0.5, 0.0), (False, True, False), finished=False), -1.5)
    batch = collate([partly, row(1, 1, advantage=2.0)], TAG_IDS, PAD, "seen", banned=(3, 4))
    assert batch.input_ids.tolist() == [[7, 7, 5, 11, 6], [7, 11, PAD, PAD, PAD]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.loss_mask.tolist() == [[False, False, False, True, False], [False, True, False, False, False]]
    assert batch.old_logprobs.tolist() == [[0.0, 0.0, 0.0, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
    assert batch.advantages.tolist() == [-1.5, 2.0]
    assert batch.visible is None
    assert batch.banned == (3, 4)


def test_types_of_a_batch() -> None:
    batch = collate([row(2, 3)], TAG_IDS, PAD, "unseen")
    assert (batch.input_ids.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
    assert (batch.loss_mask.dtype, batch.visible.dtype) == (torch.bool, torch.bool)
    assert (batch.old_logprobs.dtype, batch.advantages.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("positions", ["longest", "index"])
def test_unseen_rows_carry_their_layout(positions: str) -> None:
    rows = [row(2, BLOCK), row(5, 2), row(3, BLOCK[:7])]  # the last was cut inside a path
    batch = collate(rows, TAG_IDS, PAD, "unseen", positions)
    assert batch.visible.shape == (3, 13, 13)
    for r, one in enumerate(rows):
        where = layout(len(one.rollout.prompt_ids), one.rollout.response_ids, TAG_IDS, "unseen", positions)
        n = len(one)
        assert batch.positions[r, :n].tolist() == list(where.positions)
        expected = visibility(torch.tensor(where.block), torch.tensor(where.path))
        assert torch.equal(batch.visible[r, :n, :n], expected)
        assert torch.equal(batch.visible[r, n:], torch.ones(13, 13, dtype=torch.bool).tril()[n:])  # padding is causal
        assert batch.positions[r].max() < 13  # padding included: no position beyond the row
    assert batch.visible.diagonal(dim1=1, dim2=2).all()


def test_structure_decides_whether_paths_are_isolated() -> None:
    for structure in ("seen", "sequential"):
        assert collate([row(2, BLOCK)], TAG_IDS, PAD, structure).visible is None


@pytest.mark.parametrize("structure", ["seen", "unseen"])
def test_odd_rows_are_padded_too(structure: str) -> None:
    rows = [row(1, 0), row(1, 1), row(4, 0), EMPTY_ROW]
    batch = collate(rows, TAG_IDS, PAD, structure)
    assert batch.input_ids.shape == (4, 4)
    assert batch.loss_mask.sum(dim=1).tolist() == [0, 1, 0, 0]


def test_nothing_in_an_empty_row_is_trained() -> None:
    batch = collate([EMPTY_ROW], TAG_IDS, PAD, "seen")
    assert not batch.loss_mask.any()
    assert batch.input_ids.shape[1] >= 2  # there is a next token to score, so the loss is connected to the weights


@settings(deadline=None)
@given(prompt=st.integers(1, 5), sampled=st.lists(st.booleans(), max_size=8))
def test_the_first_column_is_never_trained(prompt: int, sampled: list[bool]) -> None:
    n = len(sampled)
    one = Row(Rollout((7,) * prompt, (11,) * n, (0.0,) * n, tuple(sampled), True))
    batch = collate([one], TAG_IDS, PAD, "seen")
    assert not batch.loss_mask[:, 0].any()
    assert batch.loss_mask.sum() == sum(sampled)
