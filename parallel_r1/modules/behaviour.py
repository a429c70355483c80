"""How the responses of one iteration use their blocks: what the tally averages and the figures draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_r1.evaluation.behaviour import Use, answer_agreement, block_labels
from parallel_r1.evaluation.measures import open_blocks, parallel_token_share, response_agreement
from parallel_r1.reward.diversity import response_diversity
from parallel_r1.reward.extraction import extract
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import Judged, Rollout

SAMPLE = 32
"""Responses with a block, an iteration and a rank, whose text is looked into at most: that runs in pure Python."""


@dataclass(frozen=True)
class Behaviour:
    """Of all responses, a value a block: positions (where it opens, as a share of the response), tokens (from
    `<Parallel>` to `</Parallel>`), paths (well-formed blocks alone); a value a response: token_shares (tokens inside
    blocks). Of SAMPLE at most with a block: labels, a value a block; path_agreement, answer_agreement, diversity, a
    value a response, None where there is none.
    """

    positions: list[float]
    tokens: list[int]
    paths: list[int]
    token_shares: list[float]
    labels: list[Use]
    path_agreement: list[float | None]
    answer_agreement: list[float | None]
    diversity: list[float | None]


def behaviour_of(judged: Sequence[Judged], rollouts: Sequence[Rollout], tags: TagIds) -> Behaviour:
    """The behaviour of the responses of one rank."""
    blocks = [(r, span) for r in rollouts for span in open_blocks(r.response_ids, tags)]
    parallel = [j for j in judged if j.response.is_parallel]
    sample = parallel[:: -(-len(parallel) // SAMPLE) or 1]  # over all groups: responses of one are alike
    answers = [next(iter(extract(j.text).answers), None) for j in sample]
    pairs = list(zip(sample, answers, strict=True))
    return Behaviour(
        positions=[start / len(r.response_ids) for r, (start, _) in blocks],
        tokens=[end - start for _, (start, end) in blocks],
        paths=[len(block.paths) for j in judged for block in j.response.blocks],
        token_shares=[parallel_token_share(r.response_ids, tags) for r in rollouts],
        labels=[label for j, answer in pairs for label in block_labels(j.text, j.response, answer)],
        path_agreement=[response_agreement(j.response) for j in sample],
        answer_agreement=[answer_agreement(j.response, answer) for j, answer in pairs],
        diversity=[response_diversity(j.response) for j in sample],
    )
