"""Packs: every trained row once, within the budget, prompts shared; and what a pack says about each token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.modules.batching import Row, collate_pack, packs, tree_tokens, trees
from parallel_r1.structure.layout import layout
from parallel_r1.structure.tokens import TagIds
from parallel_r1.structure.tree import Span
from parallel_r1.types import SEGMENT_KINDS, Rollout

TAGS = TagIds(1, 2, 3, 4, 5, 6)
BLOCK = (8, 1, 3, 9, 4, 3, 9, 9, 4, 2, 5, 10, 6)


def row(prompt: tuple[int, ...], response: tuple[int, ...], advantage: float = 1.0, **more) -> Row:
    n = len(response)
    given_ = {"logprobs": tuple(-0.5 * i for i in range(n)), "sampled": (True,) * n, "finished": True} | more
    return Row(Rollout(prompt, response, **given_), advantage)


@settings(deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)), min_size=0, max_size=8
    ),
    budget=st.integers(1, 150),
)
def test_every_trained_row_once_and_the_budget(groups: list[tuple[int, list[int]]], budget: int) -> None:
    rows = [
        row((g,) * p, (11,) * n, advantage=g + i / 10) for g, (p, ns) in enumerate(groups) for i, n in enumerate(ns)
    ]
    made = packs(rows, budget)
    found = sorted(r.advantage for pack in made for tree in pack for r in tree)
    assert found == sorted(r.advantage for r in rows if r.rollout.response_ids)
    for pack in made:
        single = len(pack) == 1 and len(pack[0]) == 1
        assert single or sum(map(tree_tokens, pack)) <= budget
        assert all(len({r.rollout.prompt_ids for r in tree}) == 1 for tree in pack)
    assert packs(rows, budget) == made


def test_a_group_is_split_only_where_it_must_be() -> None:
    rows = [row((7,) * 10, (11,) * n) for n in (20, 5, 30, 15)]
    assert [[len(r.rollout.response_ids) for r in tree] for tree in trees(rows, 80)] == [[30, 20, 15, 5]]
    assert [[len(r.rollout.response_ids) for r in tree] for tree in trees(rows, 50)] == [[30, 5], [20, 15]]
    # 25 of room: 30 alone, then 20 + 5, then 15
    assert [[len(r.rollout.response_ids) for r in tree] for tree in trees(rows, 35)] == [[30], [20, 5], [15]]


def test_models_that_cannot_pack_get_a_pass_a_row() -> None:
    rows = [row((7,), (11,) * 3), row((7,), (11,) * 2), row((7,), (), 0.0)]
    assert packs(rows, 100, shared=False) == [[[rows[0]]], [[rows[1]]]]
    assert all(collate_pack(p, TAGS, "seen").is_plain for p in packs(rows, 100, shared=False))


def test_a_pack_by_hand() -> None:
    first = row((20, 21), (30, 31), 1.5)
    second = row((20, 21), (40, 41, 42), -1.0, sampled=(False, True, True))
    other = row((22,), (50,), 0.5)
    pack = collate_pack([[first, second], [other]], TAGS, "seen")
    assert pack.tokens.tolist() == [20, 21, 30, 31, 40, 41, 42, 22, 50]
    assert pack.positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 0, 1]
    assert pack.ids.tree.tolist() == [0] * 7 + [1] * 2
    assert pack.ids.branch.tolist() == [-1, -1, 0, 0, 1, 1, 1, -1, 2]
    assert pack.spans == (Span(0, 2, 0, 0), Span(2, 4, 0, 2), Span(4, 7, 0, 2), Span(7, 8, 7, 7), Span(8, 9, 7, 8))
    assert pack.targets.tolist() == [30, 31, 41, 42, 50]
    assert pack.source.tolist() == [1, 2, 4, 5, 7]  # the prompt's last token predicts 30, and would predict 40
    assert pack.response.tolist() == [0, 0, 1, 1, 2]
    assert pack.engine_logprobs.tolist() == [0.0, -0.5, -0.5, -1.0, 0.0]
    assert pack.advantages.tolist() == [1.5, -1.0, 0.5]
    assert pack.banned is None
    assert not pack.is_plain


def test_unseen_responses_keep_their_own_layout() -> None:
    for positions in ("longest", "index"):
        pack = collate_pack([[row((20, 21), (12,)), row((20, 21), BLOCK)]], TAGS, "unseen", positions)
        where = layout(2, BLOCK, TAGS, "unseen", positions)
        assert pack.positions[3:].tolist() == list(where.positions[2:])
        assert pack.ids.block[3:].tolist() == list(where.block[2:])
        assert pack.ids.path[3:].tolist() == list(where.path[2:])
    kinds = [SEGMENT_KINDS[k] for k in pack.kind[1:].tolist()]
    assert kinds == ["main"] * 2 + ["path"] * 7 + ["main"] + ["summary"] * 3


def test_bans_of_single_tokens_reach_the_pack() -> None:
    banned = ((), (3, 4), (5,))
    pack = collate_pack([[row((20,), (30, 31, 32), banned=banned), row((20,), (33,))]], TAGS, "seen")
    assert pack.banned.tolist() == [[-1, -1], [3, 4], [5, -1], [-1, -1]]


def test_an_empty_pack_trains_nothing() -> None:
    pack = collate_pack([], TAGS, "seen")
    assert len(pack.targets) == 0
    assert pack.tokens.dtype == pack.source.dtype == torch.int64
    assert pack.is_plain
