"""The rows of the paper's tables, and what a run of one leaves on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A row of the tables. label: its name in the report; start: the row whose cold start it shares; last: its final
    stage, None where nothing is trained; mode: how it is evaluated, as it was trained; needs: rows whose training is
    measured before this one can be planned."""

    label: str
    start: str | None
    last: str | None = "hard"
    mode: str = "plain"
    needs: tuple[str, ...] = ()


ROWS = {
    "base": Row("base (random)", None, None),
    "sft_seen": Row("SFT Seen", None, "cold_start"),
    "sft_unseen": Row("SFT Unseen", None, "cold_start", mode="fork_join"),
    "sft_sequential": Row("SFT sequential", None, "cold_start", mode="sequential"),
    "seen": Row("Seen", "sft_seen"),
    "sequential": Row("GRPO sequential, same steps", "sft_sequential", mode="sequential"),
    "seen_without_stage1": Row("Seen without stage 1", "sft_seen"),
    "unseen_s1": Row("Unseen S1 (accuracy)", "sft_unseen", mode="fork_join"),
    "unseen_s2": Row("Unseen S2 (alternating)", "sft_unseen", mode="fork_join"),
    "unseen_parallel": Row("Unseen, parallel-only reward", "sft_unseen", mode="fork_join"),
    "scaffold": Row("Unseen, S2 then accuracy", "sft_unseen", mode="fork_join"),
    "unseen_stage1": Row("Unseen with stage 1", "sft_unseen", mode="fork_join"),
    "sequential_tokens": Row(
        "GRPO sequential, same tokens", "sft_sequential", mode="sequential", needs=("seen", "sequential")
    ),
    "seen_position": Row("Seen, early and late blocks", None),
}


def read_metrics(folder: Path, mode: str) -> tuple[dict[str, float], dict[str, float]]:
    """What `test` found in a run: (metrics, share of right samples by problem); empty where it did not run."""
    paths = sorted((folder / "test").glob("*/report.json"))
    if not paths:
        return {}, {}
    tier = json.loads(paths[0].read_text())["tiers"]["hard"]
    found = {name: entry["value"] for name, entry in tier["modes"][mode].items()}
    found["accuracy"] = found[f"mean@{tier['samples']}"]
    return found, {p["id"]: p["correct"] / tier["samples"] for p in tier["by_problem"][mode]}


@cache
def read_events(folder: Path, tag: str) -> list[float]:
    """What TensorBoard holds of a finished run under a tag, step by step, over its reinforcement learning stages."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: list[float] = []
    for stage in ("easy", "hard"):
        if (folder / "tensorboard" / stage).is_dir():
            events = EventAccumulator(str(folder / "tensorboard" / stage))
            events.Reload()
            if tag in events.Tags()["scalars"]:
                # a stage begun again after a kill has two files: the later value of a step counts
                values += [v for _, v in sorted({e.step: e.value for e in events.Scalars(tag)}.items())]
    return values


@dataclass(frozen=True)
class Run:
    """One row with one seed: a folder."""

    root: Path
    row: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.root / f"seed{self.seed}" / self.row

    def of(self, row: str) -> Run:
        """The run of another row with the same seed."""
        return Run(self.root, row, self.seed)

    @property
    def trained(self) -> bool:
        last = ROWS[self.row].last
        return last is None or (self.folder / "stages" / last / "stage.json").is_file()

    @property
    def tested(self) -> bool:
        return bool(self.metrics())

    def metrics(self) -> dict[str, float]:
        """Held-out metrics; nothing where the run is not tested."""
        return read_metrics(self.folder, ROWS[self.row].mode)[0]

    def correct(self) -> dict[str, float]:
        """Share of right samples, by test problem."""
        return read_metrics(self.folder, ROWS[self.row].mode)[1]

    def events(self, tag: str) -> list[float]:
        """A training curve, step by step; nothing before the run is trained."""
        return read_events(self.folder, tag) if self.trained else []

    def usage(self) -> list[dict[str, Any]]:
        """One record a command that ran here: task, rc, wall_s, cpu_s, error."""
        path = self.folder / "usage.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
