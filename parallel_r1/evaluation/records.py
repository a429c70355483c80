"""One response as one JSON object: what `test` and training write, and what reports, viewers and trace tools read.

Every row has

    id, tier, question, answer      the problem, and its gold answer
    response, finished, correct     the text with its tags, whether the policy ended it, the verifier's verdict
    final_answer                    what the verifier read as the final answer, or null
    parallel, valid                 at least one well-formed block; finished and obeying the grammar throughout
    total_tokens, critical_tokens   counts over sampled tokens

and whoever writes it adds what it knows: `mode` and `sample` (index among the samples of a problem) in an evaluation,
`iteration`, `group`, `reward`, `terms`, `advantage` in training, and `token_columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel_r1.reward.extraction import extract
from parallel_r1.types import Judged, Rollout

Row = dict[str, Any]


def response_row(judged: Judged) -> Row:
    """What every row holds."""
    problem = judged.problem
    found = extract(judged.text).answers
    return {
        "id": problem.id,
        "tier": problem.tier,
        "question": problem.question,
        "answer": problem.answer,
        "response": judged.text,
        "finished": judged.finished,
        "correct": judged.correct,
        "final_answer": found[0] if found else None,
        "parallel": judged.response.is_parallel,
        "valid": judged.finished and judged.response.well_formed,
        "total_tokens": judged.total_tokens,
        "critical_tokens": judged.critical_tokens,
    }


def token_columns(rollout: Rollout, pieces: Sequence[str]) -> Row:
    """Token by token: the text of each, its log-probability (nats; null where nothing was sampled).

    pieces: the text of each response token, as `Policy.pieces` gives it.
    """
    logprobs = [round(p, 4) if s else None for p, s in zip(rollout.logprobs, rollout.sampled, strict=True)]
    return {"tokens": list(pieces), "logprobs": logprobs}
