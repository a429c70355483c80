"""The token parser: segments and counts, by hand, by property, and against the text parser."""

from __future__ import annotations

from itertools import product

import pytest
from conftest import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.structure.grammar import TAGS, parse, render_block
from parallel_r1.structure.tokens import Segment, TagIds, inserted_by_scheduler, segments, token_counts

PAR, END_PAR, PATH, END_PATH, SUM, END_SUM = range(1, 7)
TAG_IDS = TagIds(PAR, END_PAR, PATH, END_PATH, SUM, END_SUM)
X = 9  # a word

TOKENS = st.sampled_from([PAR, END_PAR, PATH, END_PATH, SUM, END_SUM, X])
RESPONSES = st.lists(TOKENS, max_size=30)


def shape(ids: list[int]) -> list[tuple[str, int, int, int, int]]:
    return [(s.kind, s.start, s.end, s.block, s.path) for s in segments(ids, TAG_IDS)]


def test_segments_of_a_whole_response() -> None:
    #       0  1    2     3  4         5     6  7  8         9        10   11 12      13
    ids = [X, PAR, PATH, X, END_PATH, PATH, X, X, END_PATH, END_PAR, SUM, X, END_SUM, X]
    assert shape(ids) == [
        ("main", 0, 2, -1, -1),
        ("path", 2, 5, 0, 0),
        ("path", 5, 9, 0, 1),
        ("main", 9, 10, -1, -1),
        ("summary", 10, 13, 0, -1),
        ("main", 13, 14, -1, -1),
    ]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([X], [("main", 0, 1, -1, -1)]),
        ([PAR], [("main", 0, 1, -1, -1)]),
        # cut inside a path, between paths, inside a summary
        ([PAR, PATH, X], [("main", 0, 1, -1, -1), ("path", 1, 3, 0, 0)]),
        ([PAR, PATH, X, END_PATH, X], [("main", 0, 1, -1, -1), ("path", 1, 4, 0, 0), ("main", 4, 5, -1, -1)]),
        ([PAR, END_PAR, SUM, X], [("main", 0, 2, -1, -1), ("summary", 2, 4, 0, -1)]),
        # an unclosed path ends where the next begins, or with its block
        ([PAR, PATH, X, PATH, X], [("main", 0, 1, -1, -1), ("path", 1, 3, 0, 0), ("path", 3, 5, 0, 1)]),
        ([PAR, PATH, END_PAR], [("main", 0, 1, -1, -1), ("path", 1, 2, 0, 0), ("main", 2, 3, -1, -1)]),
        # an unclosed summary ends at the next block, which has its own number
        (
            [PAR, END_PAR, SUM, X, PAR, PATH],
            [("main", 0, 2, -1, -1), ("summary", 2, 4, 0, -1), ("main", 4, 5, -1, -1), ("path", 5, 6, 1, 0)],
        ),
        # an empty path still owns its two tags
        ([PAR, PATH, END_PATH], [("main", 0, 1, -1, -1), ("path", 1, 3, 0, 0)]),
        # tags out of place are main text
        ([PATH, X, END_PATH], [("main", 0, 3, -1, -1)]),
        ([SUM, X, END_SUM], [("main", 0, 3, -1, -1)]),
        ([END_PAR, END_SUM], [("main", 0, 2, -1, -1)]),
        # a nested opening tag is text of what holds it
        ([PAR, PATH, PAR, X], [("main", 0, 1, -1, -1), ("path", 1, 4, 0, 0)]),
        ([PAR, PATH, SUM, X], [("main", 0, 1, -1, -1), ("path", 1, 4, 0, 0)]),
    ],
)
def test_segments_of_broken_responses(ids: list[int], expected: list[tuple[str, int, int, int, int]]) -> None:
    assert shape(ids) == expected


@settings(deadline=None)
@given(ids=RESPONSES)
def test_segments_cover_every_token_once_in_order(ids: list[int]) -> None:
    found = segments(ids, TAG_IDS)
    assert [i for s in found for i in range(s.start, s.end)] == list(range(len(ids)))
    assert all(s.end > s.start for s in found)
    assert all((s.path >= 0) == (s.kind == "path") and (s.block >= 0) == (s.kind != "main") for s in found)


@settings(deadline=None)
@given(ids=RESPONSES, more=RESPONSES)
def test_a_segment_never_depends_on_what_comes_later(ids: list[int], more: list[int]) -> None:
    """What makes sampling and training agree: the kind of a token is fixed the moment it is written."""

    def kinds(found: tuple[Segment, ...]) -> list[tuple[str, int, int]]:
        return [(s.kind, s.block, s.path) for s in found for _ in range(s.start, s.end)]

    assert kinds(segments(ids + more, TAG_IDS))[: len(ids)] == kinds(segments(ids, TAG_IDS))


WORDS = st.lists(st.integers(0, 91).map("w{}".format), max_size=4).map(tuple)
BLOCKS = st.tuples(st.lists(WORDS, min_size=2, max_size=4), WORDS)


