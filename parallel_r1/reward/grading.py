"""Grading in isolation: answers are compared in worker processes that may hang, swell or die.

Extraction and everything that is provably cheap (plain numbers, text, lists of them) is judged in this process; only
what needs a computer-algebra system goes to a worker, and no worker exists before that. A worker that runs past the
time limit is killed and replaced and its answer judged wrong; one that dies has its job tried once more by another.

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
MAX_FAILED_STARTS = 3
IN_PROCESS_CHARS = 400
"""Longer answers are compared by workers even where no algebra is needed: the cost here stays below 0.05 s each."""
CACHE_SIZE = 8_192
_NEEDED = {"PATH", "LANG", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "TZ"}


def grade(items: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Judge (gold, response) pairs in one call, by the pool of this process. Returns one verdict a pair, in order.

    Safe from any thread. Never raises for what a model wrote; raises RuntimeError when no worker can be started.
    """
    return default_pool().grade(items)


def _judged_here(gold: str, found: Extraction) -> Verdict | None:
    """The verdict, where it is certain and cheap; None for what a worker must see."""
    if max(map(len, (gold, *found.answers))) > IN_PROCESS_CHARS:
        return None
    try:
        return judge(gold, found, undecided)
    except Undecided:
        return None
    except Exception:  # a text that trips the reader here trips it in a worker, which then says so
        return None


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
            verdicts[i] = _judged_here(gold, found)
            if verdicts[i] is None:
                waiting.setdefault((gold, found), []).append(i)
        if waiting:
            with self._lock:
                for key, verdict in self._compare(list(waiting)).items():
                    for i in waiting[key]:
                        verdicts[i] = verdict
        assert None not in verdicts, "every item has its verdict, from here or from a worker"
        return verdicts

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
        """The verdict of each key, from memory or from the workers. The caller holds the lock."""
        done = {key: self._cache[key] for key in keys if key in self._cache}
        jobs = [_Job(key) for key in keys if key not in done]
        if not jobs:
            return done
        while len(self._workers) < min(self.size, len(jobs)):
            self._workers.append(_Worker(self.memory_bytes))
        try:
            done |= _Batch(self._workers, self.memory_bytes, self.timeout_s).run(jobs)
        except BaseException:  # an interrupt leaves replies in the pipes that belong to nobody: start afresh next time
            while self._workers:
                self._workers.pop().kill()
            raise
        for job in jobs:
            if job.lasting:
                self._cache[job.key] = done[job.key]
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return done


class _Batch:
    """One batch on its way through the workers: each has at most one job, and a time by which it is given up."""

    def __init__(self, workers: list[_Worker], memory_bytes: int, timeout_s: float) -> None:
        self.workers, self.memory_bytes, self.timeout_s = workers, memory_bytes, timeout_s
        self.selector = selectors.DefaultSelector()
        self.queue: deque[_Job] = deque()
        self.done: dict[_Key, Verdict] = {}
        self.failed_starts = 0

    def run(self, jobs: list[_Job]) -> dict[_Key, Verdict]:
        self.queue.extend(jobs)
        with self.selector:
            for worker in self.workers:
                self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            while self.queue or any(worker.job for worker in self.workers):
                self.feed()
                next_deadline = min(worker.deadline for worker in self.workers if worker.busy)
                for event, _ in self.selector.select(max(next_deadline - time.monotonic(), 0.0)):
                    self.hear(event.data)
                self.expire()
        return self.done

    def feed(self) -> None:
        """Give every idle worker a job. One that has died while idle is replaced, and no job was lost."""
        for worker in list(self.workers):
            if not self.queue or worker.busy:
                continue
            if worker.send(self.queue[0], self.timeout_s):
                self.queue.popleft()
            else:
                self.replace(worker)

    def hear(self, worker: _Worker) -> None:
        """Take what a worker says: that it is ready, a verdict, or its end."""
        message = worker.read()
        if message is None:
            return
        if not worker.ready:
            if message == ["ready"]:
                worker.ready, self.failed_starts = True, 0
            else:
                self.failed_to_start(worker, str(message[0]))
        elif len(message) == 2 and worker.job:
            self.done[worker.job.key] = Verdict(bool(message[0]), str(message[1]))
            worker.job = None
        else:
            self.died(worker)

    def died(self, worker: _Worker) -> None:
        job = worker.job
        self.replace(worker)
        if job and job.attempts < MAX_ATTEMPTS:
            self.queue.append(job)
        elif job:
            job.lasting = False
            self.done[job.key] = Verdict(False, f"the grading worker died on it {job.attempts} times")

    def expire(self) -> None:
        """Give up what has run out of time."""
        for worker in list(self.workers):
            if not worker.busy or time.monotonic() < worker.deadline:
                continue
            if worker.job:
                worker.job.lasting = False  # the machine may have been busy: the next time it is asked afresh
                self.done[worker.job.key] = Verdict(False, f"no verdict within {self.timeout_s:g} s")
                self.replace(worker)
            else:
                self.failed_to_start(worker, f"not ready within {START_TIMEOUT_S:g} s")

    def failed_to_start(self, worker: _Worker, cause: str) -> None:
        self.failed_starts += 1
        if self.failed_starts >= MAX_FAILED_STARTS:
            raise RuntimeError(
                f"no grading worker can be started ({cause}): check that math-verify is installed for {sys.executable} "
                f"and that memory_bytes = {self.memory_bytes} is enough for it"
            )
        self.replace(worker)

    def replace(self, worker: _Worker) -> None:
        self.selector.unregister(worker.process.stdout)
        worker.kill()
        fresh = _Worker(self.memory_bytes)
        self.workers[self.workers.index(worker)] = fresh
        self.selector.register(fresh.process.stdout, selectors.EVENT_READ, fresh)


@dataclass(eq=False)
class _Job:
    """attempts: workers it was given to; lasting: whether its verdict is worth remembering."""

    key: _Key
    attempts: int = 0
    lasting: bool = True


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
        self.process = subprocess.Popen(
            # -P: nothing is imported from the folder it starts in
            [sys.executable, "-P", "-m", "parallel_r1.reward.worker", str(self.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_worker_environment(),
            cwd=os.sep,
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


def _worker_environment() -> dict[str, str]:
    """What Python needs to start, and nothing else: a trainer's environment holds tokens and keys."""
    kept = {k: v for k, v in os.environ.items() if k in _NEEDED or k.startswith("LC_")}
    root = str(Path(__file__).resolve().parents[2])
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**kept, "PYTHONPATH": os.pathsep.join([root, *given])}


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
