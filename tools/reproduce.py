"""The paper's tables, figures and claims in miniature: every row of configs/miniature/, three seeds, one report.

    python tools/reproduce.py                                    train, test, report; two processes at a time
    python tools/reproduce.py --only seen,sequential --seeds 1   some rows, one seed
    python tools/reproduce.py --do report                        the report of whatever is finished

A run is a folder, <root>/seed<N>/<row>, and a finished stage or test in it is never made again: kill this at any time,
the same command goes on. Cold starts are trained once a seed and copied into the rows that start from them. A command
that fails is kept in the folder's usage.jsonl, rows that need it are left out, and the report says so; the next call
tries again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition

sys.path.insert(0, str(Path(__file__).parent))

from reproduction.report import report
from reproduction.rows import ROWS, Run

PROJECT = Path(__file__).resolve().parents[1]
CONFIGS = PROJECT / "configs" / "miniature"


# --------------------------------------------------------------------------- commands


def arguments(row: str, task: str, root: Path, seed: int, quick: bool, steps: int | None = None) -> list[str]:
    """The command line of one run, as a user would give it. steps: optimizer steps of `hard`, not the config's."""
    stack = ["seen"] if row == "seen" else ["seen", row]
    words = [task, *(word for name in stack for word in ("--config", str(CONFIGS / f"{name}.yaml")))]
    words += [f"--seed_everything={seed}", f"--curriculum.root={root}", "--trainer.enable_progress_bar=false"]
    if task == "test":
        words.append(f"--curriculum.only={ROWS[row].last or 'cold_start'}")
        words += ["--evaluation.samples=1", f"--evaluation.modes=[{ROWS[row].mode}]"]
    if steps is not None:
        words.append(f"--curriculum.stages.hard.trainer.max_steps={steps}")
    if quick:
        for stage in ("cold_start", "easy", "hard"):
            words.append(f"--curriculum.stages.{stage}.trainer.max_steps=2")
            words.append(f"--curriculum.stages.{stage}.data.init_args.eval_size=16")
    return words


