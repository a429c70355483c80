"""The records that flow from a problem to a weight update.

    Problem -> (prompt ids) -> Rollout -> Judged -> rewards -> advantages -> Pack -> loss

Suffixes used all over the package: P problems, G responses of one problem (a group), R = P * G rows, T tokens of a row,
S responses in a pack, N trained tokens in a pack, V words of the vocabulary. Records are frozen; whoever needs a
changed one makes a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parallel_r1.structure.grammar import Response

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_r1.structure.tree import Span, TreeIds


@dataclass(frozen=True)
class Problem:
    """One question with a verifiable answer.

    id: stable identity; two rows with one id are the same problem, whatever set they came from.
    question: the text as its source states it, without instruction or template.
    answer: the gold answer, never empty.
    tier: the metric group it is reported under (`easy`, `hard`, `gsm8k`, ...).
    demonstration: a response to imitate (supervised rows only), tags included, prompt excluded.
    meta: what a source wants to keep (level, subject, budgets); never read by the training maths.
    """

    id: str
    question: str
    answer: str
    tier: str
    demonstration: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One response as token ids, never re-encoded from text.

    prompt_ids: [prompt tokens]; response_ids, logprobs, sampled: [response tokens].
    logprobs: the engine's log-probability (nats) of each sampled token under the sampling distribution; 0.0 elsewhere.
    sampled: False for context that somebody else wrote (forced prefixes, inserted tags): such tokens carry no loss.
    finished: the policy ended the response itself; False means that a limit cut it, which is no decision of the policy.
    banned: [response tokens] the ids that could not be drawn at each token, beside those banned for the whole call:
    what a path may not say differs from what the main text may not. Empty where no token had bans of its own. Whoever
    computes the log-probability of a token leaves its banned ids out of the distribution.
    cuts: paths and summaries that their budget ended: their closing tag was inserted (sampled is False there).
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled: tuple[bool, ...]
    finished: bool
    banned: tuple[tuple[int, ...], ...] = ()
    cuts: int = 0

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        assert len(self.banned) in (0, n), f"{len(self.banned)} sets of banned ids for {n} response tokens"
        assert len(self.logprobs) == n, f"{len(self.logprobs)} log-probabilities for {n} response tokens"
        assert len(self.sampled) == n, f"{len(self.sampled)} sampled flags for {n} response tokens"


@dataclass(frozen=True)
class Judged:
    """A response with everything rewards and metrics may look at.

    text: the response with its tags, without end-of-sequence tokens.
    response: the parse of `text`; correct: the verifier's verdict on the final answer.
    total_tokens, critical_tokens: counts over sampled tokens, see `structure.tokens.token_counts`.
    """

    problem: Problem
    text: str
    response: Response
    correct: bool
    finished: bool
    total_tokens: int
    critical_tokens: int


@dataclass(frozen=True)
class Pack:
    """One forward pass of the update: trees of prompt and responses in one row of T tokens, nothing padded.

    Two responses `d e` and `f` to the prompt `a b c`, all sampled, make the row a b c d e f:

        tokens      a  b  c  d  e  f          targets     d  e  f
        positions   0  1  2  3  4  3          source      2  3  2   (logits of c predict d and f)
        branch     -1 -1 -1  0  0  1          response    0  0  1

    tokens, positions: [T] int64. ids, spans: who sees whom (`structure.tree`). source, targets: [N] int64, the index
    whose logits predict a trained token, and that token. response: [N] int64, its response in 0 ... S - 1. kind: [N]
    int64, an index into `SEGMENT_KINDS`. engine_logprobs: [N] float32 nats. advantages: [S] float32. banned: [N, B]
    int64, ids that could not be drawn at that token (`Rollout.banned`), filled up with -1; None where no token had any.
    """

    tokens: Tensor
    positions: Tensor
    ids: TreeIds
    spans: tuple[Span, ...]
    source: Tensor
    targets: Tensor
    response: Tensor
    kind: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    banned: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """One sequence under the plain causal mask: what every model computes without being told."""
        one = len({span.trunk for span in self.spans if span.keys > span.queries}) <= 1 and len(self.spans) <= 2
        return one and bool((self.ids.block < 0).all())


SEGMENT_KINDS = ("main", "path", "summary")


@dataclass(frozen=True)
class PolicyBatch:
    """Rows for one forward pass, padded on the right: the plain form, which packs are tested and measured against.

    input_ids, positions: [R, T] int64; loss_mask: [R, T] bool, True where the token at t was sampled by the policy
    (its log-probability is read at t - 1, so column 0 is never True); old_logprobs: [R, T] float32, 0.0 where masked;
    advantages: [R] float32; visible: [R, T, T] bool (query, key), or None where the plain causal mask holds.
    banned: token ids that sampling never allowed, so that the trainer normalises over the same set as the engine.
    """

    input_ids: Tensor
    positions: Tensor
    loss_mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    visible: Tensor | None = None
    banned: tuple[int, ...] = ()
