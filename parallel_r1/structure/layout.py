"""From segments to positions and visibility: ONE rule that every mask and every position comes from.

Rule. Token i sees token j iff j <= i and they do not lie in different paths of the same block. So paths are isolated
from their siblings, while the summary and all later text see every path.

Positions. Every path of a block starts at the same position, `base`, where the first one starts. After the block,
`longest` resumes at base + length of the longest path (Multiverse, Parallel-R1), `index` at the token's own index (what
an engine without custom positions computes). A run of stray tokens between paths (white space, say) is laid out as if
the block ended there: after the longest path so far, or at its own index. In the `seen` and `sequential` structures
both schemes are the plain causal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from parallel_r1.structure.grammar import Structure
from parallel_r1.structure.tokens import TagIds, segments

if TYPE_CHECKING:
    from torch import Tensor

Positions = Literal["longest", "index"]


@dataclass(frozen=True)
class Layout:
    """Where each token of a sequence (prompt + response) stands.

    positions: [T]; block, path: [T], -1 outside paths.
    """

    positions: tuple[int, ...]
    block: tuple[int, ...]
    path: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_causal(self) -> bool:
        """True where the rule reduces to the plain causal mask with plain positions."""
        return all(b < 0 for b in self.block) and all(p == i for i, p in enumerate(self.positions))


def layout(
    prompt_length: int,
    response_ids: Sequence[int],
    tags: TagIds,
    structure: Structure,
    positions: Positions = "longest",
) -> Layout:
    """Lay out one sequence. The prompt is plain whatever tags it names: only the response is structured.

    A block that was cut keeps its paths isolated. Raises ValueError for an unknown structure or position scheme.
    """
    if structure not in ("seen", "unseen", "sequential"):
        raise ValueError(f"structure={structure!r}: choose seen, unseen or sequential")
    if positions not in ("longest", "index"):
        raise ValueError(f"positions={positions!r}: choose longest or index")
    n = prompt_length + len(response_ids)
    if structure != "unseen":
        return Layout(tuple(range(n)), (-1,) * n, (-1,) * n)

    place = list(range(prompt_length))
    block, path = [-1] * prompt_length, [-1] * prompt_length
    at = prompt_length  # position of the next token
    base = end_of_longest = at
    current = -1
    for segment in segments(response_ids, tags):
        length = segment.end - segment.start
        if segment.kind == "path":
            if segment.block != current:
                current, base, end_of_longest = segment.block, at, at
            place += range(base, base + length)
            end_of_longest = max(end_of_longest, base + length)
            at = end_of_longest
        else:
            if positions == "index":
                at = prompt_length + segment.start
            place += range(at, at + length)
            at += length
        inside = segment.kind == "path"
        block += [segment.block if inside else -1] * length
        path += [segment.path if inside else -1] * length
    return Layout(tuple(place), tuple(block), tuple(path))


def visibility(block: Tensor, path: Tensor) -> Tensor:
    """Dense form of the rule. block, path: [..., T] int, -1 outside paths. Returns [..., T, T] bool (query, key)."""
    import torch

    n = block.shape[-1]
    causal = torch.ones(n, n, dtype=torch.bool, device=block.device).tril()
    same_block = (block[..., :, None] == block[..., None, :]) & (block[..., :, None] >= 0)
    return causal & ~(same_block & (path[..., :, None] != path[..., None, :]))
