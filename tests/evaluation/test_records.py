"""The rows that evaluation and training leave."""

from __future__ import annotations

from parallel_r1.evaluation.records import response_row, token_columns
from parallel_r1.structure.grammar import parse
from parallel_r1.types import Judged, Problem, Rollout


def test_a_row_tells_problem_verdict_and_structure() -> None:
    text = "<Parallel><Path>1</Path><Path>2</Path></Parallel><Summary>3</Summary> Final Answer: 42"
    judged = Judged(Problem("p", "Six by seven?", "42", "easy"), text, parse(text), True, True, 9, 7)
    row = response_row(judged)
    assert (row["id"], row["tier"], row["question"], row["answer"]) == ("p", "easy", "Six by seven?", "42")
    assert (row["final_answer"], row["correct"], row["parallel"], row["valid"]) == ("42", True, True, True)
    assert (row["total_tokens"], row["critical_tokens"]) == (9, 7)


def test_a_cut_response_is_not_valid_and_may_lack_an_answer() -> None:
    judged = Judged(Problem("p", "?", "42", "easy"), "so", parse("so"), False, False, 1, 1)
    row = response_row(judged)
    assert (row["final_answer"], row["parallel"], row["valid"], row["finished"]) == (None, False, False, False)


def test_a_token_that_was_not_sampled_has_no_logprob() -> None:
    rollout = Rollout((1,), (2, 3), (0.0, -0.123456), (False, True), finished=True)
    assert token_columns(rollout, ["<Parallel>", "x"]) == {"tokens": ["<Parallel>", "x"], "logprobs": [None, -0.1235]}
