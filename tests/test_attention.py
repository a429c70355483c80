"""Attention by spans against attention under the dense mask, and FlexAttention under the same rule."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from parallel_r1.attention import bucketed, can_pack, plan_attention, shared_prompt_attention
from parallel_r1.modules.batching import Row, collate_pack
from parallel_r1.structure.tokens import TagIds
from parallel_r1.structure.tree import dense_mask, mask_mod
from parallel_r1.types import Pack, Rollout

TAGS = TagIds(1, 2, 3, 4, 5, 6)


def random_pack(seed: int, structure: str, longest: int = 40) -> Pack:
    rng = random.Random(seed)

    def response() -> tuple[int, ...]:
        out: list[int] = []
        for _ in range(rng.randint(1, 3)):
            out += [9] * rng.randint(1, longest)
            if rng.random() < 0.7:
                out += [1, 3, *[9] * rng.randint(1, 9), 4, 3, *[9] * rng.randint(1, 9), 4, 2, 5, 9, 6]
        return tuple(out)

    def row(prompt: tuple[int, ...]) -> Row:
        ids = response()
        n = len(ids)
        return Row(Rollout(prompt, ids, (0.0,) * n, (True,) * n, True), 1.0)

    trees = [[row((7,) * rng.randint(1, 20)) for _ in range(1)] for _ in range(3)]
    trees = [[tree[0], *(row(tree[0].rollout.prompt_ids) for _ in range(rng.randint(0, 4)))] for tree in trees]
    return collate_pack(trees, TAGS, structure)


def qkv(n: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    return [torch.randn(1, h, n, 8, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("structure", ["seen", "unseen"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("seed", "longest"), [(0, 8), (1, 8), (2, 300)])  # short spans share calls, long ones do not
def test_spans_give_what_the_dense_mask_gives(
    structure: str, heads: int, kv_heads: int, seed: int, longest: int
) -> None:
    torch.manual_seed(0)
    pack = random_pack(seed, structure, longest)
    plan = plan_attention(pack.spans, pack.ids)
    q, k, v = qkv(len(pack.tokens), heads, kv_heads)
    out, _ = shared_prompt_attention(nn.Module(), q, k, v, None, scaling=0.3, tree=plan)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    wide_k, wide_v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    dense = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=dense_mask(pack.ids), scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, torch.autograd.grad(dense, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("structure", ["seen", "unseen"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_under_the_same_rule_gives_the_same(structure: str) -> None:
    torch.manual_seed(0)
    pack = random_pack(3, structure)
    n = len(pack.tokens)
    q, k, v = (x.detach() for x in qkv(n, 2, 2))
    mask = create_block_mask(mask_mod(pack.ids), None, None, n, n, device="cpu")
    flex = flex_attention(q, k, v, block_mask=mask).transpose(1, 2)
    ours, _ = shared_prompt_attention(nn.Module(), q, k, v, None, tree=plan_attention(pack.spans, pack.ids))
    torch.testing.assert_close(ours, flex, rtol=1e-5, atol=1e-5)


def test_buckets_cover_every_span_once_and_waste_little() -> None:
    spans = random_pack(5, "seen", 300).spans
    buckets = bucketed(spans)
    assert sorted((s.start, s.end) for b in buckets for s in b) == [(s.start, s.end) for s in spans]
    for bucket in buckets:
        padded = len(bucket) * max(s.queries for s in bucket) * max(s.keys for s in bucket)
        assert padded <= 1.1 * sum(s.queries * s.keys for s in bucket) + 16_384


def test_only_models_of_plain_full_attention_pack() -> None:
    import transformers
    from conftest import tiny_model

    assert can_pack(tiny_model())
    config = transformers.MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    assert not can_pack(transformers.MistralForCausalLM(config))
