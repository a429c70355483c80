"""The grading pool: isolation, time limits, death and replacement of workers, threads, speed. And hostile text."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from answer_cases import BOXED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_r1.reward import grading
from parallel_r1.reward.grading import Pool, default_pool, grade

SLOW = ("x+1", r"\boxed{\Gamma(10^{8})}")
"""An answer that keeps a worker busy for ever."""


def algebra(n: int) -> tuple[str, str]:
    """A pair that only a worker can judge, right, and unlike any other n."""
    return f"x+{n}", rf"\boxed{{{n - 1}+x+1}}"


@pytest.fixture(scope="module")
def pool():
    pool = Pool(workers=2, timeout_s=30.0)
    pool.grade([algebra(1), algebra(2)])
    yield pool
    pool.close()


@pytest.fixture
def impatient(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """The same workers with little time for each answer."""
    monkeypatch.setattr(pool, "timeout_s", 1.5)
    return pool


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# -- what costs nothing


def test_importing_is_light():
    code = (
        "import sys, parallel_r1.reward, parallel_r1.reward.rewards, parallel_r1.reward.grading as g; "
        "g.grade([('42', r'\\boxed{42}'), ('Yes', 'Final Answer: No'), ('1/2', 'Final Answer: 0.5')]); "
        "assert not g.default_pool().pids, 'plain answers started a worker'; "
        "print([m for m in ('torch', 'sympy', 'math_verify', 'sacrebleu', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ordinary_answers_take_well_under_a_millisecond():
    rng = random.Random(0)
    thought = "First we add the two numbers and then we look at what is left over. " * 30
    items = []
    for _ in range(2_000):
        n = rng.randrange(-1000, 100_000)
        said = rng.choice([f"{n}", f"{n:,}", f"${n}$", rf"\boxed{{{n}}}", f"{n}.0", f"{n + 1}", rf"{n} \text{{ cm}}"])
        items.append((str(n), f"{thought}\nFinal Answer: {said}"))
    start = time.process_time()
    verdicts = grade(items)
    assert len(items) / (time.process_time() - start) >= 1_000
    assert 0.7 < sum(verdict.correct for verdict in verdicts) / len(items) < 0.95


def test_verdicts_come_in_order_and_one_an_item(pool: Pool):
    items = [("1", r"\boxed{1}"), algebra(5), ("1", "nothing"), algebra(6), ("x+7", r"\boxed{x+8}"), algebra(5)]
    assert [verdict.correct for verdict in pool.grade(items)] == [True, True, False, True, False, True]
    assert pool.grade([]) == []


# -- workers that hang, die, or cannot start


def test_a_hang_costs_one_verdict_and_its_worker(impatient: Pool):
    pool, before = impatient, impatient.pids
    start = time.monotonic()
    verdicts = pool.grade([SLOW, algebra(3), algebra(4)])
    assert [verdict.correct for verdict in verdicts] == [False, True, True]
    assert verdicts[0].reason == "no verdict within 1.5 s"
    assert time.monotonic() - start < 30.0
    assert len(pool.pids) == 2
    assert len(set(pool.pids) & set(before)) == 1
    wait_for(lambda: not all(running(pid) for pid in before))


def test_killing_a_worker_in_mid_batch_loses_no_verdict(pool: Pool):
    items = [algebra(n) for n in range(100, 220)]
    pool.grade(items[:2])
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: any(worker.job for worker in pool._workers))
        victim = next(worker for worker in pool._workers if worker.job)
        killed.append(victim.process.pid)
        victim.process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    verdicts = pool.grade(items)
    killer.join()
    assert killed
    assert killed[0] not in pool.pids
    assert [verdict.correct for verdict in verdicts] == [True] * len(items)
    assert len(pool.pids) == 2


def test_a_job_that_kills_its_worker_twice_is_judged_wrong(pool: Pool):
    verdicts = []
    caller = threading.Thread(target=lambda: verdicts.extend(pool.grade([SLOW, algebra(7)])))
    caller.start()
    for attempt in (1, 2):

        def victim(attempt: int = attempt):
            on_it = (w for w in list(pool._workers) if w.job and w.job.key[0] == SLOW[0] and w.job.attempts == attempt)
            return next(on_it, None)

        wait_for(lambda: victim() is not None)
        victim().process.send_signal(signal.SIGKILL)
    caller.join(timeout=60)
    assert [verdict.correct for verdict in verdicts] == [False, True]
    assert verdicts[0].reason == "the grading worker died on it 2 times"


def test_a_worker_that_died_between_batches_is_replaced(pool: Pool):
    pid = pool.pids[0]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not running(pid))
    assert [verdict.correct for verdict in pool.grade([algebra(8), algebra(9)])] == [True, True]
    assert len(pool.pids) == 2
    assert pid not in pool.pids


def test_workers_that_cannot_start_are_an_error_that_says_so():
    pool = Pool(workers=1, memory_bytes=1 << 20)
    with pytest.raises(RuntimeError, match=r"no grading worker can be started .*memory_bytes = 1048576"):
        pool.grade([algebra(9)])
    assert pool.pids == []


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="reads /proc, which only Linux has")
def test_workers_hold_their_memory_limit(pool: Pool):
    (line,) = [
        line for line in Path(f"/proc/{pool.pids[0]}/limits").read_text().splitlines() if "Max address space" in line
    ]
    assert line.split()[3:5] == [str(pool.memory_bytes)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"), [({"workers": 0}, "workers = 0"), ({"timeout_s": 0}, "timeout_s = 0")]
)
def test_a_bad_pool_is_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Pool(**arguments)


# -- threads, processes, ranks


def test_any_thread_may_grade(pool: Pool):
    results: dict[int, list[bool]] = {}

    def work(k: int) -> None:
        items = [algebra(1000 + 10 * k + n) for n in range(5)] + [("x", rf"\boxed{{x+{k}}}")]
        results[k] = [verdict.correct for verdict in pool.grade(items)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {k: [True] * 5 + [False] for k in range(1, 7)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_makes_its_own_pool():
    parent = default_pool()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if default_pool() is not parent else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert default_pool() is parent


def test_ranks_of_a_machine_share_its_cpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    assert Pool().size == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Pool().size == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert Pool().size == 1


CALLER = """
import sys, time
from parallel_r1.reward.grading import default_pool
default_pool().size = 1
assert default_pool().grade([("x+1", "\\\\boxed{1+x}")])[0].correct
print(default_pool().pids[0], flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["leave", "stay"])
def test_no_worker_outlives_its_parent(end: str):
    caller = subprocess.Popen([sys.executable, "-c", CALLER, end], stdout=subprocess.PIPE, text=True)
    pid = int(caller.stdout.readline())
    if end == "stay":
        caller.kill()  # no chance to close anything
    caller.wait(timeout=30)
    caller.stdout.close()
    wait_for(lambda: not running(pid))