@settings(deadline=None)
@given(parts=st.lists(st.tuples(WORDS, BLOCKS), max_size=3), tail=WORDS)
def test_both_parsers_agree_on_well_formed_responses(
    parts: list[tuple[tuple[str, ...], tuple[list[tuple[str, ...]], tuple[str, ...]]]], tail: tuple[str, ...]
) -> None:
    text = ""
    for main, (paths, summary) in parts:
        text += " ".join(main) + render_block([" ".join(path) for path in paths], " ".join(summary))
    text += " ".join(tail)
    ids = TOKENIZER(text).input_ids
    tags = TagIds.from_tokenizer(TOKENIZER)

    by_text = [(tuple(tuple(p.split()) for p in b.paths), tuple(b.summary.split())) for b in parse(text).blocks]
    by_ids: list[tuple[list[tuple[str, ...]], tuple[str, ...]]] = []
    for segment in segments(ids, tags):
        inner = tuple(TOKENIZER.convert_ids_to_tokens(ids[segment.start + 1 : segment.end - 1]))
        if segment.kind == "path":
            if segment.path == 0:
                by_ids.append(([], ()))
            by_ids[segment.block][0].append(inner)
        elif segment.kind == "summary":
            by_ids[segment.block] = (by_ids[segment.block][0], inner)
    assert [(tuple(paths), summary) for paths, summary in by_ids] == by_text


TOKENIZER = tiny_tokenizer()


def test_counts_by_hand() -> None:
    ids = [X, PAR, PATH, X, END_PATH, PATH, X, X, END_PATH, END_PAR, SUM, X, END_SUM, X]
    # 14 tokens; main 0, 1, 9, 13 = 4, summary 10..12 = 3, paths of 3 and 4 tokens: 4 + 3 + 4 = 11
    assert token_counts(ids, [True] * 14, TAG_IDS) == (14, 11)
    # without the inserted tags at 2, 5, 9, 10: total 10; main 3, summary 2, paths 2 and 3: 3 + 2 + 3 = 8
    sampled = [i not in (2, 5, 9, 10) for i in range(14)]
    assert token_counts(ids, sampled, TAG_IDS) == (10, 8)


def test_counts_of_odd_responses() -> None:
    assert token_counts([], [], TAG_IDS) == (0, 0)
    assert token_counts([X], [False], TAG_IDS) == (0, 0)
    assert token_counts([X, X], [True, False], TAG_IDS) == (1, 1)
    assert token_counts([PAR, PATH, X, PATH, X, X], [True] * 6, TAG_IDS) == (6, 4)  # 1 + max(2, 3), cut or not


@settings(deadline=None, max_examples=200)
@given(data=st.lists(st.tuples(TOKENS, st.booleans()), max_size=30))
def test_critical_tokens_are_the_best_choice_of_one_path_a_block(data: list[tuple[int, bool]]) -> None:
    """Brute force: keep one path of every block, in every way; the longest text that can remain is critical."""
    ids, sampled = [i for i, _ in data], [s for _, s in data]
    found = segments(ids, TAG_IDS)
    paths: dict[int, list[int]] = {}
    for s in found:
        if s.kind == "path":
            paths.setdefault(s.block, []).append(s.path)
    longest = 0
    for choice in product(*paths.values()):
        chosen = dict(zip(paths, choice, strict=True))
        kept = [s for s in found if s.kind != "path" or chosen[s.block] == s.path]
        longest = max(longest, sum(sampled[i] for s in kept for i in range(s.start, s.end)))
    assert token_counts(ids, sampled, TAG_IDS) == (sum(sampled), longest)


def test_tag_ids_come_from_the_tokenizer_in_the_order_of_the_tags() -> None:
    tags = TagIds.from_tokenizer(TOKENIZER)
    assert TOKENIZER.convert_ids_to_tokens(list(tags.all())) == list(TAGS)


class Lookup:
    """The part of a tokenizer that `from_tokenizer` reads."""

    def __init__(self, vocabulary: dict[str, int], unk: int | None) -> None:
        self.vocabulary, self.unk_token_id = vocabulary, unk

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        return [self.vocabulary.get(token, self.unk_token_id) for token in tokens]


@pytest.mark.parametrize("unk", [None, 0])
def test_missing_tags_are_named(unk: int | None) -> None:
    vocabulary = {tag: i for i, tag in enumerate(TAGS, 1) if tag not in ("</Path>", "<Summary>")}
    with pytest.raises(ValueError, match="no single token for </Path>, <Summary>: load the model through `policy`"):
        TagIds.from_tokenizer(Lookup(vocabulary, unk))


def test_tags_that_share_an_id_are_refused() -> None:
    with pytest.raises(ValueError, match="share one token id"):
        TagIds.from_tokenizer(Lookup(dict.fromkeys(TAGS, 7), 0))


def test_what_a_fork_join_scheduler_writes_itself() -> None:
    one, two = 21, 22
    ids = [X, PAR, PATH, one, X, END_PATH, PATH, X, END_PATH, END_PAR, SUM, X, END_SUM, X]
    plain = [i in (2, 6, 9, 10) for i in range(14)]
    assert list(inserted_by_scheduler(ids, TAG_IDS)) == plain
    # path 0 carries its number; path 1 does not carry the one it should, so nothing of it was inserted
    numbered = [i in (2, 3, 6, 9, 10) for i in range(14)]
    assert list(inserted_by_scheduler(ids, TAG_IDS, [(one,), (two,)])) == numbered
    assert inserted_by_scheduler([X, PATH, SUM], TAG_IDS) == (False, False, False), "tags out of place are the policy's"
