"""The text form of a parallel response: six tags, a parser, a renderer. Strings only.

    main text <Parallel><Path> p1 </Path><Path> p2 </Path></Parallel><Summary> what they say </Summary> main text

Well formed: every block holds two or more closed paths and nothing else but white space, and is followed at once (white
space aside) by one closed summary; blocks do not nest; no tag stands anywhere else. No block at all is well formed too.
Only ever parse a RESPONSE: prompts may name the tags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PARALLEL, END_PARALLEL = "<Parallel>", "</Parallel>"
PATH, END_PATH = "<Path>", "</Path>"
SUMMARY, END_SUMMARY = "<Summary>", "</Summary>"
TAGS = (PARALLEL, END_PARALLEL, PATH, END_PATH, SUMMARY, END_SUMMARY)

Structure = Literal["seen", "unseen", "sequential"]

_SPLIT = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")


@dataclass(frozen=True)
class Block:
    """One well-formed block. paths, summary: inner texts without tags; start: index of `<Parallel>` in the response."""

    paths: tuple[str, ...]
    summary: str
    start: int


@dataclass(frozen=True)
class Response:
    """A parsed response. blocks: the well-formed ones, in order; error: why it is not well formed, or None."""

    blocks: tuple[Block, ...]
    error: str | None

    @property
    def well_formed(self) -> bool:
        return self.error is None

    @property
    def is_parallel(self) -> bool:
        """At least one well-formed block, whatever else is wrong (the definition of `parallel_ratio`)."""
        return bool(self.blocks)


def parse(text: str) -> Response:
    """Read every well-formed block of a response and say what, if anything, breaks the grammar first.

    Linear in the length of the text; never raises, whatever a model wrote.
    """
    pieces = _SPLIT.split(text)  # text, tag, text, tag, ..., text
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    blocks: list[Block] = []
    error: str | None = None
    i = 1
    while i < len(pieces):
        block, i, fault = _read_block(pieces, i, offsets)
        if block:
            blocks.append(block)
        error = error or fault
    return Response(tuple(blocks), error)


def _read_block(pieces: list[str], i: int, offsets: list[int]) -> tuple[Block | None, int, str | None]:
    """Read a block at tag index i. Returns the block if well formed, the index of the next unread tag, the fault."""
    if pieces[i] != PARALLEL:
        return None, i + 2, f"{pieces[i]} outside a block"
    start, paths, j = i, [], i + 2

    def tag(k: int) -> str | None:
        return pieces[k] if k < len(pieces) else None

    def broken(k: int, fault: str) -> tuple[None, int, str]:
        # a broken block stays open to its `</Parallel>`, as for the token parser: nothing in it is a block of its own
        while k < len(pieces) and pieces[k] != END_PARALLEL:
            k += 2
        return None, k + 2, fault

    while tag(j) == PATH:
        if pieces[j - 1].strip():
            return broken(j, "text between paths")
        if tag(j + 2) != END_PATH:
            return broken(j + 2, "a path is not closed")
        paths.append(pieces[j + 1])
        j += 4
    if tag(j) != END_PARALLEL:
        return broken(j, "a block is not closed" if tag(j) is None else f"{tag(j)} inside a block")
    if pieces[j - 1].strip():
        return None, j + 2, "text between paths"
    if len(paths) < 2:
        return None, j + 2, "a block with fewer than two paths"
    if tag(j + 2) != SUMMARY or pieces[j + 1].strip():
        return None, j + 2, "a block without a summary right after it"
    if tag(j + 4) != END_SUMMARY:
        return None, j + 4, "a summary is not closed"
    return Block(tuple(paths), pieces[j + 3], offsets[start]), j + 6, None


def render_block(paths: list[str] | tuple[str, ...], summary: str) -> str:
    """The canonical text of one block (no white space added). Raises ValueError for fewer than two paths."""
    if len(paths) < 2:
        raise ValueError(f"a block needs two or more paths, got {len(paths)}")
    inner = "".join(f"{PATH}{path}{END_PATH}" for path in paths)
    return f"{PARALLEL}{inner}{END_PARALLEL}{SUMMARY}{summary}{END_SUMMARY}"