# -- hostile text

EVIL = [
    r"9^{9^{9^9}}", "9^9^9^9", r"2^{10^{9}}", "(10^6)!", "((10^6)!)!", r"\sqrt{9^{9^9}}", r"x+9^{9^{9^9}}", r"x^{10^9}",
    r"(x+1)^{10^6}", r"\sum_{n=1}^{10^9} n", r"\prod_{n=1}^{10^7} n", r"\sin(10^{10^{10}})", r"\sin(9^{9^9})",
    "(" * 500, "(" * 500 + "1" + ")" * 500, "{" * 500 + "1" + "}" * 500, r"\frac{1}{" * 100 + "1" + "}" * 100,
    r"\sqrt{" * 200 + "2" + "}" * 200, "\x00" * 100, "\u202e", "__import__('os').system('true')",
    "().__class__.__bases__", "lambda: 0", r"\begin{pmatrix}" * 50,
    r"\begin{pmatrix}" + "1&" * 500 + r"1\end{pmatrix}", "1," * 900, "x," * 900,
    r"\pm" * 100, "-" * 999 + "1", "1" + "+1" * 600, "1e999999999", "1e-99999999", r"0.\overline{" + "1" * 900 + "}",
    r"\binom{10^9}{10^8}", r"\log_{0}{0}", r"\frac{0}{0}", r"\frac{1}{0}", r"\infty-\infty", r"\tan\frac{\pi}{2}",
    "x" * 1500, r"\left" * 300, r"\text{" * 200, r"\\" * 900, "$" * 1000, "%" * 500, "^" * 500, "_" * 500, "&" * 500,
    "=" * 500, "<" * 500, r"\cup" * 300, "[1,2]" + r"\cup[1,2]" * 150, "é" * 500, "🎉" * 100, "\ud800",
    r"e^{e^{e^{e^{10}}}}", r"i^{i^{i^i}}", "5" + "!" * 20, "3!!!!", r"\sqrt[1000000]{x}", "1^" * 900 + "1",
    r"\$" * 900 + "1", "Rs" * 700, "1 " * 900, "1.1" * 600, "a.m." * 400, "B)" * 700,
]  # fmt: skip
MEGABYTE = ["{", "}", "\\boxed{", "<think>", "$", "Final Answer: ", "Answer: 7\n", "\n", " ", "the answer is ", "\\",
            "answer to ", "\x00", "\\[ ", "$7 ", "<Parallel>"]  # fmt: skip


