"""The rule for rows of trees against its definition read token by token, in all three forms."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from parallel_r1.structure.layout import layout, visibility
from parallel_r1.structure.tokens import TagIds
from parallel_r1.structure.tree import TreeIds, dense_mask, mask_mod

TAGS = TagIds(1, 2, 3, 4, 5, 6)
BLOCK = (8, 1, 3, 9, 4, 3, 9, 9, 4, 2, 5, 10, 6, 11)


def random_ids(rng: random.Random) -> list[tuple[int, int, int, int]]:
    """(tree, branch, block, path) of each token of a row of two or three trees."""
    out: list[tuple[int, int, int, int]] = []
    branch = 0
    for tree in range(rng.randint(2, 3)):
        out += [(tree, -1, -1, -1)] * rng.randint(1, 3)
        for _ in range(rng.randint(1, 3)):
            response = BLOCK[: rng.randint(1, len(BLOCK))] * rng.randint(1, 2)
            where = layout(0, response, TAGS, "unseen")
            out += [(tree, branch, b, p) for b, p in zip(where.block, where.path, strict=True)]
            branch += 1
    return out


def tensors(rows: list[tuple[int, int, int, int]]) -> TreeIds:
    return TreeIds(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def by_definition(query: tuple[int, int, int, int], key: tuple[int, int, int, int], q: int, k: int) -> bool:
    if k > q or query[0] != key[0]:
        return False
    if key[1] == -1:
        return True  # the prompt of its own tree
    if query[1] != key[1]:
        return False
    in_one_block = query[2] == key[2] != -1
    return not (in_one_block and query[3] != key[3])


@pytest.mark.parametrize("seed", range(8))
def test_dense_and_mask_mod_are_the_definition(seed: int) -> None:
    rows = random_ids(random.Random(seed))
    n = len(rows)
    expected = torch.tensor([[by_definition(rows[q], rows[k], q, k) for k in range(n)] for q in range(n)])
    ids = tensors(rows)
    assert torch.equal(dense_mask(ids), expected)
    assert torch.equal(create_mask(mask_mod(ids), None, None, n, n, device="cpu")[0, 0], expected)


@pytest.mark.parametrize("structure", ["seen", "unseen"])
def test_one_branch_is_the_rule_of_layout(structure: str) -> None:
    where = layout(3, BLOCK, TAGS, structure)
    block, path = torch.tensor(where.block), torch.tensor(where.path)
    branch = torch.tensor([-1] * 3 + [0] * len(BLOCK))
    ids = TreeIds(torch.zeros_like(branch), branch, block, path)
    assert torch.equal(dense_mask(ids), visibility(block, path))
