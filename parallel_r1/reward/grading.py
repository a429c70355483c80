"""Grading in isolation: answers are compared in worker processes that may hang, swell or die.

Extraction and everything that is provably cheap (plain numbers, text, lists of them) is judged in this process; only
what needs a computer-algebra system goes to a worker, and no worker exists before that. A worker that runs past the time
limit is killed and replaced and its answer judged wrong; one that dies has its job tried once more by another.

Workers are plain subprocesses, not forks and not `multiprocessing`: the parent is full of torch, threads and CUDA, none
of which a child may inherit, and its `__main__` need not be importable.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parallel_r1.reward.answers import Undecided, Verdict, extract, judge, undecided
from parallel_r1.reward.extraction import Extraction

_Key = tuple[str, Extraction]
TIMEOUT_S = 5.0
MEMORY_BYTES = 2 << 30
START_TIMEOUT_S = 120.0
MAX_ATTEMPTS = 2
CACHE_SIZE = 8_192


def grade(items: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Judge (gold, response) pairs in one call, by the pool of this process. Returns one verdict a pair, in order.

    Safe from any thread. Never raises for what a model wrote; raises RuntimeError when no worker can be started.
    """
    return default_pool().grade(items)


class Pool:
    """A pool of grading workers, started when first needed, one batch at a time.

    workers: processes; by default the CPUs of this machine shared out among its ranks, at most eight.
    timeout_s: seconds a worker may spend on one answer. memory_bytes: address space a worker may hold.
    """

    def __init__(
        self, workers: int | None = None, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers = {workers}: a pool needs at least one worker")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s = {timeout_s}: give the seconds an answer may take, above zero")
        self.size = workers or _default_size()
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Verdict] = OrderedDict()

    def grade(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """See `grade`. Concurrent calls take turns; each has all the workers to itself."""
        verdicts: list[Verdict | None] = [None] * len(items)
        waiting: dict[_Key, list[int]] = {}
        for i, (gold, response) in enumerate(items):
            found = extract(response)
            try:
                verdicts[i] = judge(gold, found, undecided)
            except Undecided:
                waiting.setdefault((gold, found), []).append(i)
        if waiting:
            with self._lock:
                for key, verdict in self._compare(list(waiting)).items():
                    for i in waiting[key]:
                        verdicts[i] = verdict
        return [verdict or Verdict(False, "not graded") for verdict in verdicts]

    def close(self) -> None:
        """End the workers. The pool may be used again, which starts new ones."""
        with self._lock:
            while self._workers:
                self._workers.pop().kill()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    def _compare(self, keys: list[_Key]) -> dict[_Key, Verdict]:
        done = {key: self._cache[key] for key in keys if key in self._cache}
        queue = deque(_Job(key) for key in keys if key not in done)
        while len(self._workers) < min(self.size, len(queue)):
            self._workers.append(_Worker(self.memory_bytes))
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self._workers:
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                self._run(queue, done, selector)
        except BaseException:  # an interrupt leaves answers in the pipes that belong to nobody: start afresh next time
            while self._workers:
                self._workers.pop().kill()
            raise
        return done

    def _run(self, queue: deque[_Job], done: dict, selector: selectors.BaseSelector) -> None:
        """Feed the workers until every job has its verdict. One job a worker is under way at any time."""
        failed_starts = 0

        def replace(worker: _Worker) -> None:
            selector.unregister(worker.process.stdout)
            worker.kill()
            fresh = _Worker(self.memory_bytes)
            self._workers[self._workers.index(worker)] = fresh
            selector.register(fresh.process.stdout, selectors.EVENT_READ, fresh)

        def finish(job: _Job, verdict: Verdict, keep: bool = True) -> None:
            done[job.key] = verdict
            if keep:
                self._cache[job.key] = verdict
                while len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)

        while queue or any(worker.job for worker in self._workers):
            for worker in list(self._workers):
                if queue and worker.ready and not worker.job and not worker.send(queue[0], self.timeout_s):
                    replace(worker)  # it died while idle: no job was lost
                elif worker.job and worker.job is (queue[0] if queue else None):
                    queue.popleft()
            deadlines = [worker.deadline for worker in self._workers if worker.busy]
            ready = selector.select(max(min(deadlines, default=0.0) - time.monotonic(), 0.0))
            for event, _ in ready:
                worker: _Worker = event.data
                job, message = worker.job, worker.read()
                if message is None:
                    continue
                if message == ["ready"]:
                    worker.ready, failed_starts = True, 0
                elif not worker.ready:
                    failed_starts += 1
                    if failed_starts >= 3:
                        raise RuntimeError(
                            f"no grading worker could be started ({message[0]}): check that math-verify is installed "
                            f"for {sys.executable} and that {self.memory_bytes} bytes of memory are enough"
                        )
                    replace(worker)
                elif len(message) == 2 and job:
                    worker.job = None
                    finish(job, Verdict(bool(message[0]), str(message[1])))
                else:  # it died on the job
                    worker.job = None
                    replace(worker)
                    if job and job.attempts < MAX_ATTEMPTS:
                        queue.append(job)
                    elif job:
                        finish(job, Verdict(False, f"the grading worker died {job.attempts} times on it"), keep=False)
            for worker in list(self._workers):
                if worker.busy and time.monotonic() >= worker.deadline:
                    job, was_ready = worker.job, worker.ready
                    replace(worker)
                    if job:
                        finish(job, Verdict(False, f"no verdict within {self.timeout_s:g} s"))
                    elif not was_ready:
                        failed_starts += 1
                        if failed_starts >= 3:
                            raise RuntimeError(f"no grading worker was ready within {START_TIMEOUT_S:g} s, three times")


@dataclass(eq=False)
class _Job:
    key: _Key
    attempts: int = 0


@dataclass(eq=False)
class _Worker:
    """One subprocess. ready: it said so; job: what it works on; deadline: when (monotonic seconds) it is given up."""

    memory_bytes: int
    process: subprocess.Popen = field(init=False)
    ready: bool = False
    job: _Job | None = None
    deadline: float = 0.0
    _buffer: bytes = b""

    def __post_init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parallel_r1.reward.worker", str(self.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt from the keyboard is the parent's business
            bufsize=0,
        )
        self.deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def busy(self) -> bool:
        return self.job is not None or not self.ready

    def send(self, job: _Job, timeout_s: float) -> bool:
        """Give it a job. False when it is no longer there. The job is far smaller than a pipe, so this cannot block."""
        gold, found = job.key
        try:
            self.process.stdin.write((json.dumps([timeout_s, gold, found.answers, found.where]) + "\n").encode())
        except OSError:
            return False
        job.attempts += 1
        self.job, self.deadline = job, time.monotonic() + timeout_s
        return True

    def read(self) -> list | None:
        """What it said: None while a line is incomplete, ["gone"] after its end."""
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        if not chunk:
            return [f"its process ended with status {self.process.wait()}"]
        self._buffer += chunk
        if b"\n" not in self._buffer:
            return None
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


def _default_size() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(8, cpus // (int(ranks) if ranks.isdigit() and int(ranks) else 1)))


_default: tuple[int, Pool] | None = None
_default_lock = threading.Lock()


def default_pool() -> Pool:
    """The pool of this process, made on first use. A fork makes its own: the parent's pipes are not shared."""
    global _default
    with _default_lock:
        if _default is None or _default[0] != os.getpid():
            pool = Pool()
            atexit.register(_close_if_mine, os.getpid(), pool)
            _default = (os.getpid(), pool)
        return _default[1]


def _close_if_mine(pid: int, pool: Pool) -> None:
    if pid == os.getpid():
        pool.close()
