"""What one response shows about how it was thought. Pure functions; definitions are those of the method.

Everything is defined on broken responses too, and None where it has no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from parallel_r1.evaluation.behaviour import answer_agreement, block_labels
from parallel_r1.evaluation.records import Row
from parallel_r1.reward.answers import stated_value
from parallel_r1.reward.diversity import response_diversity
from parallel_r1.reward.extraction import extract
from parallel_r1.structure.grammar import Response
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import Judged, Rollout


def measures(judged: Judged, rollout: Rollout, tags: TagIds) -> Row:
    """The columns that an evaluation adds to a row.

    parallel_positions: see `parallel_positions`; parallel_token_share: see there; path_agreement, path_diversity: means
    over the blocks of the response; block_labels, answer_agreement: see `evaluation.behaviour`; mean_logprob: nats,
    over sampled tokens.
    """
    final = next(iter(extract(judged.text).answers), None)
    sampled = [p for p, s in zip(rollout.logprobs, rollout.sampled, strict=True) if s]
    return {
        "parallel_positions": [_rounded(at) for at in parallel_positions(rollout.response_ids, tags)],
        "parallel_token_share": _rounded(parallel_token_share(rollout.response_ids, tags)),
        "block_labels": block_labels(judged.text, judged.response, final),
        "path_agreement": _rounded(response_agreement(judged.response)),
        "answer_agreement": _rounded(answer_agreement(judged.response, final)),
        "path_diversity": _rounded(response_diversity(judged.response)),
        "mean_logprob": _rounded(sum(sampled) / len(sampled)) if sampled else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def parallel_positions(response_ids: Sequence[int], tags: TagIds) -> list[float]:
    """The index of each `<Parallel>` that opens a block / tokens of the response: in [0, 1), one a block."""
    return [start / len(response_ids) for start, _ in open_blocks(response_ids, tags)]


def parallel_token_share(response_ids: Sequence[int], tags: TagIds) -> float:
    """Tokens from each `<Parallel>` to its `</Parallel>`, both included / tokens of the response; 0 for no tokens.

    A block that is never closed runs to the end.
    """
    inside = sum(end - start for start, end in open_blocks(response_ids, tags))
    return inside / len(response_ids) if len(response_ids) else 0.0


def open_blocks(response_ids: Sequence[int], tags: TagIds) -> list[tuple[int, int]]:
    """[start, end) of each block, well formed or not, from its `<Parallel>` to its `</Parallel>`, or to the end."""
    out: list[tuple[int, int]] = []
    start: int | None = None
    for i, token in enumerate(response_ids):
        if token == tags.parallel and start is None:
            start = i
        elif token == tags.end_parallel and start is not None:
            out.append((start, i + 1))
            start = None
    return out if start is None else [*out, (start, len(response_ids))]


def path_agreement(paths: Sequence[str]) -> float | None:
    """Share of the pairs of paths that state the same final value, the last number of each.

    A pair in which one states none does not agree. None for fewer than two paths, or where no path states a number.
    """
    values = [stated_value(path) for path in paths]
    if len(paths) < 2 or all(value is None for value in values):
        return None
    pairs = list(combinations(values, 2))
    return sum(a is not None and a == b for a, b in pairs) / len(pairs)


def response_agreement(response: Response) -> float | None:
    """The mean of `path_agreement` over the blocks of a response; None where it is defined for none."""
    known = [value for block in response.blocks if (value := path_agreement(block.paths)) is not None]
    return sum(known) / len(known) if known else None
