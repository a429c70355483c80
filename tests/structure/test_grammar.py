"""The text parser: what is well formed, what is not and why, and that no text a model may write upsets it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.structure.grammar import TAGS, Block, parse, render_block


def strip_tags(text: str) -> str:
    for tag in TAGS:
        text = text.replace(tag, "")
    return text


TEXTS = st.text(alphabet="ab <>/\n", max_size=6).filter(lambda s: strip_tags(s) == s)
BLOCKS = st.tuples(st.lists(TEXTS, min_size=2, max_size=4), TEXTS)
SPACE = st.sampled_from(["", " ", "\n", " \t\n"])

A = "<Path>a</Path>"
B = "<Path>b</Path>"
S = "<Summary>s</Summary>"


def test_a_block_is_read_with_its_place_in_the_response() -> None:
    text = f"so <Parallel>{A}{B}</Parallel>{S} done"
    assert parse(text).blocks == (Block(("a", "b"), "s", 3),)  # "so " is characters 0, 1, 2
    assert parse(text).well_formed
    assert parse(text).is_parallel


def test_no_block_is_well_formed_but_not_parallel() -> None:
    for text in ("", "plain text", "a < b > c </ d"):
        assert parse(text).well_formed
        assert not parse(text).is_parallel


@pytest.mark.parametrize(
    ("text", "blocks", "error"),
    [
        (f"<Parallel>{A}{B}</Parallel>", 0, "without a summary"),
        (f"<Parallel>{A}{B}</Parallel> so {S}", 0, "without a summary"),
        (f"<Parallel>{A}</Parallel>{S}", 0, "fewer than two"),
        (f"<Parallel></Parallel>{S}", 0, "fewer than two"),
        (f"<Parallel>{A}x{B}</Parallel>{S}", 0, "text between paths"),
        (f"<Parallel>x{A}{B}</Parallel>{S}", 0, "text between paths"),
        (f"<Parallel>{A}{B}x</Parallel>{S}", 0, "text between paths"),
        (f"<Parallel>{A}<Path>b</Parallel>{S}", 0, "path is not closed"),
        (f"<Parallel>{A}<Path>b{B}</Parallel>{S}", 0, "path is not closed"),
        (f"<Parallel>{A}{B}{S}", 0, "<Summary> inside a block"),
        (f"<Parallel>{A}{B}", 0, "block is not closed"),
        ("<Parallel>", 0, "block is not closed"),
        (f"<Parallel>{A}{B}</Parallel><Summary>s", 0, "summary is not closed"),
        (f"<Parallel>{A}{B}</Parallel><Summary>s<Path></Summary>", 0, "summary is not closed"),
        (f"{A}", 0, "<Path> outside a block"),
        (f"{S}", 0, "<Summary> outside a block"),
        ("</Parallel>", 0, "</Parallel> outside a block"),
        (f"<Parallel>{A}{B}</Parallel>{S}{S}", 1, "<Summary> outside a block"),
        (f"<Parallel>{A}{B}</Parallel>{S}<Parallel>{A}", 1, "block is not closed"),
        (f"</Path><Parallel>{A}{B}</Parallel>{S}", 1, "</Path> outside a block"),
    ],
)
def test_a_fault_is_named_and_spares_the_other_blocks(text: str, blocks: int, error: str) -> None:
    found = parse(text)
    assert not found.well_formed
    assert error in str(found.error)
    assert len(found.blocks) == blocks


def test_the_first_fault_is_the_one_reported() -> None:
    assert parse(f"</Path>{S}").error == "</Path> outside a block"
    assert parse(f"{S}</Path>").error == "<Summary> outside a block"


def test_only_the_exact_tags_count() -> None:
    for text in ("<parallel><path>", "< Parallel >", "<Parallel >", "<Parallels>", "<|Parallel|>"):
        assert parse(text).well_formed
        assert strip_tags(text) == text


@settings(deadline=None)
@given(parts=st.lists(st.tuples(TEXTS, BLOCKS), max_size=3), gaps=st.tuples(SPACE, SPACE, SPACE, SPACE))
def test_blocks_are_read_back_whatever_white_space_stands_between(
    parts: list[tuple[str, tuple[list[str], str]]], gaps: tuple[str, ...]
) -> None:
    text, expected = "", []
    for main, (paths, summary) in parts:
        text += main
        expected.append(Block(tuple(paths), summary, len(text)))
        inner = gaps[1].join(f"<Path>{path}</Path>" for path in paths)
        text += f"<Parallel>{gaps[0]}{inner}{gaps[2]}</Parallel>{gaps[3]}<Summary>{summary}</Summary>"
    found = parse(text + "tail")
    assert found.error is None
    assert found.blocks == tuple(expected)


@settings(deadline=None)
@given(block=BLOCKS)
def test_a_rendered_block_is_read_back(block: tuple[list[str], str]) -> None:
    paths, summary = block
    assert parse(render_block(paths, summary)).blocks == (Block(tuple(paths), summary, 0),)


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from([*TAGS, "x", " "]), max_size=24))
def test_any_mix_of_tags_is_parsed_and_its_blocks_are_really_there(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = parse(text)
    for block in found.blocks:
        assert text.startswith("<Parallel>", block.start)
        assert len(block.paths) >= 2
        assert strip_tags("".join((*block.paths, block.summary))) == "".join((*block.paths, block.summary))
    # well formed means that the blocks account for every tag: 2 + 2 n + 2 for n paths
    tags = sum(piece in TAGS for piece in pieces)
    assert found.well_formed == (tags == sum(4 + 2 * len(block.paths) for block in found.blocks))


@settings(deadline=None, max_examples=30)
@given(pieces=st.lists(st.sampled_from(TAGS), min_size=1, max_size=6))
def test_hostile_repetition_takes_linear_time(pieces: list[str]) -> None:
    start = time.process_time()
    parse("".join(pieces) * 4000)
    assert time.process_time() - start < 2.0  # quadratic: 24,000 ** 2 steps, minutes


@pytest.mark.parametrize("paths", [[], ["one"]])
def test_a_block_needs_two_paths_to_be_rendered(paths: list[str]) -> None:
    with pytest.raises(ValueError, match=f"two or more paths, got {len(paths)}"):
        render_block(paths, "s")