class Worker:
    """A process that has imported everything once, and forks for each command line: a start takes seconds, not twenty.

    Its children run one after another, each with one thread.
    """

    def __init__(self) -> None:
        words = [sys.executable, __file__, "--worker"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def call(self, run: Run, words: Sequence[str]) -> bool:
        """Run a command line; keep its output and what it used in the run's folder. Returns whether it succeeded."""
        run.folder.mkdir(parents=True, exist_ok=True)
        log = run.folder / f"{words[0]}.log"
        print(json.dumps([str(log), *words]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker process died with status {self.process.wait()} at {' '.join(words)}")
        used = json.loads(answer)
        last = (
            [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:] if used["rc"] else []
        )
        with (run.folder / "usage.jsonl").open("a") as file:
            file.write(json.dumps({"task": words[0], **used, "error": "".join(last)[:300]}) + "\n")
        return used["rc"] == 0

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """What a worker process does: for each [log file, command line ...] on stdin, fork, run it, report what it used."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not pass for an answer
    from parallel_r1.rollout.vllm_runtime import prepare_environment

    prepare_environment()  # vLLM reads it when it is imported
    import transformers  # noqa: F401 - imported for the children
    import vllm.v1.engine.llm_engine  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    from parallel_r1.cli import main as run

    for line in sys.stdin:
        log, *words = json.loads(line)
        start = time.perf_counter()
        if not (child := os.fork()):
            with open(log, "w") as out, open(os.devnull) as nothing:
                for file, number in ((nothing, 0), (out, 1), (out, 2)):
                    os.dup2(file.fileno(), number)
            sys.argv[1:] = words
            run(words)
            return
        _, status, used = os.wait4(child, 0)
        cpu, wall = used.ru_utime + used.ru_stime, time.perf_counter() - start
        report = {"rc": os.waitstatus_to_exitcode(status), "wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}
        print(json.dumps(report), file=answers, flush=True)


def share_cold_start(run: Run) -> None:
    """Copy the cold start that another row trained, whole or not at all."""
    start = ROWS[run.row].start
    target = run.folder / "stages" / "cold_start"
    if start is None or target.is_dir():
        return
    draft = target.with_name("cold_start.partial")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(run.of(start).folder / "stages" / "cold_start", draft)
    draft.rename(target)


def steps_for_equal_tokens(run: Run) -> int:
    """Steps in which sequential GRPO samples as many tokens as Seen did, at its own mean tokens a step."""
    tag = "rollout/total_tokens"  # a mean over responses, of which every step of both runs has the same number
    seen, sequential = run.of("seen").events(tag), run.of("sequential").events(tag)
    return max(1, round(sum(seen) / (sum(sequential) / len(sequential))))


def train(worker: Worker, run: Run, quick: bool) -> bool:
    if run.trained:
        return True
    share_cold_start(run)
    steps = steps_for_equal_tokens(run) if run.row == "sequential_tokens" and not quick else None
    return worker.call(run, arguments(run.row, "fit", run.folder, run.seed, quick, steps)) and run.trained


def test(worker: Worker, run: Run, quick: bool) -> bool:
    """Evaluate the finished run on the test split, once."""
    return run.tested or worker.call(run, arguments(run.row, "test", run.folder, run.seed, quick))


# --------------------------------------------------------------------------- scheduling


def wanted_rows(only: Sequence[str]) -> list[str]:
    """The rows asked for and those they start from, in table order. Raises ValueError for one that does not exist."""
    for name in only:
        if name not in ROWS:
            raise ValueError(f"--only: there is no row {name!r}; choose from {', '.join(ROWS)}")
    names = set(only or ROWS)
    for name in list(names):
        for other in (ROWS[name].start, *ROWS[name].needs):
            if other:
                names |= {other, *filter(None, [ROWS[other].start])}
    return [name for name in ROWS if name in names]


class Schedule:
    """Hands out runs in order, each when what it needs is trained. A run whose needs failed is never handed out."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.waiting, self.trained, self.failed = list(runs), set[Run](), set[Run]()
        self.changed = Condition()

    def needs(self, run: Run) -> list[Run]:
        row = ROWS[run.row]
        return [run.of(name) for name in (row.start, *row.needs) if name]

    def __iter__(self) -> Iterator[Run]:
        """For one worker; several may iterate at once."""
        while True:
            with self.changed:
                for run in [r for r in self.waiting if self.failed & set(self.needs(r))]:
                    self.waiting.remove(run)
                    self.failed.add(run)
                ready = next((r for r in self.waiting if self.trained >= set(self.needs(r))), None)
                if ready is None and not self.waiting:
                    return
                if ready is None:
                    self.changed.wait()
                    continue
                self.waiting.remove(ready)
            yield ready

    def done(self, run: Run, succeeded: bool) -> None:
        with self.changed:
            (self.trained if succeeded else self.failed).add(run)
            self.changed.notify_all()


def work(schedule: Schedule, do: Sequence[str], quick: bool) -> None:
    """One job: take runs from the schedule until none is left."""
    worker = Worker()
    for run in schedule:
        start, trained = time.perf_counter(), False
        try:
            trained = train(worker, run, quick) if "fit" in do else run.trained
        finally:
            schedule.done(run, trained)
        tested = trained and "test" in do and test(worker, run, quick)
        verdict = ("trained" if trained else "NOT TRAINED") + (", tested" if tested else "")
        clock = time.strftime("%H:%M:%S")
        print(f"{clock} seed {run.seed} {run.row}: {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
    worker.close()


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--only", default="", help="rows to run, with commas between them (default: all)")
    top.add_argument("--seeds", default="1,2,3")
    top.add_argument("--jobs", type=int, default=2, help="processes at a time, one thread each (default 2)")
    top.add_argument("--do", nargs="+", choices=["fit", "test", "report"], default=["fit", "test", "report"])
    top.add_argument("--root", type=Path, default=Path("runs/miniature"))
    top.add_argument("--report", type=Path, default=Path("docs/miniature.md"), help="figures go to a folder beside it")
    top.add_argument("--quick", action="store_true", help="two steps a stage and 16 test problems: does it run at all?")
    top.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # a process that forks for each command
    return top


def main(args: list[str] | None = None) -> None:
    options = parser().parse_args(args)
    if options.worker:
        serve()
        return
    rows, seeds = wanted_rows([n for n in options.only.split(",") if n]), [int(s) for s in options.seeds.split(",")]
    runs = [Run(options.root, row, seed) for seed in seeds for row in rows]
    if {"fit", "test"} & set(options.do):
        schedule = Schedule(runs)
        with ThreadPoolExecutor(options.jobs) as pool:
            for worker in [pool.submit(work, schedule, options.do, options.quick) for _ in range(options.jobs)]:
                worker.result()
    if "report" in options.do:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        labels = {name: row.label for name, row in ROWS.items()}
        chosen = [
            f"--{name} {value}"
            for name in ("only", "seeds")
            if (value := getattr(options, name)) != parser().get_default(name)
        ]
        command = " ".join(["python tools/reproduce.py", *chosen, *(["--quick"] if options.quick else [])])
        options.report.write_text(report(runs, labels, options.report, command, hardware()))
        print(f"report: {options.report}")


def hardware() -> str:
    """The processor, as Linux names it, and how many cores may be used."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{len(os.sched_getaffinity(0))} CPU cores ({found[1] if found else platform.machine()}), no GPU"


if __name__ == "__main__":
    main()
