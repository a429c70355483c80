"""What an iteration's rollouts earned, and what is reported about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_r1.modules.batching import Row
from parallel_r1.modules.behaviour import Behaviour
from parallel_r1.modules.tally import Statistic, Tally
from parallel_r1.reward.rewards import Terms
from parallel_r1.types import Judged, Rollout


@dataclass(frozen=True)
class Experience:
    """Responses of one rank, group by group. rollouts, judged: [P * G]; rewards: [P, G]; terms: name -> [P * G].

    seconds: of generation. dropped: problems left out, since their prompts are too long.
    """

    rollouts: list[Rollout]
    judged: list[Judged]
    rewards: Tensor
    terms: Terms
    seconds: float
    dropped: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(rollout.response_ids) for rollout in self.rollouts)

    def flat(self) -> Tensor:
        """[P] bool: groups whose rewards are all equal, which teach nothing."""
        return (self.rewards == self.rewards[:, :1]).all(dim=1)

    def picked(self, keep: Tensor) -> Experience:
        """The groups where keep [P] is True."""
        size = self.rewards.shape[1]
        rows = [p * size + g for p in keep.nonzero().flatten().tolist() for g in range(size)]
        return Experience(
            [self.rollouts[i] for i in rows],
            [self.judged[i] for i in rows],
            self.rewards[keep],
            {name: [values[i] for i in rows] for name, values in self.terms.items()},
            self.seconds,
            self.dropped,
        )

    def joined(self, other: Experience) -> Experience:
        """Both, one after the other."""
        terms = {
            name: self.terms.get(name, [None] * len(self.judged)) + other.terms.get(name, [None] * len(other.judged))
            for name in self.terms | other.terms
        }
        return Experience(
            self.rollouts + other.rollouts,
            self.judged + other.judged,
            torch.cat([self.rewards, other.rewards]),
            terms,
            self.seconds + other.seconds,
            self.dropped + other.dropped,
        )


def rows_of(rollouts: Sequence[Rollout], advantages: Tensor, mask_cut: bool) -> list[list[Row]]:
    """Groups of rows. advantages: [P, G]. mask_cut: responses that a limit cut are not trained on (DAPO's filter)."""
    size = advantages.shape[1]
    kept = [replace(r, sampled=(False,) * len(r.sampled)) if mask_cut and not r.finished else r for r in rollouts]
    return [
        [Row(r, a) for r, a in zip(kept[p * size : (p + 1) * size], advantages[p].tolist(), strict=True)]
        for p in range(len(advantages))
    ]


def tally_experience(experience: Experience, behaviour: Behaviour) -> Tally:
    """Means over responses; definitions stand in `evaluation.metrics`, `modules.behaviour` and in the comments here."""
    tally = Tally()
    judged, rollouts = experience.judged, experience.rollouts

    def add(name: str, values: Sequence[float | bool | None], *statistics: Statistic) -> None:
        tally.add(name, torch.tensor([float(v) for v in values if v is not None]), *statistics)

    add("rollout/accuracy", [j.correct for j in judged])
    add("rollout/parallel_ratio", [j.response.is_parallel for j in judged])
    add("rollout/format_valid", [j.finished and j.response.well_formed for j in judged])
    add("rollout/response_length", [len(r.response_ids) for r in rollouts], "min", "max")
    add("rollout/truncated", [not r.finished for r in rollouts])
    add("rollout/cut_segments", [r.cuts for r in rollouts])  # paths and summaries that their budget ended
    add("rollout/critical_tokens", [j.critical_tokens for j in judged])
    add("rollout/total_tokens", [j.total_tokens for j in judged])
    # where blocks open, as a share of the response: early ones explore, late ones verify
    add("rollout/parallel_position", behaviour.positions)
    add("rollout/parallel_token_share", behaviour.token_shares)
    add("rollout/block_tokens", behaviour.tokens)
    add("rollout/paths_per_block", behaviour.paths)
    add("rollout/verification_share", [label == "verification" for label in behaviour.labels])
    add("rollout/path_agreement", behaviour.path_agreement)
    add("rollout/answer_agreement", behaviour.answer_agreement)
    add("rollout/path_diversity", behaviour.diversity)
    add("rollout/zero_variance_groups", experience.flat().tolist())
    add("reward/total", experience.rewards.flatten().tolist(), "mean", "std")
    for name, values in experience.terms.items():
        add(f"reward/{name}", values, "mean", "std")
    return tally
