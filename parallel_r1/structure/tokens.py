"""The token form of a parallel response: tag ids, segments, counts. Ids only; the text form is `grammar`.

Two parsers, one tag table: text judges (rewards, data), ids rule (positions, masks, counts). This one is lenient where
the other is strict: whatever a model emitted gets a segment, so that layout and loss are defined on broken responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parallel_r1.structure import grammar

Kind = Literal["main", "path", "summary"]


@dataclass(frozen=True)
class TagIds:
    """The vocabulary id of each control tag."""

    parallel: int
    end_parallel: int
    path: int
    end_path: int
    summary: int
    end_summary: int

    @classmethod
    def from_tokenizer(cls, tokenizer) -> TagIds:
        """Look the tags up in a Hugging Face tokenizer.

        Raises ValueError naming each tag that is missing or not one token of its own.
        """
        ids = tokenizer.convert_tokens_to_ids(list(grammar.TAGS))
        bad = [tag for tag, i in zip(grammar.TAGS, ids, strict=True) if i is None or i == tokenizer.unk_token_id]
        if bad:
            raise ValueError(
                f"the tokenizer has no single token for {', '.join(bad)}: load the model through `policy` (which adds "
                "the tags) or add them as special tokens"
            )
        if len(set(ids)) != len(ids):
            raise ValueError(f"two control tags share one token id: {dict(zip(grammar.TAGS, ids, strict=True))}")
        return cls(*ids)

    def all(self) -> tuple[int, ...]:
        return (self.parallel, self.end_parallel, self.path, self.end_path, self.summary, self.end_summary)


@dataclass(frozen=True)
class Segment:
    """A run of response tokens [start, end) of one kind.

    block, path: which block (0-based), and which path in it; -1 where there is none. A path owns its two tags, a
    summary its two tags; `<Parallel>` and `</Parallel>` belong to the main text.
    """

    kind: Kind
    start: int
    end: int
    block: int = -1
    path: int = -1


def segments(ids: Sequence[int], tags: TagIds) -> tuple[Segment, ...]:
    """Cut a response into segments that cover it exactly once, in order.

    A block is open from `<Parallel>` to `</Parallel>`; `<Path>` opens a path only inside a block. An unclosed path runs
    to the next `<Path>`, `</Parallel>` or the end. An unclosed summary runs to the end or to the next `<Parallel>`. A
    nested `<Parallel>` is text of whatever holds it. Tags out of place are plain main text.
    """
    out: list[Segment] = []
    kind: Kind = "main"
    start, block, path = 0, -1, -1
    inside = False

    def cut(at: int, new: Kind) -> None:
        nonlocal start, kind
        if at > start:
            where = (block, path) if kind == "path" else (block, -1) if kind == "summary" else (-1, -1)
            out.append(Segment(kind, start, at, *where))
        start, kind = at, new

    for i, token in enumerate(ids):
        if token == tags.parallel and not inside:
            cut(i, "main")
            inside, block, path = True, block + 1, -1
        elif token == tags.path and inside:
            cut(i, "path")
            path += 1
        elif token == tags.end_path and kind == "path":
            cut(i + 1, "main")
        elif token == tags.end_parallel and inside:
            cut(i, "main")
            inside = False
        elif token == tags.summary and not inside and block >= 0 and kind == "main":
            cut(i, "summary")
        elif token == tags.end_summary and kind == "summary":
            cut(i + 1, "main")
    cut(len(ids), "main")
    return _merge_main(out)


def _merge_main(parts: list[Segment]) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for part in parts:
        if merged and part.kind == "main" == merged[-1].kind:
            merged[-1] = Segment("main", merged[-1].start, part.end)
        else:
            merged.append(part)
    return tuple(merged)


def inserted_by_scheduler(ids: Sequence[int], tags: TagIds, openings: Sequence[Sequence[int]] = ()) -> tuple[bool, ...]:
    """Which tokens of a response a fork-join scheduler would write itself, so that a policy need not learn them.

    They are the opening `<Path>` of each path (and what follows it there by `openings[i]`), the
    `</Parallel>` of a block and the opening `<Summary>`.
    """
    inserted = [False] * len(ids)
    for segment in segments(ids, tags):
        if segment.kind == "main":
            for i in range(segment.start, segment.end):
                inserted[i] = ids[i] == tags.end_parallel
            continue
        inserted[segment.start] = True
        if segment.kind == "path" and segment.path < len(openings):
            opening, after = list(openings[segment.path]), segment.start + 1
            if list(ids[after : after + len(opening)]) == opening:
                inserted[after : after + len(opening)] = [True] * len(opening)
    return tuple(inserted)


def token_counts(ids: Sequence[int], sampled: Sequence[bool], tags: TagIds) -> tuple[int, int]:
    """(total, critical) numbers of sampled tokens of a response.

    critical = main + summary tokens + the longest path of each block: the decode steps of an engine that runs the paths
    of a block side by side. Tokens that were not sampled (inserted tags, forced prefixes) count in neither.
    """
    total = critical = 0
    longest: dict[int, int] = {}
    for segment in segments(ids, tags):
        n = sum(sampled[segment.start : segment.end])
        total += n
        if segment.kind == "path":
            longest[segment.block] = max(longest.get(segment.block, 0), n)
        else:
            critical += n
    return total, critical + sum(longest.values())