def megabyte(text: str) -> str:
    return (text * (1_000_000 // len(text) + 1))[:1_000_000]


def test_two_hundred_hostile_responses_cost_bounded_time(impatient: Pool):
    items = [("5", rf"\boxed{{{text}}}") for text in EVIL]
    items += [(r"\sqrt{2}", f"Final Answer: {text}") for text in EVIL]
    items += [("x+1", f"The answer is ${text}$") for text in EVIL]
    items += [("5", megabyte(text)) for text in MEGABYTE]
    assert len(items) >= 200
    pool = impatient
    start = time.monotonic()
    verdicts = pool.grade(items)
    assert time.monotonic() - start < 120.0
    assert [(item[1][:40], v.reason[:60]) for item, v in zip(items, verdicts, strict=True) if v.correct] == []
    assert pool.grade([algebra(31), algebra(32)]) == pool.grade([algebra(31), algebra(32)])
    assert all(map(running, pool.pids))


def test_extraction_is_linear_in_hostile_text():
    for text in [*MEGABYTE, "answer" + " " * 50_000, "so the ", "- ", "| ", "**", "# "]:
        start = time.process_time()
        grade([("5", megabyte(text))])
        assert time.process_time() - start < 1.0, text[:20]


PIECES = [answer for golds in BOXED.values() for right, wrong in golds.values() for answer in (*right, *wrong)]
NOISE = st.sampled_from(
    ["{", "}", "\\", "$", "\\boxed{", "\\frac", "^", "_", "(", ")", "\x00", "\u202e", "<think>", "</think>", "<Path>",
     "</Parallel>", "Final Answer:", "\n", ",", " or ", "\\text{", "\\begin{pmatrix}", "&", "\\\\", "=", "<", "%", "🎉"]
)  # fmt: skip


@st.composite
def mutated(draw) -> str:
    """A response made of a real answer, cut and spliced with noise, now and then blown up to a megabyte."""
    answer = draw(st.sampled_from(PIECES))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(answer)))
        drop = draw(st.integers(0, 3))
        answer = answer[:at] + draw(st.one_of(NOISE, st.text(max_size=3))) + answer[at + drop :]
    frame = draw(
        st.sampled_from([r"\boxed{%s}", "Final Answer: %s", "The answer is $%s$.", "%s", r"$$\boxed{%s", "#### %s"])
    )
    text = frame.replace("%s", answer)
    blow_up = draw(st.integers(0, 39))
    return draw(NOISE) * (1_000_000 // 4) + text if blow_up == 0 else text * 20_000 if blow_up == 1 else text


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from([*BOXED["expressions"], "5", "1,2", "Yes"]), mutated()),
        min_size=50,
        max_size=50,
    )
)
def test_a_thousand_mutated_responses_neither_crash_nor_hang(pool: Pool, items: list[tuple[str, str]]):
    pool.timeout_s = 1.5
    start = time.monotonic()
    verdicts = pool.grade(items)
    assert len(verdicts) == len(items)
    assert time.monotonic() - start < 60.0
    assert all(map(running, pool.pids))
    pool.timeout_s = 30.0


def test_the_protocol_survives_what_json_cannot_say(pool: Pool):
    assert json.loads(json.dumps(["\ud800"])) == ["\ud800"]
    assert not pool.grade([("x+1", "\\boxed{x+\ud800}")])[0].correct
    assert grading.MAX_ATTEMPTS == 2
