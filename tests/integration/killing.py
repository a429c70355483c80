"""Runs of a short curriculum that are killed at random and run again; used by `test_killed_runs.py`.

    python tests/integration/killing.py --runs 25 [--engine transformers] [--folder DIR]

prints what became of each. Not a test by itself: each run takes a minute or more.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

ROOT = Path(__file__).parents[2]
ENGINES = {
    "vllm": "parallel_r1.rollout.vllm_engine.VLLMEngine",
    "transformers": "parallel_r1.rollout.transformers_engine.TransformersEngine",
}
STAGES = ("cold_start", "easy", "hard")


def arguments(root: Path, engine: str, *more: str) -> list[str]:
    """The debug curriculum, shorter, with a checkpoint each iteration and validations in the middle."""
    options = [
        f"--curriculum.root={root}",
        f"--engine={ENGINES[engine]}",
        "--curriculum.checkpoint_every=1",
        "--trainer.val_check_interval=2",
        "--trainer.enable_progress_bar=false",
        "--curriculum.stages.cold_start.trainer.max_steps=5",
        *(f"--curriculum.stages.{stage}.data.init_args.eval_size=8" for stage in STAGES),
    ]
    return [sys.executable, "-m", "parallel_r1", "fit", "--config", "configs/debug.yaml", *options, *more]


def start(root: Path, engine: str, *more: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = arguments(root, engine, *more)
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(root: Path, engine: str, *more: str) -> str:
    """Run to the end; returns what was printed."""
    process = start(root, engine, *more)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out[-3000:]
    return out


def begun(root: Path) -> bool:
    return (root / "tensorboard" / "cold_start").is_dir()


def drafts(root: Path) -> list[Path]:
    """What is being written inside a stage right now."""
    return [*root.glob("stages/*/checkpoints/*.partial"), *root.glob("stages/*/*.partial")]


@dataclass(frozen=True)
class Moment:
    """When to kill: `seconds` after the run has begun (writes 0), or after its `writes`-th write was seen to begin."""

    writes: int
    seconds: float

    @classmethod
    def draw(cls, rng: random.Random, number: int, duration: float) -> Moment:
        """By turns: in the middle of a write, a little after one (in an update, a rollout, a validation), any time."""
        kind = number % 3
        if kind == 2:
            return cls(0, rng.uniform(0.0, duration))
        return cls(rng.randint(1, 8), 0.0 if kind == 0 else rng.uniform(0.0, 2.0))


def kill_at(process: subprocess.Popen[str], root: Path, moment: Moment) -> str:
    """Kill a run, and all that it has started. Returns what it was doing, as far as the folder tells."""
    deadline = time.monotonic() + 300
    while not begun(root) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    seen: dict[Path, None] = {}
    while len(seen) < moment.writes and process.poll() is None and time.monotonic() < deadline:
        seen.update(dict.fromkeys(drafts(root)))
    time.sleep(moment.seconds)
    writing = [path.relative_to(root) for path in drafts(root)]
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    if not alive:
        return "it had ended"
    last = f"{moment.seconds:.1f} s after " + (str([*seen][-1].relative_to(root)) if seen else "the start")
    return f"while {writing[0]} was written" if writing else last


def weights(root: Path) -> dict[str, bytes]:
    return {stage: (root / "stages" / stage / "model" / "model.safetensors").read_bytes() for stage in STAGES}


def events(root: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(stage, tag) -> every (step, value) in its files, as they stand there: nothing is purged or thinned."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for stage in STAGES:
        for path in sorted((root / "tensorboard" / stage).iterdir()):
            if "tfevents" in path.name:
                for event in EventFileLoader(str(path)).Load():
                    for value in event.summary.value:
                        number = value.tensor.float_val[0] if value.tensor.float_val else float("nan")
                        found.setdefault((stage, value.tag), []).append((event.step, number))
    return found


def differences(reference: Path, root: Path) -> list[str]:
    """What sets a run apart from the undisturbed one: weights, metrics (times and memory aside), steps logged twice."""
    out = [f"weights of {stage}" for stage, data in weights(reference).items() if weights(root)[stage] != data]
    mine, theirs = events(root), events(reference)
    for key, found in mine.items():
        out += [f"{key}: step {step} {n} times" for step, n in Counter(s for s, _ in found).items() if n > 1]
    for key in mine.keys() | theirs.keys():
        steps, expected = ([step for step, _ in events.get(key, [])] for events in (mine, theirs))
        if steps != expected:
            out.append(f"{key}: steps {steps} instead of {expected}")
        elif not key[1].startswith(("time/", "memory/")) and str(mine[key]) != str(theirs[key]):
            out.append(f"{key}: {mine[key]} instead of {theirs[key]}")
    rows = [sorted((folder / "stages").rglob("*.jsonl.gz")) for folder in (reference, root)]
    if [path.read_bytes() for path in rows[0]] != [path.read_bytes() for path in rows[1]]:
        out.append("rollouts")
    return out


def campaign(folder: Path, runs: int, engine: str, seed: int) -> list[tuple[list[str], list[str]]]:
    """An undisturbed run, then `runs` that are killed once or twice. Returns (kills, differences) of each."""
    rng, reference = random.Random(seed), folder / "reference"
    process = start(reference, engine)
    while not begun(reference) and process.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out[-3000:]
    duration = time.monotonic() - began
    results = []
    for run in range(runs):
        root, kills = folder / f"run{run}", []
        for number in range(1 + run % 2):
            kills.append(kill_at(start(root, engine), root, Moment.draw(rng, run + number, duration)))
        out = finish(root, engine)
        resumed = [line for line in out.splitlines() if "goes on from step" in line]
        results.append((kills + resumed, differences(reference, root)))
        print(run, *results[-1], flush=True)
    return results


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args(args)
    folder = given.folder or Path(tempfile.mkdtemp())
    results = campaign(folder, given.runs, given.engine, given.seed)
    print(f"{sum(not different for _, different in results)} of {len(results)} equal the undisturbed run")


if __name__ == "__main__":
    main()
