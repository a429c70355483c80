"""What an update maximises, as one object in YAML; and what the papers of the known methods chose.

    objective: {loss: dapo}                                DAPO's bounds and token mean
    objective: {loss: ppo, advantage: rloo, kl_coef: 0.01} mixed at will; what is null follows the loss

No torch here: the command line builds it, the maths is in `objective`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Advantage = Literal["grpo", "rloo", "reinforce_pp"]
Std = Literal["group", "batch", "none"]
Loss = Literal["ppo", "dapo", "dr_grpo", "gspo", "cispo"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Kl = Literal["k1", "k2", "k3"]
Mismatch = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

# what each method's paper uses, for keys that are left null
_PAPERS: dict[str, dict[str, Any]] = {
    # GRPO's loss under the token mean that Parallel-R1 trains with (arXiv 2509.07980)
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token_mean"},
    # arXiv 2503.14476, section 3
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
    # arXiv 2503.20783: no deviation, no length bias
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant", "std": "none"},
    # arXiv 2507.18071, section 5.1
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    # arXiv 2506.13585 states no number; 1 + 4 is the cap that others train with
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"},
}
_STD: dict[str, Std] = {"grpo": "group", "rloo": "none", "reinforce_pp": "batch"}
_CHOICES: dict[str, Any] = {
    "advantage": Advantage,
    "std": Std,
    "loss": Loss,
    "aggregation": Aggregation,
    "kl": Kl,
    "mismatch": Mismatch,
    "old_logprobs": Literal["trainer", "engine"],
    "overlong": Literal["keep", "mask", "soft"],
}


@dataclass
class Objective:
    """What an update maximises; null takes what the paper of `loss` uses.

    Args:
        loss: `ppo` (clipped token ratio), `dapo` and `dr_grpo` (the same, other defaults), `gspo` (ratio of the whole
            response), `cispo` (truncated ratio as a weight).
        advantage: `grpo` (against the group's mean), `rloo` (against the mean of the others), `reinforce_pp` (against
            the group's mean, then scaled over the batch).
        std: divide advantages by the deviation of the `group` or the `batch`, or `none`.
        aggregation: `token_mean` over the whole optimizer step, `sequence_mean`, or `constant` (responses times
            `constant_length`).
        constant_length: tokens, for `constant`; null takes generation.max_tokens.
        clip_low: lower bound of the ratio is 1 - clip_low.
        clip_high: upper bound of the ratio is 1 + clip_high.
        dual_clip: bound of the loss at c times the advantage where that is negative (3.0 is usual); null for none.
        kl_coef: weight of the KL to the policy the stage started from; 0 holds no reference model.
        kl: its estimator.
        entropy_coef: weight of an entropy bonus.
        old_logprobs: denominator of the ratio: the `trainer`'s own, or the `engine`'s as sampled.
        mismatch: correction for an engine whose probabilities differ: truncated (`*_truncate`) or masked (`*_mask`)
            importance weights of tokens or sequences.
        mismatch_low: weights below are masked (`*_mask`).
        mismatch_high: weights above are cut (`*_truncate`) or masked (`*_mask`).
        overlong: cut responses `keep` their reward, are masked out of the loss (`mask`), or cost up to 1 the more the
            response fills the last `overlong_buffer` tokens of its limit (`soft`).
        overlong_buffer: tokens, for `soft`.
        dynamic_sampling: extra rounds of rollouts that replace groups whose rewards are all equal; 0 for none.
    """

    loss: Loss = "ppo"
    advantage: Advantage = "grpo"
    std: Std | None = None
    aggregation: Aggregation | None = None
    constant_length: int | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl: Kl = "k3"
    entropy_coef: float = 0.0
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    mismatch: Mismatch = "none"
    mismatch_low: float = 0.5
    mismatch_high: float = 2.0
    overlong: Literal["keep", "mask", "soft"] = "keep"
    overlong_buffer: int = 0
    dynamic_sampling: int = 0

    def settled(self, max_tokens: int) -> Objective:
        """The same with every null replaced by the method's own value. max_tokens: limit of a response."""
        own = {"std": _STD[self.advantage], "constant_length": max_tokens} | _PAPERS[self.loss]
        return replace(self, **{k: v for k, v in own.items() if getattr(self, k) is None})

    def check(self, max_tokens: int) -> None:
        """Raise ValueError, naming key, cause and remedy, for settings that cannot work."""
        for key, choices in _CHOICES.items():
            value = getattr(self, key)
            if value not in choices.__args__ and not (value is None and key in ("std", "aggregation")):
                raise ValueError(f"objective.{key}={value!r}: choose one of {', '.join(choices.__args__)}")
        for key in [f.name for f in fields(self) if f.name.endswith(("_coef", "_low", "_high", "_sampling"))]:
            if (value := getattr(self, key)) is not None and not 0 <= value < float("inf"):
                raise ValueError(f"objective.{key}={value}: give a finite number, 0 or above")
        if self.settled(max_tokens).clip_low > 1:
            raise ValueError(f"objective.clip_low={self.clip_low}: ratios are above 0, so give 1 or less")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"objective.dual_clip={self.dual_clip}: it bounds ratios above 1; give more (3.0 is usual)"
            )
        if self.constant_length is not None and self.constant_length < 1:
            raise ValueError(f"objective.constant_length={self.constant_length}: give a number of tokens, 1 or more")
        if self.mismatch != "none" and self.old_logprobs == "engine":
            raise ValueError(
                f"objective.mismatch={self.mismatch} corrects the trainer's old log-probabilities, but "
                "old_logprobs=engine already divides by the engine's: set mismatch=none or old_logprobs=trainer"
            )
        if self.mismatch.endswith("mask") and not self.mismatch_low < 1 < self.mismatch_high:
            raise ValueError(
                f"objective.mismatch_low={self.mismatch_low}, mismatch_high={self.mismatch_high}: equal probabilities "
                "(ratio 1) must lie between them"
            )
        if self.mismatch.endswith("truncate") and self.mismatch_high < 1:
            raise ValueError(f"objective.mismatch_high={self.mismatch_high}: a cap below 1 cuts every token; raise it")
        if self.overlong == "soft" and not 1 <= self.overlong_buffer <= max_tokens:
            raise ValueError(
                f"objective.overlong_buffer={self.overlong_buffer}: overlong=soft needs between 1 and "
                f"generation.max_tokens={max_tokens} tokens"
            )
