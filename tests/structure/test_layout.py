"""Positions and visibility: by hand, and against an O(n^2) reading of the definition on 1,000 random responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.structure.grammar import Structure
from parallel_r1.structure.layout import Layout, Positions, layout, visibility
from parallel_r1.structure.tokens import TagIds

PAR, END_PAR, PATH, END_PATH, SUM, END_SUM = range(1, 7)
TAG_IDS = TagIds(PAR, END_PAR, PATH, END_PATH, SUM, END_SUM)
X, SPACE = 9, 8
#           0  1    2     3  4         5     6  7  8         9        10   11 12       13
RESPONSE = [X, PAR, PATH, X, END_PATH, PATH, X, X, END_PATH, END_PAR, SUM, X, END_SUM, X]


def dense(where: Layout) -> torch.Tensor:
    return visibility(torch.tensor(where.block), torch.tensor(where.path))


def test_positions_by_hand() -> None:
    # a prompt of 2: main at 2, 3; base 4; paths 4..6 and 4..7; longest is 4, so the block ends at 4 + 4 = 8
    longest = layout(2, RESPONSE, TAG_IDS, "unseen").positions
    assert longest == (0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    # by index: </Parallel> is token 2 + 9 = 11
    index = layout(2, RESPONSE, TAG_IDS, "unseen", "index").positions
    assert index == (0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 11, 12, 13, 14, 15)


def test_visibility_by_hand() -> None:
    sees = dense(layout(0, RESPONSE, TAG_IDS, "unseen"))
    assert sees[4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert sees[6].nonzero().flatten().tolist() == [0, 1, 5, 6]  # the second path: the main text and itself
    assert sees[9].nonzero().flatten().tolist() == list(range(10))  # </Parallel> sees both paths
    assert sees[13].nonzero().flatten().tolist() == list(range(14))


def test_white_space_between_paths_stands_after_the_longest_so_far() -> None:
    #      0    1     2  3         4      5     6         7      8
    ids = [PAR, PATH, X, END_PATH, SPACE, PATH, END_PATH, SPACE, END_PAR]
    # base 1, first path 1..3, so a run outside starts at 4; second path 1..2; the next run starts at 4 again
    assert layout(0, ids, TAG_IDS, "unseen").positions == (0, 1, 2, 3, 4, 1, 2, 4, 5)
    assert layout(0, ids, TAG_IDS, "unseen", "index").positions == (0, 1, 2, 3, 4, 1, 2, 7, 8)


class Reader:
    """The definition, token by token, written without segments: which path of which block a token lies in."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.block, self.path = [-1] * len(ids), [-1] * len(ids)
        opened = [i for i, token in enumerate(ids) if token == PAR and not self._open_before(ids, i)]
        for number, start in enumerate(opened):
            end = next((i for i in range(start, len(ids)) if ids[i] == END_PAR), len(ids))
            starts = [i for i in range(start, end) if ids[i] == PATH]
            for p, a in enumerate(starts):
                b = starts[p + 1] if p + 1 < len(starts) else end
                close = next((i + 1 for i in range(a, b) if ids[i] == END_PATH), b)
                for i in range(a, close):
                    self.block[i], self.path[i] = number, p

    @staticmethod
    def _open_before(ids: Sequence[int], at: int) -> bool:
        last = max((i for i in range(at) if ids[i] == PAR), default=-1)
        return last >= 0 and END_PAR not in ids[last:at]

    def sees(self, i: int, j: int) -> bool:
        siblings = self.block[i] >= 0 and self.block[i] == self.block[j] and self.path[i] != self.path[j]
        return j <= i and not siblings

    def positions(self, scheme: Positions) -> list[int]:
        out: list[int] = []
        for i, (block, path) in enumerate(zip(self.block, self.path, strict=True)):
            before = [j for j in range(i) if self.block[j] == block and self.path[j] == path >= 0]
            if block >= 0:  # one more for every earlier token of this path, counted from where the first path starts
                first = self.block.index(block)
                base = out[first - 1] + 1 if first else 0
                out.append(base + len(before))
            elif scheme == "index" or i == 0:
                out.append(i)
            elif self.block[i - 1] < 0:
                out.append(out[i - 1] + 1)
            else:  # the first token after a path: one further than any path of that block has come
                out.append(1 + max(out[j] for j in range(i) if self.block[j] == self.block[i - 1]))
        return out


WORDS = st.lists(st.just(X), max_size=4)
SPACES = st.lists(st.just(SPACE), max_size=2)
CLOSED = WORDS.map(lambda words: [PATH, *words, END_PATH])
OPEN = WORDS.map(lambda words: [PATH, *words])
INNER = st.lists(CLOSED | CLOSED | OPEN | SPACES, max_size=6).map(lambda parts: list(chain.from_iterable(parts)))
BLOCK = st.builds(lambda inner, words: [PAR, *inner, END_PAR, SUM, *words, END_SUM], INNER, WORDS)
ANY_TAG = st.sampled_from([PAR, END_PAR, PATH, END_PATH, SUM, END_SUM])


