"""Rollouts on disk: whole groups, rotated, the same bytes whether or not a run was interrupted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from parallel_r1.evaluation.row_files import row_files, saved_rows
from parallel_r1.modules.experience import Experience
from parallel_r1.modules.rollout_log import RolloutLog, drop_after, training_rows
from parallel_r1.structure.grammar import parse
from parallel_r1.structure.tokens import TagIds
from parallel_r1.traces.rollouts import read_rollouts
from parallel_r1.types import Judged, Problem, Rollout

POLICY = SimpleNamespace(tags=TagIds(1, 2, 3, 4, 5, 6), pieces=lambda ids: list("abc"))


def experience(rewards: list[list[float]]) -> Experience:
    """Responses of three tokens, the last one inserted; those of a reward above 0 are right."""
    flat = [(p, reward) for p, group in enumerate(rewards) for reward in group]
    rollouts = [Rollout((1,), (7, 8, 9), (-0.5, -1.25, 0.0), (True, True, False), True) for _ in flat]
    judged = [
        Judged(Problem(f"id{p}", f"q{p}", "4", "easy"), "Final Answer: 4", parse(""), r > 0, True, 2, 2)
        for p, r in flat
    ]
    return Experience(rollouts, judged, torch.tensor(rewards), {"accuracy": [r for _, r in flat]}, 1.0)


def rows_of(folder: Path) -> list[tuple[int, int]]:
    return [(row["iteration"], row["n"]) for file in row_files(folder) for row in saved_rows(file)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def run(folder: Path, first: int, last: int, rank: int = 0, max_bytes: int = 300, ranks: int = 2) -> None:
    log = RolloutLog(folder, (rank, ranks), max_bytes)
    for iteration in range(first, last):
        log.write(iteration, [{"iteration": iteration, "n": n, "noise": f"{iteration * n:o}" * 20} for n in range(3)])


def test_rows_hold_whole_groups_with_what_they_earned() -> None:
    e = experience([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    rows = training_rows(e, torch.tensor([[0.5, -0.5], [-1.0, 1.0], [0.0, 0.0]]), 6, 2, (1, 3), POLICY)
    assert [(r["id"], r["group"], r["sample"], r["reward"], r["advantage"]) for r in rows] == [
        ("id0", 1, 0, 1.0, 0.5),
        ("id0", 1, 1, -1.0, -0.5),
        ("id1", 4, 0, -1.0, -1.0),
        ("id1", 4, 1, 1.0, 1.0),
    ]
    assert (rows[0]["iteration"], rows[0]["parallel_positions"]) == (6, [])
    assert rows[3]["terms"] == {"accuracy": 1.0}
    assert (rows[0]["tokens"], rows[0]["logprobs"]) == (["a", "b", "c"], [-0.5, -1.25, None])
    assert len(training_rows(e, torch.zeros(3, 2), 0, 99, (0, 1), POLICY)) == 6


def test_files_rotate_by_size(tmp_path: Path) -> None:
    run(tmp_path, 0, 12)
    files = row_files(tmp_path)
    assert len(files) > 2
    assert files[0].name == "rank0-000000.jsonl.gz"
    assert rows_of(tmp_path) == [(i, n) for i in range(12) for n in range(3)]


def test_an_interrupted_run_leaves_the_same_bytes(tmp_path: Path) -> None:
    for rank in range(2):
        run(tmp_path / "whole", 0, 12, rank)
    for stop in range(1, 12):
        folder = tmp_path / f"stopped {stop}"
        for rank in range(2):
            run(folder, 0, stop + 1, rank)
            last = row_files(folder)[-1]
            last.write_bytes(last.read_bytes()[:-7])  # killed while it wrote iteration `stop`
        resumed = max(0, stop - 3)  # the last checkpoint is older than the last rollouts
        drop_after(folder, resumed)
        for rank in range(2):
            run(folder, resumed, 12, rank)
        assert bytes_of(folder) == bytes_of(tmp_path / "whole")


def test_a_log_that_starts_over_drops_its_own_rows_alone(tmp_path: Path) -> None:
    run(tmp_path, 0, 6, rank=0)
    run(tmp_path, 0, 6, rank=1)
    (tmp_path / "notes.jsonl.gz").write_bytes(b"not ours")
    run(tmp_path, 2, 4, rank=1)
    kept = [(r, i) for r in range(2) for f in sorted(tmp_path.glob(f"rank{r}-*")) for i in
            dict.fromkeys(row["iteration"] for row in saved_rows(f))]  # fmt: skip
    assert kept == [(0, i) for i in range(6)] + [(1, i) for i in range(4)]
    assert (tmp_path / "notes.jsonl.gz").read_bytes() == b"not ours"
    drop_after(tmp_path, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.jsonl.gz"]
    drop_after(tmp_path / "missing", 0)


def test_a_run_that_goes_on_with_fewer_ranks_leaves_no_rows_of_the_others(tmp_path: Path) -> None:
    for rank in range(3):
        run(tmp_path, 0, 6, rank, ranks=3)
    for rank in range(2):
        run(tmp_path, 4, 7, rank)
    last = {r: max(row["iteration"] for f in tmp_path.glob(f"rank{r}-*") for row in saved_rows(f)) for r in range(3)}
    assert last == {0: 6, 1: 6, 2: 3}


def test_the_trace_tool_reads_a_file_or_a_folder(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, (0, 1), max_bytes=1)
    for iteration in range(2):
        e = experience([[0.5, 1.0]])
        log.write(iteration, training_rows(e, torch.zeros(1, 2), iteration, 1, (0, 1), POLICY))
    problems, candidates = read_rollouts(str(tmp_path))
    assert [(p.question, p.answer) for p in problems] == [("q0", "4")]
    assert len(candidates[problems[0].id]) == 4
    assert len(read_rollouts(str(row_files(tmp_path)[0]))[1][problems[0].id]) == 2
