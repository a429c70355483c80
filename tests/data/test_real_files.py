"""Every real file through its adapter, with the counts measured on it. Skipped where the files are not there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from parallel_r1.data.datamodules import GSM8K, MATH, Benchmark, DAPOMath, ParallelGSM8K, SourceDataModule
from parallel_r1.data.reading import read_rows
from parallel_r1.data.sources import Overlap, Report, contamination, parallel_gsm8k
from parallel_r1.reward.grading import grade
from parallel_r1.structure import grammar
from parallel_r1.traces.selection import Rules, fault, select
from parallel_r1.traces.store import Candidate

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the public data files in ../shared/data")

BENCHMARKS = {"aime24": 30, "aime25": 30, "amc23": 40, "math300": 316}


@pytest.fixture(scope="module")
def dapo() -> DAPOMath:
    return DAPOMath(path=str(DATA / "dapo_math_17k"), val_size=0)


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    return Benchmark({tier: str(DATA / "benchmarks" / f"{tier}.jsonl") for tier in BENCHMARKS})


def report_of(data: SourceDataModule, split: str) -> Report:
    data.split(split)
    report = data.reports[-1]
    others = report.merged + report.contradicting + report.too_long + sum(report.rejected.values())
    assert report.rows == report.kept + others
    return report


def test_gsm8k() -> None:
    data = GSM8K(path=str(DATA / "gsm8k"), val_size=0)
    for split, rows in (("train", 7473), ("test", 1319)):
        report = report_of(data, split)
        assert (report.rows, report.kept) == (rows, rows)
        assert all(problem.answer.lstrip("-").isdigit() for problem in data.split(split))
    assert contamination(data.split("train"), data.split("test")) == {"gsm8k": Overlap()}


def test_dapo(dapo: DAPOMath) -> None:
    report = report_of(dapo, "train")
    assert (report.rows, report.distinct) == (17917, 17228)
    # 60 of the distinct texts differ from another one in white space only; 20 problems have rows that disagree.
    assert (report.merged, report.contradictions, report.contradicting) == (726, 20, 43)
    assert report.kept == 17228 - 60 - 20
    assert not any("Answer: \\boxed{<" in problem.question for problem in dapo.split("train"))


def test_math() -> None:
    data = MATH(path=str(DATA / "math"), val_size=0)
    report = report_of(data, "train")
    assert (report.rows, report.kept, report.merged, report.contradictions) == (7500, 7497, 1, 0)
    assert report.rejected == {"an empty box for an answer": 2}
    assert Counter(p.meta["level"] for p in data.split("train")) == {
        5: 2301,
        4: 1690,
        3: 1592,
        2: 1348,
        1: 564,
        None: 2,
    }
    assert report_of(data, "test").kept == 5000
    # The `answer` column of these files is cut at the first brace in 165 rows; the gold must not be.
    assert all(p.answer.count("{") == p.answer.count("}") for split in ("train", "test") for p in data.split(split))
    assert contamination(data.split("train"), data.split("test")) == {"math": Overlap(1, 6)}
    hard = MATH(path=str(DATA / "math"), levels=[5], subjects=["algebra"], val_size=0)
    assert report_of(hard, "train").kept == 435


def test_parallel_gsm8k() -> None:
    data = ParallelGSM8K(path=str(DATA / "parallel_gsm8k"), val_size=0)
    report = report_of(data, "train")
    assert (report.rows, report.kept) == (341, 338)
    assert report.rejected == {
        "not well formed: text between paths": 1,
        "not well formed: a block without a summary right after it": 1,
        "not well formed: a summary is not closed": 1,
    }
    blocks = Counter(len(grammar.parse(p.demonstration or "").blocks) for p in data.split("train"))
    assert blocks == {0: 3, 1: 259, 2: 58, 3: 12, 4: 6}


def test_each_public_trace_is_judged_and_the_bad_ones_are_listed() -> None:
    """All 341 through the rules of the trace pipeline, the verifier included: 338 are kept."""
    rows = list(read_rows(str(DATA / "parallel_gsm8k"), "train"))
    problems = [parallel_gsm8k(row) for row in rows]
    traces = {p.id: [Candidate(p.id, 0, p.demonstration or "", True)] for p in problems}
    assert len(traces) == 341
    kept = {p.id for p, _ in select(problems, traces, Rules(blocks=0), grade).kept}
    reasons = {
        row.number: fault(p, p.demonstration or "", True, True, blocks=1) for row, p in zip(rows, problems, strict=True)
    }
    bad = {number: reason for number, reason in reasons.items() if reason not in (None, "no block")}
    assert bad == {
        89: "not well formed: text between paths",
        126: "not well formed: a block without a summary right after it",
        328: "not well formed: a summary is not closed",
    }
    assert {row.number for row, p in zip(rows, problems, strict=True) if p.id not in kept} == set(bad)
    assert [number for number, reason in reasons.items() if reason == "no block"] == [65, 96, 279]


def test_traces_hold_the_response_alone() -> None:
    """One trace of 341 repeats its problem before the response; the others begin with the response."""
    rows = list(read_rows(str(DATA / "parallel_gsm8k"), "train"))
    repeated = [row.number for row in rows if row.values["text"].startswith(row.values["problem"])]
    assert repeated == [1]
    for row in rows:
        problem = parallel_gsm8k(row)
        assert problem.demonstration
        assert problem.question not in problem.demonstration
        assert row.values["text"].endswith(problem.demonstration)


def test_benchmarks(benchmark: Benchmark) -> None:
    assert Counter(problem.tier for problem in benchmark.split("test")) == BENCHMARKS
    assert all(report.rows == report.kept for report in benchmark.reports)


def test_contamination_of_the_benchmarks(dapo: DAPOMath, benchmark: Benchmark) -> None:
    found = contamination(dapo.split("train"), benchmark.split("test"))
    assert found == {"aime24": Overlap(), "aime25": Overlap(), "amc23": Overlap(5, 3), "math300": Overlap(5, 4)}
    math = MATH(path=str(DATA / "math"), val_size=0)
    assert contamination(math.split("train"), benchmark.split("test"))["math300"] == Overlap()
    assert contamination(math.split("test"), benchmark.split("test"))["math300"] == Overlap(290, 0)
