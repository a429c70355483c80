"""What blocks are used for: to explore, or to verify an answer that stands there already. Text only, bounded in cost.

The paper's finding is that blocks move from the one to the other during training (arXiv 2509.07980).
"""

from __future__ import annotations

from typing import Literal

from parallel_r1.reward.answers import stated_value
from parallel_r1.reward.extraction import extract
from parallel_r1.structure.grammar import END_SUMMARY, Response

Use = Literal["exploration", "verification"]

MAX_BLOCKS = 8
"""Blocks of a response that are labelled, from the first."""
MAX_CHARS = 20_000
"""Characters before a block that are read, from the block backwards."""


def block_labels(text: str, response: Response, final_answer: str | None) -> list[Use]:
    """A label for each well-formed block, the first MAX_BLOCKS: `verification` iff a candidate answer precedes it.

    What precedes a block is the main text and the summaries before its `<Parallel>`; paths of earlier blocks do not
    count. A candidate answer stands there if it states an answer in a form that grading reads (a line, a box, a
    sentence; not merely a number), or if the last number of it is that of the response's final answer.
    text: the response of which `response` is the parse. final_answer: what grading read in it, None for nothing.
    """
    final = None if final_answer is None else stated_value(final_answer)
    labels: list[Use] = []
    before, at = "", 0
    for block in response.blocks[:MAX_BLOCKS]:
        before = (before + text[at : block.start])[-MAX_CHARS:]
        states = bool(extract(before, alone=False).answers)
        ends_on_it = final is not None and stated_value(before) == final
        labels.append("verification" if states or ends_on_it else "exploration")
        before, at = f"{before}\n{block.summary}\n", text.index(END_SUMMARY, block.start) + len(END_SUMMARY)
    return labels


def answer_agreement(response: Response, final_answer: str | None) -> float | None:
    """Share of the paths that end on the value of the final answer, of those that state a number; over all blocks.

    None where no path states one, or the final answer is none.
    """
    final = None if final_answer is None else stated_value(final_answer)
    stated = [value for block in response.blocks for path in block.paths if (value := stated_value(path)) is not None]
    if final is None or not stated:
        return None
    return sum(value == final for value in stated) / len(stated)
