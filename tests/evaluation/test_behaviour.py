"""What blocks are used for, worked out by hand."""

from __future__ import annotations

import time

import pytest

from parallel_r1.evaluation.behaviour import MAX_BLOCKS, answer_agreement, block_labels
from parallel_r1.structure.grammar import parse, render_block

EXPLORES, VERIFIES = "exploration", "verification"
BLOCK = render_block(["is it 4? 4", "no, 5"], "4 it is")


@pytest.mark.parametrize(
    ("text", "final", "labels"),
    [
        (BLOCK + "\nFinal Answer: 4", "4", [EXPLORES]),
        ("2 + 2 is small. " + BLOCK + "\nFinal Answer: 4", "4", [EXPLORES]),
        ("So 2 + 2 = 4. Let me check. " + BLOCK + "\nFinal Answer: 4", "4", [VERIFIES]),
        # a candidate need not survive
        ("Final Answer: 7\nLet me check. " + BLOCK + "\nFinal Answer: 4", "4", [VERIFIES]),
        (r"This gives \boxed{x+1}. " + BLOCK, None, [VERIFIES]),
        ("The answer is blue. " + BLOCK, "blue", [VERIFIES]),
        # a number that merely occurs, or stands alone, is no candidate
        ("4 and then 6. " + BLOCK + "\nFinal Answer: 4", "4", [EXPLORES]),
        ("9 " + BLOCK, None, [EXPLORES]),
        # the summary of the first block is a candidate for the second; its paths are none
        (BLOCK + " again " + BLOCK + "\nFinal Answer: 4", "4", [EXPLORES, VERIFIES]),
        (render_block(["4", "4"], "so it is 4") + BLOCK + "\nFinal Answer: 4", "4", [EXPLORES, VERIFIES]),
        (render_block(["Final Answer: 4", "4"], "hm") + BLOCK + "\nFinal Answer: 4", "4", [EXPLORES, EXPLORES]),
        ("no block. Final Answer: 4", "4", []),
        # what a broken block holds is text
        ("<Parallel><Path>so 4</Parallel>" + BLOCK + "Final Answer: 4", "4", [VERIFIES]),
        ("1/2 " + BLOCK + r"\boxed{0.5}", "0.5", [VERIFIES]),
    ],
)
def test_a_block_verifies_where_a_candidate_precedes_it(text: str, final: str | None, labels: list[str]) -> None:
    assert block_labels(text, parse(text), final) == labels


def test_labels_are_bounded_in_number_and_time() -> None:
    text = ("filler = " * 5_000 + BLOCK) * 30
    start = time.perf_counter()
    labels = block_labels(text, parse(text), "4")
    assert time.perf_counter() - start < 2.0
    assert len(labels) == MAX_BLOCKS


@pytest.mark.parametrize(
    ("paths", "final", "share"),
    [
        ([["4", "4"]], "4", 1.0),
        ([["4", "5"], ["so 4.0", "none"]], "4", 2 / 3),
        ([["none", "nothing"]], "4", None),
        ([["4", "4"]], None, None),
        ([["4", "4"]], "blue", None),
        ([], "4", None),
    ],
)
def test_paths_that_end_on_the_final_answer(paths: list[list[str]], final: str | None, share: float | None) -> None:
    response = parse("".join(render_block(p, "s") for p in paths))
    assert answer_agreement(response, final) == (None if share is None else pytest.approx(share))
