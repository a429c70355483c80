"""Attention over packed trees with plain SDPA: each response against its prompt and itself, never [T, T].

A dense mask over a row of T tokens costs T^2, of which a group of G responses uses about 1/G. So queries are cut into
spans (a prompt, or a response), each with the keys it can see: its trunk and itself. Spans of like size share one call.

transformers finds the function under the name `KIND`; a forward pass hands the plan over as the keyword `tree`. Without
one (a padded batch, generation) it is transformers' own SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_r1.structure.tree import Span, TreeIds, sees

KIND = "shared_prompt_sdpa"

# A call costs as much as this many cells of a mask, so tiny spans share one even at the price of some padding.
_CELLS_A_CALL = 16_384


@dataclass(frozen=True)
class Bucket:
    """B spans in one call, padded to Q queries and K keys. query: [B * Q], key: [B * K] indices; mask: [B, 1, Q, K]."""

    size: int
    query: Tensor
    key: Tensor
    mask: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """How the attention of one row is computed. back: [T], where its output lies among those of all buckets."""

    buckets: tuple[Bucket, ...]
    back: Tensor
    _biases: dict[torch.dtype, list[Tensor]] = field(default_factory=dict)

    def biases(self, dtype: torch.dtype) -> list[Tensor]:
        """The masks as additive biases; made once, so that all layers keep the same ones for their backward pass."""
        if dtype not in self._biases:
            self._biases[dtype] = [
                torch.zeros_like(b.mask, dtype=dtype).masked_fill_(~b.mask, float("-inf")) for b in self.buckets
            ]
        return self._biases[dtype]


def plan_attention(spans: Sequence[Span], ids: TreeIds) -> AttentionPlan:
    """Group spans that cover a row exactly once into few calls with little padding."""
    buckets, back, filled = [], torch.empty(sum(s.queries for s in spans), dtype=torch.int64), 0
    for part in bucketed(spans):
        query, key, mask = _indices(part, ids)
        buckets.append(Bucket(len(part), query.flatten(), key.flatten(), mask))
        for row, span in enumerate(part):
            back[span.start : span.end] = filled + row * query.shape[1] + torch.arange(span.queries)
        filled += query.numel()
    return AttentionPlan(tuple(buckets), back.to(ids.tree.device))


def bucketed(spans: Sequence[Span]) -> list[list[Span]]:
    """Neighbours by size share a bucket while padding costs less than another call."""
    out: list[list[Span]] = []
    used = 0
    for span in sorted(spans, key=lambda s: (s.keys, s.queries, s.start), reverse=True):
        cells = span.queries * span.keys
        if out:
            largest = [*out[-1], span]
            padded = len(largest) * max(s.queries for s in largest) * max(s.keys for s in largest)
            if padded <= 1.1 * (used + cells) + _CELLS_A_CALL:
                out[-1].append(span)
                used += cells
                continue
        out.append([span])
        used = cells
    return out


def _indices(spans: list[Span], ids: TreeIds) -> tuple[Tensor, Tensor, Tensor]:
    """[B, Q] and [B, K] indices into the row, and the [B, 1, Q, K] mask. Padding repeats a span's first query."""
    q, k = max(s.queries for s in spans), max(s.keys for s in spans)
    query = torch.tensor([[*range(s.start, s.end), *[s.start] * (q - s.queries)] for s in spans])
    keys = [[*range(s.trunk, s.trunk_end), *range(s.start, s.end), *[s.start] * (k - s.keys)] for s in spans]
    key, count = torch.tensor(keys), torch.tensor([s.keys for s in spans])
    query, key, count = (t.to(ids.tree.device) for t in (query, key, count))
    real = torch.arange(k, device=key.device) < count[:, None]
    mask = sees(ids, query[:, :, None], key[:, None, :]) & real[:, None, :]
    return query, key, mask[:, None]


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: AttentionPlan | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: [1, H, T, D], key and value: [1, KV heads, T, D] -> [1, T, H, D]."""
    if tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise ValueError("a position bias does not fit packed responses: choose policy.attn_implementation=eager")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    groups = q.shape[1] // k.shape[1]
    outputs = []
    for bucket, bias in zip(tree.buckets, tree.biases(q.dtype), strict=True):
        qb = _gather(q, bucket.query, bucket.size)
        kb, vb = (_gather(x, bucket.key, bucket.size) for x in (k, v))
        if groups > 1:
            kb, vb = kb.repeat_interleave(groups, dim=1), vb.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=bias, dropout_p=dropout, scale=scaling)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, tree.back)[None], None


def _gather(x: Tensor, index: Tensor, size: int) -> Tensor:
    """[T, heads, D] -> [B, heads, tokens a span, D]."""
    return x.index_select(0, index).unflatten(0, (size, -1)).transpose(1, 2)


def register() -> None:
    """Make `KIND` known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(KIND, shared_prompt_attention)
    AttentionMaskInterface.register(KIND, sdpa_mask)


def can_pack(model: nn.Module) -> bool:
    """True where every layer is plain full attention through transformers' interface: only then is a row of trees safe.

    Sliding windows count positions in the row, and recurrent layers run through it, so both would mix responses.
    """
    config = model.config
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] if getattr(config, "sliding_window", None) else ["full_attention"]
    return (
        set(kinds) == {"full_attention"}
        and getattr(model, "_can_set_attn_implementation", lambda: False)()
        and not getattr(model, "_is_stateful", False)
    )
