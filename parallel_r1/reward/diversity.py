"""How different the paths of a block are: 1 - symmetric mean pairwise self-BLEU, by sacrebleu.

Departs from corpus self-BLEU (each text against all the others as references): a pair is scored in both directions and
averaged, so that the order of the paths does not matter. Sentence BLEU with effective order (paths may be shorter than
four words) and sacrebleu's default tokens and smoothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

from parallel_r1.structure.grammar import Response

MAX_CHARS = 20_000
"""Characters of a path that are compared: bounds the cost of a path that ran away."""


def path_diversity(paths: Sequence[str]) -> float | None:
    """1 - mean BLEU over ordered pairs of paths, in [0, 1]; None for fewer than two paths. Lower: more alike."""
    if len(paths) < 2:
        return None
    scores = [_bleu(a[:MAX_CHARS].strip(), b[:MAX_CHARS].strip()) for a, b in permutations(paths, 2)]
    return min(max(1.0 - sum(scores) / len(scores), 0.0), 1.0)


def response_diversity(response: Response) -> float | None:
    """The mean of `path_diversity` over the blocks of a response; None where there is no block."""
    values = [value for block in response.blocks if (value := path_diversity(block.paths)) is not None]
    return sum(values) / len(values) if values else None


def _bleu(hypothesis: str, reference: str) -> float:
    """Sentence BLEU in [0, 1]. Equal texts score 1 whatever their length, which BLEU leaves open for empty ones."""
    if hypothesis == reference:
        return 1.0
    return _scorer().sentence_score(hypothesis, [reference]).score / 100.0


@lru_cache(maxsize=1)
def _scorer():
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)
