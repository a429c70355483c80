"""Many responses in one row: the visibility rule of `layout`, extended to sequences that share a prompt.

A group of responses to one prompt is a tree: its trunk is the prompt, its branches are the responses, their twigs are
the paths of parallel blocks. Trees stand in one row one after another, each as trunk, branch, branch, ...

Rule. Token i sees token j iff j <= i, both are of one tree, j lies in the trunk or in i's own branch, and they do not
lie in different paths of the same block. With one branch this is the rule of `layout`.

`sees` is the only place that knows the rule: the dense mask, the FlexAttention mask_mod and the masks of `attention`
are three ways to ask it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TreeIds:
    """Where each token of a row of T tokens belongs; all [T] int64.

    tree: which tree. branch: which response of the row, -1 in a trunk. block, path: as in `Layout`, -1 outside paths;
    block numbers need only differ inside one branch.
    """

    tree: Tensor
    branch: Tensor
    block: Tensor
    path: Tensor


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a row, which see [trunk, trunk_end) and themselves; the former is empty for a trunk."""

    start: int
    end: int
    trunk: int
    trunk_end: int

    @property
    def queries(self) -> int:
        return self.end - self.start

    @property
    def keys(self) -> int:
        return self.queries + self.trunk_end - self.trunk


def sees(ids: TreeIds, query: Tensor, key: Tensor) -> Tensor:
    """Whether the token at index `query` sees the token at index `key`: bool, of the shape both broadcast to."""
    branch_of_key = ids.branch[key]
    same_branch = ids.branch[query] == branch_of_key
    inside = (ids.tree[query] == ids.tree[key]) & ((branch_of_key < 0) | same_branch)
    block = ids.block[query]
    siblings = same_branch & (block >= 0) & (block == ids.block[key]) & (ids.path[query] != ids.path[key])
    return (key <= query) & inside & ~siblings


def dense_mask(ids: TreeIds) -> Tensor:
    """[T, T] bool (query, key)."""
    import torch

    at = torch.arange(len(ids.tree), device=ids.tree.device)
    return sees(ids, at[:, None], at[None, :])


def mask_mod(ids: TreeIds) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule in the form that `torch.nn.attention.flex_attention.create_block_mask` takes."""

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(ids, query, key)

    return rule
