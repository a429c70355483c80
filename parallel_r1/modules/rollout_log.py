"""Rollouts of RL training on disk: whole groups as rows, `<stage>/rollouts/rank<r>-<first iteration>.jsonl.gz`.

One gzip member an iteration. The bytes are a function of the rows alone, so a run that is resumed leaves what a run
that was never interrupted leaves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

from torch import Tensor

from parallel_r1.evaluation.measures import measures
from parallel_r1.evaluation.records import Row, response_row, token_columns
from parallel_r1.evaluation.row_files import append_rows, packed, saved_rows
from parallel_r1.modules.experience import Experience
from parallel_r1.policy import Policy

MAX_BYTES = 16_000_000
"""A file that has grown to so much, compressed, is followed by a new one."""

_NAME = re.compile(r"rank(\d+)-(\d+)\.jsonl\.gz")


class RolloutLog:
    """Writes the rows of one rank to `folder`, iteration by iteration, from whichever iteration it is first given.

    share: (rank, ranks).
    """

    def __init__(self, folder: Path, share: tuple[int, int], max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.rank, self.ranks = share
        self.path: Path | None = None

    def write(self, iteration: int, rows: Iterable[Row]) -> None:
        """Append the rows of an iteration. The first call removes what an earlier run left of it and later ones."""
        if self.path is None:
            # the first rank answers for those of a run that had more
            drop_after(self.folder, iteration, lambda r: r == self.rank or (self.rank == 0 and r >= self.ranks))
            files = _files(self.folder, self.rank)
            self.path = files[-1][1] if files else None
        if self.path is None or self.path.stat().st_size >= self.max_bytes:
            self.path = self.folder / f"rank{self.rank}-{iteration:06d}.jsonl.gz"
        append_rows(self.path, rows)


def drop_after(folder: Path, iteration: int, of_rank: Callable[[int], bool] = lambda r: True) -> None:
    """Remove the rows of `iteration` and later, of all ranks or of some, and what a kill has torn.

    Nothing happens where there is no folder. One process at a time may do this to a rank's files.
    """
    ranks = {r for r, _ in map(_place, folder.glob("*.jsonl.gz")) if r >= 0 and of_rank(r)}
    for mine in sorted(ranks):
        kept: Path | None = None
        for first, path in _files(folder, mine):
            if first >= iteration:
                path.unlink()
            else:
                kept = path
        if kept is not None:  # earlier files end before this one starts
            _keep_before(kept, iteration)


def _keep_before(path: Path, iteration: int) -> None:
    rows = [row for row in saved_rows(path) if row["iteration"] < iteration]
    members = [packed(group) for _, group in groupby(rows, key=lambda row: row["iteration"])]
    draft = path.with_name(path.name + ".partial")
    draft.write_bytes(b"".join(members))
    os.replace(draft, path)


def _place(path: Path) -> tuple[int, int]:
    """(rank, first iteration) by the name of a file; (-1, -1) for a file of somebody else."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _files(folder: Path, rank: int) -> list[tuple[int, Path]]:
    """(first iteration, file) of a rank, in order."""
    placed = [(*_place(path), path) for path in folder.glob("*.jsonl.gz")]
    return sorted((first, path) for r, first, path in placed if r == rank >= 0)


def training_rows(
    experience: Experience,
    advantages: Tensor,
    iteration: int,
    groups: int,
    share: tuple[int, int],
    policy: Policy,
) -> list[Row]:
    """The rows of the first `groups` groups, each whole.

    advantages: [P, G]. share: (rank, ranks): group p here is number p * ranks + rank of the iteration. Beside the
    columns of `response_row`, `measures` and `token_columns` a row holds `iteration`, `group`, `sample` (its index in
    the group), `reward`, `advantage` and `terms` (name -> value, or null where a term does not apply).
    """
    rank, ranks = share
    size = experience.rewards.shape[1]
    rewards, credit = experience.rewards.tolist(), advantages.tolist()
    rows = []
    for i in range(min(groups, len(rewards)) * size):
        p, g = divmod(i, size)
        rollout = experience.rollouts[i]
        rows.append(
            {
                "iteration": iteration,
                "group": p * ranks + rank,
                "sample": g,
                **response_row(experience.judged[i]),
                "reward": round(rewards[p][g], 6),
                "advantage": round(credit[p][g], 6),
                "terms": {name: values[i] for name, values in experience.terms.items()},
                **measures(experience.judged[i], rollout, policy.tags),
                **token_columns(rollout, policy.pieces(rollout.response_ids)),
            }
        )
    return rows