@st.composite
def responses(draw: st.DrawFn) -> list[int]:
    """Several blocks, empty and unclosed paths, white space between them, then tags out of place, then a cut."""
    ids = draw(WORDS)
    for _ in range(draw(st.integers(0, 3))):
        ids = ids + draw(BLOCK) + draw(WORDS)
    for _ in range(draw(st.integers(0, 3))):
        ids.insert(draw(st.integers(0, len(ids))), draw(ANY_TAG))
    return ids[: draw(st.integers(0, len(ids)))] if draw(st.booleans()) else ids


PROMPT_LENGTHS = st.integers(0, 5)
SCHEMES = st.sampled_from(["longest", "index"])


@settings(max_examples=1000, deadline=None)
@given(ids=responses(), prompt=PROMPT_LENGTHS, scheme=SCHEMES)
def test_layout_is_the_definition_on_random_responses(ids: list[int], prompt: int, scheme: Positions) -> None:
    where = layout(prompt, ids, TAG_IDS, "unseen", scheme)
    oracle = Reader([X] * prompt + ids)
    n = prompt + len(ids)
    assert len(where) == n
    assert dense(where).tolist() == [[oracle.sees(i, j) for j in range(n)] for i in range(n)]
    assert list(where.positions) == oracle.positions(scheme)


@settings(deadline=None)
@given(ids=responses(), scheme=SCHEMES)
def test_a_prompt_that_names_the_tags_is_plain(ids: list[int], scheme: Positions) -> None:
    """Only the length of the prompt enters, so its text cannot matter; here it shifts everything and no more."""
    alone = layout(0, ids, TAG_IDS, "unseen", scheme)
    after = layout(3, ids, TAG_IDS, "unseen", scheme)
    assert after.positions == (0, 1, 2, *(p + 3 for p in alone.positions))
    assert (after.block, after.path) == ((-1,) * 3 + alone.block, (-1,) * 3 + alone.path)
    assert dense(after)[:, :3].tolist() == [[j <= i for j in range(3)] for i in range(len(after))]


@settings(deadline=None)
@given(ids=responses(), more=responses(), scheme=SCHEMES)
def test_a_layout_never_depends_on_later_tokens(ids: list[int], more: list[int], scheme: Positions) -> None:
    """Otherwise what was sampled could not be what is trained."""
    short, long = (layout(1, tokens, TAG_IDS, "unseen", scheme) for tokens in (ids, ids + more))
    n = len(short)
    assert (long.positions[:n], long.block[:n], long.path[:n]) == (short.positions, short.block, short.path)


@settings(deadline=None)
@given(ids=responses(), structure=st.sampled_from(["seen", "sequential"]), scheme=SCHEMES)
def test_seen_and_sequential_are_plainly_causal(ids: list[int], structure: Structure, scheme: Positions) -> None:
    where = layout(2, ids, TAG_IDS, structure, scheme)
    assert where.is_causal
    assert where.positions == tuple(range(2 + len(ids)))
    assert torch.equal(dense(where), torch.ones(len(where), len(where), dtype=torch.bool).tril())


def test_only_paths_make_a_layout_other_than_causal() -> None:
    assert layout(2, [X, PAR, END_PAR, SUM, X], TAG_IDS, "unseen").is_causal
    assert layout(0, [], TAG_IDS, "unseen").is_causal
    assert not layout(0, RESPONSE, TAG_IDS, "unseen").is_causal
    assert not layout(0, RESPONSE, TAG_IDS, "unseen", "index").is_causal


def test_visibility_of_a_batch_is_that_of_its_rows_and_padding_is_causal() -> None:
    short, long = layout(0, RESPONSE[:6], TAG_IDS, "unseen"), layout(0, RESPONSE, TAG_IDS, "unseen")
    pad = (-1,) * (len(long) - len(short))
    both = visibility(torch.tensor([short.block + pad, long.block]), torch.tensor([short.path + pad, long.path]))
    assert torch.equal(both[0, :6, :6], dense(short))
    assert torch.equal(both[1], dense(long))
    assert both[0, 6:].tolist() == [[j <= i for j in range(14)] for i in range(6, 14)]
    assert both.diagonal(dim1=1, dim2=2).all()  # no query is left without a key: softmax over nothing is NaN


@pytest.mark.parametrize(
    ("structure", "positions", "message"),
    [("parallel", "longest", "structure='parallel'"), ("unseen", "shortest", "positions='shortest'")],
)
def test_unknown_settings_are_refused(structure: Structure, positions: Positions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(0, [], TAG_IDS, structure, positions)
