"""Path diversity: its ends, its symmetry, and sacrebleu's own figure in between."""

from __future__ import annotations

import pytest

from parallel_r1.reward.diversity import path_diversity, response_diversity
from parallel_r1.structure.grammar import parse

A = "the cat sat on the mat and then it slept until noon"
B = "the cat sat on the red sofa and then it slept until four"
C = "dogs bark loudly when strangers walk past their garden gate"


def test_equal_paths_have_none_and_unrelated_ones_nearly_all():
    assert path_diversity([A, A]) == 0.0
    assert path_diversity(["2", "2"]) == 0.0
    assert path_diversity(["", ""]) == 0.0
    assert path_diversity([A, C]) > 0.9
    assert path_diversity([A, C]) > path_diversity([A, B]) > 0.2


def test_the_order_of_paths_does_not_matter():
    assert path_diversity([A, B, C]) == pytest.approx(path_diversity([C, A, B]))
    assert path_diversity([A, B]) == pytest.approx(path_diversity([B, A]))


def test_it_is_the_mean_of_both_directions():
    from sacrebleu.metrics import BLEU

    bleu = BLEU(effective_order=True)
    there, back = bleu.sentence_score(A, [B]).score, bleu.sentence_score(B, [A]).score
    assert there != back
    assert path_diversity([A, B]) == pytest.approx(1 - (there + back) / 200)


def test_fewer_than_two_paths_have_no_diversity():
    assert path_diversity([]) is None
    assert path_diversity([A]) is None


def test_a_response_is_the_mean_over_its_blocks():
    def block(*paths: str) -> str:
        return "<Parallel>" + "".join(f"<Path>{p}</Path>" for p in paths) + "</Parallel><Summary>s</Summary>"

    assert response_diversity(parse("no block")) is None
    assert response_diversity(parse(block(A, A) + block(A, C))) == pytest.approx(path_diversity([A, C]) / 2)


def test_a_path_that_ran_away_is_cut():
    assert path_diversity(["x y " * 100_000, "x y " * 100_000 + "z"]) == 0.0
