"""How the responses of an iteration use their blocks."""

from __future__ import annotations

from parallel_r1.modules.behaviour import SAMPLE, behaviour_of
from parallel_r1.structure.grammar import parse, render_block
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import Judged, Problem, Rollout

TAGS = TagIds(1, 2, 3, 4, 5, 6)
IDS = {"plain": (8, 8, 8, 8), "block": (8, 8, 1, 3, 9, 4, 3, 9, 4, 2, 5, 9, 6, 8, 8, 8), "open": (8, 1, 3, 9)}
TEXTS = {
    "plain": "Final Answer: 4",
    "block": "so 4 " + render_block(["4", "5"], "4") + "Final Answer: 4",
    "open": "<Parallel><Path>4",
}


def behaviour(*kinds: str):
    rollouts = [Rollout((1,), IDS[k], (0.0,) * len(IDS[k]), (True,) * len(IDS[k]), k != "open") for k in kinds]
    judged = [
        Judged(Problem("p", "q", "4", "easy"), TEXTS[k], parse(TEXTS[k]), k != "open", k != "open", 9, 9) for k in kinds
    ]
    return behaviour_of(judged, rollouts, TAGS)


def test_by_hand() -> None:
    found = behaviour("plain", "block", "open")
    assert found.positions == [2 / 16, 1 / 4]
    assert found.tokens == [8, 3], "to `</Parallel>`, or to the end"
    assert found.paths == [2], "of the well-formed one"
    assert found.token_shares == [0.0, 8 / 16, 3 / 4]
    assert found.labels == ["verification"]
    assert (found.path_agreement, found.answer_agreement) == ([0.0], [0.5])


def test_texts_are_looked_into_all_over_and_at_most_so_many() -> None:
    assert behaviour().labels == behaviour("plain").labels == []
    for n in (1, SAMPLE - 1, SAMPLE, SAMPLE + 1, 5 * SAMPLE + 3):
        labels = behaviour(*["block", "plain"] * n).labels
        assert min(n, SAMPLE // 2) <= len(labels) <= SAMPLE
